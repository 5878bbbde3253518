"""The law of the highest scores of pairs of two persons: from a score to a false-match rate that nobody could count.

An image compared with N others is matched falsely with probability 1 - (1 - FMR)^N. For a gallery of 25,000 and five
in a hundred the rate of one comparison is 2e-6: rarer than any pair of a held-out set. So the highest of the held-out
scores are given a law, the generalised Pareto distribution above a start (Pickands 1975; Coles 2001, chapter 4), by
probability-weighted moments (Hosking & Wallis 1987), and the law says what is rarer still.

Pairs share people. The law is drawn again by *person* (Owen 2007's pigeonhole bootstrap: a pair weighs the product of
its persons' weights), which errs on the wide side where pairs are nearly independent; no scheme is exact
(McCullagh 2000). Probes differ too: some look like many. Then 1 - (1 - FMR)^N with the mean rate is an upper bound of
the mean probability (Jensen: the function is concave in the rate), and all but equal to it where it is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import exp, expm1, inf, isfinite, isnan, log, log1p
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protos.common.errors import TrainingError

FEWEST: Final = 30  # persons: 435 pairs at least, 43 of them above the start
REPLICATES: Final = 200
LARGEST_SHARE: Final = 0.1  # of the pairs above the start: more is no tail
FEWEST_ABOVE: Final = 500  # pairs above the start, where so many are no more than LARGEST_SHARE of all
SMALLEST_SHARE: Final = 0.005
STEEPEST: Final = -0.25  # shape; a law that falls faster would rest on a few of the highest scores
_MOST_PIECES: Final = 10_000
Scores = NDArray[np.float64]


class TooFewScoresError(TrainingError, ValueError):
    """Too few persons, or too little difference between them, for a law. The text does not say how many."""

    def __init__(self) -> None:
        """Say only what is needed."""
        super().__init__(f"a false-match rate is calibrated on {FEWEST} persons at least, whose scores differ")


@dataclass(frozen=True, slots=True)
class Tail:
    """P(score > s) = share (1 + shape (s - start) / scale)^(-1/shape) for one pair of two persons, s >= start.

    The shape is never above 0, an exponential tail. A network's score of two images has a largest value, so no
    heavier law can be true of it; what looks heavier (one person under two names, twins) would lift the threshold
    without limit, and a threshold too low only drops images that might have stayed.
    """

    start: float  # the highest score below which the law says nothing
    share: float  # of the pairs above it
    shape: float  # in [STEEPEST, 0]; 0 is exponential
    scale: float  # > 0, in units of the score
    people: int
    pairs: int  # of two persons' images
    replicates: tuple[tuple[float, float, float], ...]  # (share, shape, scale), drawn again by person

    def __post_init__(self) -> None:
        """Refuse what is no law."""
        if type(self.start) is not float or not isfinite(self.start):
            raise ValueError("a tail starts at a number")
        if type(self.people) is not int or type(self.pairs) is not int or not self.people >= FEWEST:
            raise TooFewScoresError
        if not self.pairs >= self.people * (self.people - 1) // 2:
            raise ValueError("every two persons make a pair")
        _checked(self.share, self.shape, self.scale, least=1.0 / self.pairs)
        if type(self.replicates) is not tuple or not 2 <= len(self.replicates) <= _MOST_PIECES:
            raise ValueError("a tail has replicates, by which it is known how sure it is")
        for replicate in self.replicates:
            if type(replicate) is not tuple or len(replicate) != 3:
                raise ValueError("a replicate is a share, a shape and a scale")
            _checked(*replicate, least=0.0)

    def rate(self, score: float) -> float:
        """The false-match rate of one comparison at a threshold; 1 below the start, where the law says nothing.

        Raises:
            ValueError: NaN.
        """
        if isnan(score):
            raise ValueError("NaN is no score")
        return 1.0 if score < self.start else _survival(score - self.start, self.share, self.shape, self.scale)

    def threshold(self, comparisons: int, false_matches: float) -> float:
        """δ: the score that an image of nobody, compared with so many, reaches with so great a probability.

        It may lie above every score that was seen: an extrapolation, bounded by the exponential law. It is never
        below the start, however many false matches are allowed.

        Args:
            comparisons: N, images of the gallery.
            false_matches: P(false) = 1 - (1 - FMR)^N, in (0, 1).
        Raises:
            ValueError: no comparison, or no probability.
        """
        _positive(comparisons)
        if not 0.0 < false_matches < 1.0:
            raise ValueError("a false-match probability lies between 0 and 1")
        rate = -expm1(log1p(-false_matches) / comparisons)
        if not rate < self.share:
            return self.start
        far = log(self.share / rate)
        return self.start + self.scale * (far if self.shape == 0.0 else expm1(self.shape * far) / self.shape)

    def false_match(self, comparisons: int, threshold: float) -> float:
        """1 - (1 - FMR)^N at a threshold: the inverse of :meth:`threshold`."""
        _positive(comparisons)
        return _any(self.rate(threshold), comparisons)

    def interval(self, comparisons: int, threshold: float) -> tuple[float, float]:
        """95 % of the probability that an image of nobody is matched at that threshold, by the replicates.

        Raises:
            ValueError: no comparison, or NaN.
        """
        _positive(comparisons)
        own = self.false_match(comparisons, threshold)
        if threshold < self.start:
            return self.share, 1.0
        above = threshold - self.start
        told = [_any(_survival(above, *replicate), comparisons) for replicate in self.replicates]
        low, high = (float(v) for v in np.quantile(told, (0.025, 0.975)))
        return min(low, own), max(high, own)


def fit_tail(scores: Scores, owners: NDArray[np.int64], rng: np.random.Generator) -> Tail:
    """The law of the highest scores of pairs of images of two persons.

    Args:
        scores: (n, n), symmetric, of every image with every other; the diagonal and pairs of one person are unread.
        owners: (n,): whose each is.
        rng: draws people again. It decides the interval only.
    Raises:
        TooFewScoresError: fewer than ``FEWEST`` persons, or scores that hardly differ.
        ValueError: other shapes, or a score that is not finite or not symmetric.
    """
    if scores.ndim != 2 or scores.shape != (len(owners), len(owners)) or owners.ndim != 1:
        raise ValueError("scores are (n, n) and owners (n,)")
    names, who = np.unique(owners, return_inverse=True)
    if not len(names) >= FEWEST:
        raise TooFewScoresError
    a, b = (axis.astype(np.int64) for axis in np.triu_indices(len(owners), 1))
    a, b = a[who[a] != who[b]], b[who[a] != who[b]]
    values, turned = scores[a, b].astype(np.float64), scores[b, a].astype(np.float64)
    values = values / 2.0 + turned / 2.0
    if not bool(np.isfinite(values).all()) or not np.allclose(values, turned, rtol=1e-5, atol=1e-6):
        raise ValueError("scores are finite, and the same in both directions")
    share = float(np.clip(FEWEST_ABOVE / len(values), SMALLEST_SHARE, LARGEST_SHARE))
    start = float(np.quantile(values, 1.0 - share, method="lower"))
    above = np.flatnonzero(values > start)
    above = above[np.argsort(values[above], kind="stable")]
    excess, first, second = values[above] - start, who[a[above]], who[b[above]]
    law = _moments(excess, np.ones(len(excess)))
    if law is None or not len(excess) >= share * len(values) / 2:  # so many ties that the start is no quantile
        raise TooFewScoresError
    edges = first, second, np.bincount(who).astype(np.float64)
    replicates = tuple(_again(excess, edges, rng) for _ in range(REPLICATES))
    told = tuple(replicate for replicate in replicates if replicate is not None)
    return Tail(start, len(excess) / len(values), *law, len(names), len(values), told)


def _again(
    excess: Scores, edges: tuple[NDArray[np.int64], NDArray[np.int64], Scores], rng: np.random.Generator
) -> tuple[float, float, float] | None:
    """The law of people drawn again; None where hardly anybody above the start was drawn."""
    first, second, pictures = edges  # whose the pairs above the start are, and how many images each person has
    people = len(pictures)
    drawn = np.bincount(rng.integers(0, people, people), minlength=people).astype(np.float64)
    weights, counted = drawn[first] * drawn[second], drawn * pictures
    law = _moments(excess, weights)
    pairs = float(counted.sum() ** 2 - (counted**2).sum()) / 2.0
    return None if law is None else (min(1.0, float(weights.sum()) / pairs), *law)


def tail_from(told: Mapping[str, Any]) -> Tail:
    """A tail as a file's configuration tells it: ``dataclasses.asdict``, by way of JSON.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(told, Mapping) or told.keys() != {f.name for f in fields(Tail)}:
        raise ValueError("unknown or missing keys of Tail")
    if not isinstance(told["replicates"], (list, tuple)):
        raise ValueError("a tail has replicates, by which it is known how sure it is")
    replicates = tuple(tuple(r) if isinstance(r, (list, tuple)) else r for r in told["replicates"])
    return Tail(**{**told, "replicates": replicates})


def _moments(excess: Scores, weights: Scores) -> tuple[float, float] | None:
    """Shape and scale from weighted excesses in rising order (Hosking & Wallis 1987, section 4; k there is -shape).

    Where the law would end below a score that was seen, its end is moved there (Dupuis & Tsai 1998).
    """
    total = float(weights.sum())
    if not np.count_nonzero(weights) >= 10:
        return None
    below = (np.cumsum(weights) - 0.65 * weights) / total  # their plotting positions, (j - 0.35) / n, with weights
    a0 = float((weights * excess).sum()) / total
    a1 = float((weights * excess * (1.0 - below)).sum()) / total
    if not (a0 > 0.0 and 0.0 < a0 - 2.0 * a1 < inf):
        return None
    shape = 2.0 - a0 / (a0 - 2.0 * a1)
    if not shape < 0.0:
        return 0.0, a0  # the exponential law of the same mean
    shape = max(shape, STEEPEST)
    scale = a0 * (1.0 - shape)  # the mean of the law is scale / (1 - shape)
    highest = float(excess[weights > 0.0][-1])
    if highest >= -scale / shape:  # scale = -shape end, and the mean stays: -shape end / (1 - shape) = a0
        shape = -a0 / (highest - a0)
        scale = a0 * (1.0 - shape)
    return shape, scale


def _survival(above: float, share: float, shape: float, scale: float) -> float:
    z = above / scale
    if shape == 0.0:
        return share * exp(-z)
    left = 1.0 + shape * z
    return share * left ** (-1.0 / shape) if left > 0.0 else 0.0


def _any(rate: float, comparisons: int) -> float:
    return 1.0 if rate >= 1.0 else -expm1(comparisons * log1p(-rate))


def _positive(comparisons: int) -> None:
    if type(comparisons) is not int or not comparisons >= 1:
        raise ValueError("an image is compared with one other at least")


def _checked(share: float, shape: float, scale: float, least: float) -> None:
    if not all(type(v) is float for v in (share, shape, scale)):
        raise ValueError("a law is made of numbers")
    if not (least <= share <= 1.0 and STEEPEST <= shape <= 0.0 and 0.0 < scale < inf):
        raise ValueError("a tail has a share in (0, 1], a shape between an end and an exponential, and a scale")
