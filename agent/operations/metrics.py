"""The site's metrics and health for the hospital's monitoring. They name no patient and count none."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

from agent.deidentify.errors import REASONS
from agent.ingest.config import Ingestion
from agent.ingest.service import LISTENER, STOW
from agent.operations.connection import connection_fault
from agent.pacs.dimse.listener_process import Listener
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from policies.ledger.budget_metrics import RefusalCounts, put_budgets, put_entries, store_fault
from policies.ledger.store import Store
from protos.identity.certificates import days_left, end_of
from protos.operations.event_counters import PROCESS, EventCounters
from protos.operations.kept_process import ends_of
from protos.operations.metrics import OF_LOG, Metric, MetricsPage, Samples, disk_full, logged, put_disk, put_refusals

_BUDGET: Final = ("unit", "relation", "delta")
CATALOGUE: Final = (
    Metric("lazaret_epsilon_limit", "Limit of epsilon for all releases of this site, ever.", _BUDGET),
    Metric("lazaret_epsilon_spent", "Spent part of the limit. The guarantee is the limit.", _BUDGET),
    Metric("lazaret_epsilon_held", "Part of the limit that open grants would add if all were spent.", _BUDGET),
    Metric("lazaret_epsilon_left", "Part of the limit that may still be granted.", _BUDGET),
    Metric("lazaret_k_releases_limit", "k-anonymous releases that one patient may be in, ever.", ("unit",)),
    Metric("lazaret_k_releases_spent", "k-anonymous releases charged to every patient so far.", ("unit",)),
    Metric("lazaret_k_releases_held", "k-anonymous releases that open grants hold.", ("unit",)),
    Metric("lazaret_budget_left_ratio", "Part of the limit that may still be granted.", ("kind",)),
    Metric("lazaret_refusals_total", "Refusals since the start, by rule.", ("stage", "rule"), "counter"),
    Metric("lazaret_ledger_entries", "Entries of the site's ledger."),
    Metric("lazaret_ledger_writable", "0: a write failed; nothing more is written and the process ends."),
    Metric("lazaret_approvals_open", "Proposals with a signature that are not in force."),
    Metric("lazaret_grants_held", "Open grants: their budget is held."),
    Metric("lazaret_queue_files", "Files that are pending, or rejected.", ("queue", "project")),
    Metric("lazaret_queue_oldest_seconds", "Age of the oldest pending file.", ("project",)),
    Metric("lazaret_quarantine_files", "Rejected files by reason.", ("project", "reason")),
    Metric("lazaret_listening", "1: the C-STORE receiver listens."),
    Metric("lazaret_dimse_events_total", "Events of the C-STORE receiver since the start.", ("event",), "counter"),
    Metric("lazaret_pacs_errors_total", "Failed retrievals from an archive since start.", ("archive",), "counter"),
    Metric("lazaret_pacs_last_pull_seconds", "Since the last good retrieval; absent before it.", ("archive",)),
    Metric("lazaret_link_online", "1: the link to the coordinator is up."),
    Metric("lazaret_process_ends_total", "Ends of a process that was started again.", ("process",), "counter"),
    Metric("lazaret_jobs", "Jobs that are kept, by state.", ("state",)),
    Metric("lazaret_jobs_waiting_seconds", "Since the oldest queued job was queued; 0: none is."),
    Metric("lazaret_job_done_ratio", "Part of its stage that a running job has done; absent if unknown.", ("lane",)),
    Metric("lazaret_job_memory_bytes", "Resident memory of a running job.", ("lane",)),
    *OF_LOG,
    Metric("lazaret_disk_free_bytes", "Free bytes on the file system of the home directory."),
    Metric("lazaret_disk_size_bytes", "Size of that file system."),
    Metric("lazaret_disk_watermark_bytes", "Below this number of free bytes the receivers refuse images."),
    Metric("lazaret_certificate_days_left", "Days until a certificate ends.", ("which",)),
)  # fmt: skip
CONSOLE: Final = "console"
PROCESSES: Final = (LISTENER, STOW, CONSOLE)  # that the service keeps, as its log names them
_USUAL: Final = 2 << 30  # bytes; a watermark where no receiver says another


@dataclass(frozen=True, slots=True, eq=False)
class MonitoredSite:
    """What is looked at."""

    home: SiteDirectory
    ingestion: Ingestion
    now: Callable[[], dt.datetime]
    store: Store | None = None  # None: the ledger is not open; nothing is told of it then
    listener: Callable[[], Listener | None] = lambda: None  # of the reception, as it is now
    tally: EventCounters = PROCESS
    jobs: Callable[[Samples], None] | None = None  # of the service that runs them


def metrics(watched: MonitoredSite) -> MetricsPage:
    """The page for Prometheus, as a callable."""
    sources = {
        "queues": lambda told: _queues(watched.home, told),
        "listener": lambda told: _listener(watched, told),
        "archives": lambda told: _archives(watched, told),
        "processes": lambda told: _processes(watched.tally, told),
        "log": lambda told: logged(watched.tally, told),
        "disk": lambda told: put_disk(watched.home.root, partial(watermark, watched.ingestion), told),
        "certificates": lambda told: _certificates(watched, told),
    }
    if watched.jobs is not None:
        sources["jobs"] = watched.jobs
    store = watched.store
    if store is not None:
        refusals = RefusalCounts(store)
        sources |= {
            "writable": lambda told: told.put("lazaret_ledger_writable", 0 if store.stopped else 1),
            "budgets": lambda told: _budgets(store, told),
            "ledger": lambda told: _ledger(store, told),
            "refusals": lambda told: put_refusals(refusals.counts(), told),
        }
    return MetricsPage("agent", version("lazaret"), CATALOGUE, sources)


def _budgets(store: Store, told: Samples) -> None:
    with store.exclusive() as state:
        put_budgets(state, told.put, by_site=False)


def _ledger(store: Store, told: Samples) -> None:
    with store.exclusive() as state:
        put_entries(state, told.put)
        grants = list(state.grants.values())
    told.put("lazaret_grants_held", sum(1 for grant in grants if grant.state == "held"))


def _queues(home: SiteDirectory, told: Samples) -> None:
    """By the names of files alone: no key is needed, and nothing is opened."""
    for project in projects.names(home):
        inbox, quarantine = projects.project_folders(home, project)
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


def _listener(watched: MonitoredSite, told: Samples) -> None:
    listener = watched.listener()
    if watched.ingestion.listener is not None:
        told.put("lazaret_listening", float(listener is not None and bool(listener.pids())))
    for event, count in (listener.counts() if listener is not None else {}).items():
        told.put("lazaret_dimse_events_total", count, event=event)


def _processes(tally: EventCounters, told: Samples) -> None:
    for name in PROCESSES:
        told.put("lazaret_process_ends_total", ends_of(name, tally).count, process=name)


def _archives(watched: MonitoredSite, told: Samples) -> None:
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


def certificates(home: SiteDirectory, ingestion: Ingestion) -> dict[str, Path]:
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


def _certificates(watched: MonitoredSite, told: Samples) -> None:
    for which, path in certificates(watched.home, watched.ingestion).items():
        end = end_of(path)
        if end is not None:
            told.put("lazaret_certificate_days_left", days_left(end, watched.now()), which=which)


def live(watched: MonitoredSite) -> Callable[[], str | None]:
    """Is it alive? The ledger's lock can be had, and the ledger was not stopped: else only a restart helps."""
    store, said = watched.store, "the site's ledger could not be written: restart the agent, which replays it"
    return lambda: store_fault(store, said) if store is not None else None


def joined(watched: MonitoredSite) -> Callable[[], str | None]:
    """Does the coordinator answer this site's certificate? What is wrong otherwise, and since when."""
    return lambda: connection_fault(watched.tally)


def ready(watched: MonitoredSite) -> Callable[[], str | None]:
    """Can it do its work now? What is wrong otherwise, without a path or a name."""
    alive = live(watched)

    def wrong() -> str | None:
        fault = alive()
        if fault is not None:
            return fault
        if disk_full(watched.home.root):
            return "the disk is full: nothing can be recorded, so no image is accepted"
        listener = watched.listener()
        if watched.ingestion.listener is not None and not (listener is not None and listener.pids()):
            return "the C-STORE receiver does not listen"
        return None

    return wrong
