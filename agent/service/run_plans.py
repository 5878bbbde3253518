"""Plans of federated runs that were asked for at this site: how each stands, and what a person reads of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent.errors import CommandError
from agent.federation import run_plan
from agent.federation.run_plan import RunPlan, Standing
from agent.service.commands import PROGRAM
from agent.storage.label_tables import TableUse, tables_used
from policies.accounting.claims import UnsupportedClaimError
from policies.accounting.rdp import epsilon_nano
from policies.accounting.rounding import epsilon_text
from policies.governance.pending import Pending
from policies.ledger.state import State
from policies.review.policy import Policy
from policies.review.rules import account_name
from policies.statements import claim_from
from protos.common.text import MINUTE, utc
from protos.federation.round_times import answer_times, told_bits

LOOK: Final = "look at what the run's network would see; the sheet stays here and costs nothing:"
_NANO: Final = 10**9


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan, and how it stands."""

    plan: RunPlan
    standing: Standing
    given: tuple[str, ...]  # roles that have approved it
    missing: tuple[str, ...]
    late: bool  # its day is over
    labels: TableUse | None = None  # what it learns from here, once its first round has begun; not part of the plan

    @property
    def open(self) -> bool:
        """Whether persons may still decide about it."""
        return self.standing == "waiting" and not self.late

    @property
    def preview(self) -> str:
        """The command that shows the task's inputs to this site's reviewer."""
        return f"{PROGRAM} task preview --run {self.plan.run} --out {self.plan.run}.html"

    def lines(self, state: State, site: str) -> list[str]:
        """Everything that a person approves, a line for each."""
        plan, facts = self.plan, self.plan.facts()
        price = _price(plan, state, site)
        kind = f"{plan.mechanism}, {plan.rounds} rounds of at most {plan.terms.seconds} seconds each"
        times = len(answer_times(plan.terms.seconds))
        bits = told_bits(plan.terms.seconds)
        return [
            f"run {plan.run}: {kind}",
            f"patients: project {plan.project}, modality {plan.modality}; the rule's SHA-256 {facts['cohort']}",
            f"task: the configuration below; its SHA-256 {facts['task']}",
            f"public start: {facts['start']}",
            f"price of all rounds: {price}",
            f"evaluation: {facts['evaluation']}",
            f"an answer leaves at one of {times} times, which tells {bits:.1f} bits at most",
            f"to be approved by: {_day(plan.terms.approve_by)}",
            f"approved by: {', '.join(self.given) or 'nobody yet'}; missing: {', '.join(self.missing) or 'nobody'}",
            f"SHA-256 of the plan, which is what a person signs: {plan.digest}",
            *([f"it learns from the {self.labels.words()}; this stays here"] if self.labels else []),
        ]


def _price(plan: RunPlan, state: State, site: str) -> str:
    account = state.accounts.get(account_name(site, plan.mechanism))
    try:
        claim = claim_from(dict(plan.claim))
        if account is None:
            return "this site has no account for it"
        epsilon = epsilon_nano(claim, float(account.opened.delta), account.opened.order)
    except (UnsupportedClaimError, ValueError, ArithmeticError):
        return "it cannot be priced"
    whole, rest = divmod(epsilon, _NANO)
    return f"epsilon {epsilon_text(f'{whole}.{rest:09d}')} at delta {account.opened.delta}"


def _day(seconds: int) -> str:
    return f"{utc(seconds, MINUTE)} UTC" if seconds else "no day is named"


def plans(note: Any, state: State, policy: Policy, now: float | None = None, used: Any = None) -> list[PlanView]:
    """All that were asked for and whose run is not over here.

    Args:
        note: of the vault, see :mod:`agent.federation.run_plan`.
        state: the fold of the site's ledger.
        policy: that binds the site.
        now: seconds since 1970.
        used: of the vault, see :func:`agent.storage.label_tables.tables_used`.
    """
    labels = tables_used(used)
    moment = time.time() if now is None else now
    found = []
    for plan in run_plan.kept(note).values():
        missing = run_plan.missing_roles(state, plan, policy.run_approvals)
        standing = run_plan.standing(state, plan, policy.run_approvals)
        given = tuple(sorted(state.approvals(plan.serial, *plan.words())))
        late = not moment < plan.terms.approve_by  # that names no day, too: this site makes nothing of it
        found.append(PlanView(plan, standing, given, tuple(sorted(missing)), late, labels.get(plan.run)))
    return found


def plan_named(views: list[PlanView], run: str) -> PlanView:
    """The plan of a run.

    Raises:
        CommandError: none was asked for.
    """
    for view in views:
        if view.plan.run == run:
            return view
    known = ", ".join(view.plan.run for view in views) or "none"
    raise CommandError(f"no plan of a run {run[:64]} was asked for here; those that were: {known}")


def pending(note: Any, state: State, policy: Policy) -> Iterator[Pending]:
    """Those that wait for persons, for ``status`` and ``ledger sign``."""
    for view in plans(note, state, policy):
        if not view.open:
            continue
        plan = view.plan
        details = (
            f"{plan.mechanism}, {plan.rounds} rounds, modality {plan.modality}, project {plan.project}",
            f"to be approved by {_day(plan.terms.approve_by)}; missing: {', '.join(view.missing)}",
        )
        yield Pending(
            *(*plan.words(), plan.serial),
            f"plan NUMBER, run {plan.run}",
            view.missing,
            f"{PROGRAM} serve --modality {plan.modality}",
            f"{PROGRAM} run show {plan.run}",
            details,
        )


def told(view: PlanView) -> Mapping[str, Any]:
    """As JSON."""
    return {
        **view.plan.facts(),
        "digest": view.plan.digest,
        "serial": view.plan.serial,
        "standing": view.standing,
        "approved": list(view.given),
        "missing": list(view.missing),
        "late": view.late,
        "labels": labels_told(view.labels),
    }


def labels_told(used: TableUse | None) -> Mapping[str, str] | None:
    """The version of a label table that a run learns from, as JSON."""
    return {"table": used.table, "version": used.version} if used else None
