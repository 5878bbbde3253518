"""What commands and pages do with jobs, as acts with named fields; see :mod:`agent.service.site`."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Final

from agent.service import job_proposals, job_rules, job_runner, jobs, round_parts
from agent.service.job_outputs import last_sealed
from agent.service.jobs import Event, Job, JobStateError, JobStore
from agent.service.ledger_access import Site
from agent.storage import projects

_GRANTED: Final = "release"  # commands whose first word this is reserve a price
NOBODY_RUNS: Final = "starts when `serve` runs"


def add(site: Site, job: dict[str, Any], files: str = "") -> dict[str, Any]:
    """Queue a job.

    Args:
        site: where.
        job: ``words``, ``project``, ``by``, ``price``, ``cuda``, ``key``, as :class:`agent.service.jobs.Job` has
            them.
        files: the folder that the caller put its files into, see :meth:`agent.service.jobs.JobStore.fresh_folder`.
    Returns:
        ``number`` of the job.
    """
    return _add(site, job, files, jobs.QUEUED)


def propose(site: Site, job: dict[str, Any], files: str = "") -> dict[str, Any]:
    """Propose a job. It is queued when every role that the site's policy names has approved it; at once if none is.

    Args:
        site: where.
        job: see :func:`add`.
        files: see :func:`add`.
    Returns:
        ``number`` of the job.
    """
    return _add(site, job, files, jobs.PROPOSED if job_proposals.approving(site) else jobs.QUEUED)


def _add(site: Site, job: dict[str, Any], files: str, state: str) -> dict[str, Any]:
    words = tuple(map(str, job["words"]))
    if job["project"] not in projects.names(site.home):
        raise JobStateError(f"there is no project {job['project']}: `project list` shows them")
    event = Event(round(time.time(), 3), state, "", str(job["by"]))
    made = Job(0, words, str(job["project"]), (event,), key=str(job["key"]), cuda=bool(job["cuda"]))
    grant = f"grant-{secrets.token_hex(8)}" if words[0] == _GRANTED else ""
    numbered = replace(made, price=dict(job["price"]), grant=grant)
    added = JobStore(site.home.root).add(numbered, files, lambda: last_sealed(site.home))
    site.log.info("job", job=added.number, state=added.state)
    return {"number": added.number}


def listed(site: Site) -> dict[str, Any]:
    """All jobs.

    Returns:
        ``jobs``: see :func:`agent.service.job_runner.show`. ``broken``: numbers of those whose record cannot be
        read.
    """
    store = JobStore(site.home.root)
    found = store.all()
    reasons = _reasons(site, found)
    return {"jobs": [job_runner.show(site.home, job, reasons) for job in found], "broken": store.broken()}


def shown(site: Site, number: int) -> dict[str, Any]:
    """One job, with its history.

    Returns:
        ``job``: see :func:`agent.service.job_runner.show`; ``history``: events with ``at``, ``state``, ``reason``,
        ``by``, ``role``.
    """
    job = JobStore(site.home.root).read(number)
    reasons = _reasons(site, JobStore(site.home.root).all())
    return {"job": job_runner.show(site.home, job, reasons), "history": [asdict(one) for one in job.history]}


def _reasons(site: Site, found: list[Job]) -> Mapping[int, str]:
    waits = job_proposals.reasons(site, found)
    if not site.runs_jobs:
        at_work = [job for job in found if job.state in (jobs.QUEUED, jobs.RUNNING, jobs.LEAVING)]
        why = {job.number: round_parts.AWAY if job.lane == jobs.ROUND else NOBODY_RUNS for job in at_work}
        return why | waits
    settings = job_runner.settings_or_default(site.home)
    first, reasons = job_rules.choose(found, settings, lambda cards: job_runner.surroundings(site.home, cards))
    return {**({} if first is None else {first.number: "starts now"}), **reasons, **waits}


def cancel(site: Site, number: int, by: str, spend: bool = False) -> dict[str, Any]:
    """End a job that has not ended. Where its price is paid, that must be said: ``spend``.

    Returns:
        ``state``: "cancelled", or "running" while its process is told to end.
    Raises:
        JobStateError: it has ended, its price is spent and that was not said, or its process lives and the service
            that would tell it to end cannot be asked. Nothing was done.
    """
    store = JobStore(site.home.root)
    job = store.read(number)
    _may_end(job)
    if job.lane == jobs.ROUND:
        return round_parts.leave(site, job, by, spend)
    fate = job_runner.fate_of(site.home, site.ledger, job, None, "")
    if fate.kept:
        release = job_runner.release_of(site.home, job)
        raise JobStateError(f"its release is made: `release withdraw {release}` gives it up, and spends its grant")
    if fate.grant == "held" and not spend:
        raise JobStateError(
            f"the price of job {number} is spent whatever you do: `jobs cancel {number} --spend` ends it all the "
            f"same, `jobs retry {number}` goes on with it"
        )

    def want(known: Job) -> Job:
        _may_end(known)
        at_work = known.state in (jobs.RUNNING, jobs.LEAVING)
        if at_work and not site.runs_jobs and job_runner.may_live(site.home, known):
            raise JobStateError(
                f"job {number} is at work, and the service that runs it does not answer here: restart `serve`, then "
                f"type `jobs cancel {number}` again; nothing was done"
            )
        return replace(known, wanted=jobs.SPENT if spend else jobs.CANCELLED, wanted_by=by)

    wanted = store.change(number, want)
    if wanted.state in (jobs.RUNNING, jobs.LEAVING) and site.runs_jobs:
        return {"state": jobs.RUNNING}
    if fate.grant == "held":
        job_runner.give_up(site.home, site.ledger, wanted)
    store.change(number, lambda known: known.now(jobs.CANCELLED, "", by))
    site.log.info("job", job=number, state=jobs.CANCELLED)
    return {"state": jobs.CANCELLED}


def _may_end(job: Job) -> None:
    if job.state in jobs.ENDED:
        raise JobStateError(f"job {job.number} has ended already: {job.state}")


def retry(site: Site, number: int, by: str) -> dict[str, Any]:
    """Go on with an interrupted job now; or begin one that failed, was refused or cancelled anew, as a new job.

    What was proposed is proposed again: an approval is for one start of the work and its price.

    Returns:
        ``number``: of the job that is queued.
    """
    store = JobStore(site.home.root)
    job = store.read(number)
    if job.lane == jobs.ROUND:
        raise JobStateError(f"job {number} is a part in a run: it begins and goes on when the coordinator asks")
    if job.state == jobs.INTERRUPTED:

        def again(known: Job) -> Job:
            if known.state != jobs.INTERRUPTED:
                raise JobStateError(f"job {number} is {known.state}: nothing is to be tried again")
            return known.now(jobs.QUEUED, "", by, not_before=0.0, lost=0, hindered=0, wanted="", wanted_by="")

        store.change(number, again)
        site.log.info("job", job=number, state=jobs.QUEUED)
        return {"number": number}
    if job.state not in jobs.ENDED - {jobs.DONE}:
        raise JobStateError(f"job {number} is {job.state}: nothing is to be tried again")
    files = secrets.token_hex(8)
    fresh = store.fresh_folder(files)
    shutil.copytree(store.folder(number) / "in", fresh / "in", symlinks=True, dirs_exist_ok=True)
    told = {"words": job.words, "project": job.project, "by": by, "price": {}, "cuda": job.cuda}
    told["key"] = f"retry-{number}"  # asked twice, it is done once
    return (propose if job.history[0].state == jobs.PROPOSED else add)(site, told, files)


# A proposal is approved and refused at the console alone (agent.service.job_proposals): this socket knows the user of
# the operating system, and no person.
ACTS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "jobs/add": add,
        "jobs/propose": propose,
        "jobs/list": listed,
        "jobs/show": shown,
        "jobs/cancel": cancel,
        "jobs/retry": retry,
    }
)
