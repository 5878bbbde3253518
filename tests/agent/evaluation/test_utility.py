"""Trained on a release, tested on real patients: sklearn's kappa as the oracle, and classifiers that really learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, cohen_kappa_score

from agent.evaluation.utility import (
    Examples,
    Recipe,
    confusion,
    network_trainer,
    quadratic_kappa,
    train_network,
    tstr,
)
from agent.intervals import Resampling


def linear(release, seed=0):
    """Logistic regression on pixels: a classifier in seconds."""
    if len(np.unique(release.grades)) < 2:
        raise ValueError("the release has one grade only")
    model = LogisticRegression(max_iter=500).fit(release.images.reshape(len(release.images), -1), release.grades)
    return lambda unseen: model.predict(unseen.reshape(len(unseen), -1)).astype(np.int64)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(2, 60), count=st.integers(2, 6), seed=st.integers(0, 9999))
def test_kappa_and_accuracy_are_those_of_sklearn_with_weights(n, count, seed):
    rng = np.random.default_rng(seed)
    truth, told = rng.integers(0, count, n), rng.integers(0, count, n)
    weights = rng.uniform(0.1, 2.0, n)
    cells = confusion(truth, told, weights, count)
    assert np.trace(cells) / cells.sum() == pytest.approx(accuracy_score(truth, told, sample_weight=weights))
    if len(set(truth) | set(told)) > 1:
        oracle = cohen_kappa_score(truth, told, weights="quadratic", sample_weight=weights, labels=range(count))
        assert quadratic_kappa(cells) == pytest.approx(oracle, abs=1e-10)


def test_an_undefined_kappa_shows_nothing():
    assert quadratic_kappa(np.diag([0.0, 7.0, 0.0])) == 0.0


def _graded(n, seed, side=16):
    """Pictures of spots: the more spots, the higher the grade (0, 1, 2); nothing else differs."""
    rng = np.random.default_rng(seed)
    grades = rng.integers(0, 3, n)
    images = rng.uniform(0.0, 0.2, (n, side, side)).astype(np.float32)
    for image, grade in zip(images, grades, strict=True):
        for _ in range(3 * grade):
            y, x = rng.integers(0, side - 2, 2)
            image[y : y + 2, x : x + 2] = 1.0
    return images, grades


def _examples(n, seed, per_patient=1):
    images, grades = _graded(n, seed)
    return Examples(images, grades, np.arange(n) // per_patient, 3)


SMALL = Recipe(epochs=8, side=16, width=8)


@pytest.mark.parametrize("target", ["classes", "mse"])
def test_a_network_learns_grades_from_a_release_and_real_patients_confirm_it(target):
    recipe = Recipe(epochs=10, side=16, width=8, target=target)
    found = tstr(
        _examples(240, 0), _examples(150, 1), network_trainer(recipe), (0,), np.random.default_rng(0), Resampling(200)
    )
    accuracy, kappa = found.figures[:2]
    assert accuracy.value > 0.8
    assert kappa.value > 0.85
    assert accuracy.interval.low > accuracy.chance
    assert found.confusion.sum() == pytest.approx(150)
    assert "seed 0: accuracy" in found.table()


def test_labels_that_mean_nothing_teach_nothing():
    release = _examples(240, 0)
    shuffled = Examples(release.images, np.random.default_rng(5).permutation(release.grades), release.patients, 3)
    found = tstr(shuffled, _examples(150, 1), network_trainer(SMALL), (0,), np.random.default_rng(0), Resampling(100))
    kappa = found.figures[1]
    assert kappa.interval.low <= 0.1
    assert kappa.value < 0.35


def test_a_patient_with_many_images_has_one_vote():
    release, held = _examples(120, 0), _examples(40, 1)
    many = np.concatenate([np.arange(40), np.zeros(200, np.int64)])  # the first patient's image 200 times more
    told = linear(release)(held.images)
    heavy = Examples(held.images[many], held.grades[many], held.patients[many], 3)
    with_one = tstr(release, held, linear, (0,), np.random.default_rng(0), Resampling(50))
    with_many = tstr(release, heavy, linear, (0,), np.random.default_rng(0), Resampling(50))
    assert with_one.figures[0].value == pytest.approx((told == held.grades).mean())
    assert with_many.figures[0].value == pytest.approx(with_one.figures[0].value)
    assert with_many.figures[0].trials == 40


def test_the_same_seed_is_the_same_classifier_and_no_global_generator_moves():
    release, unseen = _examples(60, 0), _graded(80, 2)[0]
    before, old = torch.get_rng_state(), np.random.get_state()[1].copy()
    recipe = Recipe(epochs=2, side=16, width=4, turn=180.0)
    nets = [train_network(release, recipe, seed)(unseen) for seed in (3, 3, 4)]
    assert (nets[0] == nets[1]).all()
    assert (nets[0] != nets[2]).any()
    assert torch.equal(before, torch.get_rng_state())
    assert (old == np.random.get_state()[1]).all()


def test_a_turn_of_nothing_changes_nothing_and_a_half_turn_turns():
    from agent.evaluation.utility import _turned

    images = torch.rand(4, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_turned(images, 0.0, torch.Generator()), images)
    turned = _turned(images, 180.0, torch.Generator().manual_seed(0))
    assert turned.shape == images.shape
    assert torch.allclose(turned[:, :, 4, 4], images[:, :, 4, 4], atol=1e-4)  # the centre stays
    assert not torch.allclose(turned, images, atol=0.05)


def test_one_grade_other_shapes_and_no_seed_are_refused():
    release, held = _examples(30, 0), _examples(30, 1)
    one = Examples(release.images, np.zeros(30, np.int64), release.patients, 3)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="release has one grade"):
        tstr(one, held, linear, (0,), rng)
    with pytest.raises(ValueError, match="test set has one grade"):
        tstr(release, one, linear, (0,), rng)
    with pytest.raises(ValueError, match="seed"):
        tstr(release, held, linear, (), rng)
    with pytest.raises(ValueError, match="image shape"):
        tstr(release, Examples(held.images[:, :8], held.grades, held.patients, 3), linear, (0,), rng)
    with pytest.raises(ValueError, match="grades are 0"):
        Examples(release.images, np.full(30, 3), release.patients, 3)
    broken = release.images.copy()
    broken[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        Examples(broken, release.grades, release.patients, 3)
