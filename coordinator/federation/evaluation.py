"""What the noisy sums of a look say: figures with intervals that cover the noise and the choice of held-out patients.

Every interval is found the same way. For a figure R there is a statistic T(R), computed from the sums, whose mean is
0 where R is the true one, and whose variance is known: that of the noise, which is public, and that of which patients
happened to be held out. The interval holds every R for which ``T(R)^2 <= z^2 Var T(R)``: Fieller's for a ratio
(1954), Wilson's for a rate where there is no noise (1927). It needs no large denominator. Where the sums say nothing,
it is the whole range.

Means of several figures have the interval of MOVER (Zou & Donner 2008): the distances to the figures' own limits,
added as squares. Where the figures are of the same patients (findings, structures) only the noise is independent: the
part of the patients is added as it is, which holds however the figures go together.

Everything here is post-processing: it reads no patient, and costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.federation.job import Job
from policies.tasks.evaluation import SumBlock, SumLayout, edges

Vector = NDArray[np.float64]
LEVEL: Final = 0.95
_GRID: Final = 4001  # candidates of a figure
LESS_IS_BETTER: Final = frozenset({"regression"})  # kinds of task whose first figure is an error


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval."""

    name: str
    value: float | None  # None: the sums say nothing of it
    low: float
    high: float

    def __str__(self) -> str:
        """For people."""
        span = f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.name} {span}" if self.value is None else f"{self.name} {self.value:.3f} ({span})"


@dataclass(frozen=True, slots=True)
class _Spread:
    """An estimate, and how much of its distance to the limits is noise."""

    told: Estimate
    below: float  # by the noise alone
    above: float


@dataclass(frozen=True, slots=True, eq=False)
class LookSums:
    """The sum of the sites' noisy sums of one look."""

    layout: SumLayout
    vector: Vector  # (layout.size,)
    noise: float  # standard deviation on each number

    def __post_init__(self) -> None:
        """A finite vector of the layout, and noise."""
        if self.vector.shape != (self.layout.size,) or not bool(np.isfinite(self.vector).all()):
            raise ValueError("the sums of a look are a finite vector of its layout")
        if not 0.0 < self.noise < math.inf:
            raise ValueError("the noise of a look is finite and positive")

    def counts(self, block: SumBlock) -> tuple[Vector, float]:
        """A block in patients, and the standard deviation of the noise on each of its numbers."""
        part = self.vector[block.start : block.start + block.size]
        return part / block.weight, self.noise / block.weight


def estimates(sums: LookSums, level: float = LEVEL) -> tuple[Estimate, ...]:
    """All figures of a look; the first is the one that rounds are compared by, the last the number of patients.

    Args:
        sums: of all sites.
        level: of each interval.
    """
    z = NormalDist().inv_cdf(0.5 + level / 2)
    form = "scores" if sums.layout.scored else sums.layout.kind
    return (*(one.told for one in _FIGURES[form](sums, z)), _patients(sums, z))


def best(looks: Sequence[LookSums]) -> tuple[int, Estimate]:
    """Which look is the best by its noisy figure, the later one of equals; and that figure.

    Whoever takes the best of several takes the luckiest: its interval is so wide that all of them together hold with
    the level of one (Bonferroni).
    """
    wide = 1.0 - (1.0 - LEVEL) / len(looks)
    found = [estimates(look, wide)[0] for look in looks]
    sign = -1.0 if looks[0].layout.kind in LESS_IS_BETTER else 1.0
    ranks = [(-math.inf if one.value is None else sign * one.value, index) for index, one in enumerate(found)]
    at = max(ranks)[1]
    return at, found[at]


def kept_look(folder: Path, job: Job, number: int) -> LookSums:
    """The sums of a look, turn ``number``, as the run keeps them in its folder.

    Raises:
        FileNotFoundError: it was not made.
        ValueError, KeyError, TypeError: the file is damaged.
    """
    told = json.loads((folder / f"round-{number}.look").read_bytes())
    return LookSums(job.layout(), np.array(told["sums"], np.float64), job.look_noise(len(told["sites"])))


# --- one figure


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Values that a figure may have, and for each of them T and the two parts of its variance."""

    values: Vector
    statistic: Vector
    noise: Vector
    patients: Vector


def _accepted(name: str, of: _Candidates, value: float, z: float) -> _Spread:
    """The candidates that the sums do not contradict, and those that the noise alone would leave."""
    candidates, statistic = of.values, of.statistic
    low, high = float(candidates[0]), float(candidates[-1])
    step = (high - low) / (len(candidates) - 1)
    before = np.append(np.diff(np.sign(statistic)) != 0, False)  # T is 0 between this candidate and the next

    def limits(variance: Vector) -> tuple[float, float]:
        held = candidates[(statistic**2 <= z**2 * variance) | before]
        if not held.size:  # the nearest is contradicted, and none lies in the range: nothing is said
            return low, high
        return max(low, float(held[0]) - step), min(high, float(held[-1]) + step)

    told = limits(of.noise + of.patients)
    if told == (low, high) or not math.isfinite(value):
        return _Spread(Estimate(name, None, low, high), high - low, high - low)
    value = min(max(value, told[0]), told[1])
    least, most = limits(of.noise)
    return _Spread(Estimate(name, value, *told), max(value - least, 0.0), max(most - value, 0.0))


def _ratio(name: str, counts: Vector, noise: float, of: tuple[Vector, Vector], z: float) -> _Spread:
    """A rate X / Y of sums X = u c and Y = v c over cells c, 0 <= u <= v: T(R) = X - R Y.

    A patient adds a number in [0, 1] times R's denominator, so over n patients its variance is at most n R (1 - R),
    and exactly that for votes.
    """
    u, v = of
    top, bottom = float(u @ counts), float(v @ counts)
    r = np.linspace(0.0, 1.0, _GRID)
    from_noise = noise**2 * ((u @ u) - 2.0 * r * (u @ v) + r**2 * (v @ v))
    value = top / bottom if bottom > 0.0 else math.nan
    from_patients = max(bottom, 0.0) * r * (1.0 - r)
    return _accepted(name, _Candidates(r, top - r * bottom, from_noise, from_patients), value, z)


def _gap(name: str, counts: Vector, noise: float, distance: Vector, z: float) -> _Spread:
    """A mean distance in [-1, 1] over all patients, of which every cell has its own: X = d c, Y = the sum of c."""
    top, bottom = float(distance @ counts), float(counts.sum())
    r = np.linspace(-1.0, 1.0, 2 * _GRID - 1)
    apart = distance[:, None] - r[None, :]
    from_noise = noise**2 * (apart**2).sum(axis=0)
    from_patients = np.maximum(counts @ apart**2, 0.0)
    value = top / bottom if bottom > 0.0 else math.nan
    return _accepted(name, _Candidates(r, top - r * bottom, from_noise, from_patients), value, z)


def _auc(name: str, counts: Vector, noise: float, z: float) -> _Spread:
    """The area under the ROC curve from two histograms, ties within a bin counted half.

    T(a) = p' (M - a J) q for the histograms p with and q without the finding, M_ij = 1 for i > j and 1/2 for i = j, J
    all ones: its mean is that of the true histograms, since their noises are independent. The noise's variance is
    sigma^2 (|A q|^2 + |A' p|^2) + sigma^4 |A|^2 for the true ones, A = M - a J; of noisy ones, twice the last term is
    too much. The patients' is that of Hanley & McNeil (1982), equation 1.
    """
    without, with_ = np.split(counts, 2)
    b = len(with_)
    m = np.tril(np.ones((b, b)), -1) + 0.5 * np.eye(b)
    positives, negatives = float(with_.sum()), float(without.sum())
    a = np.linspace(0.0, 1.0, _GRID)
    size = (m**2).sum() - 2.0 * a * m.sum() + a**2 * b**2  # |A|^2
    rows, columns = m @ without, m.T @ with_
    across = (rows**2).sum() - 2.0 * a * negatives * rows.sum() + b * (a * negatives) ** 2
    across += (columns**2).sum() - 2.0 * a * positives * columns.sum() + b * (a * positives) ** 2
    from_noise = np.maximum(noise**2 * across - noise**4 * size, noise**4 * size)
    with_them, without_them = max(positives, 1.0), max(negatives, 1.0)
    q1, q2 = a / (2.0 - a), 2.0 * a**2 / (1.0 + a)
    pairs = a * (1.0 - a) + (with_them - 1.0) * (q1 - a**2) + (without_them - 1.0) * (q2 - a**2)
    top, bottom = float(with_ @ rows), positives * negatives
    value = top / bottom if positives > 0.0 and negatives > 0.0 else math.nan
    from_patients = pairs * with_them * without_them
    return _accepted(name, _Candidates(a, top - a * bottom, from_noise, from_patients), value, z)


# --- several together


def _mean(name: str, figures: Sequence[_Spread], low: float, high: float, apart: bool) -> _Spread:
    """The mean of figures by MOVER; ``apart``: of different patients."""
    if any(one.told.value is None for one in figures):
        return _Spread(Estimate(name, None, low, high), high - low, high - low)
    n, value = len(figures), math.fsum(one.told.value or 0.0 for one in figures) / len(figures)

    def side(distances: Sequence[tuple[float, float]]) -> tuple[float, float]:
        by_noise = math.sqrt(math.fsum(noise**2 for _, noise in distances)) / n
        rest = [math.sqrt(max(whole**2 - noise**2, 0.0)) for whole, noise in distances]
        of_patients = math.sqrt(math.fsum(x**2 for x in rest)) / n if apart else math.fsum(rest) / n
        return math.hypot(by_noise, of_patients), by_noise

    below, by_noise = side([((f.told.value or 0.0) - f.told.low, f.below) for f in figures])
    above, above_by_noise = side([(f.told.high - (f.told.value or 0.0), f.above) for f in figures])
    told = Estimate(name, value, max(low, value - below), min(high, value + above))
    return _Spread(told, by_noise, above_by_noise)


def _centres(bins: int) -> Vector:
    cut = np.array(edges(bins))
    centres: Vector = (cut[1:] + cut[:-1]) / 2.0
    return centres


def _calibration(name: str, counts: Vector, noise: float, z: float) -> _Spread:
    """Mean score less the share that came true; a score counts as its bin's centre."""
    centres = _centres(len(counts) // 2)
    return _gap(name, counts, noise, np.concatenate([centres, centres - 1.0]), z)


def _select(size: int, cells: Iterable[int]) -> Vector:
    chosen = np.zeros(size)
    chosen[list(cells)] = 1.0
    return chosen


def _two_classes(sums: LookSums, z: float) -> Iterable[_Spread]:
    (block,) = sums.layout.blocks
    counts, noise = sums.counts(block)
    b, n = sums.layout.bins, block.size
    right = [*range(b // 2), *range(b + b // 2, n)]  # below one half without it, above with it
    yield _ratio("accuracy", counts, noise, (_select(n, right), np.ones(n)), z)
    with_it = _ratio("sensitivity", counts, noise, (_select(n, right[b // 2 :]), _select(n, range(b, n))), z)
    without = _ratio("specificity", counts, noise, (_select(n, right[: b // 2]), _select(n, range(b))), z)
    yield _mean("balanced accuracy", [with_it, without], 0.0, 1.0, apart=True)
    yield with_it
    yield without
    yield _auc("auc", counts, noise, z)
    yield _calibration("calibration", counts, noise, z)


def _classes(sums: LookSums, z: float) -> Iterable[_Spread]:
    table, bins = sums.layout.blocks
    c = sums.layout.outputs
    counts, noise = sums.counts(table)
    scores, noise_of_scores = sums.counts(bins)
    if table.size <= bins.size:
        yield _ratio("accuracy", counts, noise, (np.eye(c).ravel(), np.ones(c * c)), z)
    else:  # the same share from fewer numbers, so with less noise
        right = _select(bins.size, range(sums.layout.bins, bins.size))
        yield _ratio("accuracy", scores, noise_of_scores, (right, np.ones(bins.size)), z)
    recalls = [
        _ratio(f"recall {k}", counts[k * c : (k + 1) * c], noise, (_select(c, [k]), np.ones(c)), z) for k in range(c)
    ]
    yield _mean("balanced accuracy", recalls, 0.0, 1.0, apart=True)
    yield _calibration("calibration", scores, noise_of_scores, z)
    yield from recalls


def _findings(sums: LookSums, z: float) -> Iterable[_Spread]:
    read = [(block.of, *sums.counts(block)) for block in sums.layout.blocks]
    areas = [_auc(f"auc {k}", counts, noise, z) for k, counts, noise in read]
    gaps = [_calibration(f"calibration {k}", counts, noise, z) for k, counts, noise in read]
    yield _mean("auc", areas, 0.0, 1.0, apart=False)
    yield _mean("calibration", gaps, -1.0, 1.0, apart=False)
    yield from areas


def _shares(name: str) -> Callable[[LookSums, float], Iterable[_Spread]]:
    def read(sums: LookSums, z: float) -> Iterable[_Spread]:
        pair = np.array([1.0, 0.0]), np.ones(2)
        each = [_ratio(f"{name} {block.of}", *sums.counts(block), pair, z) for block in sums.layout.blocks]
        yield _mean(name, each, 0.0, 1.0, apart=False)
        yield from each

    return read


_FIGURES: Final[Mapping[str, Callable[[LookSums, float], Iterable[_Spread]]]] = MappingProxyType(
    {
        "scores": _two_classes,
        "classification": _classes,
        "multi-label": _findings,
        "segmentation": _shares("dice"),
        "regression": _shares("error"),
    }
)


def _patients(sums: LookSums, z: float) -> Estimate:
    """How many patients there are: the sum of the block with the fewest numbers, since each adds its noise."""
    block = min(sums.layout.blocks, key=lambda one: one.size)
    counts, noise = sums.counts(block)
    value, half = float(counts.sum()), z * noise * math.sqrt(block.size)
    return Estimate("patients", max(value, 0.0), max(value - half, 0.0), max(value + half, 0.0))


def to_table(found: Iterable[Estimate]) -> dict[str, Any]:
    """Figures in JSON's types, to four places."""
    return {
        one.name: {"value": None if one.value is None else round(one.value, 4), "low": round(one.low, 4),
                   "high": round(one.high, 4)}
        for one in found
    }  # fmt: skip
