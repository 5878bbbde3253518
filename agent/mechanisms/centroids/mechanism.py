"""DP centroids: noisy means of the cells of a public codebook, decoded. Level A without any training.

The differentially private counterpart of averaging over clusters of k (:mod:`agent.mechanisms.ksame.mechanism`,
k-Centroid of k-SALSA, section 4.2). There the partition is drawn from the patients and one patient moves many
clusters, so that noise of size 1/k protects nobody; here the cells are public, and each patient adds one vote to one
bin and a vector of norm at most R to one cell's sum. Both are released with Gaussian noise (Dwork et al. 2006), and
what is drawn is a function of these noisy numbers and of public constants alone.

The noise on the mean of a cell of c patients has norm about sigma R sqrt(q) / c in q dimensions: it takes about a
hundred patients where k-anonymity takes eleven. What k and the margin keep out are images of noise alone; the claim
does not rest on them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Cohort, Image, Latents, Patient, SyntheticSet
from agent.dp.noise import Entropy, draw_uniforms, noisy_sum
from agent.errors import CohortTooSmallError
from agent.mechanisms.centroids.codebook import Codebook, codec_digest, quantise, vector_sums, votes
from agent.mechanisms.common.linear_codec import Codec
from agent.mechanisms.common.workspace import Workspace
from agent.models.training_loop import HEADER_BYTES, load_state, save_state
from policies.accounting.accountant import SIGMA_GRID, TIGHT_LIMIT, NoiseNotFoundError, tight_epsilon
from policies.accounting.claims import (
    LEAST_NOISE,
    MOST_NOISE,
    Composed,
    GaussianQuery,
    SubsampledGaussian,
    UnsupportedClaimError,
)
from policies.accounting.rounding import epsilon_text
from protos.common.errors import RefusedError

MISSED: Final = 0.01  # chance, at most, that any cell of fewer than k patients is behind an image
FAINT: Final = 0.5  # of R: more noise than that on an average cell's mean, and its image shows noise
MOST_CLASSES: Final = 1000
_TRIED: Final = 100  # thousandths above the closed form: the accountant of record rounds up by one or two
_NORMAL: Final = NormalDist()


class NoCellError(CohortTooSmallError):
    """No noisy count is large enough. That is all it was decided by, so that saying so costs nothing more."""

    def __init__(self) -> None:
        """Say it without numbers."""
        ValueError.__init__(self, "by the noisy counts, no cell has enough patients: nothing is drawn")


class DrownedCountsError(RefusedError, ValueError):
    """Public numbers alone show that the release would be mostly noise; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected of a release, from public numbers only; cells are taken to be of one size.

    They are not: some have a multiple of it, others a fraction, and the images come from the large ones.
    """

    patients: int  # as far as is public
    cells: int  # m
    dims: int  # q
    noise_multiplier: float  # sigma, of the sums
    least: float  # patients that a cell needs: k + margin

    @property
    def cell(self) -> float:
        """Patients in an average cell, c."""
        return self.patients / self.cells

    @property
    def error(self) -> float:
        """Norm of the noise on an average cell's mean, in units of R: sigma sqrt(q) / c."""
        return self.noise_multiplier * math.sqrt(self.dims) / self.cell

    def demand(self) -> None:
        """Refuse to spend on images of noise.

        Raises:
            DrownedCountsError: the noise on an average cell's mean is more than R / 2, or its count is below k +
            margin.
        """
        if not self.error <= FAINT:
            need = self.noise_multiplier * math.sqrt(self.dims) / FAINT  # patients in a cell
            dims = int((FAINT * self.cell / self.noise_multiplier) ** 2)
            changes = [*self._sizes(need), *([f"{dims} dimensions"] if dims >= 1 else []), "a larger epsilon"]
            told = f"the noise on the mean of {self.cell:.0f} patients would be {self.error:.2f} of the cells' radius"
            raise DrownedCountsError(
                f"{told}, and at most {FAINT:g} shows anything; it takes {', or '.join(changes)}"
            )
        if not self.cell >= self.least:
            changes = [*self._sizes(self.least), "fewer classes", "a larger epsilon or count_share", "a smaller k"]
            told = f"a cell needs {self.least:.0f} patients, k and the margin, and an average one has {self.cell:.0f}"
            raise DrownedCountsError(f"{told}; it takes {', or '.join(changes)}")

    def _sizes(self, need: float) -> list[str]:
        cells = int(self.patients / need)
        return [f"{math.ceil(need * self.cells)} patients", *([f"{cells} cells"] if cells >= 1 else [])]


@dataclass(frozen=True, slots=True, eq=False)
class Centroids:
    """Public configuration of one release of DP centroids: constants, none of them derived from patients."""

    codec: Codec  # E and G
    codebook: Codebook  # of this codec
    classes: tuple[str, ...]  # coarse labels; images of others are left out
    count_noise: float  # standard deviation on every count, in votes
    noise_multiplier: float  # sigma of the vector sums, in units of R
    k: int  # patients that a released cell should have
    margin: float  # by which a noisy count must exceed k: :func:`margin_for`
    images_per_patient: int = 2  # inverted, drawn at random from the patient's

    name: ClassVar[str] = "centroids"
    places: ClassVar[tuple[str, ...]] = ("centroids/noisy",)  # what was drawn: see :meth:`_noisy`
    fewer: ClassVar[str] = "take a codebook of so many cells"  # what makes the set smaller

    def __post_init__(self) -> None:
        """Refuse what cannot be priced or drawn."""
        self.claim()
        if not 1 <= len(self.classes) == len(set(self.classes)) <= MOST_CLASSES or "" in self.classes:
            raise ValueError("classes: at least one, distinct, none of them empty")
        if type(self.k) is not int or not 2 <= self.k <= 1_000_000:
            raise UnsupportedClaimError("k must be a whole number in [2, 1000000]")
        if not 0.0 <= self.margin < math.inf:
            raise ValueError("margin: not negative, and finite")
        if type(self.images_per_patient) is not int or not self.images_per_patient >= 1:
            raise ValueError("images_per_patient: at least 1")
        if self.codebook.codec != codec_digest(self.codec):
            raise ValueError(
                "the codebook was made with another encoder, generator or number of passes: make a new one"
            )

    @property
    def pictures(self) -> int:
        """How many a release has, at most."""
        return self.codebook.cells

    def untrained(self) -> None:
        """No model leaves that the coordinator would have to approve first."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w[, 3]) of the images that it takes and makes."""
        return self.codec.shape

    @property
    def drawn(self) -> tuple[str, ...]:
        """The labels of the synthetic set."""
        return self.classes

    @property
    def max_checkpoint_bytes(self) -> int:
        """Of the noisy counts, the noisy sums and the order."""
        return 8 * self.codebook.cells * (len(self.classes) + self.codebook.dims + 1) + HEADER_BYTES

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration: an interrupted making goes on only as the same."""
        numbers = [self.count_noise, self.noise_multiplier, self.k, self.margin, self.images_per_patient]
        told = [self.name, self.codebook.codec, self.codebook.origin.sha256, self.classes, *numbers]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def claim(self) -> Composed:
        """What a release promises, counts and sums together. It is settled before an image is read.

        A patient adds one vote to one bin, and one vector of norm at most 1, in units of R, to one cell's sum.
        """
        return Composed((GaussianQuery(self.count_noise, 1, 1), SubsampledGaussian(1.0, self.noise_multiplier, 1)))

    def components(self) -> dict[str, str]:
        """Where every component that an image is made or decoded by comes from (P6)."""
        return {**self.codec.components(), "codebook": self.codebook.origin.component}

    def forecast(self, public_patients: int) -> Forecast:
        """What to expect if the site has about so many patients. It reads none of them."""
        least = self.k + self.margin
        return Forecast(public_patients, self.codebook.cells, self.codebook.dims, self.noise_multiplier, least)

    def run(self, cohort: Cohort, entropy: Entropy, bench: Workspace | None = None) -> SyntheticSet:
        """Draw the noisy mean of every cell whose noisy count is at least k + margin. Interrupted, it goes on.

        For each patient: the majority label of its images among ``classes``, ties by their order, and the mean code
        of at most ``images_per_patient`` images of that label. Patients without any, and those whose images cannot be
        inverted, add nothing; that depends on their own record alone. Drawn images are not compared with patients
        (P7).

        Returns:
            The set, (j, h, w[, 3]) with j labels, in random order.
        Raises:
            NoCellError: no noisy count is large enough.
            ValueError: the cohort's images have another shape than the codec's.
        """
        if any(image.pixels.shape != self.shape for patient in cohort.patients for image in patient.images):
            raise ValueError("the images do not have the shape that the encoder takes")
        return self._drawn(*self._noisy(cohort, entropy, bench or Workspace()))

    def _noisy(
        self, cohort: Cohort, entropy: Entropy, bench: Workspace
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """The noisy counts (m, c), the noisy sums (m, q) and the order of the cells (m,): asked once.

        They are kept before anything is made of them, so that an interrupted run draws no other noise: whoever could
        have it drawn until it pleases would choose among noises, and the claim is of one.
        """
        place = bench.place(self.places[0])
        raw = place.read()
        if raw is not None:
            kept = load_state(raw, self.form)[1]
            return kept["counts"].numpy(), kept["sums"].numpy(), kept["order"].numpy()
        latents, labels = self._read(cohort, entropy)
        m, c, q = self.codebook.cells, len(self.classes), self.codebook.dims
        placed = quantise(latents, self.codebook)
        counts = noisy_sum(votes(placed, labels, m, c).ravel(), 1.0, self.count_noise, entropy).reshape(m, c)
        sums = noisy_sum(vector_sums(placed, m).ravel(), 1.0, self.noise_multiplier, entropy).reshape(m, q)
        order = draw_uniforms(entropy, m).argsort()
        drawn = {"counts": counts, "sums": sums, "order": order}
        place.write(save_state(self.form, 0, {name: torch.from_numpy(one) for name, one in drawn.items()}))
        return counts, sums, order

    def _read(self, cohort: Cohort, entropy: Entropy) -> tuple[Latents, NDArray[np.int64]]:
        """A code (n, d) and a class number (n,) of every patient who has any.

        One patient at a time: beside others a network rounds an image's code differently, and a patient who comes or
        goes would move everybody's.
        """
        codes: list[NDArray[np.float32]] = []
        labels: list[int] = []
        names: list[str] = []
        for patient in cohort.patients:
            label, images = self._images(patient)
            code = self._code(_bounded(images, self.images_per_patient, entropy))
            if code is not None:
                codes.append(code)
                labels.append(label)
                names.append(patient.pseudonym)
        stacked = np.array(codes, np.float32).reshape(len(codes), len(self.codebook.mean))
        return Latents(stacked, tuple(names)), np.array(labels, np.int64)

    def _images(self, patient: Patient) -> tuple[int, list[Image]]:
        """The number of the patient's label, and its images of it; an image of one value shows nothing."""
        shown = [i for i in patient.images if i.label in self.classes and float(np.ptp(i.pixels)) > 0.0]
        counts = [sum(image.label == name for image in shown) for name in self.classes]
        label = counts.index(max(counts))
        return label, [image for image in shown if image.label == self.classes[label]]

    def _code(self, images: list[Image]) -> NDArray[np.float32] | None:
        """The mean code (d,), summed in float64; None when there is none that is finite.

        A refusal here would tell that this one patient is there.
        """
        if not images:
            return None
        try:
            codes = self.codec.encode(np.stack([image.pixels for image in images]))
        except ValueError:  # the encoder's own: a code that is not finite
            return None
        mean: NDArray[np.float32] = codes.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean if bool(np.isfinite(mean).all()) else None

    def _drawn(
        self, counts: NDArray[np.float64], sums: NDArray[np.float64], order: NDArray[np.int64]
    ) -> SyntheticSet:
        """Post-processing: it sees noisy counts (m, c) and noisy sums (m, q), and no patient."""
        totals = counts.sum(axis=1)
        large = order[totals[order] >= self.k + self.margin]
        if not len(large):
            raise NoCellError
        means = sums[large] / np.maximum(totals[large], self.k)[:, np.newaxis]
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1.0)  # no mean of patients lies beyond R
        points = self.codebook.centres[large] + self.codebook.radius * means
        images = self.codec.decode(self.codebook.restored(points))
        return SyntheticSet(images, tuple(self.classes[i] for i in counts[large].argmax(axis=1)))


def margin_for(cells: int, classes: int, count_noise: float) -> float:
    """The whole number of patients by which a noisy count must exceed k.

    A cell's count is a sum over c bins and bears noise of standard deviation count_noise sqrt(c). With z the normal
    quantile of 1 - 0.01 / m, a cell of fewer than k patients passes with probability below 0.01 / m, and any of the m
    with probability at most 0.01. A public constant; the claim holds without it.
    """
    z = _NORMAL.inv_cdf(1.0 - MISSED / cells)
    return float(math.ceil(z * count_noise * math.sqrt(classes)))


def noises_for(epsilon: float, delta: float, count_share: float) -> tuple[float, float]:
    """Count noise and noise multiplier that together keep to (epsilon, delta), in whole thousandths.

    Two Gaussian queries of multipliers s_1 and s_2 are one of s with 1 / s^2 = 1 / s_1^2 + 1 / s_2^2; ``count_share``
    is the part of 1 / s^2 that the counts get, the sums get the rest. s is found in closed form (Balle & Wang 2018,
    theorem 8), and the answer is what the accountant of record confirms for both together.

    Raises:
        NoiseNotFoundError: there is none.
        ValueError: a number is out of range.
    """
    if not (0.0 < epsilon <= TIGHT_LIMIT and 0.0 < delta < 1.0):
        raise ValueError(f"epsilon must lie in (0, {TIGHT_LIMIT:g}] and delta in (0, 1)")
    if not 0.0 < count_share < 1.0:
        raise ValueError("count_share must lie between 0 and 1")
    both = _least_noise(epsilon, delta)
    counts = math.ceil(both / math.sqrt(count_share) * SIGMA_GRID) / SIGMA_GRID
    least = math.ceil(SIGMA_GRID / math.sqrt(1.0 / both**2 - 1.0 / counts**2))
    for thousandths in range(least, least + _TRIED):
        sums = thousandths / SIGMA_GRID
        claims = GaussianQuery(counts, 1, 1), SubsampledGaussian(1.0, sums, 1)
        if tight_epsilon(claims, delta) <= epsilon:
            return counts, sums
    raise NoiseNotFoundError(
        f"the accountant of record confirms no noise for epsilon {epsilon_text(epsilon)}: take another count_share"
    )


def _least_noise(epsilon: float, delta: float) -> float:
    """The multiplier of one Gaussian query of exactly (epsilon, delta), to a part in 10^12, from above."""

    def spends(s: float) -> float:
        return _NORMAL.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * _NORMAL.cdf(-0.5 / s - epsilon * s)

    low, high = LEAST_NOISE, MOST_NOISE
    if not spends(high) <= delta:
        raise NoiseNotFoundError(f"no noise up to {MOST_NOISE:g} keeps to epsilon {epsilon_text(epsilon)}")
    while high > low * (1.0 + 1e-12):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spends(middle) <= delta else (middle, high)
    return high


def _bounded(images: list[Image], most: int, entropy: Entropy) -> list[Image]:
    """At most ``most`` of them, chosen uniformly without replacement."""
    if len(images) <= most:
        return images
    return [images[i] for i in sorted(draw_uniforms(entropy, len(images)).argsort()[:most])]
