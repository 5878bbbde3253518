"""A site's own ledger as the benchmarks fill it: releases, runs of three rounds, lost grants, refusals.

The entries are those that :class:`policies.ledger_service.LedgerService` writes, made without its reviews so that a
million of them take minutes; ``lazaret-verify`` reviews them again and finds them sound. Every statement is really
signed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.claims import Claim, KAnonymous, SubsampledGaussian
from policies.accounting.rdp import epsilon_nano
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.entries import Admitted, Expired, Refused, Reserved, Sent, Spent
from policies.ledger.state import Account
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import LedgerService, digest
from policies.review.policy import parse
from policies.review.rules import level_of, price
from policies.statements import Release, Reservation, Settlement, claim_json
from protos.common.canonical_json import canonical
from tests.support.ledger_world import COMPONENTS, K5, Clock, Hospital, policy

ORIGIN = "lazaret/benchmark"
SITES = 8
TRAINING = SubsampledGaussian(sampling_rate=0.01, noise_multiplier=8.0, steps=60)
STEPS = 15  # of each round: three of the four that were reserved
GREEDY = SubsampledGaussian(sampling_rate=0.5, noise_multiplier=0.6, steps=50_000)
THIN = KAnonymous(k=2, l_diversity=1, releases_per_patient=1)
Named = tuple[str, AppendRequest]


@dataclass
class Site:
    """A hospital with large limits, its two accounts, and what it would write down."""

    hospital: Hospital
    accounts: dict[str, Account] = field(default_factory=dict)

    def reservation(self, grant: str, claim: Claim, run: str) -> tuple[Reservation, bytes]:
        """A reservation and its envelope."""
        asked = self.hospital.reservation(grant, claim, "federated" if run else "ksame", run)
        return asked, self.hospital.seal(asked)

    def reserve(self, grant: str, claim: Claim = K5, run: str = "") -> Named:
        """The grant of a reservation, as :meth:`policies.ledger_service.LedgerService.reserve` writes it."""
        asked, envelope = self.reservation(grant, claim, run)
        account = self.accounts["rdp" if run else "k"]
        entry = Reserved(
            grant=grant,
            site=asked.site,
            run=run,
            mechanism=asked.mechanism,
            account=account.opened.account,
            amount=price(claim, account),
            claim=canonical(claim_json(claim)),
            envelope=digest(envelope),
        )
        return f"reserve-{grant}", AppendRequest((entry,), (envelope,))

    def refuse(self, grant: str, claim: Claim, run: str, *rules: str) -> Named:
        """A refused reservation."""
        asked, envelope = self.reservation(grant, claim, run)
        entry = Refused(grant, asked.site, asked.mechanism, "reservation", list(rules), digest(envelope))
        return f"reserve-{grant}", AppendRequest((entry,), (envelope,))

    def statement(self, grant: str, run: str = "", round_index: int = 0) -> Release:
        """What the site says of a release; a run's claim grows with its rounds."""
        if not run:
            return self.hospital.release(grant)
        claim, opened = replace(TRAINING, steps=STEPS * round_index), self.accounts["rdp"].opened
        epsilon = epsilon_nano(claim, float(opened.delta), opened.order)
        made: dict[str, Any] = {
            "run": run,
            "round": round_index,
            "mechanism": "federated",
            "artifact_type": "update",
            "claim": claim,
        }
        components = COMPONENTS["federated"]
        return self.hospital.release(grant, **made, epsilon_nano=epsilon, delta=opened.delta, components=components)

    def release(self, grant: str, run: str = "", round_index: int = 0) -> Iterator[Named]:
        """Sent, then admitted; a single release takes its whole grant with it."""
        r = self.statement(grant, run, round_index)
        envelope, used = self.hospital.seal(r), price(r.claim, self.accounts["rdp" if run else "k"])
        same: dict[str, Any] = {
            "release": r.release,
            "grant": grant,
            "site": r.site,
            "run": run,
            "round": r.round,
            "used": used,
        }
        same |= {"mechanism": r.mechanism, "artifact": bytes.fromhex(r.artifact_sha256), "envelope": digest(envelope)}
        admitted = Admitted(**same, level=level_of(r), claim=canonical(claim_json(r.claim)), reader=r.reader)
        yield f"send-{r.release}", AppendRequest((Sent(**same),), (envelope,))
        end = () if run else (Spent(grant=grant, used=used, why="released", envelope=b""),)
        yield f"submit-{r.release}", AppendRequest((admitted, *end), (envelope,))

    def finish(self, grant: str, run: str, rounds: int) -> Named:
        """A run that ended before its grant did: the rest is given back on the site's signed word."""
        used = price(replace(TRAINING, steps=STEPS * rounds), self.accounts["rdp"])
        said = Settlement(grant, self.hospital.name, run, "federated", "finished", "rounds", used)
        envelope = self.hospital.seal(said)
        return f"finish-{grant}", AppendRequest((Spent(grant, used, "finished", digest(envelope)),), (envelope,))

    def story(self, n: int) -> Iterator[Named]:
        """Sixteen entries: a release, a run of three rounds, a lost grant, two refusals."""
        site, run = self.hospital.name, f"run-{n:07d}"
        single, part, lost = f"ksame-{site}-{n:07d}", f"{run}-{site}", f"lost-{site}-{n:07d}"
        yield self.reserve(single)
        yield from self.release(single)
        yield self.reserve(part, TRAINING, run)
        for round_index in (1, 2, 3):
            yield from self.release(part, run, round_index)
        yield self.finish(part, run, 3)
        yield self.reserve(lost)
        yield f"close-{lost}", AppendRequest((Expired(lost, "restart"),))
        yield self.refuse(f"thin-{site}-{n:07d}", THIN, "", "min_k", "l_diversity")
        yield self.refuse(f"greedy-{site}-{n:07d}", GREEDY, run, "budget")


@dataclass(frozen=True, slots=True)
class World:
    """A ledger with enrolled sites, and endless stories to append to it."""

    store: Store
    sites: tuple[Site, ...]

    def stories(self, first: int = 0) -> Iterator[Named]:
        """What happens, from a number on that was not used before."""
        n = first
        while True:
            yield from self.sites[n % len(self.sites)].story(n)
            n += 1


def open_world(path: Path, key: Ed25519PrivateKey) -> World:
    """A new ledger whose sites may spend as much as a policy can allow."""
    text = policy(epsilon=100.0, max_releases_per_patient=1_000_000)
    sites = tuple(Site(Hospital(f"site-{i}", text)) for i in range(SITES))
    store = Store(open_sqlite(path), ORIGIN, key, Clock())
    law = parse(text, "policy")
    register = LedgerService(store, lambda _site: law)
    for site in sites:
        register.enrol(*site.hospital.enrolment(), law)
        site.accounts = {kind: store.state.accounts[f"{site.hospital.name}/{kind}"] for kind in ("rdp", "k")}
    return World(store, sites)


def fill(world: World, entries: int, batch: int) -> None:
    """Append stories until there are so many entries, many to a commit."""
    stories = world.stories()
    while world.store.state.size < entries:
        with world.store.exclusive() as state:
            until = min(state.size + batch, entries)
            while state.size < until:
                key, draft = next(stories)
                world.store.append(key, replace(draft, entries=draft.entries[: until - state.size]))
