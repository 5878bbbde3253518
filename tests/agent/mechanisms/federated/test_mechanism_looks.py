"""A look by the real classifier: it says what is predicted, one patient moves it by 1, and nobody is no reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.domain import Cohort, Image, Patient, Update
from agent.dp.evaluation_sums import ScoredExample, look_sums
from agent.mechanisms.federated.task_training import labelled_examples, scored
from coordinator.federation.evaluation import LookSums, estimates
from policies.tasks.evaluation import EvaluationPlan
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.small_mechanisms import COHORT, FEDERATED

LOOKED = replace(FEDERATED, evaluate=EvaluationPlan(looks=1, noise=5.0, held_out=20, bins=10))
MODEL = replace(LOOKED.initial(), vector=np.random.default_rng(0).normal(size=650).astype(np.float32))


def exact(cohort: Cohort) -> np.ndarray:
    return look_sums(LOOKED.layout(), said(MODEL, cohort))


def said(model: Update, cohort: Cohort) -> list[list[ScoredExample]]:
    """What the model says of each patient's images."""
    return list(scored(LOOKED.task, LOOKED.network(model.vector), labelled_examples(LOOKED.task, cohort)))


def look(cohort: Cohort, seed: int, model: Update = MODEL) -> np.ndarray:
    return LOOKED.run_look(labelled_examples(LOOKED.task, cohort), model, UnsafeSeededEntropy(seed)).vector


def test_the_accuracy_of_a_look_is_that_of_what_the_model_predicts_patient_by_patient() -> None:
    right = []
    for patient in COHORT.patients:
        examples = labelled_examples(LOOKED.task, Cohort((patient,)))
        best = LOOKED.predict(MODEL.vector, examples).argmax(axis=1)
        right.append(np.mean([b == e.target[0] for b, e in zip(best, examples.patients[0].examples, strict=True)]))
    told = {one.name: one for one in estimates(LookSums(LOOKED.layout(), exact(COHORT), 1e-6))}
    assert told["accuracy"].value == pytest.approx(float(np.mean(right)), abs=1e-6)
    assert told["patients"].value == pytest.approx(len(COHORT.patients), rel=1e-4)


def test_what_leaves_is_the_sums_and_the_noise_that_was_priced() -> None:
    left = np.stack([look(COHORT, n) for n in range(60)])
    noise = left - exact(COHORT)
    assert float(noise.std()) == pytest.approx(5.0, rel=0.05)
    assert float(np.abs(noise.mean(axis=0)).max()) < 5 * 5.0 / np.sqrt(60)


def test_every_patient_moves_the_sums_by_at_most_one_whatever_the_model() -> None:
    huge = replace(MODEL, vector=MODEL.vector * np.float32(1e30))
    for model in (MODEL, huge):
        parts = [look_sums(LOOKED.layout(), [one]) for one in said(model, COHORT)]
        assert max(float(np.linalg.norm(part)) for part in parts) <= 1.0 + 1e-9


@pytest.mark.parametrize(
    "cohort", [Cohort(()), Cohort((Patient("q", (Image(np.ones((32, 32), np.float32), "x"),)),))]
)
def test_nobody_and_nobody_of_a_known_class_are_noise_and_no_refusal(cohort: Cohort) -> None:
    assert float(look(cohort, 3).std()) == pytest.approx(5.0, rel=0.3)


def test_a_model_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="fit"):
        look(COHORT, 1, replace(MODEL, vector=MODEL.vector[:-1]))
