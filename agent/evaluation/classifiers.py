"""The three classifiers of PrivImage (section 4.3, supplement C.3), trained on a release and tested on real patients.

Logistic regression and a multi-layer perceptron are scikit-learn's with their own defaults, on pixels in [0, 1]. The
paper's third is the ResNet-9 of FFCV, which has batch norm and some 6 million weights; ours is the small network of
:mod:`agent.evaluation.utility`, which is made for a thousandth of the images. Nothing is chosen on the test set.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from agent.evaluation.utility import Classifier, Examples, Grades, Recipe, Train, network_trainer, tstr
from agent.intervals import Figure, Resampling

LR, MLP, CNN = "LR", "MLP", "CNN"
NAMES: Final = (LR, MLP, CNN)


def train_logistic(release: Examples, seed: int) -> Classifier:
    """``LogisticRegression()``, at most 100 iterations; the seed changes nothing.

    Raises:
        ValueError: the release has one grade only.
    """
    return _fitted(LogisticRegression(), release)


def train_perceptron(release: Examples, seed: int) -> Classifier:
    """``MLPClassifier()``: one hidden layer of 100, Adam, at most 200 passes.

    Raises:
        ValueError: the release has one grade only.
    """
    return _fitted(MLPClassifier(random_state=seed), release)


def trainers(recipe: Recipe) -> Mapping[str, Train]:
    """LR, MLP and CNN; the recipe is the CNN's."""
    return {LR: train_logistic, MLP: train_perceptron, CNN: network_trainer(recipe)}


def accuracies(
    release: Examples, held_out: Examples, recipe: Recipe, seeds: Sequence[int], rng: np.random.Generator
) -> dict[str, Figure]:
    """Accuracy of LR, MLP and CNN on real held-out patients, mean over seeds, with intervals by patient.

    Args:
        release: synthetic images with their labels.
        held_out: real images of patients of whom the release knows nothing.
        recipe: of the CNN.
        seeds: of the trainings.
        rng: for the bootstrap, which does not cover the chance of training.
    Returns:
        LR, MLP and CNN, each in [0, 1]; ``chance`` is the commonest label for everybody.
    Raises:
        ValueError: see :func:`agent.evaluation.utility.tstr`.
        DivergedError: the CNN's answers are not numbers.
    """
    how = Resampling(200)
    found = {name: tstr(release, held_out, train, seeds, rng, how) for name, train in trainers(recipe).items()}
    return {name: one.figures[0] for name, one in found.items()}


def _fitted(model: LogisticRegression | MLPClassifier, release: Examples) -> Classifier:
    if len(np.unique(release.grades)) < 2:
        raise ValueError("the release has one grade only")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # the defaults are the paper's, whether they converge or not
        model.fit(_flat(release.images), release.grades)

    def classify(unseen: NDArray[np.float32]) -> Grades:
        return np.asarray(model.predict(_flat(unseen)), np.int64)

    return classify


def _flat(images: NDArray[np.float32]) -> NDArray[np.float32]:
    return images.reshape(len(images), -1)
