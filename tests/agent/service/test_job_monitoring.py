"""Metrics, doctor and status of jobs: counts and seconds, no name; and the command for what waits for a person."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from agent.cli.doctor import _jobs
from agent.operations.metrics import CATALOGUE
from agent.service import jobs
from agent.service.job_monitoring import of_people, put_jobs
from agent.service.jobs import Event, Job, JobStore
from agent.service.status import _jobs as steps
from agent.storage.site_directory import SiteDirectory
from protos.operations.metrics import Samples


def home_with(tmp_path: Path, *states: str) -> SiteDirectory:
    home = SiteDirectory(tmp_path)
    for state in states:
        waits = -1.0 if state == jobs.INTERRUPTED else 0.0
        event = Event(time.time() - 60, state, "memory ran out" if waits else "")
        JobStore(tmp_path).add(Job(0, ("release", "ksame"), "main", (event,), not_before=waits))
    return home


def told(home: SiteDirectory) -> dict[str, float]:
    samples = Samples({one.name: one for one in CATALOGUE})
    put_jobs(home, samples)
    return {" ".join((name, *labels)): value for (name, labels), value in samples.told.items()}


def test_jobs_are_counted_by_state_also_where_there_are_none(tmp_path: Path) -> None:
    found = told(home_with(tmp_path))
    assert {found[f"lazaret_jobs {state}"] for state in jobs.STATES} == {0}
    assert found["lazaret_jobs_waiting_seconds"] == 0
    found = told(home_with(tmp_path, jobs.QUEUED, jobs.QUEUED, jobs.DONE))
    assert (found["lazaret_jobs queued"], found["lazaret_jobs done"]) == (2, 1)
    assert 60 <= found["lazaret_jobs_waiting_seconds"] < 90


def test_a_running_job_tells_its_share_and_its_memory(tmp_path: Path) -> None:
    home = home_with(tmp_path, jobs.RUNNING)
    folder = JobStore(tmp_path).folder(1)
    (folder / "pid").write_text(str(os.getpid()))
    line = {"at": 1.0, "step": "make", "detail": "", "done": 30, "of": 40}
    (folder / "said.jsonl").write_text(json.dumps(line) + "\n")
    found = told(home)
    assert found["lazaret_job_done_ratio making"] == 0.75
    assert found["lazaret_job_memory_bytes making"] > 1 << 20


def test_a_part_in_a_run_that_waits_for_its_coordinator_is_no_queue(tmp_path: Path) -> None:
    JobStore(tmp_path).add(Job(0, ("part", "run-1"), "main", (Event(1.0, jobs.QUEUED),)))
    found = told(SiteDirectory(tmp_path))
    assert (found["lazaret_jobs queued"], found["lazaret_jobs_waiting_seconds"]) == (1, 0)


def test_what_waits_for_a_person_is_told_with_the_command_and_what_goes_on_is_not(tmp_path: Path) -> None:
    home = home_with(tmp_path, jobs.PROPOSED, jobs.INTERRUPTED, jobs.QUEUED, jobs.DONE)
    JobStore(tmp_path).add(Job(0, ("train", "encoder"), "main", (Event(1.0, jobs.INTERRUPTED),), not_before=1.0))
    assert [(job.number, command) for job, _, command in of_people(home)] == [
        (1, "approve or refuse it in the console, Jobs"),
        (2, "lazaret-agent jobs retry 2"),
    ]
    assert [step.name for step in steps(home)] == ["job 1, release ksame", "job 2, release ksame"]
    (wrong,) = _jobs(home)
    assert (wrong.state, wrong.fix) == ("fail", "lazaret-agent jobs retry 2")
    assert "memory ran out" in wrong.said


def test_a_doctor_of_a_site_without_stuck_jobs_is_content(tmp_path: Path) -> None:
    assert [found.state for found in _jobs(home_with(tmp_path, jobs.PROPOSED))] == ["pass"]
