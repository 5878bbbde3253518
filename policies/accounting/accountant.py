"""Claims to privacy loss: confirm the budget filter's price, (epsilon, delta) for people, the noise of a planned job.

:mod:`policies.accounting.rdp` computes prices, and an auditor can run it alone. Google's ``dp-accounting``, the
accountant of record, must confirm each price before a grant is given. The filter is a Rényi filter at one integer
order, fixed when the account is opened (Feldman & Zrnic 2021; Lecuyer 2021). Later claims may depend on earlier
releases, so neither the best order in hindsight nor a running PLD total is a valid stopping rule (design P9). With
the first, released data would choose the bound that is read. The natural filter of the second is unsound (Honkela et
al. 2026, arXiv 2602.06756). Privacy loss distributions apply only to what was fixed in advance: the figure of a batch
in a report, and the noise of one job (:func:`calibrate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Final

from policies.accounting.claims import (
    MOST_NOISE,
    UNIT,
    Claim,
    Composed,
    DistributedGaussian,
    Evaluated,
    Gaussian,
    Part,
    SubsampledGaussian,
    UnsupportedClaimError,
)
from policies.accounting.rdp import (
    NANO,
    SIGMA_GRID,
    allowance,
    cost,
    epsilon_nano,
    epsilon_of,
    integer_rdp,
    log_term,
)
from policies.accounting.rounding import epsilon_text
from protos.common.errors import ConfigError, InvariantError

ORDERS: Final = tuple(range(2, 65))
# The job whose repetitions an account's order is chosen for: between the rounds' full batches and small samples.
REFERENCE: Final = SubsampledGaussian(sampling_rate=0.25, noise_multiplier=3.0, steps=1)
PLD_INTERVAL: Final = 1e-5  # rounding accumulates over compositions: 1e-3 and 1e-4 can end above the Rényi figure
SEARCH_INTERVALS: Final = (1e-3, 1e-4, PLD_INTERVAL)
TIGHT_LIMIT: Final = 32.0  # beyond, a loss distribution fills gigabytes to say that there is no protection
Simple = Part | DistributedGaussian  # a Gaussian claim that is not composed of others

__all__ = ["NANO", "SIGMA_GRID", "allowance", "cost", "epsilon_nano", "epsilon_of", "log_term"]


class AccountantsDisagreeError(InvariantError, ArithmeticError):
    """Two independent computations of one price differ: nothing may be granted on it."""


class NoiseNotFoundError(ConfigError, ValueError):
    """No noise within bounds keeps the job under the requested epsilon. The message says what to change."""


def _comparable(claims: Iterable[Claim]) -> tuple[Simple, ...]:
    """The claims in an order of their own, part by part and look by look, when their epsilons may be added at all."""
    listed: list[Simple] = []
    for claim in claims:
        if isinstance(claim, Composed):
            listed += claim.parts
        elif isinstance(claim, Evaluated):
            listed += [claim.training, *[claim.query] * claim.looks]
        elif isinstance(claim, Gaussian):
            listed.append(claim)
        else:
            raise UnsupportedClaimError(f"{type(claim).__name__} has no epsilon")
    if len({(c.unit, c.relation) for c in listed}) > 1:
        raise UnsupportedClaimError("claims of different units or neighbouring relations do not add up")
    return tuple(sorted(listed, key=repr))


@lru_cache(maxsize=4096)
def rdp(claim: Claim, order: int) -> float:
    """Rényi DP of one claim at one integer order, in nats, by two accountants that must agree.

    Of several claims in one they must agree on each too: the loudest would cover what is wrong with another.

    Raises:
        UnsupportedClaimError: the claim has no Rényi curve (k-anonymity has none, not a zero one).
        AccountantsDisagreeError: the two figures differ by more than a millionth.
    """
    if not isinstance(claim, Gaussian):
        raise UnsupportedClaimError(f"{type(claim).__name__} has no epsilon")
    from policies.accounting import reference_accountant  # noqa: PLC0415 - scipy: most commands compute no price

    listed = _comparable([claim])
    for part in set(listed) if isinstance(claim, Composed | Evaluated) else ():
        rdp(part, order)
    of_record = reference_accountant.rdp(listed, order)
    second, steps = integer_rdp(claim, order), sum(map(reference_accountant.steps, listed))
    # where a step's divergence is near the last digit of 1.0, the accountant of record rounds at each of the steps
    if not abs(of_record - second) <= 1e-6 * max(of_record, second) + 1e-14 * steps:
        raise AccountantsDisagreeError(f"order {order}: {of_record!r} against {second!r}")
    return max(of_record, second)


def confirm(claim: Claim, order: int) -> None:
    """Refuse to grant a price that the accountant of record does not confirm.

    Raises:
        UnsupportedClaimError: the claim has no Rényi curve.
        AccountantsDisagreeError: the two accountants differ.
    """
    rdp(claim, order)


def order_for(epsilon_budget: float, delta: float) -> int:
    """The integer order an account of (epsilon, delta) is opened at: it lets most of ``REFERENCE`` through.

    That is 4/5 or more of what a loss distribution would admit if it were a filter; half the order lets nothing
    through, twice the order less than two thirds of that.
    """
    if not (math.isfinite(epsilon_budget) and epsilon_budget > 0):
        raise ValueError("epsilon must be positive and finite")
    return max(ORDERS, key=lambda a: allowance(epsilon_budget, delta, a) / cost(REFERENCE, a))


def epsilon(claims: Iterable[Claim], delta: float, order: int | None = None) -> float:
    """An upper bound on epsilon of claims composed, by Rényi DP.

    Args:
        claims: all of one unit and relation.
        delta: in (0, 1).
        order: the account's fixed order (the filter's figure, valid under adaptivity). Without one, the best of
            ``ORDERS``: valid only for claims that were all fixed in advance.
    Raises:
        UnsupportedClaimError: a claim without an epsilon is among them (it is not free, it is not comparable: P4), or
            claims of different units or relations are.
    """
    listed = _comparable(claims)
    if not listed:
        return 0.0
    orders = ORDERS if order is None else (order,)
    return min(math.fsum(rdp(c, a) for c in listed) + max(0.0, log_term(a, delta)) for a in orders)


@lru_cache(maxsize=512)
def _tight(claims: tuple[Simple, ...], delta: float, interval: float) -> float:
    bound = min(math.fsum(integer_rdp(c, a) for c in claims) + max(0.0, log_term(a, delta)) for a in ORDERS)
    if not bound <= TIGHT_LIMIT:
        return bound
    from policies.accounting import reference_accountant  # noqa: PLC0415 - as above

    return reference_accountant.pld_epsilon(claims, delta, interval)


def tight_epsilon(claims: Iterable[Claim], delta: float) -> float:
    """Epsilon by privacy loss distributions, for claims fixed in advance. For reports, never for the filter (P9).

    An upper bound within about a hundred-thousandth of the truth; above ``TIGHT_LIMIT``, the Rényi bound instead.

    Raises:
        UnsupportedClaimError: as :func:`epsilon`.
    """
    listed = _comparable(claims)
    return _tight(listed, delta, PLD_INTERVAL) if listed else 0.0


def _least(fits: Callable[[int], bool], guess: int, low: int, high: int) -> int | None:
    """The smallest whole number in [low, high] that fits, if all above it do; doubling steps around a guess."""
    step = 1
    if fits(guess):
        good, bad = guess, low - 1
        while good - step > bad:
            if not fits(good - step):
                bad = good - step
                break
            good, step = good - step, 2 * step
    else:
        good, bad = high + 1, guess
        while bad + step < good:
            if fits(bad + step):
                good = bad + step
                break
            bad, step = bad + step, 2 * step
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good if good <= high else None


def calibrate(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    also: tuple[Gaussian, ...] = (),
    unit: str = UNIT,
) -> SubsampledGaussian:
    """The job with the least noise that keeps itself and ``also`` under (target_epsilon, delta), by PLD.

    For a job whose parameters are all fixed before it starts (design P9). PrivImage, theorem E.3, finds the same
    noise by the classic Rényi conversion; 9-26 % of it is more than the guarantee needs.

    Args:
        target_epsilon: in (0, ``TIGHT_LIMIT``]. A small one takes seconds; one of 8 for a few quiet steps, a minute.
        also: the other claims of the same job, such as the semantic histogram.
    Returns:
        The claim whose noise multiplier is the smallest whole thousandth for which :func:`tight_epsilon` of the
        claim and ``also`` is at most the target. The estimate is coarse, the answer is confirmed at ``PLD_INTERVAL``.
    Raises:
        NoiseNotFoundError: ``also`` alone takes more, or no noise multiplier up to ``MOST_NOISE`` is enough.
        UnsupportedClaimError: senseless parameters, or ``also`` is of another unit or relation.
        ValueError: epsilon or delta is out of range.
    """
    if not 0 < target_epsilon <= TIGHT_LIMIT:
        raise ValueError(f"epsilon must lie in (0, {TIGHT_LIMIT}]")
    if not 0 < delta < 1:
        raise ValueError("delta must lie in (0, 1)")

    def job(thousandths: int) -> SubsampledGaussian:
        return SubsampledGaussian(sampling_rate, thousandths / SIGMA_GRID, steps, unit)

    _comparable([job(SIGMA_GRID), *also])
    others = tight_epsilon(also, delta)
    if not others <= target_epsilon:
        raise NoiseNotFoundError(
            f"the job's other claims alone take epsilon {epsilon_text(others)} of {epsilon_text(target_epsilon)}: "
            "more noise there"
        )

    def fits(thousandths: int, interval: float) -> bool:
        return _tight(_comparable([job(thousandths), *also]), delta, interval) <= target_epsilon

    most = int(MOST_NOISE) * SIGMA_GRID
    if not fits(most, PLD_INTERVAL):
        raise NoiseNotFoundError(
            f"no noise multiplier up to {MOST_NOISE:g} keeps {steps} steps at sampling rate {sampling_rate} under "
            f"epsilon {epsilon_text(target_epsilon)}: take fewer steps, a smaller rate, or a larger epsilon"
        )
    sigma = SIGMA_GRID
    for interval in SEARCH_INTERVALS:
        found = _least(partial(fits, interval=interval), sigma, low=2, high=most)
        sigma = sigma if found is None else found  # too coarse an interval may find none
    return job(sigma)
