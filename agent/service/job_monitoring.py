"""What metrics, ``doctor`` and ``status`` tell of a site's jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from agent.service import job_runner, jobs
from agent.service.jobs import Job, JobStore
from agent.storage.site_directory import SiteDirectory
from protos.operations.metrics import Samples


def put_jobs(home: SiteDirectory, told: Samples) -> None:
    """How many jobs are in which state, how long the oldest queued one waits, and what the running ones do."""
    found = JobStore(home.root).all()
    counts = Counter(job.state for job in found)
    for state in jobs.STATES:
        told.put("lazaret_jobs", counts[state], state=state)
    queued = [job.history[-1].at for job in found if job.state == jobs.QUEUED and job.lane != jobs.ROUND]
    told.put("lazaret_jobs_waiting_seconds", max(0.0, time.time() - min(queued)) if queued else 0.0)
    for job in found:
        if job.state in (jobs.RUNNING, jobs.LEAVING):
            shown = job_runner.show(home, job, {})
            told.put("lazaret_job_memory_bytes", shown["memory_bytes"], lane=job.lane)
            if shown["progress"]["of"]:
                done = shown["progress"]["done"] / shown["progress"]["of"]
                told.put("lazaret_job_done_ratio", min(1.0, done), lane=job.lane)


def of_people(home: SiteDirectory) -> Iterator[tuple[Job, str, str]]:
    """Jobs that wait for a person: why, and what the person types or opens.

    Raises:
        JobRecordError: a record cannot be read.
    """
    for job in JobStore(home.root).all():
        if job.state == jobs.PROPOSED:
            yield job, "it is proposed, and starts when it is approved", "approve or refuse it in the console, Jobs"
        elif job.state == jobs.INTERRUPTED and job.not_before < 0:
            yield job, job.reason or "its process ended", f"lazaret-agent jobs retry {job.number}"
