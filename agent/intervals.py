"""How sure a number is: Wilson's interval of a rate, the bootstrap by patient of all else, and one line of print.

Every figure has its interval, its number of trials, and the level of chance. These numbers are computed from
patients; only coarse figures, or none, leave the site (design, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray


def bounds(hits: float, of: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a binomial rate (Wilson 1927, JASA 22): low and high, with the rate between them.

    ``hits`` may be fractional: a tie between t answers of which one is right counts as 1/t.

    Raises:
        ValueError: no trial, hits outside [0, of], or a level outside (0, 1).
    """
    if not of >= 1 or not 0.0 <= hits <= of:
        raise ValueError("a rate needs a trial, and no more hits than trials")
    if not 0.0 < level < 1.0:
        raise ValueError("a level lies between 0 and 1")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, z2 = hits / of, z * z
    centre = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = z / (1 + z2 / of) * sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))


Rows = NDArray[np.int64]  # (r,): row numbers of a resampled set, some of them several times
LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float
    level: float = LEVEL

    def __post_init__(self) -> None:
        """Refuse what is no interval; NaN is none."""
        if not self.low <= self.high or not 0.0 < self.level < 1.0:
            raise ValueError("an interval has low <= high and a level between 0 and 1")


@dataclass(frozen=True, slots=True)
class Resampling:
    """How a bootstrap is drawn."""

    count: int = 1000
    level: float = LEVEL

    def __post_init__(self) -> None:
        """Too few draws have no tails."""
        if not self.count >= 20 or not 0.0 < self.level < 1.0:
            raise ValueError("a bootstrap has 20 draws or more and a level between 0 and 1")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, ready for a table."""

    name: str
    value: float
    interval: Interval
    chance: float | None  # what an attacker who knows nothing reaches, or real data against real data
    trials: int  # units it rests on: patients, clusters, probes
    limit: float | None = None  # what the mechanism promises, for example 1/k

    def __post_init__(self) -> None:
        """A figure is a finite number from at least one trial."""
        others = [x for x in (self.chance, self.limit) if x is not None]
        if not self.name or not np.isfinite([self.value, *others]).all() or not self.trials >= 1:
            raise ValueError("a figure has a name, finite numbers and a trial")


def rate(name: str, hits: float, of: int, chance: float, limit: float | None = None) -> Figure:
    """A rate of ``hits`` among ``of`` independent trials, with Wilson's interval."""
    return Figure(name, hits / of if of else float("nan"), wilson(hits, of), chance, of, limit)


def table(figures: Iterable[Figure], title: str = "") -> str:
    """Figures as lines of text: value, interval, chance, limit, trials."""
    lines = [title] if title else []
    lines.append(f"{'':<34}{'value':>10}{'interval':>22}{'chance':>10}{'limit':>10}{'n':>8}")
    for f in figures:
        bounds = f"[{f.interval.low:.4f}, {f.interval.high:.4f}]"
        chance, limit = ("-" if x is None else f"{x:.4f}" for x in (f.chance, f.limit))
        lines.append(f"{f.name:<34}{f.value:>10.4f}{bounds:>22}{chance:>10}{limit:>10}{f.trials:>8}")
    return "\n".join(lines)


def wilson(hits: float, of: int, level: float = LEVEL) -> Interval:
    """Wilson's score interval; see :func:`agent.intervals.bounds`.

    Raises:
        ValueError: no trial, or hits outside [0, of].
    """
    return Interval(*bounds(hits, of, level), level)


class Units:
    """Rows grouped by the unit that is drawn: all images of a patient come together, or not at all."""

    def __init__(self, units: NDArray[np.int64]) -> None:
        """``units`` (n,): the unit of every row.

        Raises:
            ValueError: no rows.
        """
        if units.ndim != 1 or not len(units):
            raise ValueError("units are (n,), one for each row")
        self._order: Rows = np.argsort(units, kind="stable").astype(np.int64)
        _, starts, sizes = np.unique(units[self._order], return_index=True, return_counts=True)
        self._starts, self._sizes = starts.astype(np.int64), sizes.astype(np.int64)

    def __len__(self) -> int:
        """Distinct units."""
        return len(self._starts)

    def draw(self, rng: np.random.Generator) -> Rows:
        """The rows of as many units as there are, drawn with replacement."""
        chosen = rng.integers(0, len(self), len(self))
        sizes = self._sizes[chosen]
        ends = sizes.cumsum()
        within = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
        rows: Rows = self._order[np.repeat(self._starts[chosen], sizes) + within]
        return rows


def resampled(
    statistic: Callable[[Rows], Sequence[float]],
    units: Units,
    rng: np.random.Generator,
    count: int,
) -> NDArray[np.float64]:
    """(count, q): a statistic of q numbers on ``count`` bootstrap sets (Efron 1979), drawn by unit.

    Raises:
        ValueError: the statistic is not finite on one of them.
    """
    return finite(np.array([statistic(units.draw(rng)) for _ in range(count)], np.float64))


def finite(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """The draws, if all are numbers.

    Raises:
        ValueError: one is not.
    """
    if not bool(np.isfinite(draws).all()):
        raise ValueError("a statistic is not a number on a resampled set")
    return draws


def percentile(draws: NDArray[np.float64], value: float, level: float = LEVEL) -> Interval:
    """The percentile interval of (count,) draws, widened to hold the value itself."""
    low, high = np.quantile(finite(draws), [(1 - level) / 2, (1 + level) / 2])
    return Interval(min(float(low), value), max(float(high), value), level)


def centred(draws: NDArray[np.float64], value: float, level: float = LEVEL) -> Interval:
    """The percentile interval of (count,) draws moved so that their mean is the value; never below 0.

    For a distance, which resampling with replacement inflates: a twice-drawn image narrows a covariance. The interval
    is that of the estimate at this number of images, not of the distance between two infinite populations.
    """
    moved = finite(draws) - draws.mean() + value
    return percentile(np.maximum(moved, 0.0), value, level)


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share with Wilson's 95 % interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """NaN is no share."""
        if not all(type(v) is float for v in (self.value, self.low, self.high)):
            raise ValueError("a share is a number")
        if not 0 <= self.low <= self.value <= self.high <= 1:
            raise ValueError("a share lies in [0, 1], and within its interval")
