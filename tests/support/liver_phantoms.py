"""Abdomens of 48 x 48 x 48 voxels, made up: a liver with one or two masses in it, and what is around; unlike sites.

No grey value tells a liver: spleen, kidneys, stomach and loops of bowel have values like it, and loops and stomach
some like a mass. Organs lie, turn and bulge otherwise in everybody; a volume has a gamma, a slow shading and noise of
its own. Of three hospitals one's volumes are blurred and lighter, another's darker and noisier. The public volumes
are of other people at another scanner: smaller livers, larger masses that show more, stronger gamma, more blur, less
noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, zoom

SIDE: Final = 48  # voxels
SEGMENTS: Final = ("liver", "mass")  # 1 and 2 in a mask; 0 is everything else
Pair = tuple[float, float]  # drawn between
Field = NDArray[np.float32]  # (SIDE, SIDE, SIDE)


@dataclass(frozen=True, slots=True)
class Scanner:
    """How a hospital's volumes come out, and of whom they are."""

    gamma: Pair = (0.8, 1.25)
    blur: Pair = (0.4, 0.7)  # voxels
    noise: float = 0.05  # standard deviation, of a volume in [0, 1]
    scale: float = 1.0
    shift: float = 0.0
    liver: Pair = (0.9, 1.15)  # of its usual size
    mass: Pair = (0.16, 0.30)  # radius, where the volume is 2 wide
    shown: Pair = (0.07, 0.16)  # how much darker than the liver a mass is


SCANNERS: Final = (
    Scanner(),
    Scanner(blur=(0.7, 1.0), scale=0.8, shift=0.15),  # blurred, lighter
    Scanner(noise=0.065, scale=0.75, gamma=(1.0, 1.5)),  # darker, noisier
)
PUBLIC: Final = Scanner((1.4, 2.0), (0.8, 1.3), 0.03, liver=(0.7, 0.95), mass=(0.2, 0.34), shown=(0.14, 0.28))
_GRID: Final = np.stack(np.meshgrid(*[np.linspace(-1, 1, SIDE, dtype=np.float32)] * 3, indexing="ij"))
# name -> centre (head to foot, front to back, right to left), radii, grey value
_ORGANS: Final = (
    ((-0.3, 0.25, 0.55), (0.32, 0.28, 0.2), 0.56),  # spleen
    ((0.35, 0.4, -0.38), (0.3, 0.16, 0.15), 0.6),  # kidneys
    ((0.3, 0.4, 0.38), (0.3, 0.16, 0.15), 0.6),
    ((-0.25, -0.25, 0.4), (0.3, 0.25, 0.25), 0.45),  # stomach
)
_LIVER: Final = ((-0.2, -0.05, -0.35), (0.55, 0.45, 0.38), 0.57)
_LOOPS: Final = 5
_BULGE: Final = 0.35  # of the surface, where it is at 1


@dataclass(frozen=True, slots=True, eq=False)
class Abdomens:
    """Patients, each with one volume."""

    volumes: NDArray[np.float32]  # (n, SIDE, SIDE, SIDE), in [0, 1]
    masks: NDArray[np.uint8]  # the same shape: 0, 1 or 2

    def __len__(self) -> int:
        """How many patients."""
        return len(self.volumes)


def abdomens(scanner: Scanner, patients: int, rng: np.random.Generator) -> Abdomens:
    """So many patients of one scanner."""
    made = [_abdomen(scanner, np.random.default_rng(seed)) for seed in rng.integers(0, 2**63, patients)]
    volumes, masks = zip(*made, strict=True)
    return Abdomens(np.stack(volumes), np.stack(masks))


def _abdomen(scanner: Scanner, rng: np.random.Generator) -> tuple[Field, NDArray[np.uint8]]:
    bulge = _BULGE * _slow(rng, 5)
    body = np.hypot(_GRID[1] / rng.uniform(0.72, 0.85), _GRID[2] / rng.uniform(0.88, 0.98)) + 0.1 * bulge
    grey = np.where(body < 1, np.float32(0.25), np.float32(0.02))
    inside = body < 0.87
    grey[inside] = 0.42
    for _ in range(_LOOPS):
        where = rng.uniform((-0.2, -0.5, -0.5), (0.9, 0.3, 0.6))
        grey[_ellipsoid(where, rng.uniform(0.1, 0.28, 3), bulge, rng) & inside] = rng.uniform(0.3, 0.62)
    for where, radii, value in _ORGANS:
        place, size = where + rng.normal(0, 0.06, 3), np.array(radii) * rng.uniform(0.85, 1.15, 3)
        grey[_ellipsoid(place, size, bulge, rng) & inside] = value + rng.normal(0, 0.04)
    spine = np.hypot(_GRID[1] - 0.55, _GRID[2]) < rng.uniform(0.13, 0.18)
    grey[spine] = rng.uniform(0.7, 0.9)
    where, radii, value = _LIVER
    value += rng.normal(0, 0.03)
    centre, size = where + rng.normal(0, 0.07, 3), np.array(radii) * rng.uniform(*scanner.liver, 3)
    liver = _ellipsoid(centre, size, bulge, rng) & inside & ~spine
    mask = liver.astype(np.uint8)
    grey[liver] = value
    for _ in range(rng.integers(1, 3)):
        direction = rng.normal(size=3)
        place = centre + size * 0.6 * rng.random() ** (1 / 3) * direction / np.linalg.norm(direction)
        mass = _ellipsoid(place, rng.uniform(*scanner.mass, 3), bulge, rng) & liver
        grey[mass], mask[mass] = value - rng.uniform(*scanner.shown), 2
    return _scanned(scanner, grey, rng), mask


def _ellipsoid(
    centre: NDArray[np.float64], radii: NDArray[np.float64], bulge: Field, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """One that is turned a little, with a surface that bulges."""
    turn, _ = np.linalg.qr(np.eye(3) + rng.normal(0, 0.15, (3, 3)))
    by_radius = (turn / radii[:, None]).astype(np.float32)
    moved = (by_radius @ (_GRID.reshape(3, -1) - centre.astype(np.float32)[:, None])).reshape(_GRID.shape)
    inside: NDArray[np.bool_] = np.square(moved).sum(axis=0) < 1 + bulge
    return inside


def _slow(rng: np.random.Generator, side: int) -> Field:
    """A field that changes slowly, within about [-1, 1]."""
    return zoom(rng.uniform(-1, 1, (side,) * 3).astype(np.float32), SIDE / side, order=1)


def _scanned(scanner: Scanner, grey: Field, rng: np.random.Generator) -> Field:
    textured = grey + 0.03 * _slow(rng, 16)
    blurred = gaussian_filter(textured, rng.uniform(*scanner.blur))
    shaded = np.clip(blurred * (1 + 0.12 * _slow(rng, 3)), 0, 1) ** rng.uniform(*scanner.gamma)
    noisy = scanner.scale * shaded + scanner.shift + rng.normal(0, scanner.noise, grey.shape)
    return np.clip(noisy, 0, 1).astype(np.float32)
