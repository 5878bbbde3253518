"""Ingest: whatever a source brought is kept in the vault, known already, or in quarantine with one reason.

Nothing is dropped: a file leaves the spool only after the vault holds it, or the quarantine does.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self

from agent.deidentify import nifti
from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import read_meta
from agent.deidentify.record import Record
from agent.ingest.parser_process import USUAL_LIMITS, ParserLimits, ParserProcess
from agent.ingest.pending import PendingFile, QuarantinedFile, Refusal
from agent.storage.quarantine import Quarantine
from agent.storage.spool import AlreadyClaimed, ReceivedFile
from protos.operations.confinement import AVAILABLE

_BATCH: Final = 64  # records of one transaction
_SENDERS: Final = 1024  # further senders of what is kept, noted at once
_BATCH_BYTES: Final = 64 * 2**20
_UNDER_WAY_BYTES: Final = 512 * 2**20  # of files in the hands of workers; one larger than this goes alone


class InstanceStore(Protocol):
    """Where records are kept: the vault."""

    def has(self, key: str) -> bool:
        """Is there a record of that name, or read from a file of that keyed digest?"""

    def kept(self, name: str) -> tuple[str, str] | None:
        """Digest and patient of what is kept under a name; None when nothing is."""

    def sent_again(self, marks: Iterable[tuple[str, str]]) -> None:
        """What is kept, by name or keyed digest, came from these senders (:attr:`Record.sent`), too."""

    def refusal(self, record: Record) -> str | None:
        """Why this record may not be kept (a key of REASONS), or None."""

    def looked_at(self, study: str) -> bool:
        """Has a person looked at the study's images?"""

    def hold(self, study: str) -> None:
        """Nothing may be drawn from a study until a person has looked at it."""

    def keep_all(self, records: Iterable[Record]) -> None:
        """Keep them, all or none, durable when this returns."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What became of the files: codes and counts only, so that it can be shown outside the vault."""

    files: int
    kept: int
    duplicates: int
    quarantined: Mapping[str, int]  # code -> files, in code order


@dataclass(slots=True)
class _Read:
    """One file under way."""

    found: PendingFile
    arrival: ReceivedFile
    digest: str
    record: Future[Record]


@dataclass(frozen=True, slots=True)
class IngestDependencies:
    """What the pipeline works with."""

    rules: AdmissionRules
    deidentifier: Deidentifier
    shelf: InstanceStore
    quarantine: Quarantine
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)  # keyed SOP Instance UID -> label
    alarm: Callable[[Record], str | None] = lambda _record: None  # a reason to hold an image back: OCR
    limits: ParserLimits = USUAL_LIMITS
    demand: str = AVAILABLE  # which layers of a worker's confinement must be in force


def sender_mark(who: Deidentifier, instance: str, road: str, source: str) -> str:
    """The keyed mark of an instance as a sender names it, by which the site knows what it need not ask for again.

    Args:
        who: the project's keys.
        instance: SOP Instance UID as the sender says it; "" where it does not.
        road: by which it comes.
        source: the sender.
    """
    parts = (instance.strip("\0 "), road, source)
    return who.mac("sent", *(part.encode("utf-8", "surrogateescape") for part in parts)) if parts[0] else ""


class IngestPipeline:
    """Reads files side by side in workers, and keeps their records in order."""

    def __init__(self, ports: IngestDependencies, jobs: int | None = None) -> None:
        """``jobs``: worker processes, by default one for each processor."""
        self._ports = ports
        self._jobs = jobs or os.cpu_count() or 1
        self._local = threading.local()
        self._readers: list[ParserProcess] = []
        self._pool = ThreadPoolExecutor(self._jobs, "reader")
        self._under_way: deque[_Read] = deque()
        self._batch: list[tuple[_Read, Record]] = []
        self._new: dict[str, tuple[str, str]] = {}  # name -> digest and patient of what is read and not yet kept
        # digest of a file under way -> others with the same bytes, and how they came
        self._same: dict[str, list[tuple[PendingFile, ReceivedFile]]] = {}
        self._senders: list[tuple[str, str]] = []  # of what is kept already: name or digest, and who sent it, too
        self._kept = self._duplicates = self._files = 0
        self._codes: Counter[str] = Counter()

    def __enter__(self) -> Self:
        """Workers start with the first file."""
        return self

    def relabel(self, labels: Mapping[str, str]) -> None:
        """Use these labels (keyed SOP Instance UID -> label) from the next run on."""
        self._ports = replace(self._ports, labels=labels)

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        for reader in self._readers:
            reader.close()
        self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        found: Iterable[PendingFile],
        progress: Callable[[int], None] = lambda _done: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> IngestReport:
        """Let files in.

        Args:
            found: what waits.
            progress: called with the number of files that are done.
            stopping: asked before each file; what is not begun then waits on.
        Raises:
            ParserError: the reader does not start on this machine.
            VaultError, OSError: nothing more can be kept; what was not kept waits where it was.
        """
        self._kept = self._duplicates = self._files = 0
        self._codes.clear()
        try:
            for one in found:
                if stopping():
                    break
                self._files += 1
                self._begin(one)
                while len(self._under_way) > 2 * self._jobs or self._bytes() > _UNDER_WAY_BYTES:
                    self._end(self._under_way.popleft())
                progress(self._files - len(self._under_way))
            while self._under_way:
                self._end(self._under_way.popleft())
                progress(self._files - len(self._under_way))
            self._flush()
            self._note_senders()
        finally:
            self._give_back()
        return IngestReport(self._files, self._kept, self._duplicates, dict(sorted(self._codes.items())))

    def _bytes(self) -> int:
        arrivals = [read.arrival for read in self._under_way]
        return sum(len(one.body) + (len(one.mask_of.body) if one.mask_of else 0) for one in arrivals)

    def _give_back(self) -> None:
        """After a fault: what is not kept waits for the next run, which begins with nothing of this one."""
        for read in (*self._under_way, *(read for read, _ in self._batch)):
            read.found.release()
        for others in self._same.values():
            for found, _ in others:
                found.release()
        self._under_way.clear()
        self._batch.clear()
        self._new.clear()
        self._same.clear()
        self._senders.clear()

    def _begin(self, found: PendingFile) -> None:
        """Load a file and hand it to a worker, unless it is known or refused already."""
        digest, arrival = "", None
        try:
            arrival = found.load()
            digest = self._digest(arrival)
            if digest in self._same:
                # whether it is known is seen when the first one is judged; of its bytes one copy is enough
                self._same[digest].append((found, replace(arrival, body=b"", mask_of=None)))
                return
            if self._ports.shelf.has(digest):
                self._again(found, arrival, digest)
                return
            spent = None
            if not isinstance(found, QuarantinedFile):
                spent = self._ports.quarantine.spent(self._name(found, arrival, digest), digest)
            if spent is not None:
                self._codes[spent.code] += 1  # tried often enough, and in quarantine: it is not read again
                found.settle()
                return
            if not nifti.looks_like_nifti(arrival.body):
                read_meta(arrival.body)  # refuses what is no DICOM before a worker is bothered
            record = self._pool.submit(self._read, arrival, digest)
            self._same[digest] = []
            self._under_way.append(_Read(found, arrival, digest, record))
        except AlreadyClaimed:
            self._files -= 1  # it is another process's to count
        except FileRejectedError as refusal:
            self._refuse(found, refusal.code, digest, arrival)

    def _digest(self, arrival: ReceivedFile) -> str:
        """Of the bytes; and of whose they are, where the hospital's list says it: a list may be corrected."""
        told = [part.encode() for part in (arrival.patient_id, arrival.issuer)] if arrival.patient_id else []
        if arrival.mask_of is not None:  # two volumes may have masks of the same bytes: of nothing, say
            told += [b"mask", arrival.mask_of.segment.encode(), arrival.mask_of.body]
        return self._ports.deidentifier.mac("file", arrival.body, *told)

    def _read(self, arrival: ReceivedFile, digest: str) -> Record:
        """In a thread of the pool: each has its own worker process."""
        reader: ParserProcess | None = getattr(self._local, "reader", None)
        if reader is None:
            ports = self._ports
            reader = self._local.reader = ParserProcess(ports.rules, ports.deidentifier, ports.limits, ports.demand)
            self._readers.append(reader)
        return reader.read(arrival.body, digest, arrival.patient_id or None, arrival.issuer, arrival.mask_of)

    def _end(self, read: _Read) -> None:
        """Label what a worker made of a file, and keep it with the next batch."""
        try:
            record = read.record.result()
            listed = self._ports.labels.get(record.uids[2], "") if record.uids else ""
            record = replace(record, label=read.arrival.label or listed, sent=self._sent(read.arrival))
            if self._known(record):
                self._again(read.found, read.arrival, read.digest, record.name)
                self._others(read, known=True)
                return
            self._judge(record)
        except FileRejectedError as refusal:
            self._refuse(read.found, refusal.code, read.digest, read.arrival)
            self._others(read, known=False)
            return
        self._new[record.name] = (record.after, record.pseudonym)
        self._batch.append((read, record))
        if len(self._batch) >= _BATCH or sum(len(r.payload) for _, r in self._batch) > _BATCH_BYTES:
            self._flush()

    def _others(self, read: _Read, *, known: bool) -> None:
        """Files with the same bytes as one that was judged: known with it, or judged for themselves."""
        for found, arrival in self._same.pop(read.digest, ()):
            if known:
                self._again(found, arrival, read.digest)
            else:
                found.release()
                self._begin(found)

    def _again(self, found: PendingFile, arrival: ReceivedFile, digest: str, name: str = "") -> None:
        """It is kept already; that this sender has it, too, is worth knowing."""
        self._duplicates += 1
        if mark := self._sent(arrival):
            self._senders.append((name or digest, mark))
        if len(self._senders) >= _SENDERS:
            self._note_senders()
        self._settle(found, arrival, digest)

    def _note_senders(self) -> None:
        """What is lost of them by a crash costs one more question to an archive."""
        marks, self._senders = self._senders, []
        if marks:
            self._ports.shelf.sent_again(marks)

    def _sent(self, arrival: ReceivedFile) -> str:
        """The keyed mark of a sender and of what it calls the instance; "" where it did not say."""
        return sender_mark(self._ports.deidentifier, arrival.instance, arrival.road, arrival.source)

    def _judge(self, record: Record) -> None:
        """The vault's and the alert's word; an alert holds the patient's whole study back, and nobody else's.

        Raises:
            FileRejectedError: what the vault says, or ``burned_in_text``.
        """
        code = self._ports.shelf.refusal(record)
        if code is None and not self._ports.shelf.looked_at(record.study):
            code = "burned_in_text" if record.text else self._ports.alarm(record)
            if code is not None:
                self._ports.shelf.hold(record.study)
        if code is not None:
            raise FileRejectedError(code)

    def _known(self, record: Record) -> bool:
        """The patient's same instance with the same content, perhaps by another road.

        Raises:
            FileRejectedError: ``conflicting_instance``, kept before with other content.
        """
        before = self._new.get(record.name) or self._ports.shelf.kept(record.name)
        if before is None:
            return False
        if before != (record.after, record.pseudonym):
            raise FileRejectedError("conflicting_instance")
        return True

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if not batch:
            return
        try:
            self._ports.shelf.keep_all([record for _, record in batch])
        except (
            FileRejectedError
        ):  # somebody opted out, or another process brought the same, since each was asked about
            while batch:
                self._keep_one(*batch.pop(0))
        except BaseException:
            self._batch = batch  # to be given back
            raise
        for read, record in batch:
            self._in(read, record)

    def _keep_one(self, read: _Read, record: Record) -> None:
        try:
            self._ports.shelf.keep_all([record])
        except FileRejectedError as refusal:
            self._new.pop(record.name, None)
            self._refuse(read.found, refusal.code, read.digest, read.arrival)
            self._others(read, known=False)
            return
        self._in(read, record)

    def _in(self, read: _Read, record: Record) -> None:
        self._kept += 1
        self._new.pop(record.name, None)
        self._settle(read.found, read.arrival, read.digest)
        self._others(read, known=True)

    def _refuse(self, found: PendingFile, code: str, digest: str, arrival: ReceivedFile | None) -> None:
        self._codes[code] += 1
        if code == "opted_out":  # nothing of such a patient is kept, not even sealed
            if arrival is not None:
                self._settle(found, arrival, digest)
            return
        found.refuse(self._ports.quarantine, Refusal(self._name(found, arrival, digest), code, digest, arrival))

    def _name(self, found: PendingFile, arrival: ReceivedFile | None, digest: str) -> str:
        """What it is called in the quarantine: the same at every attempt."""
        if isinstance(found, QuarantinedFile):
            return found.name
        return self._ports.quarantine.name_of(found.place, arrival, digest)

    def _settle(self, found: PendingFile, arrival: ReceivedFile, digest: str) -> None:
        """It is in: it waits no more, nor is it in quarantine."""
        found.settle()
        self._ports.quarantine.remove(self._name(found, arrival, digest))
