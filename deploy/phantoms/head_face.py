"""The root of all head phantoms: the real head ch2, with the face that its field of view cuts off modelled below it.

The real head ends at z = -71 mm, y = 91 mm and x = 90 mm to both sides: the tip of the nose, the mouth, the chin, the
rims of the ears and the neck are absent. They are modelled as a smooth body (outlines at a few heights; nose, lips,
chin and ears of ellipsoids and capsules) with skin, fat, muscle, bone and air inside. Lengths are in millimetres of
the template's space, x to the right, y to the front, z up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.interpolate import PchipInterpolator

from agent.domain import Volume
from deploy.phantoms.head_tissue import AIR, LABELS, found, middle_of, modelled

__all__ = ["LANDMARKS", "Root", "root_of"]

Floats = NDArray[np.float32]

LANDMARKS: Final = {
    "nose_tip": (0.0, 105.0, -82.0),
    "nasion": (0.0, 85.0, -42.0),
    "mouth": (0.0, 82.0, -117.0),
    "chin": (0.0, 80.0, -141.0),
    "eye_left": (-38.0, 78.0, -40.0),
    "eye_right": (38.0, 78.0, -40.0),
    "ear_left": (-92.0, -27.0, -48.0),
    "ear_right": (92.0, -27.0, -48.0),
    "brow": (0.0, 90.0, -20.0),
    "vertex": (0.0, -20.0, 96.0),
}

_LOW: Final = np.array((-116.0, -140.0, -176.0))  # mm, centre of the first voxel
_SHAPE: Final = (233, 273, 293)  # 1 mm
_FLOOR: Final = -71.0  # mm, the real head's lowest slice
_ANGLES: Final = 72
_THRESHOLD: Final = 25  # of the real head's grey values, skin against air

# Outlines of face and neck below the real head: height, then half widths and fronts from the middle of the face
# to the back of the neck.
_OUTLINES: Final = (
    (-84.0, (0, 14, 28, 41, 54, 67, 80, 84, 83, 80, 42, 0), (78, 76, 69, 64, 55, 40, 14, -8, -30, -66, -108, -116)),
    (-97.0, (0, 14, 27, 39, 51, 63, 73, 77, 75, 70, 36, 0), (79, 77, 69, 61, 50, 34, 12, -9, -34, -66, -101, -109)),
    (-110.0, (0, 14, 26, 37, 48, 59, 68, 71, 67, 63, 31, 0), (78, 76, 68, 58, 45, 28, 8, -10, -36, -66, -96, -103)),
    (-122.0, (0, 13, 24, 34, 44, 54, 63, 65, 61, 58, 28, 0), (77, 75, 67, 56, 42, 25, 5, -13, -38, -66, -92, -98)),
    (-134.0, (0, 12, 21, 30, 38, 47, 55, 58, 58, 56, 28, 0), (76, 74, 66, 54, 40, 22, 3, -14, -40, -66, -89, -95)),
    (-143.0, (0, 12, 20, 28, 35, 43, 50, 54, 57, 56, 28, 0), (72, 70, 61, 48, 33, 16, 0, -16, -40, -66, -89, -95)),
    (-150.0, (0, 11, 19, 26, 33, 40, 47, 53, 57, 56, 28, 0), (56, 54, 45, 33, 20, 8, -5, -20, -42, -66, -90, -96)),
    (-158.0, (0, 12, 21, 29, 37, 44, 50, 55, 58, 57, 28, 0), (22, 20, 16, 11, 4, -3, -12, -24, -44, -67, -92, -98)),
    (-180.0, (0, 12, 22, 31, 39, 46, 52, 57, 61, 60, 30, 0), (6, 5, 3, -1, -5, -11, -18, -28, -46, -70, -98, -104)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """A whole head in the template's space: grey values of a T1 and what every voxel is."""

    grey: NDArray[np.uint8]  # (i, j, k), 1 mm
    labels: NDArray[np.uint8]  # (i, j, k), indices of LABELS
    affine: NDArray[np.float64]  # (4, 4), index to template mm

    def __post_init__(self) -> None:
        """One label for each voxel."""
        if self.grey.shape != self.labels.shape or self.labels.max() >= len(LABELS):
            raise ValueError("labels are of the head's grid")


def root_of(head: Volume, brain: NDArray[np.bool_]) -> Root:
    """Complete the real head.

    Args:
        head: ch2, RAS+ at 1 mm, axes of the template.
        brain: (i, j, k) its brain.
    Raises:
        ValueError: another grid than whole millimetres of RAS+ axes.
    """
    start = np.rint(head.affine[:3, 3] - _LOW).astype(int)
    if not np.array_equal(head.affine[:3, :3], np.eye(3)) or bool((start < 0).any()):
        raise ValueError("the head's grid is of one millimetre, with RAS+ axes")
    where = tuple(slice(a, a + n) for a, n in zip(start, head.values.shape, strict=True))
    grey, inside = np.zeros(_SHAPE, np.float32), np.zeros(_SHAPE, np.bool_)
    grey[where], inside[where] = head.values, brain
    real = np.zeros(_SHAPE, np.bool_)
    real[where] = True
    radii = _radii(grey, start)
    surface = _surface(radii)
    made, kinds = modelled(surface, grey[:, :, start[2] + 1], _wall, radii, _axes())
    # within the real field of view only what lies outside the head or on its skin gives way
    skin = _head(grey, start[2])
    outside = ndimage.binary_dilation(real & ~skin, iterations=2) & real
    edge = np.clip(0.5 - surface, 0, 1)
    grey = np.where(~real, made * edge, np.where(outside, np.maximum(grey, made * edge), grey))
    _smoothed(grey, ndimage.binary_dilation(~skin, iterations=4))
    values: NDArray[np.uint8] = np.clip(np.rint(grey), 0, 255).astype(np.uint8)
    labels = found(values, inside, _axes())
    own = (~real | (outside & (labels == AIR))) & (edge > 0.5)
    labels[own] = kinds[own]
    affine = np.eye(4)
    affine[:3, 3] = _LOW
    return Root(values, labels, affine)


def _head(grey: Floats, floor: int) -> NDArray[np.bool_]:
    """The real head without its holes; its lowest slice goes on downwards."""
    on = grey.copy()
    on[:, :, :floor] = grey[:, :, floor : floor + 1]
    head = ndimage.binary_closing(ndimage.gaussian_filter(on[::2, ::2, ::2], 0.7) > _THRESHOLD, iterations=3)
    filled = np.stack([ndimage.binary_fill_holes(plane) for plane in np.moveaxis(head, 2, 0)], axis=2)
    return np.asarray(_fitted(np.repeat(np.repeat(np.repeat(filled, 2, 0), 2, 1), 2, 2)))


def _smoothed(grey: Floats, skin: NDArray[np.bool_]) -> None:
    """Take the edges off the skin where the model meets the real head: around its lowest slice, and on the nose."""
    boxes: tuple[tuple[Any, ...], ...] = ((None, None, (-79, -64)), ((-34, 34), (60, 110), (-72, -46)))
    for box in boxes:
        place = tuple(
            slice(None) if s is None else slice(int(s[0] - low), int(s[1] - low))
            for s, low in zip(box, _LOW, strict=True)
        )
        part = grey[place]
        blurred = ndimage.gaussian_filter(part, 1.3)
        grey[place] = np.where(skin[place], blurred, part)


def _axes(step: int = 1) -> tuple[Floats, Floats, Floats]:
    x, y, z = (low + np.arange(0, n, step, dtype=np.float32) for low, n in zip(_LOW, _SHAPE, strict=True))
    return x[:, None, None], y[None, :, None], z[None, None, :]


def _wall(radii: Floats, z: Floats, angle: Floats) -> Floats:
    """The outline's radius at heights and angles of one shape."""
    around = np.concatenate([radii, radii[:, :1]], 1)
    at = [np.clip(_FLOOR + 9 - z, 0, len(radii) - 1), np.mod(angle, 2 * np.pi) * _ANGLES / (2 * np.pi)]
    wall: Floats = ndimage.map_coordinates(around, at, order=1, mode="nearest")
    return wall


def _surface(radii: Floats) -> Floats:
    """Millimetres from the modelled surface, negative inside; above the real head's floor only nose and ears."""
    x, y, z = _axes(2)
    middle = middle_of(z)
    angle = np.arctan2(x, y - middle)
    body = 0.9 * (np.hypot(x, y - middle) - _wall(radii, np.broadcast_to(z, angle.shape), angle))
    body = np.where(z > _FLOOR, np.maximum(body + 0.3 * (z - _FLOOR), z - _FLOOR - 8), body)
    body = ndimage.gaussian_filter(body, (0.7, 0.7, 1.0)) + _pores(body.shape)
    face = _features(body, np.abs(x), y, z)
    nodes = [n * 2 - 1 for n in face.shape]
    for axis, count in enumerate(nodes):  # halfway between two nodes lies their mean
        low, high = (np.take(face, range(a, face.shape[axis] - 1 + a), axis) for a in (0, 1))
        fine = np.empty([*face.shape[:axis], count, *face.shape[axis + 1 :]], np.float32)
        place: list[slice] = [slice(None)] * 3
        place[axis] = slice(0, None, 2)
        fine[tuple(place)] = face
        place[axis] = slice(1, None, 2)
        fine[tuple(place)] = (low + high) / 2
        face = fine
    return _fitted(face)


def _pores(shape: tuple[int, ...]) -> Floats:
    """Unevenness of a skin, a few tenths of a millimetre; the same for everybody."""
    grain = ndimage.gaussian_filter(np.random.default_rng(5).standard_normal(shape, dtype=np.float32), 1.3)
    return np.asarray(0.22 * grain / grain.std(), dtype=np.float32)


def _fitted(coarse: Floats) -> Floats:
    coarse = np.pad(coarse, [(0, max(0, n - m)) for n, m in zip(_SHAPE, coarse.shape, strict=True)], mode="edge")
    return coarse[: _SHAPE[0], : _SHAPE[1], : _SHAPE[2]]


def _radii(grey: Floats, start: NDArray[np.int_]) -> Floats:
    """Radius by millimetres below z = -62 and by angle (0 is the front, a quarter turn the right)."""
    angles = np.arange(_ANGLES) * 2 * np.pi / _ANGLES
    folded = np.abs((angles + np.pi) % (2 * np.pi) - np.pi)
    levels, table = [], []
    for height in (_FLOOR + 9, _FLOOR + 1):
        plane = round(height - _FLOOR)
        levels.append(height)
        table.append(
            _real_outline(grey[:, :, start[2] + max(plane - 1, 0) : start[2] + plane + 2].mean(axis=2), angles)
        )
    for height, across, ahead in _OUTLINES:
        x, y = np.array(across, dtype=float), np.array(ahead, dtype=float) - float(middle_of(np.float32(height)))
        levels.append(height)
        table.append(PchipInterpolator(np.arctan2(x, y), np.hypot(x, y))(folded))
    down = _FLOOR + 9 - np.arange(115)
    radii = PchipInterpolator(levels[::-1], np.array(table)[::-1])(down)
    return np.asarray(ndimage.gaussian_filter1d(radii, 0.8, axis=1, mode="wrap"), np.float32)


def _real_outline(plane: Floats, angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """The radius of the real head in one plane, with a flat face in place of the nose."""
    far = np.arange(0, 150, 0.5)
    across = np.sin(angles)[:, None] * far - _LOW[0]
    ahead = np.cos(angles)[:, None] * far + float(middle_of(np.float32(_FLOOR))) - _LOW[1]
    hit = ndimage.map_coordinates(plane, [across, ahead], order=1) > _THRESHOLD
    first = np.where(hit, far, 0).max(axis=1)
    signed = (angles + np.pi) % (2 * np.pi) - np.pi
    nose = np.abs(signed) < 0.30
    sides = np.flatnonzero(~nose)[np.argsort(signed[~nose])]
    first[nose] = np.interp(signed[nose], signed[sides], first[sides])
    return np.asarray(ndimage.gaussian_filter1d(first, 0.7, mode="wrap"))


def _join(a: Any, b: Any, width: float) -> Any:
    """Union of two bodies with a soft seam (polynomial smooth minimum)."""
    h = np.clip(0.5 + 0.5 * (a - b) / width, 0, 1)
    return np.asarray(a * (1 - h) + b * h - width * h * (1 - h))


def _cut(a: Any, b: Any, width: float) -> Any:
    return -_join(-a, b, width)


def _ellipsoid(x: Any, y: Any, z: Any, centre: tuple[Any, ...], radii: tuple[float, ...]) -> Any:
    """About the distance from an ellipsoid: the value over the length of its gradient."""
    u, v, w = ((a - m) / r for a, m, r in zip((x, y, z), centre, radii, strict=True))
    k = np.sqrt(u * u + v * v + w * w)
    slope = np.sqrt((u / radii[0]) ** 2 + (v / radii[1]) ** 2 + (w / radii[2]) ** 2)
    far = k * (k - 1) / np.maximum(slope, 1e-3)
    return far


def _capsule(
    x: Any, y: Any, z: Any, a: tuple[float, ...], b: tuple[float, ...], radii: tuple[float, float]
) -> Floats:
    """A rod from a to b, of one radius at each end."""
    d = np.subtract(b, a)
    t = np.clip(((x - a[0]) * d[0] + (y - a[1]) * d[1] + (z - a[2]) * d[2]) / float(d @ d), 0, 1)
    away = np.sqrt((x - a[0] - t * d[0]) ** 2 + (y - a[1] - t * d[1]) ** 2 + (z - a[2] - t * d[2]) ** 2)
    far: Floats = away - (radii[0] + t * (radii[1] - radii[0]))
    return far


def _features(body: Floats, x: Floats, y: Floats, z: Floats) -> Floats:
    """Nose, lips, chin and ears onto the body; x is the distance from the middle, so that both sides are one."""
    nose = _capsule(x, y, z, (0, 79, -46), (0, 92, -79), (6, 8))
    nose = _join(nose, _ellipsoid(x, y, z, (0, 94.5, -82), (9.5, 10.5, 9)), 6)
    nose = _join(nose, _ellipsoid(x, y, z, (12.5, 85.5, -86), (7, 10, 7)), 5)
    nose = _join(nose, _capsule(x, y, z, (0, 80, -62), (12, 79, -84), (9, 10)), 7)
    nose = _join(nose, _capsule(x, y, z, (0, 95, -88), (0, 80, -93), (4.5, 5)), 4)
    face = _join(body, nose, 8)
    face = _cut(face, _ellipsoid(x, y, z, (6.8, 88.5, -94), (3.4, 6, 5)), 2)
    face = _cut(face, _ellipsoid(x, y, z, (0, 90, -104), (3.2, 8, 8)), 4)  # philtrum
    face = _join(face, _ellipsoid(x, y, z, (6, 74.5, -111.8), (16, 9.5, 5)), 5)
    face = _join(face, _ellipsoid(x, y, z, (0, 73.5, -121.5), (18, 10.5, 6)), 5)
    face = _cut(face, _ellipsoid(x, y, z, (0, 86, -116.5 - 0.02 * x), (25, 9, 1.1)), 2)
    face = _cut(face, _ellipsoid(x, y, z, (0, 90, -130.5), (24, 12.5, 4)), 7)  # below the lower lip
    face = _join(face, _ellipsoid(x, y, z, (0, 64, -141), (19, 15, 10)), 10)
    return np.asarray(_join(face, _ear(x, y, z), 3), dtype=np.float32)


def _ear(x: Floats, y: Floats, z: Floats) -> Floats:
    """A shell that stands off backwards, with a thick rim, a fold before it and a lobe."""
    v, w = (y + 26 + 0.22 * (z + 48)) / 16, (z + 46) / 28
    out = x - 87.5 + 0.40 * (y + 18)  # the further back, the further out
    r = np.sqrt(v**2 + w**2)
    rim = np.sqrt(((r - 0.88) * 18) ** 2 + (out - 2.0) ** 2) - 2.8
    fold = np.sqrt(((r - 0.5) * 18) ** 2 + (out - 0.5) ** 2) - 2.4 + 4 * np.clip(0.3 + v, 0, 1)
    shell = np.maximum(np.abs(out + 1) - 1.8, (r - 0.9) * 18)
    lobe = _ellipsoid(x, y, z, (89, -18, -72), (4, 6, 8))
    return np.asarray(_join(_join(_join(rim, shell, 2), fold, 2), lobe, 4))
