"""Secure aggregation, the coordinator's side: collects messages, names dropouts, and unmasks the sum.

The protocol is in `protos.secagg.member`. A member that sends anything malformed is dropped, alone; the first valid
message of a step stands. Two wrongs cannot be blamed on one side from here and only cost shares: a share that does
not match its commitment is set aside, and a round in which too few are left ends with `Refused`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from protos.secagg.messages import (
    FRAME,
    PARCEL_BYTES,
    Advert,
    SecAggError,
    SecAggMessageError,
    SumStep,
    SurvivorList,
    commit,
    open_message,
    pair_seed,
    read_advert,
    read_parcel,
    read_reveal,
    read_roll,
    self_seed,
)
from protos.secagg.session import SumSession
from protos.secagg.shamir import SharesError, join


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """The result of a round."""

    lattice: NDArray[np.int64]  # (length,), the exact sum of the survivors' lattice vectors
    survivors: tuple[str, ...]
    dropped: Mapping[str, str]  # site -> why; one that fell silent after its vector is a survivor all the same


class Server:
    """The coordinator of one secure sum.

    For each `Step`: send `requests`, hand every answer to `receive`, then `advance`; after the last one, `aggregate`.
    Time-outs are the caller's: whoever has not answered when it advances is dropped.
    """

    def __init__(self, session: SumSession) -> None:
        """Start at `Step.ADVERTISE`, with every site of the roster expected."""
        self.session = session
        self.step: SumStep | None = SumStep.ADVERTISE
        self.dropped: dict[str, str] = {}
        self._asked = frozenset(range(len(session.sites)))
        self._answered: set[int] = set()
        self._sharers: frozenset[int] = frozenset()  # U2
        self._adverts: dict[int, Advert] = {}
        self._raw_adverts: dict[int, bytes] = {}
        self._adverts_digest = b""
        self._parcels: dict[int, dict[int, bytes]] = {}  # dealer -> holder -> parcel
        self._commitments: dict[int, dict[int, tuple[bytes, bytes]]] = {}  # dealer -> holder -> of seed and key
        self._total = np.zeros(session.params.ring.length, session.params.ring.dtype)
        self._roll = SurvivorList(frozenset(), frozenset())
        self._agreements: dict[int, bytes] = {}
        self._shares: dict[int, dict[int, bytes]] = {}  # of whom -> point -> share
        self._revealed = False
        self._takers: Mapping[SumStep, Callable[[int, bytes], None]] = {
            SumStep.ADVERTISE: self._take_advert,
            SumStep.SHARE: self._take_shares,
            SumStep.MASK: self._take_vector,
            SumStep.AGREE: self._take_agreement,
            SumStep.REVEAL: self._take_reveal,
        }

    def requests(self) -> dict[str, bytes]:
        """What to send now: site -> bytes, for each site that is still asked.

        Raises:
            SecAggError: the round is over.
        """
        if self.step is None:
            raise SecAggError("the round is over")
        return {self.session.sites[i]: self._request(i, self.step) for i in sorted(self._asked)}

    def _request(self, i: int, step: SumStep) -> bytes:
        if step is SumStep.SHARE:
            return _joined(self._raw_adverts)
        if step is SumStep.MASK:
            return b"".join(self._parcels[dealer][i] for dealer in sorted(self._asked - {i}))
        if step is SumStep.AGREE:
            return self._roll.encode(self.session)
        return _joined(self._agreements)  # of Step.REVEAL; empty at Step.ADVERTISE, which is sent nothing

    def size(self, step: SumStep) -> int:
        """Bytes of an answer to ``step``: more, or fewer, need not be read from the wire."""
        n = len(self.session.sites)
        bodies = {
            SumStep.ADVERTISE: 96,
            SumStep.SHARE: 96 + (max(1, len(self._adverts)) - 1) * PARCEL_BYTES,
            SumStep.MASK: self.session.params.ring.size,
            SumStep.AGREE: SurvivorList.size(self.session),
            SumStep.REVEAL: 34 * n,
        }
        return FRAME + bodies[step]

    def receive(self, site: str, message: bytes) -> str | None:
        """Take a site's answer to the present step, from a channel that is known to be the site's.

        Returns:
            None when it counts, else why not. What is malformed drops the site from this round; what comes late, from
            a site that is not asked, or after a valid answer, changes nothing.
        """
        if self.step is None or site not in self.session.roster:
            return "nothing is expected of this site"
        i = self.session.sites.index(site)
        if i not in self._asked or i in self._answered:
            return "nothing is expected of this site"
        try:
            if len(message) != self.size(self.step):
                raise SecAggMessageError(f"an answer to {self.step.name.lower()} has {self.size(self.step)} bytes")
            self._takers[self.step](i, message)
        except SecAggError as reason:
            self._drop(i, str(reason))
            return str(reason)
        self._answered.add(i)
        return None

    def advance(self) -> None:
        """Close the present step; who has not answered is dropped.

        Raises:
            SecAggError: too few are left; nothing of this round can be unmasked.
        """
        if self.step is None:
            raise SecAggError("the round is over")
        step, asked, quorum = self.step, self._asked, self.session.params.quorum
        for i in sorted(asked - self._answered):
            self._drop(i, f"no answer to {step.name.lower()}")
        present, self._answered = len(self._asked), set()
        needed = quorum.threshold if step in (SumStep.AGREE, SumStep.REVEAL) else quorum.min_survivors
        if not present >= needed:
            self.step = None
            raise SecAggError(f"{present} sites have answered to {step.name.lower()}, {needed} are needed")
        if step is SumStep.ADVERTISE:
            self._adverts_digest = hashlib.sha256(_joined(self._raw_adverts)).digest()
        if step is SumStep.MASK:
            self._roll = SurvivorList(self._asked, self._sharers - self._asked)
        if step is SumStep.SHARE:
            self._sharers = self._asked
        self._revealed = step is SumStep.REVEAL
        self.step = None if self._revealed else SumStep(step + 1)

    def aggregate(self) -> Total:
        """Take off the self masks of the survivors and the pairwise masks of those who dropped out.

        Raises:
            SecAggError: not every step is done, or a site's shares are too few or of something else than it
            advertised.
        """
        if not self._revealed:
            raise SecAggError("the sum is known after the reveals only")
        ring, total = self.session.params.ring, self._total.copy()
        for i in sorted(self._roll.alive):
            ring.add_mask(total, self_seed(self.session, i, self._seed_of(i)), -1)
        for i in sorted(self._roll.dead):
            key = self._key_of(i)
            for j in sorted(self._roll.alive):
                seed = pair_seed(self.session, key, i, self._adverts[j])
                ring.add_mask(total, seed, -1 if j > i else 1)
        survivors = tuple(self.session.sites[i] for i in sorted(self._roll.alive))
        return Total(ring.lower(total), survivors, MappingProxyType(dict(self.dropped)))

    def _seed_of(self, i: int) -> bytes:
        seed = self._join(i)
        if commit(self.session, b"b", (i,), seed) != self._adverts[i].commitment:
            raise SecAggError(f"{self.session.sites[i]} has shared another seed than it advertised")
        return seed

    def _key_of(self, i: int) -> X25519PrivateKey:
        key = X25519PrivateKey.from_private_bytes(self._join(i))
        if key.public_key().public_bytes_raw() != self._adverts[i].mask_key:
            raise SecAggError(f"{self.session.sites[i]} has shared another key than it advertised")
        return key

    def _join(self, i: int) -> bytes:
        try:
            return join(self._shares.get(i, {}), self.session.params.quorum.threshold)
        except SharesError as reason:
            raise SecAggError(f"shares of {self.session.sites[i]}: {reason}") from None

    def _drop(self, i: int, reason: str) -> None:
        self._asked -= {i}
        self.dropped[self.session.sites[i]] = reason

    def _take_advert(self, i: int, message: bytes) -> None:
        advert = read_advert(self.session, message)
        _is_from(i, advert.sender)
        taken = {key for other in self._adverts.values() for key in (other.share_key, other.mask_key)}
        if len({advert.share_key, advert.mask_key} - taken) != 2:
            raise SecAggMessageError("an advertised key is not fresh")
        self._adverts[i], self._raw_adverts[i] = advert, message

    def _take_shares(self, i: int, message: bytes) -> None:
        sender, body = open_message(self.session, SumStep.SHARE, message, len(message) - FRAME)
        _is_from(i, sender)
        if body[:32] != self._adverts_digest:
            raise SecAggMessageError("shares were made for other advertisements")
        parcels: dict[int, bytes] = {}
        commitments = {i: (bytes(body[32:64]), bytes(body[64:96]))}
        for place, holder in enumerate(sorted(self._adverts.keys() - {i})):
            raw = body[96 + place * PARCEL_BYTES : 96 + (place + 1) * PARCEL_BYTES]
            parcel = read_parcel(self.session, raw, self._adverts_digest)
            if (parcel.dealer, parcel.holder) != (i, holder):
                raise SecAggMessageError("a parcel is not in its place")
            parcels[holder], commitments[holder] = bytes(raw), parcel.commitments
        self._parcels[i], self._commitments[i] = parcels, commitments

    def _take_vector(self, i: int, message: bytes) -> None:
        ring = self.session.params.ring
        sender, body = open_message(self.session, SumStep.MASK, message, ring.size)
        _is_from(i, sender)
        self._total += ring.read(body)

    def _take_agreement(self, i: int, message: bytes) -> None:
        sender, body = open_message(self.session, SumStep.AGREE, message, SurvivorList.size(self.session))
        _is_from(i, sender)
        if read_roll(self.session, body) != self._roll:
            raise SecAggMessageError("another roll was signed")
        self._agreements[i] = message

    def _take_reveal(self, i: int, message: bytes) -> None:
        sender, shares = read_reveal(self.session, message, self._roll)
        _is_from(i, sender)
        for whose, share in shares.items():
            which, label = (0, b"seed") if whose in self._roll.alive else (1, b"key")
            if commit(self.session, label, (whose, i), share) == self._commitments[whose][i][which]:
                self._shares.setdefault(whose, {})[i + 1] = share


def _is_from(expected: int, sender: int) -> None:
    if sender != expected:
        raise SecAggMessageError("one site's message from another's channel")


def _joined(messages: Mapping[int, bytes]) -> bytes:
    return b"".join(messages[i] for i in sorted(messages))
