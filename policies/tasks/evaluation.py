"""Private evaluation: the sums that a site makes over its held-out patients, and why one moves them by at most 1.

Pure and public: a site lays its sums out by it, and the coordinator reads them by it.

The sums are cut into *blocks*. In each block a patient contributes a point of the unit simplex: numbers that are not
negative and add up to at most 1. An image's vote for one cell is such a point, and so is a pair (d, 1 - d) with d in
[0, 1]. A patient with several images contributes their mean, block by block, over those images that have a target for
the block: a mean of points of a simplex is one of its points. So in a block b a patient's part x_b has norm |x_b|_2
<= |x_b|_1 <= 1, whatever the number of images. The blocks' weights w_b have squares that add up to 1, and the whole
vector (w_1 x_1, ..., w_B x_B) has the squared norm sum_b w_b^2 |x_b|^2 <= 1. Adding or removing a patient, with all
their images, adds or removes this vector and nothing else. The bound is reached by a patient who votes for one cell
in every block: the sensitivity is 1, not less.

========================  ===================================================================================
a task of kind            has the blocks
========================  ===================================================================================
classification, 2 classes ``scores/1``: the second class's score by bin, among patients without and with it
classification, more      ``confusion``: true by predicted class; ``calibration``: the predicted class's score by
                          bin, wrong and right
multi-label               ``scores/k`` for each finding k
segmentation              ``dice/k`` for each class k but the background, 0
regression                ``error/k`` for each number k, as a share of its public range
========================  ===================================================================================
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Final

from policies.accounting.claims import MAX_LOOKS, Evaluated, GaussianQuery, Stepwise, UnsupportedClaimError
from protos.common.errors import ConfigError

KINDS: Final = ("classification", "multi-label", "regression", "segmentation")
MOST_SUMS: Final = 1 << 16
MOST_BINS: Final = 64
USUAL_BINS: Final = 10  # where nobody says how many
MOST_HELD_OUT: Final = 50  # per cent
SPLIT: Final = "evaluation"  # the name of the division, the same for every run
HELD_OUT: Final = "held-out"  # its part that is looked at
TRAINED: Final = "trained"  # its part that is trained on
LONGEST_TAIL: Final = 12.18  # no noise is larger, in its own standard deviations (agent/dp/noise.py)
_MOST_WIDENING: Final = 0.05  # of a share of the noise, to cover the rounding
EXACT_BITS: Final = 24  # whole numbers of so many are exact in float32


class EvaluationError(ConfigError, ValueError):
    """The evaluation cannot be done as it is written; the text names the keys."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What a configuration says of its looks: public, and priced before the first step."""

    looks: int  # the most there can be in the run
    noise: float  # standard deviation, in units of what one patient moves all sums together by
    held_out: int  # per cent of the patients, who are looked at and never trained on
    bins: int  # of scores, an even number

    def __post_init__(self) -> None:
        """Refuse what cannot be priced, all problems at once."""
        rules = {
            f"looks: 1 to {MAX_LOOKS}": type(self.looks) is int and 1 <= self.looks <= MAX_LOOKS,
            f"held_out: 1 to {MOST_HELD_OUT} per cent": type(self.held_out) is int
            and 1 <= self.held_out <= MOST_HELD_OUT,
            f"bins: an even number, 2 to {MOST_BINS}": type(self.bins) is int
            and 2 <= self.bins <= MOST_BINS
            and self.bins % 2 == 0,
        }
        wrong = [f"evaluate.{rule}" for rule, right in rules.items() if not right]
        try:
            self.query()
        except UnsupportedClaimError as fault:
            wrong.append(f"evaluate.noise: {fault}")
        if wrong:
            raise EvaluationError("; ".join(wrong))

    def query(self) -> GaussianQuery:
        """One look: a vector of norm at most 1 for each patient, and noise on every number."""
        return GaussianQuery(self.noise, 1, 1)

    def claim(self, training: Stepwise) -> Evaluated:
        """What a training with these looks promises, all together."""
        return Evaluated(training, self.query(), self.looks)

    @property
    def shares(self) -> Mapping[str, int]:
        """The parts of the division of patients.

        Those held out come first: with a smaller share the same patients are held out, and fewer. With a larger one,
        patients are held out whom an earlier run has trained on; then a start that came of that run flatters.
        """
        return MappingProxyType({HELD_OUT: self.held_out, TRAINED: 100 - self.held_out})

    def to_table(self) -> dict[str, int | float]:
        """In JSON's types."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def plan_from(value: object) -> EvaluationPlan:
    """Read what :meth:`EvaluationPlan.to_table` wrote, strictly.

    Raises:
        EvaluationError: naming the keys.
    """
    wanted = {f.name for f in fields(EvaluationPlan)}
    if not isinstance(value, Mapping):
        raise EvaluationError(f"evaluate: must be an object with {', '.join(sorted(wanted))}")
    if wrong := sorted(wanted ^ value.keys()):
        raise EvaluationError(f"evaluate: unknown or missing keys: {', '.join(wrong)}")
    given: Any = value
    return EvaluationPlan(**given)


@dataclass(frozen=True, slots=True)
class SumLattice:
    """How the sums of a look travel where only their total over the sites may be seen: whole steps of 2^-scale.

    Every sum of a site is cut to [0, public_patients], which moves no two neighbours further apart, and then gets the
    site's share of the noise, whose generator has an end. So nothing is cut afterwards, and the noise of the total is
    the sum of the noises.
    """

    bound: float  # of each number of a site, a whole number
    scale: int

    @classmethod
    def of(cls, claim: Evaluated, public_patients: int, size: int) -> SumLattice:
        """The finest on which every number of a site is exact in float32, for ``size`` sums.

        Raises:
            EvaluationError: its steps are not small beside the noise and what one patient moves: rounding moves two
            neighbours apart by a step in each of the sums, which the noise covers by being so much wider.
        """
        bound = math.ceil(public_patients + LONGEST_TAIL * claim.share * (1.0 + _MOST_WIDENING) + 1.0)
        step = 2.0 ** -(scale := EXACT_BITS - bound.bit_length())
        if not (claim.share >= 16.0 * step and step * math.sqrt(size) <= _MOST_WIDENING):
            raise EvaluationError(
                "evaluate: public_patients is too large for so many secret sums, or noise too small: the steps of a "
                "number would show; take fewer bins, or more noise"
            )
        return cls(float(bound), scale)


@dataclass(frozen=True, slots=True)
class SumBlock:
    """Some neighbouring sums, of which a patient contributes a point of the unit simplex."""

    name: str
    start: int  # of its first number in the vector
    size: int
    weight: float  # its numbers are multiplied by it

    @property
    def of(self) -> int:
        """Which output of the network it is about."""
        return int(self.name.partition("/")[2] or 0)


@dataclass(frozen=True)
class SumLayout:
    """The vector of all sums of one look."""

    kind: str  # of the task
    outputs: int  # classes (of segmentation with the background), findings, or numbers
    bins: int

    def __post_init__(self) -> None:
        """Refuse a task that cannot be evaluated."""
        if self.kind not in KINDS:
            raise EvaluationError(f"evaluate: a task of kind {', '.join(KINDS)}")
        least = 2 if self.kind in ("classification", "segmentation") else 1
        if not least <= self.outputs:
            raise EvaluationError(f"evaluate: a {self.kind} has {least} outputs or more")
        if not self.size <= MOST_SUMS:
            raise EvaluationError(f"evaluate: {self.size} sums for so many outputs and bins, at most {MOST_SUMS}")

    @cached_property
    def blocks(self) -> tuple[SumBlock, ...]:
        """Its blocks, one after the other, of equal weight."""
        sizes = self._sizes()
        weight, blocks, at = 1.0 / math.sqrt(len(sizes)), list[SumBlock](), 0
        for name, size in sizes.items():
            blocks.append(SumBlock(name, at, size, weight))
            at += size
        return tuple(blocks)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(self._sizes().values())

    @property
    def scored(self) -> bool:
        """Whether it is a classification of two classes, of which one score says all."""
        return self.kind == "classification" and self.outputs == 2

    def _sizes(self) -> dict[str, int]:
        if self.scored:
            return {"scores/1": 2 * self.bins}
        if self.kind == "classification":
            return {"confusion": self.outputs**2, "calibration": 2 * self.bins}
        if self.kind == "multi-label":
            return {f"scores/{k}": 2 * self.bins for k in range(self.outputs)}
        name, first = ("dice", 1) if self.kind == "segmentation" else ("error", 0)
        return {f"{name}/{k}": 2 for k in range(first, self.outputs)}


@cache
def edges(bins: int) -> tuple[float, ...]:
    """The bins + 1 edges of scores in [0, 1]: finer at both ends, where rare findings lie, with 0.5 among them.

    Edge i is sin^2(pi i / 2 bins), so that a share estimated from any bin's width has the same standard error.
    """
    lower = [math.sin(0.5 * math.pi * i / bins) ** 2 for i in range(bins // 2)]
    return (*lower, 0.5, *(1.0 - edge for edge in reversed(lower)))


def bin_of(score: float, bins: int) -> int:
    """The bin of a score in [0, 1]; a lower edge belongs to its bin, and what is no number counts as 0."""
    return bisect.bisect_right(edges(bins)[1:-1], score if math.isfinite(score) else 0.0)
