"""A task's model, trained by one hospital alone: the rounds of a run with it alone, and held-out patients unseen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import ExampleRule
from agent.dp import dpsgd
from agent.errors import SiteConfigError
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.config import ModelSite, read_model
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError
from agent.mechanisms.federated.task_model import LOOK, ROUNDS, STEPS, TaskModel
from policies.accounting.claims import Evaluated, SubsampledGaussian
from policies.accounting.rdp import epsilon_nano
from policies.ledger.entries import Opened
from policies.tasks.evaluation import HELD_OUT, TRAINED, EvaluationPlan
from policies.tasks.released_model import KIND, model_config, model_tensors
from protos.artifacts.byte_source import BytesSource
from protos.artifacts.strict_safetensors import Architecture, canonical, check_weights
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.memory_place import MemoryPlace
from tests.support.small_mechanisms import COHORT, FEDERATED, MODEL, in_parts
from tests.support.small_tasks import changed

ACCOUNT = Opened("site-a/rdp", 10**10, 4, "8.0", "4e-06")
SITE = ModelSite(ACCOUNT, lambda _: None, lambda _: "")
TASK = """
[task]
name = "digits"
kind = "classification"
[labels]
classes = ["0", "1", "2"]
[input]
modality = "OT"
size = [8, 8]
[training]
public_patients = 200
[network]
name = "linear"
"""
CONFIG = 'mechanism = "model"\ntask = "digits.toml"\n'


def written(folder: Path, more: str = "[privacy]\nepsilon = 4.0\n", task: str = TASK) -> Path:
    (folder / "digits.toml").write_text(task)
    (folder / "model.toml").write_text(CONFIG + more)
    return folder / "model.toml"


def test_it_is_what_a_run_with_this_hospital_alone_would_make() -> None:
    parts, entropy, alone = in_parts(COHORT), UnsafeSeededEntropy(3), MODEL.training
    model = alone.initial()
    for _ in range(alone.rounds):
        model = alone.run_round(parts[TRAINED], model, entropy)
    sums = alone.run_look(parts[HELD_OUT], model, entropy)
    made = MODEL.run(parts, UnsafeSeededEntropy(3))
    assert np.array_equal(made.parameters, model.vector)
    assert np.array_equal(made.sums, sums.vector)
    assert MODEL.claim() == alone.claim()


class Killed(MemoryPlace):
    """A place whose process is gone after so many writes."""

    left = 1 << 30

    def write(self, data: bytes) -> None:
        super().write(data)
        Killed.left -= 1
        if not Killed.left:
            raise KeyboardInterrupt


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many noisy sums were drawn."""
    draws, real = [0], dpsgd.noisy_sum

    def noisy(*told: Any) -> Any:
        draws[0] += 1
        return real(*told)

    monkeypatch.setattr(dpsgd, "noisy_sum", noisy)
    return draws


@pytest.mark.parametrize("writes", [1, 2, 3, 4, 6, 8])
def test_wherever_it_is_killed_it_goes_on_and_the_model_has_the_steps_that_were_priced(
    monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Rounds of 40 steps: a checkpoint at 25, one at the round's end, then the round itself."""
    mechanism = TaskModel(changed(FEDERATED, rounds=2, steps_per_round=40, momentum=0.9, ema=0.5))
    draws, places = counted(monkeypatch), {name: Killed() for name in mechanism.places}
    bench, parts = Workspace(places.__getitem__), in_parts(COHORT)
    monkeypatch.setattr(Killed, "left", writes)
    if writes <= 6:
        with pytest.raises(KeyboardInterrupt):
            mechanism.run(parts, UnsafeSeededEntropy(1), bench)
    before = draws[0]
    assert before == {1: 25, 2: 40, 3: 40, 4: 65, 6: 80, 8: 0}[writes]
    made = mechanism.run(parts, UnsafeSeededEntropy(2), bench)
    assert draws[0] == 80, "no step is missing, and none that was kept is taken again"
    again = mechanism.run(parts, UnsafeSeededEntropy(3), bench)
    assert (draws[0], again.parameters.tobytes()) == (80, made.parameters.tobytes())
    assert all(len(place.data or b"") <= mechanism.max_checkpoint_bytes for place in places.values())
    assert set(mechanism.places) == {ROUNDS, STEPS}


def test_a_look_is_drawn_once_whatever_happens_afterwards() -> None:
    places = {name: MemoryPlace() for name in MODEL.places}
    first = MODEL.run(in_parts(COHORT), UnsafeSeededEntropy(1), Workspace(places.__getitem__))
    again = MODEL.run(in_parts(COHORT), UnsafeSeededEntropy(2), Workspace(places.__getitem__))
    assert first.sums.tobytes() == again.sums.tobytes()
    assert LOOK in MODEL.places


def test_a_held_out_patient_moves_no_parameter_and_a_trained_one_does() -> None:
    """The control beside it: the very same change of a patient who is trained on is seen."""
    parts = in_parts(COHORT)
    made = MODEL.run(parts, UnsafeSeededEntropy(5)).parameters

    def without_first(part: str) -> Any:
        left = replace(parts[part], patients=parts[part].patients[1:])
        return MODEL.run({**parts, part: left}, UnsafeSeededEntropy(5)).parameters

    assert np.array_equal(made, without_first(HELD_OUT))
    assert not np.array_equal(made, without_first(TRAINED))


def test_the_same_patients_are_held_out_as_in_a_run_with_that_share() -> None:
    rules = MODEL.rules("grant-1")
    assert rules == {part: MODEL.training.examples(part, "grant-1") for part in (TRAINED, HELD_OUT)}
    split = rules[TRAINED].split
    assert split is not None
    assert split == rules[HELD_OUT].split
    assert (rules[TRAINED].part, rules[HELD_OUT].part) == (TRAINED, HELD_OUT)
    plain = TaskModel(FEDERATED).rules()
    assert (plain.keys(), plain[TRAINED].split) == ({TRAINED}, None)


@pytest.mark.parametrize("mechanism", [MODEL, TaskModel(FEDERATED)])
def test_its_file_is_of_the_architecture_that_follows_from_the_task(mechanism: TaskModel) -> None:
    task, bins = mechanism.training.task, mechanism.bins
    told = canonical({"kind": KIND, "config": dict(model_config(task, bins)), "notes": {}})
    lengths = model_tensors(task, mechanism.training.parameters, bins)
    derived = Architecture.of({name: ("F32", (length,)) for name, length in lengths.items()}, told)
    check_weights(BytesSource(mechanism.untrained()), derived)
    made = mechanism.run(in_parts(COHORT), UnsafeSeededEntropy(1))
    check_weights(BytesSource(mechanism.file(made)), derived)
    for wrong in (replace(made, parameters=made.parameters[1:]), replace(made, sums=np.zeros(3, np.float32))):
        with pytest.raises(ValueError, match="another size"):
            mechanism.file(wrong)
    broken = made.parameters.copy()
    broken[0] = np.nan
    with pytest.raises(ValueError, match="numbers"):
        mechanism.file(replace(made, parameters=broken))


def test_more_than_one_look_at_a_model_that_is_made_at_once_is_refused() -> None:
    with pytest.raises(FederatedConfigError, match="looks: 1"):
        TaskModel(replace(FEDERATED, evaluate=EvaluationPlan(2, 5.0, 20, 10)))


@pytest.mark.parametrize("epsilon", [0.9, 3.0, 8.0])
@pytest.mark.parametrize("look", ["", "[evaluate]\nnoise = 20.0\nheld_out = 20\n"])
def test_the_price_is_what_the_ledger_charges_with_the_look_and_a_thousandth_less_noise_is_dearer(
    tmp_path: Path, epsilon: float, look: str
) -> None:
    account = replace(ACCOUNT, order=16)
    made = read_model(written(tmp_path, f"[privacy]\nepsilon = {epsilon}\n{look}"), replace(SITE, account=account))
    charged = epsilon_nano(made.claim(), float(account.delta), account.order)
    assert charged <= epsilon * 1e9
    less: Federated = replace(made.training, noise_multiplier=made.training.noise_multiplier - 0.001)
    assert epsilon_nano(less.claim(), float(account.delta), account.order) > epsilon * 1e9
    assert isinstance(made.claim(), Evaluated if look else SubsampledGaussian)


@pytest.mark.parametrize(
    ("more", "task", "why"),
    [
        ("", TASK, "model.toml: privacy: missing"),
        ("[privacy]\nepsilon = 4.0\nnoise_multiplier = 2.0\n", TASK, "privacy: write epsilon, .*; not both"),
        ("[privacy]\nepsilon = 0.0\n", TASK, "privacy: epsilon: above 0"),
        ("[privacy]\nepsilon = 0.01\n", TASK, "no noise keeps it under epsilon 0.01"),
        ("[privacy]\nepsilon = 4.0\n[evaluate]\nnoise = 9.0\nheld_out = 70\n", TASK, "evaluate: .*held_out: 1 to 50"),
        ("[privacy]\nepsilon = 4.0\n[looks]\n", TASK, "unknown table: looks"),
        ("[privacy]\nepsilon = 4.0\n", TASK.replace("linear", "resnet-19"), "digits.toml: network.name: "),
        ("[privacy]\nepsilon = 4.0\n", TASK.replace("200", "900000"), "digits.toml: training.public_patients: below"),
    ],
)
def test_what_cannot_be_made_is_said_with_file_and_key(tmp_path: Path, more: str, task: str, why: str) -> None:
    with pytest.raises(SiteConfigError, match=why):
        read_model(written(tmp_path, more, task), SITE)


def test_a_task_that_is_not_there_public_weights_that_are_not_and_labels_that_do_not_fit_are_said(
    tmp_path: Path,
) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("digits.toml", "letters.toml"))
    with pytest.raises(SiteConfigError, match=r"letters.toml: No such file"):
        read_model(path, SITE)
    weights = TASK.replace("[8, 8]", "[32, 32]").replace('"linear"', f'"small-cnn"\nweights = "{"a" * 64}"')
    with pytest.raises(SiteConfigError, match=f"network.weights: public weights .*: {'a' * 64}"):
        read_model(written(tmp_path, task=weights), SITE)
    rules = list[ExampleRule]()

    def misfit(rule: ExampleRule) -> str:
        rules.append(rule)
        return "findings.grade: the table does not declare it"

    with pytest.raises(SiteConfigError, match=r"model.toml: digits.toml: findings.grade: "):
        read_model(written(tmp_path), replace(SITE, label_misfit=misfit))
    assert rules[0].classes == ("0", "1", "2")
