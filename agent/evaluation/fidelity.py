"""Fidelity: how far the distribution of released images is from that of real ones, in a named network's features.

Fréchet distance (Heusel et al. 2017; k-SALSA, section 4.3 and supplement I), KID (Bińkowski et al. 2018), improved
precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020). A score without its network
means nothing, so the network's name and hash are part of the result, and so is the score of real held-out images
against the same reference: the best that any release could hope for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf
from torch import Tensor

from agent.intervals import Figure, Interval, Resampling, Units, centred, finite, percentile, resampled, table
from agent.models.image_tensors import to_tensor
from agent.models.weights import Origin
from protos.common.errors import RefusedError

Values = NDArray[np.float64]  # (n, d)
Covariance = Literal["full", "shrunk", "singular"]
LEAST: Final = 10  # images of any set
_CHUNK: Final = 1024  # rows of one block of distances


class Extractor(Protocol):
    """What a fidelity score is measured with; every ``FeatureNet`` is one."""

    @property
    def name(self) -> str:
        """Of the network and its settings."""

    @property
    def origin(self) -> Origin:
        """Where it comes from."""

    def embed(self, images: Tensor) -> Tensor:
        """(n, c, h, w) in [-1, 1] as (n, d)."""


class TooFewImagesError(RefusedError, ValueError):
    """Too few images for the score. The text never says how many there are (P14)."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features of one set of images, and the network that computed them."""

    values: Values  # (n, d)
    units: NDArray[np.int64]  # (n,): the patient of every image; of a released image its own number
    extractor: str
    origin: Origin

    def __post_init__(self) -> None:
        """Refuse what is not finite, too small to say anything, or without a unit for each row."""
        if self.values.ndim != 2 or self.values.dtype != np.float64 or self.units.shape != self.values.shape[:1]:
            raise ValueError("features are (n, d) float64 with one unit for each row")
        if len(self.values) < LEAST or self.values.shape[1] < 1:
            raise TooFewImagesError("too few images for a measure of fidelity")
        if not bool(np.isfinite(self.values).all()):
            raise ValueError("features must be finite")


def describe(net: Extractor, images: NDArray[np.float32], units: NDArray[np.int64], batch: int = 64) -> Features:
    """The features of images (n, h, w[, 3]) in [0, 1], computed ``batch`` at a time without gradients.

    Raises:
        TooFewImagesError: fewer than ``LEAST`` images.
        ValueError: an image or a feature is not finite, or the shapes do not fit.
    """
    if len(images) < LEAST:
        raise TooFewImagesError("too few images for a measure of fidelity")
    if not bool(np.isfinite(images).all()):
        raise ValueError("images must be finite")
    with torch.no_grad():
        parts = [net.embed(to_tensor(images[a : a + batch])).double().cpu() for a in range(0, len(images), batch)]
    return Features(torch.cat(parts).numpy(), units, net.name, net.origin)


@dataclass(frozen=True, slots=True, eq=False)
class Sets:
    """What is compared: the release with real images, and other patients' real images with the same."""

    reference: Features  # real images; k-SALSA takes the whole original data set
    synthetic: Features
    held_out: Features  # real images of other patients than the reference's

    def __post_init__(self) -> None:
        """One network for all three, and no patient on both sides of the baseline."""
        sets = (self.reference, self.synthetic, self.held_out)
        if len({(s.extractor, s.origin.sha256, s.values.shape[1]) for s in sets}) != 1:
            raise ValueError("features of different networks cannot be compared")
        if np.intersect1d(self.reference.units, self.held_out.units).size:
            raise ValueError("a patient is both in the reference and held out")


@dataclass(frozen=True, slots=True)
class FidelityPlan:
    """How fidelity is measured.

    ``covariance`` of the Fréchet distance: ``full`` refuses fewer than d + 1 images; ``shrunk`` is that of Ledoit and
    Wolf 2004; ``singular`` is the published practice, whatever the number of images, and biased upwards.
    """

    covariance: Covariance = "full"
    neighbours: int = 5
    subsets: int = 100
    subset: int = 100
    resampling: Resampling = field(default_factory=lambda: Resampling(200))

    def __post_init__(self) -> None:
        """Refuse an unknown covariance and empty subsets."""
        if self.covariance not in get_args(Covariance):
            raise ValueError("covariance is full, shrunk or singular")
        if not 1 <= self.neighbours < LEAST - 1 or not self.subsets >= 2 or not self.subset >= 2:
            raise ValueError("neighbours lie in [1, 8], subsets and their size are 2 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Fidelity:
    """The scores of a release. ``chance`` of a figure is the held-out baseline's value."""

    extractor: str
    origin: Origin
    covariance: Covariance
    figures: tuple[Figure, ...]
    baseline: tuple[Figure, ...]  # held-out real images against the same reference
    kid_subsets: tuple[float, float]  # mean and standard deviation over subsets
    equal_size: bool  # the baseline has as many images as the release; scores of few images are worse

    def table(self) -> str:
        """Both rows of figures, with the network's name."""
        what = f"{self.extractor} ({self.origin.provenance}, {self.origin.sha256[:12]}), covariance {self.covariance}"
        size = "" if self.equal_size else " -- the baseline has fewer images than the release"
        return f"{table(self.figures, what)}\n{table(self.baseline, f'held-out real images{size}')}"


def fidelity(sets: Sets, plan: FidelityPlan, rng: np.random.Generator) -> Fidelity:
    """Every score of the release and of the held-out baseline, which is cut to as many images at random.

    Raises:
        TooFewImagesError: ``plan.covariance`` is full and a set has fewer than d + 1 images.
    """
    held, size = sets.held_out, len(sets.synthetic.values)
    if len(held.values) > size:
        rows = np.sort(rng.choice(len(held.values), size, replace=False))
        held = Features(held.values[rows], held.units[rows], held.extractor, held.origin)
    baseline = _scores(sets.reference, held, plan, rng)
    found = _scores(sets.reference, sets.synthetic, plan, rng)
    figures = tuple(
        Figure(f.name, f.value, f.interval, b.value, f.trials) for f, b in zip(found, baseline, strict=True)
    )
    subsets = kid_subsets(sets.reference.values, sets.synthetic.values, plan.subset, plan.subsets, rng)
    reference = sets.reference
    equal = len(held.values) == size
    return Fidelity(reference.extractor, reference.origin, plan.covariance, figures, baseline, subsets, equal)


def frechet(a: Values, b: Values, covariance: Covariance = "full") -> float:
    """The Fréchet distance of two normal distributions fitted to (n, d) and (m, d) (Heusel et al. 2017, Eq. 6).

    |mu_a - mu_b|^2 + tr(A) + tr(B) - 2 tr((A B)^(1/2)). The last trace is the sum of the singular values of F G^T for
    any A = F^T F and B = G^T G: no square root of a product, which is not symmetric, and nothing complex to drop.

    Raises:
        TooFewImagesError: ``covariance`` is full and there are fewer than d + 1 rows, so a covariance has no inverse.
    """
    if covariance == "full" and not min(len(a), len(b)) > a.shape[1]:
        raise TooFewImagesError(
            "a full covariance needs more images than features; choose a shrunk one, or a smaller network"
        )
    f, g = _factor(a, covariance), _factor(b, covariance)
    cross = float(np.linalg.svd(f @ g.T, compute_uv=False).sum())
    means = float(((a.mean(axis=0) - b.mean(axis=0)) ** 2).sum())
    return max(0.0, means + float((f * f).sum()) + float((g * g).sum()) - 2.0 * cross)


def _factor(x: Values, covariance: Covariance) -> Values:
    """F with F^T F = the covariance of x: (min(n, d), d)."""
    n, d = x.shape
    if covariance == "shrunk":
        values, vectors = np.linalg.eigh(ledoit_wolf(x)[0])
        root: Values = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
        return root
    scaled: Values = (x - x.mean(axis=0)) / np.sqrt(n - 1)
    if n <= d:
        return scaled
    upper: Values = np.asarray(np.linalg.qr(scaled, mode="r"))
    return upper


def kid(a: Values, b: Values) -> float:
    """The kernel inception distance: the unbiased squared MMD with (x.y/d + 1)^3 (Bińkowski et al. 2018, Eq. 4).

    Unbiased, so it may be a little below 0 for equal distributions.
    """
    ones_a, ones_b = np.ones(len(a)), np.ones(len(b))
    return _mmd(_kernels(a, b), ones_a, ones_b)


def kid_subsets(a: Values, b: Values, size: int, count: int, rng: np.random.Generator) -> tuple[float, float]:
    """Mean and standard deviation of KID over ``count`` pairs of subsets of at most ``size``: the usual print."""
    m, n = min(size, len(a)), min(size, len(b))
    each = [
        kid(a[rng.choice(len(a), m, replace=False)], b[rng.choice(len(b), n, replace=False)]) for _ in range(count)
    ]
    return float(np.mean(each)), float(np.std(each, ddof=1))


def _kernels(a: Values, b: Values) -> tuple[Values, Values, Values]:
    d = a.shape[1]
    xx, yy = (a @ a.T / d + 1.0) ** 3, (b @ b.T / d + 1.0) ** 3
    np.fill_diagonal(xx, 0.0)
    np.fill_diagonal(yy, 0.0)
    return xx, yy, (a @ b.T / d + 1.0) ** 3


def _mmd(kernels: tuple[Values, Values, Values], u: Values, v: Values) -> float:
    """The U-statistic with rows counted u and v times; a row is never paired with its own copy."""
    xx, yy, xy = kernels
    within = (u @ xx @ u) / (u.sum() ** 2 - u @ u) + (v @ yy @ v) / (v.sum() ** 2 - v @ v)
    return float(within - 2.0 * (u @ xy @ v) / (u.sum() * v.sum()))


def manifold(real: Values, fake: Values, neighbours: int) -> tuple[NDArray[np.float64], ...]:
    """The terms whose means are precision, density (per fake image), recall and coverage (per real image).

    Precision and recall: Kynkäänniemi et al. 2019, Eq. 1-2: inside the ball of some image of the other set, which
    reaches to its ``neighbours``-th neighbour in its own set. Density and coverage: Naeem et al. 2020, Eq. 5-6.

    Raises:
        TooFewImagesError: a set has no ``neighbours``-th neighbour.
    """
    if not min(len(real), len(fake)) > neighbours:
        raise TooFewImagesError("too few images for so many neighbours")
    centre = real.mean(axis=0)  # distances by products of rows lose digits far from the origin
    real, fake = real - centre, fake - centre
    real_reach, fake_reach = _reach(real, neighbours), _reach(fake, neighbours)
    inside, recall, coverage = np.zeros(len(fake)), np.zeros(len(real)), np.zeros(len(real))
    for a in range(0, len(real), _CHUNK):
        block = slice(a, a + _CHUNK)
        far = _distances(real[block], fake)
        within = far <= real_reach[block, None]
        inside += within.sum(axis=0)
        coverage[block] = within.any(axis=1)
        recall[block] = (far <= fake_reach).any(axis=1)
    return (inside > 0).astype(np.float64), inside / neighbours, recall, coverage


def _reach(x: Values, neighbours: int) -> Values:
    """(n,): the distance to the ``neighbours``-th neighbour, oneself not counted."""
    blocks = [
        np.partition(_distances(x[a : a + _CHUNK], x), neighbours, axis=1)[:, neighbours]
        for a in range(0, len(x), _CHUNK)
    ]
    reach: Values = np.concatenate(blocks)
    return reach


def _distances(a: Values, b: Values) -> Values:
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2.0 * (a @ b.T)
    distances: Values = np.sqrt(np.maximum(squared, 0.0))
    return distances


def _scores(real: Features, other: Features, plan: FidelityPlan, rng: np.random.Generator) -> tuple[Figure, ...]:
    a, b = real.values, other.values
    ours, theirs = Units(real.units), Units(other.units)
    value = frechet(a, b, plan.covariance)
    level, count = plan.resampling.level, plan.resampling.count
    # A resampled set has fewer distinct rows than the set, so its covariance may be singular: it is only a draw.
    drawn = "singular" if plan.covariance == "full" else plan.covariance
    draws = finite(np.array([frechet(a[ours.draw(rng)], b[theirs.draw(rng)], drawn) for _ in range(count)]))
    figures = [Figure("Fréchet distance", value, centred(draws, value, level), None, len(theirs))]
    figures.append(_kid_figure(a, b, (ours, theirs), plan.resampling, rng))
    terms = manifold(a, b, plan.neighbours)
    sides = (("precision", theirs), ("density", theirs), ("recall", ours), ("coverage", ours))
    for (name, units), term in zip(sides, terms, strict=True):
        mean = float(term.mean())
        interval = _of_mean(term, units, plan.resampling, rng)
        figures.append(Figure(name, mean, interval, None, len(units)))
    return tuple(figures)


def _kid_figure(
    a: Values, b: Values, units: tuple[Units, Units], how: Resampling, rng: np.random.Generator
) -> Figure:
    kernels = _kernels(a, b)
    value = _mmd(kernels, np.ones(len(a)), np.ones(len(b)))
    draws = [
        _mmd(
            kernels,
            np.bincount(units[0].draw(rng), minlength=len(a)).astype(np.float64),
            np.bincount(units[1].draw(rng), minlength=len(b)).astype(np.float64),
        )
        for _ in range(how.count)
    ]
    return Figure("KID", value, percentile(np.array(draws), value, how.level), None, len(units[1]))


def _of_mean(terms: NDArray[np.float64], units: Units, how: Resampling, rng: np.random.Generator) -> Interval:
    """Of a mean over images of one side; the other side's balls are held fixed, since copies would shrink them."""
    draws = resampled(lambda rows: (float(terms[rows].mean()),), units, rng, how.count)[:, 0]
    return percentile(draws, float(terms.mean()), how.level)
