"""Partitions: sklearn's silhouette, scipy's cuts of a dendrogram."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster
from sklearn.datasets import load_digits
from sklearn.metrics import silhouette_samples

from agent.evaluation.partitions import Partition, dendrogram, silhouettes, sizes_at
from agent.microaggregation.partition import greedy


def _random(n, m, d, seed):
    rng = np.random.default_rng(seed)
    assignment = np.concatenate([np.arange(m), rng.integers(0, m, n - m)])
    return Partition(rng.normal(size=(n, d)), assignment.astype(np.int64), "made")


@settings(max_examples=40, deadline=None)
@given(n=st.integers(6, 60), m=st.integers(2, 6), seed=st.integers(0, 999))
def test_the_silhouette_is_that_of_sklearn(n, m, seed):
    p = _random(max(n, m + 1), m, 3, seed)
    assert np.allclose(silhouettes(p), silhouette_samples(p.codes, p.assignment), atol=1e-10)


def test_the_silhouette_in_blocks_is_that_of_sklearn_on_digits():
    codes = load_digits().data[:1300].astype(np.float64)
    p = Partition(codes, greedy(codes, 10), "pixels")
    assert np.allclose(silhouettes(p), silhouette_samples(codes, p.assignment), atol=1e-9)


@pytest.mark.parametrize("method", ["single", "complete", "average", "ward"])
def test_a_cut_of_the_dendrogram_is_that_of_scipy(method):
    codes = np.random.default_rng(1).normal(size=(30, 4))
    tree = dendrogram(codes, method, 100, np.random.default_rng(0))
    for height in (0.0, *tree.merges[[5, 15, 25, 28], 2]):
        oracle = np.sort(np.bincount(fcluster(tree.merges, height, "distance"))[1:])[::-1]
        assert sizes_at(tree, float(height)).tolist() == oracle.tolist()
    assert not tree.sampled


def test_a_large_dendrogram_is_of_a_sample():
    tree = dendrogram(np.random.default_rng(1).normal(size=(300, 4)), "ward", 50, np.random.default_rng(0))
    assert tree.sampled
    assert tree.merges.shape == (49, 4)


def test_what_is_no_partition_is_refused():
    codes = np.zeros((4, 2))
    with pytest.raises(ValueError, match="none of them empty"):
        Partition(codes, np.array([0, 0, 2, 2]), "made")
    with pytest.raises(ValueError, match="finite"):
        Partition(np.full((4, 2), np.nan), np.array([0, 0, 1, 1]), "made")
    with pytest.raises(ValueError, match="two clusters"):
        silhouettes(Partition(codes, np.zeros(4, np.int64), "made"))
