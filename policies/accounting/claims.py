"""What a mechanism promises, as frozen data. An unknown claim is refused, never guessed.

A claim depends on public configuration alone, so it can be priced before an image is read. The unit of privacy and
the neighbouring relation are fields of the record. By default the unit is the patient at a site, and neighbours
differ by one patient added or removed with all their images (design P1). A claim per image is possible but says so;
claims of different units are never added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from protos.common.errors import ConfigError

UNIT: Final = "patient"
UNITS: Final = frozenset({UNIT, "image"})
RELATION: Final = "add-or-remove-one"  # one unit, with everything that it contributes
RELATIONS: Final = frozenset({RELATION})  # whose loss the accountants compute; replace-one is another, larger
MAX_STEPS: Final = 10_000_000
LEAST_NOISE: Final = 1e-3  # a noise multiplier of less is no noise, and its price overflows
MOST_NOISE: Final = 1e6
MAX_SITES: Final = 10_000  # in one securely aggregated sum
MAX_PARTS: Final = 8  # of one composed claim
MAX_LOOKS: Final = 1000  # at one training


class UnsupportedClaimError(ConfigError, ValueError):
    """The claim is of no known kind, its parameters make no sense, or it is not comparable with its neighbour."""


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise UnsupportedClaimError(f"{name} must be a whole number in [{low}, {high}]")


def _real(name: str, value: object, low: float, high: float) -> None:
    if type(value) is not float or not (math.isfinite(value) and low < value <= high):
        raise UnsupportedClaimError(f"{name} must be a finite number in ({low}, {high}]")


def _neighbours(unit: object, relation: object) -> None:
    for name, value, known in (("unit", unit, UNITS), ("relation", relation, RELATIONS)):
        if type(value) is not str or value not in known:
            raise UnsupportedClaimError(f"{name} must be one of: {', '.join(sorted(known))}")


def _steps(claim: Stepwise) -> None:
    _real("sampling_rate", claim.sampling_rate, 0.0, 1.0)
    _real("noise_multiplier", claim.noise_multiplier, LEAST_NOISE, MOST_NOISE)
    _whole("steps", claim.steps, 1, MAX_STEPS)
    _neighbours(claim.unit, claim.relation)


@dataclass(frozen=True, slots=True)
class SubsampledGaussian:
    """``steps`` Gaussian mechanisms, each on a Poisson sample of the units.

    Mironov, Talwar & Zhang 2019 (arXiv 1908.10530), section 3: every unit enters each step independently with
    probability ``sampling_rate``; each unit's contribution has L2 norm at most 1 in units of the clipping bound, and
    the noise has standard deviation ``noise_multiplier`` in it.
    """

    sampling_rate: float  # q, in (0, 1]
    noise_multiplier: float  # sigma, in (0.001, 1e6]
    steps: int  # in [1, MAX_STEPS]
    unit: str = UNIT
    relation: str = RELATION

    def __post_init__(self) -> None:
        """Refuse parameters outside the mechanism's definition."""
        _steps(self)


@dataclass(frozen=True, slots=True)
class DistributedGaussian:
    """``steps`` securely aggregated sums of clipped updates, each with Gaussian noise that the sites share.

    Dwork et al. 2006 (Our Data, Ourselves), Kairouz, Liu & Steinke 2021 (arXiv 2102.06387). The *sum* is protected;
    secure aggregation reveals nothing else. Each site adds noise of standard deviation ``noise_multiplier * clip /
    sqrt(honest)`` to its own part. So any ``honest`` of the ``sites`` that follow the protocol and keep their noise
    secret give the sum the noise of ``SubsampledGaussian(sampling_rate, noise_multiplier, steps)``, and the claim has
    that price. Noise of the other sites is not counted. With ``honest == 1`` every site adds the full noise, and no
    assumption about other sites is needed. Otherwise the guarantee rests on an assumption, which :func:`assumption`
    states and every certificate prints.

    It is sound only when each round is one step. The parts of a sum are hidden, but between two steps of one round a
    site's model would move along its own part, which bears a share of the noise only. The mechanism takes one step in
    each round, and review refuses a claim of more steps than rounds unless ``honest`` is 1.
    """

    sampling_rate: float  # q, in (0, 1]: of each site's patients, in each step
    noise_multiplier: float  # sigma of the sum, in units of the clipping bound, in (0.001, 1e6]
    steps: int  # in [1, MAX_STEPS]
    sites: int  # asked for a part of each sum, in [1, MAX_SITES]
    honest: int  # of them, at least, in every sum: in [1, sites]
    unit: str = UNIT
    relation: str = RELATION

    def __post_init__(self) -> None:
        """Refuse parameters outside the mechanism's definition."""
        _steps(self)
        _whole("sites", self.sites, 1, MAX_SITES)
        _whole("honest", self.honest, 1, self.sites)

    @property
    def share(self) -> float:
        """Standard deviation of the noise that each site adds, in units of the clipping bound."""
        return self.noise_multiplier / math.sqrt(self.honest)


@dataclass(frozen=True, slots=True)
class GaussianQuery:
    """One histogram (or sum of counts) with independent Gaussian noise on every bin, empty bins and classes included.

    PrivImage, theorem 3.1: the semantic histogram. A unit counts with at most ``contribution`` images, and each image
    adds one vote to each of at most ``votes`` *different* bins (k_1 semantics; per-class histograms are one histogram
    with a bin per class and semantic, and an image votes in its own class only).

    Sensitivity. An image's votes are a vector v with entries 0 or 1, at most k_1 of them 1, so ``|v| <= sqrt(k_1)``.
    Adding or removing a unit moves the histogram by the sum of its m images' vectors, and by the triangle inequality
    ``|v_1 + ... + v_m| <= m sqrt(k_1)``, reached when all images vote for the same k_1 bins: m in each, whence
    ``sqrt(k_1 m^2)``. The paper's bound, sqrt(k_1), is the case m = 1: it protects an image, not a patient. An image
    that may vote twice for a bin is not covered: count its votes as that many images with one vote.

    Averages. A unit whose images' vectors are *averaged* has ``contribution`` 1, however many images and bins there
    are: a norm is convex, so the mean of vectors of norm at most sqrt(k_1) has norm at most sqrt(k_1). Per-class
    histograms are no exception, for each image's vector lies in its own class's bins, with k_1 votes as before. The
    mean must be over all images that vote, not one over each class's: those would add up, class by class.

    Sums of anything else. Where a unit contributes a vector of norm at most 1 (sums for an evaluation, see
    :mod:`policies.tasks.evaluation`), that is one image with one vote, and ``noise`` is in units of that norm.

    There is no field for the sensitivity (design P10): it derives from what the mechanism enforces.
    """

    noise: float  # standard deviation on every bin, in votes: the paper's sqrt(k_1) sigma_2
    contribution: int  # m, in [1, 1e6]: the most images of one unit that are counted
    votes: int  # k_1, in [1, 1e6]: the most bins that one image votes for, one vote each
    unit: str = UNIT
    relation: str = RELATION

    def __post_init__(self) -> None:
        """Refuse parameters outside the mechanism's definition, or noise too small or large for what it covers."""
        _whole("contribution", self.contribution, 1, 1_000_000)
        _whole("votes", self.votes, 1, 1_000_000)
        _real("noise", self.noise, 0.0, 1e15)
        _real("noise divided by the sensitivity", self.noise_multiplier, LEAST_NOISE, MOST_NOISE)
        _neighbours(self.unit, self.relation)

    @property
    def sensitivity(self) -> float:
        """L2 distance of the histograms of two neighbours at most, in votes: ``contribution * sqrt(votes)``."""
        return self.contribution * math.sqrt(self.votes)

    @property
    def noise_multiplier(self) -> float:
        """Sigma: the noise in units of the sensitivity (the paper's sigma_2 when ``contribution`` is 1)."""
        return self.noise / self.sensitivity


Part = SubsampledGaussian | GaussianQuery  # what a composed claim may consist of


@dataclass(frozen=True, slots=True)
class Composed:
    """One release that makes several Gaussian claims at once, all fixed in advance and of one unit and relation.

    PrivImage (theorem E.2) is a histogram followed by training. Both read the same patients, so the divergences add
    up at every order (Mironov 2017, proposition 1). The claim is granted and used as one: no part can be spent
    without the rest. The order of the parts decides the claim's bytes but not its price.

    A sum of shared noise (:class:`DistributedGaussian`) stands on an assumption and is spent round by round, so it is
    no part; nor is another composed claim, so that one promise has one form.
    """

    parts: tuple[Part, ...]  # 2 .. MAX_PARTS of them

    def __post_init__(self) -> None:
        """Refuse what is no composition of two or more known parts of one unit and relation."""
        if type(self.parts) is not tuple or not 2 <= len(self.parts) <= MAX_PARTS:
            raise UnsupportedClaimError(f"a composed claim must have 2 to {MAX_PARTS} parts")
        if not all(type(part) in (SubsampledGaussian, GaussianQuery) for part in self.parts):
            raise UnsupportedClaimError(
                "the parts of a composed claim must be subsampled Gaussians or Gaussian queries"
            )
        if len({(part.unit, part.relation) for part in self.parts}) != 1:
            raise UnsupportedClaimError("the parts of a composed claim must be of one unit and neighbouring relation")

    @property
    def unit(self) -> str:
        """The parts' unit of privacy."""
        return self.parts[0].unit

    @property
    def relation(self) -> str:
        """The parts' neighbouring relation."""
        return self.parts[0].relation


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A training, and at most ``looks`` looks at how good it is by then, each of them the same Gaussian query.

    Everything is fixed before an image is read: the training, the query and the number of looks. The price of the
    whole is held before the first step. Its divergence is that of the training and ``looks`` times that of the query,
    added at every order (Mironov 2017, proposition 1). A look may depend on the models and figures before it, and so
    may the steps after it: a Rényi divergence of steps that are each bounded whatever came before adds up under
    adaptivity.

    Charged as a sum. Patients who are held out for the looks are other patients than those trained on, and if that is
    so each is charged too much: parallel composition would ask for the larger of the two alone. But the division is
    made at a site by a key that nobody else has, its share is configuration and may differ from run to run, and no
    auditor can see who was in which part. A price must follow from the claim alone. So no division is assumed, and
    the claim holds for a patient who is in both parts.

    Not :class:`Composed`: that is granted and used as one, and no part of it can be spent without the rest. A run
    spends this claim turn by turn: what is released under it so far is the training's own claim with fewer steps
    before the first look, and after it this one with fewer steps and looks. Nor has a composed claim a place for a
    :class:`DistributedGaussian`. There the query is of the *sum* over the sites, too: each adds noise of
    ``query.noise / sqrt(honest)`` to its own part (:attr:`share`), under the same assumption.
    """

    training: Stepwise
    query: GaussianQuery  # of one look
    looks: int  # in [1, MAX_LOOKS]

    def __post_init__(self) -> None:
        """Refuse what is no training with a query of its unit and relation, looked at a known number of times."""
        if type(self.training) not in (SubsampledGaussian, DistributedGaussian):
            raise UnsupportedClaimError("what is evaluated must be a subsampled or a distributed Gaussian")
        if type(self.query) is not GaussianQuery:
            raise UnsupportedClaimError("what an evaluation asks must be a Gaussian query")
        _whole("looks", self.looks, 1, MAX_LOOKS)
        if (self.query.unit, self.query.relation) != (self.unit, self.relation):
            raise UnsupportedClaimError("the query must be of the training's unit and neighbouring relation")

    @property
    def unit(self) -> str:
        """The training's unit of privacy."""
        return self.training.unit

    @property
    def relation(self) -> str:
        """The training's neighbouring relation."""
        return self.training.relation

    @property
    def share(self) -> float:
        """Standard deviation of the noise that each site adds in a look, in votes."""
        honest = self.training.honest if isinstance(self.training, DistributedGaussian) else 1
        return self.query.noise / math.sqrt(honest)


@dataclass(frozen=True, slots=True)
class KAnonymous:
    """Each released record stands for at least ``k`` distinct units, ``l_diversity`` labels among them.

    Syntactic: it has no epsilon (design P4). ``releases_per_patient`` is how many released clusters a patient may be
    in, this one counted (design P5).
    """

    k: int
    l_diversity: int
    releases_per_patient: int
    unit: str = UNIT
    relation: str = RELATION

    def __post_init__(self) -> None:
        """k counts distinct units; one alone is no anonymity."""
        _whole("k", self.k, 2, 1_000_000)
        _whole("l_diversity", self.l_diversity, 1, 1_000_000)
        _whole("releases_per_patient", self.releases_per_patient, 1, 1_000_000)
        _neighbours(self.unit, self.relation)


@dataclass(frozen=True, slots=True)
class NoClaim:
    """Nothing is promised. It exists so that a release without a guarantee has to say so."""


Stepwise = SubsampledGaussian | DistributedGaussian  # the claims that are made step by step, in rounds
Gaussian = Stepwise | GaussianQuery | Composed | Evaluated  # the claims that have an epsilon
Claim = Gaussian | KAnonymous | NoClaim

KINDS: Final[Mapping[str, type[Claim]]] = {
    "subsampled-gaussian": SubsampledGaussian,
    "distributed-gaussian": DistributedGaussian,
    "gaussian-query": GaussianQuery,
    "composed": Composed,
    "evaluated": Evaluated,
    "k-anonymous": KAnonymous,
    "no-claim": NoClaim,
}


def assumption(claim: Claim) -> str:
    """What a claim takes for granted of others, as every certificate must print it; "" when nothing is."""
    claim = training_of(claim)
    if not isinstance(claim, DistributedGaussian) or claim.honest == 1:
        return ""
    return (
        f"it holds if in every sum at least {claim.honest} of the {claim.sites} sites add their share of the noise "
        "and tell nobody what it was, and the secure aggregation shows nothing but the sum"
    )


def training_of(claim: Claim) -> Claim:
    """The training of an evaluated claim; any other claim as it is."""
    return claim.training if isinstance(claim, Evaluated) else claim


def looks_of(claim: Claim) -> int:
    """How many looks a claim counts."""
    return claim.looks if isinstance(claim, Evaluated) else 0
