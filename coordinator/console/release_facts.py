"""An admitted release in words: its guarantee, its privacy cost, its tests, and their evidence. Pure.

All facts come from the ledger's entry, the account charged, and the signed statement whose digest is in the entry.
Nothing is taken from a stored certificate, and no statement is stronger than the level.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from coordinator.claim_descriptions import UNTESTED, describe_claim, evidence
from coordinator.explanations import LEVELS, MECHANISMS, format_epsilon, rounded_down, rounded_up
from coordinator.storage.release_store import certificate
from policies.accounting.claims import RELATION, UNIT, UnsupportedClaimError
from policies.accounting.rdp import NANO
from policies.ledger.entries import Admitted, Opened
from policies.ledger.state import State
from policies.statements import Release, decimal, menu_of

KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "image-set": "set of synthetic images",
        "volume-set": "set of volumes",
        "model": "model",
        "update": "update of a federated run",
        "masked-update": "masked update of a federated run",
        "evaluation": "evaluation of a federated run",
        "masked-evaluation": "masked evaluation of a federated run",
    }
)
FILES: Final[Mapping[str, str]] = MappingProxyType(
    {"image-set": "images.tar", "volume-set": "volumes.tar", "model": "model.safetensors"}
)
_VETTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nothing": "It was not compared with anybody's images after it was made.",
        "public": "It was compared with public images only, which takes nothing from the promise.",
        "private": "It was compared with the patients' own images: that voids an epsilon, so it is of level C.",
    }
)


@dataclass(frozen=True, slots=True)
class Attack:
    """One result of an attack, as the statement gives it: one end of a 95 % interval, rounded to its disadvantage."""

    name: str
    kind: str  # of the bar that draws it
    says: str
    value: float  # the end that was measured, percent
    wanted: str  # what would be good, in words


@dataclass(frozen=True, slots=True)
class ReleaseFacts:
    """A release as its page shows it."""

    id: str
    site: str
    run: str
    round: int
    method: str
    mechanism: str
    kind: str  # of artifact, in words
    file: str  # its name on the shelf
    size: int | None  # bytes; None: not stated
    modality: str
    level: str
    title: str
    meaning: str
    plain: str
    promise: str
    epsilon: str  # with delta, unit and relation; "" where there is none
    assumption: str
    tested: str  # at level C: the sentence that stands for a promise
    attacks: tuple[Attack, ...]
    vetted: str
    tried: str
    components: tuple[tuple[str, str], ...]
    approvals: tuple[tuple[str, str], ...]  # role, digest of the sealed approval
    reader: str
    unseen: str
    artifact: str
    statement: str
    stated: bool  # whether the sealed statement was at hand

    @property
    def pictures(self) -> bool:
        """Whether the shelf may hold images that a browser shows."""
        return self.file == FILES["image-set"]


def facts_of(entry: Admitted, opened: Opened, said: Release | None) -> ReleaseFacts:
    """A release's facts.

    Args:
        entry: the ledger's.
        opened: the account that paid.
        said: the statement in the envelope whose digest is in the entry; None when it cannot be read.
    """
    told = certificate(entry, opened)
    title, meaning, plain = LEVELS.get(entry.level, ("Unknown level", "no promise", "This page knows no such level."))
    kind = said.artifact_type if said else ""
    method = MECHANISMS.get(entry.mechanism, entry.mechanism)
    reid, power = (said.reid_rate, said.vetting_power) if said else (None, None)
    return ReleaseFacts(
        id=entry.release,
        site=entry.site,
        run=entry.run,
        round=entry.round,
        method=method,
        mechanism=entry.mechanism,
        kind=KINDS.get(kind, kind or "not stated"),
        file="artifact.hpke" if entry.reader else FILES.get(kind, ""),
        size=said.artifact_bytes if said else None,
        modality=said.modality if said else "",
        level=entry.level,
        title=title,
        meaning=meaning,
        plain=plain,
        promise=describe_claim(json.loads(entry.claim)),
        epsilon=epsilon_of(told),
        assumption=str(told.get("assumption", "")),
        tested=evidence(reid, power, entry.mechanism) if entry.level == "C" else "",
        attacks=attacks_of(reid, power),
        vetted=_VETTED.get(said.vetted_against, "") if said else UNTESTED,
        tried=", ".join(map(str, menu_of(said.menu))) if said else "",
        components=tuple(sorted(said.components.items())) if said else (),
        approvals=tuple(sorted(said.approvals.items())) if said else (),
        reader=entry.reader,
        unseen=str(told.get("unseen", "")),
        artifact=entry.artifact.hex(),
        statement=entry.envelope.hex(),
        stated=said is not None,
    )


def epsilon_of(told: Mapping[str, Any]) -> str:
    """A certificate's epsilon with all that it means nothing without; "" where it has none."""
    if "epsilon" not in told:
        return ""
    account = {"delta": told["delta"], "order": told["order"]}
    return format_epsilon(told["epsilon"], account, {"relation": RELATION, "unit": UNIT})


def attacks_of(reid: str | None, power: str | None) -> tuple[Attack, ...]:
    """The two figures that a statement may hold; what was not measured, or is no share, is left out."""
    out = []
    if (share := _percent(reid)) is not None:
        high = rounded_up(share, 1)
        says = f"0 to {high:g} % were matched with a patient (95 % interval, its upper end)"
        out.append(Attack("Re-identified by a verifier", "no", says, high, "the lower, the better"))
    if (share := _percent(power)) is not None:
        low = rounded_down(share, 1)
        says = f"{low:g} to 100 % of planted copies were caught (95 % interval, its lower end)"
        out.append(Attack("The test's own power", "yes", says, low, "the higher, the more the test is worth"))
    return tuple(out)


def _percent(share: str | None) -> float | None:
    try:
        value = decimal(share)
    except UnsupportedClaimError:
        return None
    return 100 * value if 0 <= value <= 1 else None


@dataclass(frozen=True, slots=True)
class SitePart:
    """One site's part in a run's model."""

    site: str
    rounds: int
    epsilon: str
    level: str


@dataclass(frozen=True, slots=True)
class RunModel:
    """A finished run's model, according to the ledger."""

    facts: ReleaseFacts
    parts: tuple[SitePart, ...]
    strategy: str


def model_of(state: State, updates: Sequence[Admitted], model: bytes, strategy: str) -> RunModel | None:
    """A run's model in words; None while the ledger counts no update for it.

    It is no better than the dearest of the updates in it, and than the weakest level among them.

    Args:
        state: the fold, under its lock.
        updates: of the run, all that were admitted.
        model: SHA-256, of the last closed round.
        strategy: the job's, as JSON.
    """
    mine = [a for a in updates if (a.run, a.round, a.site) in state.aggregated]
    if not mine:
        return None
    run = mine[0].run
    weakest = max(a.level for a in mine)  # A < A* < B < C
    last: dict[str, dict[str, Admitted]] = {}  # site -> grant -> last update; of several grants in old ledgers alone
    for a in sorted(mine, key=lambda a: a.round):
        last.setdefault(a.site, {})[a.grant] = a
    given = {site: list(grants.values()) for site, grants in sorted(last.items())}  # the last covers all before it
    worst = max(given.values(), key=lambda own: _sum(state, own))
    facts = facts_of(replace(worst[-1], level=weakest), _opened(state, worst[-1]), None)
    rounds = {site: sum(a.site == site for a in mine) for site in last}
    parts = [
        SitePart(site, rounds[site], _together(state, own), max(a.level for a in own)) for site, own in given.items()
    ]
    facts = replace(
        facts,
        id=run,
        promise="; ".join(describe_claim(json.loads(a.claim)) for a in worst),
        epsilon=_together(state, [replace(a, level=weakest) for a in worst]),
        site=", ".join(sorted(last)),
        run=run,
        round=state.rounds.get(run, 0),
        kind=KINDS["model"],
        file=FILES["model"],
        vetted="",
        artifact=model.hex(),
        tested=UNTESTED if weakest == "C" else "",
    )
    return RunModel(facts, tuple(parts), strategy)


def _together(state: State, last: Sequence[Admitted]) -> str:
    """The epsilon of all of one site's updates in a model; "" where one of them has none."""
    whole = _sum(state, last)
    return epsilon_of({**certificate(last[0], _opened(state, last[0])), "epsilon": whole}) if whole < math.inf else ""


def _sum(state: State, last: Sequence[Admitted]) -> float:
    """The same as a number, infinite where one has none: what accounts of different orders used does not compare."""
    each = [certificate(a, _opened(state, a)) for a in last]
    if not all("epsilon" in told for told in each):
        return math.inf
    return float(each[0]["epsilon"]) + sum(a.used for a in last[1:]) / NANO


def _opened(state: State, entry: Admitted) -> Opened:
    """The account that paid for a release."""
    return state.accounts[state.grants[entry.grant].reserved.account].opened
