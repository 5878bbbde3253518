"""The law of the highest scores: against laws known exactly, by person, bounded where nothing was seen."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf, nan

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from agent.models.recognition.score_tail import FEWEST, STEEPEST, Tail, TooFewScoresError, fit_tail, tail_from

Array = NDArray[np.float64]


def symmetric(law: stats.rv_continuous, people: int, seed: int) -> Array:
    """Every pair of pictures an independent draw: the law is known, and so is every quantile of it."""
    rng = np.random.default_rng(seed)
    upper = np.triu(law.rvs(size=(people, people), random_state=rng), 1)
    return upper + upper.T


def fitted(law: stats.rv_continuous = stats.norm, people: int = 200, seed: int = 0) -> Tail:
    return fit_tail(symmetric(law, people, seed), np.arange(people), np.random.default_rng(seed))


def false_match(law: stats.rv_continuous, comparisons: int, threshold: float) -> float:
    return float(-np.expm1(comparisons * np.log1p(-law.sf(threshold))))


def test_an_exponential_tail_gives_the_exact_quantiles() -> None:
    thresholds = [fitted(stats.expon, seed=seed).threshold(2_000, 0.01) for seed in range(10)]
    exact = stats.expon.isf(-np.expm1(np.log1p(-0.01) / 2_000))  # 12.2; of 19,900 pairs the highest is near 9.9
    assert abs(np.median(thresholds) - exact) < 0.1 * exact
    assert max(thresholds) < 1.15 * exact


def test_a_gaussian_tail_gives_the_exact_quantile_within_a_tenth_and_errs_on_the_low_side() -> None:
    thresholds = [fitted(seed=seed).threshold(1_000, 0.01) for seed in range(20)]
    exact = stats.norm.isf(-np.expm1(np.log1p(-0.01) / 1_000))  # 4.26 standard deviations
    assert abs(np.median(thresholds) - exact) < 0.1 * exact
    assert np.median(thresholds) < exact


def test_the_rates_are_those_of_scipys_law() -> None:
    tail = fitted()
    law = stats.genpareto(tail.shape, loc=tail.start, scale=tail.scale)
    for score in np.linspace(tail.start, tail.start + 3 * tail.scale, 7):
        assert tail.rate(float(score)) == pytest.approx(tail.share * law.sf(score), rel=1e-9)
    exponential = replace(tail, shape=0.0)
    assert exponential.rate(tail.start + 1.0) == pytest.approx(tail.share * np.exp(-1.0 / tail.scale))
    assert exponential.rate(tail.start) == tail.share
    assert exponential.rate(tail.start - 1e-9) == 1.0  # unknown there: counted as certain


def test_the_fit_is_near_the_likeliest_law() -> None:
    scores = symmetric(stats.genpareto(-0.1), 200, 3)
    tail = fit_tail(scores, np.arange(200), np.random.default_rng(0))
    values = scores[np.triu_indices(200, 1)]
    shape, _, scale = stats.genpareto.fit(values[values > tail.start] - tail.start, floc=0.0)
    assert abs(tail.shape - shape) < 0.08
    assert tail.scale == pytest.approx(scale, rel=0.1)


def test_threshold_and_false_match_are_inverse_and_monotone() -> None:
    tail = fitted()
    for comparisons in (10, 1_000, 50_000):
        at = tail.threshold(comparisons, 0.01)
        assert tail.false_match(comparisons, at) == pytest.approx(0.01, rel=1e-6)
    many = [tail.threshold(n, 0.01) for n in (10, 100, 10_000, 1_000_000)]
    assert many == sorted(many)
    strict = [tail.threshold(1_000, p) for p in (0.5, 0.1, 0.01, 1e-6)]
    assert strict == sorted(strict)


def test_the_threshold_may_lie_above_every_score_seen_but_no_higher_than_the_exponential_law_says() -> None:
    people = 200
    scores = symmetric(stats.norm, people, 1)
    tail = fit_tail(scores, np.arange(people), np.random.default_rng(0))
    assert tail.threshold(50_000, 0.001) > scores.max()
    for wild in (stats.t(2), stats.pareto(1.0), stats.lognorm(2.0)):  # heavier than anything a network's scores are
        heavy = fitted(wild, seed=2)
        assert heavy.shape == 0.0
        rate = -np.expm1(np.log1p(-0.001) / 50_000)
        assert heavy.threshold(50_000, 0.001) <= heavy.start + heavy.scale * np.log(heavy.share / rate) * (1 + 1e-9)


def test_the_threshold_is_never_below_the_start() -> None:
    tail = fitted()
    assert tail.threshold(1, 0.999) == tail.start
    assert tail.threshold(1, tail.share * 1.01) == tail.start


def test_the_measured_probability_lies_in_the_interval_as_often_as_it_says() -> None:
    # 985 of 1000 and more were measured: drawing again by person is wide where pairs are nearly independent
    inside = 0
    for seed in range(60):
        tail = fitted(people=60, seed=seed)
        at = tail.threshold(200, 0.01)
        low, high = tail.interval(200, at)
        assert low <= tail.false_match(200, at) <= high
        inside += low <= false_match(stats.norm, 200, at) <= high
    assert inside >= 55


def test_people_who_look_like_many_make_the_law_an_upper_bound() -> None:
    rng = np.random.default_rng(0)

    def drawn(n: int) -> tuple[Array, Array]:
        points = rng.normal(size=(n, 16))
        return points / np.linalg.norm(points, axis=1, keepdims=True), rng.normal(0.0, 0.4, n)

    def compared(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
        return np.asarray(4.0 * a[0] @ b[0].T + a[1][:, None] + b[1][None])

    people = drawn(150)
    scores = compared(people, people)
    tail = fit_tail((scores + scores.T) / 2, np.arange(150), rng)
    at = tail.threshold(1_000, 0.01)
    rates = np.concatenate([(compared(drawn(500), drawn(4_000)) >= at).mean(axis=1) for _ in range(4)])
    measured = float(np.mean(1 - (1 - rates) ** 1_000))
    independent = float(1 - (1 - rates.mean()) ** 1_000)
    low, high = tail.interval(1_000, at)
    assert measured <= independent  # Jensen; by 1.2 to 2 times here
    assert low <= measured <= high


def test_pairs_of_one_person_and_the_diagonal_are_not_read() -> None:
    people, each = 40, 3
    scores = symmetric(stats.norm, people * each, 4)
    owners = np.repeat(np.arange(people), each)
    spoiled = np.where(owners[:, None] == owners[None], nan, scores)
    assert fit_tail(spoiled, owners, np.random.default_rng(1)) == fit_tail(scores, owners, np.random.default_rng(1))
    tail = fit_tail(spoiled, owners, np.random.default_rng(1))
    assert tail.people == people
    assert tail.pairs == each * each * people * (people - 1) // 2


def test_the_order_of_people_does_not_change_the_law() -> None:
    scores, order = symmetric(stats.norm, 60, 5), np.random.default_rng(0).permutation(60)
    one = fit_tail(scores, np.arange(60), np.random.default_rng(1))
    other = fit_tail(scores[np.ix_(order, order)], np.arange(60)[order], np.random.default_rng(1))
    assert (one.start, one.share) == (other.start, other.share)
    assert one.shape == pytest.approx(other.shape, abs=1e-9)
    assert one.scale == pytest.approx(other.scale, rel=1e-9)


def test_people_who_come_in_groups_make_the_interval_wider_than_pairs_would() -> None:
    # a person's pictures all but repeat each other: 9 pairs of pictures are one pair of persons
    people, each = 40, 3
    once = symmetric(stats.norm, people, 6)
    many = np.repeat(np.repeat(once, each, axis=0), each, axis=1)
    jitter = 1e-6 * symmetric(stats.norm, people * each, 7)
    grouped = fit_tail(many + jitter, np.repeat(np.arange(people), each), np.random.default_rng(0))
    taken_apart = fit_tail(
        symmetric(stats.norm, people * each, 8), np.arange(people * each), np.random.default_rng(0)
    )
    spread = [np.std([r[0] / tail.share for r in tail.replicates]) for tail in (grouped, taken_apart)]
    assert spread[0] > 1.5 * spread[1]


@pytest.mark.parametrize("people", [0, 1, 2, FEWEST - 1])
def test_too_few_people_are_refused_without_a_number_of_them(people: int) -> None:
    with pytest.raises(TooFewScoresError) as refusal:
        fit_tail(symmetric(stats.norm, people, 0), np.arange(people), np.random.default_rng(0))
    assert str(refusal.value) == str(TooFewScoresError())
    with pytest.raises(TooFewScoresError):  # many pictures of few people are no more people
        fit_tail(symmetric(stats.norm, 100, 0), np.arange(100) % 20, np.random.default_rng(0))


def test_scores_that_do_not_differ_are_refused() -> None:
    with pytest.raises(TooFewScoresError):
        fit_tail(np.zeros((50, 50)), np.arange(50), np.random.default_rng(0))
    with pytest.raises(TooFewScoresError):  # saturated: one value above all others, held by too many
        fit_tail(np.minimum(symmetric(stats.norm, 60, 0), 0.5), np.arange(60), np.random.default_rng(0))


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_score_that_is_not_finite_is_refused(bad: float) -> None:
    scores = symmetric(stats.norm, 40, 0)
    scores[3, 7] = scores[7, 3] = bad
    with pytest.raises(ValueError, match="finite"):
        fit_tail(scores, np.arange(40), np.random.default_rng(0))


def test_scores_that_are_not_symmetric_are_refused() -> None:
    scores = symmetric(stats.norm, 40, 0)
    scores[3, 7] += 0.1
    with pytest.raises(ValueError, match="both directions"):
        fit_tail(scores, np.arange(40), np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"\(n, n\)"):
        fit_tail(scores, np.arange(39), np.random.default_rng(0))


def test_a_tail_comes_back_from_a_file_as_it_went() -> None:
    tail = fitted(people=40)
    assert tail_from(json.loads(json.dumps(asdict(tail)))) == tail
    with pytest.raises(ValueError, match="keys"):
        tail_from({"start": 0.0})
    with pytest.raises(ValueError, match="numbers"):
        tail_from({**asdict(tail), "replicates": [["a", 0.0, 1.0]] * 3})


@pytest.mark.parametrize(
    "wrong",
    [{"start": nan}, {"share": 0.0}, {"share": nan}, {"shape": 0.1}, {"shape": STEEPEST - 0.01}, {"scale": 0.0},
     {"scale": inf}, {"people": 3}, {"pairs": 5}, {"replicates": ()}, {"replicates": ((0.1, 0.0),) * 3}],
)  # fmt: skip
def test_what_is_no_law_cannot_be_built(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each with its own sentence
        replace(fitted(people=40), **wrong)  # type: ignore[arg-type]


def test_questions_without_sense_are_refused() -> None:
    tail = fitted(people=40)
    for comparisons, false_matches in ((0, 0.01), (-1, 0.01), (10, 0.0), (10, 1.0), (10, nan)):
        with pytest.raises(ValueError):  # noqa: PT011 - each with its own sentence
            tail.threshold(comparisons, false_matches)
    with pytest.raises(ValueError, match="NaN"):
        tail.rate(nan)
    with pytest.raises(ValueError, match="NaN"):
        tail.interval(10, nan)
