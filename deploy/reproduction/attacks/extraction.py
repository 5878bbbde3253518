"""What a generative model gives away of its patients, and what the vetting catches of it (Privacy Distillation, 4.3).

Extraction in the manner of Carlini et al. 2023 ("Extracting training data from diffusion models", arXiv 2301.13188,
section 5.1): a sample is extracted when it lies much nearer to one training image than that image's neighbours
do. A planted patient, whom the teacher was made to know by heart, asks the same of the vetting: what shows that
patient must be dropped. The paper measured with the network that filtered; a second one measures here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import expit

from agent.intervals import Figure, rate

Pictures = NDArray[np.uint8]  # (n, h, w) or (n, h, w, 3)
DELTAS: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # about those of Figure 2
_ALPHA: Final = 0.5  # Carlini et al., section 5.1
_NEAREST: Final = 50
_ROWS: Final = 256  # samples compared at a time


@dataclass(frozen=True, slots=True, eq=False)
class Extraction:
    """Which samples are a training image again."""

    closeness: NDArray[np.float64]  # (n,) distance to the nearest, in units of half of its neighbours'; small is bad
    nearest: NDArray[np.int64]  # (n,) which training image
    figure: Figure  # the share of samples whose closeness is at most 1

    @property
    def extracted(self) -> NDArray[np.bool_]:
        """(n,): Carlini's criterion."""
        return self.closeness <= 1.0


def extraction(samples: Pictures, known: Pictures, nearest: int = _NEAREST, alpha: float = _ALPHA) -> Extraction:
    """Carlini's criterion: l_2(x, x_1) <= alpha mean of l_2(x, x_i) over the ``nearest`` training images of x.

    Args:
        samples: (n, h, w[, 3]).
        known: (m, h, w[, 3]) what the model learned; fewer than ``nearest`` + 1 of them: all others are neighbours.
        nearest: n of the paper, 50.
        alpha: of the paper, 0.5.
    Raises:
        ValueError: no samples, fewer than three training images, or another shape.
    """
    if not (len(samples) and len(known) >= 3 and samples.shape[1:] == known.shape[1:]):
        raise ValueError("samples and three training images or more, of one shape")
    if not (nearest >= 1 and 0.0 < alpha < 1.0):
        raise ValueError("one neighbour or more, and alpha between 0 and 1")
    flat = known.reshape(len(known), -1).astype(np.float64) / 255.0
    closeness, places = [], []
    for start in range(0, len(samples), _ROWS):
        rows = samples[start : start + _ROWS]
        far = cdist(rows.reshape(len(rows), -1).astype(np.float64) / 255.0, flat)
        near = np.sort(far, axis=1)[:, : nearest + 1]
        around = near[:, 1:].mean(axis=1)
        closeness.append(near[:, 0] / np.maximum(alpha * around, 1e-12))
        places.append(far.argmin(axis=1))
    close = np.concatenate(closeness)
    hits = int((close <= 1.0).sum())
    # what chance reaches is not known beforehand: measure it with images of patients whom the model never saw
    return Extraction(close, np.concatenate(places).astype(np.int64), rate("extracted", hits, len(close), 0.0))


def by_threshold(scores: NDArray[np.float64], deltas: Sequence[float] = DELTAS) -> tuple[Figure, ...]:
    """R_re-id at each threshold delta of the verifier's probability (Figure 2).

    Args:
        scores: (n,) highest log-odds of each sample against the reference; NaN counts as re-identified.
        deltas: in (0, 1).
    """
    share = expit(scores)
    return tuple(rate(f"R_re-id at {d:g}", int((~(share < d)).sum()), len(share), 0.0) for d in deltas)


@dataclass(frozen=True, slots=True)
class Planted:
    """What became of a patient whom the teacher was made to know by heart."""

    drawn: Figure  # the share of samples that show the planted patient, by distance
    caught: Figure | None  # of those, the share that the vetting drops; None: the teacher drew none


def planted_caught(samples: Pictures, kept: NDArray[np.bool_], picture: Pictures, known: Pictures) -> Planted:
    """How many samples show the planted image, and how many of those the vetting dropped.

    Args:
        samples: (n, h, w[, 3]) of the teacher.
        kept: (n,) the vetting's answers.
        picture: (h, w[, 3]) the planted one.
        known: (m, h, w[, 3]) the other patients' images.
    """
    found = extraction(samples, np.concatenate([known, picture[None]]))
    shows = found.extracted & (found.nearest == len(known))
    drawn = rate("samples that show the planted patient", int(shows.sum()), len(samples), 0.0)
    if not shows.any():
        return Planted(drawn, None)
    return Planted(drawn, rate("of them dropped", int((shows & ~kept).sum()), int(shows.sum()), 0.0))
