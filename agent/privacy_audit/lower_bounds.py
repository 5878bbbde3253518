"""How much a single run betrays at least: lower bounds of epsilon from guesses about many canaries at once.

Steinke, Nasr & Jagielski 2023 (arXiv 2305.08846): each of m canaries is included by its own fair coin. An observer of
the release guesses the coins of the canaries that it is sure about, and abstains on the others. Under (epsilon,
delta) differential privacy the guesses cannot be right too often. Mahloujifar, Melis & Chaudhuri 2024 (arXiv
2410.22235, ICML 2025) bound the same number by an entire trade-off curve, which is tighter; here it is that of the
Gaussian mechanism.

There is a ceiling: with m = 1000 canaries, and every guess right, no more than an epsilon of about 5 can be proved.
An audit of this kind belongs to a claim of 1 or 2; at a claim of 8 it does not see that the noise is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtrc, expit, log_ndtr, ndtr, ndtri

DELTA: Final = 1e-5
CONFIDENCE: Final = 0.95
SHARES: Final = (0.05, 0.1, 0.2, 0.4, 1.0)  # of the canaries are guessed at; fixed beforehand, and paid for
_MOST: Final = 60.0  # a larger epsilon is not looked for
_FINE: Final = 1e-6  # of an epsilon


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound on epsilon of one run, by default at ``DELTA`` and ``CONFIDENCE``."""

    guessed: float  # by Steinke, Nasr & Jagielski: of any mechanism
    curved: float  # by Mahloujifar, Melis & Chaudhuri: of one whose trade-off curve is a Gaussian's
    canaries: int
    right: float  # share of right guesses, when all are guessed at

    @property
    def epsilon(self) -> float:
        """The larger one. Each is computed at half of the risk, so that both hold together."""
        return max(self.guessed, self.curved)


def lower_bound(
    scores: NDArray[np.float64],
    inside: NDArray[np.bool_],
    delta: float = DELTA,
    confidence: float = CONFIDENCE,
) -> Bound:
    """The epsilon that scores of canaries prove, at least.

    The highest scores are guessed to be in, as many of the lowest to be out, for each share of ``SHARES``; the risk
    is divided by their number and by the two bounds (Bonferroni), so that the best of them may be taken.

    Args:
        scores: (m,), higher for canaries that are thought to be in.
        inside: (m,), what the coins said.
    Raises:
        ValueError: a score is not a number, or the shapes differ.
    """
    if scores.ndim != 1 or scores.shape != inside.shape or not bool(np.isfinite(scores).all()):
        raise ValueError("a bound needs a finite score, and a coin, for each canary")
    if not (0.0 < delta < 1.0 and 0.0 < confidence < 1.0 and len(scores) >= 2):
        raise ValueError("delta and confidence lie between 0 and 1, and there are two canaries or more")
    order, m = np.argsort(-scores, kind="stable"), len(scores)
    risk = (1.0 - confidence) / (2 * len(SHARES))
    guessed = curved = right = 0.0
    for share in SHARES:
        half = max(1, int(share * m) // 2)
        correct = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
        guessed = max(guessed, epsilon_guessed(m, 2 * half, correct, delta, risk))
        curved = max(curved, epsilon_curved(m, 2 * half, correct, delta, risk))
        right = correct / (2 * half)
    return Bound(guessed, curved, m, right)


def p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """At most how likely ``correct`` of ``guesses`` right ones are under (epsilon, delta)-DP, of ``m`` canaries.

    Steinke, Nasr & Jagielski 2023, theorem 5.2: with v right guesses of r, and B ~ Bin(r, e^eps / (1 + e^eps)),

        P[B >= v] + 2 m delta max over i = 1 .. v of P[v - i <= B < v] / i.
    """
    q = float(expit(epsilon))
    beta = float(bdtrc(correct - 1, guesses, q))
    if delta == 0.0 or correct == 0:
        return min(1.0, beta)
    i = np.arange(1, correct + 1)
    alpha = float(np.max((bdtrc(correct - i - 1, guesses, q) - beta) / i))
    return min(1.0, beta + 2.0 * m * delta * alpha)


def epsilon_guessed(m: int, guesses: int, correct: int, delta: float, risk: float) -> float:
    """The largest epsilon that :func:`p_value` rules out at ``risk``; 0 when it rules out none."""
    return _largest(lambda epsilon: p_value(m, guesses, correct, epsilon, delta) < risk)


def epsilon_curved(m: int, guesses: int, correct: int, delta: float, risk: float) -> float:
    """The largest epsilon, at ``delta``, of the Gaussian mechanisms that :func:`rules_out` excludes; or 0."""
    return _largest(lambda epsilon: rules_out(m, guesses, correct, gaussian_mu(epsilon, delta), risk))


def rules_out(m: int, guesses: int, correct: int, mu: float, risk: float) -> bool:
    """Are so many right guesses less likely than ``risk`` for a mu-Gaussian-DP mechanism?

    Mahloujifar, Melis & Chaudhuri 2024, algorithm 3 for two choices per canary. With r and h the shares of right and
    wrong guesses that a recursion from c right guesses downwards allows at least,

        h <- max(h, Phi(Phi^-1(r) - mu)),   r <- r + i / (c' - i) (h' - h),   i = c - 1 .. 0,

    the claim is excluded when r + h exceeds c' / m.
    """
    if correct == 0:
        return False
    right, wrong = risk * correct / m, risk * (guesses - correct) / m
    for i in range(correct - 1, -1, -1):
        more = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        if more == wrong:
            break
        right = min(1.0, right + i / (guesses - i) * (more - wrong))
        wrong = more
    return right + wrong > guesses / m


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta(epsilon) of mu-Gaussian differential privacy: Dong, Roth & Su 2019, corollary 2.13."""
    second = math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)))
    return float(ndtr(-epsilon / mu + mu / 2)) - second


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu of Gaussian differential privacy that reaches ``delta`` at ``epsilon``."""
    return float(brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 1e-7, 100.0, xtol=1e-12))


def _largest(excluded: Callable[[float], bool]) -> float:
    """Bisect; every epsilon below one that is excluded is excluded too."""
    low, high = _FINE, _MOST
    if not excluded(low):
        return 0.0
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low
