"""The plan of a federated run, which persons at this site approve before its price: what it says, how it stands.

A person signs the SHA-256 of the plan. It covers everything that the run may do here: task, patients, start, price,
evaluation, rounds and times. Whatever of it changes is another plan, and nobody has approved that. Plans that were
asked for lie in the vault until their run is over. No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, Self

from policies.ledger.approvals import RUN_PLAN, refusal
from policies.ledger.state import State
from protos.common.canonical_json import JsonValue, canonical, json_object
from protos.federation.round_times import RoundTerms

ACTION: Final = "run"  # what persons sign: run NAME SHA-256
NOTE: Final = "plans"  # of the vault: by run, those that were asked for
# the coordinator begins when the day of approval is over, with the sites that have approved: so long it may take
BEGUN_WITHIN_S: Final = 86_400
MOST: Final = 16  # plans that are kept: a coordinator that asks for more loses its oldest
# what of a task says which patients and images of theirs are used
_COHORT: Final = ("labels", "input")
_NO_EVALUATION: Final = "none"

Standing = Literal["approved", "waiting", "refused"]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run would do here: public, and settled before an image is read."""

    run: str
    mechanism: str
    config: str  # canonical JSON of the mechanism's public configuration
    claim: Mapping[str, JsonValue]  # the price
    rounds: int
    modality: str
    project: str  # of this site, whose patients they are; a name that stays here
    terms: RoundTerms

    def facts(self) -> dict[str, JsonValue]:
        """What a person approves, by name: long parts by their SHA-256."""
        values = json_object(self.config)
        task = values.get("task")
        inner: Mapping[str, Any] = {**values, **(task if isinstance(task, dict) else {})}
        chosen = {key: inner[key] for key in _COHORT if key in inner}
        if isinstance(training := inner.get("training"), dict):  # how many of a patient's images a step sees
            chosen["images_per_patient"] = training.get("images_per_patient")
        named = inner.get("task")  # the section of that name: the task's own name, kind and seed
        start = {"network": inner.get("network"), "seed": named.get("seed") if isinstance(named, dict) else None}
        evaluation = inner.get("evaluate")
        return {
            "run": self.run,
            "mechanism": self.mechanism,
            "task": sha256(self.config.encode()),
            "cohort": sha256(canonical({**chosen, "modality": self.modality, "project": self.project})),
            "start": sha256(canonical(start)),
            "price": dict(self.claim),
            "evaluation": sha256(canonical(evaluation)) if evaluation else _NO_EVALUATION,
            "rounds": self.rounds,
            "round_seconds": self.terms.seconds,
            "approve_by": self.terms.approve_by,
            "modality": self.modality,
            "project": self.project,
        }

    @property
    def digest(self) -> str:
        """What persons sign."""
        return sha256(canonical(self.facts()))

    @property
    def serial(self) -> str:
        """Under which they do. Nobody can ask for other words under it: see :mod:`policies.ledger.approvals`."""
        return f"{RUN_PLAN}{self.digest[:32]}"

    def words(self) -> tuple[str, str, str]:
        """Action, subject and value of an approval."""
        return ACTION, self.run, self.digest

    def to_note(self) -> dict[str, JsonValue]:
        """For the vault."""
        return {
            "run": self.run,
            "mechanism": self.mechanism,
            "config": self.config,
            "claim": dict(self.claim),
            "rounds": self.rounds,
            "modality": self.modality,
            "project": self.project,
            "terms": [self.terms.seconds, self.terms.approve_by],
        }

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> Self:
        """The reverse."""
        return cls(**{**note, "terms": RoundTerms(*note["terms"])})


def sha256(data: bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def missing_roles(state: State, plan: RunPlan, wanted: frozenset[str]) -> frozenset[str]:
    """The roles that have not approved exactly this plan."""
    return wanted - set(state.approvals(plan.serial, *plan.words()))


def is_refused(state: State, plan: RunPlan) -> bool:
    """Whether a person has refused it."""
    refused = state.proposals.get(refusal(plan.serial))
    return refused is not None and bool(refused.approvals)


def standing(state: State, plan: RunPlan, wanted: frozenset[str]) -> Standing:
    """Where a plan stands by this site's ledger; ``wanted``: the roles that the policies name."""
    if is_refused(state, plan):
        return "refused"
    return "waiting" if missing_roles(state, plan, wanted) else "approved"


def is_over(terms: RoundTerms, standing: Standing, now: float) -> bool:
    """Whether the plan of a run that is not priced has had its time: an approval is none for whenever one likes.

    A plan that names no day is over, too.
    """
    more = BEGUN_WITHIN_S if standing == "approved" else 0
    return not terms.approve_by or not now < terms.approve_by + more


def kept(note: Any) -> dict[str, RunPlan]:
    """The plans in the vault's note, by run, the oldest first."""
    return {run: RunPlan.of_note(one) for run, one in (note or {}).items()}


def with_plan(note: Any, plan: RunPlan) -> dict[str, Any]:
    """The vault's note with this plan in it; the oldest go."""
    others = {run: one for run, one in (note or {}).items() if run != plan.run}
    return dict([*others.items(), (plan.run, plan.to_note())][-MOST:])


def without(note: Any, run: str) -> dict[str, Any] | None:
    """The vault's note without the plan of a run that is over."""
    return {name: one for name, one in (note or {}).items() if name != run} or None


class Notes(Protocol):
    """The vault, as far as plans are noted in it."""

    def note(self, name: str) -> Any:
        """What is noted under a name; None, nothing is."""

    def change_note(self, name: str, change: Callable[[Any], Any]) -> None:
        """Note what ``change`` makes of what was noted."""


def keep(vault: Notes, plan: RunPlan) -> bool:
    """Keep it where persons find it, and tell whether it is new; another plan under that name goes."""
    if (vault.note(NOTE) or {}).get(plan.run) == plan.to_note():
        return False
    vault.change_note(NOTE, lambda note: with_plan(note, plan))
    return True


def forget(vault: Notes, run: str) -> None:
    """The run is over: nobody has to decide about it any more."""
    if run in (vault.note(NOTE) or {}):
        vault.change_note(NOTE, lambda note: without(note, run))
