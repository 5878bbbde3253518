"""Query and retrieve as a user of the service (PS3.4 annex C, Study Root): C-FIND, C-GET and C-MOVE, bounded.

What the archive answers is as hostile as any input: see :mod:`agent.pacs.dimse.requestor` for what was rejected and
why.

And C-ECHO (PS3.7 section 9.1.5), and a check that an archive has our listener configured: the doctor's PACS tests.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, Self

from pydicom.dataset import Dataset
from pynetdicom.dsutils import encode

from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveQueryError, ArchiveUnreachableError
from agent.pacs.dimse.acceptor import VERIFICATION
from agent.pacs.dimse.config import MAX_PDU
from agent.pacs.dimse.identifiers import even, identifier, read_match, us, us_of, write_fields
from agent.pacs.dimse.messages import UID, data_values, file_head, read_command, read_fields, response
from agent.pacs.dimse.pdu import ABORT, AC, DATA, MALFORMED, MAX_REQUEST, RELEASE_RQ, RJ, UNEXPECTED, AssociationEnded
from agent.pacs.dimse.requestor import accepted, connected, rejection, request

FIND: Final = "1.2.840.10008.5.1.4.1.2.2.1"  # Study Root, PS3.4 section C.6.2
MOVE: Final = "1.2.840.10008.5.1.4.1.2.2.2"
GET: Final = "1.2.840.10008.5.1.4.1.2.2.3"
SUCCESS, CANCELLED, OUT_OF_RESOURCES, CANNOT_UNDERSTAND = 0x0000, 0xFE00, 0xA700, 0xC000
CLASS_NOT_SUPPORTED, NOT_AUTHORISED, UNKNOWN_DESTINATION = 0x0122, 0x0124, 0xA801
_PENDING: Final = (0xFF00, 0xFF01)
_SERVICES: Final = {FIND: "queries (C-FIND)", GET: "C-GET", MOVE: "C-MOVE"}
_C_STORE, _C_GET, _C_FIND, _C_MOVE, _C_CANCEL = 0x0001, 0x0010, 0x0020, 0x0021, 0x0FFF
_NO_DATA: Final = 0x0101
_C_ECHO: Final = 0x0030
_IMPLICIT: Final = "1.2.840.10008.1.2"
_LOW: Final = 0x0002  # priority: the wards come first
_MAX_COMMAND: Final = 16384  # bytes
_MAX_IDENTIFIER: Final = 1 << 20
_PDU_SECONDS: Final = 30.0
_LOST: Final = {
    "connection_lost": "the connection ended in the middle.",
    "idle": "it does not answer.",
    "too_slow": "it answers too slowly.",
    "too_long": "it sent a message that is too long.",
    "malformed": "it sent bytes that are not DICOM. Check whether another service uses this port.",
    "unexpected": "it sent something the protocol does not allow at that point.",
    "aborted": "it aborted the association. See its log.",
}
_FAILED: Final = {
    CLASS_NOT_SUPPORTED: "it does not offer this service to this site.",
    NOT_AUTHORISED: "this site is not authorised there. Allow its AE title to query and retrieve.",
    UNKNOWN_DESTINATION: "it does not know the destination of C-MOVE. Enter this site's listener there.",
    0xA900: "it did not understand the query: an identifier does not match its information model.",
}


class InactivityTimeout:
    """A deadline that begins again whenever something comes."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin."""
        self._seconds, self._clock = seconds, clock
        self.restart()

    def restart(self) -> None:
        """Begin again."""
        self._until = self._clock() + self._seconds

    def check(self) -> None:
        """Raises: Ended, when it is over."""
        if not self._clock() < self._until:
            raise AssociationEnded("too_slow", (2, 0))


class RetrieveSink(Protocol):
    """Where instances of a C-GET go."""

    def offer(self, instance: str) -> int | None:
        """An instance is about to come: None to take it, or the status to answer without keeping it."""

    def keep(self, instance: str, body: bytes) -> int:
        """A whole Part 10 file; the status to answer."""

    def refuse(self, instance: str) -> None:
        """It was larger than may be."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last response of a retrieval, as the archive states it; received instances are counted separately."""

    status: int
    completed: int
    failed: int


def explain(remote: ArchiveConfig, status: int) -> ArchiveError:
    """A failure status of PS3.4 tables C.4-1 to C.4-3 as a sentence."""
    text = _FAILED.get(status)
    kind = ArchiveUnreachableError if status in (CLASS_NOT_SUPPORTED, UNKNOWN_DESTINATION) else ArchiveQueryError
    return kind(f"{remote.name}: {text or f'it reports a failure, status {status:04X}.'}", passing=text is None)


def _outcome(status: int, fields: Mapping[int, bytes]) -> Outcome:
    return Outcome(status, max(0, us_of(fields, 0x1021)), max(0, us_of(fields, 0x1022)))


class QueryRetrieveScu:
    """One association, opened by us. Every wait and every length of it is bounded."""

    stores: ClassVar[bool] = False  # objects go from here to there

    def __init__(self, remote: ArchiveConfig, contexts: Sequence[tuple[str, str]]) -> None:
        """Open it.

        Args:
            remote: whom to ask.
            contexts: SOP class and transfer syntax of each presentation context; the first is the service.
        Raises:
            ArchiveUnreachableError: no connection, no TLS, rejected, or the service is not offered.
        """
        self._remote, self._service = remote, contexts[0][0]
        self._proposed = {2 * i + 1: context for i, context in enumerate(contexts)}
        self._agreed: dict[int, tuple[str, str]] = {}
        self._largest, self._message = 16384, 0
        self._open = True
        self._wire = connected(remote)
        self._values = self._stream()
        with self._told(ArchiveUnreachableError):
            self._associate()
        if 1 not in self._agreed:
            self.close()
            raise ArchiveUnreachableError(
                f"{remote.name}: it does not offer {_SERVICES[self._service]} to this site."
            )

    def __enter__(self) -> Self:
        """For ``with``."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release it, or abort it when something went wrong."""
        if kind is None:
            self.close()
        else:
            self._abort((0, 0))

    @contextlib.contextmanager
    def _told(self, kind: type[ArchiveError] = ArchiveError) -> Iterator[None]:
        """The end of the association as a sentence."""
        try:
            yield
        except AssociationEnded as end:
            self._abort(end.abort)
            text = _LOST.get(end.code, "the association ended.")
            raise kind(f"{self._remote.name}: {text}", passing=True) from None

    def _abort(self, told: tuple[int, int] | None) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(AssociationEnded):
            self._wire.send(struct.pack(">BBIBBBB", ABORT, 0, 4, 0, 0, *(told or (0, 0))))
        self._wire.close()

    def close(self) -> None:
        """Release it (PS3.8 section 7.2). What the other side says to that changes nothing."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(AssociationEnded):
            self._wire.send(struct.pack(">BBII", RELEASE_RQ, 0, 4, 0))
            self._wire.read(MAX_PDU, 5.0, 5.0)
        self._wire.close()

    def _associate(self) -> None:
        self._wire.send(request(self._remote, self._proposed, stores=self.stores))
        kind, unit = self._wire.read(MAX_REQUEST, self._remote.connect_seconds, self._remote.connect_seconds)
        if kind == RJ and len(unit) == 10:
            self._abort(None)
            raise rejection(self._remote, unit[7], (unit[8], unit[9]))
        if kind == ABORT:
            raise AssociationEnded("aborted")
        if kind != AC:
            raise AssociationEnded("unexpected", UNEXPECTED)
        self._agreed, largest = accepted(bytes(unit), self._proposed)
        self._largest = min(largest or 16384, 131072)

    def _stream(self) -> Iterator[tuple[int, int, memoryview]]:
        """Presentation data values as they come."""
        while True:
            kind, unit = self._wire.read(MAX_PDU, self._remote.answer_seconds, _PDU_SECONDS)
            if kind == ABORT:
                raise AssociationEnded("aborted")
            if kind != DATA:
                raise AssociationEnded("unexpected", UNEXPECTED)
            yield from data_values(unit)

    def _send(self, command: bytes, data: bytes) -> None:
        """One message on the service's context, in units as long as the other side takes them (PS3.8 annex E)."""
        size = self._largest - 6
        for control, body in ((1, command), (0, data)):
            for start in range(0, len(body), size):
                part = body[start : start + size]
                last = 2 if start + size >= len(body) else 0
                head = struct.pack(">BBIIBB", DATA, 0, len(part) + 6, len(part) + 2, 1, control | last)
                self._wire.send(head + part)

    def _ask(self, operation: int, identifier: Dataset, more: Mapping[int, bytes] | None = None) -> None:
        self._message = self._message % 65535 + 1
        fields = {
            0x0002: even(self._service, b"\0"),
            0x0100: us(operation),
            0x0110: us(self._message),
            0x0700: us(_LOW),
            0x0800: us(0x0001),
            **(more or {}),
        }
        data = encode(identifier, True, True)
        if data is None:
            raise ValueError("the query cannot be encoded")
        self._send(write_fields(fields), data)

    def _collect(
        self, context: int, cap: int, of_command: int = 0, start: bytes = b""
    ) -> tuple[int, bytearray | None]:
        """All fragments of a command or data set; None for one longer than ``cap``, which is not kept.

        Args:
            context: which it must come on; 0 when any may be.
            cap: bytes. Of what is longer, three times as much is read to the end and thrown away.
            of_command: 1 for a command.
            start: put before it.
        """
        body, count = bytearray(start), 0
        for number, control, fragment in self._values:
            if control & 1 != of_command or number not in self._agreed or context not in (0, number):
                raise AssociationEnded("unexpected", UNEXPECTED)
            context, count = number, count + len(fragment)
            if count > max(4 * cap, _MAX_IDENTIFIER):
                raise AssociationEnded("too_long", MALFORMED)
            if count <= cap:
                body += fragment
            else:
                body = bytearray()
            if control & 2:
                return context, body if count <= cap else None
        raise AssociationEnded("connection_lost")

    def _next(self) -> tuple[int, bytes, dict[int, bytes]]:
        """The next command set: its context, its bytes, its elements."""
        context, raw = self._collect(0, _MAX_COMMAND, of_command=1)
        if raw is None:
            raise AssociationEnded("too_long", MALFORMED)
        return context, bytes(raw), read_fields(bytes(raw))

    def _response(self, context: int, fields: Mapping[int, bytes], operation: int) -> tuple[int, bytes]:
        """Status and identifier of a response to what was asked."""
        right = us_of(fields, 0x0100) == operation | 0x8000 and us_of(fields, 0x0120) == self._message
        status, data = us_of(fields, 0x0900), b""
        if not right or context != 1 or status < 0:
            raise AssociationEnded("unexpected", UNEXPECTED)
        if us_of(fields, 0x0800) != _NO_DATA:
            _, body = self._collect(context, _MAX_IDENTIFIER)
            if body is None:
                raise AssociationEnded("too_long", MALFORMED)
            data = bytes(body)
        return status, data

    def find(self, level: str, keys: Mapping[str, str]) -> list[dict[str, str]]:
        """C-FIND (PS3.4 section C.4.1).

        Args:
            level: STUDY, SERIES or IMAGE.
            keys: keyword -> value; "" asks for it.
        Returns:
            the values of ``keys`` for each match, "" for what the archive does not say. It may have said anything.
        Raises:
            ArchiveQueryError: the archive says so; the association goes on.
            ArchiveError: the association ended, or there are more than ``max_matches``.
        """
        matches: list[dict[str, str]] = []
        clock = InactivityTimeout(self._remote.stall_seconds)
        with self._told():
            self._ask(_C_FIND, identifier(level, keys))
            while True:
                context, _, fields = self._next()
                status, data = self._response(context, fields, _C_FIND)
                if status not in _PENDING:
                    break
                matches.append(read_match(data, keys))
                clock.check()
                if len(matches) > self._remote.max_matches:
                    self._cancel()
                    raise ArchiveError(f"{self._remote.name}: more matches than max_matches. Narrow the query.")
        if status != SUCCESS:
            raise explain(self._remote, status)
        return matches

    def _cancel(self) -> None:
        fields = {0x0100: us(_C_CANCEL), 0x0120: us(self._message), 0x0800: us(_NO_DATA)}
        self._send(write_fields(fields), b"")

    def get(self, level: str, keys: Mapping[str, str], sink: RetrieveSink) -> Outcome:
        """C-GET (PS3.4 section C.4.3): instances come back on this association, into ``sink``.

        Raises:
            ArchiveError: the association ended. What ``sink`` kept by then is kept.
        """
        clock = InactivityTimeout(self._remote.stall_seconds)
        with self._told():
            self._ask(_C_GET, identifier(level, keys))
            while True:
                context, raw, fields = self._next()
                if us_of(fields, 0x0100) == _C_STORE:
                    if self._take(context, raw, sink):
                        clock.restart()
                else:
                    status, _ = self._response(context, fields, _C_GET)
                    if status not in _PENDING:
                        return _outcome(status, fields)
                clock.check()

    def _take(self, context: int, raw: bytes, sink: RetrieveSink) -> bool:
        """One C-STORE of the archive; was it kept?"""
        command, agreed = read_command(raw), self._agreed[context]
        if not command.has_data or context == 1:
            raise AssociationEnded("unexpected", UNEXPECTED)
        instance = command.sop_instance
        status: int | None = CANNOT_UNDERSTAND
        if command.sop_class != agreed[0]:
            status = CLASS_NOT_SUPPORTED
        elif UID.fullmatch(instance):
            status = sink.offer(instance)
        head = file_head(command, agreed[1], self._remote.aet) if status is None else b""
        body = self._collect(context, self._remote.max_bytes, start=head)[1]
        if status is None and body is None:
            sink.refuse(instance)
            status = OUT_OF_RESOURCES
        elif status is None and body is not None:
            status = sink.keep(instance, bytes(body)) if len(body) > len(head) else CANNOT_UNDERSTAND
        self._wire.send(response(context, command, status or SUCCESS))
        return bool(head) and status == SUCCESS

    def move(self, level: str, keys: Mapping[str, str], destination: str) -> Outcome:
        """C-MOVE (PS3.4 section C.4.2): instances come by an association of the archive's to ``destination``.

        Raises:
            ArchiveError: the association ended.
        """
        clock, completed = InactivityTimeout(self._remote.stall_seconds), -1
        with self._told():
            self._ask(_C_MOVE, identifier(level, keys), {0x0600: even(destination, b" ")})
            while True:
                context, _, fields = self._next()
                status, _ = self._response(context, fields, _C_MOVE)
                if status not in _PENDING:
                    return _outcome(status, fields)
                if us_of(fields, 0x1021) > completed:
                    completed = us_of(fields, 0x1021)
                    clock.restart()
                clock.check()


class Echo(QueryRetrieveScu):
    """An association for verification alone."""

    def __init__(self, remote: ArchiveConfig) -> None:
        """Open it.

        Raises:
            ArchiveUnreachableError: no connection, no TLS, rejected, or verification is not offered.
        """
        try:
            super().__init__(remote, [(VERIFICATION, _IMPLICIT)])
        except KeyError:  # the requestor has no word for a service that is no retrieval
            raise ArchiveUnreachableError(f"{remote.name}: it does not offer C-ECHO to this site.") from None

    def echo(self) -> None:
        """Ask, and wait for the answer.

        Raises:
            ArchiveQueryError: it answers with a failure.
            ArchiveError: the association ended.
        """
        self._message = 1
        fields = {0x0002: even(VERIFICATION, b"\0"), 0x0100: us(_C_ECHO), 0x0110: us(1), 0x0800: us(_NO_DATA)}
        with self._told():
            self._send(write_fields(fields), b"")
            context, _, answer = self._next()
            status, _ = self._response(context, answer, _C_ECHO)
        if status:
            raise ArchiveQueryError(f"{self._remote.name}: it answers C-ECHO with status {status:04X}.")


def echo(remote: ArchiveConfig) -> None:
    """C-ECHO there.

    Raises:
        ArchiveError: what is wrong.
    """
    with Echo(remote) as association:
        association.echo()


def knows_us(remote: ArchiveConfig) -> bool | None:
    """Check that the archive has the destination of C-MOVE, by a request to move a study that does not exist.

    Returns:
        None where its answer does not tell: Orthanc gives the same one for a study it lacks.
    Raises:
        ArchiveError: it cannot be asked.
    """
    nobody = f"2.25.{secrets.randbits(120)}"
    with QueryRetrieveScu(remote, [(MOVE, _IMPLICIT)]) as association:
        outcome = association.move("STUDY", {"StudyInstanceUID": nobody}, remote.destination or remote.calling)
    return {SUCCESS: True, UNKNOWN_DESTINATION: False}.get(outcome.status)
