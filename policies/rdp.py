"""Rényi DP of the Poisson-subsampled Gaussian at an integer order, and its conversion; standard library alone.

These are the prices. A verifier re-derives them on a machine that has nothing of ours installed;
:mod:`policies.accounting` confirms them with Google's accountant before anything is granted.
"""

from __future__ import annotations

import math
from typing import Final

from policies.claims import Claim, SubsampledGaussian, UnsupportedClaim

NANO: Final = 10**9


def integer_rdp(claim: SubsampledGaussian, order: int) -> float:
    """Rényi divergence bound of the whole claim at ``order``, in nats.

    Mironov, Talwar & Zhang 2019 (arXiv 1908.10530), section 3.3, integer orders, add/remove neighbours:
    ``A = sum_i C(a, i) (1-q)^(a-i) q^i exp((i^2 - i) / 2 sigma^2)`` and ``rho = steps * log(A) / (a - 1)``.

    Raises:
        ValueError: the order is not an integer of at least 2.
    """
    if type(order) is not int or not 2 <= order <= 1024:
        raise ValueError("the order must be an integer in [2, 1024]")
    q, sigma = claim.sampling_rate, claim.noise_multiplier
    if q == 1.0:
        return claim.steps * order / (2 * sigma**2)
    logs = [
        math.log(math.comb(order, i)) + (order - i) * math.log1p(-q) + i * math.log(q) + (i * i - i) / (2 * sigma**2)
        for i in range(order + 1)
    ]
    top = max(logs)
    log_a = top + math.log(math.fsum(math.exp(x - top) for x in logs))
    return claim.steps * max(log_a, 0.0) / (order - 1)


def cost(claim: Claim, order: int) -> int:
    """The claim's price in an account of ``order``: nano-nats of Rényi divergence, rounded up.

    Raises:
        UnsupportedClaim: the claim has no Rényi curve (k-anonymity has none, not a zero one).
    """
    if not isinstance(claim, SubsampledGaussian):
        raise UnsupportedClaim(f"{type(claim).__name__} has no epsilon")
    exact = integer_rdp(claim, order) * NANO
    return math.ceil(exact * (1 + 1e-12))  # the margin covers the rounding of the formula itself


def epsilon_nano(claim: Claim, delta: float, order: int) -> int:
    """What a statement declares and every reviewer recomputes: epsilon in nano, rounded up (P11)."""
    return cost(claim, order) + max(0, math.ceil(log_term(order, delta) * NANO))


def log_term(order: int, delta: float) -> float:
    """What the step from (order, rho) to (epsilon, delta) adds, in nats.

    Canonne, Kamath & Steinke 2020 (arXiv 2004.00010), proposition 12:
    ``epsilon = rho + log(1 - 1/a) - log(a delta) / (a - 1)``.
    """
    if not 0 < delta < 1:
        raise ValueError("delta must lie in (0, 1)")
    return math.log1p(-1 / order) - math.log(order * delta) / (order - 1)


def allowance(epsilon_budget: float, delta: float, order: int) -> int:
    """The Rényi divergence that fits under (epsilon, delta) at ``order``: nano-nats, rounded down, never negative."""
    room = (epsilon_budget - log_term(order, delta)) * NANO
    return max(0, math.floor(room * (1 - 1e-12))) if math.isfinite(room) else 0
