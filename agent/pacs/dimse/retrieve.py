"""Retrieve from an archive: find, skip what the site has, fetch the rest by C-GET or C-MOVE, count missing instances.

Progress is no file of its own: an instance is fetched when the spool, the vault or the quarantine has it, so a
kill of either side at any point loses nothing and doubles nothing. The journal only spares the archive questions.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from typing import Final, Protocol, TypeVar

from agent.deidentify.prescan import IMPLICIT_LE
from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveUnreachableError
from agent.pacs.dimse.find import LIST, FoundSeries, RetrievalUnit, Study, find_instances, find_studies, units
from agent.pacs.dimse.query_retrieve_scu import (
    CANNOT_UNDERSTAND,
    CLASS_NOT_SUPPORTED,
    GET,
    MOVE,
    NOT_AUTHORISED,
    SUCCESS,
    UNKNOWN_DESTINATION,
    Outcome,
    QueryRetrieveScu,
    explain,
)
from agent.pacs.dimse.requestor import MOST_CONTEXTS, storage_contexts
from agent.pacs.schedule import Clock, OutsideHours, RateLimiter, RetrievalStopped
from agent.storage.spool import ReceivedFile, Spool


class Journal(Protocol):
    """A sealed note of the project: which studies need not be asked for again. To empty it is always safe."""

    def read(self) -> Mapping[str, Sequence[int]]:
        """As written; empty at first."""

    def write(self, value: Mapping[str, Sequence[int]]) -> None:
        """Keep it instead."""


@dataclass(frozen=True, slots=True)
class RetrievalProgress:
    """How far a pull is."""

    studies_done: int
    studies: int
    instances_done: int  # had already or fetched
    expected: int  # in the studies looked into so far


@dataclass(frozen=True, slots=True)
class Ports:
    """What a pull works with. All are called by one thread at a time."""

    room: Spool
    already: Callable[[str], bool]  # SOP Instance UID: in the spool, the vault or the quarantine?
    journal: Journal
    now: Callable[[], dt.datetime]  # local time
    sleep: Callable[[float], None]  # seconds; by all threads at once
    progress: Callable[[RetrievalProgress], None] = lambda _progress: None
    stopping: Callable[[], bool] = lambda: False
    waiting: Callable[[dt.datetime], None] = lambda _until: None  # a wait for the hours begins; when it ends


@dataclass(frozen=True, slots=True)
class PullReport:
    """What became of a pull: counts only, so that it can be shown outside the vault."""

    studies: int
    unchanged: int  # studies complete before, or given up, and not asked for again
    expected: int
    had: int
    fetched: int
    missing: int  # instances that did not come, the too large ones included
    incomplete: int  # studies they belong to
    failed: int  # studies that the archive could not be asked about to the end, or only with failures
    given_up: int  # of the incomplete or failed ones: asked for in as many runs as may be
    unasked: int
    duplicates: int
    too_large: int
    malformed: int  # matches with a UID that is none, not asked for
    foreign: int  # objects of no standard storage class, not asked for
    unfit: int  # matches that are not what the query says, not asked for
    unlisted: int  # instances the archive counts but does not list
    status: int  # the last failure the archive reported for a retrieval (PS3.4 table C.4-2, C.4-3); 0: none
    stopped: bool  # before the end: the hours are over, or somebody asked for it
    asked: bool  # was the archive asked at all? Not outside its hours
    trouble: str  # C-MOVE: a sentence, when the archive delivered nothing and says that it failed; else ""

    @property
    def complete(self) -> bool:
        """Does the site have all that the archive has?"""
        return not (self.stopped or self.missing or self.failed or self.unlisted or self.malformed)


_T = TypeVar("_T")
_CLASSES: Final = 12  # of one association, so that each has room for the transfer syntaxes in use
_UNASKED: Final = 1000  # instances that nobody asked for, in one study, before the archive is left alone
_POLL: Final = 0.5  # seconds
_NOTE_EVERY: Final = 32  # studies
_FATAL: Final = (CLASS_NOT_SUPPORTED, NOT_AUTHORISED, UNKNOWN_DESTINATION)
_IMAGES: Final = tuple(  # where an archive does not say the class: CR, DX, MG, CT, MR, PET, NM, XA, US, SC
    "1.2.840.10008.5.1.4.1.1." + end
    for end in ("1", "1.1", "1.2", "2", "2.1", "4", "4.1", "128", "20", "12.1", "6.1", "7")
)


class _Basket:
    """The instances of one study that are still missing: a ``Sink``."""

    def __init__(self, pull: Retriever, expected: Set[str]) -> None:
        self._pull, self._expected = pull, expected
        self.missing = {uid for uid in expected if not pull.has(uid)}
        self.refused: set[str] = set()
        self.tries: Counter[str] = Counter()  # of single instances: what failed goes behind what did not
        self._unasked = 0

    def offer(self, instance: str) -> int | None:
        """Take what is missing, and nothing else."""
        if instance in self.refused:
            return CANNOT_UNDERSTAND
        if instance not in self._expected:
            self._pull.count("unasked")
            self._unasked += 1
            if self._unasked > _UNASKED:
                raise ArchiveError(f"{self._pull.remote.name}: it sends instances that were not requested.")
            return CANNOT_UNDERSTAND
        if instance not in self.missing:
            self._pull.count("duplicates")
            return SUCCESS
        if self._pull.has(instance):  # meanwhile, by another road
            self._pull.count("had")
            self.missing.discard(instance)
            return SUCCESS
        self._pull.pace.take()
        return None

    def keep(self, instance: str, body: bytes) -> int:
        """Into the spool."""
        self._pull.keep(instance, body)
        self.missing.discard(instance)
        return SUCCESS

    def refuse(self, instance: str) -> None:
        """Larger than may be: asking again would not help."""
        self._pull.count("too_large")
        self.missing.discard(instance)
        self.refused.add(instance)

    def look(self, among: Set[str]) -> int:
        """C-MOVE: how many of these have not come by another association yet."""
        came = {uid for uid in self.missing & among if self._pull.has(uid)}
        self.missing -= came
        for _ in came:
            self._pull.count("fetched")
        return len(self.missing & among)


class SpoolFullError(ArchiveError):
    """Nothing more can be kept."""


def _write_down(notes: dict[str, list[int]], key: str, study: Study, missing: int) -> None:
    """How often a study ended without all of its instances: the archive has not all of them, or fails at them."""
    old = notes.get(key, [study.count, 0, 0])
    tries = old[2] + 1 if missing and old[0] == study.count else int(missing > 0)
    notes[key] = [study.count, missing, tries]


class Retriever:
    """One run over an archive's studies. A second run fetches only what is missing then."""

    def __init__(self, remote: ArchiveConfig, ports: Ports) -> None:
        """Nothing is asked yet."""
        clock = Clock(ports.now, ports.sleep, ports.stopping, ports.waiting)
        self.remote = remote
        self.pace = RateLimiter(remote.hours, remote.outside_hours == "wait", remote.per_minute, clock)
        self._ports, self._lock = ports, threading.Lock()
        self._tally: Counter[str] = Counter()
        self._studies, self._asked, self._unmoved = 0, False, 0

    def run(self) -> PullReport:
        """Find and fetch.

        Raises:
            ArchiveError: the archive cannot be used, or the room takes nothing more. What came is kept.
            VaultError, SpoolError: of the ports.
        """
        try:
            self.pace.gate()
            self._asked = True
            studies = self._patiently(lambda: find_studies(self.remote, self._tally))
        except RetrievalStopped:
            return self._report(stopped=True)
        self._studies = len(studies)
        before = dict(self._ports.journal.read())
        keys = {self._key(study): study for study in studies}
        notes = {key: list(before[key]) for key in keys if key in before}
        todo = {key: study for key, study in keys.items() if not self._settled(study, notes.get(key))}
        self._tally["unchanged"] = self._tally["studies_done"] = len(studies) - len(todo)
        with ThreadPoolExecutor(self.remote.associations, "pull") as pool:
            under_way = {pool.submit(self._study, study): key for key, study in todo.items()}
            try:
                stopped = self._gather(under_way, keys, notes)
            finally:
                self.pace.halt()
                for future in under_way:
                    future.cancel()
                self._ports.journal.write(notes)
        return self._report(stopped=stopped)

    def _gather(
        self, under_way: Mapping[Future[int], str], keys: Mapping[str, Study], notes: dict[str, list[int]]
    ) -> bool:
        """Write down how each study ended; True when the run was stopped. One bad study does not hold up the others.

        Raises:
            ArchiveError: no association, the room takes nothing more, or every study failed and nothing ever came.
        """
        stopped, failed = False, 0
        for count, done in enumerate(as_completed(under_way), 1):
            key = under_way[done]
            try:
                _write_down(notes, key, keys[key], done.result())
            except RetrievalStopped:
                stopped = True
            except (SpoolFullError, ArchiveUnreachableError):
                self.count("failed")
                raise
            except ArchiveError:
                failed += 1
                self.count("failed")
                _write_down(notes, key, keys[key], 1)  # at least
                if failed == len(keys) and not self._tally["had"] + self._tally["fetched"]:
                    raise
            if count % _NOTE_EVERY == 0:
                self._ports.journal.write(notes)
        return stopped

    def _settled(self, study: Study, note: Sequence[int] | None) -> bool:
        """Need it not be asked for again: complete or given up, and the archive counts as many as then?"""
        if note is None or len(note) != 3 or note[0] != study.count:
            return False
        _, missing, tries = note
        given_up = missing > 0 and tries >= self.remote.runs
        self._tally["missing"] += missing if given_up else 0
        self._tally["incomplete"] += given_up
        self._tally["given_up"] += given_up
        return given_up or (missing == 0 and study.count >= 0)

    def _key(self, study: Study) -> str:
        """Its name in the journal: which series of it are wanted is part of it."""
        asked = repr((study.uid, sorted(self.remote.query.modalities), self.remote.query.body_part))
        return hashlib.sha256(asked.encode()).hexdigest()[:32]

    def _report(self, *, stopped: bool) -> PullReport:
        others = ("studies", "stopped", "asked", "trouble")
        counted = {f.name: self._tally[f.name] for f in fields(PullReport) if f.name not in others}
        trouble = ""
        if self._unmoved and not self._tally["fetched"]:
            there = self.remote.destination or self.remote.calling
            trouble = (
                f"{self.remote.name}: the archive could not deliver to our listener {there}. Is it running, and does "
                "the archive know its host and port? If other instances arrived, it cannot read these: see its log."
            )
        return PullReport(studies=self._studies, stopped=stopped, asked=self._asked, trouble=trouble, **counted)

    def count(self, what: str, more: int = 1) -> None:
        """Once more; the operator sees it."""
        with self._lock:
            self._tally[what] += more
            now = self._tally
            done = now["had"] + now["fetched"]
            self._ports.progress(RetrievalProgress(now["studies_done"], self._studies, done, now["expected"]))

    def has(self, instance: str) -> bool:
        """Does the site have it?"""
        with self._lock:
            return self._ports.already(instance)

    def keep(self, instance: str, body: bytes) -> None:
        """Seal it into the spool.

        Raises:
            SpoolFullError: or the disk failed.
        """
        try:
            disk = os.statvfs(self._ports.room.folder)
            if disk.f_bavail * disk.f_frsize >= self.remote.least_free_bytes + len(body):
                self._ports.room.put(ReceivedFile("pull", self.remote.name, body, instance=instance))
                self.count("fetched")
                return
        except OSError:
            pass
        raise SpoolFullError(
            f"{self.remote.name}: the spool's disk is too full or failed; instances that arrived are kept."
        )

    def _patiently(self, act: Callable[[], _T]) -> _T:
        """Again, after a while, when the archive may only be busy."""
        for attempt in itertools.count(1):
            try:
                return act()
            except ArchiveError as error:
                if not error.passing or attempt >= self.remote.retries:
                    raise
            self.pace.nap(2.0**attempt)
        raise AssertionError

    def _study(self, study: Study) -> int:
        """One study, in a thread of its own; how many of its instances are missing at the end.

        Raises:
            ArchiveError: it cannot be listed, or there is no association.
        """
        self.pace.gate()
        found: Counter[str] = Counter()
        series = self._patiently(lambda: find_instances(self.remote, study, found))
        basket = _Basket(self, {uid for one in series for uid in one.instances})
        expected = sum(len(one.instances) for one in series)
        self.count("expected", expected)
        self.count("had", expected - len(basket.missing))
        for what, more in found.items():
            self.count(what, more)
        failing = self._bring(study, series, basket)
        missing = len(basket.missing) + len(basket.refused)
        self.count("missing", missing)
        self.count("incomplete", int(missing > 0))
        self.count("failed", int(failing and bool(basket.missing)))
        self.count("studies_done")
        return missing + found["unlisted"] + found["malformed"]  # not settled, though it cannot be asked for

    def _bring(self, study: Study, series: Sequence[FoundSeries], basket: _Basket) -> bool:
        """Ask until nothing is missing or nothing more comes; did the archive fail at what is?

        One that fails part-way is asked for less at a time, at last for single instances: the others come then.
        """
        idle, sizes, trouble = 0, [0, LIST, 1], False
        while basket.missing and idle < self.remote.retries:
            self.pace.gate()
            left, size = len(basket.missing), 1 if idle == self.remote.retries - 1 else sizes[0]
            try:
                trouble = not self._fetch(study, series, basket, size)
            except OutsideHours:
                continue
            except ArchiveUnreachableError as error:
                idle += 1
                if not error.passing or idle == self.remote.retries:
                    raise
                self.pace.nap(2.0**idle)
                continue
            smaller = trouble and len(sizes) > 1
            if smaller:
                del sizes[0]
            idle = idle + 1 if len(basket.missing) == left and not smaller else 0
            if len(basket.missing) == left:
                self.pace.nap(2.0 ** max(1, idle))
        return trouble

    def _fetch(self, study: Study, series: Sequence[FoundSeries], basket: _Basket, size: int) -> bool:
        """Ask once for all that is missing; did the archive answer everything without a failure?"""
        classes = {name for one in series for uid, name in one.instances.items() if uid in basket.missing}
        groups = [series] if len(classes) <= _CLASSES else [[one] for one in series]
        if self.remote.per_minute > 0 and self.remote.mode == "move":
            size = size or min(LIST, self.remote.per_minute)
        well = True
        for group in groups:
            asked = [unit for one in group for unit in units(study, one, basket.missing, size)]
            asked.sort(key=lambda unit: max(basket.tries[uid] for uid in unit.instances))
            try:
                if asked and self.remote.mode == "get":
                    well &= self._get(asked, group, basket)
                elif asked:
                    well &= self._move(asked, basket)
            except (SpoolFullError, ArchiveUnreachableError):
                raise
            except ArchiveError as error:
                if not error.passing:
                    raise
                well = False
        return well

    def _get(self, asked: Sequence[RetrievalUnit], group: Sequence[FoundSeries], basket: _Basket) -> bool:
        names = {name for one in group for uid, name in one.instances.items() if uid in basket.missing}
        known = sorted(names - {""}) + (list(_IMAGES) if "" in names else [])
        contexts = storage_contexts(known[: MOST_CONTEXTS - 1])
        well = True
        with QueryRetrieveScu(self.remote, [(GET, IMPLICIT_LE), *contexts]) as archive:
            for unit in asked:
                basket.tries.update(unit.instances)
                well &= self._judge(archive.get(unit.level, unit.keys, basket))
        return well

    def _move(self, asked: Sequence[RetrievalUnit], basket: _Basket) -> bool:
        well = True
        with QueryRetrieveScu(self.remote, [(MOVE, IMPLICIT_LE)]) as archive:
            for unit in asked:
                self.pace.take(len(unit.instances))
                basket.tries.update(unit.instances)
                outcome = archive.move(unit.level, unit.keys, self.remote.destination or self.remote.calling)
                well &= self._judge(outcome)
                wanted = len(unit.instances)
                for _ in range(max(1, int(self.remote.arrive_seconds / _POLL))):
                    left = basket.look(unit.instances)
                    if left <= outcome.failed or (outcome.status != SUCCESS and wanted - left >= outcome.completed):
                        break
                    self.pace.nap(_POLL)
                with self._lock:
                    self._unmoved += outcome.status != SUCCESS or outcome.failed > 0
        return well

    def _judge(self, outcome: Outcome) -> bool:
        """What is missing is seen in the room. Here only: is it the archive's failure, and does asking less help?"""
        if outcome.status in _FATAL:
            raise explain(self.remote, outcome.status)
        if outcome.status != SUCCESS:
            with self._lock:
                self._tally["status"] = outcome.status
        return outcome.status == SUCCESS and not outcome.failed
