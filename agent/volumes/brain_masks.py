"""Brain masks that other programs made: by hand, HD-BET, SynthStrip.

Which of them a file is shows in its numbers and not in its name: a mask has two, a distance map has both signs and
rises by one per millimetre, a stripped image repeats the volume. Anything else is refused, for a wrong mask would
keep a face or lose a brain.
"""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations
from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import is_grid, oriented, spacing

_PLACE_MM: Final = 0.01  # two grids are one if no corner of theirs lies further apart
_BORDER_MM: Final = 1.0  # SynthStrip's own: the brain is where its distance map is below
_SLOPE: Final = (0.8, 1.2)  # of a distance map near its border, per mm
_CLOSE_MM: Final = 2.0  # a stripped brain may hold zeros of its own
_FURTHEST: Final = 500.0  # mm of a distance map
_TWO: Final = 2


def mask_from(path: Path, volume: Volume) -> NDArray[np.bool_]:
    """The brain mask in a NIfTI file, on the oriented grid of ``volume``.

    Taken are a mask of two numbers (``*_mask``, ``*_bet_mask``), the stripped image of HD-BET (``*_bet``) or
    SynthStrip, and the latter's distance map. The grid must be the volume's own, its axes flipped or in another order
    or not.

    Raises:
        NotDefacedError: ``mask_does_not_fit``, whatever is wrong with it.
    """
    try:
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Image):
            raise NotDefacedError("mask_does_not_fit")
        if sorted(n for n in image.shape if n != 1) != sorted(volume.values.shape):
            raise NotDefacedError("mask_does_not_fit")  # before a number of it is decoded
        values = np.asarray(image.dataobj).reshape(image.shape[:3])
        mask = oriented(Volume(values, np.asarray(image.affine, np.float64)))
    except (OSError, ValueError, EOFError, TypeError, nibabel.filebasedimages.ImageFileError):
        raise NotDefacedError("mask_does_not_fit") from None
    upright = oriented(volume)
    if not is_grid(mask.affine) or not _same_grid(mask, upright):
        raise NotDefacedError("mask_does_not_fit")
    found = _brain(mask.values, upright)
    if not bool(found.any()) or bool(found.all()):
        raise NotDefacedError("mask_does_not_fit")
    return found


def _same_grid(a: Volume, b: Volume) -> bool:
    if a.values.shape != b.values.shape:
        return False
    corners = np.array([[*c, 1] for c in product(*[(0, n - 1) for n in a.values.shape])], np.float64)
    return bool(np.abs(corners @ (a.affine - b.affine).T).max() <= _PLACE_MM)


def _brain(values: NDArray[Any], volume: Volume) -> NDArray[np.bool_]:
    if not bool(np.isfinite(values).all()):
        raise NotDefacedError("mask_does_not_fit")
    low, high = float(values.min()), float(values.max())
    if low == 0 < high and bool(((values == 0) | (values == high)).all()):
        return np.asarray(values == high, bool)
    if low < 0 < high <= _FURTHEST and _is_distance(values, spacing(volume.affine)):
        return np.asarray(values < _BORDER_MM, bool)
    return _stripped(values, volume.values, spacing(volume.affine))


def _is_distance(values: NDArray[Any], mm: NDArray[np.float64]) -> bool:
    """Whether the numbers rise by about one per millimetre around their border."""
    near = np.abs(values - _BORDER_MM) < 2 * float(mm.max())
    if not bool(near.any()):
        return False
    along = np.gradient(values.astype(np.float32), *mm)
    slope = float(np.median(np.sqrt(sum(g**2 for g in along))[near]))
    return _SLOPE[0] <= slope <= _SLOPE[1]


def _stripped(values: NDArray[Any], volume: NDArray[Any], mm: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where an image repeats the volume, up to the scale of its file, and is not background."""
    background = values.ravel()[0]
    kept = np.asarray(values != background, bool)
    x, y = values[kept].astype(np.float64), volume[kept].astype(np.float64)
    if x.size < _TWO or not (x.std() > 0 and y.std() > 0):
        raise NotDefacedError("mask_does_not_fit")
    slope = float(((x - x.mean()) * (y - y.mean())).mean() / x.var())
    left = np.abs(y - y.mean() - slope * (x - x.mean())).max()
    if not left <= 1e-3 * y.std():
        raise NotDefacedError("mask_does_not_fit")
    times = max(1, round(_CLOSE_MM / float(mm.max())))
    grid = np.pad(kept, times + 1)
    closed = ndimage.binary_closing(grid, iterations=times)
    inner = (slice(times + 1, -times - 1),) * 3
    found = np.asarray(ndimage.binary_fill_holes(closed | grid)[inner], bool)
    outside = volume[~found]
    if not (outside.size and np.percentile(outside, 99) > np.median(y) / 2):
        raise NotDefacedError("mask_does_not_fit")  # nothing was stripped from it
    return found
