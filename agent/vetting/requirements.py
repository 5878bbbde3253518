"""The minimum power of a vetting before anything leaves, and the number of patients this needs."""

from __future__ import annotations

from typing import Final

from agent.intervals import bounds

PLANTED: Final = 100  # images of the reference, at most, whose near-duplicates of each kind are planted
CAUGHT: Final = 0.9  # of them must be found, by the lower end of the interval


def has_statistical_power(patients: int) -> bool:
    """Whether so many patients suffice for :meth:`agent.vetting.filter.Power.demand`.

    They do if the vetting would show enough by finding all that is planted of them.
    """
    planted = min(patients, PLANTED)
    return planted >= 1 and bounds(planted, planted)[0] >= CAUGHT
