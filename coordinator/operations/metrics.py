"""The coordinator's metrics and health for a monitoring system: from its ledger, folders and log."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from coordinator.federation.events import SignOfLife
from coordinator.gateway.notifications import NotificationStreams
from coordinator.operations.attendance import absent_sites
from coordinator.storage.directory import CoordinatorDirectory
from coordinator.storage.uploads import KEEP_FREE
from policies.ledger.budget_metrics import RefusalCounts, put_budgets, put_entries, store_fault
from policies.ledger.store import Store
from protos.identity.certificates import days_left, end_of
from protos.operations.event_counters import PROCESS, EventCounters
from protos.operations.metrics import OF_LOG, Metric, MetricsPage, Samples, disk_full, logged, put_disk, put_refusals

_BUDGET: Final = ("site", "unit", "relation", "delta")
CATALOGUE: Final = (
    Metric("lazaret_epsilon_limit", "Limit of epsilon for all releases of a site, ever.", _BUDGET),
    Metric("lazaret_epsilon_spent", "Spent part of the limit. The guarantee is the limit.", _BUDGET),
    Metric("lazaret_epsilon_held", "Part of the limit that open grants would add if all were spent.", _BUDGET),
    Metric("lazaret_epsilon_left", "Part of the limit that may still be granted.", _BUDGET),
    Metric("lazaret_k_releases_limit", "k-anonymous releases that one patient may be in, ever.", ("site", "unit")),
    Metric("lazaret_k_releases_spent", "k-anonymous releases charged to every patient so far.", ("site", "unit")),
    Metric("lazaret_k_releases_held", "k-anonymous releases that open grants hold.", ("site", "unit")),
    Metric("lazaret_budget_left_ratio", "Part of the limit that may still be granted.", ("site", "kind")),
    Metric("lazaret_refusals_total", "Refusals since the start, by rule.", ("stage", "rule"), "counter"),
    Metric("lazaret_ledger_entries", "Entries of the ledger."),
    Metric("lazaret_ledger_epoch", "1, and one more after every restore."),
    Metric("lazaret_ledger_writable", "0: a write failed; nothing more is written and the process ends."),
    Metric("lazaret_ledger_awaited_sites", "After a restore: sites still to show receipts. Nothing is granted."),
    Metric("lazaret_witness_lag_entries", "Entries since the last head that a site has cosigned.", ("site",)),
    Metric("lazaret_approvals_open", "Proposals with a signature that are not in force."),
    Metric("lazaret_grants_held", "Open grants: their budget is held."),
    Metric("lazaret_releases_admitted", "Releases that the ledger admits, by mechanism.", ("mechanism",)),
    Metric("lazaret_sites_enrolled", "Sites that are enrolled and not revoked."),
    Metric("lazaret_site_online", "1: the site's session is open.", ("site",)),
    Metric("lazaret_runs", "Federated runs by state.", ("state",)),
    Metric("lazaret_rounds_closed", "Closed rounds of all runs."),
    Metric("lazaret_uploads_open", "Artifacts that are being uploaded."),
    Metric("lazaret_uploads_ready", "Artifacts that are complete and wait for their verdict."),
    *OF_LOG,
    Metric("lazaret_disk_free_bytes", "Free bytes on the file system of the home directory."),
    Metric("lazaret_disk_size_bytes", "Size of that file system."),
    Metric("lazaret_disk_watermark_bytes", "Below this number of free bytes uploads are refused."),
    Metric("lazaret_certificate_days_left", "Days until a certificate ends.", ("which", "site")),
)  # fmt: skip
_STATES: Final = ("open", "stopped", "finished", "failed")


@dataclass(frozen=True, slots=True, eq=False)
class MonitoredCoordinator:
    """What is looked at."""

    home: CoordinatorDirectory
    store: Store
    sessions: NotificationStreams
    signs: Callable[[], Mapping[str, SignOfLife]]
    runs: Path  # the folder of runs
    staging: Path  # of uploads
    now: Callable[[], dt.datetime]
    tally: EventCounters = PROCESS


def metrics(watched: MonitoredCoordinator) -> MetricsPage:
    """The page for Prometheus, as a callable."""
    refusals, ended = RefusalCounts(watched.store), dict[str, str]()
    sources = {
        "writable": lambda told: told.put("lazaret_ledger_writable", 0 if watched.store.stopped else 1),
        "budgets": lambda told: _budgets(watched.store, told),
        "ledger": lambda told: _ledger(watched, told),
        "refusals": lambda told: put_refusals(refusals.counts(), told),
        "witnesses": lambda told: _witnesses(watched, told),
        "sites": lambda told: _sites(watched, told),
        "runs": lambda told: _runs(watched.runs, ended, told),
        "uploads": lambda told: _uploads(watched.staging, told),
        "log": lambda told: logged(watched.tally, told),
        "disk": lambda told: put_disk(watched.home.root, lambda _size: KEEP_FREE, told),
        "certificates": lambda told: _certificates(watched, told),
    }
    return MetricsPage("coordinator", version("lazaret"), CATALOGUE, sources)


def _budgets(store: Store, told: Samples) -> None:
    with store.exclusive() as state:
        put_budgets(state, told.put, by_site=True)


def _ledger(watched: MonitoredCoordinator, told: Samples) -> None:
    with watched.store.exclusive() as state:
        put_entries(state, told.put)
        told.put("lazaret_ledger_epoch", state.epoch)
        told.put("lazaret_ledger_awaited_sites", len(state.sites_awaited))
        told.put("lazaret_rounds_closed", sum(state.rounds.values()))
        grants, releases = list(state.grants.values()), list(state.releases.values())
    # counted after the lock was let go: a large ledger is not held up by who looks at it
    told.put("lazaret_grants_held", sum(1 for grant in grants if grant.state == "held"))
    admitted = Counter(release.mechanism for release in releases)
    for mechanism, count in admitted.items():
        told.put("lazaret_releases_admitted", count, mechanism=mechanism)


def _witnesses(watched: MonitoredCoordinator, told: Samples) -> None:
    size = watched.store.state.size
    for note in watched.home.witnesses.glob("*.note"):
        seen = int(note.read_text().split("\n")[1])  # a C2SP checkpoint: origin, size, root
        told.put("lazaret_witness_lag_entries", max(0, size - seen), site=note.stem)


def _sites(watched: MonitoredCoordinator, told: Samples) -> None:
    with watched.store.exclusive() as state:
        enrolled = sorted(set(state.sites) - state.revoked_sites)
    online = set(watched.sessions.connected())
    told.put("lazaret_sites_enrolled", len(enrolled))
    for site in enrolled:
        told.put("lazaret_site_online", float(site in online), site=site)


def joined(watched: MonitoredCoordinator) -> Callable[[], str | None]:
    """Is every enrolled hospital here? Who is not otherwise, since when and why."""

    def wrong() -> str | None:
        with watched.store.exclusive() as state:
            absent = absent_sites(state, watched.sessions.presence(), watched.signs(), watched.now())
        return "\n".join(one.words for one in absent) or None

    return wrong


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


def _certificates(watched: MonitoredCoordinator, told: Samples) -> None:
    now, keys = watched.now(), watched.home.keys
    for which in ("root", "intermediate", "tls", "console"):
        end = end_of(keys / f"{which}.crt")
        if end is not None:
            told.put("lazaret_certificate_days_left", days_left(end, now), which=which, site="")
    newest: dict[str, int] = {}
    with watched.store.exclusive() as state:
        known, revoked, barred = list(state.issued.items()), set(state.revoked), set(state.revoked_sites)
    for number, issued in known:
        if number not in revoked and issued.site not in barred:
            newest[issued.site] = max(newest.get(issued.site, 0), issued.not_after)
    for site, seconds in newest.items():
        end = dt.datetime.fromtimestamp(seconds, dt.UTC)
        told.put("lazaret_certificate_days_left", days_left(end, now), which="site", site=site)


def live(watched: MonitoredCoordinator) -> Callable[[], str | None]:
    """Is it alive? The ledger's lock can be had, and the ledger was not stopped: else only a restart helps."""
    return lambda: store_fault(
        watched.store, "the ledger could not be written: restart the coordinator, which replays it"
    )


def ready(watched: MonitoredCoordinator) -> Callable[[], str | None]:
    """Can it do its work now? What is wrong otherwise, without a path or a name."""
    alive = live(watched)

    def wrong() -> str | None:
        fault = alive()
        if fault is not None:
            return fault
        if disk_full(watched.home.root):
            return "the disk is full: nothing can be recorded, so nothing is granted"
        end = end_of(watched.home.keys / "tls.crt")
        if end is None or not watched.now() < end:
            return "the service's certificate has expired: renew the intermediate CA (renew-ca)"
        return None

    return wrong
