"""What a site tells its hospital's monitoring system, and whether it is well. It names no patient and counts none."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from agent.deidentify.reasons import REASONS
from agent.edges import projects
from agent.edges.home import Home
from agent.edges.ingestion import Ingestion
from agent.edges.listener import Listener
from policies.gauges import Refusals, Spending, proposals_open, spending
from policies.store import LedgerStopped, Store
from protos.expiry import days_left, end_of
from protos.metrics import OF_LOG, Metric, Page, Samples, capped, logged
from protos.tally import PROCESS, Tally

_BUDGET: Final = ("unit", "relation", "delta")
CATALOGUE: Final = (
    Metric("lazaret_epsilon_limit", "The guarantee: epsilon that this site's releases may ever reach.", _BUDGET),
    Metric("lazaret_epsilon_spent", "Of the limit, what is spent. The guarantee is the limit.", _BUDGET),
    Metric("lazaret_epsilon_held", "Of the limit, what open grants would add if all were spent.", _BUDGET),
    Metric("lazaret_epsilon_left", "Of the limit, what may still be granted.", _BUDGET),
    Metric("lazaret_k_releases_limit", "k-anonymous releases that one patient may be in, ever.", ("unit",)),
    Metric("lazaret_k_releases_spent", "k-anonymous releases charged to every patient so far.", ("unit",)),
    Metric("lazaret_k_releases_held", "k-anonymous releases that open grants hold.", ("unit",)),
    Metric("lazaret_budget_left_ratio", "What may still be granted, of the limit.", ("kind",)),
    Metric("lazaret_refusals_total", "Refused since the start, by rule.", ("stage", "rule"), "counter"),
    Metric("lazaret_ledger_entries", "Entries of the site's ledger."),
    Metric("lazaret_ledger_writable", "0: a write failed, nothing more is written, the process ends."),
    Metric("lazaret_approvals_open", "Proposals that somebody has signed and that are not in force."),
    Metric("lazaret_grants_held", "Grants that are open: their price is held."),
    Metric("lazaret_queue_files", "Files that wait to be read, or that were refused.", ("queue", "project")),
    Metric("lazaret_queue_oldest_seconds", "For how long the oldest file waits to be read.", ("project",)),
    Metric("lazaret_quarantine_files", "Refused files by reason.", ("project", "reason")),
    Metric("lazaret_listening", "1: the C-STORE receiver listens."),
    Metric("lazaret_dimse_events_total", "Of the C-STORE receiver since the start.", ("event",), "counter"),
    Metric("lazaret_pacs_errors_total", "Failed pulls from an archive, since the start.", ("archive",), "counter"),
    Metric("lazaret_pacs_last_pull_seconds", "Since the last pull that went well; none yet: left out.", ("archive",)),
    Metric("lazaret_link_online", "1: the link to the coordinator is up."),
    *OF_LOG,
    Metric("lazaret_disk_free_bytes", "Free on the file system of the home directory."),
    Metric("lazaret_disk_size_bytes", "Size of that file system."),
    Metric("lazaret_disk_watermark_bytes", "Below so many free bytes the receivers refuse images."),
    Metric("lazaret_certificate_days_left", "Days until a certificate ends.", ("which",)),
)  # fmt: skip
_LEAST: Final = 64 << 20  # bytes without which the next commit may fail
_USUAL: Final = 2 << 30  # bytes; a watermark where no receiver says another


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """What is looked at."""

    home: Home
    ingestion: Ingestion
    now: Callable[[], dt.datetime]
    store: Store | None = None  # None: the ledger is not open; nothing is told of it then
    listener: Callable[[], Listener | None] = lambda: None  # of the reception, as it is now
    tally: Tally = PROCESS


def metrics(watched: Watched) -> Page:
    """The page for Prometheus, as a callable."""
    sources = {
        "queues": lambda told: _queues(watched.home, told),
        "listener": lambda told: _listener(watched, told),
        "archives": lambda told: _archives(watched, told),
        "log": lambda told: logged(watched.tally, told),
        "disk": lambda told: _disk(watched, told),
        "certificates": lambda told: _certificates(watched, told),
    }
    store = watched.store
    if store is not None:
        refusals = Refusals(store)
        sources |= {
            "writable": lambda told: told.put("lazaret_ledger_writable", 0 if store.stopped else 1),
            "budgets": lambda told: _budgets(store, told),
            "ledger": lambda told: _ledger(store, told),
            "refusals": lambda told: _refusals(refusals, told),
        }
    return Page("agent", version("lazaret"), CATALOGUE, sources)


def _budgets(store: Store, told: Samples) -> None:
    with store.exclusive() as state:
        accounts = list(spending(state))
    for one in accounts:
        _budget(one, told)


def _budget(one: Spending, told: Samples) -> None:
    if one.kind == "rdp":
        labels = {"unit": one.unit, "relation": one.relation, "delta": one.delta}
        told.put("lazaret_epsilon_limit", one.limit, **labels)
        told.put("lazaret_epsilon_spent", one.spent, **labels)
        told.put("lazaret_epsilon_held", one.held, **labels)
        told.put("lazaret_epsilon_left", one.left, **labels)
    else:  # no epsilon at all: it has none, which is not zero (P4)
        told.put("lazaret_k_releases_limit", one.limit, unit=one.unit)
        told.put("lazaret_k_releases_spent", one.spent, unit=one.unit)
        told.put("lazaret_k_releases_held", one.held, unit=one.unit)
    told.put("lazaret_budget_left_ratio", one.left / one.limit if one.limit > 0 else 0, kind=one.kind)


def _ledger(store: Store, told: Samples) -> None:
    with store.exclusive() as state:
        told.put("lazaret_ledger_entries", state.size)
        told.put("lazaret_approvals_open", proposals_open(state))
        grants = list(state.grants.values())
    told.put("lazaret_grants_held", sum(1 for grant in grants if grant.state == "held"))


def _refusals(refusals: Refusals, told: Samples) -> None:
    counts = refusals.counts()
    names = {f"{stage}\n{rule}": count for (stage, rule), count in counts.items()}
    for name, count in capped(names).items():
        stage, _, rule = name.partition("\n")
        told.put("lazaret_refusals_total", count, stage=stage, rule=rule)


def _queues(home: Home, told: Samples) -> None:
    """By the names of files alone: no key is needed, and nothing is opened."""
    for project in projects.names(home):
        inbox, quarantine = projects.rooms(home, project)
        born = list(_born(inbox))
        told.put("lazaret_queue_files", len(born), queue="inbox", project=project)
        told.put("lazaret_queue_oldest_seconds", max(0.0, time.time() - min(born)) if born else 0, project=project)
        reasons = Counter(_reason(name) for name in _names(quarantine))
        del reasons[""]
        told.put("lazaret_queue_files", sum(reasons.values()), queue="quarantine", project=project)
        for reason, count in reasons.items():
            told.put("lazaret_quarantine_files", count, project=project, reason=reason)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _reason(name: str) -> str:
    """Of a refused file, NAME.REASON.ATTEMPTS; "": it is none."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[1] in REASONS else ""


def _born(folder: Path) -> Iterator[float]:
    """When each waiting file came, seconds since 1970."""
    try:
        with os.scandir(folder) as files:
            for file in files:
                try:
                    if not file.name.startswith("."):
                        yield file.stat(follow_symlinks=False).st_mtime
                except FileNotFoundError:  # it was let in meanwhile
                    continue
    except FileNotFoundError:
        return


def _listener(watched: Watched, told: Samples) -> None:
    listener = watched.listener()
    if watched.ingestion.listener is not None:
        told.put("lazaret_listening", float(listener is not None and bool(listener.pids())))
    for event, count in (listener.counts() if listener is not None else {}).items():
        told.put("lazaret_dimse_events_total", count, event=event)


def _archives(watched: Watched, told: Samples) -> None:
    failed = Counter[str]()
    for heard, count in watched.tally.counts().items():
        if heard.event == "pull_failed":
            failed[heard.where] += count
    for name in (*watched.ingestion.pacs, *watched.ingestion.webs):
        told.put("lazaret_pacs_errors_total", failed[name], archive=name)
        last = watched.tally.last("pulled", name)
        if last is not None:
            told.put("lazaret_pacs_last_pull_seconds", max(0.0, time.time() - last[0]), archive=name)
    link = watched.tally.last("link")
    if link is not None:
        told.put("lazaret_link_online", float(link[1] == "online"))


def watermark(ingestion: Ingestion, size: int) -> int:
    """Below so many free bytes of a file system of so many, images are refused."""
    listener = ingestion.listener
    if listener is None:
        return _USUAL
    return max(listener.least_free_bytes, int((1 - listener.full_at) * size))


def _disk(watched: Watched, told: Samples) -> None:
    disk = os.statvfs(watched.home.root)
    size = disk.f_blocks * disk.f_frsize
    told.put("lazaret_disk_free_bytes", disk.f_bavail * disk.f_frsize)
    told.put("lazaret_disk_size_bytes", size)
    told.put("lazaret_disk_watermark_bytes", watermark(watched.ingestion, size))


def certificates(home: Home, ingestion: Ingestion) -> dict[str, Path]:
    """The site's certificates that exist, by what they are for."""
    listener, stow = ingestion.listener, ingestion.stow
    found = {
        "tls": home.keys / "tls.pem",
        "root": home.keys / "root.crt",
        "console": home.keys / "console.crt",
        "listener": listener.tls.certificate if listener is not None and listener.tls is not None else None,
        "stow": stow.certificate if stow is not None else None,
    }
    return {which: path for which, path in found.items() if path is not None and path.exists()}


def _certificates(watched: Watched, told: Samples) -> None:
    for which, path in certificates(watched.home, watched.ingestion).items():
        end = end_of(path)
        if end is not None:
            told.put("lazaret_certificate_days_left", days_left(end, watched.now()), which=which)


def live(watched: Watched) -> Callable[[], str | None]:
    """Is it alive? The ledger's lock can be had, and the ledger was not stopped: else only a restart helps."""

    def wrong() -> str | None:
        if watched.store is None:
            return None
        try:
            with watched.store.exclusive():
                return None
        except LedgerStopped:
            return "the site's ledger could not be written: a restart replays it"

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
            return "the disk is full: nothing can be written down, so nothing is taken in"
        listener = watched.listener()
        if watched.ingestion.listener is not None and not (listener is not None and listener.pids()):
            return "the C-STORE receiver does not listen"
        return None

    return wrong
