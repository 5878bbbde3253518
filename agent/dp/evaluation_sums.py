"""The sums of one look at a model: what each held-out patient adds to them, and the noise.

The layout is :mod:`policies.tasks.evaluation`'s, and with it the proof that one patient moves the whole vector by at
most 1. What that proof needs is made here, and nothing else: in each block every image gives a point of the unit
simplex, a patient's point is the mean over their images that have a target for the block, and each patient is added
once. A network's outputs are taken as they come. A score that is no number counts as 0; one outside [0, 1] lies in
the last bin on its side. So no model, however broken or crafted, makes a patient's part larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.dp.noise import Entropy, deviation, lattice_steps, noisy_sum
from policies.tasks.evaluation import SumBlock, SumLayout, bin_of

Point = NDArray[np.float64] | None  # (size of the block,), of the unit simplex; None: the image has no target here


@dataclass(frozen=True, slots=True, eq=False)
class ScoredExample:
    """What a model says of one example, beside what is true.

    ================  ===============================================  =============================================
    task              scores                                           target
    ================  ===============================================  =============================================
    classification    (c,): a share for each class, 1 together         (1,): the class's number
    multi-label       (n,): each finding's probability                 (n,): 0.0 or 1.0; NaN: not known
    regression        (n,): numbers scaled by their public range       (n,): the same; NaN: not known
    segmentation      (*size): the number of each pixel's class        (*size): the same
    ================  ===============================================  =============================================
    """

    scores: NDArray[Any]
    target: NDArray[Any]


def look_sums(layout: SumLayout, patients: Iterable[Sequence[ScoredExample]]) -> NDArray[np.float64]:
    """The sums over patients, each of them named once and with all their examples: (layout.size,) float64.

    One patient more or less moves it by at most 1 in L2 norm, see above. Without patients it is zeros.
    """
    total = np.zeros(layout.size)
    for examples in patients:
        total += patient_part(layout, examples)
    return total


def private_look(
    layout: SumLayout, patients: Iterable[Sequence[ScoredExample]], noise: float, entropy: Entropy
) -> NDArray[np.float32]:
    """The sums with noise of standard deviation ``noise`` on each: (layout.size,) float32, which may leave.

    Whoever there is, it is of the same size and there is always noise: nobody can see whether there is a patient.
    """
    return noisy_sum(look_sums(layout, patients), 1.0, noise, entropy).astype(np.float32)


def masked_look(
    layout: SumLayout,
    patients: Iterable[Sequence[ScoredExample]],
    noise: float,
    lattice: tuple[float, int],
    entropy: Entropy,
) -> NDArray[np.int64]:
    """One site's part of the sums of a look, which must leave masked only: (layout.size,) int64, steps of 2^-scale.

    Args:
        layout: of the sums.
        patients: as for :func:`private_look`.
        noise: this site's share, a standard deviation.
        lattice: what each sum is cut to, and the scale.
        entropy: of the noise.
    """
    most, scale = lattice
    grid = 2.0**-scale
    spread = deviation(1.0, noise, layout.size, grid)
    whole = lattice_steps(np.clip(look_sums(layout, patients), 0.0, most), spread, grid, entropy)
    return whole.astype(np.int64)


def patient_part(layout: SumLayout, examples: Sequence[ScoredExample]) -> NDArray[np.float64]:
    """What one patient adds: in each block the mean over their examples, times the block's weight.

    Its L2 norm is at most 1. A mean of points of a simplex lies in it; a point of it has norm at most 1; and the
    weights' squares add up to 1.
    """
    part = np.zeros(layout.size)
    point = _POINTS[_form(layout)]
    for block in layout.blocks:
        points = [found for one in examples if (found := point(layout, block, one)) is not None]
        if points:
            part[block.start : block.start + block.size] = block.weight * np.mean(points, axis=0)
    return part


def _form(layout: SumLayout) -> str:
    return "scores" if layout.scored else layout.kind


def _vote(size: int, cell: int) -> NDArray[np.float64]:
    """One vote: a corner of the simplex."""
    point = np.zeros(size)
    point[cell] = 1.0
    return point


def _share(value: float) -> NDArray[np.float64]:
    """A share in [0, 1] and the rest of it: a point on an edge of the simplex."""
    held = min(max(value, 0.0), 1.0) if np.isfinite(value) else 0.0
    return np.array([held, 1.0 - held])


def _score(layout: SumLayout, score: float, there: bool) -> NDArray[np.float64]:
    """A vote for the score's bin: the first half of the block is of those without, the second of those with it."""
    return _vote(2 * layout.bins, layout.bins * there + bin_of(score, layout.bins))


def _two_classes(layout: SumLayout, _: SumBlock, one: ScoredExample) -> Point:
    return _score(layout, float(one.scores[1]), int(one.target.flat[0]) == 1)


def _classes(layout: SumLayout, block: SumBlock, one: ScoredExample) -> Point:
    """The confusion matrix, true class by row; or whether the predicted class is right, by its score's bin."""
    scores = np.where(np.isfinite(one.scores), one.scores, 0.0)
    true, best = int(one.target.flat[0]), int(scores.argmax())
    if not 0 <= true < layout.outputs:
        return None
    if block.name == "confusion":
        return _vote(block.size, true * layout.outputs + best)
    return _score(layout, float(scores[best]), true == best)


def _findings(layout: SumLayout, block: SumBlock, one: ScoredExample) -> Point:
    known = float(one.target[block.of])
    return _score(layout, float(one.scores[block.of]), known > 0.5) if np.isfinite(known) else None


def _numbers(_: SumLayout, block: SumBlock, one: ScoredExample) -> Point:
    """The absolute error as a share of the public range, to which both numbers are cut."""
    known, said = float(one.target[block.of]), float(one.scores[block.of])
    if not np.isfinite(known):
        return None
    said = min(max(said, 0.0), 1.0) if np.isfinite(said) else 1.0 - round(known)
    return _share(abs(said - min(max(known, 0.0), 1.0)))


def _segments(_: SumLayout, block: SumBlock, one: ScoredExample) -> Point:
    """Dice, 2 |A and B| / (|A| + |B|), of one class: twice the intersection, where all sizes together are 1.

    So a patient's share is bounded, however large the organ: in voxels, one patient with a large tumour would
    outweigh all others, and noise would have to hide that. Without the class on either side there is nothing to say.
    """
    true, said = one.target == block.of, one.scores == block.of
    together = int(true.sum()) + int(said.sum())
    return _share(2.0 * int((true & said).sum()) / together) if together else None


_POINTS: Final[Mapping[str, Callable[[SumLayout, SumBlock, ScoredExample], Point]]] = MappingProxyType(
    {
        "scores": _two_classes,
        "classification": _classes,
        "multi-label": _findings,
        "regression": _numbers,
        "segmentation": _segments,
    }
)
