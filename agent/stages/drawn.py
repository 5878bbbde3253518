"""What was drawn: which samples the student learns, what became of the others, and those that a reviewer looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from agent.nets.conditions import Conditions
from agent.nets.occlusion import heat
from agent.nets.verifier import Verifier
from agent.stages.vet import REASONS, Reference, Vetting

Pictures = NDArray[np.uint8]  # (n, s, s) or (n, s, s, 3)
Labels = NDArray[np.int64]  # (n,): places in the conditions' names
SHOWN: Final = 8  # exhibits of what was kept, and as many of what was dropped


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of one condition's samples, in the last round."""

    name: str
    drawn: int
    dropped: Mapping[str, int] = field(hash=False)  # by the reason of :class:`agent.stages.vet.Vetted`
    learned: int  # groups whose best sample the student learned
    empty: int  # groups with nothing left: never filled up with what had failed


@dataclass(frozen=True, slots=True, eq=False)
class Exhibit:
    """A sample beside the picture that it is most like. For the site's reviewer only: it shows a patient."""

    made: Pictures  # (s, s[, 3])
    nearest: Pictures  # the same: of a patient; of ``distill-dp`` a public picture
    probability: float  # that both are of one person, as the verifier says
    alignment: float | None  # of the sample with its condition; None: nobody asked for one
    condition: str
    reason: str  # why it was dropped; "": it was kept
    heat: NDArray[np.float32] | None  # (h, w) in [0, 1]: where the two are alike


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Samples for the reviewer's eyes, not yet beside what they look like."""

    images: Pictures  # (e, s, s[, 3])
    labels: Labels
    scores: NDArray[np.float64]
    nearest: NDArray[np.int64]  # places in the reference
    alignments: NDArray[np.float64]
    reasons: NDArray[np.int64]  # places in REASONS

    def most(self, other: Shown) -> Shown:
        """The most alike of both: so many of what was kept, and so many of what was dropped."""
        both = Shown(
            **{f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Shown)}
        )
        order = np.argsort(-both.scores, kind="stable")
        kept = [place for place in order if REASONS[both.reasons[place]] == ""][:SHOWN]
        dropped = [place for place in order if REASONS[both.reasons[place]] != ""][:SHOWN]
        return both.taken(np.array(kept + dropped, np.int64))

    def taken(self, places: NDArray[np.int64]) -> Shown:
        """Those at some places."""
        return Shown(**{f.name: getattr(self, f.name)[places] for f in fields(Shown)})

    def dropped(self) -> Shown:
        """Those that were dropped."""
        return self.taken(np.flatnonzero(self.reasons != REASONS.index("")))


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What one round drew: what the student learns, and what is told of the rest."""

    images: Pictures  # (n, s, s[, 3]) kept
    labels: Labels
    scores: NDArray[np.float64]  # of all that was drawn
    counts: NDArray[np.int64]  # (c, len(REASONS) + 1): samples by reason; last, groups with nothing left
    before: NDArray[np.float64]  # (3,) R_re-id of the teacher's samples, and its interval
    shown: Shown

    def state(self) -> dict[str, torch.Tensor]:
        """As tensors, for a checkpoint: it lies sealed in the vault, for it holds what was too much like somebody."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shown"}
        more = {f"shown.{f.name}": getattr(self.shown, f.name) for f in fields(Shown)}
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in {**own, **more}.items()}

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Drawn:
        """What :meth:`state` gave."""
        own = {name: tensor.numpy() for name, tensor in state.items()}
        shown = Shown(**{f.name: own.pop(f"shown.{f.name}") for f in fields(Shown)})
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


def exhibits(names: Sequence[str], vetting: Vetting, shown: Shown, reference: Reference) -> tuple[Exhibit, ...]:
    """Each sample beside the picture that it is most like, and where; ``names`` are those of the labels."""
    out, judge = [], vetting.verifier
    for number, made in enumerate(shown.images):
        nearest = reference.picture(int(shown.nearest[number]))
        unit = np.stack([made, nearest]).astype(np.float32) / np.float32(255)
        score, reason = float(shown.scores[number]), REASONS[shown.reasons[number]]
        out.append(
            Exhibit(
                made,
                nearest,
                float(expit(score)),
                float(shown.alignments[number]),
                names[shown.labels[number]],
                reason,
                heat(judge, unit[0], unit[1]) if isinstance(judge, Verifier) else None,
            )
        )
    return tuple(out)
