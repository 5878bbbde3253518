"""Surfaces as distances: how far each voxel lies from the edge of a mask, sampled at the points of any grid.

Two surfaces are blended by blending their distances; there is one surface again, and never two contours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.volumes.grid import resample, spacing

_FINE_MM: Final = 0.75  # finer grids are thinned: distances are smooth, and need no more
FAR_MM: Final = 1e3
_ZOOM: Final = 2
_SMOOTH: Final = 1.2  # fine voxels: takes the stairs off a distance to whole voxels
_SWOLLEN: Final = 0.2  # coarse voxels by which a low level lies outside the skin, measured on phantoms


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A smooth quantity on a grid."""

    values: NDArray[np.float32]  # (i, j, k)
    affine: NDArray[np.float64]  # (4, 4), index to RAS+ mm

    def on(self, grid: NDArray[np.float64], shape: tuple[int, int, int], fill: float) -> NDArray[np.float32]:
        """Its values at the points of a grid; ``fill``, a finite number, where it is not known."""
        return resample(self.values, self.affine, shape, grid, 1, fill)


def outside(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> Field:
    """Distance to the nearest voxel of a mask in mm: 0 inside, never more than the truth."""
    thin, grid = _thinned(mask, affine)
    if not bool(thin.any()):
        return Field(np.full(thin.shape, FAR_MM, np.float32), grid)
    away = ndimage.distance_transform_edt(~thin, sampling=spacing(grid)).astype(np.float32)
    if thin.shape != mask.shape:
        np.maximum(away - np.float32(spacing(grid).max()), 0.0, out=away)
    return Field(away, grid)


def signed(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> Field:
    """Distance to the surface of a mask in mm, negative inside. The image's border is no surface."""
    thin, grid = _thinned(mask, affine)
    mm = spacing(grid)
    half = np.float32(mm.min() / 2)  # a surface lies between two voxels
    if bool(thin.all()) or not bool(thin.any()):
        return Field(np.full(thin.shape, -FAR_MM if thin.all() else FAR_MM, np.float32), grid)
    depth = ndimage.distance_transform_edt(~thin, sampling=mm).astype(np.float32)
    depth -= ndimage.distance_transform_edt(thin, sampling=mm).astype(np.float32)
    depth -= np.sign(depth) * half
    return Field(depth, grid)


def smooth(mask: NDArray[np.bool_], values: NDArray[np.float32], cut: float, affine: NDArray[np.float64]) -> Field:
    """As :func:`signed` for a coarse grid: twice as fine, and without stairs.

    Args:
        mask: (i, j, k), without holes.
        values: (i, j, k), whose level at ``cut`` says where between two voxels the mask ends.
        cut: what parts inside from outside.
        affine: (4, 4), index to mm.
    """
    level = np.clip(values / np.float32(2 * cut), 0.0, 1.0)
    level[ndimage.binary_erosion(mask, border_value=1)] = 1.0
    level[~ndimage.binary_dilation(mask)] = 0.0
    fine = ndimage.zoom(level, _ZOOM, order=1, mode="nearest", grid_mode=True)
    grid = affine.copy()
    grid[:3, :3] /= _ZOOM
    grid[:3, 3] -= grid[:3, :3] @ np.full(3, (_ZOOM - 1) / 2)
    depth = signed(fine > 0.5, grid).values
    ndimage.gaussian_filter(depth, _SMOOTH, output=depth, mode="nearest")
    depth += np.float32(_SWOLLEN * spacing(affine).mean())
    return Field(depth, grid)


def _thinned(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Every second voxel, or third, of a very fine grid."""
    step = np.maximum(1, np.ceil(_FINE_MM / spacing(affine) - 1e-3)).astype(int)
    thin = mask[:: step[0], :: step[1], :: step[2]]
    return thin, affine @ np.diag([*step.astype(np.float64), 1.0])
