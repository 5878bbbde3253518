"""The services of the C-STORE receiver: Verification and Storage (PS3.7 section 9, PS3.4 annex B).

A received object is encrypted into the spool byte by byte as it came, with a new preamble and file meta information
(PS3.10 section 7.1), before Success is answered. Only its command set is parsed here. No identifier of an object is
ever used as a file name. pynetdicom's reactor was rejected: see :mod:`agent.pacs.dimse.acceptor`.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agent.pacs.dimse import pdu
from agent.pacs.dimse.acceptor import CONGESTED, STORAGE, STRANGER, VERIFICATION, Accepted, Rejected, negotiate
from agent.pacs.dimse.config import MAX_PDU, Caller, Identity, ListenerSettings
from agent.pacs.dimse.messages import UID, Command, data_values, file_head, read_command, response
from agent.pacs.tls import Tls
from agent.storage.spool import ReceivedFile, Spool

EVENTS: Final = {
    "accepted": "Associations opened.",
    "released": "Associations that ended normally.",
    "aborted": "Associations that the sender aborted.",
    "rejected_calling": "Rejected: this title may not call from this address. Add it to the callers.",
    "rejected_called": "Rejected: the sender called another AE title than this site's. Correct it at the sender.",
    "rejected_identity": "Rejected: no user identity, or a wrong one.",
    "rejected_limit": "Rejected: too many associations at once; the sender tries again.",
    "rejected_protocol": "Rejected: not DICOM's application context or protocol version.",
    "turned_away": "Connections closed at once: far too many at a time.",
    "tls_failed": "No TLS: plain TCP, an old version, or no certificate of the authorities.",
    "connection_lost": "The connection ended in the middle.",
    "idle": "Cut: nothing was sent for too long.",
    "too_slow": "Cut: a protocol data unit or a message took too long.",
    "too_long": "Cut: a protocol data unit longer than allowed.",
    "malformed": "Cut: bytes that are not DICOM's.",
    "unexpected": "Cut: something the protocol does not allow at that point.",
    "stopped": "Ended because the receiver stops.",
    "fault": "An internal error of the receiver. Report it.",
    "echoed": "C-ECHO answered.",
    "stored": "Instances accepted.",
    "refused_disk": "Instances refused: the disk is too full, or failed. The sender keeps them.",
    "refused_memory": "Instances refused: too much coming in at once. The sender keeps them.",
    "refused_large": "Instances refused: larger than max_bytes.",
    "refused_class": "Instances refused: another SOP class than was agreed.",
    "refused_uid": "Instances refused: an invalid instance UID.",
    "refused_empty": "Instances refused: no data set.",
    "worker_stopped": "A worker process died and was started again.",
}
SUCCESS: Final = 0x0000
OUT_OF_RESOURCES: Final = 0xA700  # PS3.4 table B.2-1
CANNOT_UNDERSTAND: Final = 0xC000
INVALID_INSTANCE: Final = 0x0117  # PS3.7 annex C
CLASS_NOT_SUPPORTED: Final = 0x0122
_MAX_COMMAND: Final = 16384  # bytes; a C-STORE-RQ has some 200
_MESSAGE_SECONDS: Final = 900.0
_C_STORE, _C_ECHO = 0x0001, 0x0030
_LINGER: Final = 3.0  # seconds for a peer to read the last we said


def read_settings(raw: dict[str, Any]) -> ListenerSettings:
    """Settings again, from their JSON form."""
    fields = dict(raw)
    tls = fields["tls"]
    fields["tls"] = Tls(**{name: Path(value) for name, value in tls.items()}) if tls else None
    fields["callers"] = tuple(Caller(c["ae_title"], tuple(c["addresses"])) for c in raw["callers"])
    fields["identities"] = tuple(Identity(**identity) for identity in raw["identities"])
    return ListenerSettings(**fields)


class EventTally:
    """How often each event of ``EVENTS`` happened; any thread may count."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def count(self, code: str) -> None:
        """Once more."""
        if code not in EVENTS:
            raise ValueError("unknown event")
        with self._lock:
            self._counts[code] += 1

    def counts(self) -> dict[str, int]:
        """So far."""
        with self._lock:
            return dict(self._counts)


class MemoryBudget:
    """Bytes that all associations of a process may hold at once."""

    def __init__(self, most: int) -> None:
        """``most``: bytes."""
        self._lock, self._left = threading.Lock(), most

    def take(self, count: int) -> bool:
        """Are there so many left? Then they are taken."""
        with self._lock:
            enough = count <= self._left
            self._left -= count if enough else 0
            return enough

    def give(self, count: int) -> None:
        """Back."""
        with self._lock:
            self._left += count


class Services:
    """What every association of a process shares."""

    def __init__(self, settings: ListenerSettings, room: Spool, tally: EventTally) -> None:
        """``room``: where instances go."""
        self.settings, self.room, self.tally = settings, room, tally
        self.budget = MemoryBudget(settings.memory_bytes)

    def disk_is_full(self) -> bool:
        """Is the room's file system beyond the watermark? When it cannot be asked: yes."""
        try:
            disk = os.statvfs(self.room.folder)
        except OSError:
            return True
        left = disk.f_bavail * disk.f_frsize
        room_left = left >= self.settings.least_free_bytes
        return not (room_left and disk.f_bavail >= (1 - self.settings.full_at) * disk.f_blocks)


class IncomingInstance:
    """One C-STORE coming in. Once refused it holds nothing, whatever else is sent."""

    def __init__(self, services: Services, command: Command, agreed: tuple[str, str], calling: str) -> None:
        """``agreed``: the presentation context's SOP class and transfer syntax."""
        self._services, self._calling, self._instance = services, calling, command.sop_instance
        self.status, self._held, self._body = SUCCESS, 0, bytearray()
        if command.sop_class != agreed[0]:
            self._refuse(CLASS_NOT_SUPPORTED, "refused_class")
        elif not UID.fullmatch(command.sop_instance):
            self._refuse(INVALID_INSTANCE, "refused_uid")
        elif services.disk_is_full():
            self._refuse(OUT_OF_RESOURCES, "refused_disk")
        else:
            self._body += file_head(command, agreed[1], calling)
            self._head = len(self._body)

    def add(self, fragment: memoryview) -> None:
        """The next bytes."""
        if self.status != SUCCESS:
            return
        if len(self._body) + len(fragment) > self._services.settings.max_bytes:
            self._refuse(OUT_OF_RESOURCES, "refused_large")
        elif not self._services.budget.take(len(fragment)):
            self._refuse(OUT_OF_RESOURCES, "refused_memory")
        else:
            self._held += len(fragment)
            try:
                self._body += fragment
            except MemoryError:
                self._refuse(OUT_OF_RESOURCES, "refused_memory")

    def keep(self) -> int:
        """Put it into the room, whole; the status to answer."""
        if self.status == SUCCESS and len(self._body) == self._head:
            self._refuse(CANNOT_UNDERSTAND, "refused_empty")
        if self.status != SUCCESS:
            return self.status
        try:
            self._services.room.put(ReceivedFile("dimse", self._calling, bytes(self._body), instance=self._instance))
            self._services.tally.count("stored")
        except OSError:
            self._refuse(OUT_OF_RESOURCES, "refused_disk")
        except MemoryError:
            self._refuse(OUT_OF_RESOURCES, "refused_memory")
        self.drop()
        return self.status

    def _refuse(self, status: int, code: str) -> None:
        self.status = status
        self._services.tally.count(code)
        self.drop()

    def drop(self) -> None:
        """Forget the bytes."""
        self._body = bytearray()
        self._services.budget.give(self._held)
        self._held = 0


class Association:
    """One connection from its A-ASSOCIATE-RQ to its end: the acceptor's states of PS3.8 section 9.2."""

    def __init__(
        self, wire: pdu.PduStream, address: str, services: Services, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """``address``: the peer's. ``stopping``: shall it end between two messages?"""
        self._wire, self._address, self._services, self._stopping = wire, address, services, stopping
        self._agreed = Accepted("", {}, b"")
        self._context = 0  # of the message coming in; 0 between two
        self._command = bytearray()
        self._request: Command | None = None
        self._instance: IncomingInstance | None = None
        self._began = 0.0

    def serve(self, *, over: bool = False) -> None:
        """Until the association is over; the connection is closed then. ``over``: there are too many already."""
        tally = self._services.tally
        linger = 0.0
        try:
            if self._establish(over):
                tally.count("accepted")
                self._transfer()
            linger = _LINGER
        except pdu.AssociationEnded as end:
            tally.count(end.code)
            if end.abort is not None:
                linger = _LINGER if self._abort(end.abort) else 0.0
        finally:
            if self._instance is not None:
                self._instance.drop()
            self._wire.close(linger)

    def _abort(self, told: tuple[int, int]) -> bool:
        try:
            self._wire.send(struct.pack(">BBIBBBB", pdu.ABORT, 0, 4, 0, 0, *told))
        except pdu.AssociationEnded:
            return False
        return True

    def _establish(self, over: bool) -> bool:
        settings = self._services.settings
        kind, unit = self._wire.read(
            pdu.MAX_REQUEST, settings.request_seconds, settings.request_seconds, self._stopping
        )
        if kind != pdu.RQ:
            raise pdu.AssociationEnded("unexpected", pdu.UNEXPECTED)
        if not settings.knows(self._address):
            answer: Accepted | Rejected = STRANGER  # its request is not even decoded
        else:
            answer = CONGESTED if over else negotiate(bytes(unit), self._address, settings)
        if isinstance(answer, Rejected):
            self._services.tally.count(answer.code)
            self._wire.send(struct.pack(">BBIBBBB", pdu.RJ, 0, 4, 0, *answer.told))
            return False
        self._agreed = answer
        self._wire.send(answer.reply)
        return True

    def _transfer(self) -> None:
        settings = self._services.settings
        while True:
            kind, unit = self._wire.read(MAX_PDU, settings.idle_seconds, settings.pdu_seconds, self._may_end)
            if kind == pdu.DATA:
                self._data(unit)
            elif kind == pdu.ABORT:
                self._services.tally.count("aborted")
                return
            elif kind == pdu.RELEASE_RQ and not self._context and len(unit) == 10:
                self._wire.send(struct.pack(">BBII", pdu.RELEASE_RP, 0, 4, 0))
                self._services.tally.count("released")
                return
            else:
                raise pdu.AssociationEnded("unexpected", pdu.UNEXPECTED)

    def _may_end(self) -> bool:
        return not self._context and self._stopping()

    def _data(self, unit: memoryview) -> None:
        """The values of one unit: they belong to one message, which ends with the unit or goes on in the next."""
        ended = False
        for context, control, fragment in data_values(unit):
            if ended or context not in self._agreed.contexts or self._context not in (0, context):
                raise pdu.AssociationEnded("unexpected", pdu.UNEXPECTED)
            if not self._context:
                self._context, self._began = context, time.monotonic()
            ended = self._value(bool(control & 1), bool(control & 2), fragment)
        if not ended and time.monotonic() - self._began > _MESSAGE_SECONDS:
            raise pdu.AssociationEnded("too_slow", (2, 0))

    def _value(self, of_command: bool, last: bool, fragment: memoryview) -> bool:
        """One fragment; True when it ends the message. Commands come first, then data (PS3.8 annex E.1)."""
        if of_command != (self._request is None):
            raise pdu.AssociationEnded("unexpected", pdu.UNEXPECTED)
        if self._instance is not None:
            self._instance.add(fragment)
            if last:
                self._answer(self._instance.keep())
            return last
        if len(self._command) + len(fragment) > _MAX_COMMAND:
            raise pdu.AssociationEnded("too_long", pdu.MALFORMED)
        self._command += fragment
        return last and self._begin(read_command(bytes(self._command)))

    def _begin(self, request: Command) -> bool:
        """A command set is complete; True when no data follow."""
        agreed = self._agreed.contexts[self._context]
        self._request = request
        if request.operation == _C_ECHO and agreed[0] == VERIFICATION and not request.has_data:
            self._services.tally.count("echoed")
            self._answer(SUCCESS)
            return True
        if request.operation == _C_STORE and agreed[0] in STORAGE and request.has_data:
            self._instance = IncomingInstance(self._services, request, agreed, self._agreed.calling)
            return False
        raise pdu.AssociationEnded("unexpected", pdu.UNEXPECTED)

    def _answer(self, status: int) -> None:
        request, context = self._request, self._context
        self._context, self._request, self._instance, self._command = 0, None, None, bytearray()
        if request is not None:
            self._wire.send(response(context, request, status))
