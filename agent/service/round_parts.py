"""A site's part in a federated run as one of its jobs: seen, followed and left like any other.

The service takes part itself, when the coordinator asks: no process of a job is started here, and no rule keeps a
round from being trained, since it has an end that other sites wait for. The record follows the part and decides
nothing: what is held, spent and returned is asked of the ledger, also after a kill between the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent.federation.part_watch import PartEnd, PartView, PartWatch
from agent.release.unsent import PART as NOTE
from agent.service import jobs
from agent.service.job_outputs import last_sealed
from agent.service.jobs import PART, ROUND, Event, Job, JobStateError, JobStore
from agent.service.ledger_access import LedgerMissingError, Site, SiteLedger
from agent.storage import read_only_access
from agent.storage.site_directory import SiteDirectory
from policies.ledger.entries import Reserved
from policies.ledger.state import Grant, State
from policies.statements import claim_json
from protos.common.errors import LazaretError

_EVERY_S: Final = 1.0
AWAY: Final = "waits until `serve --modality` takes part"
_MADE: Final = "all {of} rounds that were priced are made"
_ALL: Final = "after a restart all of its price is spent"
_ENDS: Final = {
    "made": (jobs.DONE, _MADE),
    "over": (jobs.DONE, "the run is over: {made} of {of} rounds were made, and their price is spent"),
    "left": (jobs.CANCELLED, "the run was left: {made} of {of} rounds were made, and their price is spent"),
    "replaced": (jobs.CANCELLED, "left for another run: {made} of {of} rounds were made, and their price is spent"),
}


def open_parts(store: JobStore) -> list[Job]:
    """The parts whose records have no end: one, or none."""
    return [job for job in store.all() if job.lane == ROUND and job.state not in jobs.ENDED]


def settle_parts(home: SiteDirectory, ledger: SiteLedger) -> None:
    """When a service starts: the ledger says what became of each part that an earlier one left open."""
    store = JobStore(home.root)
    for job in open_parts(store):
        grant = _grant_of(ledger, job)
        if grant is not None and grant.state == "held":
            store.change(job.number, _put_down)
        else:
            store.change(job.number, partial(_ended, grant=grant, end=None))


def _put_down(job: Job) -> Job:
    if job.state == jobs.RUNNING:
        job = job.now(jobs.INTERRUPTED, f"the service ended in {job.reason}")
    return job.turned(jobs.QUEUED, AWAY) if job.reason != AWAY else job


def _grant_of(ledger: SiteLedger, job: Job) -> Grant | None:
    try:
        return ledger.read().state.grants.get(job.grant)
    except LedgerMissingError:
        return None


def _ended(job: Job, grant: Grant | None, end: PartEnd | None) -> Job:
    """The record of a part whose grant is closed. What the process knows of the end is told where the ledger agrees.

    Args:
        job: as its record stands.
        grant: of the ledger.
        end: how this very process ended it; None: an earlier one did.
    """
    if grant is None:
        return job.now(jobs.FAILED, "the ledger knows nothing of its price")
    if grant.state == "freed":
        state = jobs.CANCELLED if job.wanted else jobs.REFUSED if end is None or end.how == "refused" else jobs.DONE
        told = "it was not granted by the coordinator" if state == jobs.REFUSED else "nothing was trained"
        return job.now(state, f"{told}, and its price is returned", job.wanted_by)
    if end is not None and end.how in _ENDS and end.rounds:
        state, told = _ENDS[end.how]
        return job.now(state, told.format(made=end.rounds, of=end.of), job.wanted_by)
    state = jobs.CANCELLED if job.wanted else jobs.DONE if grant.sent else jobs.FAILED
    told = "what it had made is spent" if grant.sent else "its price is spent, and nothing has left"
    return job.now(state, told, job.wanted_by)


def paid(home: SiteDirectory, state: State, job: Job) -> bool:
    """Whether to leave the run now would give back less than the whole price.

    Only the process that reserved it returns a part in which nothing was begun, see
    :meth:`agent.federation.participant.Participant.leave_run`.
    """
    grant = state.grants.get(job.grant)
    if grant is None or grant.state != "held":
        return False
    with read_only_access.notes(home) as notes:
        note = (notes.note(NOTE) if notes is not None else None) or {}
    return job.attempts > 1 or note.get("grant") != job.grant or note["rounds_trained"] > 0


def leave(site: Site, job: Job, by: str, spend: bool) -> dict[str, Any]:
    """Have the site leave the run of a part; a round that is being trained ends at once.

    Returns:
        ``state``: "running", while the service is told; its state, where that is told when it starts.
    Raises:
        JobStateError: part of its price is spent, or will be when a service starts, and that was not said. Nothing
            was done.
    """
    store, number, state = JobStore(site.home.root), job.number, site.ledger.read().state
    if not spend and paid(site.home, state, job):
        raise JobStateError(
            f"what job {number} has made in its run stays spent whatever you do: `jobs cancel {number} --spend` "
            "leaves the run all the same"
        )
    if not spend and not site.runs_jobs and (grant := state.grants.get(job.grant)) and grant.state == "held":
        raise JobStateError(
            f"no service runs here, and {_ALL}: `jobs cancel {number} --spend` leaves the run when `serve` runs"
        )

    def want(known: Job) -> Job:
        if known.state in jobs.ENDED:
            raise JobStateError(f"job {number} has ended already: {known.state}")
        return replace(known, wanted=jobs.SPENT if spend else jobs.CANCELLED, wanted_by=by)

    store.change(number, want)
    _end_training(store.folder(number))
    return {"state": jobs.RUNNING if site.runs_jobs else job.state}


def _end_training(folder: Path) -> None:
    """Kill the process that trains the round, if there is one: no other goes on with it where the site leaves."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "pid").read_text())
        if b"agent.release.maker_main" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGKILL)


class PartJobs(PartWatch):
    """Writes down how this process's part in a run stands, as a job, and reads what people want of it.

    Threads: those that hold the part's lock. A fault of the record is logged, and stops no round.
    """

    def __init__(self, home: SiteDirectory, project: str, ledger: SiteLedger, log: Any) -> None:
        """Nothing is written yet. ``project``: whose patients the rounds are of."""
        self._home, self._project, self._ledger, self._log = home, project, ledger, log
        self._store = JobStore(home.root)
        self._number, self._shown, self._at = 0, ("", "", ""), 0.0
        self._taken_up = False  # the part that an earlier process had open, if there was one
        self._failed = ""  # of the newest round, that it came to nothing

    def changed(self, part: PartView) -> None:
        """The record says how the part stands."""
        with self._guarded():
            self._follow(part)

    def trains(self, stage: str, done: int, of: int) -> None:
        """A step is written down, once a second at most."""
        now = time.time()
        if now < self._at + _EVERY_S and 0 < done < of:
            return
        self._at = now
        with contextlib.suppress(OSError):  # a full disk stops no round on account of its progress
            line = {"at": round(now, 3), "step": self._shown[2], "detail": stage, "done": done, "of": of}
            with (self._store.folder(self._number) / "said.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")

    def started(self, pid: int) -> None:
        """The process that trains the round: its memory is shown, and it can be ended."""
        with self._guarded():
            (self._store.folder(self._number) / "pid").write_text(f"{pid}")
            if self._store.read(self._number).wanted == jobs.SPENT:  # said before there was a number to end it by
                _end_training(self._store.folder(self._number))

    def came_to_nothing(self, part: PartView, number: int, why: str) -> None:
        """A round without an update stays in the history, with its reason."""
        with self._guarded():
            what = "came to nothing" if part.unfinished is None else "was interrupted"
            job, told = self._job(), f"round {number} {what}: {why}"
            if job is None or job.grant != part.grant or number != part.begun:  # no other was begun here
                return
            if told not in [event.reason for event in job.history[-2:]]:
                self._store.change(job.number, lambda known: known.now(jobs.INTERRUPTED, told))
                self._print(told)
            self._failed = f"; round {number} came to nothing" if part.unfinished is None else ""
            self._shown = ("", "", "")

    def wants_to_leave(self, part: PartView) -> bool:
        """A person said so: where part of the price is spent, that has been said, too."""
        with self._guarded():
            job = self._job()
            if not job or not job.wanted or job.grant != part.grant:
                return False
            if job.wanted == jobs.SPENT or not (part.rounds_trained or part.resumed):
                return True
            if part.training:  # its row says so, until the round has its end
                return False
            told = "part of its price is spent by now" if part.rounds_trained else _ALL
            told += f": `jobs cancel {job.number} --spend` leaves the run"
            self._store.change(job.number, lambda known: replace(known.now(jobs.INTERRUPTED, told), wanted=""))
            self._shown = ("", "", "")  # how it stands is written after it
        return False

    # -- the record

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (LazaretError, OSError) as error:
            self._log.error("jobs_fault", fault=type(error).__name__)

    def _job(self) -> Job | None:
        if not self._number:
            found = open_parts(self._store)
            self._number = found[-1].number if found else 0
        return self._store.read(self._number) if self._number else None

    def _follow(self, part: PartView) -> None:
        state, reason = _standing(part)
        shown = (part.grant, state, reason + (self._failed if state == jobs.QUEUED else ""))
        if shown == self._shown:
            return
        job = self._job()
        if job is not None and (job.grant != part.grant or job.state in jobs.ENDED):
            self._end(job, part.end)
            job = None
        if part.grant:
            job = job or self._begin(part)
            if part.resumed and not self._taken_up:
                (self._store.folder(job.number) / "stdout").unlink(missing_ok=True)
                job = self._store.change(job.number, lambda known: replace(known, attempts=known.attempts + 1))
                self._taken_up = True
            self._shown = shown
            self._turn(job, *shown[1:])
        self._shown = shown

    def _begin(self, part: PartView) -> Job:
        state = self._ledger.read().state
        reserved = state.grants[part.grant].reserved
        assert isinstance(reserved, Reserved)
        before = state.accounts[reserved.account].left + reserved.amount
        price = {"claim": claim_json(part.mechanism.claim()), "amount": reserved.amount, "left": before}
        price["mechanism"] = part.mechanism.name
        asked = f"asked for by the coordinator: {part.mechanism.turns} rounds; {part.compute.why}"
        event = Event(round(time.time(), 3), jobs.QUEUED, asked)
        words, key = (PART, part.run), f"{PART}-{part.grant}"
        made = Job(0, words, self._project, (event,), grant=part.grant, price=price, key=key, attempts=1)
        job = self._store.add(made, elsewhere=lambda: last_sealed(self._home))
        self._number, self._taken_up, self._failed = job.number, False, ""
        self._log.info("job", job=job.number, state=job.state)
        return job

    def _turn(self, job: Job, state: str, reason: str) -> None:
        if (job.state, job.reason) == (state, reason):
            return
        folder = self._store.folder(job.number)
        if state == jobs.RUNNING:
            self._failed = ""
            for name in ("said.jsonl", "pid"):
                (folder / name).unlink(missing_ok=True)
        elif job.state == jobs.RUNNING:
            self._print(f"{job.reason}: the update is sealed")
        self._store.change(job.number, lambda known: known.turned(state, reason))
        if job.state != state:
            self._log.info("job", job=job.number, state=state)
        if state == jobs.RUNNING:
            self._at = 0.0
            self.trains("read", 0, 0)

    def _end(self, job: Job, end: PartEnd | None) -> None:
        grant = _grant_of(self._ledger, job)
        if job.state not in jobs.ENDED and (grant is None or grant.state != "held"):
            known = end if end is not None and end.grant == job.grant else None
            ended = self._store.change(job.number, partial(_ended, grant=grant, end=known))
            self._print(ended.reason)
            self._log.info("job", job=job.number, state=ended.state)
        self._number = 0

    def _print(self, line: str) -> None:
        """What `jobs follow` shows."""
        with (self._store.folder(self._number) / "stdout").open("a") as out:
            out.write(line + "\n")


def _standing(part: PartView) -> tuple[str, str]:
    """State of a part that is open, and its round or what it waits for."""
    of = part.mechanism.turns if part.mechanism is not None else 0
    if part.training:
        return jobs.RUNNING, f"round {part.begun} of {of}"
    if part.round_in_progress:  # nothing is computed here: no job gives way, however long the others are silent
        return jobs.QUEUED, f"round {part.begun} of {of}: waits for the others of the sum"
    if not part.granted and not part.rounds_trained:
        return jobs.QUEUED, "waits for the coordinator's grant"
    if part.unfinished is not None:
        return jobs.QUEUED, f"waits until round {part.begun} of {of} is asked for again: it goes on where it was"
    if part.turns_made >= of:
        return jobs.QUEUED, f"{_MADE.format(of=of)}: waits for the last verdict"
    return jobs.QUEUED, f"waits for round {part.begun + 1} of {of}"
