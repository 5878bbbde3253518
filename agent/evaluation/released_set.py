"""Evaluate a released image set on held-out patients: fidelity, utility and semantics at once.

PrivImage's figures (section 4.3): a Fréchet distance, the accuracy of LR, MLP and CNN trained on the set and tested
on real images, and the semantic distribution similarity of Eq. 5. Each has an interval by patient, and the figure
that it is to be held against. All are computed from patients: they are for the site's eyes. Nothing is chosen here.

The three classifiers of PrivImage (section 4.3, supplement C.3), trained on a release and tested on real patients.

Logistic regression and a multi-layer perceptron are scikit-learn's with their own defaults, on pixels in [0, 1]. The
paper's third is the ResNet-9 of FFCV, which has batch norm and some 6 million weights; ours is the small network of
:mod:`agent.evaluation.utility`, which is made for a thousandth of the images. Nothing is chosen on the test set.

How near the semantics of two sets of images are (PrivImage, Eq. 5): a check that a selection selected something.

The paper's V turns a *word*, the name of a semantic, into its embedding (GloVe). There are no word vectors here, and
a public set of letters has no words: a semantic's vector is any row of a (NS, d) matrix, such as the weights of a
classifier's last layer for that semantic, or the mean of a public network's features over the images that have it
(:func:`class_means`). Figures with different vectors do not compare. The frequencies of a private set are private: a
similarity computed from them is for the site's eyes, or is charged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from agent.domain import Cohort, SyntheticSet
from agent.errors import DivergedError
from agent.evaluation.fidelity import Features, Fidelity, FidelityPlan, Sets, TooFewImagesError, describe, fidelity
from agent.evaluation.utility import Classifier, Examples, Grades, Recipe, Train, network_trainer, tstr
from agent.intervals import Figure, Interval, Resampling, Units, percentile, resampled, wilson
from agent.mechanisms.privimage.semantic_query import NothingSelectedError, SemanticQuery, chosen, selection
from agent.models.features.extractors import RandomFeatures
from agent.models.semantics.classifier import Semantics
from protos.common.errors import RefusedError

Vectors = NDArray[np.float64]  # (NS, d)


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """The semantics of a set of images: how often each occurs, and the vector of each."""

    frequencies: NDArray[np.float64]  # (NS,): w, not negative; they sum to 1
    vectors: Vectors

    def __post_init__(self) -> None:
        """Frequencies are a distribution; a vector of length 0 has no direction, unless nothing has that semantic."""
        w, v = self.frequencies, self.vectors
        if w.ndim != 1 or v.ndim != 2 or len(w) != len(v) or not len(w):
            raise ValueError("semantics are (NS,) frequencies with (NS, d) vectors")
        if not bool(np.isfinite(v).all()) or not (w >= 0).all() or not abs(float(w.sum()) - 1.0) <= 1e-9:
            raise ValueError("vectors are finite; frequencies are not negative and sum to 1")
        if not (np.linalg.norm(v[w > 0], axis=1) > 0).all():
            raise ValueError("a semantic that occurs has a vector that is not 0")


def frequencies(labels: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """How often each of ``count`` semantics is among labels (n,), as shares. Raises: ValueError: none, or unknown."""
    if not len(labels) or not 0 <= labels.min() <= labels.max() < count:
        raise ValueError("labels are 0 .. count-1, and there is one")
    return np.bincount(labels, minlength=count).astype(np.float64) / len(labels)


def class_means(features: Vectors, labels: NDArray[np.int64], count: int, centre: NDArray[np.float64]) -> Vectors:
    """The vector of each semantic: its images' mean feature, less a public centre; 0 where there is no image.

    Args:
        features: (n, d), of a public network.
        labels: (n,), 0 .. count-1.
        count: NS.
        centre: (d,), the mean feature of a public set, the same for all sets that shall be compared. Without it, all
            means of features that are never negative have nearly one direction.
    Raises:
        ValueError: shapes or labels do not fit.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1] or centre.shape != features.shape[1:]:
        raise ValueError("features are (n, d), with a label for each row and a centre (d,)")
    shares = frequencies(labels, count)
    sums = np.zeros((count, features.shape[1]))
    np.add.at(sums, labels, features - centre)
    out: Vectors = sums / np.maximum(shares * len(labels), 1.0)[:, None]
    return out


def similarity(first: Meaning, second: Meaning) -> float:
    """SDS(D1, D2) of Eq. 5, in [-1, 1]: the cosine of two semantics, weighted by how often each occurs in its set.

    Raises:
        ValueError: the vectors are of different spaces.
    """
    if first.vectors.shape[1] != second.vectors.shape[1]:
        raise ValueError("vectors of different length are of different spaces")
    # Eq. 5 is a product of two sums: sum_i w_1^i V(s_1^i)/|V(s_1^i)|, and the same of the other set
    return float(_direction(first) @ _direction(second))


def _direction(of: Meaning) -> NDArray[np.float64]:
    lengths = np.linalg.norm(of.vectors, axis=1)
    out: NDArray[np.float64] = (of.frequencies / np.where(lengths > 0, lengths, 1.0)) @ of.vectors
    return out


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


LEAST: Final = 20  # held-out patients: figures of fewer say more of them than of the set
_LOOKED_AT: Final = 2000  # images of one side of a Fréchet distance, at most
_TAUGHT: Final = 5000  # images that a classifier is trained on, at most
_STEPS: Final = 1500  # of the CNN, about
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is computed. None of it is chosen by a figure."""

    recipe: Recipe | None = None  # of the CNN; None: about ``_STEPS`` steps at the images' own size, 64 px at most
    seeds: tuple[int, ...] = (0, 1, 2)  # of trainings; every accuracy is the mean over them
    draws: int = 100  # of every bootstrap


class TooFewPatientsError(RefusedError, ValueError):
    """Too few held-out patients to measure by. The text never says how many there are."""


@dataclass(frozen=True, slots=True, eq=False)
class SemanticsQuery:
    """The public side of a query for semantics (PrivImage, sections 3.2 and 3.3)."""

    semantics: Semantics
    images: NDArray[np.uint8]  # (n, s, s[, 3]): the public images
    bins: NDArray[np.int64]  # (n,)
    query: SemanticQuery


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """The set under evaluation, its permitted labels, and its semantics query, if any."""

    made: SyntheticSet
    classes: tuple[str, ...]  # labels of the set
    labels: tuple[str, ...]  # of patients' images that count; other than ``classes`` when those are pooled
    asked: SemanticsQuery | None = None

    def __post_init__(self) -> None:
        """Refuse a set of other labels, or of another size than what it was asked by."""
        if not set(self.made.labels) <= set(self.classes):
            raise ValueError(
                "the set has labels that the configuration does not draw: it was made with another configuration"
            )
        if not len(self.made.images):
            raise ValueError("the set has no images")


@dataclass(frozen=True, slots=True)
class ClassifierResult:
    """One classifier, trained on the set and tested on real images."""

    name: str
    accuracy: Figure  # ``chance``: the commonest label for everybody
    recalls: tuple[Figure, ...]  # of each class that the held-out images have
    seeds: int


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The figures of one look; a sentence where a part could not be measured."""

    fidelity: Fidelity | str
    taught: tuple[ClassifierResult, ...] | str
    semantics: tuple[Figure, ...] | str
    classes: tuple[str, ...]
    patients: int


@dataclass(frozen=True, slots=True, eq=False)
class _Real:
    """The held-out images, row by row."""

    images: NDArray[np.float32]
    labels: tuple[str, ...]
    patients: NDArray[np.int64]  # (n,): whose each is
    count: int


def evaluate(
    subject: Subject,
    held_out: Cohort,
    rng: np.random.Generator,
    say: Say = lambda _told: None,
    effort: Effort | None = None,
) -> Evaluation:
    """Every figure of a set, on patients of whom it knows nothing.

    Args:
        subject: what is judged.
        held_out: the patients, their images of the set's size.
        rng: of halves, samples and intervals.
        say: told what is measured next.
        effort: how much is computed.
    Returns:
        Figures, each with its interval by patient.
    Raises:
        TooFewPatientsError: fewer than ``LEAST`` have images that count.
        ValueError: images of another size.
    """
    real, effort = _rows(held_out, subject), effort or Effort()
    say("Fréchet distance to one half of the held-out patients")
    near = _fidelity(subject.made, real, effort, rng)
    taught = _taught(subject, real, effort, rng, say)
    say("semantics: of the set, and of the public images")
    return Evaluation(near, taught, _similarities(subject, real, effort, rng), subject.classes, real.count)


def _rows(held_out: Cohort, subject: Subject) -> _Real:
    found = [
        (number, image)
        for number, patient in enumerate(held_out.patients)
        for image in patient.images
        if image.label in subject.labels
    ]
    patients = np.array([number for number, _ in found], np.int64)
    count = len(np.unique(patients))
    if not count >= LEAST:
        raise TooFewPatientsError("too few held-out patients with images of these classes: hold a larger part out")
    images = np.stack([image.pixels for _, image in found])
    if images.shape[1:] != subject.made.images.shape[1:]:
        raise ValueError("the set's images do not have the size of the patients' images under this configuration")
    return _Real(images, tuple(image.label for _, image in found), patients, count)


def _unit(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return images.astype(np.float32) / np.float32(255)


def _sample(count: int, most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At most so many rows, rising."""
    rows = np.arange(count) if count <= most else np.sort(rng.choice(count, most, replace=False))
    return rows.astype(np.int64)


def _eyes(images: NDArray[Any]) -> RandomFeatures:
    """Random features of 224 numbers: few enough for a covariance of some hundred images."""
    return RandomFeatures(width=16, depth=3, channels=3 if images.ndim == 4 else 1)


def _fidelity(made: SyntheticSet, real: _Real, effort: Effort, rng: np.random.Generator) -> Fidelity | str:
    """Of the set against one half of the patients, and of the other half against the same."""
    people = rng.permutation(np.unique(real.patients))
    first = np.isin(real.patients, people[: len(people) // 2])
    net = _eyes(real.images)

    def seen(mine: NDArray[np.bool_]) -> Features:
        rows = np.flatnonzero(mine)
        rows = rows[_sample(len(rows), _LOOKED_AT, rng)]
        return describe(net, real.images[rows], real.patients[rows])

    rows = _sample(len(made.images), _LOOKED_AT, rng)
    try:
        synthetic = describe(net, _unit(made.images[rows]), np.arange(len(rows)))
        plan = FidelityPlan("shrunk", subsets=2, resampling=Resampling(effort.draws))
        return fidelity(Sets(seen(first), synthetic, seen(~first)), plan, rng)
    except TooFewImagesError:
        return "the set has too few images for a Fréchet distance"


def recipe_for(pictures: int, side: int) -> Recipe:
    """The CNN's: about ``_STEPS`` steps, whatever the size of the set."""
    return Recipe(epochs=max(5, min(60, _STEPS * 32 // pictures)), side=max(8, min(64, side)))


def _taught(
    subject: Subject, real: _Real, effort: Effort, rng: np.random.Generator, say: Say
) -> tuple[ClassifierResult, ...] | str:
    """LR, MLP and CNN, trained on the set and tested on the held-out images."""
    if subject.classes != subject.labels:
        return "all images of the set are of one class: there is nothing to learn"
    known = [subject.classes.index(label) for label in subject.made.labels]
    if len(set(known)) < 2 or len(set(real.labels)) < 2:
        return "the set or the held-out images are of one class: there is nothing to learn"
    rows = _sample(len(known), _TAUGHT, rng)
    number = len(subject.classes)
    shown = Examples(_unit(subject.made.images[rows]), np.array(known, np.int64)[rows], rows, number)
    truth = np.array([subject.classes.index(label) for label in real.labels], np.int64)
    tested = Examples(real.images, truth, real.patients, number)
    recipe = effort.recipe or recipe_for(len(rows), shown.images.shape[1])
    out = []
    for name, train in trainers(recipe).items():
        say(f"{name}: trained on the set, tested on held-out patients")
        seeds = effort.seeds[:1] if name == LR else effort.seeds  # a seed of LR changes nothing
        try:
            figures = tstr(shown, tested, train, seeds, rng, Resampling(effort.draws)).figures
        except (DivergedError, ValueError) as fault:
            return f"{name}: {' '.join(str(fault).split())}"  # a library's text may be of several lines
        recalls = zip(figures[2:], sorted(set(truth.tolist())), strict=True)
        named = tuple(replace(figure, name=subject.classes[place]) for figure, place in recalls)
        out.append(ClassifierResult(name, _sure(figures[0]), named, len(seeds)))
    return tuple(out)


def _sure(accuracy: Figure) -> Figure:
    """The wider of the bootstrap's interval by patient and Wilson's, which does not vanish when all are right.

    A patient's share of right answers varies no more than a coin of that chance, so Wilson's holds by patient too.
    """
    other = wilson(min(accuracy.value, 1.0) * accuracy.trials, accuracy.trials)
    low, high = min(other.low, accuracy.interval.low), max(other.high, accuracy.interval.high)
    return replace(accuracy, interval=Interval(low, high))


def _similarities(
    subject: Subject, real: _Real, effort: Effort, rng: np.random.Generator
) -> tuple[Figure, ...] | str:
    """SDS with the held-out patients: of the set, of the public images, and of a selection of these without noise.

    A semantic's vector is the mean random feature of the public images that show it, less that of all. Eq. 5 has no
    fixed best value: a set's similarity to itself is 1 only if all of it shows one thing, so that comes first.
    """
    asked = subject.asked
    if asked is None:
        return "the configuration has no semantics"
    count = len(asked.semantics.bins)
    rows = _sample(len(asked.bins), _LOOKED_AT, rng)
    features = _embedded(_eyes(asked.images), asked.images[rows])
    vectors = class_means(features, asked.bins[rows], count, features.mean(axis=0))
    there = np.flatnonzero(np.linalg.norm(vectors, axis=1) > 0)
    if not len(there):
        return "the public images are all equal"
    probabilities = asked.semantics.probabilities(real.images)[:, there]
    bins = there[probabilities.argmax(axis=1)]
    others = {"the set": there[asked.semantics.probabilities(_unit(subject.made.images))[:, there].argmax(axis=1)]}
    others["all public images"] = asked.bins[np.isin(asked.bins, there)]
    best = _selected(subject, asked, real, probabilities, there)
    if best is not None:
        others["those that a histogram without noise would select"] = best
    meant = [Meaning(frequencies(found, count), vectors) for found in others.values()]
    own = Meaning(_weighted(bins, real.patients, count), vectors)

    def numbers(drawn: NDArray[np.int64]) -> Sequence[float]:
        theirs = Meaning(_weighted(bins[drawn], real.patients[drawn], count), vectors)
        return [similarity(one, theirs) for one in (own, *meant)]

    units, how = Units(real.patients), Resampling(effort.draws)
    values, draws = numbers(np.arange(len(bins))), resampled(numbers, units, rng, how.count)
    return tuple(
        Figure(name, value, percentile(draws[:, i], value, how.level), None, real.count)
        for i, (name, value) in enumerate(zip(("the patients themselves", *others), values, strict=True))
    )


def _embedded(net: RandomFeatures, images: NDArray[np.uint8]) -> NDArray[np.float64]:
    padded = np.resize(images, (max(10, len(images)), *images.shape[1:]))  # `describe` takes ten or more
    return describe(net, _unit(padded), np.arange(len(padded))).values[: len(images)]


def _weighted(bins: NDArray[np.int64], patients: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """How often each semantic is, all patients counting alike."""
    _, owner, each = np.unique(patients, return_inverse=True, return_counts=True)
    total = np.bincount(bins, weights=1.0 / each[owner], minlength=count)
    out: NDArray[np.float64] = total / total.sum()
    return out


def _selected(
    subject: Subject, asked: SemanticsQuery, real: _Real, probabilities: NDArray[np.float64], there: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """The semantics of the public images that these patients' own counts, without noise, would choose."""
    pooled = subject.classes != subject.labels
    counts = np.zeros((1 if pooled else len(subject.classes), len(asked.semantics.bins)))
    _, owner, each = np.unique(real.patients, return_inverse=True, return_counts=True)
    votes = np.argsort(-probabilities, axis=1, kind="stable")[:, : asked.query.votes]
    rows = [0 if pooled else subject.classes.index(label) for label in real.labels]
    np.add.at(counts, (np.array(rows)[:, None], there[votes]), (1.0 / each[owner])[:, None])
    try:
        places, _ = selection(asked.bins, chosen(counts, asked.query))
    except NothingSelectedError:
        return None
    found = asked.bins[places]
    return found[np.isin(found, there)]
