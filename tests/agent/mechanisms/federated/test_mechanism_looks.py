"""A look by the real classifier: it says what is predicted, one patient moves it by 1, and nobody is no reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.domain import Cohort, Image, Patient, TaskCohort, Update
from agent.dp.evaluation_sums import look_sums
from agent.mechanisms.federated.task_training import labelled_examples, scored_examples
from coordinator.federation.evaluation import LookSums, estimates
from policies.tasks.evaluation import EvaluationPlan
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.small_mechanisms import COHORT, FEDERATED

LOOKED = replace(FEDERATED, evaluate=EvaluationPlan(looks=1, noise=5.0, held_out=20, bins=10))
MODEL = replace(LOOKED.initial(), vector=np.random.default_rng(0).normal(size=650).astype(np.float32))
EXAMPLES = labelled_examples(LOOKED.task, COHORT)
ONES = np.ones((32, 32), np.float32)


def exact(cohort: TaskCohort, model: Update = MODEL) -> np.ndarray:
    network = LOOKED.network(model.vector)
    return look_sums(LOOKED.layout(), [scored_examples(LOOKED.task, network, p) for p in cohort.patients])


def test_the_accuracy_of_a_look_is_that_of_what_the_model_predicts_patient_by_patient() -> None:
    right, said = [], iter(LOOKED.predict(MODEL.vector, EXAMPLES).argmax(axis=1))
    for patient in EXAMPLES.patients:
        right.append(np.mean([next(said) == int(example.target[0]) for example in patient.examples]))
    told = {one.name: one for one in estimates(LookSums(LOOKED.layout(), exact(EXAMPLES), 1e-6))}
    assert told["accuracy"].value == pytest.approx(float(np.mean(right)), abs=1e-6)
    assert told["patients"].value == pytest.approx(len(EXAMPLES.patients), rel=1e-4)


def test_what_leaves_is_the_sums_and_the_noise_that_was_priced() -> None:
    left = np.stack([LOOKED.run_look(EXAMPLES, MODEL, UnsafeSeededEntropy(n)).vector for n in range(60)])
    noise = left - exact(EXAMPLES)
    assert float(noise.std()) == pytest.approx(5.0, rel=0.05)
    assert float(np.abs(noise.mean(axis=0)).max()) < 5 * 5.0 / np.sqrt(60)


def test_every_patient_moves_the_sums_by_at_most_one_whatever_the_model() -> None:
    huge = replace(MODEL, vector=MODEL.vector * np.float32(1e30))
    for model in (MODEL, huge):
        parts = [exact(TaskCohort((p,)), model) for p in EXAMPLES.patients]
        assert max(float(np.linalg.norm(part)) for part in parts) <= 1.0 + 1e-9


@pytest.mark.parametrize(
    "cohort", [TaskCohort(()), labelled_examples(LOOKED.task, Cohort((Patient("q", (Image(ONES, "x"),)),)))]
)
def test_nobody_and_nobody_of_a_known_class_are_noise_and_no_refusal(cohort: TaskCohort) -> None:
    vector = LOOKED.run_look(cohort, MODEL, UnsafeSeededEntropy(3)).vector
    assert float(vector.std()) == pytest.approx(5.0, rel=0.3)


def test_a_model_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="fit"):
        LOOKED.run_look(EXAMPLES, replace(MODEL, vector=MODEL.vector[:-1]), UnsafeSeededEntropy(1))
