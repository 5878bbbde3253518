"""A federation for secure aggregation: sites with keys, a session, members, and an honest beginning of a round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from protos.common.dsse import key_id
from protos.secagg.member import Member
from protos.secagg.messages import SecAggError, SumStep
from protos.secagg.ring import Ring
from protos.secagg.server import Server, Total
from protos.secagg.session import KnownPartners, Params, Quorum, SumSession


class UnsafeStream:
    """Entropy that everyone can draw again: SHAKE-256 of a name, in order."""

    def __init__(self, name: str) -> None:
        """Start the stream of ``name``."""
        self.name, self.used = name, 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        self.used += count
        return hashlib.shake_256(self.name.encode()).digest(self.used)[-count:]


def site_key(site: str) -> Ed25519PrivateKey:
    """A site's enrolled key, the same in every run."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(site.encode()).digest())


@dataclass
class Sites:
    """``n`` sites and one session."""

    n: int
    ring: Ring = field(default_factory=lambda: Ring(8, 64, 4.0, 20))
    corrupt: int = 1
    honest: int = 2
    run: str = "run-1"
    round: int = 0
    context: bytes = bytes(32)
    seed: str = ""

    def __post_init__(self) -> None:
        self.names = [f"site-{i:02d}" for i in range(self.n)]
        self.keys = {name: site_key(name) for name in self.names}
        self.roster = {name: key.public_key().public_bytes_raw() for name, key in self.keys.items()}
        self.params = Params(self.ring, Quorum.smallest(self.n, self.corrupt, self.honest))
        self.session = self.as_seen()

    def as_seen(self, context: bytes | None = None, round: int | None = None) -> SumSession:
        """The session as a site sees it that was told something else."""
        return SumSession(
            self.run,
            self.round if round is None else round,
            self.params,
            self.context if context is None else context,
            self.roster,
        )

    def knows(self, names: Iterable[str] | None = None, minimum: int = 1) -> KnownPartners:
        """Sites that somebody knows; by default, all."""
        chosen = self.names if names is None else names
        return KnownPartners(
            frozenset(key_id(site_key(name).public_key().public_bytes_raw()) for name in chosen), minimum
        )

    def member(self, name: str, session: SumSession | None = None) -> Member:
        """One site's side."""
        entropy = UnsafeStream(f"{self.seed}/{name}")
        return Member(session or self.session, name, self.keys[name], self.knows(), entropy)

    def members(self) -> dict[str, Member]:
        """Every site's side."""
        return {name: self.member(name) for name in self.names}

    def vectors(self, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        """Lattice vectors within the bound."""
        rng = np.random.default_rng(seed)
        peak = self.ring.peak
        return {name: rng.integers(-peak, peak, self.ring.length, endpoint=True) for name in self.names}


def play(
    members: dict[str, Member],
    hub: Server,
    vectors: dict[str, NDArray[np.int64]],
    until: SumStep,
    silent: Iterable[str] = (),
) -> dict[str, bytes]:
    """Play honestly up to, and not into, ``until``; then give what the hub would send. ``silent`` miss `MASK`."""
    for step in SumStep:
        requests = hub.requests()
        if step is until:
            return requests
        for name, request in requests.items():
            if not (step is SumStep.MASK and name in silent):
                answer = members[name].answer(step, request, vectors[name] if step is SumStep.MASK else None)
                assert hub.receive(name, answer) is None
        hub.advance()
    raise AssertionError


def run_round(
    members: Mapping[str, Member],
    hub: Server,
    vectors: Mapping[str, NDArray[np.int64]],
    silent: Mapping[str, SumStep] = MappingProxyType({}),
) -> Total:
    """All five exchanges in one process: what an adapter does over its messages, and what tests do.

    Args:
        members: site -> its side. A member that refuses falls silent; the hub is not told why.
        hub: at `Step.ADVERTISE`.
        vectors: site -> lattice units (length,) int64.
        silent: site -> the first step that it no longer answers.
    Raises:
        SecAggError: too few sites are left.
    """
    for step in SumStep:
        for site, request in hub.requests().items():
            if site not in members or silent.get(site, step + 1) <= step:
                continue
            try:
                answer = members[site].answer(step, request, vectors[site] if step is SumStep.MASK else None)
            except SecAggError:
                continue
            hub.receive(site, answer)
        hub.advance()
    return hub.aggregate()
