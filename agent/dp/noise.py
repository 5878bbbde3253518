"""Gaussian noise from a cryptographic generator, on a lattice: the one place where noise is drawn.

Whatever is noised for privacy is noised here (P10): gradients in ``finetune``, histograms in ``select``, sums of
codes in a centroid release. The bytes come from an ``Entropy``, which in production is the operating system's and
nothing else: no seed of a run, and no global generator, can touch them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

GRID: Final = 2.0**-24  # lattice step in units of the sensitivity
TAIL: Final = 12.18  # no number of ``draw_gaussians`` is larger: sqrt(-2 log 2^-107) = 12.179
_53: Final = 2.0**-53


class Entropy(Protocol):
    """A source of unpredictable bytes. In production it is ``SystemEntropy`` and nothing else."""

    def take(self, count: int) -> bytes:
        """Give ``count`` fresh bytes."""
        ...


@dataclass(frozen=True, slots=True)
class SystemEntropy:
    """The operating system's cryptographic generator."""

    def take(self, count: int) -> bytes:
        """Give ``count`` bytes of ``os.urandom``."""
        return os.urandom(count)


def draw_uniforms(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """(count,) independent uniforms in [0, 1), multiples of 2^-53."""
    words = np.frombuffer(entropy.take(8 * count), "<u8") >> np.uint64(11)
    return words.astype(np.float64) * _53


def draw_gaussians(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """(count,) independent standard normals: Box & Muller 1958 in float64, tails to 12.2 sigma.

    The radius takes 106 bits. With the 53 of one uniform the possible radii beyond 6 sigma lie further apart than the
    lattice: a number in the tail would then be one that the sum of a neighbour could never have given, which happens
    in a hundredth of all trainings of 10^5 parameters. Float32 uniforms would cut the tails at 5.8 sigma.
    """
    half = (count + 1) // 2
    coarse, fine = draw_uniforms(entropy, half), draw_uniforms(entropy, half) + 0.5 * _53
    radius = np.sqrt(-2.0 * np.log(coarse + fine * _53))  # float64 keeps 53 bits of it, however small it is
    angle = 2.0 * math.pi * draw_uniforms(entropy, half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def noisy_sum(
    total: NDArray[np.float64], sensitivity: float, noise_multiplier: float, entropy: Entropy
) -> NDArray[np.float64]:
    """A sum (d,) with the noise of a Gaussian mechanism, on a lattice of ``sensitivity`` 2^-24.

    Floating-point noise has holes that betray what it was added to (Mironov 2012); on a lattice the sum
    is exact. Rounding moves two neighbouring sums apart by at most grid sqrt(d), which the noise covers.

    Args:
        total: (d,) float64; one patient moves it by at most ``sensitivity`` in L2 norm: the caller's promise.
        sensitivity: in units of ``total``; finite and positive.
        noise_multiplier: the standard deviation of the noise in units of the sensitivity; finite and positive.
        entropy: of the noise.
    Raises:
        ValueError: no noise or no bound was asked for, or ``total`` is not a finite float64 vector.
    """
    if not (0.0 < sensitivity < math.inf and 0.0 < noise_multiplier < math.inf):
        raise ValueError("sensitivity and noise_multiplier must be finite and positive")
    grid = sensitivity * GRID
    return snap_to_lattice(total, deviation(sensitivity, noise_multiplier, len(total), grid), grid, entropy)


def snap_to_lattice(total: NDArray[np.float64], spread: float, grid: float, entropy: Entropy) -> NDArray[np.float64]:
    """``total`` (d,) and noise of standard deviation ``spread``, each rounded by itself to multiples of ``grid``.

    Raises:
        ValueError: see :func:`lattice_steps`.
    """
    return lattice_steps(total, spread, grid, entropy) * grid


def lattice_steps(total: NDArray[np.float64], spread: float, grid: float, entropy: Entropy) -> NDArray[np.float64]:
    """The same in steps of ``grid``: whole numbers, exact up to 2^53.

    Multiplied by the grid and divided by it again, a number above 2^51 may come back as another one.

    Raises:
        ValueError: ``total`` is not a finite float64 vector: noise would hide nothing of a NaN.
    """
    if total.dtype != np.float64 or total.ndim != 1 or not np.isfinite(total).all():
        raise ValueError("what gets noise must be a vector of finite float64 numbers")
    noise = draw_gaussians(entropy, len(total)) * spread
    steps: NDArray[np.float64] = np.rint(total / grid) + np.rint(noise / grid)
    return steps


def deviation(sensitivity: float, noise_multiplier: float, size: int, grid: float) -> float:
    """Standard deviation of the noise on each of ``size`` coordinates, on a lattice of ``grid``."""
    return noise_multiplier * (sensitivity + grid * math.sqrt(size))
