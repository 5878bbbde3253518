"""A federated run as a board: what became of each site in each round, and why those that are out are out. Pure.

Closed rounds and grants come from the ledger and survive a restart. Events in between (who was asked, who declined,
who did not answer) come from the run's own feed, which starts empty with each process; the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from coordinator.explanations import RULES, epsilon_text, explain, format_rounded_up
from coordinator.federation.events import ENDS, NOT_APPROVED_YET, RunEvent
from coordinator.federation.job import Job
from policies.accounting.rdp import epsilon_of
from policies.ledger.state import State

_SAME: Final = "Bring both sides to the same version."
_SITE: Final = "See the agent's log at the site."
_BESIDE: Final = "See beside each hospital why."
# codes of a round that are no rules of a review: why, and what to do
_CODES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "offline": ("The hospital's agent was not connected.", "Nothing, if it comes back. Otherwise call the site."),
        "no_reply": (
            "The hospital's agent was asked and did not answer in time.",
            "See the agent's log at the site.",
        ),
        "internal": ("Something failed at the hospital, or here.", "See the log of that side."),
        "bundle": ("The agent found another bundle than the one it knows.", _SAME),
        "message_type": ("The agent received an unknown request.", "Bring both sides to the same version."),
        "policy": ("The hospital's own policy forbids it.", "Change the job, or agree on another policy."),
        "mechanism": (
            "The agent does not know this method or its settings.",
            "Bring both sides to the same version.",
        ),
        "unavailable": ("The hospital cannot take part. It gives no reason, by design.", "Ask the site's IT."),
        "schema": ("The answer was not of the agreed form.", _SAME),
        "not_finite": ("The update contained a value that is not a number.", "Train with a smaller learning rate."),
        "size": ("The update had another length than the model.", _SAME),
        "wrong_source": ("The answer came from another hospital than was asked.", "Treat it as an attack."),
        "another_round": ("The update was made for another round.", "Nothing: the next round asks again."),
        "not_selected": ("The strategy left the update out: too far from the others.", "Nothing, if once."),
        "failed": ("The hospital's agent failed in an unknown way.", _SITE),
        "too_few_sites_online": (
            "Too few hospitals were connected.",
            "The coordinator tries for two hours, then stops the run.",
        ),
        "too_few_updates": ("Too few updates could be used.", _BESIDE),
        "too_few_grants": (
            "Too few hospitals had the budget, or agreed to take part.",
            "See beside each hospital why.",
        ),
        "no_aggregate": ("The updates could not be combined to a sound model.", "Choose another strategy."),
        "not_unmasked": ("The masked sum could not be opened: too many hospitals left.", "Launch it again."),
        "run_process_lost": ("The process of the run ended; another one continues.", "Nothing."),
        "storage": ("The coordinator could not write to its disk.", "Free some space, then resume the run."),
        "by an operator": ("It was stopped by a person.", "Resume it when you are ready."),
        "waiting": (
            "Persons at the hospital have not approved the run.",
            "Ask them. They have the days that the job gives.",
        ),
        "not_approved_yet": (
            "Persons at a hospital have not approved the run yet.",
            "Wait, or ask them. After the job's days the run begins without that hospital.",
        ),
        "not_granted": (
            "The coordinator's ledger holds no budget of this hospital for the run.",
            "If it was refused, see the rule under Refusals.",
        ),
        "stopped": ("The coordinator was stopped.", "The run goes on when it is started again."),
        "resume it with `round resume`": ("It was stopped.", "Resume it when you are ready."),
    }
)
STATES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "finished": ("finished", "yes"),
        "failed": ("failed", "no"),
        "stopped": ("stopped", "warn"),
        "stopping": ("stops after this round", "warn"),
        "waiting": ("waits for sites", "warn"),
        "queued": ("queued", ""),
        "running": ("running", ""),
    }
)


def explain_code(code: str) -> tuple[str, str]:
    """A code of a round in words, and what to do; an unknown one is named as it is."""
    known = _CODES.get(code)
    if known is None and code not in RULES and not code:
        return "", ""
    return known or explain(code)


@dataclass(frozen=True, slots=True)
class Dropout:
    """A site that is not in a round."""

    site: str
    code: str
    why: str
    todo: str


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round."""

    number: int
    closed: bool
    asked: tuple[str, ...]  # empty when this process has not seen it
    counted: tuple[str, ...]
    out: tuple[Dropout, ...]


@dataclass(frozen=True, slots=True)
class SiteRound:
    """One site's part in the whole run."""

    site: str
    state: str  # in words
    kind: str  # a badge's: yes | warn | no | nothing
    rounds: int  # whose model counts its update
    spent: str  # what was consumed so far, with its delta; "" for nothing
    out: Dropout | None  # why it is out now


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its page shows it."""

    job: Job
    state: str
    word: str
    kind: str
    closed: int
    rows: tuple[RoundRow, ...]  # newest first
    seats: tuple[SiteRound, ...]
    reason: str
    todo: str

    @property
    def live(self) -> bool:
        """Whether it may change by itself."""
        return self.state not in ("finished", "failed", "stopped")

    @property
    def share(self) -> int:
        """Rounds that are closed, in percent of all."""
        return 100 * self.closed // self.job.turns


@dataclass(frozen=True, slots=True)
class RunEntries:
    """One run, according to the ledger."""

    closed: int
    counted: Mapping[int, tuple[str, ...]]  # round -> sites, sorted
    grants: Mapping[str, tuple[str, int, str, int]]  # site -> state, used at the order, delta, order


def books_of(state: State, jobs: Sequence[Job]) -> dict[str, RunEntries]:
    """Run -> what the ledger says of it, copied out of the fold under its lock: one walk for all of them."""
    mine = {job.run: job for job in jobs}
    counted: dict[str, dict[int, list[str]]] = {run: {} for run in mine}
    for run, number, site in state.aggregated:
        if run in mine:
            counted[run].setdefault(number, []).append(site)
    grants: dict[str, dict[str, tuple[str, int, str, int]]] = {run: {} for run in mine}
    for grant in state.grants.values():
        held = grant.reserved
        if held.run in mine and held.site in mine[held.run].sites:
            opened = state.accounts[held.account].opened
            grants[held.run][held.site] = (grant.state, grant.used, opened.delta, opened.order)
    return {
        run: RunEntries(
            state.rounds.get(run, 0), {n: tuple(sorted(sites)) for n, sites in counted[run].items()}, grants[run]
        )
        for run in mine
    }


@dataclass(slots=True)
class _Heard:
    """What the feed says, gathered by round."""

    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)
    out: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> site -> code
    granted: tuple[str, ...] = ()
    last: RunEvent | None = None


def _heard(events: Iterable[RunEvent]) -> _Heard:
    heard = _Heard()
    for event in events:
        heard.last = event
        if event.state == "granted":
            heard.granted = event.sites
        elif event.state == "sent":
            heard.asked[event.round] = event.sites
        elif event.state in ("declined", "refused"):
            heard.out.setdefault(event.round, {}).update(dict.fromkeys(event.sites, event.reason))
        elif event.state == "closed":  # whoever was out at first and is in the model was not out
            for site in event.sites:
                heard.out.get(event.round, {}).pop(site, None)
    return heard


def board_of(
    job: Job, known: str, entries: RunEntries, events: Sequence[RunEvent], stopping: bool = False
) -> RunStatus:
    """The board.

    Args:
        job: the run.
        known: the state that :meth:`coordinator.federation.run_manager.RunManager.known` gives: finished, failed,
            stopped or open.
        entries: the ledger's word.
        events: of this process, from the first.
        stopping: a stop was asked for, and the round in progress goes on.
    """
    heard = _heard(events)
    state = _state(known, heard, stopping)
    word, kind = STATES[state]
    numbers = sorted(entries.counted.keys() | heard.asked.keys() | {n for n in heard.out if n}, reverse=True)
    rows = tuple(
        RoundRow(
            n,
            n <= entries.closed,
            heard.asked.get(n, ()),
            entries.counted.get(n, ()),
            tuple(Dropout(site, code, *explain_code(code)) for site, code in sorted(heard.out.get(n, {}).items())),
        )
        for n in numbers
    )
    code = heard.last.reason if heard.last is not None and state in ("failed", "stopped", "waiting") else ""
    seats = tuple(_seat(site, job, entries, heard, state) for site in job.sites)
    return RunStatus(job, state, word, kind, entries.closed, rows, seats, *explain_code(code))


def _state(known: str, heard: _Heard, stopping: bool) -> str:
    last = heard.last.state if heard.last is not None else ""
    if known in ("finished", "failed"):
        return known
    if known == "stopped":
        return "stopping" if stopping else "stopped"
    if last in ENDS:  # its end is told, and not written yet; or could not be written, and the next start resumes it
        return last
    return {"": "queued", "waiting": "waiting"}.get(last, "running")


def _seat(site: str, job: Job, entries: RunEntries, heard: _Heard, state: str) -> SiteRound:
    """One site: what it was granted, how often it counts, and what its last word was."""
    rounds = sum(site in sites for sites in entries.counted.values())
    grant = entries.grants.get(site)
    newest = max((n for n, sites in heard.out.items() if site in sites), default=-1)
    code = heard.out[newest][site] if newest >= 0 else ""
    lasting = newest >= entries.closed or grant is None  # else it came back, and later rounds count it
    out = Dropout(site, code, *explain_code(code)) if code and lasting else None
    if grant is None:
        asked = bool(heard.out.get(0)) or bool(heard.granted) or state in ("finished", "failed")
        words = ("not in the run", "no") if asked else ("not asked yet", "")
        if state == "waiting" and heard.last is not None and heard.last.reason == NOT_APPROVED_YET:
            words = (
                ("its persons decide", "warn") if site in heard.last.sites else ("not asked for its price yet", "")
            )
        return SiteRound(site, *words, rounds, "", out)
    granted, used, delta, order = grant
    spent = _spent(used, delta, order)
    if out is not None:
        return SiteRound(site, "out of the last round", "warn", rounds, spent, out)
    if granted != "held":
        told = (
            "took part" if rounds else {"spent": "its budget is spent", "freed": "left; nothing was spent"}[granted]
        )
        return SiteRound(site, told, "yes" if rounds else "", rounds, spent, None)
    return SiteRound(site, "takes part", "yes", rounds, spent, None)


def _spent(used: int, delta: str, order: int) -> str:
    """What a part of a grant's amount means, rounded up."""
    if not used or not order:
        return ""
    return f"epsilon {epsilon_text(epsilon_of(used, float(delta), order))} at delta {format_rounded_up(delta)}"
