"""What a task trains: a patient's rows are of this patient alone, their mean is clipped once, a loss is of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agent.domain import Cohort, Example, Image, Patient, TaskCohort, TaskPatient, Update
from agent.dp import clipping, dpsgd, per_example_gradients
from agent.dp.clipping import PrivacyUnit, loop_engine
from agent.dp.compute_device import ComputePlan, TaskMemoryError
from agent.dp.gradient_recorder import GradientRecorder
from agent.mechanisms.federated import task_training
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.mechanisms.federated.task_training import (
    RoundSgd,
    engine_of,
    fitted_engine,
    has_rules,
    labelled_examples,
    network_of,
    row_losses,
    scores,
    unit_of,
    units,
)
from agent.models.networks.trainable import TrainableNetwork
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Input, Labels, Loss, Task, Training
from policies.tasks.transforms import TransformSpec
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.small_tasks import changed, classification

SIZE = (16, 16)
CNN = NetworkSpec("small-cnn", {"width": 8, "convolutions": 2, "pooled": 1})
LABELS = {
    "classification": Labels(classes=("a", "b", "c")),
    "multi-label": Labels(table="t", columns=("a", "b", "c")),
    "regression": Labels(table="t", columns=("a", "b", "c"), low=(0.0,) * 3, high=(1.0,) * 3),
    "segmentation": Labels(classes=("a", "b")),
}
NETWORKS = dict.fromkeys(LABELS, CNN) | {"segmentation": NetworkSpec("segresnet", {"width": 8, "levels": 2})}
LOSSES = {
    "classification": ("cross-entropy",),
    "multi-label": ("binary-cross-entropy",),
    "regression": ("squared-error", "absolute-error"),
    "segmentation": ("dice-cross-entropy", "cross-entropy", "dice"),
}


def task_of(kind: str, network: NetworkSpec | None = None, loss: Loss | None = None, **more: Any) -> Task:
    images = {key: more.pop(key) for key in ("transforms", "channels", "example") if key in more}
    constants = {"rounds": 1, "steps_per_round": 2, "images_per_patient": 4, "public_patients": 8, **more}
    seen = Input("OT", SIZE, **images)
    return Task("small", kind, LABELS[kind], seen, loss or Loss(), Training(**constants), network or NETWORKS[kind])


def target(kind: str, dice: np.random.Generator) -> np.ndarray:
    if kind == "classification":
        return dice.integers(3, size=1)
    if kind == "segmentation":
        return dice.integers(3, size=SIZE)
    return dice.integers(2, size=3).astype(np.float32)


def patients(kind: str, counts: tuple[int, ...] = (1, 3, 2), seed: int = 0) -> TaskCohort:
    dice = np.random.default_rng(seed)
    made = [
        TaskPatient(
            f"p{n}", tuple(Example(dice.random((1, *SIZE), np.float32), target(kind, dice)) for _ in range(m))
        )
        for n, m in enumerate(counts)
    ]
    return TaskCohort(tuple(made))


def built(task: Task) -> TrainableNetwork:
    network = network_of(task, {}.__getitem__)
    dice = np.random.default_rng(1)
    network.load(dice.normal(0.0, 0.1, network.parameters).astype(np.float32))  # away from a head of zeros
    return network


def made(task: Task, cohort: TaskCohort) -> tuple[TrainableNetwork, list[PrivacyUnit]]:
    network = built(task)
    return network, units(task, network, cohort, UnsafeSeededEntropy(0))


CASES = [(kind, name) for kind, names in LOSSES.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_rows_loss_is_of_that_row_alone(kind: str, name: str) -> None:
    task = task_of(kind, loss=Loss(name))
    network, (_, unit, _) = made(task, patients(kind))
    losses = row_losses(task)(network.trained, unit.rows)
    alone = [row_losses(task)(network.trained, tuple(row[i : i + 1] for row in unit.rows)) for i in range(3)]
    assert losses.shape == (3,)
    torch.testing.assert_close(losses, torch.cat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_engine_that_is_chosen_gives_what_the_loop_gives(kind: str, name: str) -> None:
    task = task_of(kind, loss=Loss(name))
    network, listed = made(task, patients(kind))
    assert has_rules(network)
    found = engine_of(network, 8.0)(network.trained, row_losses(task), listed, 0.5)
    torch.testing.assert_close(
        found, loop_engine(network.trained, row_losses(task), listed, 0.5), rtol=1e-3, atol=1e-5
    )


def test_a_network_with_a_module_that_no_rule_covers_is_trained_by_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"width": 16, "layers": 1, "heads": 2, "patch": 8}
    task = task_of("classification", NetworkSpec("vit-s16", options))
    network, listed = made(task, patients("classification"))
    assert has_rules(network), "class token, positions and attention, too"
    sums = [engine_of(network, 8.0)(network.trained, row_losses(task), listed, 0.5)]
    monkeypatch.delitem(per_example_gradients.RULES, nn.LayerNorm)  # type: ignore[misc]
    assert not has_rules(network)
    sums += [engine_of(network, 8.0)(network.trained, row_losses(task), listed, 0.5)]
    for found in sums:
        torch.testing.assert_close(
            found, loop_engine(network.trained, row_losses(task), listed, 0.5), rtol=1e-3, atol=1e-5
        )


def test_large_features_go_through_few_patients_at_a_time_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("segmentation", replace(NETWORKS["segmentation"], trained="head"), public_patients=64)
    network, listed = made(task, patients("segmentation", (1,) * 6))
    numbers = listed[0].rows[0].numel()
    assert numbers == 8 * 16 * 16
    honest, seen = GradientRecorder.clipped_sum, []
    monkeypatch.setattr(GradientRecorder, "clipped_sum", lambda *of: seen.append(len(of[2].counts)) or honest(*of))
    for most, places in ((1, 1), (numbers, 1), (4 * numbers, 4), (task_training.CACHED, 32)):
        monkeypatch.setattr(task_training, "CACHED", most)
        engine = fitted_engine(task, network, ComputePlan())
        seen.clear()
        found = engine(network.trained, row_losses(task), listed, 0.5)
        assert seen[-1] == places
        torch.testing.assert_close(
            found, loop_engine(network.trained, row_losses(task), listed, 0.5), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_one_patient_moves_a_sum_by_at_most_the_clip(kind: str, name: str) -> None:
    task, clip = task_of(kind, loss=Loss(name)), 1e-3
    cohort = patients(kind, (2, 2, 1))
    network, listed = made(task, cohort)
    engine, loss = engine_of(network, 8.0), row_losses(task)
    whole = engine(network.trained, loss, listed, clip)
    for one in range(len(listed)):
        rest = engine(network.trained, loss, [*listed[:one], *listed[one + 1 :]], clip)
        moved = float((whole - rest).norm())
        assert 0.9 * clip < moved <= clip * (1 + 1e-5)


def test_an_image_that_is_clipped_by_itself_would_move_the_sum_by_more() -> None:
    # red control: the same patient, each image as a unit of its own
    task, clip = task_of("classification"), 1e-3
    (one,) = patients("classification", (1,)).patients
    network, (unit,) = made(task, TaskCohort((TaskPatient("p", one.examples * 4),)))
    apart = [PrivacyUnit(tuple(row[i : i + 1] for row in unit.rows)) for i in range(4)]
    sums = [engine_of(network, 8.0)(network.trained, row_losses(task), listed, clip) for listed in ([unit], apart)]
    assert float(sums[0].norm()) <= clip * (1 + 1e-5) < 1.5 * clip < float(sums[1].norm())


# -- missing targets


@pytest.mark.parametrize("kind", ["multi-label", "regression"])
def test_what_is_not_known_costs_nothing_and_what_is_known_is_averaged(kind: str) -> None:
    task = task_of(kind)
    (example,) = patients(kind, (1,)).patients[0].examples
    network = built(task)
    known = row_losses(task)(network.trained, unit(task, network, example).rows)
    half = replace(example, target=np.array([np.nan, example.target[1], np.nan], np.float32))
    losses = []
    for guess in (0.0, 1.0):
        other = replace(example, target=np.array([guess, example.target[1], guess], np.float32))
        losses.append(row_losses(task)(network.trained, unit(task, network, other).rows))
    found = row_losses(task)(network.trained, unit(task, network, half).rows)
    assert bool(torch.isfinite(found).all())
    assert not any(torch.allclose(found, other) for other in (*losses, known))
    gradients = torch.autograd.grad(found.sum(), network.module.head.weight)
    assert not bool(gradients[0][[0, 2]].any())  # the outputs of the missing ones
    assert bool(gradients[0][1].any())


def unit(task: Task, network: TrainableNetwork, *examples: Example) -> PrivacyUnit:
    found = unit_of(task, network, TaskPatient("p", examples))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["multi-label", "regression"])
def test_a_patient_of_whom_nothing_is_known_is_left_out(kind: str) -> None:
    task, nothing = task_of(kind), np.full(3, np.nan, np.float32)
    network = built(task)
    cohort = patients(kind, (1, 2))
    blank = TaskPatient("q", (replace(cohort.patients[0].examples[0], target=nothing),))
    assert unit_of(task, network, blank) is None
    with_blank = TaskCohort((*cohort.patients, blank))
    assert len(units(task, network, with_blank, UnsafeSeededEntropy(0))) == 2


# -- losses by a second implementation


def test_smoothing_and_weights_are_those_of_the_field() -> None:
    task = task_of("classification", loss=Loss("cross-entropy", smoothing=0.2, weights=(1.0, 2.0, 3.0)))
    outputs, targets = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])
    found = row_losses(task)(nn.Identity(), (outputs, targets[:, None]))
    logs, weights = outputs.log_softmax(1), torch.tensor([1.0, 2.0, 3.0])
    wanted = 0.8 * nn.functional.one_hot(targets, 3) + 0.2 / 3
    torch.testing.assert_close(found, -(wanted * weights * logs).sum(1))


def test_the_dice_of_a_sure_and_right_mask_is_nothing_and_of_a_wrong_one_nearly_all() -> None:
    task = task_of("segmentation", loss=Loss("dice"))
    mask = torch.zeros(1, *SIZE, dtype=torch.int64)
    mask[:, :8], mask[:, 8:12] = 1, 2
    sure = 40.0 * nn.functional.one_hot(mask, 3).movedim(-1, 1).float()
    right = row_losses(task)(nn.Identity(), (sure, mask))
    wrong = row_losses(task)(nn.Identity(), (sure, (mask + 1) % 3))
    assert float(right) == pytest.approx(0.0, abs=1e-4)
    assert float(wrong) > 0.9


# -- from the vault's images


def test_images_of_other_labels_are_left_out_and_colour_comes_first() -> None:
    colour = np.random.default_rng(0).random((16, 16, 3)).astype(np.float32)
    task = replace(task_of("classification"), input=Input("OT", SIZE, channels=3))
    cohort = Cohort((Patient("p", (Image(colour, "b"), Image(colour, "x"))), Patient("q", (Image(colour, "x"),))))
    (patient,) = labelled_examples(task, cohort).patients
    (example,) = patient.examples
    assert (example.pixels.shape, example.target.tolist()) == ((3, 16, 16), [1])
    assert np.array_equal(example.pixels[2], colour[:, :, 2])


def test_examples_of_another_shape_are_refused() -> None:
    task = task_of("classification")
    with pytest.raises(ValueError, match="shape"):
        unit_of(task, built(task), TaskPatient("p", (Example(np.zeros((1, 8, 8), np.float32), np.array([0])),)))


# -- frozen parts, transforms and views


def test_the_frozen_part_sees_each_image_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("classification", replace(CNN, trained="head"), steps_per_round=7)
    seen, honest = [], TrainableNetwork.prepare
    monkeypatch.setattr(TrainableNetwork, "prepare", lambda self, x: seen.append(len(x)) or honest(self, x))
    mechanism = Federated(task, network_of(task, {}.__getitem__).parameters, noise_multiplier=1.0)
    mechanism.run_round(patients("classification"), mechanism.initial(), UnsafeSeededEntropy(0))
    assert seen == [1, 1, 3, 2], "the first is made, to see whether it fits in memory"


def test_a_fixed_transform_is_applied_and_what_it_cannot_take_is_left_out() -> None:
    task = task_of("classification", transforms=(TransformSpec("CropForeground", {"threshold": 0.5}),))
    network = built(task)
    full, empty = np.ones((1, *SIZE), np.float32), np.zeros((1, *SIZE), np.float32)
    one = TaskPatient("p", (Example(full, np.array([0])), Example(empty, np.array([1]))))
    found = unit_of(task, network, one)
    assert found is not None
    assert len(found) == 1
    assert unit_of(task, network, TaskPatient("q", one.examples[1:])) is None


def test_the_views_of_a_patient_hang_on_nobody_else() -> None:
    noise = TransformSpec("RandGaussianNoise", {"prob": 1.0})
    task = task_of("classification", augmentation=(noise,), views=3)
    network, cohort = built(task), patients("classification")
    whole = units(task, network, cohort, UnsafeSeededEntropy(5))
    fewer = units(task, network, TaskCohort(cohort.patients[1:]), UnsafeSeededEntropy(5))
    assert [len(unit) for unit in whole] == [3, 9, 6]
    assert not torch.equal(whole[0].rows[0][0], whole[0].rows[0][1])
    for one, same in zip(whole[1:], fewer, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.rows, same.rows, strict=True))
    again = units(task, network, cohort, UnsafeSeededEntropy(6))
    assert not torch.equal(whole[0].rows[0], again[0].rows[0])


def test_a_mask_turns_with_its_picture() -> None:
    turn = TransformSpec("RandFlip", {"prob": 1.0, "spatial_axis": 1})
    task = task_of("segmentation", augmentation=(turn,), views=1)
    network, cohort = built(task), patients("segmentation", (1,))
    (example,) = cohort.patients[0].examples
    rows = units(task, network, cohort, UnsafeSeededEntropy(0))[0].rows
    assert np.array_equal(rows[0][0].numpy(), example.pixels[:, :, ::-1])
    assert np.array_equal(rows[1][0].numpy(), example.target[:, ::-1])


# -- what noisy gradients do


def test_momentum_and_average_see_noisy_numbers_alone_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    task = classification(("a", "b"), (8, 8), steps_per_round=4, momentum=0.5, ema=0.9, learning_rate=2.0)
    mechanism, noisy, honest = Federated(task, 130, 1.8), [], dpsgd.noisy_sum
    monkeypatch.setattr(dpsgd, "noisy_sum", lambda *told: noisy.append(honest(*told)) or noisy[-1])
    cohort = TaskCohort(
        tuple(
            TaskPatient(f"p{i}", (Example(np.full((1, 8, 8), 0.1 * i, np.float32), np.array([i % 2])),))
            for i in range(8)
        )
    )
    start = Update(np.random.default_rng(0).normal(size=130).astype(np.float32))
    for _ in range(2):
        noisy.clear()
        found = mechanism.run_round(cohort, start, UnsafeSeededEntropy(1)).vector
        weights, pace = start.vector.astype(np.float64), np.zeros(130)
        average = weights.copy()
        for step, gradient in enumerate(noisy, start=1):
            pace = 0.5 * pace + gradient / task.training.expected_batch
            weights = weights - 2.0 * pace
            keep = min(0.9, (1 + step) / (10 + step))
            average = keep * average + (1 - keep) * weights
        assert len(noisy) == 4
        assert np.allclose(found, average, atol=1e-4)


def test_the_last_step_leaves_where_there_is_no_average() -> None:
    weight = nn.Parameter(torch.zeros(3))
    sgd = RoundSgd([weight], lr=0.5, momentum=0.0, mu=0.0)
    weight.grad = torch.ones(3)
    sgd.step()
    assert weight.tolist() == [-0.5] * 3


def test_the_default_recipe_trains_a_network_from_zeros_at_every_site() -> None:
    task = task_of("classification", public_patients=60)
    length = network_of(task, {}.__getitem__).parameters
    mechanism = Federated(task, length, noise_multiplier=1.0)
    other = Federated.from_json(mechanism.to_json())
    for one in (mechanism, other):
        assert not one.network(one.initial().vector).vector().any()
    start = [one.network().module.state_dict() for one in (mechanism, other)]
    assert all(torch.equal(a, b) for a, b in zip(start[0].values(), start[1].values(), strict=True))
    found = mechanism.run_round(patients("classification"), mechanism.initial(), UnsafeSeededEntropy(0)).vector
    assert found.shape == (length,)
    assert found.any()


@pytest.mark.parametrize("kind", LABELS)
def test_every_kind_of_task_has_a_round_in_clear_and_in_a_sum(kind: str) -> None:
    task = task_of(kind, public_patients=60)
    length = network_of(task, {}.__getitem__).parameters
    plain = Federated(task, length, noise_multiplier=1.0)
    assert np.isfinite(plain.run_round(patients(kind), plain.initial(), UnsafeSeededEntropy(0)).vector).all()
    sums = replace(task, training=replace(task.training, steps_per_round=1, momentum=0.0))
    masked = FederatedMasked(sums, length, 4.0, sites=3, honest=2, value_bound=4.0, scale=26, ring_bits=32)
    part = masked.run_round(patients(kind), masked.initial(), UnsafeSeededEntropy(0))
    assert part.steps.shape == (length,)
    assert np.abs(part.steps).max() <= masked.value_bound * 2.0**26


def test_ten_million_parameters_at_epsilon_three_fit_the_ring_of_32_bits() -> None:
    # 60 steps at q = 1 and delta 1e-5 take a noise multiplier near 13; float32 held 2^24 steps, and these are more
    task = classification(
        ("a", "b"),
        (8, 8),
        rounds=60,
        steps_per_round=1,
        sampling_rate=1.0,
        clip=1.0,
        public_patients=500,
        learning_rate=0.0,
    )
    masked = FederatedMasked(task, 10_000_000, 13.0, sites=3, honest=2, value_bound=2.0**-5, scale=31, ring_bits=32)
    assert masked.value_bound * 2.0**31 > 1 << 24
    with pytest.raises(ValueError, match="scale: too small"):
        changed(masked, scale=27)


def test_scores_are_of_every_example_in_its_order() -> None:
    task = task_of("multi-label")
    network, cohort = built(task), patients("multi-label")
    found = scores(task, network, cohort)
    inputs = torch.from_numpy(np.stack([e.pixels for p in cohort.patients for e in p.examples]))
    with torch.no_grad():
        wanted: Tensor = network.module(inputs)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)
    assert scores(task, network, TaskCohort(())).shape == (0, 3)


def test_the_loss_of_the_task_is_the_one_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    called, honest = [], task_training._absolute_error
    monkeypatch.setattr(task_training, "_absolute_error", lambda *told: called.append(1) or honest(*told))
    task = task_of("regression", loss=Loss("absolute-error"))
    network, listed = made(task, patients("regression"))
    loop_engine(network.trained, row_losses(task), listed, 1.0)
    assert len(called) == 3


# -- memory


def _fits(patch: pytest.MonkeyPatch, most: int) -> None:
    """A machine on which no pass of more than ``most`` rows fits."""
    losses = clipping.row_losses_of

    def of(loss: clipping.RowLosses, model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        if len(rows[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(loss, model, rows)

    patch.setattr(clipping, "row_losses_of", of)


@pytest.mark.parametrize("counts", [(), (1, 2, 2)])
def test_whether_a_round_fits_in_memory_hangs_on_no_patient(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widest patient that the task allows is tried before any is here: a refusal would else tell of one."""
    task = task_of("classification")
    mechanism = Federated(task, network_of(task, {}.__getitem__).parameters, 1.0)
    _fits(monkeypatch, task.training.images_per_patient - 1)
    monkeypatch.setattr(clipping._Shapes, "halved", lambda _: None)
    with pytest.raises(TaskMemoryError, match=r"task 'small': training\.images_per_patient"):
        mechanism.run_round(patients("classification", counts), mechanism.initial(), UnsafeSeededEntropy(0))


def test_a_round_on_a_small_machine_is_the_one_of_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("classification")
    mechanism = Federated(task, network_of(task, {}.__getitem__).parameters, 1.0)
    made = []
    for most in (1 << 20, 4):
        with monkeypatch.context() as patch:
            _fits(patch, most)
            cohort = patients("classification", (1, 3, 2))
            made.append(mechanism.run_round(cohort, mechanism.initial(), UnsafeSeededEntropy(0)).vector)
    np.testing.assert_allclose(made[0], made[1], atol=1e-5)
