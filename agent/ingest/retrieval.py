"""Archives that are asked for images, by DIMSE or by DICOMweb, behind one way of asking."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from agent.errors import SiteConfigError
from agent.ingest.config import Ingestion
from agent.ingest.context import IngestContext, open_ingest
from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveQuery
from agent.pacs.dicomweb.config import DicomWebArchive, DicomWebError
from agent.pacs.dicomweb.qido import ArchiveSession, QidoClient
from agent.pacs.dicomweb.study_fetch import fetch_study as wado_study
from agent.pacs.dicomweb.wado import InstanceSink, WadoRetriever
from agent.pacs.dimse.find import QUERY
from agent.pacs.dimse.messages import UID
from agent.pacs.dimse.query_retrieve_scu import QueryRetrieveScu
from agent.pacs.dimse.retrieve import Ports, RetrievalProgress, Retriever
from agent.pacs.dimse.study_fetch import fetch_study as dimse_study
from agent.pacs.schedule import Hours
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import SpoolError

FAULTS: Final = (SiteConfigError, OSError, ArchiveError, SpoolError, VaultError, DicomWebError)
Archive = ArchiveConfig | DicomWebArchive
MOST_BYTES: Final = 4 * 2**30  # of one study that is fetched into memory
WHY: Final = {  # why something of an archive is not here
    "missing": "instances did not arrive, although the archive lists them: run the same command again",
    "unlisted": "instances are counted by the archive, but not listed",
    "malformed": "matches have an invalid UID and cannot be retrieved",
    "too_large": "instances are larger than max_bytes",
    "instance_mismatch": "instances arrived under the UID of another one",
    "failed": "studies (DICOMweb: instances) could not be retrieved completely: run the same command again",
    "given_up": "studies are no longer retrieved (limit runs), until the archive has more instances of them",
}
_NOT_INSTANCES: Final = frozenset({"failed", "given_up"})


@dataclass(frozen=True, slots=True)
class RetrievalCallbacks:
    """Callbacks for the progress of a retrieval, called in its thread."""

    tell: Callable[[int, int | None], None] = lambda _here, _expected: None  # instances
    waiting: Callable[[dt.datetime], None] = lambda _until: None  # for its hours, until then, local time


_DEAF: Final = RetrievalCallbacks()


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What became of one asking: counts only, so that it can be shown outside the vault."""

    brought: int
    had: int  # before
    left: Mapping[str, int] = field(default_factory=dict)  # a key of WHY -> how many did not come
    status: int = 0  # the last failure that a PACS reported for a retrieval (PS3.4 table C.4-2, C.4-3)
    stopped: bool = False  # its hours are over, or somebody asked for it; the next asking goes on
    asked: bool = True  # False: it was outside its hours from the beginning
    trouble: str = ""  # what the operator must mend, in a sentence

    @property
    def missing(self) -> int:
        """Instances that did not come; of some, the archive gives no more than a count."""
        return sum(count for why, count in self.left.items() if why not in _NOT_INSTANCES)

    @property
    def failed(self) -> int:
        """Studies (DICOMweb: instances) that the archive could not be asked about to the end."""
        return self.left.get("failed", 0)

    @property
    def complete(self) -> bool:
        """Was it asked, and does the site have all that it has?"""
        return self.asked and not self.stopped and not any(self.left.values())

    def sentences(self) -> Iterator[str]:
        """What is missing and why, for the operator; nothing when it is complete."""
        for why, count in self.left.items():
            if count:
                yield f"{count} {WHY.get(why, why)}"
        if self.trouble:
            yield self.trouble
        if self.status and not self.complete:  # else another attempt has mended it
            yield f"the archive reported status 0x{self.status:04X} for a retrieval"
        if not self.asked:
            yield "it is outside its hours: no query was sent"
        elif self.stopped:
            yield "it was stopped before the end, or its hours are over: run the same command again to continue"


_LISTS: Final = ("patients", "accessions")  # of which a study must be in one


def narrowed(query: ArchiveQuery, more: ArchiveQuery) -> ArchiveQuery:
    """The intersection of two queries: options of one run never widen what the settings allow.

    Raises:
        SiteConfigError: nothing can be found by both, or what both find cannot be asked for.
    """
    found: dict[str, Any] = {"modalities": _common("modalities", query.modalities, more.modalities)}
    if any(getattr(query, name) for name in _LISTS) and any(getattr(more, name) for name in _LISTS):
        both = {name: _in_both(getattr(query, name), getattr(more, name)) for name in _LISTS}
        if not any(both.values()):
            raise SiteConfigError("the archive's query in ingest.toml names none of these patients or accessions")
        found |= both
    else:
        found |= {name: getattr(query, name) or getattr(more, name) for name in _LISTS}
    found["since"] = max((day for day in (query.since, more.since) if day), default=None)
    found["until"] = min((day for day in (query.until, more.until) if day), default=None)
    try:
        return replace(query, **found)
    except ValueError as error:
        raise SiteConfigError(f"{error}, with the archive's query in ingest.toml") from None


def _common(what: str, own: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    if not (own and given):
        return own or given
    both = _in_both(own, given)
    if not both:
        raise SiteConfigError(f"the archive's query in ingest.toml and what was typed have no {what} in common")
    return both


def _in_both(own: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    allowed = frozenset(own)
    return tuple(dict.fromkeys(value for value in given if value in allowed))


def named(ingestion: Ingestion, kind: str, name: str) -> Archive:
    """An archive of ``ingest.toml``.

    Args:
        ingestion: the settings.
        kind: ``pacs`` or ``dicomweb``.
        name: of its table.
    Raises:
        SiteConfigError: there is none of that name.
    """
    known: Mapping[str, Archive] = ingestion.pacs if kind == "pacs" else ingestion.webs
    if name not in known:
        raise SiteConfigError(f"ingest.toml has no [{kind}.{name}]; it has: {', '.join(sorted(known)) or 'none'}")
    return known[name]


def archive_of_study(ingestion: Ingestion, name: str, uid: str) -> Archive:
    """The archive that one study is to be fetched from into memory.

    Args:
        ingestion: the settings.
        name: of a table ``pacs`` or ``dicomweb``.
        uid: Study Instance UID. No message has it.
    Raises:
        SiteConfigError: there is no such archive, this is no UID, or it cannot be fetched in this way.
    """
    if not name:
        raise SiteConfigError("--study: say which archive has it: --from NAME, of ingest.toml")
    if not UID.fullmatch(uid):
        raise SiteConfigError(f"{name}: --study: a Study Instance UID has digits and dots, at most 64")
    if name in ingestion.pacs and name in ingestion.webs:
        raise SiteConfigError(f"ingest.toml has [pacs.{name}] and [dicomweb.{name}]: give one of them another name")
    archive: Archive | None = ingestion.pacs.get(name) or ingestion.webs.get(name)
    if archive is None:
        known = ", ".join(sorted({**ingestion.pacs, **ingestion.webs})) or "none"
        raise SiteConfigError(f"ingest.toml has no [pacs.{name}] and no [dicomweb.{name}]; its archives: {known}")
    if isinstance(archive, ArchiveConfig) and archive.mode == "move":
        raise SiteConfigError(
            f'{name}: mode = "move": what an archive moves comes to the receiver of `serve`, and so into the vault. '
            "`predict` fetches by C-GET or DICOMweb: add a table of this archive with the one that it allows"
        )
    return archive


def fetch_study(ingestion: Ingestion, name: str, uid: str, modality: str, now: dt.datetime) -> list[bytes]:
    """Every instance of a study that an archive lists, in memory.

    Args:
        ingestion: the settings.
        name: see :func:`archive_of_study`.
        uid: as there.
        modality: of the series that are wanted; "": all.
        now: local time, for the archive's hours.
    Raises:
        SiteConfigError: as there; or the archive is outside its hours.
        ArchiveError, DicomWebError: it has no such study, cannot be asked, or did not send all of it.
    """
    archive = archive_of_study(ingestion, name, uid)
    if archive.hours and not Hours.parse(archive.hours).hold(now):
        raise SiteConfigError(f"{name}: it is outside its hours in ingest.toml: it was not asked")
    if isinstance(archive, ArchiveConfig):
        return dimse_study(archive, uid, modality, MOST_BYTES)
    return wado_study(archive, uid, modality, MOST_BYTES)


def check_reachable(archive: Archive) -> None:
    """Can the archive be asked? It is asked for nothing: an association is opened, or one study looked for.

    Raises:
        ArchiveError, DicomWebError: what is wrong.
    """
    if isinstance(archive, ArchiveConfig):
        with QueryRetrieveScu(archive, [QUERY]):
            return
    with contextlib.closing(ArchiveSession(archive)) as session:
        QidoClient(archive, session, lambda _failures: None).reach()


def scheduled(ingestion: Ingestion, today: dt.date) -> Sequence[Archive]:
    """The archives that ``serve`` asks by the clock, for the studies of the last days."""
    usual = today - dt.timedelta(days=ingestion.reading.pull_days)
    known: dict[str, Archive] = {**ingestion.pacs, **ingestion.webs}
    chosen = (known[name] for name in ingestion.reading.pull)
    return [one if one.query.dates else replace(one, query=replace(one.query, since=usual)) for one in chosen]


def retrieve(
    way: IngestContext, archive: Archive, ears: RetrievalCallbacks, stopping: Callable[[], bool]
) -> Retrieved:
    """Bring what the archive's query finds and the site does not have into the spool.

    Raises:
        ArchiveError, DicomWebError: the archive cannot be used; what came is kept.
    """
    if isinstance(archive, ArchiveConfig):
        return _by_dimse(way, archive, ears, stopping)
    sink = InstanceSink(way.inbox, way.known([("wado", archive.name)]))
    done = WadoRetriever(
        archive, sink, stop=stopping, progress=lambda brought, known: ears.tell(brought + known, None)
    )
    pulled = done.run(archive.query)
    return Retrieved(pulled.brought, pulled.known, pulled.left, stopped=pulled.paused, asked=pulled.asked)


def _by_dimse(
    way: IngestContext, remote: ArchiveConfig, ears: RetrievalCallbacks, stopping: Callable[[], bool]
) -> Retrieved:
    def progress(so_far: RetrievalProgress) -> None:
        ears.tell(so_far.instances_done, so_far.expected)

    journal = _Journal(way, remote.name)
    # what is moved comes by our listener, from an association of the archive's own
    known = way.known([("pull", remote.name), ("dimse", remote.aet)])
    ports = Ports(way.inbox, known, journal, dt.datetime.now, time.sleep, progress, stopping, ears.waiting)
    report = Retriever(remote, ports).run()
    left = {name: getattr(report, name) for name in ("failed", "given_up", "unlisted", "malformed", "too_large")}
    left["missing"] = max(0, report.missing - report.too_large)
    return Retrieved(report.fetched, report.had, left, report.status, report.stopped, report.asked, report.trouble)


@dataclass(frozen=True, slots=True)
class _Journal:
    """A note of the project, sealed with its records."""

    way: IngestContext
    name: str

    def read(self) -> Mapping[str, Sequence[int]]:
        return dict(self.way.vault.project_note(f"pull/{self.name}") or {})

    def write(self, value: Mapping[str, Sequence[int]]) -> None:
        self.way.vault.write_project_note(f"pull/{self.name}", {key: list(told) for key, told in value.items()})


class RetrievalThread:
    """One asking in a thread of its own, with a vault of its own: SQLite keeps the two apart."""

    def __init__(self, home: SiteDirectory, project: str, archive: Archive, ears: RetrievalCallbacks = _DEAF) -> None:
        """Nothing is asked yet."""
        self._what = (home, project, archive, ears)
        self._stop, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="pulling", daemon=True)
        self._fault: BaseException | None = None
        self._result: Retrieved | None = None

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask for nothing more, and wait for its end."""
        self.stop()

    def stop(self) -> None:
        """Ask for nothing more, and wait for its end."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        home, project, archive, ears = self._what
        try:
            with open_ingest(home, project) as way:
                self._result = retrieve(way, archive, ears, self._stop.is_set)
        except BaseException as error:  # noqa: BLE001 - given to whoever asks for the result
            self._fault = error
        finally:
            self._over.set()

    def over(self, seconds: float) -> bool:
        """Wait so long; has it ended?"""
        return self._over.wait(seconds)

    def result(self) -> Retrieved:
        """What became of it, once it is over.

        Raises:
            ArchiveError, DicomWebError, VaultError, SpoolError, SiteConfigError, OSError: what ended it.
        """
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        assert self._result is not None
        return self._result
