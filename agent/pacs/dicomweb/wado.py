"""Bring instances from a DICOMweb archive into the spool as they are stored there: WADO-RS (PS3.18 10.4).

The body is read as a stream and every part is encrypted as soon as it is complete; ``dicomweb-client`` would take two
to four times as long (it copies each part and holds them all). The spool's own names say what was retrieved, so a
killed run resumes where it stopped, without a list of its own: P15 holds for what it writes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, Protocol

import requests

from agent.deidentify.errors import FileRejectedError
from agent.pacs.archive import ArchiveQuery
from agent.pacs.dicomweb.config import FAULTY, DicomWebArchive, DicomWebError, faults
from agent.pacs.dicomweb.multipart import BodyLimits, BodyPart, MultipartError, Splitter, media_type
from agent.pacs.dicomweb.qido import ArchiveSession, QidoClient, QidoSeries, pieces
from agent.pacs.instance_header import instance_of
from agent.storage.spool import ReceivedFile, Spool
from protos.common.errors import Signal

# Every transfer syntax: what the archive holds comes as it is (PS3.18 section 8.7.3.5.2).
_ACCEPT: Final = 'multipart/related; type="application/dicom"; transfer-syntax=*'
_GONE: Final = frozenset({404, 410})  # of one series or instance: deleted since it was listed
_LONGEST_WAIT: Final = 30.0  # seconds between two attempts
_BODY_BYTES: Final = 2**42  # of one answer: a series of the largest instances there are
_WRITERS: Final = 2  # instances sealed and written at a time
_LARGE: Final = 16 * 2**20  # bytes; of larger instances fewer wait to be written
_BAD_SERIES: Final = 3  # without an answer, one after the other: it is the archive, not the series
_BAD_FIRST: Final = 10  # that it answers with a fault, and none without one: the same
_HOPELESS: Final = 32  # instances of a series in a row that it has a fault with, until the series is left
_FEW: Final = 2  # attempts after a fault of the archive's own
_PATIENCE: Final = 60.0  # seconds of a run that are waited because of such faults
_OURS: Final = frozenset({401, 403, 407})  # of us, not of what was asked for


class _Paused(Signal):
    """The archive's hours are over, or somebody asked to stop."""


class WadoSink(Protocol):
    """Where instances go. Several threads keep at a time."""

    def has(self, instance: str, source: str) -> bool:
        """Is it here already?"""

    def full(self, least_free: int) -> bool:
        """Is no more to be asked for? ``least_free``: bytes, on the disk that it writes to."""

    def keep(self, instance: str, source: str, body: bytes) -> None:
        """Keep an instance. Raises: OSError, it cannot be written; DicomWebError, nothing more is taken."""


@dataclass(frozen=True, slots=True)
class InstanceSink:
    """The spool, and what is there already."""

    room: Spool
    already: Callable[[str], bool]  # by SOP Instance UID: in the vault, or in quarantine; by one thread at a time

    def has(self, instance: str, source: str) -> bool:
        """Does it wait, as this archive sent it, or is it known?"""
        return self.room.holds(instance, [("wado", source)]) or self.already(instance)

    def full(self, least_free: int) -> bool:
        """Is the spool's disk nearly full?"""
        return not shutil.disk_usage(self.room.folder).free > least_free

    def keep(self, instance: str, source: str, body: bytes) -> None:
        """Seal it into the spool."""
        self.room.put(ReceivedFile("wado", source, body, instance=instance))


@dataclass(frozen=True, slots=True)
class Time:
    """The clocks: arguments, so that tests own them."""

    now: Callable[[], dt.datetime] = dt.datetime.now  # local: the archive's hours are the site's
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a run brought; counts only."""

    series: int
    instances: int  # listed by the archive
    brought: int
    known: int
    left: Mapping[str, int]  # missing, failed, too_large or instance_mismatch -> how many did not come
    paused: bool  # its hours are over, or asked to stop: the next run goes on
    asked: bool  # was the archive asked at all? Not outside its hours

    @property
    def complete(self) -> bool:
        """Is everything that matched here?"""
        return not self.left and not self.paused


_USUAL_TIME: Final = Time()


class WadoRetriever:
    """Brings what a query finds; one run."""

    def __init__(
        self,
        web: DicomWebArchive,
        sink: WadoSink,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda _brought, _known: None,
        clocks: Time = _USUAL_TIME,
    ) -> None:
        """Nothing is asked for yet.

        Args:
            web: the archive.
            sink: where its instances go.
            stop: asked before every instance.
            progress: called with the instances brought and those known before, by any thread, one at a time.
            clocks: for hours, rates and waits.
        """
        self._web, self._sink, self._stop, self._progress, self._clocks = web, sink, stop, progress, clocks
        self._mutex = threading.Lock()
        self._local = threading.local()
        self._sessions: list[ArchiveSession] = []
        self._over = threading.Event()
        self._series = self._instances = self._brought = self._known = 0
        self._left: Counter[str] = Counter()
        self._bad = 0  # series that failed one after the other, without a single instance
        self._waited = 0.0  # seconds, because of faults of the archive's own
        self._asked = False
        self._next = 0.0  # when the next instance may be kept, for the rate
        self._writers = ThreadPoolExecutor(_WRITERS, "room")

    def run(self, query: ArchiveQuery, study: str = "") -> Pulled:
        """Everything that matches and is not here yet; ``study``: of this one alone. Raises as ``bring`` does."""
        return self.bring(self._find(query, study))

    def bring(self, found: Iterable[QidoSeries]) -> Pulled:
        """What of these series is not here yet.

        Raises:
            DicomWebError: the archive cannot be used, or the disk is nearly full. What came before is kept.
        """
        paused = False
        try:
            with ThreadPoolExecutor(self._web.connections, "wado") as pool, self._ending():
                under_way: set[Future[None]] = set()
                for series in found:
                    self._count(series)
                    under_way.add(pool.submit(self._one, series))
                    if len(under_way) > 2 * self._web.connections:
                        done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                        _check(done)
                _check(wait(under_way).done)
        except _Paused:
            paused = True
        finally:
            self._writers.shutdown()
            for session in self._sessions:
                session.close()
        left = dict(sorted(self._left.items()))
        return Pulled(self._series, self._instances, self._brought, self._known, left, paused, self._asked)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever ends the run early ends its threads too, before they are waited for."""
        try:
            yield
        except BaseException:
            self._over.set()
            raise

    def _find(self, query: ArchiveQuery, study: str) -> Iterator[QidoSeries]:
        self._may_go_on()
        asked = QidoClient(self._web, self._session(), self._rest)
        yield from asked.of_study(study, query) if study else asked.series(query)

    def _count(self, series: QidoSeries) -> None:
        with self._mutex:
            self._series += 1
            self._instances += max(series.announced, len(series.instances))
        self._lost("failed", series.unlisted)
        self._lost("missing", max(0, series.announced - len(series.instances) - series.unlisted))

    def _session(self) -> ArchiveSession:
        """This thread's."""
        session: ArchiveSession | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = ArchiveSession(self._web)
            self._sessions.append(session)
        return session

    def _may_go_on(self) -> None:
        if self._over.is_set() or self._stop() or not self._web.may_ask(self._clocks.now()):
            raise _Paused
        if self._sink.full(self._web.least_free_bytes):
            raise DicomWebError(
                f"{self._web.name}: the disk is nearly full (least_free_bytes): retrieval has stopped"
            )
        self._asked = True

    def _rest(self, failures: int) -> None:
        """Wait longer after every failure."""
        self._clocks.sleep(min(0.5 * 2.0 ** min(failures, 16), _LONGEST_WAIT))
        self._may_go_on()

    def _one(self, series: QidoSeries) -> None:
        """Bring what is wanted of one series. One that cannot be brought is counted, and costs no other."""
        with self._mutex:
            missing = dict.fromkeys(uid for uid in series.instances if not self._sink.has(uid, self._web.name))
            self._known += len(series.instances) - len(missing)
            self._progress(self._brought, self._known)
        wanted = len(missing)
        try:
            self._bring(series, missing)
        except DicomWebError as fault:
            self._judge(fault, came=len(missing) < wanted)
            self._lost("failed", len(missing))
        else:
            self._bad = 0
            self._lost("missing", len(missing))

    def _judge(self, fault: DicomWebError, *, came: bool) -> None:
        """Is it this series alone? Raises: the fault, when the archive has it with everything."""
        with self._mutex:
            self._bad = 0 if came else self._bad + 1
            worked = self._brought + self._known > 0
        if _of_one(fault):
            if not worked and (not fault.retry or self._bad >= _BAD_FIRST):
                raise fault
        elif not fault.retry or self._bad >= _BAD_SERIES:
            raise fault

    def _bring(self, series: QidoSeries, missing: dict[str, None]) -> None:
        """Whole when most of it is wanted, what is then missing one by one; what came leaves ``missing``."""
        failures, whole = 0, True
        while missing:
            before = len(missing)
            whole = whole and 2 * before >= len(series.instances)
            try:
                if not whole:
                    self._one_by_one(series, missing)
                    return  # asked for every one: the archive has no more
                self._retrieve(series.path, missing, "")
                whole = False
            except DicomWebError as fault:
                failures = 0 if len(missing) < before else failures + 1
                smaller, whole = whole and _of_one(fault), whole and not fault.status and failures < 2
                if not smaller and not self._worth(fault, failures):  # what says no is no better the next time
                    raise
                if fault.retry:
                    self._wait(fault, failures)

    def _worth(self, fault: DicomWebError, failures: int) -> bool:
        """Is there to be one more attempt?"""
        if fault.status == FAULTY:
            return failures <= min(_FEW, self._web.retries) and self._waited < _PATIENCE
        return fault.retry and failures <= self._web.retries

    def _wait(self, fault: DicomWebError, failures: int) -> None:
        """Rest; not for ever in sum, where the archive does answer."""
        if fault.status != FAULTY:
            self._rest(failures)
        elif self._waited < _PATIENCE:
            self._waited += 0.5 * 2.0**failures
            self._rest(failures)

    def _one_by_one(self, series: QidoSeries, missing: dict[str, None]) -> None:
        last: DicomWebError | None = None
        in_a_row = 0
        for uid in tuple(missing):
            try:
                self._retrieve(f"{series.path}/instances/{uid}", missing, uid)
                in_a_row = 0
            except DicomWebError as fault:
                if uid in missing:  # it comes last in the next attempt: it may be the only bad one
                    del missing[uid]
                    missing[uid] = None
                in_a_row += 1
                if not _of_one(fault) or in_a_row >= _HOPELESS:
                    raise
                last = fault  # this one cannot be read there; the next one perhaps can
        if last is not None:
            raise last

    def _retrieve(self, path: str, missing: dict[str, None], asked: str) -> None:
        """One answer, part by part."""
        self._may_go_on()
        try:
            with faults(self._web):
                url = self._web.url.rstrip("/") + path
                with self._session().get(url, headers={"Accept": _ACCEPT}, stream=True) as response:
                    self._read(response, missing, asked)
        except DicomWebError as fault:
            if fault.status not in _GONE:
                raise

    def _read(self, response: requests.Response, missing: dict[str, None], asked: str) -> None:
        try:
            said = media_type(response.headers.get("Content-Type", ""))
        except MultipartError:
            raise DicomWebError(f"{self._web.name} does not answer with multipart/related; check its url") from None
        splitter = Splitter(said.boundary, BodyLimits(part_bytes=self._web.max_bytes, total_bytes=_BODY_BYTES))
        try:
            with self._writing() as writing:
                for piece in pieces(self._web, response, self._clocks.monotonic):
                    for part in splitter.feed(piece):
                        self._part(part, missing, asked, writing)
                splitter.end()
        except MultipartError:
            raise DicomWebError(
                f"{self._web.name} closed the connection, or its answer is not a multipart body", retry=True
            ) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[deque[Future[None]]]:
        """Instances are sealed and written while the next one comes; all are written when this ends."""
        writing: deque[Future[None]] = deque()
        try:
            yield writing
        finally:
            while writing:
                writing.popleft().result()

    def _part(self, part: BodyPart, missing: dict[str, None], asked: str, writing: deque[Future[None]]) -> None:
        try:
            uid = instance_of(part.body).sop_instance
        except FileRejectedError:
            uid = asked  # the archive was asked for this one: what it sends is judged further in
        if asked and uid != asked:
            self._give_up(asked, missing, "instance_mismatch")
        elif uid not in missing:
            return  # brought before, or not listed: the next run finds it
        elif not part.whole:
            self._give_up(uid, missing, "too_large")
        else:
            self._pace()
            while len(writing) >= (_WRITERS if len(part.body) > _LARGE else 2 * _WRITERS):
                writing.popleft().result()
            writing.append(self._writers.submit(self._keep, uid, part.body))
            del missing[uid]

    def _give_up(self, uid: str, missing: dict[str, None], why: str) -> None:
        if uid in missing:
            del missing[uid]
            self._lost(why, 1)

    def _lost(self, why: str, count: int) -> None:
        if count:
            with self._mutex:
                self._left[why] += count

    def _pace(self) -> None:
        """Wait until the rate allows one more."""
        if self._web.per_minute:
            with self._mutex:
                now = self._clocks.monotonic()
                due = max(self._next, now)
                self._next = due + 60.0 / self._web.per_minute
            if due > now:
                self._clocks.sleep(due - now)
        self._may_go_on()

    def _keep(self, uid: str, body: bytes) -> None:
        try:
            self._sink.keep(uid, self._web.name, body)
        except OSError:
            raise DicomWebError("the spool cannot be written: check the disk") from None
        with self._mutex:
            self._brought += 1
            self._progress(self._brought, self._known)


def _of_one(fault: DicomWebError) -> bool:
    """May the archive have it with what was asked for alone, and not with us or with everything?"""
    return fault.status >= 400 and fault.status not in _OURS


def _check(done: set[Future[None]]) -> None:
    """Raise what a thread raised; a pause last."""
    raised = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(raised, key=lambda error: isinstance(error, _Paused)):
        raise error
