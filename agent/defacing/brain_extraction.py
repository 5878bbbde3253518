"""Where the brain is: two ways that fail for different reasons, and how far they agree.

BET follows the edge between brain and skull and loses almost no brain, but includes dura, eye muscles or neck. A
registered template shows where a brain is, but not where this one ends. Every method keeps the union of both bit for
bit; the intersection is the best estimate of the brain itself.

The brain in CT: what the skull holds.

BET needs a brain that is brighter than what surrounds it, which CT has not. There the skull itself is the border:
soft tissue within bone of 300 HU and more, cut off at its holes. The stored numbers of a CT are Hounsfield units that
its file shifted and scaled, so air and soft tissue, the two commonest materials of a head, are used to find them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.bet import bet
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import averaged, resample, spacing

AIR_HU: Final = -1000.0
SOFT_HU: Final = 38.0  # muscle 50, brain 30 to 40; a few tens more or less change nothing below
BONE_HU: Final = 300.0
_WINDOW_HU: Final = (-20.0, 130.0)  # brain, fluid and fresh blood, with noise
_HOLE_MM: Final = 7.0  # holes of the skull narrower than twice this are closed: optic canals, sutures, the great one
_BACK_MM: Final = 3.0  # how much further than the hole's radius the core grows back, into the corners of the cavity
_CT_GRID_MM: Final = 2.0
_NARROW: Final = 0.12  # of the way from air to tissue
_SHARE: Final = 0.6  # of tissue in that narrow band: 0.8 in CT, a third or less in MR
_SAMPLE: Final = 1_000_000


def hounsfield(volume: Volume) -> Volume | None:
    """The volume in (about) Hounsfield units as float32, or None if it is no CT."""
    step = max(1, round((volume.values.size / _SAMPLE) ** (1 / 3)))
    sample = volume.values[::step, ::step, ::step].astype(np.float64).ravel()
    middle = np.percentile(sample, (0.5, 99.5)).mean()
    counts, edges = np.histogram(sample[sample < middle], bins=512)
    if not counts.sum():
        return None
    air = float(edges[counts.argmax() : counts.argmax() + 2].mean())  # padding is rarer, or as dark as air
    tissue = sample[sample > air + 0.5 * (np.percentile(sample, 98) - air)]
    if not tissue.size:
        return None
    counts, edges = np.histogram(tissue, bins=256)
    soft = float(edges[counts.argmax() : counts.argmax() + 2].mean())
    if not soft > air:
        return None
    scale = (SOFT_HU - AIR_HU) / (soft - air)
    share = float((np.abs(tissue - soft) < _NARROW * (soft - air)).mean())
    bone = float((sample > soft + (BONE_HU - SOFT_HU) / scale).mean())
    if not (share >= _SHARE and bone >= 0.01):
        return None
    return Volume(((volume.values.astype(np.float32) - air) * scale + AIR_HU).astype(np.float32), volume.affine)


def cavity(units: Volume) -> NDArray[np.bool_]:
    """What lies within the skull.

    Args:
        units: oriented RAS+, in Hounsfield units.

    Returns:
        (i, j, k) bool.
    Raises:
        NotDefacedError: ``no_head``, no bone holds anything.
    """
    edges = spacing(units.affine)
    i, j, k = (max(1, int(np.ceil(n))) for n in edges * units.values.shape / _CT_GRID_MM)
    grid = units.affine @ np.diag([*(_CT_GRID_MM / edges), 1.0])
    smooth = ndimage.gaussian_filter(units.values.astype(np.float32), 1.0 / edges)  # against noise
    values = resample(smooth, units.affine, (i, j, k), grid, 1, AIR_HU)
    bone = values > BONE_HU
    soft = (values > _WINDOW_HU[0]) & (values < _WINDOW_HU[1])
    room = np.pad(soft & ~bone, 1)
    deep = ndimage.distance_transform_edt(room, sampling=_CT_GRID_MM)
    held = _behind_bone(np.pad(bone, 1))
    core, count = ndimage.label((deep > _HOLE_MM) & held)
    if count == 0:
        raise NotDefacedError("no_head")
    sizes = np.bincount(core.ravel())
    sizes[0] = 0
    largest = core == sizes.argmax()
    back = ndimage.distance_transform_edt(~largest, sampling=_CT_GRID_MM) <= _HOLE_MM + _BACK_MM
    found = np.asarray(ndimage.binary_fill_holes(back & ~np.pad(bone, 1)), np.float32)[1:-1, 1:-1, 1:-1]
    found = ndimage.gaussian_filter(found, 0.8)
    return resample(found, grid, _shape(units.values), units.affine) > 0.5


def _behind_bone(bone: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Voxels with bone above, before, behind and on both sides: not orbits, not muscles of the neck."""
    held = np.ones(bone.shape, bool)
    for axis, end in ((2, -1), (1, 1), (1, -1), (0, 1), (0, -1)):
        seen = np.flip(bone, axis) if end < 0 else bone
        passed = np.maximum.accumulate(seen, axis=axis)
        held &= np.flip(passed, axis) if end < 0 else passed
    return held


def _shape(values: NDArray[Any]) -> tuple[int, int, int]:
    i, j, k = values.shape
    return (i, j, k)


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
