"""Semantic distribution similarity against Eq. 5 as it is written, and what it says of selections."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.evaluation.released_set import Meaning, class_means, frequencies, similarity


def _meaning(rng: np.random.Generator, count: int) -> Meaning:
    return Meaning(rng.dirichlet(np.ones(count)), rng.normal(size=(count, 5)))


def _as_written(a: Meaning, b: Meaning) -> float:
    """Eq. 5, term by term."""
    total = 0.0
    for i in range(len(a.frequencies)):
        for k in range(len(b.frequencies)):
            v, u = a.vectors[i], b.vectors[k]
            total += a.frequencies[i] * b.frequencies[k] * float(v @ u) / float(np.linalg.norm(v) * np.linalg.norm(u))
    return total


def test_it_is_equation_5() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = _meaning(rng, 7), _meaning(rng, 3)
        assert similarity(a, b) == pytest.approx(_as_written(a, b), abs=1e-12)
        assert similarity(a, b) == pytest.approx(similarity(b, a), abs=1e-12)
        assert -1.0 <= similarity(a, b) <= 1.0


def test_one_semantic_is_as_itself_and_unlike_its_opposite() -> None:
    one = Meaning(np.ones(1), np.array([[2.0, 0.0]]))
    assert similarity(one, Meaning(np.ones(1), np.array([[0.5, 0.0]]))) == pytest.approx(1.0)
    assert similarity(one, Meaning(np.ones(1), np.array([[-3.0, 0.0]]))) == pytest.approx(-1.0)


def test_a_selection_of_the_right_semantics_is_nearer_than_everything() -> None:
    vectors = np.eye(4)
    private = Meaning(np.array([0.5, 0.5, 0.0, 0.0]), vectors)
    everything, chosen = Meaning(np.full(4, 0.25), vectors), Meaning(np.array([0.4, 0.6, 0.0, 0.0]), vectors)
    assert similarity(private, chosen) > similarity(private, everything)


def test_a_semantic_that_does_not_occur_needs_no_vector() -> None:
    features = np.array([[1.0, 1.0], [3.0, 1.0], [0.0, 5.0]])
    labels: NDArray[np.int64] = np.array([0, 0, 2])
    means = class_means(features, labels, 3, np.array([0.0, 1.0]))
    assert means.tolist() == [[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]]
    shares = frequencies(labels, 3)
    found = Meaning(shares, means)
    assert similarity(found, found) == pytest.approx((2 / 3) ** 2 + (1 / 3) ** 2)
    with pytest.raises(ValueError, match="not 0"):
        Meaning(np.full(3, 1 / 3), means)


def test_what_is_no_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        Meaning(np.array([0.5, 0.6]), np.ones((2, 2)))
    with pytest.raises(ValueError, match="sum to 1"):
        Meaning(np.array([np.nan, 1.0]), np.ones((2, 2)))
    with pytest.raises(ValueError, match="NS"):
        Meaning(np.ones(1), np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"0 \.\. count-1"):
        frequencies(np.array([3]), 3)
    with pytest.raises(ValueError, match="a label for each row"):
        class_means(np.ones((2, 2)), np.array([0]), 1, np.zeros(2))
    with pytest.raises(ValueError, match="different spaces"):
        similarity(Meaning(np.ones(1), np.ones((1, 2))), Meaning(np.ones(1), np.ones((1, 3))))
