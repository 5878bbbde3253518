"""When answers leave tells the coordinator nothing of how many patients a site has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Example, TaskCohort, TaskPatient
from agent.federation.answer_pace import MOST_SHARE, AnswerPace, RoundWork
from agent.federation.service import TaskHandler
from agent.federation.tasks import RoundTask
from protos.federation.round_times import RoundTerms, answer_times
from tests.support.federated_sites import START, ErrorLog, FederatedSite, federated, federated_site, part

HOUR = RoundTerms(3_600)
PICTURE = Example(np.zeros((1, 8, 8), np.float32), np.array([0]))
JOB = federated(rounds=4, public_patients=400)


@dataclass
class Machine:
    """A clock that stands still but for what this machine has to do."""

    seconds: float = 0.0
    worked: float = 0.0
    reading: float = 0.01  # seconds of each patient
    start: float = 5.0  # of each training, for a process and its libraries
    patient: float = 0.4  # of each patient in a training
    load: float = 1.0  # other programs make everything slower
    waits: list[float] = field(default_factory=list)

    def read(self, patients: int) -> None:
        """Patients are read."""
        self.seconds += self.load * self.reading * patients

    def train(self, patients: int) -> None:
        """A round is trained."""
        work = self.start + self.patient * patients
        self.seconds, self.worked = self.seconds + self.load * work, self.worked + work

    def wait(self, seconds: float) -> bool:
        """In the place of the service's stop event: a pause before an answer."""
        self.seconds += seconds
        return False

    def is_set(self) -> bool:
        """Nobody stops."""
        return False


def site(folder: Path, patients: int, machine: Machine) -> FederatedSite:
    """A site with so many patients on this machine."""
    folder.mkdir()
    w = federated_site(folder)

    def examples(_rule: object) -> TaskCohort:
        machine.read(patients)
        return TaskCohort(tuple(TaskPatient(f"p{i:04}", (PICTURE,)) for i in range(patients)))

    def run(_call: Callable[..., Any], given: TaskCohort, update: Any, *_: object) -> Any:
        machine.train(len(given.patients))
        return update

    p = part(w)
    p.site = replace(p.site, run=run, examples=examples)
    p.clock, p.effort = lambda: machine.seconds, lambda: machine.worked
    return w


def times_seen(folder: Path, patients: int, machine: Machine) -> list[float]:
    """A coordinator that measures: seconds from each question of a run to its answer."""
    w = site(folder, patients, machine)
    envelope = part(w).join("run-1", JOB, HOUR)
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    handler = TaskHandler(w.part, threading.Lock(), ErrorLog(), machine, lambda: machine.seconds)  # type: ignore[arg-type]
    seen = []
    for index in range(JOB.rounds):
        asked = machine.seconds
        handler.handle(RoundTask("run-1", "train", index, JOB.to_json().encode(), START.vector, terms=HOUR))
        seen.append(machine.seconds - asked)
    return seen


@pytest.mark.parametrize("patients", [50, 60, 97, 150, 200])
@pytest.mark.parametrize("load", [1.0, 3.0])
def test_a_coordinator_that_measures_cannot_tell_a_site_from_one_with_twice_its_patients(
    tmp_path: Path, patients: int, load: float
) -> None:
    one = times_seen(tmp_path / "one", patients, Machine(load=load))
    two = times_seen(tmp_path / "two", 2 * patients, Machine(load=load))
    assert one == two
    assert set(one) <= set(answer_times(HOUR.seconds))


def test_the_next_time_alone_would_tell_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A red control: the same answers, each at the next of the times."""
    monkeypatch.setattr(AnswerPace, "trained", lambda *_: None)
    one = times_seen(tmp_path / "one", 100, Machine())
    two = times_seen(tmp_path / "two", 200, Machine())
    assert one != two


def test_an_answer_that_misses_its_time_takes_the_next_one_from_then_on() -> None:
    pace = AnswerPace()
    pace.trained("run-1", RoundWork(0.0, 10.0, 10.0, 100, 100))
    assert not pace.is_open(3_600), "as many patients as the bound: nothing has to be measured"
    assert [pace.leaves("run-1", seconds, 3_600) for seconds in (10.0, 17.0, 9.0)] == [16.0, 32.0, 32.0]
    assert pace.leaves("run-2", 3.0, 3_600) == 4.0, "another run has a time of its own"


def test_few_patients_are_not_multiplied_without_end() -> None:
    work = RoundWork(0.0, 10.0, 10.0, 1, 100_000)
    assert work.expected(8.0) == pytest.approx(8.0 + 2.0 * MOST_SHARE)
    assert replace(work, patients=0).expected(8.0) == work.expected(8.0)


def test_what_would_be_late_by_the_bound_is_tried_for_the_rounds_end() -> None:
    pace = AnswerPace()
    pace.trained("run-1", RoundWork(0.0, 50.0, 50.0, 10, 100))
    assert pace.is_open(60)
    pace.choose(0.0, 0.0, 60)
    assert pace.leaves("run-1", 50.0, 60) == 60.0
