"""The arithmetic of a round: the uniform mean of the sites' updates. Pure; numpy only.

Every admitted update counts the same. A site's own number of examples is never a weight: it is a
statistic of patients that would have to be released and charged first, and a site could lie about it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class NoAggregate(ValueError):
    """The updates have no mean: there are none, or one has a wrong type or shape or is not finite."""


def usable(vector: object, size: int) -> str | None:
    """Why ``vector`` cannot be aggregated with vectors of (size,) float32; None when it can.

    Returns:
        "schema" for a wrong type, dtype or shape, "not_finite" for a NaN or an infinity, else None.
    """
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (size,):
        return "schema"
    if not bool(np.isfinite(vector).all()):
        return "not_finite"
    return None


def aggregate(vectors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The uniform mean of m >= 1 vectors of (p,) float32, p >= 1, summed in float64 in the order given.

    McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1, with equal weights.

    Returns:
        (p,) float32. Finite, since it lies between the smallest and largest value of each coordinate.
    Raises:
        NoAggregate: naming the first vector (counted from 0) that cannot be used, and why.
    """
    if not vectors or not isinstance(vectors[0], np.ndarray) or vectors[0].ndim != 1 or not vectors[0].size:
        raise NoAggregate("a mean needs at least one non-empty (p,) vector")
    size = int(vectors[0].size)
    total = np.zeros(size, np.float64)
    for position, vector in enumerate(vectors):
        fault = usable(vector, size)
        if fault is not None:
            raise NoAggregate(f"vector {position}: {fault}")
        total += vector
    return (total / len(vectors)).astype(np.float32)
