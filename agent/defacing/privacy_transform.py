"""The privacy transform gamma of C-DeID-GAN (section 3.1): all that a network is told of a head.

gamma(x) is a convex hull, the brain mask, and the intensities inside it. The hull of the paper is tight: it passes
through the tip of the nose, the chin and the ears, and has the shape of the head. Here it is coarsened by its support
function, how far the head reaches in each of some hundred directions:

- ``shape="population"``: the mean reach of public heads, the same hull for everybody. Nothing of this head's outside
  is in it; only the brain, which gamma shows anyway, pushes it outwards where it would stand out.
- ``shape="smooth"``: at the back and the top of the head this head's own reach, bounded, smoothed over a wide angle
  and rounded; the face, the ears and all below come from the population.

What the brain mask and the alignment owe to the rest of the scan is not undone here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.head import HeadScan
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import Cube, averaged, cube_at

EXTENT_MM: Final = 256.0
DIRECTIONS: Final = 500
BRIGHT: Final = 1.5  # of the 99th percentile inside the brain; brighter is clipped
_FACE_RISE: Final = 0.64  # forwards, everything up to 40 degrees above the horizon belongs to the face
_LOW: Final = -0.3
_EARS: Final = np.array([[0.93, -0.2, -0.3], [-0.93, -0.2, -0.3]])
_EAR_ANGLE: Final = np.cos(np.deg2rad(35.0))


@dataclass(frozen=True, slots=True)
class Coarse:
    """How much of a head's outside is left in its hull."""

    shape: Literal["population", "smooth"] = "population"
    directions: int = DIRECTIONS  # m, on a Fibonacci sphere
    dilate_mm: float = 10.0
    margin_mm: float = 10.0  # between the brain and the hull
    smooth_deg: float = 40.0  # for ``smooth``: width of the kernel on the sphere
    range_mm: float = 15.0  # for ``smooth``: how far from the population's reach
    step_mm: float = 5.0  # for ``smooth``: what the reach is rounded to

    def __post_init__(self) -> None:
        """A hull that is tight is not coarse."""
        if self.shape not in ("population", "smooth"):
            raise ValueError("shape is population or smooth")
        if not self.directions >= 64:
            raise ValueError("a hull needs at least 64 directions")
        if not (self.dilate_mm >= 10.0 and self.margin_mm >= 5.0):
            raise ValueError("a hull is dilated by 10 mm and stands 5 mm off the brain at least")
        if not (self.smooth_deg >= 20.0 and 0.0 <= self.range_mm <= 30.0 and self.step_mm >= 2.0):
            raise ValueError("a smooth hull is smooth over 20 degrees, within 30 mm, in steps of 2 mm at least")


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """What public heads have in common, in the cube's axes."""

    support: NDArray[np.float32]  # (m,) mm, mean reach from the cube's centre in each of ``sphere(m)``
    skin: NDArray[np.float32]  # (S, S, S) in [0, 1], the share of heads that cover a voxel
    count: int

    def __post_init__(self) -> None:
        """Means over at least one head."""
        if self.support.ndim != 1 or not bool(np.isfinite(self.support).all()):
            raise ValueError("a population has a finite reach in each direction")
        if self.skin.ndim != 3 or len(set(self.skin.shape)) != 1:
            raise ValueError("shares lie on a cube")
        if not (float(self.skin.min()) >= 0.0 and float(self.skin.max()) <= 1.0 and self.count >= 1):
            raise ValueError("shares lie in [0, 1], of one head at least")


@dataclass(frozen=True, slots=True, eq=False)
class Gamma:
    """gamma(x): hull, brain mask, and the intensities inside the brain."""

    hull: NDArray[np.bool_]  # (S, S, S), c(x)
    brain: NDArray[np.bool_]  # (S, S, S), b(x)
    intensities: NDArray[np.float32]  # (S, S, S) in [0, 1], b(x) o x
    cube: Cube

    def __post_init__(self) -> None:
        """The brain lies in the hull, and no intensity outside the brain."""
        if {self.hull.shape, self.brain.shape, self.intensities.shape} != {self.cube.shape}:
            raise ValueError("gamma lies on its cube")
        if bool((self.brain & ~self.hull).any()) or bool((self.intensities[~self.brain] != 0.0).any()):
            raise ValueError("the brain lies in the hull, and intensities in the brain")
        if not (float(self.intensities.min()) >= 0.0 and float(self.intensities.max()) <= 1.0):
            raise ValueError("intensities lie in [0, 1]")

    def stack(self) -> NDArray[np.float32]:
        """(3, S, S, S) float32 for the network: hull, brain mask, intensities."""
        return np.stack([self.hull.astype(np.float32), self.brain.astype(np.float32), self.intensities])


def transform(head: HeadScan, side: int, population: Population, coarse: Coarse | None = None) -> Gamma:
    """gamma of one head.

    Args:
        head: examined, see :func:`agent.defacing.quality.examined`.
        side: S, voxels along each edge of the cube.
        population: of public heads.
        coarse: what is left of this head's own shape; by default nothing.
    Raises:
        NotDefacedError: ``brain_volume`` where no brain is in the cube or it does not fit in.
        ValueError: the population was measured in other directions.
    """
    coarse = Coarse() if coarse is None else coarse
    cube = cube_at(head.brain.to_template, side, EXTENT_MM)
    brain, intensities = _brain_in(head, cube)
    reach = coarse_support(head, population, coarse)
    planes = np.concatenate([sphere(coarse.directions), -reach[:, None]], axis=1)
    hull = filled(planes, _centred(cube), cube.shape)
    if bool((brain & ~hull).any()):
        raise NotDefacedError("brain_volume")
    return Gamma(hull, brain, intensities, cube)


def whole_head(head: HeadScan, side: int) -> NDArray[np.float32]:
    """(S, S, S) float32 in [0, 1], the whole head in its cube, scaled as ``Gamma.intensities`` is.

    Raises:
        NotDefacedError: ``brain_volume``, there is no brain to scale by.
    """
    cube = cube_at(head.brain.to_template, side, EXTENT_MM)
    inside = head.volume.values[head.brain.mask]
    top = float(np.percentile(inside, 99.0)) if inside.size else 0.0
    if not top > 0.0:
        raise NotDefacedError("brain_volume")
    seen = np.clip(head.volume.values / np.float32(top), 0.0, BRIGHT).astype(np.float32, copy=False) / BRIGHT
    return np.clip(averaged(seen, head.volume.affine, cube.shape, cube.affine), 0.0, 1.0)


def coarse_support(head: HeadScan, population: Population, coarse: Coarse) -> NDArray[np.float64]:
    """(m,) mm: how far the coarse hull reaches from the cube's centre in each direction of ``sphere(m)``."""
    if len(population.support) != coarse.directions:
        raise ValueError("the population was measured in other directions")
    reach = population.support.astype(np.float64)
    if coarse.shape == "smooth":
        own = support(head, head.skin, coarse.directions) - reach
        reach = reach + _smoothed(own, coarse)
    brain = support(head, head.brain.mask, coarse.directions)
    # both are support functions of sets that hold the brain and its margin, and so is their maximum
    reached: NDArray[np.float64] = np.maximum(reach + coarse.dilate_mm, brain + coarse.margin_mm)
    return reached


def support(head: HeadScan, mask: NDArray[np.bool_], directions: int) -> NDArray[np.float64]:
    """h(u) = max <x, u> over the mask, in mm from the cube's centre, u in the cube's axes.

    Args:
        head: whose cube it is; its size in voxels does not matter.
        mask: (i, j, k) on the head's grid.
        directions: m.
    Returns:
        (m,) float64.
    Raises:
        NotDefacedError: ``no_head`` where the mask is empty.
    """
    if not bool(mask.any()):
        raise NotDefacedError("no_head")
    to_cube = np.linalg.inv(_frame(head)) @ head.volume.affine
    i, j = np.nonzero(mask.any(axis=2))
    columns = mask[i, j]
    first, last = columns.argmax(axis=1), mask.shape[2] - 1 - columns[:, ::-1].argmax(axis=1)
    ends = np.concatenate([np.stack([i, j, first], axis=1), np.stack([i, j, last], axis=1)])
    points = ends @ to_cube[:3, :3].T + to_cube[:3, 3]
    return np.array([float((points @ u).max()) for u in sphere(directions)])


def population_of(heads: Sequence[HeadScan], side: int, directions: int = DIRECTIONS) -> Population:
    """Mean reach and cover of public heads: nobody's in particular, so the more the better."""
    if not heads:
        raise ValueError("a population has heads")
    reaches = [support(head, head.skin, directions) for head in heads]
    covers = [_onto(head, head.skin, cube_at(head.brain.to_template, side, EXTENT_MM)) for head in heads]
    skin = np.clip(np.mean(covers, axis=0), 0.0, 1.0)
    return Population(np.mean(reaches, axis=0).astype(np.float32), skin.astype(np.float32), len(heads))


def scaled(gamma: Gamma, alpha: float) -> Gamma:
    """gamma enlarged about the cube's centre (section 4.2, Fig. 5): resized to floor(alpha S), cropped or padded.

    Linear interpolation; masks are cut at a half. What no longer fits in the cube is lost.

    Args:
        gamma: of one head.
        alpha: in [0.5, 2]; the paper shows 0.85 to 1.15.
    """
    if not 0.5 <= alpha <= 2.0:
        raise ValueError("alpha lies in [0.5, 2]")
    size = int(np.floor(alpha * gamma.cube.side))
    brain = _resized(gamma.brain.astype(np.float32), size) >= 0.5
    hull = _resized(gamma.hull.astype(np.float32), size) >= 0.5
    intensities = np.where(brain, np.clip(_resized(gamma.intensities, size), 0.0, 1.0), np.float32(0.0))
    return Gamma(hull, brain, intensities, gamma.cube)


@lru_cache(maxsize=8)
def sphere(directions: int) -> NDArray[np.float64]:
    """(m, 3) unit vectors, evenly spread: the Fibonacci lattice (Gonzalez 2010)."""
    n = np.arange(directions) + 0.5
    z = 1.0 - 2.0 * n / directions
    angle = np.pi * (1.0 + np.sqrt(5.0)) * n
    across = np.sqrt(1.0 - z * z)
    spread = np.stack([across * np.cos(angle), across * np.sin(angle), z], axis=1)
    spread.setflags(write=False)  # one array for all callers
    return spread


def faces(directions: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(m,) which directions of template axes look out of the face, the ears, the jaw or the neck."""
    forward = (directions[:, 1] > 0.0) & (directions[:, 2] < _FACE_RISE)
    ears = _EARS / np.linalg.norm(_EARS, axis=1, keepdims=True)
    found: NDArray[np.bool_] = forward | (directions[:, 2] < _LOW) | (directions @ ears.T > _EAR_ANGLE).any(axis=1)
    return found


def _smoothed(own: NDArray[np.float64], coarse: Coarse) -> NDArray[np.float64]:
    """Of the deviation from the population what is left at the back of the head: bounded, smooth, rounded."""
    at = sphere(coarse.directions)
    kept = np.where(faces(at), 0.0, np.clip(own, -coarse.range_mm, coarse.range_mm))  # before it is spread
    angle = np.arccos(np.clip(at @ at.T, -1.0, 1.0))
    kernel = np.exp(-0.5 * (angle / np.deg2rad(coarse.smooth_deg)) ** 2)
    smooth = kernel @ kept / kernel.sum(axis=1)
    rounded: NDArray[np.float64] = np.round(smooth / coarse.step_mm) * coarse.step_mm
    return rounded


def _brain_in(head: HeadScan, cube: Cube) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Brain mask and intensities on the cube; what lies outside the brain has no weight in either."""
    mask = head.brain.mask
    values = np.where(mask, head.volume.values, 0).astype(np.float32)
    inside = values[mask]
    top = float(np.percentile(inside, 99.0)) if inside.size else 0.0
    if not top > 0.0:
        raise NotDefacedError("brain_volume")
    share = _onto(head, mask, cube)
    brain = share >= 0.5
    seen = np.clip(values / top, 0.0, BRIGHT) / BRIGHT
    mean = _onto(head, seen, cube) / np.maximum(share, 0.5)
    return brain, np.where(brain, np.clip(mean, 0.0, 1.0), 0.0).astype(np.float32)


def _onto(head: HeadScan, values: NDArray[Any], cube: Cube) -> NDArray[np.float32]:
    return averaged(values, head.volume.affine, cube.shape, cube.affine)


def _frame(head: HeadScan) -> NDArray[np.float64]:
    """(4, 4), mm in the cube's axes from its centre to RAS mm of the scanner."""
    frame = cube_at(head.brain.to_template, 1, 1.0).affine  # a cube of one voxel of 1 mm lies at the centre
    return frame


def _centred(cube: Cube) -> NDArray[np.float64]:
    """(4, 4), index of the cube to mm in its own axes from its centre."""
    affine = np.diag([cube.mm, cube.mm, cube.mm, 1.0])
    affine[:3, 3] = -cube.mm * (cube.side - 1) / 2
    return affine


def _resized(values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """(S, S, S) with the content at ``size`` / S of its size: linear, then cut in the middle or padded evenly."""
    side = len(values)
    new = np.zeros((side, side, side), dtype=np.float32)
    large = ndimage.zoom(values, size / side, order=1, mode="nearest", grid_mode=True, prefilter=False)
    if size >= side:
        start = (size - side) // 2
        cut = slice(start, start + side)
        return np.asarray(large[cut, cut, cut], np.float32)
    start = (side - size) // 2
    place = slice(start, start + size)
    new[place, place, place] = large
    return new


_SLACK: Final = 1e-6  # of a voxel: the points that span a plane lie on its inner side
_FLAT: Final = 1e-9
_CHUNK: Final = 64  # planes at once, so that memory does not grow with their number


def filled(planes: NDArray[np.float64], affine: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Voxels whose centre x, in mm, lies behind all planes: n . x + d <= 0.

    Args:
        planes: (f, 4), outward normals and offsets in mm.
        affine: (4, 4), index to mm.
        shape: of the grid.
    Returns:
        ``shape`` bool, convex.
    """
    local = planes @ affine  # a plane's coefficients in index space
    local = local / np.linalg.norm(local[:, :3], axis=1, keepdims=True)
    i, j = (axis.ravel() for axis in np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij"))
    columns = np.stack([i, j, np.ones_like(i)], axis=1).astype(np.float64)
    low, high = np.full(len(columns), 0.0), np.full(len(columns), float(shape[2] - 1))
    rising, falling = local[:, 2] > _FLAT, local[:, 2] < -_FLAT
    for part in _chunks(local[rising]):
        high = np.minimum(high, _meet(columns, part).min(axis=1))
    for part in _chunks(local[falling]):
        low = np.maximum(low, _meet(columns, part).max(axis=1))
    for part in _chunks(local[~rising & ~falling]):
        out = (columns @ part[:, [0, 1, 3]].T > _SLACK).any(axis=1)
        low[out] = np.inf
    k = np.arange(shape[2], dtype=np.float64)
    inside: NDArray[np.bool_] = (k >= low[:, None] - _SLACK) & (k <= high[:, None] + _SLACK)
    return inside.reshape(shape)


def _meet(columns: NDArray[np.float64], planes: NDArray[np.float64]) -> NDArray[np.float64]:
    """(columns, planes): the k at which a column (i, j) meets a plane a i + b j + c k + d = 0."""
    meet: NDArray[np.float64] = columns @ (-planes[:, [0, 1, 3]] / planes[:, 2:3]).T
    return meet


def _chunks(planes: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return [planes[start : start + _CHUNK] for start in range(0, len(planes), _CHUNK)]
