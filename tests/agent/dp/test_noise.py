"""The noise of every Gaussian mechanism here: its law, its lattice, and where its bytes come from."""

import math
import os
import random

import numpy as np
import pytest
import torch
from scipy import stats

from agent.dp import noise
from agent.dp.noise import (
    GRID,
    TAIL,
    SystemEntropy,
    deviation,
    draw_gaussians,
    draw_uniforms,
    noisy_sum,
    snap_to_lattice,
)
from tests.support.entropy import UnsafeSeededEntropy


def test_the_released_sum_lies_on_the_lattice():
    total = np.random.default_rng(0).normal(size=4001)
    noisy, grid = noisy_sum(total, 0.7, 1.5, UnsafeSeededEntropy(0)), 0.7 * GRID
    assert np.array_equal(noisy, np.rint(noisy / grid) * grid)


def test_the_noise_covers_what_rounding_adds_to_the_sensitivity(monkeypatch):
    monkeypatch.setattr(noise, "draw_gaussians", lambda entropy, count: np.ones(count))
    grid, d = 0.7 * GRID, 40_000
    (spread,) = set(noisy_sum(np.zeros(d), 0.7, 1.5, UnsafeSeededEntropy(0)).tolist())
    assert spread >= 1.5 * (0.7 + grid * math.sqrt(d)) - grid
    assert spread > 1.5 * 0.7


def _law(sensitivity, multiplier, claimed, entropy=None):
    """p-values of the emitted noise against N(0, claimed^2): of its distribution, and of its variance."""
    entropy = entropy or UnsafeSeededEntropy(7)
    x = noisy_sum(np.full(50_000, 3.0), sensitivity, multiplier, entropy) - 3.0
    below = stats.chi2.cdf((x**2).sum() / claimed**2, len(x))
    return stats.kstest(x / claimed, "norm").pvalue, 2 * min(below, 1 - below)


@pytest.mark.parametrize(("sensitivity", "multiplier"), [(1.0, 1.0), (0.01, 5.0), (300.0, 0.6)])
def test_the_noise_is_gaussian_and_its_variance_is_within_its_confidence_interval(sensitivity, multiplier):
    distribution, variance = _law(sensitivity, multiplier, sensitivity * multiplier)
    assert distribution > 1e-3
    assert variance > 1e-3
    assert min(_law(sensitivity, multiplier, sensitivity * multiplier, SystemEntropy())) > 1e-6


@pytest.mark.parametrize("wrong", [0.98, 1.02, 0.5])
def test_noise_of_another_sensitivity_would_be_seen_red_by_that_test(wrong):
    # P10 broken on purpose: two in a hundred are found
    assert _law(0.7 * wrong, 1.5, 0.7 * 1.5)[1] < 1e-3


def test_two_draws_have_nothing_to_do_with_each_other():
    entropy = SystemEntropy()
    one, two = (noisy_sum(np.zeros(50_000), 1.0, 1.0, entropy) for _ in range(2))
    assert stats.pearsonr(one, two).pvalue > 1e-6
    assert stats.kstest((one - two) / math.sqrt(2), "norm").pvalue > 1e-6


def test_no_seed_of_anybody_reaches_the_noise():
    def drawn():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return noisy_sum(np.zeros(9), 1.0, 1.0, SystemEntropy())

    assert not np.array_equal(drawn(), drawn())


@pytest.mark.parametrize(
    ("sensitivity", "multiplier"),
    [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.nan), (1.0, math.inf)],
)
def test_noise_without_a_bound_or_without_size_is_refused(sensitivity, multiplier):
    with pytest.raises(ValueError, match="finite and positive"):
        noisy_sum(np.zeros(3), sensitivity, multiplier, SystemEntropy())


@pytest.mark.parametrize(
    "total",
    [
        np.array([0.0, math.nan]),
        np.array([math.inf]),
        np.zeros(3, np.float32),
        np.zeros((2, 2)),
        np.zeros(3, np.int64),
    ],
)
def test_what_noise_would_not_hide_is_refused(total):
    with pytest.raises(ValueError, match="finite float64"):
        noisy_sum(total, 1.0, 1.0, SystemEntropy())
    with pytest.raises(ValueError, match="finite float64"):
        snap_to_lattice(total, 1.0, 0.01, SystemEntropy())


def test_the_spread_is_the_multiplier_times_the_widened_sensitivity():
    assert deviation(0.5, 2.0, 400, 0.01) == 2.0 * (0.5 + 0.01 * 20)


def test_normals_have_tails_and_no_memory():
    z = draw_gaussians(UnsafeSeededEntropy(0), 200_001)
    assert z.shape == (200_001,)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(z[:100_000], z[100_001:])[0, 1]) < 0.015  # the two halves of Box-Muller


class _Zeros:
    def take(self, count):
        return bytes(count)


class _Ones:
    def take(self, count):
        return b"\xff" * count


@pytest.mark.parametrize("entropy", [_Zeros(), _Ones()])
def test_the_extreme_uniforms_give_finite_normals(entropy):
    assert np.abs(draw_gaussians(entropy, 6)).max() <= TAIL
    assert (draw_uniforms(entropy, 3) < 1).all()


class _Deep:
    """Entropy whose first words are all the same: the radius lies in one step of 2^-53, deep in the tail."""

    def __init__(self) -> None:
        self.calls = 0

    def take(self, count: int) -> bytes:
        self.calls += 1
        if self.calls == 1:
            return (np.full(count // 8, 3, np.uint64) << np.uint64(11)).tobytes()
        return np.zeros(count // 8, np.uint64).tobytes() if self.calls == 3 else os.urandom(count)


def test_the_tail_has_no_holes_that_would_tell_one_neighbour_from_another() -> None:
    """With 53 bits for the radius all of these are one number: half a million lattice steps that no noise reaches."""
    radii = draw_gaussians(_Deep(), 2 * 20_000)[:20_000]  # the angle is zero: cosines are the radii
    assert radii.min() > 8.4
    steps = np.unique(np.rint(radii / GRID))
    assert len(steps) > 19_000
    assert np.diff(steps).max() < 1_000, "of a span of half a million"
