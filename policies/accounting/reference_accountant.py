"""The accountant of record, Google's ``dp-accounting``, asked for one figure at a time.

Apart from :mod:`policies.accounting.accountant`, since it imports scipy, which takes half a second: only a process
that computes a price or an epsilon has to wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import dp_accounting as dp
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from policies.accounting.claims import DistributedGaussian, GaussianQuery, Part

Simple = Part | DistributedGaussian  # a Gaussian claim that is not composed of others
_RELATIONS: Final = {"add-or-remove-one": dp.NeighboringRelation.ADD_OR_REMOVE_ONE}


def _event(claim: Simple) -> tuple[dp.DpEvent, int]:
    """The claim in the words of the accountant of record: an event, and how often it is composed with itself."""
    if isinstance(claim, GaussianQuery):
        return dp.GaussianDpEvent(claim.noise_multiplier), 1
    return dp.PoissonSampledDpEvent(claim.sampling_rate, dp.GaussianDpEvent(claim.noise_multiplier)), claim.steps


def steps(claim: Simple) -> int:
    """How often the claim's event is composed with itself."""
    return _event(claim)[1]


def rdp(claims: Sequence[Simple], order: int) -> float:
    """Rényi DP of claims of one relation, composed, at one integer order, in nats."""
    whole = dp.ComposedDpEvent([dp.SelfComposedDpEvent(event, times) for event, times in map(_event, claims)])
    accountant = RdpAccountant(orders=[order], neighboring_relation=_RELATIONS[claims[0].relation])
    accountant.compose(whole)
    return float(accountant._rdp[0])  # the curve has no public reader in dp-accounting 0.6


def pld_epsilon(claims: Sequence[Simple], delta: float, interval: float) -> float:
    """Epsilon of claims of one relation, composed, by privacy loss distributions of this discretization interval."""
    accountant = PLDAccountant(_RELATIONS[claims[0].relation], value_discretization_interval=interval)
    times: Counter[dp.DpEvent] = Counter()
    for event, count in map(_event, claims):
        times[event] += count
    for event, count in times.items():
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))
