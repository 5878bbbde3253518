"""Which job starts: the first rule that says no is the reason that people read."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from agent.errors import SiteConfigError
from agent.service import job_rules, jobs
from agent.service.job_rules import JobSettings, Surroundings
from agent.service.jobs import Event, Job

NOON = dt.datetime(2026, 11, 27, 12, 0, tzinfo=dt.UTC)
GIB = 1 << 30


def job(number: int, words: str = "release ksame", state: str = jobs.QUEUED, **more: Any) -> Job:
    if words.startswith("release"):
        more = {"grant": f"grant-{number}", **more}
    return Job(number, tuple(words.split()), "main", (Event(1.0, state),), **more)


def chosen(*found: Job, settings: JobSettings | None = None, **around: Any) -> tuple[int, dict[int, str]]:
    seen = Surroundings(**{"now": NOON, **around})
    first, reasons = job_rules.choose(found, settings or JobSettings(), lambda _: seen)
    return (first.number if first else 0), reasons


def test_the_oldest_that_may_start_does() -> None:
    assert chosen() == (0, {})
    assert chosen(job(1), job(2)) == (1, {2: "job 1 goes first"})
    assert chosen(job(1), job(2, "train generator"), job(3, "ingest --pacs x"))[0] == 1


def test_one_job_of_a_lane_at_a_time_and_lanes_beside_one_another() -> None:
    for state in (jobs.RUNNING, jobs.LEAVING):
        assert chosen(job(1, state=state), job(2)) == (0, {2: "job 1 goes first"})
        assert chosen(job(1, state=state), job(2, "tune"), job(3, "evaluate"))[0] == 0
        assert chosen(job(1, state=state), job(2, "train generator"))[0] == 2
        assert chosen(job(1, state=state), job(2, "deface --vault"))[0] == 2
    assert chosen(job(1, "ingest --pacs x", jobs.RUNNING), job(2, "deface --vault"))[0] == 0


def test_a_prediction_has_a_lane_of_its_own_at_any_hour_and_gives_way_to_images_and_rounds() -> None:
    asked = job(3, "predict in/model --vault")
    for other in (job(1, state=jobs.RUNNING), job(1, "train generator", jobs.RUNNING)):
        assert chosen(other, asked, settings=JobSettings(hours="22:00-06:00"))[0] == 3
    assert chosen(job(1, "predict in/model --vault", jobs.RUNNING), asked) == (0, {3: "job 1 goes first"})
    assert chosen(asked, late=True) == (0, {3: "images wait to be read"})
    assert chosen(job(1, "part run-1", jobs.RUNNING), asked) == (0, {3: "job 1 trains a round: it goes first"})
    assert chosen(job(3, "predict in/model --vault", cuda=True), cards=()) == (
        0,
        {3: "this machine has no accelerator"},
    )
    found = chosen(asked, settings=JobSettings(memory_gib=4.0), free_bytes=GIB)[1]
    assert found[3].startswith("needs 4 GiB of memory")


def test_an_interrupted_release_goes_before_any_other() -> None:
    """Two makings would choose among the same patients, and only one can be noted as unfinished."""
    stuck = job(1, state=jobs.INTERRUPTED, not_before=-1.0, attempts=1)
    number, reasons = chosen(stuck, job(2), job(3, "train generator"))
    assert (number, reasons) == (3, {2: "job 1 goes first: `jobs retry 1` or `jobs cancel 1`"})
    assert chosen(job(1, state=jobs.INTERRUPTED, not_before=1.0, attempts=1), job(2))[0] == 1
    assert chosen(job(1, "tune", jobs.INTERRUPTED, not_before=-1.0), job(2))[0] == 2
    assert chosen(job(1), job(2, attempts=3)) == (2, {1: "job 2 goes first"}), "a person said `jobs retry 2`"


def test_in_a_lane_the_higher_priority_goes_first_then_the_older_job() -> None:
    low, usual, high = job(1, priority="low"), job(2), job(3, priority="high")
    told = "job 3 goes first: its priority is high"
    assert chosen(low, usual, high) == (3, {1: told, 2: told})
    assert chosen(low, usual, job(4)) == (2, {1: "job 2 goes first: its priority is normal", 4: "job 2 goes first"})
    assert chosen(job(1, state=jobs.RUNNING), high) == (0, {3: "job 1 goes first"}), "what runs is not put back"
    late = job(3, priority="high", not_before=NOON.timestamp() + 90)
    assert chosen(low, late)[0] == 1, "what cannot start yet is waited for by nobody"
    begun = job(1, state=jobs.INTERRUPTED, not_before=-1.0, attempts=1, priority="low")
    assert chosen(begun, high) == (0, {3: "job 1 goes first: `jobs retry 1` or `jobs cancel 1`"})
    assert chosen(job(1, attempts=1, priority="low"), high) == (1, {3: "job 1 goes first"})


def test_what_is_proposed_made_wanted_cancelled_or_ended_does_not_start() -> None:
    for state in (jobs.MADE, *jobs.ENDED):
        assert chosen(job(1, state=state)) == (0, {})
    assert chosen(job(1, state=jobs.PROPOSED)) == (0, {1: "waits for approval"})
    assert chosen(job(1, wanted=jobs.CANCELLED)) == (0, {})


def test_later_is_later() -> None:
    later = NOON.timestamp() + 90
    number, reasons = chosen(job(1, "tune", jobs.INTERRUPTED, not_before=later), job(2, "evaluate"))
    assert (number, reasons) == (2, {1: "goes on at 12:01; at once by `jobs retry 1`"})
    assert chosen(job(1, not_before=NOON.timestamp() - 1))[0] == 1


def test_a_release_that_is_typed_by_hand_goes_on_undisturbed() -> None:
    assert chosen(job(1), making=True) == (0, {1: "another release, search or evaluation is at work"})
    assert chosen(job(1, "train generator"), making=True)[0] == 1


def test_images_come_first() -> None:
    found = job(1), job(2, "train generator"), job(3, "ingest --pacs x")
    assert chosen(*found, late=True) == (3, {1: "images wait to be read", 2: "images wait to be read"})


@pytest.mark.parametrize(("hour", "starts"), [(21, False), (22, True), (23, True), (5, True), (6, False)])
def test_within_quiet_hours_alone(hour: int, starts: bool) -> None:
    settings = JobSettings(hours="22:00-06:00")
    number, reasons = chosen(job(1), settings=settings, now=NOON.replace(hour=hour))
    assert (number, reasons) == ((1, {}) if starts else (0, {1: "starts within the hours 22:00-06:00"}))
    assert chosen(job(1, "ingest --pacs x"), settings=settings, now=NOON.replace(hour=hour))[0] == 1


def test_two_gib_of_memory_are_for_the_service() -> None:
    settings = JobSettings(memory_gib=8.0)
    assert chosen(job(1), settings=settings, free_bytes=10 * GIB)[0] == 1
    told = "needs 8 GiB of memory, and 2 GiB are for the service"
    assert chosen(job(1), settings=settings, free_bytes=10 * GIB - 1) == (0, {1: told})
    assert chosen(job(1), settings=settings, free_bytes=None)[0] == 1
    assert chosen(job(1), free_bytes=0)[0] == 1


RECORDED = {  # answers of `nvidia-smi` to the query
    "0, 81559, 4\n": (0,),
    "0, 24576, 1\n1, 24576, 20480\n": (0, 1),
    "": (),
}


def test_one_job_an_accelerator() -> None:
    one, two = (job_rules.cards(answer) for answer in list(RECORDED)[:2])
    running, training = job(1, state=jobs.RUNNING, cuda=True), job(2, "train generator", cuda=True)
    assert chosen(running, training, cards=one) == (0, {2: "no accelerator is free"})
    assert chosen(running, training, cards=two)[0] == 2
    assert chosen(training, cards=()) == (0, {2: "this machine has no accelerator"})
    assert "`nvidia-smi` does not answer" in chosen(training, cards=None)[1][2]
    assert chosen(job(3, "train codebook"), cards=())[0] == 3


@pytest.mark.parametrize(("answer", "expected"), RECORDED.items())
def test_recorded_answers_are_read(answer: str, expected: tuple[int, ...]) -> None:
    assert job_rules.cards(answer) == expected


@pytest.mark.parametrize(
    "answer", ["No devices were found\n", "Failed to initialize NVML: Driver/library mismatch\n"]
)
def test_an_answer_that_is_none_is_not_taken_for_one(answer: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        job_rules.cards(answer)


@pytest.mark.parametrize(
    ("program", "expected"),
    [("exit 9", None), ("echo '0, 81559, 4'", (0,)), ("echo broken", None), (None, ())],
)
def test_the_driver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, expected: tuple[int, ...] | None
) -> None:
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_rules.ask_cards() == expected


@pytest.mark.gpu
def test_this_machines_accelerators_are_those_of_torch() -> None:
    import torch

    assert job_rules.ask_cards() == tuple(range(torch.cuda.device_count()))


def test_surroundings_are_looked_at_only_where_something_waits() -> None:
    def fails(_: bool) -> Surroundings:
        raise AssertionError

    assert job_rules.choose([job(1, state=jobs.RUNNING)], JobSettings(), fails) == (None, {})


def test_free_memory_is_what_the_kernel_says() -> None:
    assert job_rules.free_memory("MemTotal: 9 kB\nMemAvailable:   12 kB\n") == 12 << 10
    assert job_rules.free_memory("MemTotal: 9 kB\n") is None
    assert (job_rules.free_memory(Path("/proc/meminfo").read_text()) or 0) > 1 << 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hours = 3", "jobs.toml"),
        ('hours = "soon"', "hours are written"),
        ("memory_gib = -1.0", "memory_gib is 0 or more"),
        ("keep_days = 0", "keep_days 1 or more"),
        ("disk_share = 2.0", "disk_share"),
        ("colour = 1", "unknown keys: colour"),
        ("[", "not TOML"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "jobs.toml").write_text(text)
    with pytest.raises(SiteConfigError, match=told):
        job_rules.read_settings(tmp_path)


def test_a_configuration_is_read_and_none_is_needed(tmp_path: Path) -> None:
    assert job_rules.read_settings(tmp_path) == JobSettings()
    (tmp_path / "jobs.toml").write_text('hours = "22:00-06:00"\nmemory_gib = 16.0\nkeep_days = 7\ndisk_share = 0.2\n')
    assert job_rules.read_settings(tmp_path) == JobSettings("22:00-06:00", 16.0, 7, 0.2)


def test_a_round_goes_first_on_its_processors_and_waits_for_no_rule() -> None:
    training, part = job(1, "part run-1", jobs.RUNNING), job(1, "part run-1")
    waits = "job 1 trains a round: it goes first"
    assert chosen(training, job(2), job(3, "train generator"), job(4, "ingest --pacs x")) == (4, {2: waits, 3: waits})
    assert chosen(training, job(2, cuda=True), cards=(0,))[0] == 2, "on another device"
    assert chosen(part, job(2))[0] == 2, "between two rounds"
    assert chosen(part, late=True, settings=JobSettings(hours="22:00-06:00")) == (0, {}), "the coordinator asks"


def group(folder: Path, most: str, high: str, current: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"max": most, "high": high, "current": str(current), "stat": f"anon 5\ninactive_file {inactive}"}
    for name, text in told.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_the_narrowest_limit_of_a_control_group_counts_and_no_file_pages_that_are_given_back(tmp_path: Path) -> None:
    assert job_rules.cgroup_memory("0::/\n", tmp_path) is None, "the machine's own root has no such files"
    group(tmp_path / "system.slice", "max", "max", 900, 0)
    group(tmp_path / "system.slice" / "lazaret.service", "1000", "800", 500, 100)
    of_unit = "1:name=systemd:/x\n0::/system.slice/lazaret.service\n"
    assert job_rules.cgroup_memory(of_unit, tmp_path) == 800 - 400
    group(tmp_path / "system.slice", "950", "max", 900, 0)
    assert job_rules.cgroup_memory(of_unit, tmp_path) == 50
    group(tmp_path / "system.slice" / "lazaret.service", "max", "300", 500, 100)
    assert job_rules.cgroup_memory(of_unit, tmp_path) == 0


def test_a_container_sees_its_own_group_at_the_root_wherever_it_lies(tmp_path: Path) -> None:
    group(tmp_path, "1000", "max", 600, 200)
    assert job_rules.cgroup_memory("0::/\n", tmp_path) == 600
    assert job_rules.cgroup_memory("0::/../kubepods/pod7/that-cannot-be-seen\n", tmp_path) == 600
    assert job_rules.cgroup_memory("", tmp_path) == 600
    (tmp_path / "memory.current").write_text("no number\n")
    assert job_rules.cgroup_memory("0::/\n", tmp_path) is None
