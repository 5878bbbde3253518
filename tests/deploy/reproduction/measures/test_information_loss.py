"""Information loss: Definition 3.2 in a loop, every pair counted once, exact chances."""

from itertools import combinations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from agent.evaluation.partitions import Partition
from agent.intervals import Resampling
from agent.microaggregation.partition import greedy
from deploy.reproduction.measures.information_loss import centroids, homogeneity, information_loss, tightness


def _random(n, m, d, seed):
    rng = np.random.default_rng(seed)
    assignment = np.concatenate([np.arange(m), rng.integers(0, m, n - m)])
    return Partition(rng.normal(size=(n, d)), assignment.astype(np.int64), "made")


def test_information_loss_is_definition_3_2_and_its_chance_the_mean_over_other_clusters():
    p = _random(40, 6, 3, 0)
    reps = np.random.default_rng(1).normal(size=(6, 3))
    found = information_loss(p, reps, np.random.default_rng(2), Resampling(100))
    loss = np.mean([np.sqrt(sum((i - d) ** 2)) for i, d in zip(p.codes, reps[p.assignment], strict=True)])
    others = [
        np.linalg.norm(c - reps[j]) for c, a in zip(p.codes, p.assignment, strict=True) for j in range(6) if j != a
    ]
    assert found.loss.value == pytest.approx(loss)
    assert found.loss.chance == pytest.approx(np.mean(others))
    assert found.loss.interval.low <= loss <= found.loss.interval.high
    assert found.per_cluster @ p.sizes / 40 == pytest.approx(loss)


def test_a_picture_released_as_it_is_loses_nothing():
    codes = np.random.default_rng(0).normal(size=(12, 4))
    p = Partition(codes, np.arange(12), "made")
    assert information_loss(p, codes, np.random.default_rng(0), Resampling(20)).loss.value == 0.0


def test_loss_grows_with_k_and_clusters_beat_chance_on_digits():
    codes = load_digits().data[:400].astype(np.float64)
    losses = []
    for k in (2, 5, 10, 20):
        p = Partition(codes, greedy(codes, k), "pixels")
        found = information_loss(p, centroids(p), np.random.default_rng(0), Resampling(50)).loss
        assert found.interval.high < found.chance
        losses.append(found.value)
    assert losses == sorted(losses)


def test_tightness_counts_every_pair_inside_clusters_once():
    p = _random(30, 4, 2, 3)
    groups = [p.codes[p.assignment == j] for j in range(4)]
    pairs = [np.linalg.norm(a - b) for g in groups for a, b in combinations(g, 2)]
    found = tightness(p)
    assert (found.nearest, found.mean, found.farthest) == pytest.approx((min(pairs), np.mean(pairs), max(pairs)))
    assert found.sse == pytest.approx(sum(((g - g.mean(axis=0)) ** 2).sum() for g in groups))
    between = sum(len(g) * ((g.mean(axis=0) - p.codes.mean(axis=0)) ** 2).sum() for g in groups)
    assert found.sst == pytest.approx(found.sse + between)  # the analysis of variance
    assert found.share == pytest.approx(found.sse / found.sst)
    assert "SSE" in found.table()


def test_homogeneity_counts_clusters_of_one_value_and_joint_ones_both():
    assignment = np.array([0, 0, 1, 1, 2, 2])
    age, sex = ["old", "old", "old", "new", "new", "new"], ["f", "f", "m", "m", "f", "m"]
    one, two, both = homogeneity(assignment, {"age": age, "sex": sex}, [("age", "sex")])
    assert (one.value, two.value, both.value) == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert one.chance == pytest.approx(0.4)  # 2 (3 choose 2) / (6 choose 2)
    assert both.name == "homogeneous in age and sex"


def test_the_chance_of_homogeneity_is_that_of_dealing_at_random():
    rng = np.random.default_rng(0)
    assignment = np.repeat(np.arange(8), [2, 2, 2, 3, 3, 3, 2, 3])
    values = rng.choice(["a", "b"], 20, p=[0.8, 0.2])
    runs = [homogeneity(assignment, {"x": rng.permutation(values).tolist()})[0].value for _ in range(3000)]
    assert homogeneity(assignment, {"x": values.tolist()})[0].chance == pytest.approx(np.mean(runs), abs=0.01)


def test_what_is_no_release_of_the_partition_is_refused():
    codes = np.zeros((4, 2))
    with pytest.raises(ValueError, match="finite representative"):
        information_loss(
            Partition(codes, np.array([0, 0, 1, 1]), "made"), np.full((2, 2), np.nan), np.random.default_rng(0)
        )
    with pytest.raises(ValueError, match="one value for each patient"):
        homogeneity(np.array([0, 0]), {"age": ["old"]})
    same = tightness(Partition(codes, np.array([0, 0, 1, 1]), "made"))
    assert (same.share, same.silhouette) == (0.0, 0.0)
