"""The configuration of a DICOM listener: senders, addresses and limits."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from agent.pacs.tls import AE_TITLE, Tls

MAX_PDU: Final = 1 << 20  # bytes of any other unit, whatever was announced


@dataclass(frozen=True, slots=True)
class Caller:
    """Who may send: an AE title together with the addresses it may come from."""

    ae_title: str  # AE title of the sender
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
class Identity:
    """A user name and the scrypt digest of its passcode (PS3.7 annex D.3.3.7, type 2)."""

    name: str  # of the user, as `lazaret-agent identity` printed it
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
    """The C-STORE receiver's address and limits. Only listed senders may send."""

    ae_title: str  # a sender must call it by this
    callers: tuple[Caller, ...]  # who may send: title and address
    tls: Tls | None = None  # certificate and key of the receiver; without it plain_tcp must be true
    plain_tcp: bool = False  # without tls, on a network which is protected otherwise: patients' images in the clear
    identities: tuple[Identity, ...] = ()  # when given, a sender must show one of them
    host: str = "127.0.0.1"  # address that the PACS network sees
    port: int = 11112  # 0: any free one
    workers: int = 0  # processes; 0: as many as processors
    max_associations: int = 64  # open at once
    max_per_address: int = 24  # of these, from one address
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
            raise ValueError("give either tls, or plain_tcp = true if the network is protected in another way")
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
