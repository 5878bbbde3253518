"""Secure aggregation, the site's side: the coordinator learns the sum of the sites' vectors and nothing else of them.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning" (CCS 2017), Figure 4 with the parts for an active server: signed keys and the
consistency check. Five exchanges (`protos.secagg.messages.SumStep`), bytes in and bytes out; the other side is
`protos.secagg.server`. With ``u`` this site, ``x`` its vector and all sums modulo 2^bits, the coordinator gets

    y_u = x_u + PRG(b_u) + sum over v < u of PRG(s_uv) - sum over v > u of PRG(s_uv)

and from ``threshold`` sites a share of *either* ``b_v`` (v survived) *or* v's mask key (it did not), never both.

Guarantee against a malicious coordinator that colludes with ``corrupt`` sites: they learn at most the sum of the
other survivors, of whom there are at least ``min_survivors - corrupt >= honest``. Not covered: a roster of sites that
the coordinator invented (see `KnownPartners`), what the sum itself reveals, sums of several rounds with different
survivors, and a site that lies about its own vector. Any member can spoil a round.

The caller has one duty, since nothing here is durable: at most one `Member` for each run and round, *ever*, recorded
before `advertise`, whatever the session's other fields are. Two sums over the same vectors with different survivors
reveal one site's vector by their difference.

Flower's SecAgg+ was measured and rejected (32-bit seeds, unsigned keys, and its clients answer a server that lists a
site both as dead and alive). The protocol here is ours; every primitive but Shamir's is ``cryptography``'s.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from protos.secagg.messages import (
    ADVERT_BYTES,
    FRAME,
    KEY_SHARE,
    PARCEL_BYTES,
    SEED_SHARE,
    Advert,
    Dealer,
    SecAggError,
    SecAggMessageError,
    SumStep,
    SurvivorList,
    commit,
    commit_shares,
    open_message,
    pack_reveal,
    pair_seed,
    read_advert,
    read_parcel,
    read_roll,
    self_seed,
    sign,
    split_messages,
)
from protos.secagg.session import KnownPartners, SumSession
from protos.secagg.shamir import RandomSource, split


@dataclass(slots=True, repr=False)
class _Secrets:
    """What a member knows alone, until it has revealed or refused."""

    share_key: X25519PrivateKey
    mask_key: X25519PrivateKey
    seed: bytes  # the paper's b
    advert: bytes
    adverts: dict[int, Advert] = field(default_factory=dict)  # U1
    dealer: Dealer | None = None
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # of others' seeds and keys
    sharers: frozenset[int] = frozenset()  # U2
    roll: SurvivorList | None = None


class Member:
    """One site in one secure sum. Each step is done once, in order; any refusal ends it and forgets all secrets.

    None of it may be stored: a site whose process died has dropped out. An adapter that may have to repeat a lost
    answer stores the answer, not the member.
    """

    def __init__(
        self, session: SumSession, site: str, sign_key: Ed25519PrivateKey, known: KnownPartners, entropy: RandomSource
    ) -> None:
        """Take part in ``session`` as ``site``.

        Args:
            session: built from what this site itself received and checked.
            site: its name in the roster.
            sign_key: its enrolled signing key.
            known: whom it knows by its own means.
            entropy: cryptographic, never repeatable outside tests; 96 bytes, then 48 bytes for each of the
                2 (threshold - 1) coefficients, those of the seed first.
        Raises:
            SecAggError: the roster does not have this site with this key, or too few that it knows.
        """
        if session.roster.get(site) != sign_key.public_key().public_bytes_raw():
            raise SecAggError("the roster does not name this site with its own key")
        self._session, self._key, self._known = session, sign_key, known
        self._own = session.sites.index(site)
        self._entropy = entropy
        self._next: SumStep | None = SumStep.ADVERTISE
        self._meet(frozenset(range(len(session.sites))))
        self._secrets: _Secrets | None = self._draw(entropy)

    @property
    def done(self) -> bool:
        """Whether it has revealed or refused, and forgotten its secrets."""
        return self._next is None

    def advertise(self, request: bytes) -> bytes:
        """Round 0: fresh keys, signed. The request is empty.

        Raises:
            SecAggError: asked before, or with something in the request.
        """
        with self._doing(SumStep.ADVERTISE) as own:
            if request:
                raise SecAggMessageError("nothing is said before the keys")
            return own.advert

    def _draw(self, entropy: RandomSource) -> _Secrets:
        share_key = X25519PrivateKey.from_private_bytes(entropy.take(32))
        mask_key = X25519PrivateKey.from_private_bytes(entropy.take(32))
        seed = entropy.take(32)
        publics = [key.public_key().public_bytes_raw() for key in (share_key, mask_key)]
        body = b"".join([*publics, commit(self._session, b"b", (self._own,), seed)])
        advert = sign(self._session, SumStep.ADVERTISE, self._own, body, self._key)
        return _Secrets(share_key, mask_key, seed, advert)

    def share(self, request: bytes) -> bytes:
        """Round 1: all advertisements in; shares of this site's seed and mask key out, sealed for each other member.

        Raises:
            SecAggError: a key is forged, repeated, of another session; this site's own is missing or was changed; or
                too few members, or too few known ones, are left.
        """
        with self._doing(SumStep.SHARE) as own:
            found = [read_advert(self._session, raw) for raw in split_messages(self._session, request, ADVERT_BYTES)]
            own.adverts = {advert.sender: advert for advert in found}
            _ascending([advert.sender for advert in found])
            if own.adverts.get(self._own) != read_advert(self._session, own.advert):
                raise SecAggError("this site's own advertisement is missing or was changed")
            publics = [public for advert in found for public in (advert.share_key, advert.mask_key)]
            if len(set(publics)) != len(publics):
                raise SecAggError("two advertised keys are the same")
            self._enough(frozenset(own.adverts))
            own.dealer = Dealer(self._session, self._own, own.share_key, hashlib.sha256(request).digest())
            return self._deal(own, own.dealer)

    def _deal(self, own: _Secrets, dealer: Dealer) -> bytes:
        threshold, points = self._session.params.quorum.threshold, [i + 1 for i in own.adverts]
        seeds = split(own.seed, threshold, points, self._entropy)
        keys = split(own.mask_key.private_bytes_raw(), threshold, points, self._entropy)
        kept = own.shares[self._own] = seeds[self._own + 1], keys[self._own + 1]
        parcels = [
            dealer.seal(advert, (seeds[i + 1], keys[i + 1]), self._key)
            for i, advert in own.adverts.items()
            if i != self._own
        ]
        body = dealer.adverts + b"".join(commit_shares(self._session, self._own, self._own, kept)) + b"".join(parcels)
        return sign(self._session, SumStep.SHARE, self._own, body, self._key)

    def mask(self, request: bytes, lattice: NDArray[np.int64]) -> bytes:
        """Round 2: the parcels for this site in; its masked vector out.

        Args:
            request: parcels, ascending by dealer. One that its dealer signed but spoilt is set aside: it costs the
                dealer's share, not the round. One that the dealer did not sign was changed on the way: refused.
            lattice: (length,) int64 from `Ring.quantise`, plus the noise that is drawn on the lattice, within the
                bound.
        Raises:
            SecAggError: parcels were changed, doubled, misdirected, or are too few.
            NotEncodableError: the vector does not fit the ring.
        """
        with self._doing(SumStep.MASK) as own:
            ring = self._session.params.ring
            total = ring.lift(lattice)
            self._accept(own, request)
            ring.add_mask(total, self_seed(self._session, self._own, own.seed), 1)
            for i in own.sharers - {self._own}:
                seed = pair_seed(self._session, own.mask_key, self._own, own.adverts[i])
                ring.add_mask(total, seed, 1 if self._own > i else -1)
            return sign(self._session, SumStep.MASK, self._own, total.tobytes(), self._key)

    def _accept(self, own: _Secrets, request: bytes) -> None:
        assert own.dealer is not None
        raws = split_messages(self._session, request, PARCEL_BYTES)
        parcels = [read_parcel(self._session, raw, own.dealer.adverts) for raw in raws]
        _ascending([parcel.dealer for parcel in parcels])
        for parcel in parcels:
            if parcel.holder != self._own or parcel.dealer not in own.adverts:
                raise SecAggError("a parcel is for another site, or from one that did not advertise")
            shares = own.dealer.open(parcel, own.adverts[parcel.dealer])
            if shares is not None:
                own.shares[parcel.dealer] = shares
        own.sharers = frozenset(parcel.dealer for parcel in parcels) | {self._own}
        self._enough(own.sharers)

    def agree(self, request: bytes) -> bytes:
        """Round 3, the consistency check: the roll in; this site's signature under it out.

        Raises:
            SecAggError: a site is listed both alive and dead, or in neither list; this site is not alive; or the
                survivors, or the known ones among them, are too few.
        """
        with self._doing(SumStep.AGREE) as own:
            roll = read_roll(self._session, request)
            if roll.alive & roll.dead:
                raise SecAggError("a site is listed both dead and alive: whoever asks this wants to unmask it")
            if roll.alive | roll.dead != own.sharers:
                raise SecAggError("the roll is not of the sites that shared their keys")
            if self._own not in roll.alive:
                raise SecAggError("this site has sent its vector and is not listed alive")
            self._enough(roll.alive)
            own.roll = roll
            return sign(self._session, SumStep.AGREE, self._own, roll.encode(self._session), self._key)

    def reveal(self, request: bytes) -> bytes:
        """Round 4: the survivors' signatures in; one share for each site out: of its seed or of its mask key.

        Raises:
            SecAggError: fewer than ``threshold`` survivors have signed the very roll that this site has signed.
        """
        with self._doing(SumStep.REVEAL) as own:
            roll = own.roll
            assert roll is not None
            signers = []
            for raw in split_messages(self._session, request, FRAME + SurvivorList.size(self._session)):
                signer, body = open_message(self._session, SumStep.AGREE, raw, SurvivorList.size(self._session))
                if body != roll.encode(self._session):
                    raise SecAggError("the sites were shown different rolls")
                signers.append(signer)
            _ascending(signers)
            if not set(signers) <= roll.alive:
                raise SecAggError("a site signed the roll that is not on it")
            if not len(signers) >= self._session.params.quorum.threshold:
                raise SecAggError("too few survivors have signed the roll")
            shares = {
                i: (SEED_SHARE, seed) if i in roll.alive else (KEY_SHARE, key)
                for i, (seed, key) in own.shares.items()
            }
            return sign(self._session, SumStep.REVEAL, self._own, pack_reveal(self._session, shares), self._key)

    def answer(self, step: SumStep, request: bytes, lattice: NDArray[np.int64] | None = None) -> bytes:
        """The step by its name, for an adapter: bytes in, bytes out. Only `Step.MASK` takes a vector.

        Raises:
            SecAggError: as the steps do; or a vector is missing or not wanted.
        """
        if (step is SumStep.MASK) is (lattice is None):
            raise SecAggError("a vector belongs to the mask step, and to it alone")
        if lattice is not None:
            return self.mask(request, lattice)
        steps = {
            SumStep.ADVERTISE: self.advertise,
            SumStep.SHARE: self.share,
            SumStep.AGREE: self.agree,
            SumStep.REVEAL: self.reveal,
        }
        return steps[step](request)

    @contextmanager
    def _doing(self, step: SumStep) -> Iterator[_Secrets]:
        """Let ``step`` happen once and in its place; whatever goes wrong, no secret outlives it."""
        try:
            if self._next is not step or self._secrets is None:
                raise SecAggError(f"asked to {step.name.lower()} out of turn")
            yield self._secrets
        except BaseException:
            self._forget()
            raise
        if step is SumStep.REVEAL:
            self._forget()
        else:
            self._next = SumStep(step + 1)

    def _forget(self) -> None:
        self._next, self._secrets = None, None

    def _enough(self, members: frozenset[int]) -> None:
        if not len(members) >= self._session.params.quorum.min_survivors:
            raise SecAggError(
                f"{len(members)} sites are left, {self._session.params.quorum.min_survivors} are needed"
            )
        self._meet(members)

    def _meet(self, members: frozenset[int]) -> None:
        if short := self._known.missing(self._session, self._own, members):
            raise SecAggError(f"of the sites left, {short} more must be ones that this site knows")


def _ascending(senders: list[int]) -> None:
    if any(a >= b for a, b in itertools.pairwise(senders)):
        raise SecAggMessageError("senders are not ascending, or one comes twice")
