"""Several views of each cluster: small random noise on its representative's code (k-SALSA, supplement E).

A view is a function of the representative's code, of public constants and of chance, and of nothing else: given the
representative, the views are independent of every patient, so k-anonymity holds for all of them together. That is why
the spread is public (the generator's own, on random inputs) and never measured on the cohort's codes. Views are
images like others: a mechanism that vets representatives against patients vets every view too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agent.models.stylegan.network import Generator


@dataclass(frozen=True, slots=True)
class KSalsaViews:
    """Public configuration of the views."""

    count: int = 5  # a cluster; the first is the representative itself
    sigma: float = 0.1  # of the noise, in units of the public spread

    def __post_init__(self) -> None:
        """Refuse no view, and noise that is none or no number."""
        if not (1 <= self.count <= 1000 and 0.0 < self.sigma < math.inf):
            raise ValueError("there are 1 to 1000 views, with noise of a positive standard deviation")


def public_spread(generator: Generator, count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """The standard deviation of every coordinate of a code, over ``count`` random inputs of a public generator.

    Returns:
        (num_ws * w_dim,) float32: a code laid flat.
    """
    z = torch.from_numpy(rng.standard_normal((count, generator.architecture.z_dim), np.float32))
    with torch.no_grad():
        ws = generator.mapping(z.to(next(generator.parameters()).device)).flatten(1)
    spread: NDArray[np.float32] = ws.std(dim=0, correction=0).cpu().numpy()
    return spread


def augmented(
    codes: NDArray[np.float32], spread: NDArray[np.float32] | float, views: KSalsaViews, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Noisy copies of the representatives' codes.

    Args:
        codes: (m, d), the representatives.
        spread: (d,) or one number: public, never a statistic of the cohort.
        views: how many, how far.
        rng: of the noise.
    Returns:
        (m * count, d) float32, the views of a cluster in a row with the representative first, and (m * count,) the
        cluster of each.
    Raises:
        ValueError: codes are not (m, d), or something is not finite.
    """
    if codes.ndim != 2 or not bool(np.isfinite(codes).all() and np.isfinite(spread).all()):
        raise ValueError("codes are finite and (m, d), and so is the spread")
    m, d = codes.shape
    noise = rng.standard_normal((m, views.count, d), np.float32) * (views.sigma * np.asarray(spread, np.float32))
    noise[:, 0] = 0.0
    made = (codes[:, np.newaxis] + noise).astype(np.float32).reshape(m * views.count, d)
    return made, np.repeat(np.arange(m), views.count)
