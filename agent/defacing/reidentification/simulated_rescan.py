"""A scan as it might have been on another day: how an attack is shown to work where each patient was scanned once.

The pose (the grid lies elsewhere in the head), the coil's field and the noise of magnitude images (Gudbjartsson &
Patz 1995) are drawn again. This is easier than a true second visit, months later: it shows that the attack works, not
how well it would work after a year.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Volume
from agent.volumes.grid import resample

_FIELD: Final = 3  # cosines along each axis


@dataclass(frozen=True, slots=True)
class Visit:
    """How much two visits differ."""

    turn_deg: float = 4.0  # standard deviation of the rotation about each axis
    shift_mm: float = 4.0  # of the shift along each axis
    noise: float = 0.02  # of the 99th percentile
    field: float = 0.08  # of the logarithm of the coil's sensitivity


def revisited(
    volume: Volume, rng: np.random.Generator, visit: Visit | None = None
) -> tuple[Volume, NDArray[np.float64]]:
    """The same head on the same grid in another pose.

    Args:
        volume: oriented.
        rng: of the visit.
        visit: how much differs.

    Returns:
        float32 values on the volume's own grid; and (4, 4), mm of the new scan to mm of the old one.
    """
    visit = visit or Visit()
    (i, j, k), affine = volume.values.shape, volume.affine
    shape = (i, j, k)
    centre = (affine @ np.array([*(n / 2 for n in shape), 1.0]))[:3]
    turn = _rotation(np.deg2rad(rng.normal(0.0, visit.turn_deg, 3)))
    back = np.eye(4)
    back[:3, :3] = turn
    back[:3, 3] = centre - turn @ centre + rng.normal(0.0, visit.shift_mm, 3)
    there = resample(
        volume.values, affine, (shape[0], shape[1], shape[2]), back @ affine, fill=float(volume.values.min())
    )
    level = visit.noise * float(np.quantile(there, 0.99))
    there *= np.exp(_field(shape, rng) * visit.field)
    noisy = np.hypot(there + rng.normal(0.0, level, shape), rng.normal(0.0, level, shape))
    return Volume(noisy.astype(np.float32), affine), back


def _rotation(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """(3, 3) about x, y and z in turn."""
    out = np.eye(3)
    for axis, angle in enumerate(angles):
        one = np.eye(3)
        i, j = (axis + 1) % 3, (axis + 2) % 3
        one[[i, i, j, j], [i, j, i, j]] = [np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)]
        out = one @ out
    return out


def _field(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    """A smooth field of mean 0 and deviation 1."""
    weights = rng.standard_normal((_FIELD, _FIELD, _FIELD))
    axes = [np.cos(np.pi * np.outer(np.arange(_FIELD), (np.arange(n) + 0.5) / n)) for n in shape]
    field = np.einsum("abc,ai,bj,ck->ijk", weights, *axes, optimize=True)
    return np.asarray((field - field.mean()) / max(float(field.std()), 1e-9), np.float32)
