"""What the coordinator knows of one run: its job, its rounds, its looks, its waits, and what it cost each site.

Who is in a round and what was charged is the ledger's word. Why a site is not in one, when a round was sent and what
a link carried is of the run's own folder. Where the two contradict each other, no report is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.federation.evaluation import best, estimates, kept_look, to_table
from coordinator.federation.job import Job, JobError, job_from
from coordinator.federation.participation import RoundMembers, members
from coordinator.federation.run_journal import END, JournalError, KeptEvent, bytes_of, placed, read_events, state_of
from coordinator.reports.document import ReportError
from policies.ledger.entries import Admitted, Freed, Record, Spent
from policies.ledger.state import State
from policies.review.rules import account_name
from policies.statements import ID
from policies.tasks.evaluation import EvaluationError

IN, OUT, ASKED, NEVER = "in", "not in", "asked, and the round was not closed", "not reached"


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """A round or a look of a run."""

    number: int  # from 1, looks counted
    look: bool
    closed: bool
    sites: tuple[str, ...]  # in it, by the ledger
    out: Mapping[str, str]  # site -> code; "": why was not kept
    asked: tuple[str, ...]  # the last time that it was sent
    sent_at: float  # seconds since 1970, the first time; 0: not known
    closed_at: float  # 0: not closed, or not known
    site_seconds: Mapping[str, float]  # from when it was last sent to the site's whole answer; where it is known

    @property
    def seconds(self) -> float:
        """From sent to closed; 0: not known."""
        return self.closed_at - self.sent_at if self.sent_at and self.closed_at else 0.0

    def state(self, site: str) -> str:
        """Of one site in it."""
        if site in self.sites:
            return IN
        if site in self.out or self.closed:
            return OUT
        return ASKED if site in self.asked else NEVER


@dataclass(frozen=True, slots=True)
class SiteCharge:
    """One site's account and this run. Amounts are the ledger's: of one order, so that they add up."""

    grant: str  # "held" | "spent" | "freed" | "": it has none
    charged: int  # held or spent for the run
    sent: int  # of that, what the updates and looks that were admitted have consumed
    limit: int  # of the account; 0: it has none
    others: int  # held or spent for anything else, as the ledger stands
    budget: str  # as people state it, decimal text
    delta: str
    order: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The run waited, or stood still."""

    begin: float  # seconds since 1970
    end: float  # 0: it did not go on
    round: int  # 0: the price
    state: str  # "waiting" | "stopped"
    reason: str  # code
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LookFacts:
    """What was found in a look, from the noisy sums."""

    after_round: int
    figures: Mapping[str, Mapping[str, Any]]  # the first is the one that rounds are compared by


@dataclass(frozen=True, slots=True)
class RunFacts:
    """All of it."""

    job: Job
    state: str  # finished | failed | stopped | open
    reason: str  # code of a failure or a stop; how a finished run says who took part; "": not kept
    end_round: int  # in which it failed or stopped; 0: the price, or not known
    ended_at: float  # seconds since 1970; 0: not ended, or not kept
    launched: Mapping[str, Any]  # person, role and time; empty: by the command line
    events: Sequence[KeptEvent]
    rounds: Sequence[RoundFacts]  # every one of the job
    looks: Sequence[LookFacts]
    chosen: int  # the round whose model a finished run with looks has; 0: none was chosen
    waits: Sequence[Wait]
    sites: Mapping[str, SiteCharge]
    declined: Mapping[str, str]  # site -> code, of the price
    admitted: int  # updates and looks, by the ledger
    traffic: Mapping[str, tuple[int, int]]  # bytes from a site and to it; empty: not known

    @property
    def closed(self) -> int:
        """How many rounds and looks are closed."""
        return sum(one.closed for one in self.rounds)


def run_facts(runs: Path, run: str, state: State, records: Sequence[Record]) -> RunFacts:
    """What is known of a run.

    Args:
        runs: holds a folder for each run.
        run: its name.
        state: of the ledger.
        records: the ledger's.
    Raises:
        ReportError: there is no such run, a file of it is damaged, or its folder contradicts the ledger.
    """
    folder = runs / run
    if not ID.fullmatch(run) or not (folder / "job.json").is_file():
        raise ReportError("there is no run of that name: the console's page Rounds lists them")
    try:
        return _gather(folder, state, records)
    except ReportError:
        raise
    except JournalError as error:
        raise ReportError(f"{run}: {error}") from None
    except (JobError, EvaluationError, ValueError, KeyError, TypeError, AttributeError, OSError):
        raise ReportError(
            f"{run}: a file of the run is damaged or missing; restore its folder from a backup"
        ) from None


def _gather(folder: Path, state: State, records: Sequence[Record]) -> RunFacts:
    job, known = job_from((folder / "job.json").read_text()), state_of(folder)
    events, closed = placed(read_events(folder)), state.rounds.get(job.run, 0)
    if closed > job.turns or (known == "finished" and closed != job.turns):
        raise ReportError(
            f"{job.run}: the ledger has closed {closed} of its {job.turns} rounds, the run says otherwise"
        )
    rounds = _rounds(job, events, members(folder, closed), state, closed)
    looks = {turn: kept_look(folder, job, turn) for turn in job.looks if turn <= closed}
    figures = [LookFacts(job.looks[turn], to_table(estimates(look))) for turn, look in looks.items()]
    chosen = figures[best([*looks.values()])[0]].after_round if looks and known == "finished" else 0
    mine = {g.reserved.site: name for name, g in state.grants.items() if g.reserved.run == job.run}
    paid = _paid(mine, state, records)
    reason, at_round, ended = _ending(folder, known, events)
    return RunFacts(
        job=job,
        state=known,
        reason=reason,
        end_round=at_round,
        ended_at=ended,
        launched=_launched(folder),
        events=events,
        rounds=rounds,
        looks=figures,
        chosen=chosen,
        waits=_waits(events),
        sites={site: _charge(site, mine.get(site, ""), paid, job, state) for site in job.sites},
        declined=_declined(events, mine),
        admitted=sum(isinstance(r.entry, Admitted) and r.entry.run == job.run for r in records),
        traffic=bytes_of(events),
    )


def _launched(folder: Path) -> dict[str, Any]:
    path = folder / "launched.json"
    if not path.exists():
        return {}
    told = json.loads(path.read_bytes())
    return {"person": str(told["person"]), "role": str(told["role"]), "at": int(told["at"])}


def _ending(folder: Path, known: str, events: Sequence[KeptEvent]) -> tuple[str, int, float]:
    """The code, the round and the time of the run's end."""
    last = next((e for e in reversed(events) if e.state == known), None) if known != "open" else None
    if known in ("finished", "failed"):
        end = json.loads((folder / END).read_bytes())
        return str(end["reason"]), int(end["round"]), last.at if last is not None else 0.0
    if last is None or events[-1] is not last:  # it was asked to stop, and has not come to it
        return "", 0, 0.0
    return last.reason, last.round, last.at


def _rounds(
    job: Job, events: Sequence[KeptEvent], kept: Sequence[RoundMembers], state: State, closed: int
) -> list[RoundFacts]:
    there = {one.number: one for one in kept}
    counted: dict[int, set[str]] = {}
    for run, number, site in state.aggregated:
        if run == job.run:
            counted.setdefault(number, set()).add(site)
    found = []
    for number in range(1, job.turns + 1):
        sites, one = counted.get(number, set()), there.get(number)
        if one is not None and set(one.sites) != sites:
            raise ReportError(f"{job.run}: round {number} has other sites in the run's folder than in the ledger")
        found.append(_round(job, number, number <= closed, (sites, one), [e for e in events if e.round == number]))
    return found


def _round(
    job: Job, number: int, closed: bool, who: tuple[set[str], RoundMembers | None], events: Sequence[KeptEvent]
) -> RoundFacts:
    sites, kept = who
    sent = [e for e in events if e.state == "sent"]
    end = next((e for e in events if e.state == "closed"), None) if closed else None
    out = dict(kept.missing) if kept is not None else {site: "" for site in job.sites if closed and site not in sites}
    if not closed:
        for event in events:
            out |= {**event.missing, **_said(event, "refused")}
            for site in event.sites if event.state == "sent" else ():
                out.pop(site, None)  # asked again
    took = {}
    if end is not None and sent and not job.secure:  # of a sum, the newest answer is that of its last exchange
        there = [site for site in job.sites if site in sites and site in end.links]
        answers = {site: end.links[site].answered - sent[-1].at for site in there}
        took = {site: seconds for site, seconds in answers.items() if 0 < seconds <= end.at - sent[-1].at}
    return RoundFacts(
        number=number,
        look=number in job.looks,
        closed=closed,
        sites=tuple(site for site in job.sites if site in sites),
        out={site: out[site] for site in job.sites if site in out},
        asked=sent[-1].sites if sent else (),
        sent_at=sent[0].at if sent else 0.0,
        closed_at=end.at if end is not None else 0.0,
        site_seconds=took,
    )


def _said(event: KeptEvent, state: str) -> dict[str, str]:
    """Site -> code, of an event of that state."""
    return dict.fromkeys(event.sites, event.reason) if event.state == state else {}


def _waits(events: Sequence[KeptEvent]) -> list[Wait]:
    """What the run waited for, tries of the same kind together."""
    found: list[Wait] = []
    for event, after in zip(events, [*events[1:], None], strict=False):
        if event.state not in ("waiting", "stopped"):
            continue
        until = after.at if after is not None else 0.0
        last = found[-1] if found else None
        same = (event.round, event.state, event.reason, event.sites)
        if last is not None and last.end and (last.round, last.state, last.reason, last.sites) == same:
            tried = [e.state for e in events if last.end <= e.at <= event.at]
            if "closed" not in tried:
                found[-1] = Wait(last.begin, until, *same)
                continue
        found.append(Wait(event.at, until, *same))
    return found


def _paid(mine: Mapping[str, str], state: State, records: Sequence[Record]) -> dict[str, int]:
    """Grant -> what it holds, or has spent, of its account."""
    grants = set(mine.values())
    paid = {grant: state.grants[grant].reserved.amount for grant in grants}
    for record in records:
        entry = record.entry
        if isinstance(entry, Spent | Freed) and entry.grant in grants:  # what expires is spent whole
            paid[entry.grant] = entry.used if isinstance(entry, Spent) else 0
    return paid


def _charge(site: str, grant: str, paid: Mapping[str, int], job: Job, state: State) -> SiteCharge:
    known = state.grants.get(grant)
    account = state.accounts.get(known.reserved.account if known is not None else account_name(site, job.mechanism))
    if account is None:
        return SiteCharge("", 0, 0, 0, 0, "", "", 0)
    opened, charged = account.opened, paid.get(grant, 0)
    return SiteCharge(
        grant=known.state if known is not None else "",
        charged=charged,
        sent=known.used if known is not None else 0,
        limit=account.limit,
        others=account.spent + account.held - charged,
        budget=account.epsilon,
        delta=opened.delta,
        order=opened.order,
    )


def _declined(events: Sequence[KeptEvent], granted: Mapping[str, str]) -> dict[str, str]:
    """Why a site has no price held, as it was said last."""
    said: dict[str, str] = {}
    for event in events:
        if event.round == 0:
            said |= {**event.missing, **_said(event, "declined")}
    return {site: code for site, code in said.items() if site not in granted}
