"""Defacing by removing voxels: the four methods that the paper compares with (C-DeID-GAN, 4.1).

They are baselines, and none is the paper's own program: two of those need software that may not be shipped, and one
has faults. ``LABELS`` says what each one here does. All are deterministic and write only what their ``changed``
contains; all but ``strip`` leave the rest of the head as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.change import Change, Defaced
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import noise
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import resample, spacing

Method = Callable[[HeadScan, np.random.Generator], Change]

BUFFER_MM: Final = 10.0  # QUICKSHEAR: from the brain straight down to the plane; the package has 10 voxels
# DEFACE: the lower rim of what stays, as (y, z) of MNI152 in millimetres, from behind the ears to above the brow. The
# frontal pole lies at y 72, the temporal poles at (20, -42), the nasion at (86, -47), the ears' holes at (-17, -57).
RIM_MM: Final = ((-45.0, -100.0), (-15.0, -82.0), (20.0, -60.0), (62.0, -38.0), (78.0, -22.0), (86.0, 0.0))
# FACE MASK, in MNI152: what the front of the head is, and the layer that is filtered
FRONT_MM: Final = 20.0  # least y
TOP_MM: Final = 20.0  # greatest z: the forehead is filtered too
SIDE_MM: Final = 90.0  # greatest |x|
BOTTOM_MM: Final = -160.0  # least z; a chin lies at -115
BEHIND_MM: Final = 10.0  # of the layer, behind the smooth surface
BEFORE_MM: Final = 14.0  # and before it: a nose stands out so far
SURFACE_MM: Final = 8.0  # deviation of the filter that makes the surface smooth
ALONG_MM: Final = 8.0  # deviation of the filter along the surface
_STEP_MM: Final = 2.0


class HeadRegion(Protocol):
    """A part of space that belongs to one head."""

    def on(self, grid: Volume) -> NDArray[np.bool_]:
        """The voxels of a grid, in the head's frame of reference, whose centres lie in it."""


@dataclass(frozen=True, slots=True, eq=False)
class AirFill:
    """Air in the place of a region."""

    head: HeadScan
    region: HeadRegion

    def onto(self, volume: Volume, keep: NDArray[np.bool_], rng: np.random.Generator) -> Defaced:
        """Set the region to the series' own air, but where ``keep`` is; draws nothing."""
        del rng
        where = self.region.on(volume) & ~keep
        values = np.array(volume.values, order="C")
        values[where] = air(volume, self.head)
        return Defaced(values, where)


@dataclass(frozen=True, slots=True)
class HalfSpace:
    """A half-space: where ``normal . (x, y, z) < offset`` in RAS millimetres."""

    normal: tuple[float, float, float]
    offset: float

    def on(self, grid: Volume) -> NDArray[np.bool_]:
        """The voxels on its side of the plane."""
        row = np.array([*self.normal, 0.0]) @ grid.affine
        return _plane(row, grid.values.shape) < np.float32(self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class UnderRim:
    """Before and below the rim ``RIM_MM``, which is one for all heads in the template's space."""

    to_template: NDArray[np.float64]

    def on(self, grid: Volume) -> NDArray[np.bool_]:
        """The voxels of the face."""
        to = self.to_template @ grid.affine
        y, z = (_plane(to[axis], grid.values.shape) for axis in (1, 2))
        rim_y, rim_z = np.array(RIM_MM, np.float32).T
        face: NDArray[np.bool_] = (y > rim_y[0]) & (z < np.interp(y, rim_y, rim_z).astype(np.float32))
        return face


@dataclass(frozen=True, slots=True, eq=False)
class TemplateFace:
    """A face that somebody drew in the template's space: a voxel is of the face where the drawing is not 0."""

    to_template: NDArray[np.float64]
    face: Volume

    def on(self, grid: Volume) -> NDArray[np.bool_]:
        """The voxels of the face."""
        lies = np.linalg.inv(self.to_template) @ self.face.affine
        drawn = (self.face.values != 0).astype(np.uint8)
        return resample(drawn, lies, grid.values.shape, grid.affine, order=0) > 0.5


@dataclass(frozen=True, slots=True)
class WholeSpace:
    """All space: what is kept is the brain alone."""

    def on(self, grid: Volume) -> NDArray[np.bool_]:
        """Every voxel."""
        return np.ones(grid.values.shape, bool)


def quickshear(head: HeadScan, rng: np.random.Generator) -> Change:
    """Everything below and before a plane at ``BUFFER_MM`` under the front of the brain (Schimke & Hale 2011).

    The plane runs from left to right and through the first edge of the lower convex hull of the brain's profile, as
    seen from the side and beginning at the forehead. The package of PyPI (1.2.0) was not taken as it is: its number
    of sheared rows is that of the wrong axis, its buffer counts voxels where the paper has a distance, it fills
    with 0, which is water in a CT, and it calls a form of ``numpy.cross`` that is going away. Where the first two
    make no difference its cut is the same to within a voxel.

    Raises:
        NotDefacedError: ``brain_volume`` where the brain has no profile to lay a plane under.
    """
    del rng
    lengths = spacing(head.volume.affine)
    # (j, k): anterior and superior indices, with the voxels next to it, which the package takes for its edge too
    profile = ndimage.binary_dilation(head.brain.mask.any(axis=0))
    back, up = profile.shape[0] - 1 - np.nonzero(profile)[0], np.nonzero(profile)[1]
    low = lower_hull(np.stack([back, up], axis=1))
    if len(low) < 2:
        raise NotDefacedError("brain_volume")
    (p0, s0), (p1, s1) = low[:2] * lengths[1:]
    slope = (s1 - s0) / (p1 - p0)
    # s < slope (p - p0) + s0 - buffer, with p = (J - 1 - j) dy and s = k dz: linear in (j, k), so in millimetres
    row = np.array([0.0, slope * lengths[1], lengths[2]])
    limit = slope * ((profile.shape[0] - 1) * lengths[1] - p0) + s0 - BUFFER_MM
    world = np.concatenate([row, [0.0]]) @ np.linalg.inv(head.volume.affine)
    return AirFill(head, HalfSpace((float(world[0]), float(world[1]), float(world[2])), float(limit - world[3])))


def lower_hull(points: NDArray[np.int64]) -> NDArray[np.int64]:
    """Andrew's monotone chain: the lower convex hull of (n, 2) points, from the least first coordinate on, (m, 2)."""
    low: list[NDArray[np.int64]] = []
    first = np.unique(points[:, 0])
    for x in first:  # of each column, its lowest point is all that matters
        p = np.array([x, points[points[:, 0] == x, 1].min()])
        while len(low) >= 2 and _turn(low[-2], low[-1], p) <= 0:
            low.pop()
        low.append(p)
    return np.array(low, np.int64).reshape(-1, 2)


def _turn(o: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    return int((a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0]))


def deface(head: HeadScan, rng: np.random.Generator, face: Volume | None = None) -> Change:
    """Air in the place of the face, in the manner of Bischoff-Grethe et al. 2007 and of pydeface.

    Both carry a face that was drawn once over to the head by registration. The drawing here is the plain one of
    ``RIM_MM``. ``face`` is another one in MNI152 space, not 0 where the face is (that of pydeface is 0 there).
    """
    del rng
    to = head.brain.to_template
    return AirFill(head, UnderRim(to) if face is None else TemplateFace(to, face))


def strip(head: HeadScan, rng: np.random.Generator) -> Change:
    """Air in the place of all but the brain, as MRI WATERSHED leaves it (Segonne et al. 2004).

    There a flooded watershed and a deformed surface find the brain. Here that is the mask which the whole product
    promises to keep: a smaller one would break that promise, and a larger one would not be skull stripping.
    """
    del rng
    return AirFill(head, WholeSpace())


def facemask(head: HeadScan, rng: np.random.Generator) -> Change:
    """The front of the head filtered along its surface: Milchenko & Marcus 2013, normalised anterior filtering.

    A layer around a smooth surface of the face is stretched flat into a box, smoothed parallel to the surface, and
    put back. Nothing is taken away. The paper's own sizes are not in its text; those here are the constants above.

    Raises:
        NotDefacedError: ``no_face`` where the skin does not reach the front.
    """
    del rng
    x, z = _axis(-SIDE_MM, SIDE_MM), _axis(BOTTOM_MM, TOP_MM)
    y = _axis(FRONT_MM, FRONT_MM + 150.0)
    grid = np.diag([_STEP_MM, _STEP_MM, _STEP_MM, 1.0])
    grid[:3, 3] = x[0], y[0], z[0]
    lies = head.brain.to_template @ head.volume.affine
    skin = resample(head.skin, lies, (len(x), len(y), len(z)), grid, order=0) > 0.5
    there = skin.any(axis=1)
    if not there.any():
        raise NotDefacedError("no_face")
    reach = y[len(y) - 1 - skin[:, ::-1].argmax(axis=1)]
    sigma = SURFACE_MM / _STEP_MM
    # beside the head there is no surface: a mean over where there is, and the nearest one farther off
    weight = ndimage.gaussian_filter(there.astype(np.float64), sigma)
    smooth = ndimage.gaussian_filter(np.where(there, reach, 0.0), sigma) / np.maximum(weight, 1e-6)
    nearest = ndimage.distance_transform_edt(weight < 0.05, return_distances=False, return_indices=True)
    return FilteredLayer(head.brain.to_template, smooth[tuple(nearest)])


@dataclass(frozen=True, slots=True, eq=False)
class FilteredLayer:
    """The layer of a face, smoothed along ``surface``: y in the template's millimetres over a grid of (x, z)."""

    to_template: NDArray[np.float64]
    surface: NDArray[np.float64]

    def onto(self, volume: Volume, keep: NDArray[np.bool_], rng: np.random.Generator) -> Defaced:
        """Filter the layer in the series' own grid, but where ``keep`` is; draws nothing."""
        del rng
        to = self.to_template @ volume.affine
        shape = volume.values.shape
        x, y, z = (_plane(to[axis], shape) for axis in range(3))
        front = (y > FRONT_MM) & (z < TOP_MM) & (z > BOTTOM_MM) & (np.abs(x) < SIDE_MM)
        place = np.stack([(x[front] + SIDE_MM) / _STEP_MM, (z[front] - BOTTOM_MM) / _STEP_MM])
        depth = y[front] - ndimage.map_coordinates(self.surface, place, order=1, mode="nearest")
        where = np.zeros(shape, bool)
        where[front] = depth > -BEHIND_MM
        where &= ~keep
        chosen = where[front]
        within = (np.minimum(depth, BEFORE_MM) + BEHIND_MM) / _STEP_MM
        box = np.stack([place[0], within, place[1]])[:, chosen]
        drawn = ndimage.map_coordinates(self._box(volume), box, order=1, mode="nearest")
        values = np.array(volume.values, order="C")
        values[where] = _stored(drawn, volume.values)
        return Defaced(values, where)

    def _box(self, volume: Volume) -> NDArray[np.float32]:
        """(x, depth, z): the layer, flat, and smoothed along its surface."""
        x, z = _axis(-SIDE_MM, SIDE_MM), _axis(BOTTOM_MM, TOP_MM)
        deep = _axis(-BEHIND_MM, BEFORE_MM)
        y = self.surface[:, None, :] + deep[None, :, None]
        points = np.stack([np.broadcast_to(a, y.shape) for a in (x[:, None, None], y, z[None, None, :])])
        index = np.linalg.inv(self.to_template @ volume.affine)
        at = np.tensordot(index[:3, :3], points, axes=1) + index[:3, 3].reshape(3, 1, 1, 1)
        flat = ndimage.map_coordinates(volume.values.astype(np.float32), at, order=1, mode="nearest")
        sigma = ALONG_MM / _STEP_MM
        out: NDArray[np.float32] = ndimage.gaussian_filter(flat, (sigma, 0.0, sigma))
        return out


def air(volume: Volume, head: HeadScan) -> Any:
    """A stored number that stands for air in a series: the median of its noise, or its least if all is head."""
    i, j, k = volume.values.shape
    skin = resample(head.skin, head.volume.affine, (i, j, k), volume.affine, order=0) > 0.5
    return volume.values.min() if bool(skin.all()) else np.quantile(noise(volume, skin), 0.5, method="lower")


def _axis(first: float, last: float) -> NDArray[np.float64]:
    return np.arange(first, last + _STEP_MM / 2, _STEP_MM)


def _plane(row: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """(i, j, k): a linear form of the indices, from (4,) coefficients."""
    i, j, k = (np.arange(n) * c for n, c in zip(shape, row[:3], strict=True))
    out: NDArray[np.float64] = (i[:, None, None] + j[None, :, None]) + (k[None, None, :] + row[3])
    return out.astype(np.float32)


def _stored(drawn: NDArray[np.float32], like: NDArray[Any]) -> NDArray[Any]:
    """Numbers as a series stores them; they lie within what it holds already."""
    if like.dtype.kind == "f":
        return drawn.astype(like.dtype)
    limits = np.iinfo(like.dtype)
    return np.clip(np.rint(drawn.astype(np.float64)), limits.min, limits.max).astype(like.dtype)


METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {"quickshear": quickshear, "facemask": facemask, "deface": deface, "strip": strip}
)
LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "quickshear": "QUICKSHEAR of Schimke & Hale 2011: as the package of PyPI, with its faults of axis,"
        " millimetres and air mended.",
        "facemask": "A re-implementation of FACE MASK (normalised anterior filtering) from Milchenko & Marcus 2013.",
        "deface": "In the manner of DEFACE (Bischoff-Grethe et al. 2007) and pydeface: registration to a template,"
        " and a face of our own drawing in MNI152 space, or of the user's.",
        "strip": "Skull stripping in the place of MRI WATERSHED (Segonne et al. 2004): everything but the mask of the"
        " brain that the other methods keep too.",
    }
)
