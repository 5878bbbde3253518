"""What all members of a secure aggregation must agree on before the first key: quorum, ring, roster, round, start.

A `Session` is never sent. Each side builds its own from what it knows, and its digest is in every signature, key and
associated datum. So members with different inputs share nothing: no message of one session opens in another. That
covers replays of another round or run, another roster, and "model inconsistency" (Pasquini, Francati, Ateniese 2022,
"Eluding Secure Aggregation in Federated Learning via Model Inconsistency"): ``context`` is the digest of the start
parameters that *this* site received.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.common.dsse import key_id
from protos.secagg.ring import Ring

MIN_MEMBERS: Final = 3
MAX_MEMBERS: Final = 256  # work grows with the square; beyond, Bell et al. 2020 (CCS) is the protocol to take
MAX_TEXT: Final = 128
_TAG: Final = b"lazaret secure aggregation v1\n"
_PARAMS: Final = struct.Struct("<QBBQHHHHH")


@dataclass(frozen=True, slots=True)
class Quorum:
    """The limits on dropouts and corrupt sites among ``members`` sites.

    ``corrupt`` counts the sites that may work with a malicious coordinator against the others. It is at least 1:
    every site knows its own vector and noise, so each one is an onlooker of the others already.

    ``2 threshold > members + corrupt`` is the condition of Bonawitz et al. 2017, Theorem 6.5 (active adversary with
    server). Why: the coordinator gets shares of both kinds only if two different lists of survivors find
    ``threshold`` signatures each; corrupt members sign both, honest ones one, so that takes
    ``2 (threshold - corrupt)`` honest members of ``members - corrupt``. For the largest ``corrupt`` it is their
    ``threshold > 2/3 members``.

    ``honest`` is the number of sites whose distributed noise makes up the whole (`noise_fraction`).
    """

    members: int
    threshold: int  # shares that reveal a seed, and signatures that a list of survivors needs
    corrupt: int
    honest: int
    min_survivors: int

    def __post_init__(self) -> None:
        """Refuse every quorum under which a coordinator could unmask one site.

        Raises:
            ValueError: naming the rule.
        """
        numbers = (self.members, self.threshold, self.corrupt, self.honest, self.min_survivors)
        if not all(type(number) is int for number in numbers):
            raise ValueError("a quorum is of integers")
        if not MIN_MEMBERS <= self.members <= MAX_MEMBERS:
            raise ValueError(f"members lie in [{MIN_MEMBERS}, {MAX_MEMBERS}]")
        if not self.corrupt >= 1:
            raise ValueError("at least one member is to be counted as corrupt: each knows its own part of the sum")
        if not (2 * self.threshold > self.members + self.corrupt and self.threshold <= self.members):
            raise ValueError("2 threshold > members + corrupt, and threshold <= members (Theorem 6.5)")
        if not self.honest >= 2:
            raise ValueError("at least two honest vectors hide each other: honest >= 2")
        if not max(self.threshold, self.honest + self.corrupt) <= self.min_survivors <= self.members:
            raise ValueError("min_survivors lies between max(threshold, honest + corrupt) and members")

    @classmethod
    def smallest(cls, members: int, corrupt: int, honest: int) -> Quorum:
        """The quorum that survives the most dropouts under these assumptions.

        Raises:
            ValueError: there is none.
        """
        threshold = (members + corrupt) // 2 + 1
        return cls(members, threshold, corrupt, honest, max(threshold, honest + corrupt))

    @property
    def noise_fraction(self) -> float:
        """What each site's Gaussian noise is, as a fraction of the standard deviation that the claim names.

        With m >= min_survivors survivors of whom at most ``corrupt`` leave out or know their noise, the m - corrupt
        >= honest others add up to a variance of at least honest * noise_fraction^2 = 1 times the claimed one.
        """
        return 1.0 / math.sqrt(self.honest)


@dataclass(frozen=True, slots=True)
class Params:
    """Ring and quorum of a round; together they say that the sum cannot wrap."""

    ring: Ring
    quorum: Quorum

    def __post_init__(self) -> None:
        """Refuse more members than the ring can sum.

        Raises:
            ValueError: the sum could wrap.
        """
        if not self.quorum.members <= self.ring.max_members:
            raise ValueError(f"the sum of more than {self.ring.max_members} vectors could wrap")

    def encode(self) -> bytes:
        """The one encoding: fixed width, little-endian."""
        r, q = self.ring, self.quorum
        return _PARAMS.pack(
            r.length, r.bits, r.scale, r.peak, q.members, q.threshold, q.corrupt, q.honest, q.min_survivors
        )


def roster_digest(roster: Mapping[str, bytes]) -> str:
    """SHA-256 over sites and their enrolled Ed25519 keys, in hexadecimal: what people compare and approve.

    Raises:
        ValueError: a name or key is malformed, or two sites share a key.
    """
    if len(set(roster.values())) != len(roster):
        raise ValueError("two sites of a roster have the same key")
    digest = hashlib.sha256(_TAG + b"roster\n")
    for site in sorted(roster):
        if not all(type(v) is t for v, t in ((site, str), (roster[site], bytes))) or len(roster[site]) != 32:
            raise ValueError("a roster maps names to raw Ed25519 keys of 32 bytes")
        digest.update(_text(site) + roster[site])
    return digest.hexdigest()


def start_context(parameters: NDArray[np.float32], public: Iterable[bytes]) -> bytes:
    """SHA-256 of what a site starts from: the flat parameters that it received, and what else all must have alike.

    Args:
        parameters: (n,) float32.
        public: strategy, mechanism and its configuration, as bytes; their order and borders count.
    Raises:
        ValueError: the parameters have another type or shape.
    """
    if parameters.dtype != np.float32 or parameters.ndim != 1:
        raise ValueError("start parameters are one flat float32 tensor")
    digest = hashlib.sha256(_TAG + b"context\n" + struct.pack("<Q", parameters.size))
    digest.update(np.ascontiguousarray(parameters, "<f4").tobytes())
    for part in public:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def _text(text: str) -> bytes:
    raw = text.encode()
    if not 1 <= len(raw) <= MAX_TEXT:
        raise ValueError(f"names have 1 to {MAX_TEXT} bytes")
    return struct.pack("<H", len(raw)) + raw


@dataclass(frozen=True, slots=True)
class SumSession:
    """One secure sum: everything that its members must agree on."""

    run: str
    round: int
    params: Params
    context: bytes  # SHA-256 of start parameters, strategy and configuration, as this side has them
    roster: Mapping[str, bytes]  # site -> enrolled Ed25519 public key, raw
    sites: tuple[str, ...] = field(init=False)  # sorted: a member's number is its place here
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Freeze the roster and compute the digest.

        Raises:
            ValueError: a field is malformed, or the roster has not as many sites as the quorum counts.
        """
        if type(self.context) is not bytes or len(self.context) != 32:
            raise ValueError("the context is a SHA-256 digest")
        if type(self.round) is not int or not 0 <= self.round < 1 << 63:
            raise ValueError("a round is a number from 0")
        if len(self.roster) != self.params.quorum.members:
            raise ValueError("the roster has another number of sites than the quorum")
        object.__setattr__(self, "roster", MappingProxyType(dict(self.roster)))
        object.__setattr__(self, "sites", tuple(sorted(self.roster)))
        parts = (
            self.params.encode(),
            _text(self.run),
            struct.pack("<Q", self.round),
            bytes.fromhex(roster_digest(self.roster)),
            self.context,
        )
        object.__setattr__(self, "digest", hashlib.sha256(_TAG + b"session\n" + b"".join(parts)).digest())


@dataclass(frozen=True, slots=True)
class KnownPartners:
    """The sites that a hospital has verified itself, and the number of them that it requires beside it.

    A coordinator could fill a roster with sites of its own (a Sybil attack): no cryptography between strangers helps
    against that, so each hospital names keys that it has checked (by telephone, or in the ledger's approved
    enrolments) and is in no sum with fewer of them.
    """

    known: frozenset[str]  # key ids (SHA-256 of the raw key, hexadecimal)
    minimum: int  # of the *other* members, among those who share keys and among those who survive

    def __post_init__(self) -> None:
        """Refuse a minimum under which a site could be alone among strangers.

        Raises:
            ValueError: the minimum is below 1.
        """
        if type(self.minimum) is not int or not self.minimum >= 1:
            raise ValueError("a site is in no sum without at least one other that it knows")

    def missing(self, session: SumSession, own: int, members: Iterable[int]) -> int:
        """How many known members short of the minimum these are; 0: enough."""
        found = sum(key_id(session.roster[session.sites[i]]) in self.known for i in set(members) - {own})
        return max(0, self.minimum - found)
