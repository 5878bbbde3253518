"""Drawn samples: those that the student learns, the fate of the others, and those shown to a reviewer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray

from agent.models.diffusion.prompts import Conditions
from agent.vetting.exhibits import Images, Labels, ReviewSamples
from agent.vetting.filter import REASONS


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of one condition's samples, in the last round."""

    name: str
    drawn: int
    dropped: Mapping[str, int] = field(hash=False)  # by the reason of :class:`agent.vetting.filter.FilterResult`
    learned: int  # groups whose best sample the student learned
    empty: int  # groups with nothing left: never filled up with what had failed


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The samples of one round: those that the student learns, and counts of the rest."""

    images: Images  # (n, s, s[, 3]) kept
    labels: Labels
    scores: NDArray[np.float64]  # of all that was drawn
    counts: NDArray[np.int64]  # (c, len(REASONS) + 1): samples by reason; last, groups with nothing left
    before: NDArray[np.float64]  # (3,) R_re-id of the teacher's samples, and its interval
    shown: ReviewSamples

    def state(self) -> dict[str, torch.Tensor]:
        """As tensors for a checkpoint, which is stored encrypted in the vault: it contains samples too similar to
        patients.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shown"}
        more = {f"shown.{f.name}": getattr(self.shown, f.name) for f in fields(ReviewSamples)}
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in {**own, **more}.items()}

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Drawn:
        """What :meth:`state` gave."""
        own = {name: tensor.numpy() for name, tensor in state.items()}
        shown = ReviewSamples(**{f.name: own.pop(f"shown.{f.name}") for f in fields(ReviewSamples)})
        return cls(shown=shown, **own)


def tallies(conditions: Conditions, last: Drawn) -> tuple[Tally, ...]:
    """What became of the samples of each condition."""
    out = []
    for number, name in enumerate(conditions.names):
        counts = last.counts[number]
        dropped = {reason: int(counts[place]) for place, reason in enumerate(REASONS) if reason and counts[place]}
        learned, empty = int((last.labels == number).sum()), int(counts[-1])
        out.append(Tally(name, int(counts[:-1].sum()), dropped, learned, empty))
    return tuple(out)
