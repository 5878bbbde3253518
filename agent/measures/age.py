"""What de-facing does to a predicted age: n_D - n_O in years, of C-DeID-GAN, section 4.2 and Fig. 4b."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.measures.intervals import Interval, Resampling, Units, percentile, resampled
from agent.nets.brain_age import BrainAge, predicted


@dataclass(frozen=True, slots=True, eq=False)
class Deviations:
    """How predictions on de-faced heads differ from those on the originals."""

    years: NDArray[np.float64]  # (n,): n_D - n_O
    mean: float
    interval: Interval  # of the mean, by patient
    deviation: float  # standard deviation over heads

    def __post_init__(self) -> None:
        """Finite numbers of one head at least."""
        if not len(self.years) or not np.isfinite([*self.years, self.mean, self.deviation]).all():
            raise ValueError("deviations are finite numbers of years")


def deviations(
    brain_age: BrainAge,
    originals: NDArray[np.float32],
    defaced: NDArray[np.float32],
    rng: np.random.Generator,
    patients: NDArray[np.int64] | None = None,
) -> Deviations:
    """n_D - n_O of every head, with the bootstrap's interval of their mean.

    Args:
        brain_age: trained on other people.
        originals: (n, s, s, s) of :func:`agent.nets.brain_age.head_cube`.
        defaced: the same heads without their faces, in the same cubes.
        rng: of the bootstrap.
        patients: (n,) whose each is; everyone another where it is None.
    Raises:
        ValueError: other shapes, nothing, or values that are not finite.
    """
    if originals.shape != defaced.shape:
        raise ValueError("every original has its de-faced head")
    years = predicted(brain_age, defaced) - predicted(brain_age, originals)
    units = Units(np.arange(len(years), dtype=np.int64) if patients is None else patients)
    draws = resampled(lambda rows: [float(years[rows].mean())], units, rng, Resampling().count)[:, 0]
    mean = float(years.mean())
    return Deviations(years, mean, percentile(draws, mean), float(years.std()))
