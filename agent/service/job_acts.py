"""What commands and pages do with jobs, as acts with named fields; see :mod:`agent.service.site`."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from agent.service import job_rules, job_runner, jobs
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
    words = tuple(map(str, job["words"]))
    if job["project"] not in projects.names(site.home):
        raise JobStateError(f"there is no project {job['project']}: `project list` shows them")
    event = Event(round(time.time(), 3), jobs.QUEUED, "", str(job["by"]))
    made = Job(0, words, str(job["project"]), (event,), key=str(job["key"]), cuda=bool(job["cuda"]))
    grant = f"grant-{secrets.token_hex(8)}" if words[0] == _GRANTED else ""
    added = JobStore(site.home.root).add(replace(made, price=dict(job["price"]), grant=grant), files)
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
        ``by``.
    """
    job = JobStore(site.home.root).read(number)
    reasons = _reasons(site, JobStore(site.home.root).all())
    history = [{"at": one.at, "state": one.state, "reason": one.reason, "by": one.by} for one in job.history]
    return {"job": job_runner.show(site.home, job, reasons), "history": history}


def _reasons(site: Site, found: list[Job]) -> Mapping[int, str]:
    if not site.runs_jobs:
        return {job.number: NOBODY_RUNS for job in found if job.state in (jobs.QUEUED, jobs.RUNNING, jobs.LEAVING)}
    settings = job_runner.settings_or_default(site.home)
    first, reasons = job_rules.choose(found, settings, lambda cards: job_runner.surroundings(site.home, cards))
    return reasons if first is None else {first.number: "starts now", **reasons}


def cancel(site: Site, number: int, by: str, spend: bool = False) -> dict[str, Any]:
    """End a job that has not ended. Where its price is paid, that must be said: ``spend``.

    Returns:
        ``state``: "cancelled", or "running" while its process is told to end.
    """
    store = JobStore(site.home.root)
    job = store.read(number)
    _may_end(job)
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
        return replace(known, wanted=jobs.CANCELLED, wanted_by=by)

    wanted = store.change(number, want)
    if wanted.state in (jobs.RUNNING, jobs.LEAVING) and site.runs_jobs:
        return {"state": jobs.RUNNING}
    if fate.grant == "held":
        job_runner.give_up(site.ledger, wanted)
    store.change(number, lambda known: known.now(jobs.CANCELLED, "", by))
    site.log.info("job", job=number, state=jobs.CANCELLED)
    return {"state": jobs.CANCELLED}


def _may_end(job: Job) -> None:
    if job.state in jobs.ENDED:
        raise JobStateError(f"job {job.number} has ended already: {job.state}")


def retry(site: Site, number: int, by: str) -> dict[str, Any]:
    """Go on with an interrupted job now; or begin one that failed, was refused or cancelled anew, as a new job.

    Returns:
        ``number``: of the job that is queued.
    """
    store = JobStore(site.home.root)
    job = store.read(number)
    if job.state == jobs.INTERRUPTED:

        def again(known: Job) -> Job:
            if known.state != jobs.INTERRUPTED:
                raise JobStateError(f"job {number} is {known.state}: nothing is to be tried again")
            return known.now(jobs.QUEUED, "", by, not_before=0.0, lost=0, wanted="", wanted_by="")

        store.change(number, again)
        site.log.info("job", job=number, state=jobs.QUEUED)
        return {"number": number}
    if job.state not in jobs.ENDED - {jobs.DONE}:
        raise JobStateError(f"job {number} is {job.state}: nothing is to be tried again")
    files = secrets.token_hex(8)
    fresh = store.fresh_folder(files)
    shutil.copytree(store.folder(number) / "in", fresh / "in", symlinks=True, dirs_exist_ok=True)
    told = {"words": job.words, "project": job.project, "by": by, "price": {}, "cuda": job.cuda, "key": ""}
    return add(site, told, files)


ACTS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"jobs/add": add, "jobs/list": listed, "jobs/show": shown, "jobs/cancel": cancel, "jobs/retry": retry}
)
