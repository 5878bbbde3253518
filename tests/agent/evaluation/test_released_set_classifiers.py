"""LR, MLP and CNN: trained on one set, tested on another, with the paper's defaults."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from agent.evaluation.released_set import CNN, LR, MLP, NAMES, accuracies, train_logistic, train_perceptron
from agent.evaluation.utility import Examples, Recipe


def _digits(rows: slice) -> Examples:
    found = load_digits()
    images = (found.images[rows] / 16.0).astype(np.float32)
    return Examples(images, found.target[rows].astype(np.int64), np.arange(len(images)), 10)


@pytest.mark.filterwarnings("error::sklearn.exceptions.ConvergenceWarning")
def test_all_three_learn_digits_and_each_has_an_interval_by_patient() -> None:
    found = accuracies(
        _digits(slice(0, 500)),
        _digits(slice(1000, 1400)),
        Recipe(epochs=12, side=8, width=8),
        (0,),
        np.random.default_rng(0),
    )
    assert tuple(found) == NAMES
    for name in (LR, MLP, CNN):
        assert found[name].value > 0.85
        assert found[name].interval.low <= found[name].value <= found[name].interval.high
        assert found[name].trials == 400
        assert 0.0 < (found[name].chance or 0.0) < 0.2


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_they_are_scikit_learns_with_its_own_defaults() -> None:
    known, unseen = _digits(slice(0, 200)), _digits(slice(200, 300)).images
    flat = known.images.reshape(200, -1)
    lr = LogisticRegression().fit(flat, known.grades)
    assert np.array_equal(train_logistic(known, 5)(unseen), lr.predict(unseen.reshape(100, -1)))
    mlp = MLPClassifier(random_state=5).fit(flat, known.grades)
    assert np.array_equal(train_perceptron(known, 5)(unseen), mlp.predict(unseen.reshape(100, -1)))


def test_a_release_of_one_label_teaches_nothing_and_is_refused() -> None:
    one = Examples(np.zeros((3, 8, 8), np.float32), np.ones(3, np.int64), np.arange(3), 10)
    for train in (train_logistic, train_perceptron):
        with pytest.raises(ValueError, match="one grade only"):
            train(one, 0)
