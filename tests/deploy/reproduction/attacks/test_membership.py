"""Membership: it finds members of a release of single people, finds none where nothing is, and counts fairly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve

from agent.intervals import Resampling
from agent.microaggregation.partition import greedy
from deploy.reproduction.attacks.membership import (
    Game,
    NearestFeatures,
    NearestPixels,
    Pool,
    Published,
    Recipe,
    attack,
    auc,
    game,
    tpr,
    train_attack,
)

FEW = Resampling(100)


def _pixel_average(k):
    """k-Same-Pixel (k-SALSA, section 4.2): by patient, clusters of k in pixel space, the mean picture."""

    def anonymise(pool):
        people = np.unique(pool.owners)
        means = np.stack([pool.images[pool.owners == p].mean(axis=0) for p in people])
        assignment = np.arange(len(people)) if k == 1 else greedy(means.reshape(len(means), -1).astype(np.float64), k)
        groups = [np.flatnonzero(assignment == j) for j in range(assignment.max() + 1)]
        pictures = np.stack([means[g].mean(axis=0) for g in groups]).astype(np.float32)
        return Published(pictures, tuple(tuple(int(p) for p in people[g]) for g in groups))

    return anonymise


def _digits(n, start=0, first_owner=0):
    images = (load_digits().images[start : start + n] / 16.0).astype(np.float32)
    return Pool(images, np.arange(n) + first_owner)


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 40), m=st.integers(1, 40), seed=st.integers(0, 9999), levels=st.sampled_from([3, 1000]))
def test_auc_is_that_of_sklearn_ties_included(n, m, seed, levels):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, levels, n).astype(float), rng.integers(0, levels, m).astype(float)
    oracle = roc_auc_score(np.r_[np.ones(n), np.zeros(m)], np.r_[a, b])
    assert auc(a, b) == pytest.approx(oracle, abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 60), m=st.integers(1, 250), seed=st.integers(0, 9999))
def test_the_true_positive_rate_is_the_best_on_the_roc_curve_within_the_false_ones(n, m, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0.5, 1, n), rng.normal(0, 1, m)
    false, true, _ = roc_curve(np.r_[np.ones(n), np.zeros(m)], np.r_[a, b], drop_intermediate=False)
    assert tpr(a, b) == pytest.approx(true[false <= 0.01].max())


def test_a_release_of_single_people_gives_every_member_away():
    victim = game(_digits(200), _pixel_average(1), np.random.default_rng(0))
    found = attack(NearestPixels(), victim, 1, np.random.default_rng(1), FEW)
    top, in_cluster, _, in_release, release_tpr = found.figures
    assert (top.value, in_cluster.value, in_release.value, release_tpr.value) == (1.0, 1.0, 1.0, 1.0)
    assert top.chance == pytest.approx(1 / 200)
    assert "K = 1, nearest in pixels" in found.table()


def test_averages_of_other_people_are_attacked_at_chance():
    victim = game(_digits(300), _pixel_average(5), np.random.default_rng(0))
    strangers = _pixel_average(5)(_digits(150, 600, 600))  # as many pictures, made of nobody in the pool
    pictures = np.random.default_rng(2).permutation(strangers.representatives)  # the greedy's order tells outliers
    unrelated = Game(Published(pictures, victim.published.members), victim.pool)
    found = attack(NearestPixels(), unrelated, 5, np.random.default_rng(1), FEW)
    top, in_cluster, _, in_release, _ = found.figures
    assert top.interval.low <= top.chance == pytest.approx(5 / 300)
    assert abs(in_cluster.value - 0.5) < 0.12
    assert in_release.interval.low <= 0.5 <= in_release.interval.high


def test_a_scorer_that_says_nothing_is_right_by_chance_only():
    class Mute:
        name = "mute"

        def score(self, representatives, candidates):
            return torch.zeros(len(representatives), len(candidates))

    victim = game(_digits(400), _pixel_average(5), np.random.default_rng(0))
    found = attack(Mute(), victim, 5, np.random.default_rng(1), FEW).figures
    assert found[0].interval.low <= found[0].chance <= found[0].interval.high + 0.01
    assert (found[1].value, found[3].value) == (0.5, 0.5)
    first_come = Game(Published(victim.pool.images[:1], ((0, 1, 2, 3, 4),)), victim.pool)
    assert attack(Mute(), first_come, 5, np.random.default_rng(1), FEW).figures[0].value < 0.5
    assert (found[2].value, found[4].value) == (0.0, 0.0)


def test_pixel_averages_leak_and_less_so_the_more_are_averaged():
    pool, values = _digits(400), {}
    for k in (2, 5, 10):
        victim = game(pool, _pixel_average(k), np.random.default_rng(0))
        found = attack(NearestPixels(), victim, k, np.random.default_rng(1), FEW)
        values[k] = found.figures[3].value
        assert found.figures[0].interval.low > found.figures[0].chance
    assert values[2] > values[5] > values[10]


def test_the_learned_attack_beats_chance_on_people_it_never_saw():
    own_pool = _digits(500)
    own = Game(_pixel_average(5)(own_pool), own_pool)
    victim = game(_digits(200, 800, 5000), _pixel_average(5), np.random.default_rng(0))
    recipe = Recipe(steps=80, width=8, side=8, batch=64)
    before, old = torch.get_rng_state(), np.random.get_state()[1].copy()
    model = train_attack(own, recipe, torch.Generator().manual_seed(0))
    found = attack(model, victim, 5, np.random.default_rng(1), FEW)
    assert torch.equal(before, torch.get_rng_state())
    assert (old == np.random.get_state()[1]).all()
    assert found.figures[0].interval.low > 4 * found.figures[0].chance
    assert found.figures[1].interval.low > 0.8


def test_the_same_generator_trains_the_same_attack():
    pool = _digits(60)
    own = Game(_pixel_average(3)(pool), pool)
    recipe = Recipe(steps=3, width=4, side=8, batch=8)
    one, two, other = (train_attack(own, recipe, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    states = [torch.cat([p.flatten() for p in m.net.parameters()]) for m in (one, two, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_a_patient_is_as_likely_as_the_likeliest_of_the_images():
    rng = np.random.default_rng(3)
    images = rng.uniform(size=(40, 6, 6)).astype(np.float32)
    owners = np.repeat(np.arange(20), 2)  # each patient: two unlike pictures
    shown = 2 * np.arange(10) + np.arange(10) % 2  # of one the first, of the next the second is released as it is
    published = Published(images[shown], tuple((p,) for p in range(10)))
    found = attack(NearestPixels(), Game(published, Pool(images, owners)), 1, np.random.default_rng(0), FEW)
    assert found.figures[0].value == 1.0
    assert found.figures[0].chance == pytest.approx(1 / 20)  # candidates are people


def test_features_see_what_pixels_do_not():
    class Brightness:
        name = "brightness"

        def embed(self, images):
            return images.mean(dim=(1, 2, 3))[:, None]

    rng = np.random.default_rng(0)
    levels = np.linspace(0.2, 0.8, 60).astype(np.float32)
    images = levels[:, None, None] + 0.2 * rng.uniform(-1, 1, (60, 9, 9)).astype(np.float32)
    moved = np.stack([rng.permutation(image.ravel()).reshape(9, 9) for image in images[:30]])
    victim = Game(Published(moved, tuple((i,) for i in range(30))), Pool(images, np.arange(60)))
    by_features = attack(NearestFeatures(Brightness()), victim, 1, np.random.default_rng(1), FEW)
    by_pixels = attack(NearestPixels(), victim, 1, np.random.default_rng(1), FEW)
    assert by_features.figures[0].value > 0.9 > by_pixels.figures[0].value
    assert by_features.scorer == "nearest in brightness"


def test_what_is_no_game_is_refused():
    pool = _digits(10)
    with pytest.raises(ValueError, match="two clusters"):
        Published(pool.images[:2], ((1, 2), (2, 3)))
    with pytest.raises(ValueError, match="every member is a candidate"):
        Game(Published(pool.images[:1], ((99, 1),)), pool)
    with pytest.raises(ValueError, match="some candidate is no member"):
        attack(NearestPixels(), Game(_pixel_average(2)(pool), pool), 2, np.random.default_rng(0), FEW)

    class Broken:
        name = "broken"

        def score(self, representatives, candidates):
            return torch.full((len(representatives), len(candidates)), torch.nan)

    with pytest.raises(ValueError, match="not a number"):
        attack(Broken(), game(pool, _pixel_average(2), np.random.default_rng(0)), 2, np.random.default_rng(0), FEW)
