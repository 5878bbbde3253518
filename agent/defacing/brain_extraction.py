"""Where the brain is: two ways that fail for different reasons, and how far they agree.

BET follows the edge between brain and skull and loses almost no brain, but includes dura, eye muscles or neck. A
registered template shows where a brain is, but not where this one ends. Every method keeps the union of both bit for
bit; the intersection is the best estimate of the brain itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.bet import bet
from agent.defacing.ct_brain import cavity, hounsfield
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import averaged, resample, spacing

Mask = NDArray[np.bool_]

LOOSE: Final = (0.5, 0.6, 0.7)  # of BET for what is kept: Smith's default, or more
TIGHT: Final = (0.7, 0.8, 0.9)  # of BET for the estimate
GROWN_MM: Final = 2.0  # the template, for what is kept: what a head's own folds stand out of an affine fit
REACH_MM: Final = 10.0  # out of the template, how far BET is believed; no head's brain stands out further
BURST: Final = 0.02  # share of BET beyond that reach at which it has burst through the skull
_CONTENT_HU: Final = (-60.0, 100.0)  # the window of brain, which is never quite black in it
_GRID_MM: Final = 4.0  # on which likeness is measured
_BINS: Final = 32


def _nothing() -> Mask:
    return np.zeros((0, 0, 0), bool)


@dataclass(frozen=True, slots=True, eq=False)
class Atlas:
    """A template: the mean of many brains, and where brain is in it."""

    values: NDArray[Any]  # (i, j, k), brain only
    brain: Mask  # (i, j, k), grey and white matter, ventricles and the fluid between folds
    affine: NDArray[np.float64]  # (4, 4), index to mm of the template

    def __post_init__(self) -> None:
        """One grid, and a brain in it."""
        if self.values.shape != self.brain.shape or self.values.ndim != 3 or not bool(self.brain.any()):
            raise ValueError("an atlas has a brain on the grid of its values")


Register = Callable[[Volume, Atlas], NDArray[np.float64]]  # (4, 4), RAS+ mm of the volume to mm of the atlas


@dataclass(frozen=True, slots=True, eq=False)
class Brain:
    """The brain of one head, on the oriented grid."""

    mask: Mask  # (i, j, k), what no method may touch: no brain outside of it, some that is none inside
    agreement: float  # Dice of BET at its tighter setting and the template, or of an external mask and the template
    to_template: NDArray[np.float64]  # (4, 4), RAS+ mm of the scanner to mm of the template
    tight: Mask = field(default_factory=_nothing)  # (i, j, k), the best estimate, within ``mask``
    likeness: float = 1.0  # see :func:`likeness`; not asked of CT, where bone around a brain's shape tells a head

    def __post_init__(self) -> None:
        """One grid; without an estimate of its own the mask is the estimate."""
        if self.tight.size == 0:
            object.__setattr__(self, "tight", self.mask)
        if self.mask.dtype != np.bool_ or self.tight.dtype != np.bool_ or self.tight.shape != self.mask.shape:
            raise ValueError("masks are bool and lie on one grid")
        if bool((self.tight & ~self.mask).any()):
            raise ValueError("the estimate lies within the mask")
        if self.to_template.shape != (4, 4) or not bool(np.isfinite(self.to_template).all()):
            raise ValueError("to_template is a finite (4, 4) matrix")


def extract(volume: Volume, atlas: Atlas, register: Register, mask: Mask | None = None) -> Brain:
    """The brain of a head in MR, or in CT, where the cavity of the skull takes the place of BET.

    Args:
        volume: oriented RAS+.
        atlas: brain-only template.
        register: finds ``to_template``.
        mask: of the operator's own (HD-BET, SynthStrip, by hand) on the oriented grid, instead of the union. The
            template is registered all the same: the face is found by it, and the mask is compared with it.

    Raises:
        NotDefacedError: ``no_head``, ``mask_does_not_fit``, and what ``register`` raises.
    """
    if mask is not None and (mask.shape != volume.values.shape or not bool(mask.any())):
        raise NotDefacedError("mask_does_not_fit")
    units = hounsfield(volume)
    if units is not None:
        return _in_skull(units, atlas, register, mask)
    to_template = register(volume, atlas)
    template = carried(atlas.brain, atlas, to_template, volume)
    alike = likeness(volume, atlas, to_template)
    if mask is not None:
        return Brain(mask, dice(mask, template), to_template, mask, alike)
    wide, reach = (grown(template, spacing(volume.affine), by) for by in (GROWN_MM, REACH_MM))
    tight = _held(volume, reach, TIGHT)
    kept = _held(volume, reach, LOOSE) | tight & reach | wide
    return Brain(kept, dice(tight, template), to_template, tight & template, alike)


def _held(volume: Volume, reach: Mask, fractions: tuple[float, ...]) -> Mask:
    """BET at the first setting at which the skull holds its surface; after the last, what of it is within reach.

    In coarse images the skull is thinner than the grid: the surface can burst through and come to rest on the skin.
    """
    found = reach
    for fraction in fractions:
        found = bet(volume, fraction)
        if int((found & ~reach).sum()) <= BURST * int(found.sum()):
            return found
    return found & reach


def _in_skull(units: Volume, atlas: Atlas, register: Register, mask: Mask | None) -> Brain:
    """By bone, and the template laid onto what the bone holds: a T1 brain has nothing in common with a whole CT."""
    inside = cavity(units)
    content = np.where(inside, np.clip(units.values, *_CONTENT_HU) - np.float32(_CONTENT_HU[0]), np.float32(0))
    alone = Volume(content.astype(np.float32), units.affine)
    to_template = register(alone, atlas)
    template = carried(atlas.brain, atlas, to_template, units)
    if mask is not None:
        return Brain(mask, dice(mask, template), to_template, mask)
    wide = grown(template, spacing(units.affine), GROWN_MM)
    return Brain(inside | wide, dice(inside, template), to_template, inside & template)


def carried(mask: Mask, atlas: Atlas, to_template: NDArray[np.float64], volume: Volume) -> Mask:
    """A mask of the template on the volume's grid."""
    i, j, k = volume.values.shape
    shares = resample(mask, atlas.affine, (i, j, k), to_template @ volume.affine)
    return shares > 0.5


def likeness(volume: Volume, atlas: Atlas, to_template: NDArray[np.float64]) -> float:
    """Correlation ratio of the volume's intensities given the atlas's, within the atlas's brain (Roche et al. 1998).

    It asks for no particular contrast: grey matter, white matter and fluid must differ, in any order.

    Returns:
        in [0, 1]; 0 where nothing of the brain lies in the image or nothing varies.
    """
    edges = spacing(atlas.affine)
    i, j, k = (max(1, int(n)) for n in np.array(atlas.values.shape) * edges / _GRID_MM)
    grid = atlas.affine @ np.diag([*(_GRID_MM / edges), 1.0])
    there = averaged(atlas.values, atlas.affine, (i, j, k), grid)
    inside = resample(atlas.brain, atlas.affine, (i, j, k), grid) > 0.5
    back = np.linalg.inv(to_template) @ grid
    seen = averaged(volume.values, volume.affine, (i, j, k), back, fill=float(volume.values.min()))
    x, y = there[inside].astype(np.float64), seen[inside].astype(np.float64)
    if x.size == 0:
        return 0.0
    y = np.clip(y, *np.percentile(y, (1, 99)))
    bins = np.clip((np.argsort(np.argsort(x, kind="stable"), kind="stable") * _BINS) // x.size, 0, _BINS - 1)
    counts, sums = np.bincount(bins, minlength=_BINS), np.bincount(bins, y, minlength=_BINS)
    total = float(y.var())
    if not total > 0:
        return 0.0
    means = sums / np.maximum(counts, 1)
    return float((counts * (means - y.mean()) ** 2).sum() / x.size / total)


def grown(mask: Mask, mm: NDArray[np.float64], by_mm: float) -> Mask:
    """Everything within ``by_mm`` of a mask."""
    made = np.zeros_like(mask)
    if bool(mask.any()):
        near = around(mask, mm, by_mm)
        made[near] = ndimage.distance_transform_edt(~mask[near], sampling=mm) <= by_mm
    return made


def around(mask: Mask, mm: NDArray[np.float64], by_mm: float) -> tuple[slice, ...]:
    """The box of a mask that is not empty, wider by ``by_mm`` on each side, as far as the grid goes."""
    (box,) = ndimage.find_objects(mask.astype(np.uint8))
    room = np.ceil(by_mm / mm).astype(int) + 1
    return tuple(slice(max(0, side.start - int(n)), side.stop + int(n)) for side, n in zip(box, room, strict=True))


def dice(a: Mask, b: Mask) -> float:
    """Overlap of two masks in [0, 1]; nan for two empty ones, which loses every comparison."""
    both = int(a.sum()) + int(b.sum())
    return 2 * int((a & b).sum()) / both if both else float("nan")
