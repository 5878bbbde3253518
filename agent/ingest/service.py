"""What stands beside the PACS while ``serve`` runs: listeners, watched folders, pulls by the clock, and the reading.

Each look lets in what has come. A fault of one road (a full disk, a share that is not there) is written to the log,
and the next look tries again: what was not kept waits where it was, and a full disk makes the listeners refuse.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from agent.edges.archives import FAULTS, Pulling, scheduled
from agent.edges.dicomweb import WebError
from agent.edges.files import Watched
from agent.edges.home import BadSite, Home
from agent.edges.intake import IngestReport
from agent.edges.listener import Listener
from agent.edges.lists import BadFolder
from agent.edges.ocr import OcrMissing
from agent.edges.reader import ReaderFailed
from agent.edges.remote import PacsError
from agent.edges.room import RoomError
from agent.edges.stow import Stow
from agent.edges.sweeping import Sweeping
from agent.edges.vault import VaultError
from agent.edges.waiting import Found
from agent.edges.way import open_way

# what a look may end with, in words for the operator that name no patient
FAULTS_SAID: Final = (BadFolder, BadSite, OcrMissing, PacsError, ReaderFailed, RoomError, VaultError, WebError)
_TORN_S: Final = 600.0  # a half-written file so old is a killed process's; an `ingest` beside this one writes too
_TELL_S: Final = 60.0  # the listeners' counters go to the log as often as this, when they have changed


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time, as an argument."""

    now: Callable[[], dt.datetime] = dt.datetime.now
    monotonic: Callable[[], float] = time.monotonic


class Reception:
    """Receives for one project until it is left."""

    def __init__(self, home: Home, project: str, log: Any, clocks: Clocks | None = None) -> None:
        """Nothing listens yet."""
        self._home, self._project, self._log, self._clocks = home, project, log, clocks or Clocks()
        self._stack, self._stop = ExitStack(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="reception", daemon=True)
        self._pulling: dict[str, Pulling] = {}
        self._sweeping: Sweeping | None = None
        self._next_pull = self._told_at = 0.0
        self._told: dict[str, int] = {}
        self.listener: Listener | None = None
        self.stow: Stow | None = None

    def __enter__(self) -> Self:
        """Listen, and begin to read.

        Raises:
            BadSite, OSError: a setting is not in order, or a port is taken; nothing listens then.
        """
        with ExitStack() as stack:
            self._way = stack.enter_context(open_way(self._home, self._project))
            self._way.inbox.sweep(time.time() - _TORN_S)
            settings, keys, demand = self._way.ingestion, self._way.room_key, self._home.settings().confinement
            if settings.listener is not None:
                self.listener = stack.enter_context(
                    Listener(settings.listener, self._way.inbox.folder, keys, demand=demand)
                )
            if settings.stow is not None:
                self.stow = stack.enter_context(Stow(settings.stow, self._way.inbox.folder, keys, demand))
            self._intake = stack.enter_context(self._way.intake())
            if settings.faces is not None:
                settle = 60 * settings.faces.settle_minutes
                self._sweeping = Sweeping(self._home, self._project, self._log, settle, self._clocks.monotonic)
            self._watched = [Watched(folder) for folder in settings.folders if folder.watch]
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _read_folder(self, watched: Watched) -> None:
        lists = self._way.lists(watched.folder)
        ready = watched.rested(lists, (self._home.root,), self._way.ingestion.rules.max_bytes)
        if not ready:
            return
        with self._way.intake(lists) as intake:
            found: list[Found] = [*ready, *self._way.missing(watched.folder, ready)]
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
                self._pulling[archive.name] = Pulling(self._home, self._project, archive).__enter__()

    def _tell(self) -> None:
        """The listeners' counters, when they have changed."""
        if self._clocks.monotonic() < self._told_at + _TELL_S:
            return
        self._told_at = self._clocks.monotonic()
        counts = dict(self.listener.counts()) if self.listener is not None else {}
        for what, count in counts.items():
            if count != self._told.get(what, 0):
                self._log.info("listener", state=what, count=count)
        self._told = counts
