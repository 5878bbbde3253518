"""Renderings of a head scan: the surface, ray-cast from several sides, as depth maps and images.

Parallel rays run through the smoothed volume; the first place where it rises above the level of the skin is found
between two samples of the ray, and its gradient there is the normal of the surface (Levoy 1988). The camera stands in
the template's axes, so that every head looks the same way. Images of an unaltered head show a person's face: they
are as private as the scan is.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw
from scipy import ndimage

from agent.domain import Volume
from agent.volumes.grid import cube_at, spacing

FRONT, PROFILE = "front", "left 90"
VIEWS: Final[Mapping[str, float]] = MappingProxyType(  # name -> degrees the camera goes round towards the head's left
    {
        FRONT: 0.0,
        "left 30": 30.0,
        "right 30": -30.0,
        "left 60": 60.0,
        "right 60": -60.0,
        PROFILE: 90.0,
        "right 90": -90.0,
        "back": 180.0,
    }
)
SHOWN: Final = (FRONT, "left 30", "left 60", PROFILE)
_LAMP: Final = (0.0, 0.35, 1.0)  # right, up, towards the camera
_AMBIENT: Final = 0.12
_SMALL: Final = 0.01  # of the largest piece: what is smaller is no head; a nose cut loose stays in the image


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """A volume ready to be looked at: smoothed, without specks in the air."""

    values: NDArray[np.float32]  # (i, j, k)
    affine: NDArray[np.float64]  # (4, 4), index to RAS+ mm of the scanner
    level: float  # skin lies where the values rise above it

    def __post_init__(self) -> None:
        """A level that no voxel reaches is a head that is gone: allowed. NaN is not."""
        if self.values.ndim != 3 or not np.isfinite(self.level) or not bool(np.isfinite(self.values).all()):
            raise ValueError("a surface has finite values and a level")


@dataclass(frozen=True, slots=True, eq=False)
class Camera:
    """Where rays start and how dense they are."""

    frame: NDArray[np.float64]  # (4, 4), millimetres of the head's frame (right, front, up) to RAS+ mm of the scanner
    side: int = 128  # pixels along each edge of an image
    extent_mm: float = 256.0  # what an image shows, and how far a ray goes
    step_mm: float = 2.0  # between two samples of a ray

    def __post_init__(self) -> None:
        """A rigid frame: lengths in the image are lengths of the head."""
        turn = self.frame[:3, :3]
        if self.frame.shape != (4, 4) or not float(np.abs(turn.T @ turn - np.eye(3)).max()) <= 1e-6:
            raise ValueError("a camera's frame is rigid")
        if not 8 <= self.side <= 1024 or not 0.0 < self.step_mm <= self.extent_mm / 8:
            raise ValueError("a picture has 8 to 1024 pixels, and a ray 8 samples or more")

    @property
    def pitch_mm(self) -> float:
        """From one pixel to the next."""
        return self.extent_mm / self.side


@dataclass(frozen=True, slots=True, eq=False)
class Rendering:
    """One view of a head."""

    depth: NDArray[np.float32]  # (side, side) mm in front of the head's middle, towards the camera; NaN: nothing hit
    shade: NDArray[np.float32]  # (side, side) in [0, 1]; 0: nothing hit
    points: NDArray[np.float64]  # (n, 3) mm in the head's frame, row by row of the pixels that hit
    normals: NDArray[np.float64]  # (n, 3), outwards, of length 1


def surface(volume: Volume, level: float, smooth_mm: float = 1.0) -> Surface:
    """A volume made ready: smoothed by a Gaussian of ``smooth_mm`` and cleaned of what is no part of the head.

    Args:
        volume: a head, whatever its axes.
        level: of the skin, in the numbers of the volume (:func:`agent.defacing.head_mask.threshold`).
        smooth_mm: standard deviation; 0 leaves the values as they are.
    """
    values = np.array(volume.values, np.float32)
    if smooth_mm > 0:
        values = ndimage.gaussian_filter(values, smooth_mm / spacing(volume.affine), mode="nearest", truncate=3.0)
    pieces, count = ndimage.label(values >= level)
    if count > 1:
        sizes = np.bincount(pieces.ravel())
        sizes[0] = 0
        specks = sizes < _SMALL * sizes.max()
        specks[0] = False
        values[specks[pieces]] = min(float(values.min()), level - 1.0)  # a speck's flanks lie below the level
    return Surface(values, np.asarray(volume.affine, np.float64), float(level))


def camera_at(to_template: NDArray[np.float64], side: int = 128, extent_mm: float = 256.0) -> Camera:
    """The camera of a head: turned as the template is, around the centre of :func:`agent.volumes.grid.cube_at`.

    Args:
        to_template: (4, 4), RAS+ mm of the scanner to mm of the template.
        side: pixels along each edge.
        extent_mm: of the image.

    Raises:
        NotDefacedError: ``bad_affine``, ``to_template`` is singular or mirrors.
    """
    return Camera(cube_at(to_template, 1, 1.0).affine, side, extent_mm, max(1.0, extent_mm / side))


def render(seen: Surface, camera: Camera, yaw: float = 0.0, pitch: float = 0.0) -> Rendering:
    """One image.

    Args:
        seen: the head.
        camera: where, and how dense.
        yaw: degrees that the camera goes round towards the head's left; 0 stands in front of the face.
        pitch: degrees that it then rises.
    """
    view = axes_of(yaw, pitch)
    steps = int(np.ceil(camera.extent_mm / camera.step_mm))
    # index (row, column, sample) of the block of rays to mm of the view: right, up, towards the camera
    rays = np.eye(4)
    half = (camera.side - 1) / 2 * camera.pitch_mm
    rays[:3, :3] = [[0.0, camera.pitch_mm, 0.0], [-camera.pitch_mm, 0.0, 0.0], [0.0, 0.0, -camera.step_mm]]
    rays[:3, 3] = (-half, half, (steps - 1) / 2 * camera.step_mm)
    world = np.eye(4)
    world[:3, :3] = view
    to_index = np.linalg.inv(seen.affine) @ camera.frame @ world @ rays
    floor = min(float(seen.values.min()), seen.level - 1.0)
    block = ndimage.affine_transform(
        seen.values,
        to_index[:3, :3],
        to_index[:3, 3],
        output_shape=(camera.side, camera.side, steps),
        order=1,
        mode="constant",
        cval=floor,
    )
    inside = block >= seen.level
    hit, first = inside.any(axis=2), inside.argmax(axis=2)
    rows, columns = np.nonzero(hit)
    at = first[rows, columns]
    after = block[rows, columns, at]
    before = block[rows, columns, np.maximum(at - 1, 0)]
    share = np.where(at > 0, (seen.level - before) / np.maximum(after - before, 1e-12), 1.0)
    sample = np.where(at > 0, at - 1 + np.clip(share, 0.0, 1.0), 0.0)
    there = np.stack([rows, columns, sample, np.ones_like(sample)])
    depth = np.full((camera.side, camera.side), np.nan, np.float32)
    mm = (rays @ there)[:3]
    depth[hit] = mm[2]
    normals = _normals(seen, camera.frame @ world, mm)  # of the view
    lamp = np.array(_LAMP) / np.linalg.norm(_LAMP)
    shade = np.zeros((camera.side, camera.side), np.float32)
    shade[hit] = _AMBIENT + (1 - _AMBIENT) * np.clip(lamp @ normals, 0.0, 1.0)
    return Rendering(depth, shade, (view @ mm).T, (view @ normals).T)


def renderings(seen: Surface, camera: Camera, views: Sequence[str] = tuple(VIEWS)) -> dict[str, Rendering]:
    """Images of one head from several sides.

    Raises:
        KeyError: a view is not one of ``VIEWS``.
    """
    return {name: render(seen, camera, VIEWS[name]) for name in views}


def png(picture: NDArray[np.float32]) -> bytes:
    """(h, w) in [0, 1] as a grey PNG."""
    return _bytes(Pillow.fromarray(_grey(picture)))


def before_after(before: Surface, after: Surface, camera: Camera, views: Sequence[str] = SHOWN) -> bytes:
    """A PNG: the unaltered head above, the de-faced one below, one column for each view.

    The upper row shows the person's face, so only users who may see the scan may see it.
    """
    rows = [np.hstack([render(one, camera, VIEWS[name]).shade for name in views]) for one in (before, after)]
    sheet = Pillow.fromarray(_grey(np.vstack(rows)))
    pen = ImageDraw.Draw(sheet)
    for column, name in enumerate(views):
        pen.text((column * camera.side + 3, 2), name, fill=160)
    return _bytes(sheet)


def axes_of(yaw: float, pitch: float = 0.0) -> NDArray[np.float64]:
    """(3, 3): columns are right, up and towards the camera of an image, in the head's frame (right, front, up)."""
    turn, rise = np.deg2rad([yaw, pitch])
    towards = np.array([-np.sin(turn) * np.cos(rise), np.cos(turn) * np.cos(rise), np.sin(rise)])
    right = np.array([-np.cos(turn), -np.sin(turn), 0.0])  # who faces us has their left on our right
    return np.stack([right, np.cross(towards, right), towards], axis=1)


def _normals(
    seen: Surface, to_scanner: NDArray[np.float64], mm: NDArray[np.float64], reach_mm: float = 1.5
) -> NDArray[np.float64]:
    """(3, n): against the gradient of the values at (3, n) mm of the view, by central differences."""
    to_index = np.linalg.inv(seen.affine) @ to_scanner
    floor = min(float(seen.values.min()), seen.level - 1.0)
    reach = max(reach_mm, 0.75 * float(spacing(seen.affine).max()))
    slopes = []
    for axis in range(3):
        ends = []
        for sign in (-1.0, 1.0):
            moved = mm + sign * reach * np.eye(3)[:, axis : axis + 1]
            at = to_index[:3, :3] @ moved + to_index[:3, 3:]
            ends.append(ndimage.map_coordinates(seen.values, at, order=1, mode="constant", cval=floor))
        slopes.append(ends[0] - ends[1])
    out = np.stack(slopes).astype(np.float64)
    long = np.sqrt((out * out).sum(axis=0))
    flat = ~(long > 0)
    out[:, flat], long[flat] = np.array([[0.0], [0.0], [1.0]]), 1.0  # no slope: it faces the camera
    return np.asarray(out / long)


def _grey(picture: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.asarray(np.rint(np.clip(np.nan_to_num(picture), 0.0, 1.0) * 255.0), np.uint8)


def _bytes(picture: Pillow.Image) -> bytes:
    held = io.BytesIO()
    picture.save(held, "PNG")
    return held.getvalue()
