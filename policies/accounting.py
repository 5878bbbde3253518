"""Claims to privacy loss: confirm the budget filter's price, and (epsilon, delta) for people.

Prices are computed in :mod:`policies.rdp`, which an auditor can run alone; no grant is given on one that Google's
``dp-accounting``, the accountant of record, does not confirm. The filter is a Rényi filter at one integer order,
fixed when the account is opened (Feldman & Zrnic 2021; Lecuyer 2021): later claims may depend on earlier releases, so
neither the best order in hindsight nor a running PLD total would be a valid stopping rule (design P9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import dp_accounting as dp
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from policies.claims import Claim, SubsampledGaussian, UnsupportedClaim
from policies.rdp import NANO, allowance, cost, epsilon_nano, integer_rdp, log_term

ORDERS: Final = tuple(range(2, 65))
# The job whose repetitions an account's order is chosen for: small sampling rate, moderate noise.
REFERENCE: Final = SubsampledGaussian(sampling_rate=0.05, noise_multiplier=1.5, steps=1)
PLD_INTERVAL: Final = 1e-5


__all__ = ["NANO", "allowance", "cost", "epsilon_nano", "log_term"]


class AccountantsDisagree(ArithmeticError):
    """Two independent computations of one price differ: nothing may be granted on it."""


def _event(claim: Claim) -> dp.DpEvent:
    if not isinstance(claim, SubsampledGaussian):
        raise UnsupportedClaim(f"{type(claim).__name__} has no epsilon")
    step = dp.PoissonSampledDpEvent(claim.sampling_rate, dp.GaussianDpEvent(claim.noise_multiplier))
    return dp.SelfComposedDpEvent(step, claim.steps)


@lru_cache(maxsize=4096)
def rdp(claim: Claim, order: int) -> float:
    """Rényi DP of one claim at one integer order, in nats, by two accountants that must agree.

    Raises:
        UnsupportedClaim: the claim has no Rényi curve (k-anonymity has none, not a zero one).
        AccountantsDisagree: the two figures differ by more than a millionth.
    """
    event = _event(claim)
    assert isinstance(claim, SubsampledGaussian)
    accountant = RdpAccountant(orders=[order], neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(event)
    of_record = float(accountant._rdp[0])  # the curve has no public reader in dp-accounting 0.6
    second = integer_rdp(claim, order)
    if not abs(of_record - second) <= 1e-6 * max(of_record, second) + 1e-15:
        raise AccountantsDisagree(f"order {order}: {of_record!r} against {second!r}")
    return max(of_record, second)


def confirm(claim: Claim, order: int) -> None:
    """Refuse to grant a price that the accountant of record does not confirm.

    Raises:
        UnsupportedClaim: the claim has no Rényi curve.
        AccountantsDisagree: the two accountants differ.
    """
    rdp(claim, order)


def order_for(epsilon_budget: float, delta: float) -> int:
    """The integer order an account of (epsilon, delta) is opened at: it lets most of ``REFERENCE`` through."""
    if not (math.isfinite(epsilon_budget) and epsilon_budget > 0):
        raise ValueError("epsilon must be positive and finite")
    return max(ORDERS, key=lambda a: allowance(epsilon_budget, delta, a) / cost(REFERENCE, a))


def epsilon_of(spent: int, delta: float, order: int) -> float:
    """The (epsilon, delta) statement for ``spent`` nano-nats at ``order``; 0 spent is epsilon 0."""
    return spent / NANO + max(0.0, log_term(order, delta)) if spent else 0.0


def epsilon(claims: Iterable[Claim], delta: float, order: int | None = None) -> float:
    """An upper bound on epsilon of claims composed, by Rényi DP.

    Args:
        claims: all of one unit and relation (the patient; add or remove).
        delta: in (0, 1).
        order: the account's fixed order (the filter's figure, valid under adaptivity). Without one, the best of
            ``ORDERS``: valid only for claims that were all fixed in advance.
    Raises:
        UnsupportedClaim: a claim without an epsilon is among them; it is not free, it is not comparable (P4).
    """
    listed = list(claims)
    if not listed:
        return 0.0
    orders = ORDERS if order is None else (order,)
    return min(sum(rdp(c, a) for c in listed) + max(0.0, log_term(a, delta)) for a in orders)


@lru_cache(maxsize=512)
def _tight(claims: tuple[Claim, ...], delta: float) -> float:
    accountant = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=PLD_INTERVAL)
    for claim in claims:
        accountant.compose(_event(claim))
    return float(accountant.get_epsilon(delta))


def tight_epsilon(claims: Iterable[Claim], delta: float) -> float:
    """Epsilon by privacy loss distributions, for claims fixed in advance. For reports, never for the filter (P9)."""
    listed = tuple(claims)
    return _tight(listed, delta) if listed else 0.0
