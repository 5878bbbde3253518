"""How sure a share is: Wilson's score interval. At the bottom, since training and measures both state it."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


def bounds(hits: float, of: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a binomial rate (Wilson 1927, JASA 22): low and high, with the rate between them.

    ``hits`` may be fractional: a tie between t answers of which one is right counts as 1/t.

    Raises:
        ValueError: no trial, hits outside [0, of], or a level outside (0, 1).
    """
    if not of >= 1 or not 0.0 <= hits <= of:
        raise ValueError("a rate needs a trial, and no more hits than trials")
    if not 0.0 < level < 1.0:
        raise ValueError("a level lies between 0 and 1")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, z2 = hits / of, z * z
    centre = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = z / (1 + z2 / of) * sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))
