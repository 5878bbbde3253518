"""Rényi DP of Gaussian claims at an integer order, and its conversion; standard library alone.

These are the prices. A verifier re-derives them on a machine that has nothing of ours installed;
:mod:`policies.accounting.accountant` confirms them with Google's accountant before anything is granted.

Everything is computed in decimal arithmetic with every operation rounded against the spender: a price is never below
the true divergence, and it is the same whole number on every machine, which floating-point logarithms are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from decimal import (
    MAX_EMAX,
    MIN_EMIN,
    ROUND_CEILING,
    ROUND_FLOOR,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
    localcontext,
)
from functools import lru_cache
from typing import Final

from policies.accounting.claims import (
    MOST_NOISE,
    Claim,
    Composed,
    Evaluated,
    Gaussian,
    GaussianQuery,
    UnsupportedClaimError,
)
from policies.accounting.rounding import epsilon_text

NANO: Final = 10**9
MAX_ORDER: Final = 1024
SIGMA_GRID: Final = 1000  # noise multipliers that are found are whole thousandths
_UP: Final = Context(
    prec=40, rounding=ROUND_CEILING, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[Overflow, InvalidOperation, DivisionByZero]
)


def _check(order: object) -> None:
    if type(order) is not int or not 2 <= order <= MAX_ORDER:
        raise ValueError(f"the order must be an integer in [2, {MAX_ORDER}]")


@lru_cache(maxsize=128)
def _combinations(order: int) -> tuple[Decimal, ...]:
    """C(order, i) for i in 0 .. order, exact."""
    return tuple(Decimal(math.comb(order, i)) for i in range(order + 1))


def _powers(base: Decimal, count: int) -> list[Decimal]:
    """base^0 .. base^count in the current context, each an upper bound of the true power of a base at least 0."""
    out = [Decimal(1)]
    for _ in range(count):
        out.append(out[-1] * base)
    return out


def _log_moment(q: Decimal, sigma: Decimal, order: int) -> Decimal:
    """An upper bound on log A of one Poisson-subsampled step; the current context must round up.

    Mironov, Talwar & Zhang 2019 (arXiv 1908.10530), section 3.3, for integer orders and add/remove neighbours:
    ``A = sum_i C(a, i) (1-q)^(a-i) q^i exp(i (i-1) / 2 sigma^2)``. The binomial weights sum to 1, so
    ``A - 1 = sum_(i>=2) C(a, i) (1-q)^(a-i) q^i (E^(i (i-1) / 2) - 1)`` with ``E = exp(1 / sigma^2)``: positive terms
    alone. Sums and products of upper bounds of positive numbers, rounded up, are upper bounds; ``exp`` and ``ln`` of
    the decimal module round to nearest, so the next number above bounds them.
    """
    inverse = 1 / sigma
    e = (inverse * inverse).exp().next_plus()
    combinations, kept, drawn = _combinations(order), _powers(1 - q, order - 2), _powers(+q, order)
    excess, gain, factor = Decimal(0), Decimal(1), Decimal(1)
    for i in range(2, order + 1):
        factor *= e  # E^(i - 1)
        gain *= factor  # E^(i (i - 1) / 2)
        excess += combinations[i] * kept[order - i] * drawn[i] * (gain - 1)
    # log(1 + x) <= x is the sharper of the two bounds when x is so small that 1 + x has lost its digits
    return min(excess, (1 + excess).ln().next_plus())


def _divergence(claim: Gaussian, order: int) -> Decimal:
    """An upper bound on the Rényi divergence of the whole claim at ``order``, in nats; the context must round up."""
    if isinstance(claim, Composed):  # smallest first, whatever the order written: the last digits are the same
        return sum(sorted(_divergence(part, order) for part in claim.parts), Decimal(0))
    if isinstance(claim, Evaluated):
        return _divergence(claim.training, order) + claim.looks * _divergence(claim.query, order)
    if isinstance(claim, GaussianQuery):  # sigma = noise / (m sqrt(k_1)): no square root is needed
        inverse = 1 / Decimal(claim.noise)
        return order * claim.contribution**2 * claim.votes * inverse * inverse / 2
    if claim.sampling_rate == 1.0:
        inverse = 1 / Decimal(claim.noise_multiplier)
        return claim.steps * order * inverse * inverse / 2
    log_a = _log_moment(Decimal(claim.sampling_rate), Decimal(claim.noise_multiplier), order)
    return claim.steps * log_a / (order - 1)


def integer_rdp(claim: Gaussian, order: int) -> float:
    """Rényi divergence bound of the whole claim at ``order``, in nats, as the nearest float.

    Poisson-subsampled Gaussian, also of a sum whose noise the sites share: ``steps * log(A) / (a - 1)``, see
    :func:`_log_moment`. Plain Gaussian, and every Gaussian query: ``a / (2 sigma^2)`` (Mironov 2017, corollary 3;
    PrivImage, theorem 3.1). Composed: the sum of its parts' (Mironov 2017, proposition 1; PrivImage, theorem E.2),
    and so of a training and the looks at it.

    Raises:
        ValueError: the order is not an integer in [2, 1024].
    """
    _check(order)
    with localcontext(_UP):
        return float(_divergence(claim, order))


def cost(claim: Claim, order: int) -> int:
    """The claim's price in an account of ``order``: nano-nats of Rényi divergence, rounded up once.

    Raises:
        UnsupportedClaimError: the claim has no Rényi curve (k-anonymity has none, not a zero one).
        ValueError: the order is not an integer in [2, 1024].
    """
    if not isinstance(claim, Gaussian):
        raise UnsupportedClaimError(f"{type(claim).__name__} has no epsilon")
    _check(order)
    with localcontext(_UP):
        return math.ceil(_divergence(claim, order) * NANO)


def epsilon_nano(claim: Claim, delta: float, order: int) -> int:
    """What a statement declares and every reviewer recomputes: epsilon in nano, rounded up (P11)."""
    with localcontext(_UP):
        return cost(claim, order) + math.ceil(_log_term(order, delta) * NANO)


def _log_term(order: int, delta: float) -> Decimal:
    """An upper bound on :func:`log_term`, and 0 where that is negative; the context must round up."""
    _check(order)
    if not 0 < delta < 1:
        raise ValueError("delta must lie in (0, 1)")
    with localcontext() as down:
        down.rounding = ROUND_FLOOR
        product = order * Decimal(delta)
        first = (1 / Decimal(order)).next_minus()
    # log(1 - 1/a) - log(a delta) / (a - 1), with a lower bound wherever something is subtracted
    return max(Decimal(0), (1 - first).ln().next_plus() - (product.ln().next_minus() / (order - 1)).next_minus())


def log_term(order: int, delta: float) -> float:
    """What the step from (order, rho) to (epsilon, delta) adds, in nats; negative when delta is very large.

    Canonne, Kamath & Steinke 2020 (arXiv 2004.00010), proposition 12:
    ``epsilon = rho + log(1 - 1/a) - log(a delta) / (a - 1)``.
    """
    if not 0 < delta < 1:
        raise ValueError("delta must lie in (0, 1)")
    return math.log1p(-1 / order) - math.log(order * delta) / (order - 1)


def epsilon_of(spent: int, delta: float, order: int) -> float:
    """The (epsilon, delta) statement for ``spent`` nano-nats at ``order``; 0 spent is epsilon 0."""
    return spent / NANO + max(0.0, log_term(order, delta)) if spent else 0.0


def allowance(epsilon_budget: float, delta: float, order: int) -> int:
    """The Rényi divergence that fits under (epsilon, delta) at ``order``: nano-nats, rounded down, never negative."""
    if not math.isfinite(epsilon_budget):
        return 0
    with localcontext(_UP):
        log = _log_term(order, delta)
    with localcontext(_UP) as down:
        down.rounding = ROUND_FLOOR
        return max(0, math.floor((Decimal(epsilon_budget) - log) * NANO))


def least_noise(claim: Callable[[float], Claim], epsilon: float, accounts: Collection[tuple[float, int]]) -> float:
    """The least noise for which no account is charged more than ``epsilon``: the divergence at its order, and delta.

    Args:
        claim: of a noise multiplier; its price falls as the noise grows.
        epsilon: the price.
        accounts: delta and order of each; at least one.
    Raises:
        UnsupportedClaimError: no noise is enough. The text says what the accounts alone are worth.
    """
    most = math.floor(Decimal(epsilon) * NANO)

    def fits(thousandths: int) -> bool:
        try:
            made = claim(thousandths / SIGMA_GRID)
            return all(epsilon_nano(made, delta, order) <= most for delta, order in accounts)
        except (ValueError, ArithmeticError):  # next to no noise: no price can be told
            return False

    low, high = 1, int(MOST_NOISE) * SIGMA_GRID  # `low` does not fit, `high` does
    if not fits(high):
        least = max(epsilon_nano(claim(high / SIGMA_GRID), *account) for account in accounts)
        raise UnsupportedClaimError(
            f"no noise keeps it under epsilon {epsilon_text(epsilon)}: the accounts' order and delta alone are worth "
            f"{epsilon_text(least / NANO)}, since they were opened for a larger budget"
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / SIGMA_GRID
