"""Intervals: published values, scipy's second implementation, and the coverage that they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from agent.intervals import Figure, Interval, Resampling, Units, centred, percentile, rate, resampled, table, wilson


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),  # Newcombe 1998, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_limits(hits, of, low, high):
    found = wilson(hits, of)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


@settings(max_examples=100, deadline=None)
@given(of=st.integers(1, 400), share=st.floats(0, 1), level=st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_agrees_with_scipy_and_holds_the_rate(of, share, level):
    hits = round(share * of)
    found, oracle = wilson(hits, of, level), binomtest(hits, of).proportion_ci(level, "wilson")
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), abs=1e-9)
    assert 0 <= found.low <= hits / of <= found.high <= 1


@pytest.mark.parametrize(("hits", "of"), [(0, 0), (3, 2), (-1, 5), (float("nan"), 5)])
def test_a_rate_of_nothing_is_refused(hits, of):
    with pytest.raises(ValueError, match="trial"):
        wilson(hits, of)


def test_the_bootstrap_of_a_mean_is_as_wide_as_the_standard_error_says():
    values = np.random.default_rng(0).normal(size=400)
    draws = resampled(lambda rows: (values[rows].mean(),), Units(np.arange(400)), np.random.default_rng(1), 2000)
    assert draws.std() == pytest.approx(values.std() / 20, rel=0.06)


def test_a_patient_with_ten_equal_images_counts_as_one():
    values = np.repeat(np.random.default_rng(0).normal(size=100), 10)
    owners = np.repeat(np.arange(100), 10)
    by_patient = resampled(lambda r: (values[r].mean(),), Units(owners), np.random.default_rng(1), 1000).std()
    by_image = resampled(lambda r: (values[r].mean(),), Units(np.arange(1000)), np.random.default_rng(1), 1000).std()
    assert by_patient == pytest.approx(by_image * np.sqrt(10), rel=0.1)


@settings(max_examples=50, deadline=None)
@given(owners=st.lists(st.integers(0, 6), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_a_drawn_patient_brings_all_images_or_none(owners, seed):
    owners = np.array(owners)
    rows = Units(owners).draw(np.random.default_rng(seed))
    drawn = np.bincount(rows, minlength=len(owners))
    for patient in np.unique(owners):
        assert len(set(drawn[owners == patient])) == 1
    assert sum(drawn[owners == p][0] for p in np.unique(owners)) == len(np.unique(owners))


def test_nan_is_no_interval_no_figure_and_no_draw():
    nan = float("nan")
    with pytest.raises(ValueError, match="interval"):
        Interval(nan, 1.0)
    with pytest.raises(ValueError, match="finite"):
        Figure("x", nan, Interval(0, 1), 0.5, 3)
    with pytest.raises(ValueError, match="not a number"):
        percentile(np.array([0.0, nan]), 0.0)
    with pytest.raises(ValueError, match="20 draws"):
        Resampling(3)


def test_a_centred_interval_lies_about_the_value_and_not_below_zero():
    draws = np.random.default_rng(0).normal(5.0, 1.0, 4000)
    found = centred(draws, 3.0)
    assert (found.low, found.high) == pytest.approx((3 - 1.96, 3 + 1.96), abs=0.15)
    assert centred(draws, 0.5).low == 0.0


def test_a_table_prints_value_interval_chance_and_trials():
    line = table([rate("Rank-1", 3, 60, 1 / 60, 0.2)]).splitlines()[-1]
    assert line.split() == ["Rank-1", "0.0500", "[0.0171,", "0.1370]", "0.0167", "0.2000", "60"]
