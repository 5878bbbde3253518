"""Collusion and the checked guess: both win against what is shipped; secret weights stop an exact match only."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from agent.domain import Cohort, Image, Latents, Patient
from agent.intervals import Resampling
from agent.mechanisms.anonfaces.gallery import gallery_of
from agent.mechanisms.anonfaces.identity_mixing import Mixing, Setting, mix, secret_weights
from agent.mechanisms.common.linear_codec import fit_basis, invert
from agent.microaggregation.aggregation import average
from agent.microaggregation.partition import partition
from agent.models.features.extractors import RandomFeatures
from deploy.reproduction.attacks.collusion import Known, Shown, collusion, guessed

FEW = Resampling(100)
DELTA = Mixing(11).delta  # as shipped: 0.3
DIGITS = (load_digits().images / 16).astype(np.float32)
BASIS = fit_basis(DIGITS[-400:], 40, "public")


def _codes(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32).astype(np.float64)


def _name(row):
    return f"p{row:05d}"


def _clusters(codes, k, seed=0):
    latents = Latents(codes.astype(np.float32), tuple(_name(i) for i in range(len(codes))))
    return latents, partition(latents, [""] * len(codes), k, 1, np.random.default_rng(seed))


def _rows(clusters):
    return tuple(tuple(int(p[1:]) for p in c) for c in clusters.members)


def test_k_minus_1_colluders_hold_the_last_code_of_an_exact_equal_average():
    codes = _codes(200, 32)
    latents, clusters = _clusters(codes, 5)
    known = Known(codes, _rows(clusters), average(latents, clusters).astype(np.float64))
    found, without, likeness, own = collusion(known, np.random.default_rng(1), FEW).figures
    assert found.value == 1.0
    assert likeness.value > 0.999
    assert own.value < 0.8
    assert without.value <= found.value


def test_secret_weights_do_not_stop_colluders():
    codes, rng = _codes(660, 32), np.random.default_rng(3)
    members = _rows(_clusters(codes, 11)[1])
    mixed = np.array([secret_weights(len(c), DELTA, rng) @ codes[list(c)] for c in members])
    found, _, likeness, own = collusion(Known(codes, members, mixed), np.random.default_rng(1), FEW).figures
    assert DELTA == 0.3
    assert found.value > 0.95
    assert 0.8 < likeness.interval.low < likeness.interval.high < 0.95  # 1.0 with equal weights
    assert own.interval.high < likeness.interval.low


def test_colluders_of_a_release_of_others_find_nobody():
    codes = _codes(300, 32)
    members = _rows(_clusters(codes, 11)[1])
    unrelated = Known(codes, members, _codes(len(members), 32, 9))
    found, _, likeness, _ = collusion(unrelated, np.random.default_rng(1), FEW).figures
    assert found.interval.low <= found.chance + 0.01
    assert likeness.value < 0.2


class Pixels:
    """Judges pictures by their pixels."""

    name = "pixels"
    threshold = 1e-9

    def embed(self, images):
        return images.flatten(1) / 2


class Textures:
    """Judges pictures by random features."""

    name = "textures"
    threshold = 1e-9

    def __init__(self):
        self.net = RandomFeatures(3, width=8, depth=2, channels=1)

    def embed(self, images):
        return torch.nn.functional.normalize(self.net.embed(images), dim=1)


@pytest.fixture(scope="module")
def digits():
    """660 people of one digit each, their codes, clusters of 11, and a gallery that finds nobody at risk."""
    cohort = Cohort(tuple(Patient(_name(i), (Image(DIGITS[i], ""),)) for i in range(660)))
    latents = invert(cohort, BASIS)
    _, clusters = _clusters(latents.codes, 11)
    return latents, clusters, Setting(BASIS, gallery_of(cohort, (Pixels(), Textures())), lambda _: True)


def _mixed(digits, delta):
    """What the shipped mixing makes of them, as whoever attacks it sees it."""
    latents, clusters, setting = digits
    made = mix(latents, clusters, setting, Mixing(11, delta), np.random.default_rng(5))
    return Shown(latents.codes, _rows(made.clusters), made.images, BASIS.decode)


def test_a_guess_is_checked_by_whoever_knows_the_others_in_spite_of_secret_weights(digits):
    _, near = guessed(_mixed(digits, DELTA), np.random.default_rng(1), 100).figures
    assert near.trials == 60
    assert near.value > 0.95
    assert near.chance == 0.01


def test_secret_weights_leave_no_guess_that_gives_the_very_picture_and_equal_ones_do(digits):
    secret, _ = guessed(_mixed(digits, DELTA), np.random.default_rng(1), 100).figures
    bare, _ = guessed(_mixed(digits, 1e-9), np.random.default_rng(1), 100).figures
    assert secret.value == pytest.approx(secret.chance)
    assert bare.value == 1.0


def test_a_guess_at_a_picture_of_others_is_blind():
    codes = _codes(200, 40).astype(np.float32) * 0.2
    members = _rows(_clusters(codes, 5)[1])
    pictures = BASIS.decode(_codes(len(members), 40, 9).astype(np.float32) * 0.2)
    equal, near = guessed(Shown(codes, members, pictures, BASIS.decode), np.random.default_rng(1), 20).figures
    assert equal.value == pytest.approx(0.05)
    assert near.interval.low <= 0.05


def test_broken_input_is_refused():
    with pytest.raises(ValueError, match="two clusters"):
        Known(np.zeros((4, 2)), ((0, 1), (1, 2)), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="finite"):
        Known(np.full((4, 2), np.nan), ((0, 1),), np.zeros((1, 2)))
    codes, pictures = np.zeros((4, 2), np.float32), np.zeros((1, 3, 3), np.uint8)
    with pytest.raises(ValueError, match="image"):
        Shown(codes, ((0, 1), (2, 3)), pictures, BASIS.decode)
    with pytest.raises(ValueError, match="candidates"):
        guessed(Shown(codes, ((0, 1),), pictures, BASIS.decode), np.random.default_rng(0), 4)
