"""What is inside a head phantom: tissue of the modelled lower face and neck, and names for the real head's tissue.

The modelled part is skin, fat and muscle by depth; a nasal cavity with its septum, a palate, teeth, a tongue, a lower
jaw, an airway, vertebrae and their cord by place. Below the real head's last slice that slice goes on and fades out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

__all__ = [
    "AIR",
    "BONE",
    "CAVITY",
    "CSF",
    "FAT",
    "FLUID",
    "GM",
    "LABELS",
    "SOFT",
    "WM",
    "found",
    "middle_of",
    "modelled",
]

Floats = NDArray[np.float32]

LABELS: Final = ("air", "csf", "gm", "wm", "soft", "fat", "bone", "cavity", "fluid")  # csf, gm and wm: of the brain
AIR, CSF, GM, WM, SOFT, FAT, BONE, CAVITY, FLUID = range(len(LABELS))

_FLOOR: Final = -71.0  # mm, the real head's lowest slice
_FADE: Final = 14.0  # mm over which it goes on
_SKIN: Final = 25  # grey value
# Depth in mm and grey value: skin, fat, muscle.
_PROFILE: Final = ((-9, 85), (1.4, 85), (2.6, 150), (5.5, 158), (8.0, 80), (11, 66), (200, 70))


def middle_of(z: Any) -> Any:
    """Where in front the axis lies about which outlines are star-shaped, mm."""
    t = np.clip((-115 - np.asarray(z, dtype=np.float32)) / 65, 0, 1)
    return -10 - 35 * t * t * (3 - 2 * t)


def modelled(
    surface: Floats,
    last: Floats,
    wall: Callable[[Floats, Floats, Floats], Floats],
    radii: Floats,
    axes: tuple[Floats, Floats, Floats],
) -> tuple[Floats, NDArray[np.uint8]]:
    """Grey values and labels of a whole modelled head; only a part of it will be used.

    Args:
        surface: (i, j, k) mm from the surface, negative inside.
        last: (i, j) the real head's last slice.
        wall: the outline's radius at heights and angles.
        radii: what ``wall`` asks for first.
        axes: mm of the voxels.
    """
    x, y, z = axes
    grey: Floats = np.interp(-surface, *np.transpose(_PROFILE)).astype(np.float32)
    kinds = np.where((surface < -1.8) & (surface > -7.2), FAT, SOFT).astype(np.uint8)
    below = int((z[0, 0] < _FLOOR).sum())
    part = np.s_[:, :, :below]
    _organs(grey[part], kinds[part], -surface[part], (np.abs(x), y, z[..., :below]))
    fade = (z[0, 0] < _FLOOR) & (z[0, 0] > _FLOOR - _FADE)
    low = z[..., fade]
    middle, top = middle_of(low), float(middle_of(_FLOOR + 1))
    angle = np.arctan2(x, y - middle)
    ratio = wall(radii, np.full_like(angle, _FLOOR + 1), angle) / wall(
        radii, np.broadcast_to(low, angle.shape), angle
    )
    at = [x * ratio - x[0, 0, 0], (y - middle) * ratio + top - y[0, 0, 0]]
    on = ndimage.map_coordinates(last, at, order=1)
    share = (_FLOOR - low) / _FADE
    share = share * share * (3 - 2 * share)
    share = np.where(surface[:, :, fade] > -1.5, 1, share)  # skin stays whole
    grey[:, :, fade] = share * grey[:, :, fade] + (1 - share) * on
    return grey, kinds


def _oval(x: Any, y: Any, z: Any, centre: tuple[float, ...], radii: tuple[float, ...]) -> Floats:
    """1 on an ellipsoid's surface, less inside."""
    a, b, c = ((v - m) / r for v, m, r in zip((x, y, z), centre, radii, strict=True))
    return np.asarray(np.sqrt(a * a + b * b + c * c), dtype=np.float32)


def _organs(grey: Floats, kinds: NDArray[np.uint8], depth: Floats, axes: tuple[Floats, Floats, Floats]) -> None:
    """Draw into both; x is the distance from the middle."""
    x, y, z = axes

    def put(where: NDArray[np.bool_], value: float, kind: int) -> None:
        grey[where], kinds[where] = value, kind

    deep = depth > 7
    arch = y - 68 + x * x / 22  # the row of teeth, a parabola
    row = deep & (np.abs(arch + 3) < 5) & (x < 30)
    put(deep & (_oval(x, y, z, (0, 38, -112), (23, 33, 17)) < 1), 78, SOFT)  # tongue
    gap = _oval(x, y, z, (0, 38, -112), (24, 34, 18.5))
    put(deep & (gap < 1.0) & (gap > 0.93) & (z > -113), 8, CAVITY)
    put(deep & (x < 26) & (y > 12) & (y < 66) & (np.abs(z + 91) < 1.8), 14, BONE)  # palate
    put(row & (z < -92) & (z > -104), 105, BONE)
    put(row & (z < -101) & (z > -130), 12, BONE)
    put(deep & (x > 2) & (x < 11) & (y > 12) & (y < 78) & (z > -89), 6, CAVITY)  # nose
    jaw = (depth > 9) & (depth < 21) & (z < -124) & (z > -146) & (y > -8)
    ramus = (depth > 11) & (depth < 21) & (x > 36) & (y > -14) & (y < 14) & (z > -140) & (z < -74)
    put(jaw | ramus, 118, BONE)
    rim = (depth < 11.5) | (depth > 18.5) | (z > -127) | (z < -143)
    put((jaw & rim) | (ramus & ((depth < 13) | (depth > 19))), 12, BONE)
    put((_oval(x, y, 0 * z, (0, 0, 0), (13, 6.5, 1)) < 1) & (z < -86) & (z > -146) & deep, 6, CAVITY)  # pharynx
    put((_oval(x, y, 0 * z, (0, -10, 0), (8, 8, 1)) < 1) & (z <= -142), 6, CAVITY)
    around = _oval(x, y, 0 * z, (0, -25, 0), (13, 10, 1))
    disc = np.broadcast_to(np.mod(z, 17) < 4, around.shape)
    put(around < 1, 95, BONE)
    put((around < 1) & disc, 60, SOFT)
    put((around < 1) & (around > 0.86), 15, BONE)
    ring = _oval(x, y, 0 * z, (0, -43, 0), (16, 15, 1))
    put((ring < 1) & ~disc & (y < -34), 40, BONE)
    put(_oval(x, y, 0 * z, (0, -43, 0), (11, 8.5, 1)) < 1, 30, FLUID)
    put(_oval(x, y, 0 * z, (0, -43, 0), (6, 5, 1)) < 1, 98, SOFT)


def found(
    grey: NDArray[np.uint8], brain: NDArray[np.bool_], axes: tuple[Floats, Floats, Floats]
) -> NDArray[np.uint8]:
    """What every voxel is, by its grey value and its place."""
    x, y, z = axes
    labels = np.where(grey > 118, FAT, np.where(grey > 40, SOFT, AIR)).astype(np.uint8)
    half = ndimage.binary_closing(np.pad(grey[::2, ::2, ::2] > _SKIN, 3), iterations=3)[3:-3, 3:-3, 3:-3]
    filled = np.stack([ndimage.binary_fill_holes(plane) for plane in np.moveaxis(half, 2, 0)], axis=2)
    inside = _doubled(filled, grey.shape)
    dark = inside & (labels == AIR)
    labels[dark] = SOFT
    labels[dark & _doubled(ndimage.binary_erosion(filled, iterations=2, border_value=1), grey.shape)] = BONE
    face = (np.abs(x) < 52) & (y > 8) & (z < -26) & (z + 0.35 * (y - 8) < -22)
    labels[dark & face & (grey < 22)] = CAVITY
    off = _doubled(ndimage.distance_transform_edt(~brain[::2, ::2, ::2]) * 2, grey.shape)
    skull = (off > 2.5) & (off < 16) & ((z > -45) | (y < 0))
    plate = ndimage.binary_closing((labels == BONE)[::2, ::2, ::2], iterations=2)
    labels[_doubled(plate, grey.shape) & skull & inside & (labels != CAVITY)] = BONE
    labels[dark & (off <= 2.5) & (grey > 8)] = FLUID
    eye = _oval(np.abs(x), y, z, (37, 52, -41), (13, 13, 13)) < 1
    labels[eye & (grey < 95)] = FLUID
    low, high = _three(grey[brain])
    values = grey[brain]
    labels[brain] = np.where(values < low, CSF, np.where(values < high, GM, WM))
    return labels


def _doubled(half: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    full = np.repeat(np.repeat(np.repeat(half, 2, 0), 2, 1), 2, 2)
    return full[: shape[0], : shape[1], : shape[2]]


def _three(values: NDArray[np.uint8]) -> tuple[float, float]:
    """Thresholds between three kinds of grey: k-means on the histogram, from fixed starts."""
    centres = np.percentile(values, (5, 40, 85))
    count = np.bincount(values, minlength=256).astype(float)
    level = np.arange(256)
    for _ in range(30):
        which = np.digitize(level, (centres[:-1] + centres[1:]) / 2)
        centres = np.array([np.average(level[which == c], weights=count[which == c] + 1e-9) for c in range(3)])
    cuts = (centres[:-1] + centres[1:]) / 2
    return float(cuts[0]), float(cuts[1])
