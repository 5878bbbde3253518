"""A federated run as a board: what became of each site in each round, and why those that are out are out. Pure.

Closed rounds and grants come from the ledger. Events in between (who was asked, who declined, who did not answer)
come from the run's journal, which outlives a process; whether the run is at work now, from the feed of this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from coordinator.explanations import epsilon_text, format_rounded_up
from coordinator.federation.events import ENDS, FROZEN, NOT_APPROVED_YET, RunEvent
from coordinator.federation.job import Job
from coordinator.federation.participation import RoundMembers
from coordinator.federation.run_journal import KeptEvent, placed
from coordinator.round_codes import explain_code
from policies.accounting.rdp import epsilon_of
from policies.ledger.state import State

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
    asked: tuple[str, ...]  # empty where that was not kept
    counted: tuple[str, ...]
    out: tuple[Dropout, ...]
    seconds: float  # from when it was first sent to its close; 0: not closed, or not kept


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
    """What was said of the run, gathered by round."""

    asked: dict[int, tuple[str, ...]] = field(default_factory=dict)
    out: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> site -> code
    granted: tuple[str, ...] = ()
    priced: bool = False  # some site was asked for its price
    last: RunEvent | KeptEvent | None = None  # of this process; of an earlier one where the run is over or stopped


def _heard(events: Iterable[RunEvent | KeptEvent]) -> _Heard:
    heard = _Heard()
    for event in events:
        heard.last = event
        out = heard.out.setdefault(event.round, {})
        if event.state == "granted":
            heard.granted = event.sites
        elif event.state == "sent":
            heard.asked[event.round] = event.sites
        elif event.state in ("declined", "refused"):
            out |= dict.fromkeys(event.sites, event.reason)
        out |= event.missing if isinstance(event, KeptEvent) else {}
        heard.priced = heard.priced or event.state in ("granted", "declined", "refused", "sent")
        if event.state in ("granted", "sent", "closed"):  # out at first, and asked again or in the model
            for site in event.sites:
                out.pop(site, None)
    heard.out = {number: out for number, out in heard.out.items() if out}
    return heard


def _seconds(journal: Sequence[KeptEvent]) -> dict[int, float]:
    """Round -> from when it was first sent to its close."""
    sent = {event.round: event.at for event in reversed(journal) if event.state == "sent"}
    closed = {event.round: event.at for event in journal if event.state == "closed"}
    return {number: at - sent[number] for number, at in closed.items() if number in sent}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What was written down of a run, also by an earlier process."""

    members: Sequence[RoundMembers] = ()  # who is in each closed round, and who is not
    journal: Sequence[KeptEvent] = ()  # it was read after this process's events, and holds them


_EMPTY: Final = RunFolder()


def _known_so_far(known: str, events: Sequence[RunEvent], journal: Sequence[KeptEvent]) -> _Heard:
    """Of the journal, but for one that the disk had no place for: then of this process alone."""
    newest = events[-1] if events else None
    told = [(e.round, e.state, e.sites, e.reason) for e in journal]
    if newest is not None and (newest.round, newest.state, newest.sites, newest.reason) not in told:
        return _heard(events)
    heard = _heard(placed(journal))
    ends = [event for event in journal if event.state in ENDS]
    heard.last = newest if newest is not None or known == "open" or not ends else ends[-1]
    return heard


def board_of(
    job: Job,
    known: str,
    entries: RunEntries,
    events: Sequence[RunEvent],
    stopping: bool = False,
    folder: RunFolder = _EMPTY,
) -> RunStatus:
    """The board.

    Args:
        job: the run.
        known: the state that :meth:`coordinator.federation.run_manager.RunManager.known` gives: finished, failed,
            stopped or open.
        entries: the ledger's word.
        events: of this process, from the first.
        stopping: a stop was asked for, and the round in progress goes on.
        folder: what was written down.
    """
    heard, seconds = _known_so_far(known, events, folder.journal), _seconds(folder.journal)
    for one in folder.members:
        heard.out[one.number] = dict(one.missing)
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
            seconds.get(n, 0.0),
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
        asked = heard.priced or state in ("finished", "failed")
        words = ("not in the run", "no") if asked else ("not asked yet", "")
        if state == "waiting" and heard.last is not None and heard.last.reason == FROZEN:
            words = ("its receipts are awaited", "warn") if site in heard.last.sites else words
        elif state == "waiting" and heard.last is not None and heard.last.reason == NOT_APPROVED_YET:
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
