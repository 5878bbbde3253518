"""What a mechanism promises, as frozen data. An unknown claim is refused, never guessed.

A claim depends on public configuration alone, so that it can be priced before an image is read. The
unit of privacy and the neighbouring relation are fields of the record, not comments: here the unit is
the patient at a site, and neighbours differ by one patient added or removed with all their images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

UNIT: Final = "patient"
RELATION: Final = "add-or-remove-one-patient"
MAX_STEPS: Final = 10_000_000


class UnsupportedClaim(ValueError):
    """The claim is of no known kind or its parameters make no sense."""


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise UnsupportedClaim(f"{name} must be a whole number in [{low}, {high}]")


def _real(name: str, value: object, low: float, high: float) -> None:
    if type(value) is not float or not (math.isfinite(value) and low < value <= high):
        raise UnsupportedClaim(f"{name} must be a finite number in ({low}, {high}]")


@dataclass(frozen=True, slots=True)
class SubsampledGaussian:
    """``steps`` Gaussian mechanisms, each on a Poisson sample of the patients.

    Mironov, Talwar & Zhang 2019 (arXiv 1908.10530), section 3: every patient enters each step
    independently with probability ``sampling_rate``; each patient's contribution has L2 norm at most 1
    in units of the clipping bound, and the noise has standard deviation ``noise_multiplier`` in it.
    """

    sampling_rate: float  # q, in (0, 1]
    noise_multiplier: float  # sigma, in (0.001, 1e6]; less is no noise, and overflows the price
    steps: int

    def __post_init__(self) -> None:
        """Refuse parameters outside the mechanism's definition."""
        _real("sampling_rate", self.sampling_rate, 0.0, 1.0)
        _real("noise_multiplier", self.noise_multiplier, 1e-3, 1e6)
        _whole("steps", self.steps, 1, MAX_STEPS)


@dataclass(frozen=True, slots=True)
class KAnonymous:
    """Each released record stands for at least ``k`` distinct patients, ``l_diversity`` labels among them.

    Syntactic: it has no epsilon (design P4). ``releases_per_patient`` is how many released clusters a
    patient may be in, this one counted (design P5).
    """

    k: int
    l_diversity: int
    releases_per_patient: int

    def __post_init__(self) -> None:
        """k counts distinct patients; one patient alone is no anonymity."""
        _whole("k", self.k, 2, 1_000_000)
        _whole("l_diversity", self.l_diversity, 1, 1_000_000)
        _whole("releases_per_patient", self.releases_per_patient, 1, 1_000_000)


@dataclass(frozen=True, slots=True)
class NoClaim:
    """Nothing is promised. It exists so that a release without a guarantee has to say so."""


Claim = SubsampledGaussian | KAnonymous | NoClaim

KINDS: Final[Mapping[str, type[SubsampledGaussian] | type[KAnonymous] | type[NoClaim]]] = {
    "subsampled-gaussian": SubsampledGaussian,
    "k-anonymous": KAnonymous,
    "no-claim": NoClaim,
}
