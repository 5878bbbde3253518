"""The mean of a round: uniform, exact where it can be, and of nothing but good vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from coordinator.rounds import NoAggregate, aggregate, usable

_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
_stacks = st.tuples(st.integers(1, 6), st.integers(1, 20)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=_finite)
)


def _rows(stack: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [np.ascontiguousarray(row) for row in stack]


def test_every_site_counts_the_same() -> None:
    vectors = [np.array([value, -value], np.float32) for value in (1.0, 2.0, 6.0)]
    mean = aggregate(vectors)
    assert mean.dtype == np.float32
    assert mean.tolist() == [3.0, -3.0]


def test_small_updates_are_not_lost_in_a_float32_sum() -> None:
    big, one, none = (np.array([value], np.float32) for value in (2**24, 1, 0))
    assert aggregate([big, one, one, none]).tolist() == [(2**24 + 2) / 4]


def test_the_largest_floats_do_not_overflow() -> None:
    top = np.full(3, np.finfo(np.float32).max, np.float32)
    assert aggregate([top, top, top]).tolist() == top.tolist()


@given(_stacks)
def test_the_mean_lies_between_the_smallest_and_the_largest(stack: NDArray[np.float32]) -> None:
    mean = aggregate(_rows(stack))
    assert bool(((stack.min(axis=0) <= mean) & (mean <= stack.max(axis=0))).all())


@given(_stacks)
def test_the_order_of_the_sites_matters_by_a_rounding_at_most(stack: NDArray[np.float32]) -> None:
    rows = _rows(stack)
    turned = rows[::-1]
    tolerance = 1e-12 * np.abs(stack).max() + np.spacing(np.abs(aggregate(rows)))
    assert bool((np.abs(aggregate(rows) - aggregate(turned)) <= tolerance).all())


@given(_stacks)
def test_equal_updates_are_their_own_mean(stack: NDArray[np.float32]) -> None:
    row = np.ascontiguousarray(stack[0])
    assert aggregate([row, row]).tolist() == row.tolist()


def test_what_went_in_is_not_changed() -> None:
    first, second = np.ones(4, np.float32), np.zeros(4, np.float32)
    aggregate([first, second])
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.ones(3, np.float64), "schema"),
        (np.ones(2, np.float32), "schema"),
        (np.ones((3, 1), np.float32), "schema"),
        (np.float32(1), "schema"),
        ([1.0, 1.0, 1.0], "schema"),
        (np.ones(3, np.dtype(">f4")), "schema"),
        (np.array([1, np.nan, 1], np.float32), "not_finite"),
        (np.array([1, np.inf, 1], np.float32), "not_finite"),
        (np.array([1, -np.inf, 1], np.float32), "not_finite"),
    ],
)
def test_one_bad_vector_spoils_the_mean_loudly(bad: NDArray[np.float32], why: str) -> None:
    good = np.ones(3, np.float32)
    assert usable(good, 3) is None
    assert usable(bad, 3) == why
    with pytest.raises(NoAggregate, match=f"vector 1: {why}"):
        aggregate([good, bad])


@pytest.mark.parametrize("vectors", [[], [np.empty(0, np.float32)], [np.ones((2, 2), np.float32)], ["x"]])
def test_there_is_no_mean_of_nothing(vectors: list[NDArray[np.float32]]) -> None:
    with pytest.raises(NoAggregate):
        aggregate(vectors)
