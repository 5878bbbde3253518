"""The attacker's features of a scan, before any comparison: depth maps, images and points of the surface.

The attacker stands every head in the same frame, by the registration of its brain: defacing leaves the brain as it
was, so that nothing keeps an attacker from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.defacing.reidentification.rendering import FRONT, Camera, Surface, camera_at, render, renderings

Values = NDArray[np.float64]

FACE_VIEWS: Final = (FRONT, "left 30", "right 30", "left 60", "right 60", "left 90", "right 90")
BEHIND: Final = -70.0  # mm: the depth of a pixel that shows nothing, a little behind the deepest that is seen
# Parts of the surface by the head's frame, whose origin is 20 mm below the template's: (low, high) of |x|, y and z.
ZONES: Final[Mapping[str, tuple[tuple[float, float], ...]]] = MappingProxyType(
    {
        "face": ((0, 75), (25, 150), (-120, 35)),
        "eyes and brow": ((0, 60), (40, 150), (-25, 35)),
        "nose": ((0, 25), (70, 150), (-50, 0)),
        "mouth and chin": ((0, 60), (30, 150), (-120, -45)),
        "cheeks": ((25, 75), (15, 150), (-75, -15)),
        "ears": ((60, 120), (-60, 15), (-65, 15)),
        "forehead": ((0, 75), (20, 150), (35, 75)),
        "vault": ((0, 120), (-150, 150), (75, 150)),
        "neck and jaw": ((0, 120), (-150, 30), (-150, -65)),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Cloud:
    """Points of a surface."""

    points: Values  # (n, 3) mm in the head's frame
    normals: Values  # (n, 3) outwards

    def __post_init__(self) -> None:
        """As many normals as points; a head without a surface has none."""
        if self.points.shape != self.normals.shape or self.points.shape[1:] != (3,):
            raise ValueError("a cloud is (n, 3) points with their normals")
        if not bool(np.isfinite(self.points).all() and np.isfinite(self.normals).all()):
            raise ValueError("a cloud's points are finite")


@dataclass(frozen=True, slots=True, eq=False)
class ScanFeatures:
    """One scan, as the attacker sees it: numbers to compare by name, and points to lay onto others."""

    channels: Mapping[str, NDArray[np.float32]]  # each (d,), of one length in all looks
    clouds: Mapping[str, Cloud]

    def __post_init__(self) -> None:
        """Something is seen, and is finite."""
        if not self.channels and not self.clouds:
            raise ValueError("a look that sees nothing")
        if not all(c.ndim == 1 and bool(np.isfinite(c).all()) for c in self.channels.values()):
            raise ValueError("a look's channels are (d,) and finite")


@dataclass(frozen=True, slots=True)
class Eye:
    """How an attacker looks."""

    side: int = 64  # pixels along each edge
    extent_mm: float = 256.0
    views: tuple[str, ...] = FACE_VIEWS
    points: int = 300  # of each cloud, about

    def __post_init__(self) -> None:
        """An eye that sees something."""
        if not self.views or not self.points >= 20:
            raise ValueError("an attacker has a view and 20 points or more")

    def camera(self, to_template: Values) -> Camera:
        """The camera for a head."""
        return camera_at(to_template, self.side, self.extent_mm)


def extract_features(seen: Surface, to_template: Values, eye: Eye) -> ScanFeatures:
    """A head as the attacker sees it.

    Args:
        seen: the surface (:func:`agent.defacing.reidentification.rendering.surface`), de-faced or not.
        to_template: (4, 4), RAS+ mm of the scanner to mm of the template, found by the brain.
        eye: how.
    """
    camera = eye.camera(to_template)
    taken = renderings(seen, camera, eye.views)
    depth = np.stack([np.nan_to_num(one.depth, nan=BEHIND) for one in taken.values()])
    shade = np.stack([one.shade for one in taken.values()])
    wide = replace(camera, side=max(16, eye.side // 2), step_mm=max(camera.step_mm, 2.0))
    rounds = [render(seen, wide, yaw) for yaw in (0.0, 72.0, 144.0, 216.0, 288.0)]
    points = np.concatenate([one.points for one in rounds])
    normals = np.concatenate([one.normals for one in rounds])
    front = np.concatenate([one.points for one in taken.values()])
    facing = np.concatenate([one.normals for one in taken.values()])
    here = in_zone(front, "face")
    clouds = {
        "face": _thinned(Cloud(front[here], facing[here]), eye.points),
        "head": _thinned(Cloud(points, normals), eye.points),
    }
    return ScanFeatures({"depth": np.maximum(depth, np.float32(BEHIND)).ravel(), "shade": shade.ravel()}, clouds)


def in_zone(points: Values, zone: str) -> NDArray[np.bool_]:
    """(n,) which of (n, 3) points of the head's frame lie in a part of the surface.

    Raises:
        KeyError: not one of ``ZONES``.
    """
    (x0, x1), (y0, y1), (z0, z1) = ZONES[zone]
    x, (y, z) = np.abs(points[:, 0]), points[:, 1:].T
    inside: NDArray[np.bool_] = (x >= x0) & (x < x1) & (y >= y0) & (y < y1) & (z >= z0) & (z < z1)
    return inside


def _thinned(cloud: Cloud, most: int) -> Cloud:
    """Every n-th point, so that about ``most`` are left; the order is that of the pixels, so it is spread evenly."""
    every = np.linspace(0, len(cloud.points) - 1, min(most, len(cloud.points))).round().astype(np.int64)
    return Cloud(cloud.points[every], cloud.normals[every])
