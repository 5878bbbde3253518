"""DICOM associations as an acceptor (PS3.8): who may open one; units read under a bound and a deadline.

pynetdicom brings the codecs of association requests and the negotiation of presentation contexts. Its reactor is not
used: it reads a unit of whatever length a stranger announces (680 MB of memory within a second, before any
association), holds a slot for who sends a byte now and then, and costs some 4 ms of processor per CT image.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Final

from pydicom.uid import UID
from pynetdicom import ALL_TRANSFER_SYNTAXES, AllStoragePresentationContexts, build_context
from pynetdicom.pdu import A_ASSOCIATE_AC, A_ASSOCIATE_RQ
from pynetdicom.pdu_primitives import (
    A_ASSOCIATE,
    ImplementationClassUIDNotification,
    ImplementationVersionNameNotification,
    MaximumLengthNotification,
    UserIdentityNegotiation,
)
from pynetdicom.presentation import PresentationContext, negotiate_as_acceptor

RQ, AC, RJ, DATA, RELEASE_RQ, RELEASE_RP, ABORT = range(1, 8)  # PS3.8 section 9.3.1
MAX_REQUEST: Final = 65536  # bytes of an A-ASSOCIATE-RQ; 128 contexts of 30 syntaxes are a fifth of it
MAX_PDU: Final = 1 << 20  # bytes of any other unit, whatever was announced
IMPLEMENTATION: Final = "2.25.258074292115660802519645974668088767564"
VERSION: Final = "LAZARET_1"
VERIFICATION: Final = "1.2.840.10008.1.1"
STORAGE: Final = frozenset(str(cx.abstract_syntax) for cx in AllStoragePresentationContexts)
_REFERENCED: Final = frozenset(f"1.2.840.10008.1.2.4.{n}" for n in (94, 95, 204, 205))  # JPIP: no pixels
_LIVE: Final = "1.2.840.10008.1.2.7."  # SMPTE ST 2110: no files
STORABLE: Final = tuple(
    str(s) for s in ALL_TRANSFER_SYNTAXES if s not in _REFERENCED and not str(s).startswith(_LIVE)
)
_APPLICATION: Final = "1.2.840.10008.3.1.1.1"  # DICOM's application context, PS3.7 annex A
_PLAIN: Final = ("1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.2")
AE_TITLE: Final = re.compile(r"[\x21-\x5b\x5d-\x7e](?:[\x20-\x5b\x5d-\x7e]{0,14}[\x21-\x5b\x5d-\x7e])?")  # PS3.5 6.2
CIPHERS: Final = (  # RFC 9325 section 4.2; TLS 1.3 has its own
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who may send: an AE title together with the addresses it may come from."""

    ae_title: str
    addresses: tuple[str, ...]  # single ones or networks ("10.1.2.0/24"); never names, which a DNS answers

    def __post_init__(self) -> None:
        """A title of PS3.5 section 6.2 and at least one address."""
        if not AE_TITLE.fullmatch(self.ae_title):
            raise ValueError("a caller's ae_title has 1 to 16 printable characters, no backslash")
        if not self.addresses:
            raise ValueError(f"caller {self.ae_title}: give the addresses it may come from")
        for address in self.addresses:
            ip_network(address)

    def at(self, address: str) -> bool:
        """May it come from there?"""
        where = ip_address(address)
        return any(where in ip_network(allowed) for allowed in self.addresses)


@dataclass(frozen=True, slots=True)
class Tls:
    """DICOM's non-downgrading BCP 195 RFC 9325 profile (PS3.15 annex B.12): TLS >= 1.2, both sides certified."""

    certificate: Path  # PEM, with the intermediate ones
    key: Path  # PEM
    authorities: Path  # PEM: who certifies the senders

    def context(self) -> ssl.SSLContext:
        """For a server which admits nobody without a certificate.

        Raises:
            OSError: a file is missing or no PEM (``ssl.SSLError`` is one).
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authorities)
        context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True, slots=True)
class Identity:
    """A user name and the scrypt digest of its passcode (PS3.7 annex D.3.3.7, type 2)."""

    name: str
    salt: str  # 32 hex characters
    digest: str = field(repr=False)  # 64 hex characters

    @classmethod
    def of(cls, name: str, passcode: str, salt: bytes) -> Identity:
        """From the passcode itself. ``salt``: 16 random bytes."""
        return cls(name, salt.hex(), _digest(passcode.encode(), salt).hex())

    def __post_init__(self) -> None:
        """Lengths of salt and digest."""
        if not self.name or len(bytes.fromhex(self.salt)) != 16 or len(bytes.fromhex(self.digest)) != 32:
            raise ValueError("an identity has a name, a salt of 16 bytes and a digest of 32 bytes, in hexadecimal")

    def shown(self, name: bytes, passcode: bytes) -> bool:
        """Are these its name and passcode? Takes as long for a wrong name as for a wrong passcode."""
        same = hmac.compare_digest(_digest(passcode, bytes.fromhex(self.salt)), bytes.fromhex(self.digest))
        return hmac.compare_digest(name, self.name.encode()) and same


def _digest(passcode: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(passcode, salt=salt, n=1 << 14, r=8, p=1, dklen=32)


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """How the C-STORE receiver listens, and what a sender may cost. Nobody may send who is not named."""

    ae_title: str  # a sender must call it by this
    callers: tuple[Caller, ...]
    tls: Tls | None = None
    plain_tcp: bool = False  # without tls, on a network which is protected otherwise: patients' images in the clear
    identities: tuple[Identity, ...] = ()  # when given, a sender must show one of them
    host: str = "127.0.0.1"
    port: int = 11112  # 0: any free one
    workers: int = 0  # processes; 0: as many as processors
    max_associations: int = 64
    max_per_address: int = 24
    max_pdu: int = 131072  # bytes; what senders are told
    max_bytes: int = 256 * 2**20  # of one instance
    memory_bytes: int = 1 << 30  # of instances coming in at once, per worker
    full_at: float = 0.95  # share of the room's file system in use beyond which nothing is taken
    least_free_bytes: int = 2 * 2**30  # on it, below which nothing is taken
    request_seconds: float = 10.0  # for TLS and the whole request for an association
    pdu_seconds: float = 30.0  # for one whole protocol data unit
    idle_seconds: float = 120.0  # between two of them
    durable: bool = True  # on the disk before Success is answered: survives a loss of power

    def __post_init__(self) -> None:
        """Everything in range."""
        if not AE_TITLE.fullmatch(self.ae_title):
            raise ValueError("ae_title has 1 to 16 printable characters, no backslash")
        if self.plain_tcp is (self.tls is not None):
            raise ValueError("give either tls, or plain_tcp = true where the network is protected otherwise")
        if self.identities and self.tls is None:
            raise ValueError("identities need tls: a passcode would cross the network unprotected")
        whole = (self.max_associations, self.max_per_address, self.max_bytes, self.memory_bytes)
        times = (self.request_seconds, self.pdu_seconds, self.idle_seconds)
        if not (0 <= self.port < 65536 and 0 <= self.workers <= 64 and min(whole) > 0 and self.least_free_bytes >= 0):
            raise ValueError("dimse: a port, count or size is out of range")
        if not (all(0 < t <= 86400 for t in times) and 0 < self.full_at <= 1 and 4096 <= self.max_pdu <= MAX_PDU):
            raise ValueError("dimse: a time, full_at (0 to 1) or max_pdu (4096 to 1048576) is out of range")

    def knows(self, address: str) -> bool:
        """May anybody come from there?"""
        return any(caller.at(address) for caller in self.callers)


def plain_address(address: str) -> str:
    """The address as callers are listed: IPv4 also when it came in an IPv6 socket, and no zone."""
    where = ip_address(address.partition("%")[0])
    mapped = where.ipv4_mapped if isinstance(where, IPv6Address) else None
    return str(mapped or where)


class Ended(Exception):
    """The association is over. ``code`` is an event's; ``abort`` the source and reason to tell, None for silence."""

    def __init__(self, code: str, abort: tuple[int, int] | None = None) -> None:
        """See the class."""
        super().__init__(code)
        self.code, self.abort = code, abort


MALFORMED: Final = (2, 6)  # PS3.8 section 9.3.8: the provider, invalid parameter value
UNEXPECTED: Final = (2, 2)
UNKNOWN: Final = (2, 1)


class Wire:
    """Protocol data units of one connection, each within a length and a time."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a connected socket, TLS or not."""
        self._sock, self._clock = sock, clock
        self._buffer = bytearray(MAX_REQUEST + 6)
        sock.settimeout(1.0)
        self._flags = 0
        if not isinstance(sock, ssl.SSLSocket):
            # One system call for a whole unit: the kernel waits for all of it, a second at a time
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
            self._flags = socket.MSG_WAITALL
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _into(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view, len(view), self._flags)
        except (BlockingIOError, TimeoutError):
            return 0
        except OSError:
            raise Ended("connection_lost") from None
        if count == 0:
            raise Ended("connection_lost")
        return count

    def read(
        self, cap: int, idle: float, whole: float, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[int, memoryview]:
        """The next unit: its type, and all of its bytes, header included. The bytes are good until the next call.

        Args:
            cap: bytes after the header.
            idle: seconds until its first byte.
            whole: seconds from there to its last byte.
            stopping: asked about once a second while nothing comes.
        Raises:
            Ended: the peer went, was too slow, or announced more than ``cap`` or an unknown type.
        """
        got, need = 0, 6
        deadline = self._clock() + idle
        while got < need:
            count = self._into(memoryview(self._buffer)[got:need])
            if count and not got:
                deadline = self._clock() + whole
            got += count
            if got == need == 6:
                need += self._announced(cap)
            elif got < need and not self._clock() < deadline:
                raise Ended("too_slow" if got else "idle", (2, 0))
            if not got and stopping():
                raise Ended("stopped", (0, 0))
        return self._buffer[0], memoryview(self._buffer)[:need]

    def _announced(self, cap: int) -> int:
        """The length in a header, and room for that many bytes."""
        kind, _, length = struct.unpack_from(">BBI", self._buffer)
        if not RQ <= kind <= ABORT:
            raise Ended("malformed", UNKNOWN)
        if length > cap:
            raise Ended("too_long", MALFORMED)
        if length + 6 > len(self._buffer):
            self._buffer = self._buffer[:6] + bytearray(length)
        return int(length)

    def send(self, data: bytes) -> None:
        """Everything, or ``Ended``."""
        try:
            self._sock.sendall(data)
        except OSError:
            raise Ended("connection_lost") from None

    def close(self, seconds: float = 0.0, most: int = 1 << 18) -> None:
        """Close, after the peer did or ``seconds`` (the ARTIM timer): else it may not get to read what we sent."""
        deadline = self._clock() + seconds
        self._flags = 0
        with contextlib.suppress(Ended):
            while most > 0 and self._clock() < deadline:
                most -= self._into(memoryview(self._buffer))
        with contextlib.suppress(OSError):
            self._sock.close()


@dataclass(frozen=True, slots=True)
class Rejected:
    """No association: the event's code, and result, source, reason of PS3.8 section 9.3.4."""

    code: str
    told: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Accepted:
    """An association: who called, SOP class and transfer syntax by presentation context, and the A-ASSOCIATE-AC."""

    calling: str
    contexts: Mapping[int, tuple[str, str]]
    reply: bytes


CONGESTED: Final = Rejected("rejected_limit", (2, 3, 2))  # transient, local limit exceeded
STRANGER: Final = Rejected("rejected_calling", (1, 1, 3))  # permanent, calling AE title not recognised
_MISCALLED: Final = Rejected("rejected_called", (1, 1, 7))
_NOT_DICOM: Final = Rejected("rejected_protocol", (1, 1, 2))
_OTHER_VERSION: Final = Rejected("rejected_protocol", (1, 2, 2))
_NOBODY: Final = Rejected("rejected_identity", (1, 2, 1))  # PS3.7 annex D.3.3.7: permanent, ACSE, no reason


def _decoded(unit: bytes) -> A_ASSOCIATE:
    try:
        request = A_ASSOCIATE_RQ()
        request.decode(unit)
        primitive = request.to_primitive()
        contexts = primitive.presentation_context_definition_list
        numbers = {cx.context_id for cx in contexts}
        sound = len(numbers) == len(contexts) and all(cx.abstract_syntax and cx.transfer_syntax for cx in contexts)
    except Exception:  # noqa: BLE001 - the codec raises anything, and its text quotes the bytes
        raise Ended("malformed", MALFORMED) from None
    if not sound or not contexts:
        raise Ended("malformed", MALFORMED)
    return primitive


def negotiate(unit: bytes, address: str, settings: ListenerSettings) -> Accepted | Rejected:
    """Decide on an A-ASSOCIATE-RQ (PS3.8 section 9.3.2), given with its header.

    Who is not on the list learns nothing else: the pair of title and address is looked at first.

    Raises:
        Ended: it is not one.
    """
    if len(unit) < 74:
        raise Ended("malformed", MALFORMED)
    version = int.from_bytes(unit[6:8])
    called, calling = (unit[a : a + 16].decode("latin-1").strip(" \0") for a in (10, 26))
    if not any(c.ae_title == calling and c.at(address) for c in settings.callers):
        return STRANGER
    if not version & 1:
        return _OTHER_VERSION
    if called != settings.ae_title:
        return _MISCALLED
    request = _decoded(unit)
    if request.application_context_name != _APPLICATION:
        return _NOT_DICOM
    shown = [i for i in request.user_information if isinstance(i, UserIdentityNegotiation)]
    if settings.identities and not (len(shown) == 1 and _identified(shown[0], settings.identities)):
        return _NOBODY
    answers = [_context(cx) for cx in request.presentation_context_definition_list]
    return Accepted(
        calling,
        {
            cx.context_id or 0: (str(cx.abstract_syntax), str(cx.transfer_syntax[0]))
            for cx in answers
            if not cx.result
        },
        _accepting(request, answers, settings, bool(shown and shown[0].positive_response_requested)),
    )


def _identified(shown: UserIdentityNegotiation, identities: tuple[Identity, ...]) -> bool:
    if shown.user_identity_type != 2 or shown.primary_field is None or shown.secondary_field is None:
        return False
    return any([one.shown(shown.primary_field, shown.secondary_field) for one in identities])  # all: equal time


def _context(proposed: PresentationContext) -> PresentationContext:
    """The answer to one presentation context: the sender's first choice, so that it need not re-encode either."""
    name = str(proposed.abstract_syntax)
    ours = STORABLE if name in STORAGE else _PLAIN
    chosen = [str(s) for s in proposed.transfer_syntax if s in ours] or list(ours)
    known = [build_context(name, [*chosen])] if name in STORAGE or name == VERIFICATION else []
    answers, _ = negotiate_as_acceptor([proposed], known)
    return answers[0]


def _accepting(
    request: A_ASSOCIATE, answers: list[PresentationContext], settings: ListenerSettings, identified: bool
) -> bytes:
    length, implementation = MaximumLengthNotification(), ImplementationClassUIDNotification()
    version = ImplementationVersionNameNotification()
    length.maximum_length_received = settings.max_pdu
    implementation.implementation_class_uid = UID(IMPLEMENTATION)
    version.implementation_version_name = VERSION
    reply = A_ASSOCIATE()
    reply.application_context_name = UID(_APPLICATION)
    reply.calling_ae_title, reply.called_ae_title = request.calling_ae_title, request.called_ae_title
    reply.result, reply.result_source = 0, 1
    reply.presentation_context_definition_results_list = answers
    reply.user_information = [length, implementation, version]
    if identified and settings.identities:
        confirmed = UserIdentityNegotiation()
        confirmed.server_response = b""  # PS3.7 annex D.3.3.7.2: empty for a name and passcode
        reply.user_information.append(confirmed)
    unit = A_ASSOCIATE_AC()
    unit.from_primitive(reply)
    return bytes(unit.encode())
