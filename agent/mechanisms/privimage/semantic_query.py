"""Ask the cohort, with noise, which semantics its images show, and select the public images of those (PrivImage).

Li et al. 2024, sections 3.2 and 3.3, with the patient as the unit (design P1, P2). Each looked-at image votes for
its k_1 most probable semantics, in the row of its own class; a patient's vote vectors are averaged. A vote vector has
norm sqrt(k_1), the ball of that radius is convex, and so no patient moves the histogram by more than Theorem 3.1 has
for one image, however many images and classes there are. What reads patients is :func:`histogram` and
:func:`refuse_shared`; all the rest sees public constants, or counts that have their noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Image, Patient
from agent.dp.noise import Entropy, draw_uniforms, noisy_sum
from agent.models.image_tensors import to_bytes
from agent.models.semantics.classifier import Semantics
from policies.accounting.claims import GaussianQuery
from protos.common.errors import RefusedError

SHARE: Final = 0.5  # of a class's patients, that its largest bin is taken to hold when nothing else is known
LEAST: Final = 5.0  # patients: a class whose largest bin may hold no more than these is no class
MISTAKEN: Final = 1e-4  # chance, at most, that a class of ``LEAST`` patients passes for one
_SURE: Final = 3.0  # deviations by which a class as large as was stated lies above that line: it passes at 99.87 %
_PART: Final = 1 << 30  # a patient's mean counts in whole parts of a vote, so that sums are exact in any order


class DrownedHistogramError(RefusedError, ValueError):
    """The noise drowns the result. The text contains public numbers, and the noisy counts."""


class SharedImageError(RefusedError, ValueError):
    """A public image is a patient's. The text counts public files, and is for the site's eyes."""


class NothingSelectedError(RefusedError, ValueError):
    """No public image shows any of the chosen semantics."""


@dataclass(frozen=True, slots=True)
class SemanticQuery:
    """The public constants of the semantic histogram. None of them may be derived from patients."""

    votes: int  # k_1: the semantics that an image votes for
    noise: float  # standard deviation on every bin, in votes: the paper's sqrt(k_1) sigma_2
    keep: int  # k_2: the bins that are kept for each class
    images: int = 16  # of a patient, at most, that are looked at: they share the patient's one vote

    def __post_init__(self) -> None:
        """Refuse a query without votes, bins, images or noise."""
        if not all(type(n) is int and 1 <= n <= 1_000_000 for n in (self.votes, self.keep, self.images)):
            raise ValueError("votes, keep and images are whole numbers from 1 on")
        self.claim()

    def claim(self) -> GaussianQuery:
        """What it costs: a patient's vote vectors are averaged, so it counts as one image (Theorem 3.1).

        Raises:
            UnsupportedClaimError: there is no such noise.
        """
        return GaussianQuery(self.noise, 1, self.votes)


def refuse_faint(query: SemanticQuery, bins: int, patients: float, classes: int = 1, share: float = SHARE) -> None:
    """Say before anything is spent, from public numbers alone, that the noise would drown a class's largest bin.

    What passes selects rightly: with the noise at its limit, a bin that holds ``share`` of the class comes before
    every bin that holds a third of that, or less, with a probability of 1 - 1 / (2 NS) at least (:func:`most_noise`).

    Args:
        query: that would be asked.
        bins: NS.
        patients: that a class has, by a public estimate; of the smallest class.
        classes: rows of the histogram: they want bins of their own.
        share: of a class's patients whose images show one semantic; of the k_2-th bin when that one matters.
    Raises:
        DrownedHistogramError: it would. The text says what to change.
        ValueError: there are not so many bins, or no such share.
    """
    _fit(query, bins, classes)
    if not (0.0 < share <= 1.0 and 0.0 < patients < math.inf):
        raise ValueError("a class has patients, and its largest bin a share of them")
    most = most_noise(bins, patients, share)
    if query.noise <= most:
        return
    ways = ["give the query a larger part of epsilon", "take a wider class, or pool the classes"]
    if most > 0:
        ways[0] += f" and less noise, {math.floor(most * 1000) / 1000:g} votes at most"
    fewer = range(max(2, query.keep * classes), bins)
    coarse = max((b for b in fewer if query.noise <= most_noise(b, patients, share)), default=0)
    if coarse:
        ways.append(f"use coarser semantics, {coarse} bins at most")
    raise DrownedHistogramError(
        f"the noise of {query.noise:g} votes would drown the largest of {bins} bins in a class of {patients:g} "
        f"patients, of whom {share:.0%} are taken to be in it: {'; or '.join(ways)}"
    )


def most_noise(bins: int, patients: float, share: float = SHARE) -> float:
    """The largest standard deviation, in votes, at which a class of so many patients can be queried; 0 for none.

    Two conditions. (i) noise sqrt(2 ln NS) <= f n_c with f = share / 3: the largest of NS noises is about
    noise sqrt(2 ln NS) =: M, and a bin of ``share`` n_c >= 3 M patients has a lead of 2 M over one of a third of it.
    The difference of two noises has deviation noise sqrt(2), so a single rival overtakes with probability
    Q(2 sqrt(ln NS)) <= NS^-2 / 2, and any of NS - 1 rivals with 1 / (2 NS) at most. (ii) the class passes
    :func:`refuse_empty` afterwards: its largest bin lies ``_SURE`` deviations above the line that is drawn there.

    Args:
        bins: NS, 2 or more.
        patients: n_c, of one class.
        share: of them, in the largest bin.
    """
    largest = share * patients
    drowned = largest / 3.0 / math.sqrt(2.0 * math.log(bins))
    return max(0.0, min(drowned, (largest - LEAST) / (_above(bins) + _SURE)))


def _above(bins: int) -> float:
    """Deviations that the largest of so many noises exceeds with a probability of ``MISTAKEN`` at most."""
    return -NormalDist().inv_cdf(MISTAKEN / bins)


def _fit(query: SemanticQuery, bins: int, classes: int) -> None:
    if not bins >= max(2, query.votes, query.keep * classes):
        raise ValueError(
            f"{bins} semantics are too few: an image votes for {query.votes}, and {classes} class(es) keep "
            f"{query.keep} each, of their own"
        )


def histogram(
    patients: Iterable[Patient], semantics: Semantics, classes: Sequence[str], query: SemanticQuery, entropy: Entropy
) -> NDArray[np.float64]:
    """The semantic histogram of a cohort, a row for each class, with Gaussian noise on every bin (Theorem 3.1).

    Whether an image counts depends on its own label; which of a patient's images are looked at, on chance. Each
    patient's images go through the network by themselves: the rounding of a batch depends on all that is in it, and
    a vote that flips with somebody else's coming would be a second patient's vote.

    Args:
        patients: the cohort.
        semantics: the frozen query function.
        classes: labels that have a row; images of others are left out. None: one row, for images of any label.
        query: the public constants.
        entropy: of the noise and of the choice; in production the system's.
    Returns:
        (C, NS) float64, noisy: post-processing of ``query.claim()``.
    Raises:
        ValueError: the semantics are too few for the query, or a class is named twice.
    """
    rows = max(1, len(classes))
    _fit(query, len(semantics.bins), rows)
    if len(set(classes)) != len(classes):
        raise ValueError("a class is named twice")
    total = _total(patients, semantics, classes, query, entropy)
    sensitivity = math.sqrt(query.votes)
    noisy = noisy_sum(total.reshape(-1) / _PART, sensitivity, query.noise / sensitivity, entropy)
    return noisy.reshape(rows, -1)


def _total(
    patients: Iterable[Patient], semantics: Semantics, classes: Sequence[str], query: SemanticQuery, entropy: Entropy
) -> NDArray[np.int64]:
    """The counts without noise, (C, NS), in parts of a vote: private."""
    total = np.zeros((max(1, len(classes)), len(semantics.bins)), np.int64)
    for patient in patients:
        known = [image for image in patient.images if not classes or image.label in classes]
        images = _bounded(known, query.images, entropy)
        if images:
            rows = [classes.index(image.label) if classes else 0 for image in images]
            bins = _voted(semantics.probabilities(np.stack([image.pixels for image in images])), query.votes)
            total += _averaged(rows, bins, total.shape)
    return total


def _bounded(images: Sequence[Image], most: int, entropy: Entropy) -> Sequence[Image]:
    """At most ``most`` of a patient's images, chosen uniformly without replacement."""
    if len(images) <= most:
        return images
    return [images[i] for i in np.sort(draw_uniforms(entropy, len(images)).argsort()[:most])]


def _voted(probabilities: NDArray[np.float64], votes: int) -> NDArray[np.int64]:
    """The k_1 most probable bins of each image, (m, k_1), all different; of equals the first; NaN comes last."""
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :votes].astype(np.int64)


def _averaged(rows: Sequence[int], bins: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The mean of one patient's vote vectors, in parts of a vote, rounded down: its norm is sqrt(k_1) at most."""
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (np.asarray(rows)[:, np.newaxis], bins), 1)
    return counts * _PART // len(rows)


def refuse_empty(noisy: NDArray[np.float64], classes: Sequence[str], query: SemanticQuery) -> None:
    """Refuse classes of which the noisy counts do not show that they have patients: post-processing.

    A bin counts patients. A class passes when its largest bin lies above ``LEAST`` patients by more than the largest
    of NS noises does, so that one of at most ``LEAST`` patients passes with a probability of ``MISTAKEN`` at most.
    It is the largest bin and not the total, whose noise is sqrt(NS) times as large.

    Args:
        noisy: (C, NS) of :func:`histogram`.
        classes: their names, which are public configuration; none for a pooled row.
        query: that was asked.
    Raises:
        DrownedHistogramError: some class does not. The budget of the query is spent.
    """
    line = LEAST + query.noise * _above(noisy.shape[1])
    names = [repr(name) for name in classes] or ["all"]
    empty = [name for name, row in zip(names, noisy, strict=True) if not row.max() > line]
    if empty:
        raise DrownedHistogramError(
            f"too few patients for the noise, by the noisy histogram, in class {', '.join(empty)}: leave it out of "
            "classes, merge it with another, or give the query a larger part of epsilon. The query is spent"
        )


def chosen(noisy: NDArray[np.float64], query: SemanticQuery) -> tuple[tuple[int, ...], ...]:
    """The k_2 largest bins of every class: the largest count of all first, and no bin for two classes.

    Returns:
        The bins of each class, largest count first.
    Raises:
        ValueError: there are not so many bins, or a count is not finite.
    """
    classes, bins = noisy.shape
    if not np.isfinite(noisy).all():
        raise ValueError("a noisy count is a number")
    _fit(query, bins, classes)
    rows, columns = np.indices(noisy.shape)
    # of equal counts the first bin, then the first class: a fixed rule, though noise on a lattice rarely needs it
    order = np.lexsort((rows.ravel(), columns.ravel(), -noisy.ravel()))
    kept: list[list[int]] = [[] for _ in range(classes)]
    taken = set[int]()
    for place in order:
        row, column = divmod(int(place), bins)
        if column not in taken and len(kept[row]) < query.keep:
            kept[row].append(column)
            taken.add(column)
    return tuple(tuple(row) for row in kept)


def selection(
    public_bins: NDArray[np.int64], kept: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The public images that show a chosen semantic.

    Args:
        public_bins: (n,) the semantic of each public image: its label, or its most probable bin.
        kept: of :func:`chosen`.
    Returns:
        Their places (m,), rising, and the class that chose the semantic of each (m,): the condition it is trained
        with. Of a pooled row that is 0 and conditions nothing: -1 is the caller's to write.
    Raises:
        NothingSelectedError: no image shows any of them.
    """
    owner = {int(b): row for row, some in enumerate(kept) for b in some}
    classes = np.array([owner.get(int(b), -1) for b in public_bins], np.int64)
    places = np.flatnonzero(classes >= 0)
    if not len(places):
        raise NothingSelectedError("no public image shows a chosen semantic: every bin needs public images")
    return places, classes[places]


def proportions(noisy: NDArray[np.float64], query: SemanticQuery, floor: float = 0.0) -> NDArray[np.float64]:
    """The classes' shares of the synthetic set, from the noisy totals of their rows: post-processing.

    A total has noise of deviation noise sqrt(NS). From four classes on, totals are drawn towards their mean by as
    much as their noise, which is known, asks for (James & Stein 1961, in the form of Efron & Morris 1973, positive
    part): with too much noise all classes get the same share.

    Args:
        noisy: (C, NS).
        query: that was asked.
        floor: least share of a class, at most 1 / C.
    Returns:
        (C,), none below ``floor``; they sum to 1.
    Raises:
        ValueError: there is no such floor.
    """
    count = len(noisy)
    if not 0.0 <= floor <= 1.0 / count:
        raise ValueError("the least share of a class is between 0 and 1 / classes")
    totals = noisy.sum(axis=1)
    away = totals - totals.mean()
    spread = float(away @ away)
    if count >= 4 and spread > 0:
        totals = totals.mean() + away * max(0.0, 1.0 - (count - 3) * noisy.shape[1] * query.noise**2 / spread)
    whole = np.clip(totals, 0.0, None)
    shares = whole / whole.sum() if whole.sum() > 0 else np.full(count, 1.0 / count)
    out: NDArray[np.float64] = floor + (1.0 - count * floor) * shares
    return out


def refuse_shared(public: NDArray[np.uint8], patients: Iterable[Patient]) -> None:
    """Refuse a public set that has an image of the cohort: what is pre-trained on gets no noise.

    Both sides are compared as the training sees them, fitted and at 8 bits, by SHA-256; a colour image whose
    channels are equal is a grey one. Only exact copies are found: not what was cropped otherwise, turned, or
    compressed again. A refusal is not covered by the claim: it, and the count, are for the site's eyes.

    Args:
        public: (n, s, s) or (n, s, s, 3).
        patients: the cohort, its images fitted to the same size.
    Raises:
        SharedImageError: there is one. The text says how many of the public files, and nothing of patients.
    """
    real = {_digest(to_bytes(image.pixels)) for patient in patients for image in patient.images}
    shared = sum(_digest(picture) in real for picture in public)
    if shared:
        raise SharedImageError(
            f"{shared} of {len(public)} public images are images of the cohort: remove them from the public set"
        )


def _digest(picture: NDArray[np.uint8]) -> bytes:
    """Of one image (h, w) or (h, w, 3)."""
    if picture.ndim == 3 and bool((picture == picture[..., :1]).all()):
        picture = picture[..., 0]
    return hashlib.sha256(f"{picture.shape}".encode() + np.ascontiguousarray(picture).tobytes()).digest()
