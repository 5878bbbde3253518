"""The part of a head that may change: laid down in the template's space, carried to each head by its registration.

C-DeID-GAN synthesises everything but the brain (section 3, "Brain preservation"). The face is much less, and
unchanged voxels stay useful. ``face`` covers what lies in front of and below a surface from the hairline over the
orbits and the jaw's angles to the neck, both ears, and all air. ``surface`` covers everything except the brain and a
margin around it. The landmarks are the template's, so a pitched or turned head is no special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Parts = Literal["face", "surface"]
Shape = tuple[int, int, int]

# The back of the face in MNI152 mm, measured on Colin27: (height, how far forward). Brow at 80 forward and -15 high,
# eyes at 60 and -40, jaw's angle at 5 and -95, spinal cord at -45. The brain that reaches in front is kept by margin.
_BACK: Final = ((-90.0, -30.0), (-70.0, -24.0), (-50.0, -4.0), (-35.0, 12.0), (-15.0, 34.0), (10.0, 44.0))
_HAIRLINE_MM: Final = 52.0  # height at which the forehead's strip ends
# Ears of Colin27 reach from 70 to 95 mm sideways, -62 to -14 forward and -72 to 2 high, and people differ by half of
# that. What lies between ear and cheek goes with them.
_SIDE: Final = (58.0, (-92.0, 70.0), (-110.0, 22.0))
_SCALP_MM: Final = 32.0  # skull and scalp above the ears are thinner; further from the brain is hair, coil or a ghost
_VAULT_MM: Final = -10.0  # height of the template above which that is asked


@dataclass(frozen=True, slots=True)
class Region:
    """The region that may change. Public configuration: no value comes from a patient."""

    parts: Parts = "face"
    margin_mm: float = 6.0  # around the brain, in which nothing under the skin changes
    feather_mm: float = 16.0  # from the region's border to where nothing of the original is left
    air_mm: float = 4.0  # air this close to kept skin stays as it is

    def __post_init__(self) -> None:
        """Refuse what would change the brain or keep a face."""
        if self.parts not in ("face", "surface"):
            raise ValueError("a region is 'face' or 'surface'")
        good = (0.0 < self.margin_mm <= 15.0, 0.0 < self.feather_mm <= 25.0, 0.0 < self.air_mm <= 10.0)
        if not all(good):
            raise ValueError("a region has a margin of 0 to 15 mm, a feather of 0 to 25 mm and air of 0 to 10 mm")

    def share(self, to_template: NDArray[np.float64], grid: NDArray[np.float64], shape: Shape) -> NDArray[np.float32]:
        """How much of each voxel's shape is made anew, the brain not yet considered.

        Args:
            to_template: (4, 4), RAS+ mm of the scanner to mm of the template.
            grid: (4, 4), index to RAS+ mm of the scanner.
            shape: of the grid.

        Returns:
            ``shape`` float32: 0 outside, 1 from ``feather_mm`` inside the border on, linear between.
        """
        if self.parts == "surface":
            return np.ones(shape, np.float32)
        x, y, z = _places(to_template @ grid, shape)
        heights, back = np.array(_BACK, np.float32).T
        slope = np.interp(z, (heights[1:] + heights[:-1]) / 2, np.diff(back) / np.diff(heights)).astype(np.float32)
        depth = (y - np.interp(z, heights, back).astype(np.float32)) / np.sqrt(1.0 + slope**2)
        np.minimum(depth, _HAIRLINE_MM - z, out=depth)
        np.maximum(depth, _at_side(x, y, z), out=depth)
        share: NDArray[np.float32] = np.clip(depth / self.feather_mm, 0.0, 1.0).astype(np.float32, copy=False)
        return share

    def too_far(
        self, to_template: NDArray[np.float64], grid: NDArray[np.float64], to_brain: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """What cannot be scalp: over the vault, and further from the brain than any scalp.

        Args:
            to_template: (4, 4), as above.
            grid: (4, 4), as above.
            to_brain: (i, j, k), mm to the brain.
        """
        _, _, z = _places(to_template @ grid, (to_brain.shape[0], to_brain.shape[1], to_brain.shape[2]))
        return (z > _VAULT_MM) & (to_brain > _SCALP_MM)


def _places(affine: NDArray[np.float64], shape: Shape) -> tuple[NDArray[np.float32], ...]:
    """Three arrays of ``shape``: the coordinates in mm of every voxel."""
    i, j, k = (np.arange(size, dtype=np.float32) for size in shape)
    rows = affine.astype(np.float32)
    return tuple(
        (row[0] * i)[:, None, None] + (row[1] * j)[None, :, None] + (row[2] * k + row[3])[None, None, :]
        for row in rows[:3]
    )


def _at_side(x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]) -> NDArray[np.float32]:
    """Depth in mm inside the nearer of two boxes around the ears and the air beside them; negative outside."""
    sideways, forward, height = _SIDE
    depth = np.abs(x) - np.float32(sideways)
    for axis, (low, high) in ((y, forward), (z, height)):
        np.minimum(depth, axis - np.float32(low), out=depth)
        np.minimum(depth, np.float32(high) - axis, out=depth)
    return depth
