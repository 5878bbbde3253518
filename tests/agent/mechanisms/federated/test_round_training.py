"""P10: of a round's steps only those that were not kept are taken again, also behind the wall."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from agent.domain import Update
from agent.dp import dpsgd
from agent.dp.compute_device import ComputePlan
from agent.dp.noise import SystemEntropy
from agent.errors import OtherRunError
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import RoundPlace
from agent.mechanisms.federated.round_training import STEPS, RoundTraining
from agent.mechanisms.federated.task_training import labelled_examples, network_of
from agent.models.training_loop import load_state
from agent.release.maker_process import MakerProcess
from agent.release.ports import Run, run_here
from policies.tasks.networks import NetworkSpec
from protos.operations.confinement import REQUIRED
from tests.support.small_mechanisms import FEDERATED, digit_patients
from tests.support.small_tasks import changed

COHORT = labelled_examples(FEDERATED.task, digit_patients(range(200)))
WHOLE = 8


class FullDiskError(OSError):
    """In place of a kill: nothing is written any more."""


@dataclass
class Place:
    """A checkpoint that fails after some writes."""

    data: bytes | None = None
    left: int = 1 << 30
    steps: list[int] = field(default_factory=list)

    def read(self) -> bytes | None:
        return self.data

    def write(self, data: bytes) -> None:
        if not self.left:
            raise FullDiskError
        self.left -= 1
        self.data = data
        self.steps.append(load_state(data, "round-1")[0])


def trained(training: RoundTraining, place: Place, run: Run = run_here, start: Update | None = None) -> Update:
    bench = Workspace({STEPS: place}.__getitem__)
    start = start or training.training.initial()
    made = run(training.run_round, COHORT, start, SystemEntropy(), bench, {}, ComputePlan())
    assert isinstance(made, Update)
    return made


def of(steps: int, **changes: Any) -> RoundTraining:
    mechanism = changed(FEDERATED, steps_per_round=steps, noise_multiplier=6.0, **changes)
    return RoundTraining(mechanism, "round-1")


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (5, 1), (10, 1), (11, 2), (100, 10), (250, 25), (10_000, 25)])
def test_so_many_steps_lie_between_checkpoints(steps: int, every: int) -> None:
    assert of(steps).every == every


def test_every_step_of_a_short_round_is_kept_but_the_last_one() -> None:
    place = Place()
    trained(of(WHOLE), place)
    assert place.steps == list(range(1, WHOLE))
    whole = Place()
    trained(of(1), whole)
    assert whole.steps == []


@pytest.mark.parametrize("run", [run_here, MakerProcess(REQUIRED)], ids=["here", "confined"])
@pytest.mark.parametrize("writes", [1, 4, WHOLE - 1])
def test_it_goes_on_at_the_newest_step_and_takes_none_twice(
    monkeypatch: pytest.MonkeyPatch, real_maker: None, run: Run, writes: int
) -> None:
    del real_maker
    drawn, draw = list[int](), dpsgd.noisy_sum

    def noisy(*told: Any) -> Any:
        drawn.append(1)
        return draw(*told)

    monkeypatch.setattr(dpsgd, "noisy_sum", noisy)  # of another process it counts none
    training, place = of(WHOLE, momentum=0.9, ema=0.5, proximal=0.001), Place(left=writes)
    if writes < WHOLE - 1:
        with pytest.raises(FullDiskError):
            trained(training, place, run)
    else:
        trained(training, place, run)
    place.left, before = 1 << 30, len(drawn)
    made = trained(training, place, run)
    assert place.steps == list(range(1, WHOLE)), "each was kept once"
    assert len(place.data or b"") <= training.max_checkpoint_bytes
    assert np.isfinite(made.vector).all()
    if run is run_here:
        assert len(drawn) - before == WHOLE - writes


def test_a_head_of_the_sites_own_is_in_the_checkpoint_and_within_its_size() -> None:
    network = NetworkSpec("small-cnn", {"width": 8})
    task = replace(FEDERATED.task, network=network)
    task = replace(task, training=replace(task.training, head="own", steps_per_round=WHOLE))
    numbers = network_of(task, {}.__getitem__).parameters
    built = replace(FEDERATED, task=task, parameters=numbers, noise_multiplier=6.0)
    head = built.network().own_head()
    assert head is not None
    training = RoundTraining(built, "round-1", len(head))
    place = Place(left=3)
    with pytest.raises(FullDiskError):
        trained(training, place)
    place.left = 1 << 30
    made = trained(training, place)
    assert made.head is not None
    assert (len(made.head), place.steps) == (len(head), list(range(1, WHOLE)))
    assert len(place.data or b"") <= training.max_checkpoint_bytes


def test_the_place_of_a_round_gives_another_rounds_steps_to_nobody() -> None:
    place = Place()
    trained(of(WHOLE), place)
    assert RoundPlace(place, "round-1").read() == place.data
    assert RoundPlace(place, "round-2").read() is None
    with pytest.raises(OtherRunError):
        load_state(place.data or b"", "round-2")
