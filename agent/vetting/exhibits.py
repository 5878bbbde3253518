"""Synthetic images next to their nearest patients' images, for a reviewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from agent.models.recognition.occlusion import heat
from agent.models.recognition.verifier import Verifier
from agent.vetting.filter import REASONS
from agent.vetting.reference import Reference, Vetting

Images = NDArray[np.uint8]  # (n, s, s) or (n, s, s, 3)


Labels = NDArray[np.int64]  # (n,): places in the conditions' names


SHOWN: Final = 8  # exhibits of what was kept, and as many of what was dropped


@dataclass(frozen=True, slots=True, eq=False)
class Exhibit:
    """A sample beside the image that it is most like. For the site's reviewer only: it shows a patient."""

    made: Images  # (s, s[, 3])
    nearest: Images  # the same: of a patient; of ``distill-dp`` a public image
    probability: float  # that both are of one person, as the verifier says
    alignment: float | None  # of the sample with its condition; None: nobody asked for one
    condition: str
    reason: str  # why it was dropped; "": it was kept
    heat: NDArray[np.float32] | None  # (h, w) in [0, 1]: where the two are alike


@dataclass(frozen=True, slots=True, eq=False)
class ReviewSamples:
    """Samples for the reviewer, not yet next to their nearest images."""

    images: Images  # (e, s, s[, 3])
    labels: Labels
    scores: NDArray[np.float64]
    nearest: NDArray[np.int64]  # places in the reference
    alignments: NDArray[np.float64]
    reasons: NDArray[np.int64]  # places in REASONS

    def most(self, other: ReviewSamples) -> ReviewSamples:
        """The most alike of both: so many of what was kept, and so many of what was dropped."""
        both = ReviewSamples(
            **{f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(ReviewSamples)}
        )
        order = np.argsort(-both.scores, kind="stable")
        kept = [place for place in order if REASONS[both.reasons[place]] == ""][:SHOWN]
        dropped = [place for place in order if REASONS[both.reasons[place]] != ""][:SHOWN]
        return both.taken(np.array(kept + dropped, np.int64))

    def taken(self, places: NDArray[np.int64]) -> ReviewSamples:
        """Those at some places."""
        return ReviewSamples(**{f.name: getattr(self, f.name)[places] for f in fields(ReviewSamples)})

    def dropped(self) -> ReviewSamples:
        """Those that were dropped."""
        return self.taken(np.flatnonzero(self.reasons != REASONS.index("")))


def exhibits(
    names: Sequence[str], vetting: Vetting, shown: ReviewSamples, reference: Reference
) -> tuple[Exhibit, ...]:
    """Each sample beside the image that it is most like, and where; ``names`` are those of the labels."""
    out, judge = [], vetting.verifier
    for number, made in enumerate(shown.images):
        nearest = reference.image(int(shown.nearest[number]))
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
