"""The semantic histogram: what a patient can move, the noise that is there, what is refused, and what is selected."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import chi2, norm

from agent.domain import Image, Patient
from agent.dp.noise import SystemEntropy
from agent.mechanisms.privimage import semantic_query
from agent.mechanisms.privimage.semantic_query import (
    LEAST,
    MISTAKEN,
    DrownedHistogramError,
    NothingSelectedError,
    SemanticQuery,
    SharedImageError,
    chosen,
    histogram,
    most_noise,
    proportions,
    refuse_empty,
    refuse_faint,
    refuse_shared,
    selection,
)
from agent.models.semantics.classifier import Semantics
from policies.accounting import accountant
from policies.accounting.claims import GaussianQuery, UnsupportedClaimError
from tests.support.entropy import UnsafeSeededEntropy

CLASSES = ("a", "b", "c")
NS = 6
SHAPE = (2, 2)


class Ranked:
    """A query function whose ranking of the bins is written in the picture's first pixel."""

    def __init__(self, bins: int = NS) -> None:
        self.bins = tuple(f"bin {i}" for i in range(bins))
        self.asked: list[int] = []

    def probabilities(self, images: NDArray[np.float32]) -> NDArray[np.float64]:
        self.asked.append(len(images))
        first = np.rint(images[:, 0, 0] * 64).astype(int)
        return np.array([np.roll(np.arange(len(self.bins), 0, -1.0), f) for f in first]) / 100


class Relative(Ranked):
    """One whose answer depends on all the pictures that it is shown together, as with batch statistics."""

    def probabilities(self, images: NDArray[np.float32]) -> NDArray[np.float64]:
        moved = images.copy()
        moved[:, 0, 0] = (np.rint(images[:, 0, 0] * 64).sum() % len(self.bins)) / 64
        return super().probabilities(moved)


def semantics(bins: int = NS) -> Semantics:
    return cast(Semantics, Ranked(bins))


class Same:
    """Every draw is the same, so that a patient's choice does not depend on who came before."""

    def take(self, count: int) -> bytes:
        return np.random.default_rng(count).bytes(count)


def picture(label: str, first: int) -> Image:
    pixels = np.zeros(SHAPE, np.float32)
    pixels[0, 0] = first / 64
    return Image(pixels, label)


def patient(number: int, *shown: tuple[str, int]) -> Patient:
    return Patient(f"p{number:05d}", tuple(picture(*one) for one in shown))


COHORT = (
    patient(0, ("a", 0)),
    patient(1, ("a", 0), ("a", 0), ("a", 0)),
    patient(2, ("a", 1), ("b", 1), ("c", 4)),
    patient(3, *[("b", 2)] * 1000),
    patient(4, *[(CLASSES[i % 3], i % 5) for i in range(1000)]),
    patient(5, ("none of them", 3)),
    patient(6, ("c", 5), ("none of them", 5), ("", 0)),
    patient(7, ("c", 3)),
)


def furthest(query: SemanticQuery, classes: tuple[str, ...] = CLASSES, q: Semantics | None = None) -> float:
    """The largest squared distance of the noise-free histograms of all one-patient neighbours, in votes."""
    q = q or semantics()

    def counts(patients: Sequence[Patient]) -> NDArray[np.int64]:
        return semantic_query._total(patients, q, classes, query, Same())

    whole, most = counts(COHORT), 0
    for left in range(len(COHORT)):
        moved = (whole - counts([p for i, p in enumerate(COHORT) if i != left])).ravel().tolist()
        most = max(most, sum(v * v for v in moved))  # Python's integers: exact
    return most / semantic_query._PART**2


VARIANTS = list(product((1, 3, NS), (1, 2, 16, 5000), (CLASSES, ("b",), ())))


@pytest.mark.parametrize(("votes", "images", "classes"), VARIANTS)
def test_no_patient_moves_the_histogram_by_more_than_is_claimed(
    votes: int, images: int, classes: tuple[str, ...]
) -> None:
    query = SemanticQuery(votes, 1.0, 1, images)
    assert query.claim().sensitivity == math.sqrt(votes)
    assert 0 < furthest(query, classes) <= votes


def test_the_bound_is_reached_so_it_is_not_loose() -> None:
    assert furthest(SemanticQuery(3, 1.0, 1)) == 3.0


def summed(rows: Sequence[int], bins: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (np.asarray(rows)[:, np.newaxis], bins), 1)
    return counts * semantic_query._PART


def clipped_by_image(rows: Sequence[int], bins: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    out = np.zeros(shape, np.int64)
    for row, some in zip(rows, bins, strict=True):
        one = summed([row], some[np.newaxis], shape)
        norm = math.sqrt(float((one.astype(float) ** 2).sum())) / semantic_query._PART
        out += (one * min(1.0, math.sqrt(bins.shape[1]) / norm)).astype(np.int64)
    return out


def averaged_in_each_row(rows: Sequence[int], bins: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    counts, many = summed(rows, bins, shape), np.bincount(rows, minlength=shape[0])
    return counts // np.maximum(many, 1)[:, np.newaxis]


@pytest.mark.parametrize("broken", [summed, clipped_by_image, averaged_in_each_row])
def test_a_sum_a_clip_of_each_picture_and_a_mean_in_each_class_are_seen_to_break_the_claim(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semantic_query, "_averaged", broken)
    assert furthest(SemanticQuery(1, 1.0, 1)) > 1.0


def test_nobody_is_looked_at_beside_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that mixes its batch would let one patient turn the votes of all; here each is alone."""
    assert furthest(SemanticQuery(1, 1.0, 1), (), cast(Semantics, Relative())) <= 1.0
    whole = Relative()

    def together(patients: Sequence[Patient], *_: Any) -> NDArray[np.int64]:
        pixels = np.stack([one.pixels for p in patients for one in p.images[:2]])
        rows = [0] * len(pixels)
        return summed(rows, semantic_query._voted(whole.probabilities(pixels), 1), (1, NS))

    monkeypatch.setattr(semantic_query, "_total", together)
    assert furthest(SemanticQuery(1, 1.0, 1), ()) > 1.0


def test_a_patient_shows_no_more_pictures_than_are_public_and_chance_decides_which() -> None:
    q = Ranked()
    semantic_query._total([COHORT[4]], cast(Semantics, q), CLASSES, SemanticQuery(1, 1.0, 1, 7), SystemEntropy())
    assert q.asked == [7]
    seen = [
        semantic_query._total(
            [COHORT[4]], semantics(), CLASSES, SemanticQuery(1, 1.0, 1, 1), SystemEntropy()
        ).tobytes()
        for _ in range(60)
    ]
    assert len(set(seen)) > 5


def test_a_patient_of_several_classes_splits_one_vote() -> None:
    counts = (
        semantic_query._total([COHORT[2]], semantics(), CLASSES, SemanticQuery(1, 1.0, 1), Same())
        / semantic_query._PART
    )
    expected = np.zeros((3, NS))
    expected[[0, 1, 2], [1, 1, 4]] = 1 / 3
    assert np.abs(counts - expected).max() < 2e-9
    outside = semantic_query._total([COHORT[5]], semantics(), CLASSES, SemanticQuery(1, 1.0, 1), Same())
    assert not outside.any()
    pooled = semantic_query._total([COHORT[5]], semantics(), (), SemanticQuery(1, 1.0, 1), Same())
    assert pooled.shape == (1, NS)
    assert pooled.sum() == semantic_query._PART


def test_what_is_no_number_votes_for_k_1_different_bins_all_the_same() -> None:
    broken = np.array([[np.nan, 0.2, np.nan, 0.8], [np.nan] * 4, [0.25] * 4])
    assert semantic_query._voted(broken, 3).tolist() == [[3, 1, 0], [0, 1, 2], [0, 1, 2]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, NS - 1)), min_size=1, max_size=40), st.integers(1, NS))
def test_the_mean_of_vote_vectors_is_never_longer_than_one(shown: list[tuple[int, int]], votes: int) -> None:
    one = Patient("p", tuple(picture(CLASSES[row], first) for row, first in shown))
    counts = semantic_query._total([one], semantics(), CLASSES, SemanticQuery(votes, 1.0, 1, 40), Same())
    assert sum(v * v for v in counts.ravel().tolist()) <= votes * semantic_query._PART**2
    assert counts.sum() == pytest.approx(votes * semantic_query._PART, rel=1e-6)


# -- noise


def test_every_bin_bears_the_noise_that_was_claimed_empty_ones_too() -> None:
    query, runs = SemanticQuery(2, 7.0, 1), 3000
    entropy, q = UnsafeSeededEntropy(5), semantics(3)
    drawn = np.array([histogram(COHORT[:1], q, ("a", "z"), query, entropy) for _ in range(runs)])
    truth = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    # six bins at once: the interval of each at 1 - 1e-4 / 6
    low, high = chi2.ppf([1e-4 / 12, 1 - 1e-4 / 12], runs)
    sums = ((drawn - truth) ** 2).sum(axis=0) / query.noise**2
    assert ((low < sums) & (sums < high)).all(), sums
    assert not ((low < 0.81 * sums) & (0.81 * sums < high)).any(), "nine tenths of the noise would be seen"
    assert np.abs(drawn.mean(axis=0) - truth).max() < 4.5 * query.noise / math.sqrt(runs)
    flat = (drawn - truth).reshape(runs, -1)
    assert np.abs(np.corrcoef(flat.T) - np.eye(6)).max() < 5 / math.sqrt(runs), "one noise on two bins would be seen"


def test_the_noise_lies_on_a_lattice_whatever_was_counted() -> None:
    query = SemanticQuery(3, 5.0, 1)
    steps = histogram(COHORT, semantics(), CLASSES, query, SystemEntropy()) / (math.sqrt(3) * 2.0**-24)
    assert np.abs(steps - np.rint(steps)).max() < 1e-4


def test_two_runs_with_every_seed_the_same_differ() -> None:
    def run() -> NDArray[np.float64]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return histogram(COHORT, semantics(), CLASSES, SemanticQuery(1, 2.0, 1), SystemEntropy())

    first, second = run(), run()
    assert not (first == second).any()


def test_the_price_is_that_of_the_gaussian_query_and_of_the_published_figures() -> None:
    query = SemanticQuery(3, 20.0 * math.sqrt(3), 2)
    claim = query.claim()
    assert claim == GaussianQuery(20.0 * math.sqrt(3), 1, 3)
    assert claim.noise_multiplier == pytest.approx(20.0)
    # Theorem 3.1: (alpha, alpha / (2 sigma_2^2))-RDP
    assert accountant.rdp(claim, 8) == pytest.approx(8 / (2 * 20.0**2))

    def delta(epsilon: float, sigma: float) -> float:  # Balle & Wang 2018, theorem 8
        a, b = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
        return float(norm.cdf(a) - math.exp(epsilon) * norm.cdf(b))

    for sigma, published in ((50.0, 0.059), (20.0, 0.16), (5.0, 0.73)):
        found = accountant.tight_epsilon((SemanticQuery(1, sigma, 1).claim(),), 1e-5)
        exact = brentq(lambda e, s=sigma: delta(e, s) - 1e-5, 1e-4, 5)
        assert found == pytest.approx(exact, rel=0.02)
        assert found == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(
    ("votes", "noise", "keep", "images"),
    [(0, 1.0, 1, 1), (1, 0.0, 1, 1), (1, math.nan, 1, 1), (1, math.inf, 1, 1), (1, -1.0, 1, 1), (1, 1.0, 0, 1),
     (1, 1.0, 1, 0), (1.0, 1.0, 1, 1), (True, 1.0, 1, 1), (1, 1, 1, 1)],
)  # fmt: skip
def test_a_query_without_noise_votes_or_pictures_cannot_be_built(
    votes: Any, noise: Any, keep: Any, images: Any
) -> None:
    with pytest.raises((ValueError, UnsupportedClaimError)):
        SemanticQuery(votes, noise, keep, images)


# -- the guard, before


def test_the_guard_is_the_rule_of_signal_to_noise() -> None:
    # sigma_2 <= f n_c / (sqrt(k_1) sqrt(2 ln NS)): 600 patients, 1000 bins; f a third of the share
    most = most_noise(1000, 600, share=0.48)
    assert most == pytest.approx(0.16 * 600 / math.sqrt(2 * math.log(1000)))
    with pytest.raises(DrownedHistogramError, match=r"coarser semantics, \d+ bins at most"):
        refuse_faint(
            SemanticQuery(1, 50.0, 1), 1000, 600, share=0.9
        )  # 69 % of a class is noise: notes on published code
    refuse_faint(SemanticQuery(3, 20.0 * math.sqrt(3), 1), 50, 600, share=0.5)  # 16 %


@pytest.mark.parametrize(("bins", "patients"), [(2, 100.0), (10, 60.0), (50, 600.0), (1000, 5000.0)])
def test_the_guard_says_where_the_limit_is_and_what_would_do(bins: int, patients: float) -> None:
    most = most_noise(bins, patients)
    refuse_faint(SemanticQuery(1, most, 1), bins, patients)
    with pytest.raises(DrownedHistogramError) as caught:
        refuse_faint(SemanticQuery(1, most * 1.01, 1), bins, patients)
    text = str(caught.value)
    assert "less noise" in text
    told = float(text.split("less noise, ")[1].split(" ", maxsplit=1)[0])
    refuse_faint(SemanticQuery(1, told, 1), bins, patients)
    assert told == pytest.approx(most, abs=2e-3)
    if bins > 2:
        coarse = int(text.split("coarser semantics, ")[1].split(" ", maxsplit=1)[0])
        refuse_faint(SemanticQuery(1, most * 1.01, 1), coarse, patients)
        assert coarse < bins


def test_the_guard_promises_nothing_to_a_class_too_small_for_any_noise() -> None:
    assert most_noise(10, 2 * LEAST) == 0.0
    with pytest.raises(DrownedHistogramError) as caught:
        refuse_faint(SemanticQuery(1, 0.01, 1), 10, 2 * LEAST)
    assert "less noise" not in str(caught.value)
    for bad in (0.0, math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="a class has patients"):
            refuse_faint(SemanticQuery(1, 1.0, 1), 10, bad)


@pytest.mark.parametrize(("bins", "patients"), [(10, 300.0), (50, 600.0)])
def test_what_the_guard_lets_through_selects_as_often_as_promised(bins: int, patients: float) -> None:
    rng, runs = np.random.default_rng(1), 20_000
    largest = 0.5 * patients
    counts = np.full(bins, largest / 3)
    counts[bins // 2] = largest

    def wrong(noise: float) -> float:
        noisy = counts + noise * rng.standard_normal((runs, bins))
        return float((noisy.argmax(axis=1) != bins // 2).mean())

    most = most_noise(bins, patients)
    promised = 1 / (2 * bins)
    assert wrong(most) <= promised + 4 * math.sqrt(promised / runs)
    assert wrong(3 * most) > 3 * promised, "beyond the limit, nothing could be promised"


def test_bins_that_are_too_few_are_refused_before_anything_is_drawn() -> None:
    for query, classes in (
        (SemanticQuery(NS + 1, 1.0, 1), 1),
        (SemanticQuery(1, 1.0, 3), 3),
        (SemanticQuery(1, 1.0, NS + 1), 1),
    ):
        with pytest.raises(ValueError, match="semantics are too few"):
            refuse_faint(query, NS, 1e6, classes)
        with pytest.raises(ValueError, match="semantics are too few"):
            histogram(COHORT, semantics(), CLASSES[:classes], query, SystemEntropy())
    with pytest.raises(ValueError, match="named twice"):
        histogram(COHORT, semantics(), ("a", "a"), SemanticQuery(1, 1.0, 1), SystemEntropy())


# -- the guard, after


def test_a_class_with_one_patient_ends_at_the_noisy_counts_and_is_named() -> None:
    many = [patient(i, ("a", 0)) for i in range(400)]
    cohort = [*many, patient(900, ("3", 1))]
    query = SemanticQuery(1, 8.0, 1)
    refuse_faint(query, NS, 400)
    ended = 0
    for seed in range(25):
        noisy = histogram(cohort, semantics(), ("a", "3"), query, UnsafeSeededEntropy(seed))
        try:
            refuse_empty(noisy, ("a", "3"), query)
        except DrownedHistogramError as fault:
            ended += "in class '3': leave it out" in str(fault)
    assert ended == 25
    refuse_empty(histogram(many, semantics(), (), query, UnsafeSeededEntropy(0)), (), query)
    with pytest.raises(DrownedHistogramError, match="class all"):
        refuse_empty(np.full((1, NS), np.nan), (), query)


def test_an_empty_class_passes_as_rarely_and_one_at_the_limit_as_often_as_stated() -> None:
    bins, runs = 20, 400_000
    query = SemanticQuery(1, 3.0, 1)
    rng = np.random.default_rng(2)
    line = LEAST + query.noise * semantic_query._above(bins)
    worst = LEAST + query.noise * rng.standard_normal((runs, bins))  # every bin as full as an unfit class can have it
    passed = int((worst.max(axis=1) > line).sum())
    assert passed <= MISTAKEN * runs + 4 * math.sqrt(MISTAKEN * runs)
    patients = next(n for n in range(1, 10_000) if most_noise(bins, n) >= query.noise)
    largest = 0.5 * patients + query.noise * rng.standard_normal(runs)
    assert (largest > line).mean() > 0.998


# -- what is chosen


def test_the_example_of_figure_2() -> None:
    zebra, bee = 0, 1
    horses = [patient(i, ("", 0)) for i in range(3)]
    counts = semantic_query._total(horses, semantics(2), (), SemanticQuery(1, 1.0, 1), Same()) / semantic_query._PART
    assert counts.tolist() == [[3.0, 0.0]]
    kept = chosen(np.array([[2.7, 1.5]]), SemanticQuery(1, 1.0, 1))
    assert kept == ((zebra,),)
    places, _ = selection(np.array([bee, zebra, bee, zebra]), kept)
    assert places.tolist() == [1, 3]


def test_the_cases_of_appendix_a() -> None:
    horses = [patient(i, ("", 0)) for i in range(3)]
    # (1) k_1 < k_2: both semantics are chosen, and with them the whole public set
    assert selection(np.array([0, 1, 1]), chosen(np.array([[3.0, 0.0]]), SemanticQuery(1, 1.0, 2)))[0].tolist() == [
        0,
        1,
        2,
    ]
    # (2) k_1 > k_2: the counts are {3, 3}, and it is chance which one is chosen
    query = SemanticQuery(2, 1.0, 1)
    counts = semantic_query._total(horses, semantics(2), (), query, Same()) / semantic_query._PART
    assert counts.tolist() == [[3.0, 3.0]]
    entropy, q = UnsafeSeededEntropy(3), semantics(2)
    zebras = sum(chosen(histogram(horses, q, (), query, entropy), query) == ((0,),) for _ in range(400))
    assert 150 < zebras < 250
    # k_1 = k_2
    query = SemanticQuery(1, 0.5, 1)
    right = sum(chosen(histogram(horses, q, (), query, entropy), query) == ((0,),) for _ in range(400))
    assert right > 390


def test_bins_are_taken_by_the_largest_count_of_all_and_by_one_class_only() -> None:
    noisy = np.array([[9.0, 8.0, 1.0, 0.0], [10.0, 7.0, 2.0, 3.0]])
    assert chosen(noisy, SemanticQuery(1, 1.0, 1)) == ((1,), (0,))
    assert chosen(noisy, SemanticQuery(1, 1.0, 2)) == ((1, 2), (0, 3))
    assert chosen(np.zeros((2, 4)), SemanticQuery(1, 1.0, 2)) == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="too few"):
        chosen(noisy, SemanticQuery(1, 1.0, 3))
    with pytest.raises(ValueError, match="a noisy count is a number"):
        chosen(noisy * np.nan, SemanticQuery(1, 1.0, 1))


def slowly(noisy: NDArray[np.float64], keep: int) -> tuple[tuple[int, ...], ...]:
    """The same greedy choice, one at a time: a second implementation."""
    left, kept = noisy.copy(), [list[int]() for _ in noisy]
    while any(len(row) < keep for row in kept):
        most = left.max()
        bin_, row = min((b, r) for r, b in np.argwhere(left == most).tolist())
        kept[row].append(bin_)
        left[:, bin_] = -np.inf
        if len(kept[row]) == keep:
            left[row] = -np.inf
    return tuple(tuple(row) for row in kept)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_choice_is_disjoint_full_and_that_of_a_second_implementation(data: st.DataObject) -> None:
    classes, keep = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    bins = data.draw(st.integers(max(2, classes * keep), 14))
    # few values, so that there are ties
    values = data.draw(st.lists(st.integers(-3, 3), min_size=classes * bins, max_size=classes * bins))
    noisy = np.array(values, np.float64).reshape(classes, bins)
    kept = chosen(noisy, SemanticQuery(1, 1.0, keep))
    assert kept == slowly(noisy, keep)
    flat = [b for row in kept for b in row]
    assert len(flat) == len(set(flat)) == classes * keep


def test_a_selected_picture_bears_the_class_that_chose_its_semantic() -> None:
    places, labels = selection(np.array([4, 0, 2, 5, 0]), ((0, 5), (2,)))
    assert places.tolist() == [1, 2, 3, 4]
    assert labels.tolist() == [0, 1, 0, 0]
    assert (places.dtype, labels.dtype) == (np.int64, np.int64)
    with pytest.raises(NothingSelectedError, match="every bin needs public images"):
        selection(np.array([4, 4]), ((0, 5), (2,)))


# -- shares


def test_shares_are_never_negative_sum_to_one_and_have_a_floor() -> None:
    noisy = np.array([[30.0, 10.0], [-9.0, -1.0], [60.0, 0.0]])
    assert proportions(noisy, SemanticQuery(1, 1.0, 1)).tolist() == [0.4, 0.0, 0.6]
    held = proportions(noisy, SemanticQuery(1, 1.0, 1), floor=0.1)
    assert held.min() == pytest.approx(0.1)
    assert held.sum() == pytest.approx(1.0)
    assert proportions(-noisy * 0 - 1, SemanticQuery(1, 1.0, 1)).tolist() == [1 / 3] * 3
    with pytest.raises(ValueError, match="least share"):
        proportions(noisy, SemanticQuery(1, 1.0, 1), floor=0.4)


def test_with_four_classes_or_more_the_shares_come_closer_to_the_truth_than_the_totals_are() -> None:
    rng, query, runs = np.random.default_rng(4), SemanticQuery(1, 10.0, 1), 400
    truth = np.zeros((8, 20))
    truth[:, 0] = np.linspace(60, 160, 8)
    expected = truth.sum(axis=1) / truth.sum()
    plain, drawn = 0.0, 0.0
    for _ in range(runs):
        noisy = truth + query.noise * rng.standard_normal(truth.shape)
        totals = np.clip(noisy.sum(axis=1), 0, None)
        plain += float(((totals / totals.sum() - expected) ** 2).sum())
        drawn += float(((proportions(noisy, query) - expected) ** 2).sum())
    assert drawn < 0.8 * plain
    exact = proportions(truth, SemanticQuery(1, 0.01, 1))
    assert np.abs(exact - expected).max() < 1e-6


# -- pictures on both sides


def test_a_public_picture_that_is_a_patients_is_found_whatever_its_form() -> None:
    draw = np.random.default_rng(5)
    public = draw.integers(0, 256, (7, 4, 4, 3), dtype=np.uint8)
    public[2] = public[2, ..., :1]  # grey, in three channels
    mine = [Patient("p", (Image(public[2, ..., 0].astype(np.float32) / np.float32(255), "a"),))]
    with pytest.raises(SharedImageError, match=r"^1 of 7 public images are images of the cohort: remove them"):
        refuse_shared(public, mine)
    colour = [Patient("p", (Image(public[3].astype(np.float32) / np.float32(255), "a"),))]
    with pytest.raises(SharedImageError, match=r"^2 of 8 "):
        refuse_shared(np.concatenate([public, public[3:4]]), colour)


def test_what_only_looks_alike_is_not_found_and_nothing_is_said_of_patients() -> None:
    draw = np.random.default_rng(6)
    public = draw.integers(1, 255, (3, 4, 4), dtype=np.uint8)
    for other in (public[0].T, public[0] + 1, public[0, ::-1], public[0, :2]):
        refuse_shared(public, [Patient("p", (Image(other.astype(np.float32) / np.float32(255), "a"),))])
