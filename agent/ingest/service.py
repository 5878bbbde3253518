"""The ingest service of ``serve``: listeners, watched folders, scheduled retrievals, and parsing.

Each pass ingests what has arrived. A fault of one source (a full disk, a missing share) is logged, and the next pass
tries again: files that were not stored stay where they were, and with a full disk the listeners refuse.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

from agent.errors import ParserError, SiteConfigError
from agent.event_log import log_end
from agent.ingest.context import open_ingest
from agent.ingest.folders import FolderWatcher
from agent.ingest.ocr import OcrMissingError
from agent.ingest.patient_lists import PatientListError
from agent.ingest.pending import PendingFile
from agent.ingest.pipeline import IngestReport
from agent.ingest.retrieval import FAULTS, RetrievalThread, scheduled
from agent.pacs.archive import ArchiveError
from agent.pacs.dicomweb.config import DicomWebError
from agent.pacs.dicomweb.stow_process import Stow
from agent.pacs.dimse.listener_process import Listener
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import SpoolError

# what a look may end with, in words for the operator that name no patient
FAULTS_SAID: Final = (
    PatientListError,
    SiteConfigError,
    OcrMissingError,
    ArchiveError,
    ParserError,
    SpoolError,
    VaultError,
    DicomWebError,
)
LISTENER: Final = "listener"  # the receivers' processes, as log, metrics and doctor name them
STOW: Final = "stow"
_TORN_S: Final = 600.0  # a half-written file so old is a killed process's; an `ingest` beside this one writes too
_TELL_S: Final = 60.0  # the listeners' counters go to the log as often as this, when they have changed


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time, as an argument."""

    now: Callable[[], dt.datetime] = dt.datetime.now
    monotonic: Callable[[], float] = time.monotonic


class IngestService:
    """Receives for one project until it is left."""

    def __init__(self, home: SiteDirectory, project: str, log: Any, clocks: Clocks | None = None) -> None:
        """Nothing listens yet."""
        self._home, self._project, self._log, self._clocks = home, project, log, clocks or Clocks()
        self._stack, self._stop = ExitStack(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="reception", daemon=True)
        self._pulling: dict[str, RetrievalThread] = {}
        self._sweeping: DefacingThread | None = None
        self._next_pull = self._told_at = 0.0
        self._told: dict[str, int] = {}
        self.listener: Listener | None = None
        self.stow: Stow | None = None

    def __enter__(self) -> Self:
        """Listen, and begin to read.

        Raises:
            SiteConfigError, OSError: a setting is not in order, or a port is taken; nothing listens then.
        """
        with ExitStack() as stack:
            self._way = stack.enter_context(open_ingest(self._home, self._project))
            self._way.inbox.sweep(time.time() - _TORN_S)
            settings, keys, demand = self._way.ingestion, self._way.room_key, self._home.settings().confinement
            if settings.listener is not None:
                ended = log_end(self._log, LISTENER)
                self.listener = stack.enter_context(
                    Listener(settings.listener, self._way.inbox.folder, keys, ended=ended, demand=demand)
                )
            if settings.stow is not None:
                ended = log_end(self._log, STOW)
                self.stow = stack.enter_context(Stow(settings.stow, self._way.inbox.folder, keys, demand, ended))
            self._intake = stack.enter_context(self._way.intake())
            if settings.faces is not None:
                settle = 60 * settings.faces.settle_minutes
                self._sweeping = DefacingThread(self._home, self._project, self._log, settle, self._clocks.monotonic)
            self._watched = [FolderWatcher(folder) for folder in settings.folders if folder.watch]
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the file in hand, then stop."""
        self._stop.set()
        self._thread.join()
        for pulling in self._pulling.values():
            pulling.stop()
        if self._sweeping is not None:
            self._sweeping.stop()
        self._stack.close()

    def told(self) -> Iterator[str]:
        """What listens, and what is watched: for the console."""
        if self.listener is not None and self._way.ingestion.listener is not None:
            settings = self._way.ingestion.listener
            safe = "DICOM TLS" if settings.tls else "plain TCP"
            yield f"listening for C-STORE as {settings.ae_title} on {settings.host}:{self.listener.port}, {safe}"
        if self.stow is not None:
            yield f"listening for STOW-RS on port {self.stow.port}"
        for watched in self._watched:
            yield f"watching {watched.folder.path}"

    def running(self) -> dict[str, bool]:
        """The receivers that ``ingest.toml`` asks for, and whether each has a process."""
        found = {LISTENER: bool(self.listener.pids())} if self.listener is not None else {}
        return found | ({STOW: self.stow.pid is not None} if self.stow is not None else {})

    def received(self) -> dict[str, int]:
        """What the C-STORE receiver counted since it started."""
        return self.listener.counts() if self.listener is not None else {}

    def _work(self) -> None:
        while not self._stop.wait(self._way.ingestion.reading.look_seconds):
            self.look()
            self._tried("listeners", self._tell)

    def look(self) -> None:
        """Let in what has come, by each road for itself: a fault of one is written down and keeps no other back."""
        self._tried("inbox", self._read_inbox)
        for number, watched in enumerate(self._watched):
            self._tried(f"folder {number}", lambda watched=watched: self._read_folder(watched))  # type: ignore[misc]
        self._tried("archives", self._pull)
        if self._sweeping is not None:
            self._sweeping.look()

    def _tried(self, where: str, act: Callable[[], None]) -> None:
        try:
            act()
        except FAULTS_SAID as error:  # their sentences name no patient
            self._log.error("intake_failed", where=where, reason=type(error).__name__, state=str(error)[:300])
        except Exception as error:  # noqa: BLE001 - whatever it is: this look is over, and the next one tries again
            self._log.error("intake_failed", where=where, reason=type(error).__name__)

    def _read_inbox(self) -> None:
        if self._way.inbox.names():
            with_labels = self._way.labels()
            self._intake.relabel(self._way.named_labels(with_labels))
            self._report(self._intake.run(self._way.waiting(), stopping=self._stop.is_set))

    def _read_folder(self, watched: FolderWatcher) -> None:
        lists = self._way.lists(watched.folder)
        ready = watched.rested(lists, (self._home.root,), self._way.ingestion.rules.max_bytes)
        if not ready:
            return
        with self._way.intake(lists) as intake:
            found: list[PendingFile] = [*ready, *self._way.missing(watched.folder, ready)]
            report = intake.run(found, stopping=self._stop.is_set)
        self._report(report)
        if not self._stop.is_set():
            watched.taken(ready)

    def _report(self, report: IngestReport) -> None:
        if report.kept and self._sweeping is not None:
            self._sweeping.came()
        if report.files:
            refused = sum(report.quarantined.values())
            self._log.info("ingested", kept=report.kept, duplicates=report.duplicates, quarantined=refused)

    def _pull(self) -> None:
        """Ask the archives, each in a thread of its own, when it is time."""
        for name, pulling in list(self._pulling.items()):
            if pulling.over(0):
                del self._pulling[name]
                try:
                    brought = pulling.result()
                    self._log.info("pulled", where=name, kept=brought.brought, count=brought.missing)
                except FAULTS as error:
                    said = str(error)[:300] if isinstance(error, FAULTS_SAID) else ""
                    self._log.error("pull_failed", where=name, reason=type(error).__name__, state=said)
        if self._clocks.monotonic() < self._next_pull:
            return
        self._next_pull = self._clocks.monotonic() + 60 * self._way.ingestion.reading.pull_minutes
        for archive in scheduled(self._way.ingestion, self._clocks.now().date()):
            if archive.name not in self._pulling:
                self._pulling[archive.name] = RetrievalThread(self._home, self._project, archive).__enter__()

    def _tell(self) -> None:
        """The listeners' counters, when they have changed."""
        if self._clocks.monotonic() < self._told_at + _TELL_S:
            return
        self._told_at = self._clocks.monotonic()
        counts = self.received()
        for what, count in counts.items():
            if count != self._told.get(what, 0):
                self._log.info("listener", state=what, count=count)
        self._told = counts


class DefacingThread:
    """A sweep of the vault whenever something has come since the last one, and it has been quiet since."""

    def __init__(
        self, home: SiteDirectory, project: str, log: Any, settle_s: float, now: Callable[[], float]
    ) -> None:
        """``settle_s``: seconds without anything new; ``now``: a clock that does not jump."""
        self._home, self._project, self._log, self._settle_s, self._now = home, project, log, settle_s, now
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._came: float | None = now()  # what was in the vault before the start counts as new

    def came(self) -> None:
        """Something was let in."""
        self._came = self._now()

    def look(self) -> None:
        """Begin a sweep, if it is time and none is under way."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._came is None or self._now() < self._came + self._settle_s:
            return
        self._came = None
        self._thread = threading.Thread(target=self._work, name="faces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After the study in hand."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            from agent.ingest.vault_defacing import sweep  # noqa: PLC0415 - torch, and only where a head has come

            with open_ingest(self._home, self._project) as way:
                if way.vault.faces():
                    found = sweep(way, stopping=self._stop.is_set)
                    self._log.info("defaced", count=found.defaced, kept=sum(found.kept.values()))
                    for why, count in found.kept.items():
                        self._log.warning("face_withheld", reason=why, count=count)
        except Exception as error:  # noqa: BLE001 - whatever it is: heads stay withheld, and reading goes on
            self._log.error("defacing_failed", reason=type(error).__name__)
            self._came = self._now()  # and again, after as long
