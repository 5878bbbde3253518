"""What the coordinator tells a monitoring system, and whether it is well: from its books, folders and log."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from coordinator.edges.home import Home
from coordinator.edges.sessions import Sessions
from coordinator.edges.uploads import KEEP_FREE
from policies.gauges import Refusals, proposals_open, spending
from policies.store import LedgerStopped, Store
from protos.expiry import days_left, end_of
from protos.metrics import OF_LOG, Metric, Page, Samples, capped, logged
from protos.tally import PROCESS, Tally

_BUDGET: Final = ("site", "unit", "relation", "delta")
CATALOGUE: Final = (
    Metric("lazaret_epsilon_limit", "The guarantee: epsilon that a site's releases may ever reach.", _BUDGET),
    Metric("lazaret_epsilon_spent", "Of the limit, what is spent. The guarantee is the limit.", _BUDGET),
    Metric("lazaret_epsilon_held", "Of the limit, what open grants would add if all were spent.", _BUDGET),
    Metric("lazaret_epsilon_left", "Of the limit, what may still be granted.", _BUDGET),
    Metric("lazaret_k_releases_limit", "k-anonymous releases that one patient may be in, ever.", ("site", "unit")),
    Metric("lazaret_k_releases_spent", "k-anonymous releases charged to every patient so far.", ("site", "unit")),
    Metric("lazaret_k_releases_held", "k-anonymous releases that open grants hold.", ("site", "unit")),
    Metric("lazaret_budget_left_ratio", "What may still be granted, of the limit.", ("site", "kind")),
    Metric("lazaret_refusals_total", "Refused since the start, by rule.", ("stage", "rule"), "counter"),
    Metric("lazaret_ledger_entries", "Entries of the ledger."),
    Metric("lazaret_ledger_epoch", "1, and one more after every restore."),
    Metric("lazaret_ledger_writable", "0: a write failed, nothing more is written, the process ends."),
    Metric("lazaret_ledger_awaited_sites", "After a restore: sites still to show receipts. Nothing is granted."),
    Metric("lazaret_witness_lag_entries", "Entries since the head that a site has cosigned last.", ("site",)),
    Metric("lazaret_approvals_open", "Proposals that somebody has signed and that are not in force."),
    Metric("lazaret_grants_held", "Grants that are open: their price is held."),
    Metric("lazaret_releases_admitted", "Releases that the ledger admits, by mechanism.", ("mechanism",)),
    Metric("lazaret_sites_enrolled", "Sites that are enrolled and not barred."),
    Metric("lazaret_site_online", "1: the site's session is open.", ("site",)),
    Metric("lazaret_runs", "Federated runs by state.", ("state",)),
    Metric("lazaret_rounds_closed", "Closed rounds of all runs."),
    Metric("lazaret_uploads_open", "Artifacts on their way in."),
    Metric("lazaret_uploads_ready", "Artifacts that are whole and wait for their verdict."),
    *OF_LOG,
    Metric("lazaret_disk_free_bytes", "Free on the file system of the home directory."),
    Metric("lazaret_disk_size_bytes", "Size of that file system."),
    Metric("lazaret_disk_watermark_bytes", "Below so many free bytes uploads are refused."),
    Metric("lazaret_certificate_days_left", "Days until a certificate ends.", ("which", "site")),
)  # fmt: skip
_LEAST: Final = 64 << 20  # bytes without which the next commit may fail
_STATES: Final = ("open", "stopped", "finished", "failed")


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """What is looked at."""

    home: Home
    store: Store
    sessions: Sessions
    runs: Path  # the folder of runs
    staging: Path  # of uploads
    now: Callable[[], dt.datetime]
    tally: Tally = PROCESS


def metrics(watched: Watched) -> Page:
    """The page for Prometheus, as a callable."""
    refusals, ended = Refusals(watched.store), dict[str, str]()
    sources = {
        "writable": lambda told: told.put("lazaret_ledger_writable", 0 if watched.store.stopped else 1),
        "budgets": lambda told: _budgets(watched, told),
        "ledger": lambda told: _ledger(watched, told),
        "refusals": lambda told: _refusals(refusals, told),
        "witnesses": lambda told: _witnesses(watched, told),
        "sites": lambda told: _sites(watched, told),
        "runs": lambda told: _runs(watched.runs, ended, told),
        "uploads": lambda told: _uploads(watched.staging, told),
        "log": lambda told: logged(watched.tally, told),
        "disk": lambda told: _disk(watched.home.root, told),
        "certificates": lambda told: _certificates(watched, told),
    }
    return Page("coordinator", version("lazaret"), CATALOGUE, sources)


def _budgets(watched: Watched, told: Samples) -> None:
    with watched.store.exclusive() as state:
        accounts = list(spending(state))
    for one in accounts:
        if one.kind == "rdp":
            labels = {"site": one.site, "unit": one.unit, "relation": one.relation, "delta": one.delta}
            told.put("lazaret_epsilon_limit", one.limit, **labels)
            told.put("lazaret_epsilon_spent", one.spent, **labels)
            told.put("lazaret_epsilon_held", one.held, **labels)
            told.put("lazaret_epsilon_left", one.left, **labels)
        else:  # no epsilon at all: it has none, which is not zero (P4)
            told.put("lazaret_k_releases_limit", one.limit, site=one.site, unit=one.unit)
            told.put("lazaret_k_releases_spent", one.spent, site=one.site, unit=one.unit)
            told.put("lazaret_k_releases_held", one.held, site=one.site, unit=one.unit)
        told.put(
            "lazaret_budget_left_ratio", one.left / one.limit if one.limit > 0 else 0, site=one.site, kind=one.kind
        )


def _ledger(watched: Watched, told: Samples) -> None:
    with watched.store.exclusive() as state:
        told.put("lazaret_ledger_entries", state.size)
        told.put("lazaret_ledger_epoch", state.epoch)
        told.put("lazaret_ledger_awaited_sites", len(state.waiting))
        told.put("lazaret_approvals_open", proposals_open(state))
        told.put("lazaret_rounds_closed", sum(state.rounds.values()))
        grants, releases = list(state.grants.values()), list(state.releases.values())
    # counted after the lock was let go: a large ledger is not held up by who looks at it
    told.put("lazaret_grants_held", sum(1 for grant in grants if grant.state == "held"))
    admitted = Counter(release.mechanism for release in releases)
    for mechanism, count in admitted.items():
        told.put("lazaret_releases_admitted", count, mechanism=mechanism)


def _refusals(refusals: Refusals, told: Samples) -> None:
    counts = refusals.counts()
    names = {f"{stage}\n{rule}": count for (stage, rule), count in counts.items()}
    for name, count in capped(names).items():
        stage, _, rule = name.partition("\n")
        told.put("lazaret_refusals_total", count, stage=stage, rule=rule)


def _witnesses(watched: Watched, told: Samples) -> None:
    size = watched.store.state.size
    for note in watched.home.witnesses.glob("*.note"):
        seen = int(note.read_text().split("\n")[1])  # a C2SP checkpoint: origin, size, root
        told.put("lazaret_witness_lag_entries", max(0, size - seen), site=note.stem)


def _sites(watched: Watched, told: Samples) -> None:
    with watched.store.exclusive() as state:
        enrolled = sorted(set(state.sites) - state.barred)
    online = set(watched.sessions.connected())
    told.put("lazaret_sites_enrolled", len(enrolled))
    for site in enrolled:
        told.put("lazaret_site_online", float(site in online), site=site)


def _runs(root: Path, ended: dict[str, str], told: Samples) -> None:
    """By what lies in their folders; how a run has ended is read once."""
    found = Counter(dict.fromkeys(_STATES, 0))
    for job in root.glob("*/job.json"):
        run, end = job.parent.name, job.parent / "end.json"
        if run not in ended and end.exists():
            ended[run] = str(json.loads(end.read_text())["state"])
        state = ended.get(run) or ("stopped" if (job.parent / "stop").exists() else "open")
        found[state if state in _STATES else "failed"] += 1
    for state, count in found.items():
        told.put("lazaret_runs", count, state=state)


def _uploads(root: Path, told: Samples) -> None:
    told.put("lazaret_uploads_open", sum(1 for _ in root.glob("open/*/*/manifest")))
    told.put("lazaret_uploads_ready", sum(1 for _ in root.glob("ready/*/*")))


def _disk(root: Path, told: Samples) -> None:
    disk = os.statvfs(root)
    told.put("lazaret_disk_free_bytes", disk.f_bavail * disk.f_frsize)
    told.put("lazaret_disk_size_bytes", disk.f_blocks * disk.f_frsize)
    told.put("lazaret_disk_watermark_bytes", KEEP_FREE)


def _certificates(watched: Watched, told: Samples) -> None:
    now, keys = watched.now(), watched.home.keys
    for which in ("root", "intermediate", "tls", "console"):
        end = end_of(keys / f"{which}.crt")
        if end is not None:
            told.put("lazaret_certificate_days_left", days_left(end, now), which=which, site="")
    newest: dict[str, int] = {}
    with watched.store.exclusive() as state:
        known, revoked, barred = list(state.issued.items()), set(state.revoked), set(state.barred)
    for number, issued in known:
        if number not in revoked and issued.site not in barred:
            newest[issued.site] = max(newest.get(issued.site, 0), issued.not_after)
    for site, seconds in newest.items():
        end = dt.datetime.fromtimestamp(seconds, dt.UTC)
        told.put("lazaret_certificate_days_left", days_left(end, now), which="site", site=site)


def live(watched: Watched) -> Callable[[], str | None]:
    """Is it alive? The ledger's lock can be had, and the ledger was not stopped: else only a restart helps."""

    def wrong() -> str | None:
        try:
            with watched.store.exclusive():
                return None
        except LedgerStopped:
            return "the ledger could not be written: a restart replays it"

    return wrong


def ready(watched: Watched) -> Callable[[], str | None]:
    """Can it do its work now? What is wrong otherwise, without a path or a name."""
    alive = live(watched)

    def wrong() -> str | None:
        fault = alive()
        if fault is not None:
            return fault
        disk = os.statvfs(watched.home.root)
        if not disk.f_bavail * disk.f_frsize > _LEAST:
            return "the disk is full: nothing can be written down, so nothing is granted"
        end = end_of(watched.home.keys / "tls.crt")
        if end is None or not watched.now() < end:
            return "the service's certificate has ended: renew the intermediate CA (renew-ca)"
        return None

    return wrong
