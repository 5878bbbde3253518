"""Test numbers against their claimed distribution. Two-sided tests, and their combination.

A test of the exact distribution, not only of an inequality, detects far smaller faults than a bound of epsilon: a
tenth of the noise, where a bound misses half of it. Two-sided, because noise that is larger than claimed also means
that something is broken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LATTICE: Final = 2.0**-24  # step of the lattice in units of the bound; the law's own number, not the code's
SURE: Final = 1e-3  # a p-value below it is not taken for chance; the gate asks for two in a row
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trial:
    """One tested property of the distribution, with its p-value."""

    what: str  # the property, as it should be: "the noise has the claimed size"
    p: float

    def __post_init__(self) -> None:
        """A probability; NaN is none."""
        if not self.what or not 0.0 <= self.p <= 1.0:
            raise ValueError("a trial has a name, and a p-value in [0, 1]")


@dataclass(frozen=True, slots=True)
class Conformance:
    """All trials of one run of an emitter."""

    trials: tuple[Trial, ...]

    def __post_init__(self) -> None:
        """No trial, no conformance."""
        if not self.trials:
            raise ValueError("nothing was tried")

    @property
    def worst(self) -> Trial:
        """The trial with the least p-value."""
        return min(self.trials, key=lambda trial: trial.p)

    @property
    def p(self) -> float:
        """Of all together: Bonferroni."""
        return min(1.0, len(self.trials) * self.worst.p)

    @property
    def holds(self) -> bool:
        """Nothing but chance was seen."""
        return self.p >= SURE


def claimed_deviation(multiplier: float, bound: float, size: int, grid: float) -> float:
    """Standard deviation that a Gaussian mechanism of ``size`` numbers claims: sigma (C + grid sqrt(d)).

    Written down here a second time, and taken from nothing that the audit looks at: noise that is held against the
    code's own idea of its size is never too small.

    Args:
        multiplier: sigma, in units of the bound.
        bound: C, how far one patient moves the exact answer in L2 norm.
        size: d.
        grid: of the lattice that answers are rounded to, in the answer's units: rounding brings two neighbours
            apart by at most grid sqrt(d).
    """
    return multiplier * (bound + grid * math.sqrt(size))


def on_the_lattice(answers: Values, grid: float) -> tuple[Trial, ...]:
    """Are answers (times, d), whose noise is wide, multiples of ``grid``, and no coarser than that?

    A coarser lattice wants more noise than the law has. Of multiples of ``grid`` itself every second one is odd.
    """
    steps = np.rint(answers / grid)
    odd = float((np.abs(steps) % 2.0).sum())
    return (
        exact_trial("what is released lies on the lattice", bool((steps * grid == answers).all())),
        Trial("the lattice is as fine as claimed", two_sided((2.0 * odd - steps.size) / math.sqrt(steps.size))),
    )


def exact_trial(what: str, holds: bool) -> Trial:
    """Something that holds or not, without chance."""
    return Trial(what, 1.0 if holds else 0.0)


def combined_p_value(ps: Sequence[float] | Values) -> float:
    """The least of several p-values, corrected for their number; 1 of none, 0 when one is not a number."""
    found = np.asarray(ps, np.float64)
    if not len(found):
        return 1.0
    return min(1.0, len(found) * float(found.min())) if bool(np.isfinite(found).all()) else 0.0


def two_sided(z: float) -> float:
    """Of a standard normal; 0 when it is not a number."""
    return 2.0 * float(stats.norm.sf(abs(z))) if math.isfinite(z) else 0.0


def spread(residuals: Values) -> float:
    """Of the sum of squares of standard normals, by chi-square, both tails."""
    square = float((residuals * residuals).sum())
    if not math.isfinite(square):
        return 0.0
    below = stats.chi2.cdf(square, residuals.size), stats.chi2.sf(square, residuals.size)
    return min(1.0, 2.0 * float(min(below)))


def of_noise(residuals: Values, where: str = "") -> tuple[Trial, ...]:
    """Is (steps, d) white noise of variance 1, from step to step and from number to number?

    Every step has its own test of size, so that one silent step is seen; steps are compared with each other, so that
    a repeated seed is seen; and a step with itself, moved by every distance, so that a short period is seen.
    """
    steps, d = residuals.shape
    flat = residuals.ravel()
    each = [spread(row) for row in residuals]
    return (
        Trial(f"the noise has mean zero{where}", two_sided(float(flat.sum()) / math.sqrt(flat.size))),
        Trial(f"the noise has the claimed size{where}", spread(flat)),
        Trial(f"the noise has the claimed size in each step{where}", combined_p_value(each)),
        Trial(f"the noise is Gaussian{where}", combined_p_value([stats.kstest(flat, "norm").pvalue])),
        Trial(f"the noise of a step is its own{where}", _between(residuals, residuals, itself=True)),
        Trial(f"the noise of a number is its own{where}", _along(residuals, steps, d)),
    )


def rows_differ(first: Values, second: Values) -> float:
    """Does no row of (t, d) repeat one of (u, d)? Rows of standard normals."""
    return _between(first, second, itself=False)


def _between(first: Values, second: Values, itself: bool) -> float:
    """Of the products of rows: of independent standard normals, N(0, d)."""
    z = first @ second.T / math.sqrt(first.shape[1])
    of = z[np.triu_indices(len(z), 1)] if itself else z.ravel()
    return combined_p_value(2.0 * stats.norm.sf(np.abs(of)))


def _along(residuals: Values, steps: int, d: int) -> float:
    """Of the circular autocorrelation at every distance 1 .. d / 2, summed over steps: N(0, steps d) each.

    At a distance of d / 2 every product is met twice, which doubles the variance.
    """
    power = (np.abs(np.fft.rfft(residuals, axis=1)) ** 2).sum(axis=0)
    z = np.fft.irfft(power, d)[1 : d // 2 + 1] / math.sqrt(steps * d)
    if d % 2 == 0 and len(z):
        z[-1] /= math.sqrt(2.0)
    return combined_p_value(2.0 * stats.norm.sf(np.abs(z)))


def of_sampling(counts: Values, sizes: Values, rate: float) -> tuple[Trial, ...]:
    """Is every patient in every step with probability ``rate``, whoever else is?

    Args:
        counts: (n,), how often each of n patients was drawn.
        sizes: (steps,), how many were drawn in each step.
        rate: q.
    """
    n, steps, total = len(counts), len(sizes), int(sizes.sum())
    names = (
        "patients are drawn at the claimed rate",
        "each patient is drawn as often as the others, by chance alone",
        "the batches are as large as by chance alone",
    )
    if rate == 1.0:
        full = bool((counts == steps).all() and (sizes == n).all())
        return tuple(exact_trial(name, full) for name in names)
    rates = stats.binom.cdf(total, n * steps, rate), stats.binom.sf(total - 1, n * steps, rate)
    variance = rate * (1.0 - rate)
    excess = (1.0 - 6.0 * variance) / (steps * variance)  # kurtosis of Bin(steps, q): the chi-square is not exact
    z = float(((counts - steps * rate) ** 2 / (steps * variance) - 1.0).sum()) / math.sqrt(n * (2.0 + excess))
    return (
        Trial(names[0], min(1.0, 2.0 * float(min(rates)))),
        Trial(names[1], two_sided(z)),
        Trial(names[2], spread((sizes - n * rate) / math.sqrt(n * variance))),
    )
