"""What commands and pages do with jobs, as acts with named fields; see :mod:`agent.service.site`."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Final

from agent.errors import CommandError
from agent.service import job_proposals, job_rules, job_runner, jobs, prediction_jobs, round_parts
from agent.service.job_outputs import clear_outputs, last_sealed
from agent.service.jobs import Event, Fate, Job, JobStateError, JobStore
from agent.service.ledger_access import Site
from agent.storage import projects
from policies.ledger.store import LedgerBusyError

_GRANTED: Final = "release"  # commands whose first word this is reserve a price
_PREDICTION: Final = "predict"
NOBODY_RUNS: Final = "starts when `serve` runs"


def add(site: Site, job: dict[str, Any], files: str = "") -> dict[str, Any]:
    """Queue a job.

    Args:
        site: where.
        job: ``words``, ``project``, ``by``, ``price``, ``cuda``, ``key`` and, where it is not normal, ``priority``,
            as :class:`agent.service.jobs.Job` has them.
        files: the folder that the caller put its files into, see :meth:`agent.service.jobs.JobStore.fresh_folder`.
    Returns:
        ``number`` of the job.
    Raises:
        CommandError: a field is missing, is none of these, or is of another kind.
        JobStateError: there is no such project.
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
    event = Event(round(time.time(), 3), state, "", str(job.get("by")))
    made = _read_job(job, event)
    if made.project not in projects.names(site.home):
        raise JobStateError(f"there is no project {made.project}: `project list` shows them")
    granted = replace(made, grant=f"grant-{secrets.token_hex(8)}" if made.words[0] == _GRANTED else "")
    added = JobStore(site.home.root).add(granted, files, lambda: last_sealed(site.home))
    site.log.info("job", job=added.number, state=added.state)
    return {"number": added.number}


def _read_job(told: Mapping[str, Any], event: Event) -> Job:
    """The job that somebody asks for.

    Raises:
        CommandError: a field is missing, is none of a job's, or is of another kind.
    """
    match told:
        case {"words": [*words], "project": str(project), "by": str(), "price": dict(price), "cuda": bool(cuda),
              "key": str(key), **more}:  # fmt: skip
            texts = tuple(word for word in words if isinstance(word, str))
            priced = not price or all(type(price.get(name)) is int for name in ("amount", "left"))
            if texts[:1] == (_PREDICTION,):
                prediction_jobs.check_words(texts)
            if len(texts) == len(words) and priced and more.keys() <= {"priority"}:
                with suppress(ValueError, TypeError):
                    return Job(0, texts, project, (event,), price=price, cuda=cuda, key=key, **more)
    raise CommandError(
        "a job has words, project, by, price (amount and left, or nothing), cuda and key, and may have a priority: "
        f"{', '.join(jobs.PRIORITIES)}; one is missing, or of another kind"
    )


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
        JobStateError: it has ended, or its release has left by now; its price is spent and that was not said; or its
            process lives and the service that would tell it to end cannot be asked. Nothing was done.
        LedgerBusyError: another command has the ledger. Where a service runs, it does it when that has ended.
    """
    store = JobStore(site.home.root)
    job = store.read(number)
    _may_end(job)
    if job.lane == jobs.ROUND:
        return round_parts.leave(site, job, by, spend)
    fate = _unmade(site, store, job)
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
    try:
        if fate.grant == "held" and not job_runner.give_up(site.home, site.ledger, wanted):
            _unmade(site, store, job)
    except LedgerBusyError:
        if not site.runs_jobs:
            raise
        return {"state": jobs.RUNNING}  # a later look of the service does it
    _may_end(store.read(number))  # it may have left by a person's hand, and been seen to
    return _cancelled(site, store, job, by)


def _cancelled(site: Site, store: JobStore, job: Job, by: str) -> dict[str, Any]:
    if job.lane == jobs.PREDICTION:  # a service that was killed may have left some of its results
        clear_outputs(site.home, job)
    store.change(job.number, lambda known: known.now(jobs.CANCELLED, "", by))
    site.log.info("job", job=job.number, state=jobs.CANCELLED)
    return {"state": jobs.CANCELLED}


def _unmade(site: Site, store: JobStore, job: Job) -> Fate:
    """What is known of a job that may be cancelled.

    Raises:
        JobStateError: its release is made; or it has left by a person's hand, and the job is done.
    """
    fate = job_runner.fate_of(site.home, site.ledger, job, None, "")
    if fate.admitted and job.state not in (jobs.RUNNING, jobs.LEAVING):
        site.log.info("job", job=job.number, state=jobs.DONE)
        _may_end(store.change(job.number, lambda known: known.now(jobs.DONE, wanted="")))
    if fate.kept:
        release = job_runner.release_of(site.home, job)
        raise JobStateError(f"its release is made: `release withdraw {release}` gives it up, and spends its grant")
    return fate


def _may_end(job: Job) -> None:
    if job.state in jobs.ENDED:
        raise JobStateError(f"job {job.number} has ended already: {job.state}")


def retry(site: Site, number: int, by: str) -> dict[str, Any]:
    """Go on with an interrupted job now; or begin one that failed, was refused or cancelled anew, as a new job.

    What was proposed is proposed again: an approval is for one start of the work and its price.

    Returns:
        ``number``: of the job that is queued; where one was begun for this one and has not ended, of that one.
        ``state`` of it.
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
        return {"number": number, "state": jobs.QUEUED}
    if job.state not in jobs.ENDED - {jobs.DONE}:
        raise JobStateError(f"job {number} is {job.state}: nothing is to be tried again")
    return _begin_anew(site, store, job, by)


def _begin_anew(site: Site, store: JobStore, job: Job, by: str) -> dict[str, Any]:
    """A new job for one that has ended, unless there is one; see :func:`retry`."""
    number = job.number
    if job.lane == jobs.PREDICTION:
        raise JobStateError(
            f"what job {number} was asked for is gone with its end: type `predict ... --detach` again"
        )
    begun = {known.key: known for known in store.all()}
    key = f"retry-{number}"  # asked twice, it is done once
    while key in begun and begun[key].state in jobs.ENDED - {jobs.DONE}:
        key = f"retry-{begun[key].number}"
    if key in begun and begun[key].state == jobs.DONE:
        raise JobStateError(f"job {begun[key].number}, which was begun for it, is done: nothing is to be tried again")
    if key in begun:
        return retry(site, begun[key].number, by) if begun[key].state == jobs.INTERRUPTED else _stands(begun[key])
    files = secrets.token_hex(8)
    fresh = store.fresh_folder(files)
    try:
        shutil.copytree(store.folder(number) / "in", fresh / "in", symlinks=True, dirs_exist_ok=True)
        told = {"words": job.words, "project": job.project, "by": by, "price": {}, "cuda": job.cuda, "key": key}
        told["priority"] = job.priority
        made = (propose if job.history[0].state == jobs.PROPOSED else add)(site, told, files)
        return _stands(store.read(made["number"]))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # where it was queued, the folder has its number now


def _stands(job: Job) -> dict[str, Any]:
    return {"number": job.number, "state": job.state}


def prioritise(site: Site, number: int, priority: jobs.Priority) -> dict[str, Any]:
    """Let a job that waits go before those of its lane whose priority is lower.

    Returns:
        ``priority``.
    Raises:
        JobStateError: it does not wait.
    """

    def changed(known: Job) -> Job:
        if known.state not in (jobs.PROPOSED, jobs.QUEUED, jobs.INTERRUPTED):
            raise JobStateError(f"job {number} is {known.state}: a priority orders what waits to start")
        return replace(known, priority=priority)

    job = JobStore(site.home.root).change(number, changed)
    site.log.info("job", job=number, state=job.state)
    return {"priority": job.priority}


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
        "jobs/priority": prioritise,
    }
)
