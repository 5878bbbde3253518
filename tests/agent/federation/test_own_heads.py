"""A head of the site's own: it counts in the clip, gets its noise, goes on at the site, and never leaves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.domain import Example, TaskCohort, TaskPatient, Update
from agent.dp import dpsgd
from agent.federation import own_heads
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked
from agent.mechanisms.federated.task_model import TaskModel
from agent.mechanisms.federated.task_training import engine_of, network_of, row_losses, unit_of
from policies.tasks.bounds import TaskError
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Task
from protos.artifacts.arrays import unpack_vector
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.federated_sites import PLAN, FederatedSite, federated_site, granted, part
from tests.support.small_tasks import classification, masked_config

CNN = NetworkSpec("small-cnn", {"width": 8, "convolutions": 2, "pooled": 1})
HEAD = 3 * (8 * 2 + 1)  # of three classes on twice the width


def task_of(**more: Any) -> Task:
    constants = {"sampling_rate": 1.0, "steps_per_round": 1, "public_patients": 60, "learning_rate": 0.5, **more}
    return classification(size=(16, 16), network=CNN, **{"head": "own", **constants})


def job_of(task: Task, **more: Any) -> Federated:
    return Federated(task, network_of(task, {}.__getitem__).parameters, 1.8, **more)


def one_patient(seed: int, label: int, weight: float = 1.0) -> TaskPatient:
    pixels = weight * np.random.default_rng(seed).random((1, 16, 16), np.float32)
    return TaskPatient(f"p{seed:03}", (Example(pixels, np.array([label])),))


def many(n: int) -> TaskCohort:
    return TaskCohort(tuple(one_patient(i, i % 3) for i in range(n)))


def flat(job: Federated, update: Update) -> np.ndarray:
    assert update.head is not None
    return np.concatenate([update.vector, update.head]).astype(np.float64)


# -- what is claimed


def test_the_head_is_trained_and_does_not_travel() -> None:
    task = task_of()
    whole = replace(task, training=replace(task.training, head="shared"))
    own, shared = (network_of(one, {}.__getitem__) for one in (task, whole))
    head = own.own_head()
    assert head is not None
    assert shared.own_head() is None
    assert own.parameters == shared.parameters - len(head)
    assert len(head) == sum(p.numel() for p in own.module.head.parameters())


def test_shared_part_and_head_are_clipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one patient without noise: the step is as long as the clip allows, over both together."""
    monkeypatch.setattr(dpsgd, "noisy_sum", lambda total, *_: total)
    job = job_of(task_of(clip=0.01))
    made = job.run_round(TaskCohort((one_patient(1, 2),)), job.initial(), UnsafeSeededEntropy(0))
    length = job.learning_rate * 0.01 / 60
    assert np.linalg.norm(flat(job, made)) == pytest.approx(length, rel=1e-4)
    assert np.linalg.norm(made.vector) < 0.999 * length
    assert made.head is not None
    assert np.linalg.norm(made.head) < 0.999 * length


def test_every_number_of_the_head_has_its_noise() -> None:
    """Of nobody, the head moves as far as the shared part: by noise alone."""
    job = job_of(task_of())
    heads, vectors = [], []
    for seed in range(40):
        made = job.run_round(TaskCohort(()), job.initial(), UnsafeSeededEntropy(seed))
        assert made.head is not None
        heads.append(made.head)
        vectors.append(made.vector)
    spread, shared = np.std(heads), np.std(vectors)
    assert spread == pytest.approx(shared, rel=0.1)
    assert (np.std(heads, axis=0) > 0.5 * spread).all()


def test_without_noise_a_head_would_carry_a_patient_past_the_clip_of_the_next_step() -> None:
    """Two cohorts that differ in one patient, and the shared part's next clipped sum.

    With the same noisy head the sums differ by at most the clip: that is what the noise is for. With heads that
    trained on each cohort without noise, every other patient's gradient has moved, too, and the sums are several
    clips apart: no noise in proportion to the clip could hide that patient.
    """
    task, clip = task_of(clip=0.05), 0.05
    loss, network = row_losses(task), network_of(task, {}.__getitem__)
    odd = TaskPatient("z", tuple(one_patient(99, 2, weight=4.0).examples))
    without, cohort = many(60), TaskCohort((*many(60).patients, odd))
    start = np.zeros(network.parameters, np.float32)

    def plain_head(patients: TaskCohort) -> np.ndarray:
        """Some steps of the head alone, with the sum of the gradients: no clip, no noise."""
        network.load(start)
        units = [unit_of(task, network, patient) for patient in patients.patients]
        head = list(network.module.head.parameters())
        for _ in range(20):
            losses = sum(loss(network.trained, unit.rows).mean() for unit in units if unit is not None)
            gradients = torch.autograd.grad(losses, head)
            with torch.no_grad():
                for parameter, gradient in zip(head, gradients, strict=True):
                    parameter.sub_(0.3 * gradient)
        found = network.own_head()
        assert found is not None
        return found

    def clipped_sum(patients: TaskCohort, head: np.ndarray) -> torch.Tensor:
        network.load(start, head)
        units = [unit for p in patients.patients if (unit := unit_of(task, network, p)) is not None]
        return engine_of(network, 60.0)(network.trained, loss, units, clip)

    head, other = plain_head(cohort), plain_head(without)
    same = torch.linalg.vector_norm(clipped_sum(cohort, head) - clipped_sum(without, head)).item()
    leaks = torch.linalg.vector_norm(clipped_sum(cohort, head) - clipped_sum(without, other)).item()
    assert same <= clip * (1 + 1e-5)
    assert leaks > 2 * clip


def test_what_would_not_be_private_or_would_share_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="head: must be one of shared, own"):
        task_of(head="local")
    with pytest.raises(TaskError, match=r"training\.head: a head of a site's own needs more that is trained"):
        classification(head="own")
    with pytest.raises(TaskError, match=r"training\.head"):
        replace(task_of(), network=replace(CNN, trained="head"))
    with pytest.raises(FederatedConfigError, match=r"training\.head: shared, since one hospital alone"):
        TaskModel(job_of(task_of()))
    task = task_of(momentum=0.0)
    with pytest.raises(FederatedConfigError, match=r"training\.head: shared in a masked run"):
        FederatedMasked(**{**masked_config(task, 100), "task": task})


# -- at a site


@pytest.fixture
def looked(tmp_path: Path) -> tuple[FederatedSite, Federated]:
    job = job_of(task_of(rounds=3), evaluate=PLAN)
    w = federated_site(tmp_path)
    granted(w, job)
    return w, job


def newest(w: FederatedSite) -> np.ndarray:
    head = own_heads.head_of(w.vault, "run-1", "newest")
    assert head is not None
    return head


def given_to(w: FederatedSite) -> list[Update]:
    """What each round and look begins at, from now on."""
    seen: list[Update] = []

    def watched(call: Callable[..., Update], cohort: TaskCohort, model: Update, *rest: Any) -> Update:
        seen.append(model)
        return call(cohort, model, *rest)

    part(w).site = replace(part(w).site, run=watched)
    return seen


def test_the_shared_part_leaves_alone_and_the_head_goes_on_here(looked: tuple[FederatedSite, Federated]) -> None:
    w, job = looked
    seen = given_to(w)
    signed = part(w).train("run-1", 1, job.initial())
    update = Update(unpack_vector(signed.artifact))
    first = newest(w)
    assert len(update.vector) == job.parameters
    assert first.astype("<f4").tobytes() not in signed.artifact + signed.envelope
    part(w).train("run-1", 2, update)
    assert seen[0].head is None
    assert seen[1].head is not None
    np.testing.assert_array_equal(seen[1].head, first)
    assert not np.array_equal(newest(w), first)


def test_a_look_is_made_with_the_sites_own_head_which_stays_under_its_number(
    looked: tuple[FederatedSite, Federated],
) -> None:
    w, job = looked
    seen = given_to(w)
    update = Update(unpack_vector(part(w).train("run-1", 1, job.initial()).artifact))
    first = newest(w)
    part(w).look("run-1", 2, update)
    assert seen[1].head is not None
    np.testing.assert_array_equal(seen[1].head, first)
    part(w).train("run-1", 3, update)
    kept = own_heads.head_of(w.vault, "run-1", "look-1")
    assert kept is not None
    np.testing.assert_array_equal(kept, first)
    assert not np.array_equal(newest(w), first)


def test_the_head_survives_a_kill_and_the_run(looked: tuple[FederatedSite, Federated]) -> None:
    w, job = looked
    update = Update(unpack_vector(part(w).train("run-1", 1, job.initial()).artifact))
    first = newest(w)
    assert w.crash()
    np.testing.assert_array_equal(newest(w), first)
    seen = given_to(w)
    part(w).train("run-1", 2, update)
    assert seen[0].head is not None
    np.testing.assert_array_equal(seen[0].head, first)
    second = newest(w)
    part(w).leave_run("over")
    np.testing.assert_array_equal(newest(w), second)


def test_a_kept_head_of_another_length_is_refused_before_it_trains(looked: tuple[FederatedSite, Federated]) -> None:
    w, job = looked
    own_heads.keep(w.vault, "run-1", np.zeros(HEAD + 1, np.float32))
    with pytest.raises(ValueError, match="finite numbers"):
        part(w).train("run-1", 1, job.initial())
