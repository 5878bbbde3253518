"""Pool admitted synthetic sets of several sites: select, find duplicates, add up the privacy cost.

Pure. The ledger says what was admitted (:func:`books_of`). A release is selected only with the envelope whose digest
is in its entry, so stored certificates are never used. Filters exclude releases with a reason, and a release that a
filter cannot decide is excluded.

The same patient may have been in two hospitals, and the pool cannot detect this. Each site's budget covers one site's
patients, so :func:`worst_case` adds them up (design P4, P5: kinds never add, k-anonymity does not compose).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from policies.accounting.claims import UNIT, Claim, Gaussian, KAnonymous, NoClaim, UnsupportedClaimError
from policies.accounting.rdp import NANO, epsilon_nano, epsilon_of
from policies.accounting.rounding import epsilon_text
from policies.ledger.entries import Admitted, Enrolled, Record, RoundClosed
from policies.ledger.state import State
from policies.statements import PAYLOAD_TYPE, Release, StatementError, claim_from, load_json, parse
from protos.common.dsse import EnvelopeError, open_sealed
from protos.common.errors import RefusedError

LEVELS: Final = ("A", "A*", "B", "C")  # strongest first
MIXABLE: Final = frozenset({"modality", "shape"})


class PoolRefusedError(RefusedError, ValueError):
    """There is no pool, or no merged model: the text names the release or file, the reason, and the remedy."""


@dataclass(frozen=True, slots=True)
class PoolLedger:
    """The ledger, as far as a pool asks it."""

    state: State
    at: Mapping[str, int]  # release -> when it was admitted, in seconds since 1970
    models: Mapping[str, tuple[int, bytes]]  # run -> its last closed round, SHA-256 of that round's model
    keys: Mapping[str, tuple[bytes, ...]]  # site -> every key that it ever signed with


@dataclass(frozen=True, slots=True)
class AdmittedRelease:
    """An admitted release: the ledger's entry and its signed statement."""

    release: str
    site: str
    mechanism: str
    level: str
    modality: str
    artifact_type: str
    claim: Claim
    grant: str
    kind: str  # "rdp" | "k" | "none": no promise that could be priced
    used: int  # of its grant: nano-nats at the account's order, or releases per patient
    order: int  # 0 for kind k
    delta: float | None
    epsilon: float | None  # of this release alone, at its account's delta
    at: int
    artifact: str  # SHA-256, hexadecimal
    envelope: str  # likewise
    reader: str  # SHA-256 of the one key that can open it; "": it is not encrypted
    reid_rate: str | None = None  # decimal texts of its statement, where they were measured: at most so many were
    vetting_power: str | None = None  # re-identified; so many of planted copies, or more, were caught

    @property
    def k(self) -> int | None:
        """Distinct patients behind each image; None where that was not promised."""
        return self.claim.k if isinstance(self.claim, KAnonymous) else None


def books_of(records: Iterable[Record]) -> PoolLedger:
    """Fold a ledger's records, and keep when each release was admitted and what each run made.

    Raises:
        InvalidEntryError: the records do not fold.
    """
    state = State()
    at: dict[str, int] = {}
    models: dict[str, tuple[int, bytes]] = {}
    keys: dict[str, tuple[bytes, ...]] = defaultdict(tuple)
    for record in records:
        state.apply(record)
        if isinstance(record.entry, Admitted):
            at[record.entry.release] = record.at
        elif isinstance(record.entry, RoundClosed):
            models[record.entry.run] = (record.entry.round, record.entry.model)
        elif isinstance(record.entry, Enrolled):  # again with another key, perhaps, after it was revoked
            keys[record.entry.site] += (record.entry.sign_key,)
    return PoolLedger(state, at, models, keys)


def source_of(ledger: PoolLedger, release: str, envelope: bytes) -> AdmittedRelease:
    """A release as the ledger admitted it; ``envelope`` is stored next to its artifact.

    Raises:
        PoolRefusedError: not admitted, another envelope than the admitted one, or a level or unit without words here.
    """
    entry = ledger.state.releases.get(release)
    if entry is None:
        raise PoolRefusedError(f"{release}: the ledger did not admit it")
    if hashlib.sha256(envelope).digest() != entry.envelope:
        raise PoolRefusedError(f"{release}: the envelope is not the one that the ledger admitted; it was changed")
    keys = {f"{entry.site} {i}": key for i, key in enumerate(ledger.keys[entry.site])}
    try:
        said = parse(open_sealed(envelope, PAYLOAD_TYPE, keys).payload)
    except (EnvelopeError, StatementError, UnsupportedClaimError) as error:
        raise PoolRefusedError(f"{release}: its statement cannot be read: {error}") from None
    if not isinstance(said, Release) or (said.release, said.site) != (release, entry.site):
        raise PoolRefusedError(f"{release}: its statement is about something else")
    if said.artifact_sha256 != entry.artifact.hex():
        raise PoolRefusedError(f"{release}: its statement is about another artifact")
    source = _priced(ledger, entry, said.modality, said.artifact_type)
    return replace(source, reid_rate=said.reid_rate, vetting_power=said.vetting_power)


def update_of(ledger: PoolLedger, entry: Admitted) -> AdmittedRelease:
    """An update of a federated run, by its entry alone: it has left no file behind.

    Raises:
        PoolRefusedError: a level or unit that a pool cannot state.
    """
    return _priced(ledger, entry, "", "update")


def _priced(ledger: PoolLedger, entry: Admitted, modality: str, artifact_type: str) -> AdmittedRelease:
    if entry.level not in LEVELS:
        raise PoolRefusedError(f"{entry.release}: its level {entry.level!r} is not one of {', '.join(LEVELS)}")
    claim = claim_from(load_json(entry.claim))
    if not isinstance(claim, NoClaim) and claim.unit != UNIT:
        raise PoolRefusedError(f"{entry.release}: its claim is per {claim.unit}, which cannot be added to others")
    opened = ledger.state.accounts[ledger.state.grants[entry.grant].reserved.account].opened
    kind, delta, epsilon = "none", None, None
    if isinstance(claim, KAnonymous):
        kind = "k"
    elif isinstance(claim, Gaussian) and opened.order and entry.level in ("A", "A*"):  # else it is void (P6, P7)
        kind, delta = "rdp", float(opened.delta)
        epsilon = epsilon_nano(claim, delta, opened.order) / NANO
    return AdmittedRelease(
        entry.release, entry.site, entry.mechanism, entry.level, modality, artifact_type, claim, entry.grant, kind,
        entry.used, opened.order if kind == "rdp" else 0, delta, epsilon, ledger.at.get(entry.release, 0),
        entry.artifact.hex(), entry.envelope.hex(), entry.reader,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SelectionCriteria:
    """Which releases a pool shall hold; an empty set asks for nothing in particular."""

    sites: frozenset[str] = frozenset()
    mechanisms: frozenset[str] = frozenset()
    modalities: frozenset[str] = frozenset()
    level: str = "C"  # the weakest one admitted
    k: int | None = None  # of k-anonymous releases, at least
    epsilon: float | None = None  # of differentially private releases, at most
    since: int = 0  # admitted then or later, seconds since 1970
    without: frozenset[str] = frozenset()  # releases left out by name
    mixed: frozenset[str] = frozenset()  # of MIXABLE: what may differ within the pool

    def __post_init__(self) -> None:
        """Refuse a filter that would not say what it lets in."""
        if self.level not in LEVELS:
            raise PoolRefusedError(f"the level is one of {', '.join(LEVELS)}")
        if not self.mixed <= MIXABLE:
            raise PoolRefusedError(f"what may be mixed is {' or '.join(sorted(MIXABLE))}")
        if self.k is not None and not self.k >= 2:
            raise PoolRefusedError("k is a whole number of at least 2")
        if self.epsilon is not None and not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise PoolRefusedError("epsilon is a finite number above 0")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A release that is not in the pool, and the rule that kept it out."""

    release: str
    rule: str
    why: str


def select(
    sources: Sequence[AdmittedRelease], wanted: SelectionCriteria
) -> tuple[list[AdmittedRelease], list[LeftOut]]:
    """The releases that a pool may hold, by site and name, and the others with the first reason of each.

    A bound on k says nothing about a release without k, and likewise for epsilon: if a bound is given, releases of
    another kind are selected only by the bound of their own kind (kinds are not comparable, P4).
    """
    kept, left = [], []
    for source in sorted(sources, key=lambda s: (s.site, s.release)):
        reason = _unwanted(source, wanted)
        if reason is None:
            kept.append(source)
        else:
            left.append(LeftOut(source.release, *reason))
    return kept, left


def _unwanted(source: AdmittedRelease, wanted: SelectionCriteria) -> tuple[str, str] | None:
    """Why a release is left out, or None."""
    if source.release in wanted.without:
        return "excluded", "left out by name"
    for rule, value, admitted in (
        ("site", source.site, wanted.sites),
        ("mechanism", source.mechanism, wanted.mechanisms),
        ("modality", source.modality, wanted.modalities),
    ):
        if admitted and value not in admitted:
            return rule, f"the {rule} is {value}"
    if LEVELS.index(source.level) > LEVELS.index(wanted.level):
        return "level", f"level {source.level} is weaker than {wanted.level}"
    if not source.at >= wanted.since:
        return "since", "it was admitted earlier"
    return _out_of_bounds(source, wanted)


def _out_of_bounds(source: AdmittedRelease, wanted: SelectionCriteria) -> tuple[str, str] | None:
    if wanted.k is None and wanted.epsilon is None:
        return None
    if source.kind == "k" and wanted.k is not None:
        enough = source.k is not None and source.k >= wanted.k
        return None if enough else ("k", f"k is {source.k}, less than {wanted.k}")
    if source.kind == "rdp" and wanted.epsilon is not None and source.epsilon is not None:
        if source.epsilon <= wanted.epsilon:
            return None
        if not math.isfinite(source.epsilon):
            return "epsilon", "its epsilon is not finite"
        return "epsilon", f"epsilon is {epsilon_text(source.epsilon)}, more than {epsilon_text(wanted.epsilon)}"
    return "kind", "it has no figure for this bound"


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What the releases of one kind in a pool cost the patients of one site."""

    site: str
    kind: str
    releases: int
    epsilon: float | None = None  # of them all, composed at the account's order; None: there is none
    delta: float | None = None
    sets: int | None = None  # kind k: released groups that one patient may be in


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The same for a patient who has been in every one of the sites: budgets add."""

    kind: str
    sites: tuple[str, ...]
    releases: int
    epsilon: float | None = None  # sum of the sites' epsilons
    delta: float | None = None  # sum of the sites' deltas
    sets: int | None = None


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """What a pool costs, site by site, and a patient of all of them."""

    modality: str  # "" for all together
    costs: tuple[PoolCost, ...]
    worst: tuple[WorstCase, ...] = field(default=())


def budget(sources: Iterable[AdmittedRelease], modality: str = "") -> PoolBudget:
    """What these releases cost per site and kind, and in the worst case a patient who was in all of the sites.

    Within a site Rényi divergences add at the account's order, each grant as far as it is used (P9). Across sites
    the accounts may have different orders, so the (epsilon, delta) statements add: Dwork & Roth 2014, theorem 3.16.
    """
    used: dict[tuple[str, str], dict[str, AdmittedRelease]] = defaultdict(dict)
    count: dict[tuple[str, str], int] = defaultdict(int)
    for source in sources:
        if modality and source.modality != modality:
            continue
        at = used[(source.site, source.kind)]
        count[(source.site, source.kind)] += 1
        if source.grant not in at or source.used > at[source.grant].used:
            at[source.grant] = source
    costs = tuple(_cost(*key, count[key], tuple(by_grant.values())) for key, by_grant in sorted(used.items()))
    return PoolBudget(modality, costs, worst_case(costs))


def _cost(site: str, kind: str, releases: int, paid: tuple[AdmittedRelease, ...]) -> PoolCost:
    total = sum(s.used for s in paid)
    if kind == "k":
        return PoolCost(site, kind, releases, sets=total)
    (order, delta), *others = {(s.order, s.delta) for s in paid}
    if kind != "rdp" or delta is None or others:
        return PoolCost(site, kind, releases)
    return PoolCost(site, kind, releases, epsilon_of(total, delta, order), delta)


def worst_case(costs: Sequence[PoolCost]) -> tuple[WorstCase, ...]:
    """By kind, for one patient in all of the sites. What has no figure at one site has none in sum."""
    out = []
    for kind in sorted({c.kind for c in costs}):
        mine = [c for c in costs if c.kind == kind]
        sites, releases = tuple(c.site for c in mine), sum(c.releases for c in mine)
        epsilons = [c.epsilon for c in mine if c.epsilon is not None]
        deltas = [c.delta for c in mine if c.delta is not None]
        sets = [c.sets for c in mine if c.sets is not None]
        epsilon = math.fsum(epsilons) if len(epsilons) == len(mine) else None
        delta = math.fsum(deltas) if len(deltas) == len(mine) else None
        out.append(WorstCase(kind, sites, releases, epsilon, delta, sum(sets) if len(sets) == len(mine) else None))
    return tuple(out)


def weakest(levels: Iterable[str]) -> str:
    """The weakest of some levels, by the order A < A* < B < C."""
    return max(levels, key=LEVELS.index)
