"""One patient moves all sums of a look together by at most 1, whatever their images and whatever the model says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.dp import evaluation_sums
from agent.dp.evaluation_sums import ScoredExample, look_sums, patient_part, private_look
from agent.dp.noise import TAIL, SystemEntropy
from policies.tasks.evaluation import KINDS, LONGEST_TAIL, SumLayout, bin_of
from tests.support.entropy import UnsafeSeededEntropy

SIZE = (3, 4)  # of masks
# What a network may say: shares, and whatever a broken or a crafted one makes of them.
SCORES = st.one_of(st.floats(0.0, 1.0), st.floats(allow_nan=True, allow_infinity=True))
Patients = list[list[ScoredExample]]


@st.composite
def examples(draw: st.DrawFn, layout: SumLayout) -> ScoredExample:
    n = layout.outputs
    if layout.kind == "segmentation":
        masks = [draw(st.lists(st.integers(0, n - 1), min_size=12, max_size=12)) for _ in range(2)]
        return ScoredExample(*(np.array(mask).reshape(SIZE) for mask in masks))
    scores = np.array(draw(st.lists(SCORES, min_size=n, max_size=n)))
    if layout.kind == "classification":
        return ScoredExample(scores, np.array([draw(st.integers(0, n - 1))]))
    known = (
        st.sampled_from([0.0, 1.0, math.nan])
        if layout.kind == "multi-label"
        else st.one_of(SCORES, st.just(math.nan))
    )
    return ScoredExample(scores, np.array(draw(st.lists(known, min_size=n, max_size=n))))


@st.composite
def cohorts(draw: st.DrawFn, most: int = 4) -> tuple[SumLayout, Patients]:
    layout = SumLayout(draw(st.sampled_from(KINDS)), draw(st.integers(2, 4)), draw(st.sampled_from([2, 6, 10])))
    one = st.lists(examples(layout), min_size=1, max_size=5)
    return layout, draw(st.lists(one, min_size=1, max_size=most))


def moved(sums: NDArray[np.float64], without: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(sums - without))


@settings(max_examples=400, deadline=None)
@given(cohorts())
def test_one_patient_more_moves_all_sums_together_by_at_most_one(cohort: tuple[SumLayout, Patients]) -> None:
    layout, patients = cohort
    sums = look_sums(layout, patients)
    assert sums.shape == (layout.size,)
    assert bool(np.isfinite(sums).all())
    for left_out in range(len(patients)):
        others = [one for number, one in enumerate(patients) if number != left_out]
        assert moved(sums, look_sums(layout, others)) <= 1.0 + 1e-9


@settings(max_examples=200, deadline=None)
@given(cohorts())
def test_in_every_block_a_patient_is_a_point_of_the_simplex(cohort: tuple[SumLayout, Patients]) -> None:
    layout, patients = cohort
    for patient in patients:
        part = patient_part(layout, patient)
        for block in layout.blocks:
            point = part[block.start : block.start + block.size] / block.weight
            assert bool((point >= 0.0).all())
            assert point.sum() <= 1.0 + 1e-9


@settings(max_examples=100, deadline=None)
@given(cohorts(most=1), st.integers(2, 5))
def test_images_that_a_patient_has_twice_or_more_often_change_nothing(
    cohort: tuple[SumLayout, Patients], times: int
) -> None:
    layout, (patient,) = cohort
    np.testing.assert_allclose(patient_part(layout, patient * times), patient_part(layout, patient), atol=1e-12)


FULL = {
    "classification": ScoredExample(np.array([0.1, 0.8, 0.1]), np.array([1])),
    "multi-label": ScoredExample(np.array([0.1, 0.8, 0.9]), np.array([0.0, 1.0, 0.0])),
    "regression": ScoredExample(np.array([0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.0])),
    "segmentation": ScoredExample(np.array([[1, 2], [1, 2]]), np.array([[1, 2], [1, 2]])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_reached_so_that_the_sensitivity_is_one_and_not_less(kind: str) -> None:
    assert moved(look_sums(SumLayout(kind, 3, 10), [[FULL[kind]]]), np.zeros(SumLayout(kind, 3, 10).size)) == (
        pytest.approx(1.0, abs=1e-12)
    )


def largest(layout: SumLayout, patients: Sequence[Sequence[ScoredExample]]) -> float:
    """How far one of these patients moves the sums at most."""
    return max(
        moved(look_sums(layout, patients), look_sums(layout, [p for p in patients if p is not one]))
        for one in patients
    )


# --- red controls: what the property must see


def test_red_a_patient_who_is_counted_once_for_each_image_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, patient = SumLayout("classification", 3, 10), [FULL["classification"]] * 3
    assert largest(layout, [patient]) <= 1.0 + 1e-9
    monkeypatch.setattr(np, "mean", lambda points, axis: np.sum(points, axis=axis))
    assert largest(layout, [patient]) == pytest.approx(3.0)


def test_red_a_patient_who_is_named_twice_is_seen() -> None:
    layout, patient = SumLayout("classification", 3, 10), [FULL["classification"]]
    assert largest(layout, [patient, patient]) == pytest.approx(2.0)


def test_red_voxels_in_the_place_of_a_share_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, patient = SumLayout("segmentation", 3, 10), [FULL["segmentation"]]
    assert largest(layout, [patient]) <= 1.0 + 1e-9
    monkeypatch.setattr(evaluation_sums, "_share", lambda value: np.array([value * 500.0, 0.0]))
    assert largest(layout, [patient]) > 100.0


def test_red_an_error_that_is_not_cut_to_its_public_range_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, patient = SumLayout("regression", 2, 10), [ScoredExample(np.array([90.0, 0.5]), np.array([0.1, 0.2]))]
    assert largest(layout, [patient]) <= 1.0 + 1e-9
    monkeypatch.setattr("builtins.min", lambda a, _: a)
    assert largest(layout, [patient]) > 10.0


# --- what is counted


def test_classes_are_counted_by_true_and_predicted_class_and_by_the_score_of_the_predicted_one() -> None:
    layout = SumLayout("classification", 3, 10)
    right, wrong = FULL["classification"], ScoredExample(np.array([0.97, 0.02, 0.01]), np.array([2]))
    sums = look_sums(layout, [[right], [wrong], [right, wrong]]) * math.sqrt(2)
    table = sums[:9].reshape(3, 3)
    assert (table[1, 1], table[2, 0], table.sum()) == (pytest.approx(1.5), pytest.approx(1.5), pytest.approx(3.0))
    bins = sums[9:].reshape(2, 10)
    assert (bins[1, bin_of(0.8, 10)], bins[0, bin_of(0.97, 10)]) == (pytest.approx(1.5), pytest.approx(1.5))


def test_two_classes_are_a_histogram_of_one_score() -> None:
    layout = SumLayout("classification", 2, 4)
    ill, well = ScoredExample(np.array([0.2, 0.8]), np.array([1])), ScoredExample(np.array([0.9, 0.1]), np.array([0]))
    sums = look_sums(layout, [[ill], [ill], [well]]).reshape(2, 4)
    assert sums[1].tolist() == [0.0, 0.0, 2.0, 0.0]
    assert sums[0].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_finding_that_is_not_known_votes_nowhere_and_takes_nothing_from_the_others() -> None:
    layout = SumLayout("multi-label", 2, 4)
    half = ScoredExample(np.array([0.9, 0.9]), np.array([math.nan, 1.0]))
    sums = look_sums(layout, [[half], [half, ScoredExample(np.array([0.1, 0.1]), np.array([0.0, math.nan]))]])
    counts = (sums * math.sqrt(2)).reshape(2, 8)
    assert counts.sum(axis=1).tolist() == pytest.approx([1.0, 2.0])
    assert counts[1, 4 + bin_of(0.9, 4)] == pytest.approx(2.0)


def test_a_structure_that_is_nowhere_is_not_counted_and_one_that_is_missed_counts_as_zero() -> None:
    layout = SumLayout("segmentation", 4, 2)
    true = np.array([[1, 1, 2, 0]])
    said = np.array([[1, 0, 0, 0]])
    sums = (look_sums(layout, [[ScoredExample(said, true)]]) * math.sqrt(3)).reshape(3, 2)
    assert sums.tolist() == [pytest.approx([2 / 3, 1 / 3]), pytest.approx([0.0, 1.0]), pytest.approx([0.0, 0.0])]


def test_an_error_is_a_share_of_the_public_range() -> None:
    layout = SumLayout("regression", 2, 2)
    sums = look_sums(layout, [[ScoredExample(np.array([0.7, 7.0]), np.array([0.4, 0.0]))]]) * math.sqrt(2)
    assert sums.tolist() == pytest.approx([0.3, 0.7, 1.0, 0.0])


def test_a_label_outside_the_classes_is_not_counted() -> None:
    layout = SumLayout("classification", 3, 4)
    assert not look_sums(layout, [[ScoredExample(np.array([0.1, 0.8, 0.1]), np.array([7]))]]).any()


# --- what leaves


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_patient_there_is_as_much_noise_and_as_many_numbers(kind: str) -> None:
    layout = SumLayout(kind, 3, 10)
    nobody = private_look(layout, [], 30.0, UnsafeSeededEntropy(1))
    somebody = private_look(layout, [[FULL[kind]]], 30.0, UnsafeSeededEntropy(1))
    assert nobody.shape == somebody.shape == (layout.size,)
    assert nobody.dtype == np.float32
    assert bool(nobody.any())


def test_the_noise_is_the_noise_that_is_claimed() -> None:
    layout = SumLayout("classification", 60, 10)
    drawn = np.concatenate([private_look(layout, [], 25.0, SystemEntropy()) for _ in range(6)])
    assert float(drawn.std()) == pytest.approx(25.0, rel=0.04)
    assert abs(float(drawn.mean())) < 5 * 25.0 / math.sqrt(len(drawn))


def test_the_longest_tail_that_secret_sums_allow_for_is_that_of_the_generator() -> None:
    assert LONGEST_TAIL == TAIL
