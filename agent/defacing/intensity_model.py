"""How bright a made head is in one series: learned from the series' own voxels, as a few dozen aggregate numbers.

A network writes the numbers of its training heads. They are turned in two steps into those of a series: by matching
quantiles to the finest series of the study, and from there by the median of the series where the finest series is
about so bright, so that a T2, a FLAIR or a CT keeps its own contrast. Both are learned outside the face, mostly from
tissue that is published anyway; only if there is too little of that are all of the head's tissues taken. What leaks
is at most ``KNOTS`` medians and ``LAW`` quantiles of air: how bright, never where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.volumes.errors import NotDefacedError

KNOTS: Final = 24
LAW: Final = 256
LEAST: Final = 300  # voxels to learn from
BOUNDS: Final = (0.5, 1.6)
_TAIL: Final = 0.005
_AIR_TAIL: Final = 0.001
_FEWEST: Final = 25  # voxels of one median
_RAYLEIGH: Final = 0.655  # sd of the magnitude of pure noise over the sd of the noise


@dataclass(frozen=True, slots=True, eq=False)
class Contrast:
    """The numbers of one series."""

    made: NDArray[np.float64]  # (n,) rising, of a made head in [0, 1]
    own: NDArray[np.float64]  # (n,) of the series
    air: NDArray[np.float64]  # (LAW,) rising quantiles of the air
    grain: float  # sd of the series' noise in tissue

    def tissue(self, made: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
        """The series' numbers for made ones, with the series' noise. One normal number is drawn for each voxel."""
        bright = np.interp(made, self.made, self.own).astype(np.float32)
        bright += np.float32(self.grain) * rng.standard_normal(made.shape, np.float32)
        return bright

    def nothing(self, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
        """Air by its law: independent from voxel to voxel, so that no ghost is left. One number for each voxel."""
        places = np.linspace(0.0, 1.0, len(self.air))
        return np.interp(rng.random(shape, np.float32), places, self.air).astype(np.float32)


def learned(
    made: NDArray[np.float32],
    finest: NDArray[np.float32],
    series: NDArray[np.float32],
    air: NDArray[Any],
    brain: NDArray[np.float32],
    white: float = float("inf"),
) -> Contrast:
    """From tissue that made head and series share.

    Args:
        made: (n,) numbers of the made head in [0, 1].
        finest: (n,) of the study's finest series at the same points.
        series: (n,) of the series at the same points.
        air: (m,) of the series, of air alone.
        brain: (b, 3) of the series, neighbours along one axis inside the brain, for the noise.
        white: of the finest series, what a made 1 stands for. Quantiles correct that within ``BOUNDS``, and no
            further: a made head of another size than the original has other tissues at the same points.

    Raises:
        NotDefacedError: ``other_frame``, the two share too little tissue.
    """
    if not len(made) >= LEAST:
        raise NotDefacedError("other_frame")
    steps = np.linspace(_TAIL, 1.0 - _TAIL, KNOTS)
    low = np.asarray(np.quantile(made, steps), np.float64)
    middle = np.asarray(np.quantile(finest, steps), np.float64)
    if np.isfinite(white) and white > 0:
        middle = np.clip(middle, BOUNDS[0] * white * low, BOUNDS[1] * white * low)
    own = _medians(finest, series, middle)
    rising, first = np.unique(low, return_index=True)
    law = np.quantile(air, np.linspace(_AIR_TAIL, 1.0 - _AIR_TAIL, LAW))
    return Contrast(rising, own[first], law, _grain(brain, air))


def _medians(
    finest: NDArray[np.float32], series: NDArray[np.float32], middle: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The series' median around each level of the finest series; levels with too few voxels are filled in."""
    edges = (middle[1:] + middle[:-1]) / 2
    box = np.searchsorted(edges, finest)
    found = np.full(len(middle), np.nan)
    for level in range(len(middle)):
        mine = series[box == level]
        if len(mine) >= _FEWEST:
            found[level] = np.median(mine)
    known = np.isfinite(found)
    if not bool(known.any()):
        return np.full(len(middle), float(np.median(series)))
    return np.asarray(np.interp(np.arange(len(middle)), np.flatnonzero(known), found[known]))


def _grain(brain: NDArray[np.float32], air: NDArray[Any]) -> float:
    """The smaller of two estimates: structure makes that of the brain too large, masking that of air too small."""
    in_air = float(np.std(air.astype(np.float64))) / _RAYLEIGH
    if len(brain) < LEAST:
        return in_air
    bent = brain[:, 1] - (brain[:, 0] + brain[:, 2]) / 2
    in_brain = float(1.4826 * np.median(np.abs(bent)) / np.sqrt(1.5))
    return min(in_air, in_brain) if in_air > 0.0 else in_brain / 2
