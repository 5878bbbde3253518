"""When answers leave tells the coordinator nothing of how many patients a site has, of rounds and of looks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent.domain import Example, ExampleRule, LatticePart, Selection, TaskCohort, TaskPatient, Update
from agent.dp.compute_device import AcceleratorLostError
from agent.federation import participant, round_making
from agent.federation.answer_pace import MOST_SHARE, AnswerPace, RoundWork, RunPaces
from agent.federation.round_making import RoundSteps
from agent.federation.run_mechanism import patients_bound
from agent.federation.service import TaskHandler
from agent.federation.tasks import RoundTask, TaskDeclinedError
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.round_training import STEPS, RoundTraining
from agent.models.training_loop import load_state, save_state
from agent.release.maker_process import MakerEndedError
from policies.tasks.evaluation import HELD_OUT, TRAINED, EvaluationPlan
from protos.federation.round_times import RoundTerms, answer_times
from protos.secagg import round
from protos.secagg.messages import SumStep
from tests.support.federated_sites import (
    PLAN,
    START,
    STRATEGY,
    ErrorLog,
    FederatedSite,
    SecureRun,
    federated,
    federated_site,
    masked,
    part,
)
from tests.support.site_world import in_part
from tests.support.small_tasks import changed

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
    lost_in: int = 0  # the training in which the accelerator is lost, from 1; then it is the processor that works
    killed_at: int = 0  # after this step of a round in clear, the process that trains is ended, once
    dies: bool = False  # and the service with it
    trainings: int = 0
    waits: list[float] = field(default_factory=list)

    def read(self, patients: int) -> None:
        """Patients are read."""
        self.seconds += self.load * self.reading * patients

    def step(self, call: RoundTraining, bench: Workspace, patients: int) -> None:
        """A round is trained step by step, from the newest one that is kept."""
        self.work(self.start)
        place, steps = bench.place(STEPS), call.training.steps_per_round
        raw = place.read()
        for number in range(1 + (load_state(raw, call.round)[0] if raw else 0), steps + 1):
            self.work(self.patient * patients / steps)
            if number < steps:
                place.write(save_state(call.round, number, {"weights": torch.zeros(1)}))
            if patients and number == self.killed_at:
                self.killed_at = 0
                raise KeyboardInterrupt if self.dies else MakerEndedError(signal.SIGKILL)

    def work(self, seconds: float) -> None:
        """Something is computed."""
        self.seconds, self.worked = self.seconds + self.load * seconds, self.worked + seconds

    def train(self, patients: int) -> None:
        """A round is trained."""
        self.trainings += bool(patients)  # one of nobody is no training
        fast = 0.1 if self.trainings <= self.lost_in else 1.0
        self.work(self.start + fast * self.patient * patients)

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

    on_machine(w, patients, machine)
    return w


def on_machine(w: FederatedSite, patients: int, machine: Machine) -> None:
    """A site's part in a run works on this machine, with so many patients."""

    def examples(rule: ExampleRule) -> TaskCohort:
        names = [f"p{i:04}" for i in range(patients)]
        if rule.split is not None:
            whom = Selection(rule.modality, rule.size, split=rule.split, part=rule.part)
            names = [name for name in names if in_part(whom, name)]
        machine.read(len(names))
        return TaskCohort(tuple(TaskPatient(name, (PICTURE,)) for name in names))

    def run(call: Callable[..., Any], given: TaskCohort, update: Update, *rest: object) -> Any:
        owner = call.__self__  # type: ignore[attr-defined]
        if isinstance(owner, RoundTraining) and not machine.lost_in:
            machine.step(owner, next(one for one in rest if isinstance(one, Workspace)), len(given.patients))
        else:
            machine.train(len(given.patients))
        if given.patients and machine.lost_in and machine.trainings == machine.lost_in:
            raise AcceleratorLostError("gone")
        look = call.__name__ == "run_look"
        mechanism = owner.training if isinstance(owner, RoundTraining) else owner
        size = mechanism.layout().size if look else len(update.vector)
        if isinstance(mechanism, Federated):
            return Update(np.zeros(size, np.float32))
        return LatticePart(np.zeros(size, np.int64))

    p = part(w)
    p.site = replace(p.site, run=run, examples=examples)
    p.clock, p.effort = lambda: machine.seconds, lambda: machine.worked


def handler_of(w: FederatedSite, machine: Machine) -> TaskHandler:
    """The product's own, by the machine's clock."""
    return TaskHandler(w.part, threading.Lock(), ErrorLog(), machine, lambda: machine.seconds)  # type: ignore[arg-type]


TRAIN: tuple[Any, ...] = ("train",) * JOB.rounds


def times_seen(
    folder: Path, patients: int, machine: Machine, job: Federated = JOB, kinds: tuple[Any, ...] = TRAIN
) -> list[float]:
    """A coordinator that measures: seconds from each question of a run to its answer."""
    w = site(folder, patients, machine)
    envelope = part(w).join("run-1", job, HOUR)
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    handler, seen = handler_of(w, machine), []
    for index, kind in enumerate(kinds):
        task = RoundTask("run-1", kind, index, job.to_json().encode(), START.vector, terms=HOUR)
        asked = machine.seconds
        try:
            with suppress(TaskDeclinedError):
                handler.handle(task)
        except KeyboardInterrupt:  # asked again, of a new process
            assert w.crash()
            on_machine(w, patients, machine)
            handler, asked = handler_of(w, machine), machine.seconds
            handler.handle(task)
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


@pytest.mark.parametrize("patients", [60, 100])
def test_a_site_that_lost_its_accelerator_is_not_told_from_one_with_twice_its_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patients: int
) -> None:
    """The processor goes on with the round. It takes longer, so that a time is chosen by the bound again; the control
    keeps the old one.
    """
    one = times_seen(tmp_path / "one", patients, Machine(lost_in=2))
    two = times_seen(tmp_path / "two", 2 * patients, Machine(lost_in=2))
    assert one == two
    assert one[0] < one[1] == one[3], "it takes longer there"
    monkeypatch.setattr(RunPaces, "choose_anew", property(lambda _: False, lambda *_: None))
    kept = [times_seen(tmp_path / f"{n}", n * 100, Machine(lost_in=2)) for n in (1, 2)]
    assert kept[0] != kept[1]


STEPPED = changed(JOB, steps_per_round=8, noise_multiplier=4.0)


@pytest.mark.parametrize("patients", [60, 100, 150])
@pytest.mark.parametrize("step", [1, 5, 7])
@pytest.mark.parametrize("dies", [False, True])
def test_a_round_that_went_on_after_a_kill_is_not_told_from_one_of_twice_as_many_patients(
    tmp_path: Path, patients: int, step: int, dies: bool
) -> None:
    """Its first round is the one by which the times are chosen, and only the rest of it is measured."""
    one, two = (
        times_seen(tmp_path / f"{n}", n * patients, Machine(killed_at=step, dies=dies), STEPPED) for n in (1, 2)
    )
    assert one == two
    assert one == times_seen(tmp_path / "whole", patients, Machine(), STEPPED), (
        "nor from one that nothing interrupted"
    )


def _on_a_slow_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patients: int, seconds: float, *, told: bool = True
) -> list[float]:
    """The times of a site whose service takes so long for public files and for each step that it seals."""
    machine, place, files = Machine(patient=0.2), RoundSteps._place.fget, round_making.public_files  # type: ignore[attr-defined]

    def slow(self: RoundSteps) -> Any:
        def write(data: bytes) -> None:
            machine.seconds += seconds
            place(self).write(data)

        return SimpleNamespace(write=write, read=place(self).read, clear=place(self).clear)

    def read(*asked: Any) -> Any:
        machine.seconds += seconds
        return files(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(RoundSteps, "_place", property(slow))
        patched.setattr(round_making, "public_files", read)
        if not told:
            patched.setattr(RoundSteps, "whole_round", lambda _, begun, now: (now - begun, 0.0))
        return times_seen(folder, patients, machine, STEPPED)


@pytest.mark.parametrize("seconds", [1.0, 2.0, 3.0])
def test_what_sealing_and_files_take_is_not_taken_for_the_work_on_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The control takes the seconds of sealing for those of a training."""
    numbers = (50, 100, 200, 400)
    times = [_on_a_slow_disk(tmp_path / f"{n}", monkeypatch, n, seconds) for n in numbers]
    assert times[0] == times[1] == times[2] == times[3]
    control = [_on_a_slow_disk(tmp_path / f"c{n}", monkeypatch, n, 3.0, told=False) for n in numbers]
    assert len(set(map(tuple, control))) > 1


@pytest.mark.parametrize("patients", [100])
def test_by_what_is_left_of_a_round_alone_later_answers_would_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patients: int
) -> None:
    """A red control: the rest of a round is taken for a whole one, and the later ones miss the time that it chose."""
    monkeypatch.setattr(RoundSteps, "whole_round", lambda _, begun, now: (now - begun, 0.0))
    one, two = (times_seen(tmp_path / f"{n}", n * patients, Machine(killed_at=7, dies=True), STEPPED) for n in (1, 2))
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


# --- looks


def looking(held_out: int) -> Federated:
    """A run with as many looks as rounds, at so many per cent of the patients."""
    return replace(JOB, evaluate=EvaluationPlan(looks=4, noise=20.0, held_out=held_out, bins=4))


TURNS: tuple[Any, ...] = ("train", "evaluate") * 4


@pytest.mark.parametrize("held_out", [5, 10, 20, 50])
@pytest.mark.parametrize("patients", [100, 150, 200])
def test_neither_rounds_nor_looks_tell_a_site_from_one_with_twice_its_patients(
    tmp_path: Path, patients: int, held_out: int
) -> None:
    job = looking(held_out)
    one = times_seen(tmp_path / "one", patients, Machine(), job, TURNS)
    two = times_seen(tmp_path / "two", 2 * patients, Machine(), job, TURNS)
    assert one == two
    assert set(one) <= set(answer_times(HOUR.seconds))


def test_by_the_bound_of_all_patients_few_held_out_ones_would_tell_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A red control: one in twenty of the patients is far below an eighth of the bound, whatever a site has."""
    monkeypatch.setattr(round_making, "patients_bound", lambda mechanism, _: mechanism.public_patients)
    one = times_seen(tmp_path / "one", 100, Machine(), looking(5), TURNS)
    two = times_seen(tmp_path / "two", 200, Machine(), looking(5), TURNS)
    assert one != two


def test_the_bound_of_a_part_is_its_share_of_the_jobs_rounded_up() -> None:
    bounds = {n: [patients_bound(looking(n), part) for part in (HELD_OUT, TRAINED)] for n in (5, 10, 20, 50)}
    assert bounds == {5: [20, 380], 10: [40, 360], 20: [80, 320], 50: [200, 200]}
    assert patients_bound(federated(public_patients=25, evaluate=PLAN), HELD_OUT) == 7, "a quarter of 25, not 6"
    assert patients_bound(JOB, TRAINED) == 400, "without looks everybody is trained on"


def masked_times(folder: Path, patients: int) -> list[float]:
    """The same of the two masked vectors of a round and a look, by the handler of one of three sites."""
    folder.mkdir()
    machine = Machine()
    job = masked(rounds=2, public_patients=400, evaluate=EvaluationPlan(1, 80.0, 10, 4))
    trial = SecureRun(folder, job=job, terms=HOUR)
    for ward in trial.wards.values():
        on_machine(ward, patients, machine if ward.hospital.name == "north" else Machine())
    trial.granted()
    handler, seen = handler_of(trial.wards["north"], machine), []
    for index, strategy in enumerate((STRATEGY, round.LOOK)):
        request = trial.play(until=SumStep.MASK, index=index, strategy=strategy).requests()["north"]
        asked = machine.seconds
        task = RoundTask("run-1", "secure", index, trial.config, None, "mask", request, HOUR)
        assert handler.handle(task).payload
        seen.append(machine.seconds - asked)
    return seen


def test_a_masked_look_leaves_by_the_time_of_looks(tmp_path: Path) -> None:
    one, two = masked_times(tmp_path / "one", 100), masked_times(tmp_path / "two", 200)
    assert one == two
    assert one[1] < one[0], "one in ten is looked at, and nine are trained on"


# --- whose terms


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_of_other_times_than_were_priced_is_declined_and_changes_no_time(tmp_path: Path, kind: Any) -> None:
    """With times of its own choice in each message a coordinator could measure a site as finely as it likes."""
    machine = Machine()
    w, job = site(tmp_path / "site", 100, machine), looking(20)
    envelope = part(w).join("run-1", job, HOUR)
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    handler, config = handler_of(w, machine), job.to_json().encode()
    handler.handle(RoundTask("run-1", "train", 0, config, START.vector, terms=HOUR))
    handler.handle(RoundTask("run-1", "evaluate", 1, config, START.vector, terms=HOUR))
    machine.patient, asked, made = 40.0, machine.seconds, part(w).turns_made
    with pytest.raises(TaskDeclinedError, match="policy"):
        handler.handle(RoundTask("run-1", kind, 2, config, START.vector, terms=RoundTerms(3)))
    assert part(w).turns_made == made
    assert machine.seconds - asked in answer_times(HOUR.seconds)
    assert machine.seconds - asked not in answer_times(3)


def test_an_answer_leaves_by_the_times_that_were_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a message with other times were taken: three seconds lead to 3, 6, 12 ... 192, and not to 256."""
    monkeypatch.setattr(participant.Participant, "same_terms", lambda *_: None)
    machine = Machine()
    w = site(tmp_path / "site", 400, machine)
    assert w.intake.reserve_run("run-1", {"site-a": part(w).join("run-1", JOB, HOUR)}, 1)["site-a"].admitted

    def fails(_call: object, given: TaskCohort, *_: object) -> None:
        machine.train(len(given.patients))
        raise MemoryError

    part(w).site = replace(part(w).site, run=fails)
    task = RoundTask("run-1", "train", 0, JOB.to_json().encode(), START.vector, terms=RoundTerms(3))
    asked = machine.seconds
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        handler_of(w, machine).handle(task)
    assert machine.seconds - asked == 256.0


# --- a round of nobody


def test_a_round_of_nobody_is_shown_to_nobody(tmp_path: Path) -> None:
    """Else the site's people see the steps of the round that is over once more."""
    machine, seen = Machine(), list[tuple[int, Workspace]]()
    w = site(tmp_path / "site", 100, machine)
    within, shown = part(w).site.run, list[str]()
    part(w).watch.trains = lambda stage, *_: shown.append(stage)  # type: ignore[method-assign]

    def run(call: Callable[..., Any], given: TaskCohort, *rest: Any) -> Any:
        seen.append((len(given.patients), next(one for one in rest if isinstance(one, Workspace))))
        return within(call, given, *rest)

    part(w).site = replace(part(w).site, run=run)
    assert w.intake.reserve_run("run-1", {"site-a": part(w).join("run-1", JOB, HOUR)}, 1)["site-a"].admitted
    task = RoundTask("run-1", "train", 0, JOB.to_json().encode(), START.vector, terms=HOUR)
    handler_of(w, machine).handle(task)
    assert [patients for patients, _ in seen] == [100, 0]
    for _, bench in seen:
        bench.say("train", 1, 1)
    assert shown == ["train"], "the round's own steps, once"


# --- what a look's people hear


def test_the_sites_people_hear_why_a_look_came_to_nothing(tmp_path: Path) -> None:
    w, told = site(tmp_path / "site", 100, Machine()), list[tuple[int, str]]()
    part(w).watch.came_to_nothing = lambda _, number, why: told.append((number, why))  # type: ignore[method-assign]
    part(w).join("run-1", looking(20), HOUR)
    task = RoundTask("run-1", "evaluate", 0, b"", START.vector, terms=HOUR)
    with pytest.raises(TaskDeclinedError):
        handler_of(w, Machine()).handle(task)
    assert told == [(1, "round: this look is not covered by a grant")]
