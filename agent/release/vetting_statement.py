"""The result of a vetting of representatives, and its figures in the statement. The vetting itself imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from agent.domain import Selection
from agent.errors import CohortTooSmallError
from agent.intervals import Proportion
from agent.microaggregation.released_clusters import ReleasedCluster
from policies.statements import Release

if TYPE_CHECKING:  # torch, which what is said here does not need
    from agent.vetting.exhibits import Exhibit
    from agent.vetting.filter import Power

# What a k-anonymous release states as its rate: the limits of the presets, and coarse elsewhere
_STEPS: Final = (0.01, 0.02, *(step / 20 for step in range(1, 21)))


class TooFewToVetError(CohortTooSmallError):
    """So few patients could not show that the vetting finds copies. The text counts nobody (P14)."""

    def __init__(self) -> None:
        """Say what can be done."""
        ValueError.__init__(
            self, "the cohort is too small for [vetting]: too few patients could show that it finds copies"
        )


@dataclass(frozen=True, slots=True, eq=False)
class VettingReport:
    """The site's reviewer's view of a vetting, before anything leaves. It depends on patients: it stays here."""

    pictures: int  # that were compared
    clusters: int  # behind them
    dropped: Mapping[str, int]  # images, by the reason of :class:`agent.vetting.filter.FilterResult`
    lost: tuple[str, ...]  # labels of which no cluster is left, sorted
    left: int  # clusters whose images leave: none, where no new one passed
    # R_re-id by the unseen verifier: of the clusters that would leave, those of earlier releases too
    before: Proportion
    after: Proportion | None  # ... of those that leave; None: nothing leaves
    power: Power
    thresholds: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]  # 95 % of a false match's probability, at the verifiers' thresholds
    exhibits: tuple[Exhibit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class VettingResult:
    """The clusters that leave, those that were shown before and never will be again, and what was found."""

    fresh: tuple[ReleasedCluster, ...]
    again: tuple[ReleasedCluster, ...]
    gone: tuple[ReleasedCluster, ...] = ()
    found: VettingReport | None = None

    def stated(self, draft: Release) -> Release:
        """The statement with the two figures, where there are any: both coarse, as of level B
        (:func:`round_up_coarse`).
        """
        if self.found is None or self.found.after is None:
            return draft
        rate = round_up_coarse(self.found.after.high)
        return replace(stated(draft, self.found.after, self.found.power.caught), reid_rate=rate)


def compared(selection: Selection) -> Selection:
    """Whom the images of a selection are compared with: other parts of its split, other labels, short series too.

    Comparable is what has the modality, the body part if one is named, and the shape. Not seen are patients who have
    opted out, images without a label, and what the vault withholds.
    """
    return replace(selection, split=None, part="", labels=frozenset(), min_instances=1)


def stated(draft: Release, found: Proportion, caught: Proportion) -> Release:
    """The two figures on which a vetting is judged: the upper end of what is left, the lower end of what it finds."""
    return replace(draft, reid_rate=round_up(found.high), vetting_power=round_down_coarse(caught.low))


def round_up(share: float) -> str:
    """A share as a statement has it: never below what was found."""
    return repr(math.ceil(share * 10_000) / 10_000)


def round_up_coarse(share: float) -> str:
    """The same in few steps: with nobody found a fine one tells how many clusters there are (design, section 5).

    Raises:
        ValueError: no share, such as NaN.
    """
    return repr(min(step for step in _STEPS if share <= step))


def round_down_coarse(share: float) -> str:
    """The same, never above it; coarse: an interval's width would tell how many patients there are."""
    return repr(math.floor(share * 20) / 20)
