"""Grids in space: axes turned to RAS+ and back without loss, what a grid must be like, and the cube networks see.

A volume's affine takes indices to RAS+ millimetres. Everything inside works on :func:`oriented` volumes; what is
written goes back through :func:`reoriented`. Both only flip and transpose, so that no voxel changes.
"""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its orientations
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError

SHEAR: Final = 0.01  # largest cosine between two axes: 0.6 degrees; the tilt of a CT gantry is many times that
COARSE_MM: Final = 3.0  # a nose is about three of these; thicker slices cannot say where a face is
UNEVEN: Final = 3.0  # longest edge of a voxel over its shortest
HEAD_MM: Final = 120.0  # no adult head is shorter than this along any axis
ROOM_MM: Final = 2500.0  # no scanner's table is longer: units other than millimetres
CENTRE_MM: Final = (0.0, 0.0, -20.0)  # of the cube, in the template's space: chin, crown, nose and occiput fit
_RAS: Final = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
_FEWEST: Final = 2  # voxels along an axis, or it is an image


def oriented(volume: Volume) -> Volume:
    """The volume with its axes flipped and transposed to the closest RAS+. No voxel is interpolated."""
    turn = _turn(volume)
    values = nibabel.orientations.apply_orientation(volume.values, turn)
    there = nibabel.orientations.inv_ornt_aff(turn, volume.values.shape)
    return Volume(np.ascontiguousarray(values), np.asarray(volume.affine @ there, np.float64))


def reoriented(values: NDArray[Any], like: Volume) -> NDArray[Any]:
    """What lies on ``oriented(like)``'s grid, voxel by voxel on the grid of ``like``: the exact inverse.

    Raises:
        ValueError: ``values`` has not the shape of the oriented volume.
    """
    turn = _turn(like)
    shape = [0, 0, 0]
    for axis, (to, _) in enumerate(turn):
        shape[int(to)] = like.values.shape[axis]
    if values.shape != tuple(shape):
        raise ValueError("values do not lie on the oriented grid")
    back = nibabel.orientations.ornt_transform(_RAS, turn)
    return np.ascontiguousarray(nibabel.orientations.apply_orientation(values, back))


def _turn(volume: Volume) -> NDArray[np.float64]:
    turn: NDArray[np.float64] = nibabel.orientations.io_orientation(volume.affine)
    if not bool(np.isfinite(turn).all()):
        raise NotDefacedError("bad_affine")
    return turn


def spacing(affine: NDArray[np.float64]) -> NDArray[np.float64]:
    """(3,) float64, the distance in mm from one voxel to the next along each axis."""
    edges: NDArray[np.float64] = np.sqrt((np.asarray(affine, np.float64)[:3, :3] ** 2).sum(axis=0))
    return edges


def is_grid(affine: NDArray[np.float64]) -> bool:
    """Whether an affine is finite, can be inverted and has right angles. Oblique is fine; NaN is not."""
    if affine.shape != (4, 4) or not bool(np.isfinite(affine).all()):
        return False
    if not bool((affine[3] == (0.0, 0.0, 0.0, 1.0)).all()):
        return False
    edges = spacing(affine)
    if not bool((edges > 1e-3).all()):
        return False
    axes = affine[:3, :3] / edges
    return bool(np.abs(axes.T @ axes - np.eye(3)).max() <= SHEAR)


def check(volume: Volume) -> None:
    """What a head needs for its face to be found, before anything is computed.

    Raises:
        NotDefacedError: ``bad_affine`` (singular, sheared, or not in millimetres), ``not_a_volume`` (one voxel thin),
            ``too_coarse``, ``part_of_head`` (shorter than a head), ``not_finite``.
    """
    if not is_grid(volume.affine):
        raise NotDefacedError("bad_affine")
    if min(volume.values.shape) < _FEWEST:
        raise NotDefacedError("not_a_volume")
    edges = spacing(volume.affine)
    extent = edges * volume.values.shape
    if not extent.max() <= ROOM_MM:
        raise NotDefacedError("bad_affine")
    if not (edges.max() <= COARSE_MM + SHEAR and edges.max() <= (UNEVEN + SHEAR) * edges.min()):
        raise NotDefacedError("too_coarse")
    if not extent.min() >= HEAD_MM:
        raise NotDefacedError("part_of_head")
    if volume.values.dtype.kind == "f" and not bool(np.isfinite(volume.values).all()):
        raise NotDefacedError("not_finite")


def resample(
    values: NDArray[Any],
    affine: NDArray[np.float64],
    shape: tuple[int, int, int],
    target: NDArray[np.float64],
    order: int = 1,
    fill: float = 0.0,
) -> NDArray[np.float32]:
    """Values of one grid at the points of another.

    Nothing is averaged: onto a much coarser grid use :func:`averaged`.

    Args:
        values: (i, j, k), any real type or bool.
        affine: (4, 4), index to mm, of ``values``.
        shape: of the new grid.
        target: (4, 4), index to mm, of the new grid.
        order: of the spline; 0 takes the nearest voxel (masks, labels), 1 is linear.
        fill: what lies outside.

    Returns:
        ``shape`` float32.
    """
    to_source = np.linalg.inv(affine) @ target
    held = values.astype(np.uint8) if values.dtype.kind == "b" else values
    return np.asarray(
        ndimage.affine_transform(
            held,
            to_source[:3, :3],
            to_source[:3, 3],
            output_shape=shape,
            output=np.float32,
            order=order,
            mode="grid-constant",  # plain "constant" loses a border that lies outside by a rounding error
            cval=fill,
            prefilter=order > 1,
        )
    )


def averaged(
    values: NDArray[Any],
    affine: NDArray[np.float64],
    shape: tuple[int, int, int],
    target: NDArray[np.float64],
    fill: float = 0.0,
) -> NDArray[np.float32]:
    """As :func:`resample` with order 1, after a box filter as wide as the new voxels, so that nothing is skipped."""
    # how long the edges of a new voxel are, counted in old voxels along each old axis
    reach = np.abs(np.linalg.inv(affine)[:3, :3] @ target[:3, :3]).max(axis=1)
    soft = np.asarray(values, np.float32)
    for axis, width in enumerate(reach):
        if width > 1.0:
            soft = ndimage.correlate1d(soft, _box(float(width)), axis, mode="constant", cval=fill)
    return resample(soft, affine, shape, target, 1, fill)


def _box(width: float) -> NDArray[np.float64]:
    """(2 m + 1,) weights of a box ``width`` voxels wide; its ends may be parts of a voxel."""
    whole = int(np.ceil((width - 1) / 2))
    weights = np.ones(2 * whole + 1)
    if whole:
        weights[0] = weights[-1] = (width - (2 * whole - 1)) / 2
    return np.asarray(weights / weights.sum(), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Cube:
    """The working grid of the networks: ``side`` voxels along each edge, cubic, anywhere and any way round."""

    side: int
    affine: NDArray[np.float64]  # (4, 4), index of the cube to RAS+ mm of the scanner

    def __post_init__(self) -> None:
        """Right angles and equal edges: lengths in the cube are lengths in the head."""
        edges = spacing(self.affine)
        if self.side < 1 or not is_grid(self.affine) or not edges.max() <= edges.min() * (1 + SHEAR):
            raise ValueError("a cube has a side, right angles and equal edges")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an array on this grid."""
        return (self.side, self.side, self.side)

    @property
    def mm(self) -> float:
        """Edge of one voxel."""
        return float(spacing(self.affine).mean())


def cube_at(to_template: NDArray[np.float64], side: int, extent_mm: float = 256.0) -> Cube:
    """The cube of one head, turned as the template is, around the same point of the anatomy for every head.

    The rotation is that of ``to_template`` (its polar decomposition); scale and shear are left out, so that lengths
    stay true and a large head is large in the cube. The cube's centre is ``CENTRE_MM`` of the template.

    Args:
        to_template: (4, 4), RAS+ mm of the scanner to mm of the template.
        side: voxels along each edge.
        extent_mm: length of each edge; a voxel measures ``extent_mm / side``.

    Raises:
        NotDefacedError: ``bad_affine``, ``to_template`` is singular or mirrors.
    """
    if to_template.shape != (4, 4) or not bool(np.isfinite(to_template).all()):
        raise NotDefacedError("bad_affine")
    if not float(np.linalg.det(to_template[:3, :3])) > 1e-6:
        raise NotDefacedError("bad_affine")
    u, _, vt = np.linalg.svd(to_template[:3, :3])
    turn = (u @ vt).T  # template axes in the scanner's space
    centre = np.linalg.solve(to_template, np.array([*CENTRE_MM, 1.0]))[:3]
    edge = extent_mm / side
    affine = np.eye(4)
    affine[:3, :3] = turn * edge
    affine[:3, 3] = centre - affine[:3, :3] @ np.full(3, (side - 1) / 2)
    return Cube(side, affine)
