"""Fidelity scores against scipy, closed forms, loops, and expectations that were published."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits

from agent.evaluation.fidelity import (
    Features,
    FidelityPlan,
    Sets,
    TooFewImagesError,
    describe,
    fidelity,
    frechet,
    kid,
    kid_subsets,
    manifold,
)
from agent.intervals import Resampling
from agent.microaggregation.partition import greedy
from agent.models.features.extractors import RandomFeatures
from agent.models.weights import Origin

SHA = hashlib.sha256(b"a fixed random layer").hexdigest()


class RandomLayer:
    """A fixed random convolution with mean and spread of its maps: a real network, if a small one."""

    name = "random layer"
    origin = Origin("random", SHA)

    def __init__(self):
        self.weights = torch.randn(12, 1, 3, 3, generator=torch.Generator().manual_seed(3))

    def embed(self, images):
        maps = torch.relu(torch.nn.functional.conv2d(images, self.weights))
        return torch.cat([maps.mean(dim=(2, 3)), maps.std(dim=(2, 3))], dim=1)


def _oracle(a, b):
    root = sqrtm(np.cov(a, rowvar=False) @ np.cov(b, rowvar=False)).real
    means = ((a.mean(axis=0) - b.mean(axis=0)) ** 2).sum()
    return means + np.trace(np.cov(a, rowvar=False) + np.cov(b, rowvar=False) - 2 * root)


def _pair(n, d, seed, scale=1.5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)), scale * rng.normal(size=(n + 7, d)) + 0.3


@settings(max_examples=30, deadline=None)
@given(d=st.integers(2, 12), seed=st.integers(0, 999))
def test_the_frechet_distance_is_that_of_scipys_square_root_and_symmetric(d, seed):
    a, b = _pair(60, d, seed)
    assert frechet(a, b) == pytest.approx(_oracle(a, b), rel=1e-7)
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999))
def test_the_frechet_distance_is_zero_to_oneself_and_blind_to_rotation(seed):
    a, b = _pair(50, 6, seed)
    turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(6, 6)))[0]
    assert frechet(a, a) == pytest.approx(0.0, abs=1e-9 * np.abs(a).max() ** 2)
    assert frechet(a @ turn, b @ turn) == pytest.approx(frechet(a, b), rel=1e-8)


def test_in_one_dimension_the_distance_has_its_closed_form():
    a, b = _pair(500, 1, 0)
    expected = (a.mean() - b.mean()) ** 2 + (a.std(ddof=1) - b.std(ddof=1)) ** 2
    assert frechet(a, b) == pytest.approx(expected, rel=1e-9)


def test_fewer_images_than_features_are_refused_unless_the_covariance_says_so():
    a, b = _pair(20, 40, 1)
    with pytest.raises(TooFewImagesError, match="more images than features") as refused:
        frechet(a, b)
    assert "20" not in str(refused.value)
    assert frechet(a, b, "singular") == pytest.approx(_oracle(a, b), rel=1e-4)
    assert 0 < frechet(a, b, "shrunk") < frechet(a, b, "singular")
    assert frechet(a, a, "shrunk") == pytest.approx(0.0, abs=1e-8)


def test_kid_is_the_double_loop_and_unbiased():
    a, b = _pair(12, 3, 2)

    def kernel(x, y):
        return (x @ y / 3 + 1) ** 3

    loops = sum(kernel(x, y) for i, x in enumerate(a) for j, y in enumerate(a) if i != j) / (12 * 11)
    loops += sum(kernel(x, y) for i, x in enumerate(b) for j, y in enumerate(b) if i != j) / (19 * 18)
    loops -= 2 * np.mean([[kernel(x, y) for y in b] for x in a])
    assert kid(a, b) == pytest.approx(loops, rel=1e-10)
    rng = np.random.default_rng(0)
    same = np.array([kid(rng.normal(size=(20, 3)), rng.normal(size=(30, 3))) for _ in range(600)])
    assert abs(same.mean()) < 4 * same.std() / np.sqrt(600)
    mean, spread = kid_subsets(*_pair(200, 3, 2), 50, 100, rng)
    assert mean == pytest.approx(kid(*_pair(200, 3, 2)), abs=5 * spread / 10)


def test_precision_recall_density_and_coverage_are_those_of_the_loops():
    rng = np.random.default_rng(4)
    real, fake, k = rng.normal(size=(40, 3)), 0.7 * rng.normal(size=(25, 3)) + 0.4, 3

    def reach(x):
        return np.array([np.sort([np.linalg.norm(p - q) for q in x])[k] for p in x])

    far = np.array([[np.linalg.norm(r - f) for f in fake] for r in real])
    precision, density, recall, coverage = (t.mean() for t in manifold(real, fake, k))
    assert precision == np.mean((far <= reach(real)[:, None]).any(axis=0))
    assert recall == np.mean((far <= reach(fake)).any(axis=1))
    assert density == pytest.approx((far <= reach(real)[:, None]).sum() / (k * 25))
    assert coverage == np.mean(far.min(axis=1) <= reach(real))


def test_density_and_coverage_of_equal_distributions_have_the_published_expectations():
    rng, n, m, k = np.random.default_rng(5), 60, 40, 3
    runs = [[t.mean() for t in manifold(rng.normal(size=(n, 2)), rng.normal(size=(m, 2)), k)] for _ in range(250)]
    _, density, _, coverage = np.mean(runs, axis=0)
    expected = 1 - np.prod([(n - i) / (m + n - i) for i in range(1, k + 1)])  # Naeem et al. 2020, lemma 2
    assert density == pytest.approx(1.0, abs=0.03)
    assert coverage == pytest.approx(expected, abs=0.01)


@pytest.fixture(scope="module")
def digits():
    images = load_digits().images  # in their own order, neighbours are of one writer
    return (images[np.random.default_rng(0).permutation(len(images))[:1200]] / 16.0).astype(np.float32)


@pytest.fixture(scope="module")
def sets(digits):
    net = RandomLayer()
    reference, held = describe(net, digits[:700], np.arange(700)), describe(net, digits[700:], np.arange(700, 1200))

    def against(released):
        return Sets(reference, describe(net, released, np.arange(len(released))), held)

    return against


def _averaged(images, k):
    assignment = greedy(images.reshape(len(images), -1).astype(np.float64), k)
    return np.stack([images[assignment == j].mean(axis=0) for j in range(assignment.max() + 1)]).astype(np.float32)


def test_a_release_is_worse_the_more_is_averaged_and_never_better_than_held_out(digits, sets):
    plan = FidelityPlan(resampling=Resampling(40))
    found = [fidelity(sets(_averaged(digits[:700], k)), plan, np.random.default_rng(0)) for k in (2, 5, 10)]
    distances = [f.figures[0] for f in found]
    assert distances[0].value < distances[1].value < distances[2].value
    assert all(d.chance < d.value and d.interval.low <= d.value <= d.interval.high for d in distances)
    kids = [f.figures[1] for f in found]
    assert kids[0].value < kids[1].value < kids[2].value
    assert kids[0].interval.low > found[0].baseline[1].interval.high
    assert "random layer (random, " in found[0].table()
    assert SHA[:12] in found[0].table()
    assert found[0].equal_size
    assert [f.name for f in found[0].figures] == [
        "Fréchet distance",
        "KID",
        "precision",
        "density",
        "recall",
        "coverage",
    ]


def test_fidelity_is_a_function_of_its_generator_and_moves_no_global_one(digits, sets):
    before, old = torch.get_rng_state(), np.random.get_state()[1].copy()
    plan = FidelityPlan(resampling=Resampling(20), subsets=5)
    compared = sets(digits[700:800])
    once, again = (fidelity(compared, plan, np.random.default_rng(7)).table() for _ in range(2))
    assert once == again
    assert torch.equal(before, torch.get_rng_state())
    assert (old == np.random.get_state()[1]).all()


def test_the_frechet_interval_covers_the_expectation_at_its_size():
    rng, covered = np.random.default_rng(11), 0
    net, plan = Origin("random", SHA), FidelityPlan(resampling=Resampling(60), subsets=2)
    expected = np.mean([frechet(rng.normal(size=(80, 2)), rng.normal(size=(60, 2)) * 1.4) for _ in range(1500)])
    for _ in range(60):
        a, b = rng.normal(size=(80, 2)), rng.normal(size=(60, 2)) * 1.4
        three = Sets(
            Features(a, np.arange(80), "n", net),
            Features(b, np.arange(60), "n", net),
            Features(a[:20], np.arange(80, 100), "n", net),
        )
        interval = fidelity(three, plan, rng).figures[0].interval
        covered += interval.low <= expected <= interval.high
    assert covered >= 48  # 95 % of 60 is 57; fewer than 48 has a chance of 1 in 10 000


def test_the_random_feature_network_of_the_registry_is_an_extractor(digits):
    net = RandomFeatures(0, width=8, depth=2)
    found = describe(net, digits[:20], np.arange(20))
    assert found.extractor == net.name
    assert found.origin.provenance == "random"


def test_bad_features_and_mixed_networks_are_refused(digits):
    net, origin = RandomLayer(), Origin("random", SHA)
    with pytest.raises(TooFewImagesError):
        describe(net, digits[:9], np.arange(9))
    broken = digits[:20].copy()
    broken[3, 0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        describe(net, broken, np.arange(20))
    good = describe(net, digits[:20], np.arange(20))
    with pytest.raises(ValueError, match="finite"):
        Features(np.full((20, 2), np.inf), np.arange(20), "n", origin)
    other = Features(good.values, np.arange(20, 40), "another", origin)
    with pytest.raises(ValueError, match="different networks"):
        Sets(good, good, other)
    with pytest.raises(ValueError, match="held out"):
        Sets(good, good, describe(net, digits[20:40], np.arange(19, 39)))


def test_copies_of_the_reference_are_closer_than_any_held_out_image_can_be(digits, sets):
    found = fidelity(sets(digits[:500]), FidelityPlan(resampling=Resampling(20)), np.random.default_rng(1))
    assert found.figures[0].value < found.baseline[0].value
    assert found.figures[2].value == 1.0
