"""The brain in CT: what the skull holds.

BET needs a brain that is brighter than what surrounds it, which CT has not. There the skull itself is the border:
soft tissue within bone of 300 HU and more, cut off at its holes. The stored numbers of a CT are Hounsfield units that
its file shifted and scaled, so air and soft tissue, the two commonest materials of a head, are used to find them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import resample, spacing

AIR_HU: Final = -1000.0
SOFT_HU: Final = 38.0  # muscle 50, brain 30 to 40; a few tens more or less change nothing below
BONE_HU: Final = 300.0
_WINDOW_HU: Final = (-20.0, 130.0)  # brain, fluid and fresh blood, with noise
_HOLE_MM: Final = 7.0  # holes of the skull narrower than twice this are closed: optic canals, sutures, the great one
_BACK_MM: Final = 3.0  # how much further than the hole's radius the core grows back, into the corners of the cavity
_GRID_MM: Final = 2.0
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
    i, j, k = (max(1, int(np.ceil(n))) for n in edges * units.values.shape / _GRID_MM)
    grid = units.affine @ np.diag([*(_GRID_MM / edges), 1.0])
    smooth = ndimage.gaussian_filter(units.values.astype(np.float32), 1.0 / edges)  # against noise
    values = resample(smooth, units.affine, (i, j, k), grid, 1, AIR_HU)
    bone = values > BONE_HU
    soft = (values > _WINDOW_HU[0]) & (values < _WINDOW_HU[1])
    room = np.pad(soft & ~bone, 1)
    deep = ndimage.distance_transform_edt(room, sampling=_GRID_MM)
    held = _behind_bone(np.pad(bone, 1))
    core, count = ndimage.label((deep > _HOLE_MM) & held)
    if count == 0:
        raise NotDefacedError("no_head")
    sizes = np.bincount(core.ravel())
    sizes[0] = 0
    largest = core == sizes.argmax()
    back = ndimage.distance_transform_edt(~largest, sampling=_GRID_MM) <= _HOLE_MM + _BACK_MM
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
