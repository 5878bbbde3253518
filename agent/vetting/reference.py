"""The reference images for comparison, seen once by both verifiers and by the copy check, with thresholds.

A verifier's file contains the distribution of its false matches among people of its public set
(:mod:`agent.models.recognition.score_tail`). The reference gives a second one: the verifier has never seen its people
either, so pairs of two *different* patients are held-out strangers in the very domain. The lower of the two
thresholds counts: a verifier that fails in this domain drops too much and never too little. The copy check has no
public set; its thresholds come from different patients of the reference alone.

The probability that an image of nobody is dropped is a budget, ``false_matches``, and the checks share it as
``SHARES`` says: by the union bound all of them together keep it. Half is the verifier's. Parts have the least: a
part that was copied exactly reaches any threshold, and the other two lose what noise and a movement take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import atanh, tanh
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.domain import Image, Patient
from agent.errors import CohortTooSmallError
from agent.models.image_tensors import to_bytes, to_tensor
from agent.models.recognition.recogniser import RecogniserError
from agent.models.recognition.score_tail import Tail, TooFewScoresError, fit_tail
from agent.models.weights import Origin
from agent.vetting.copy_detection import Copies, Thumbnails, thumbnail_vectors
from agent.vetting.shifted_copies import ShiftedCopies

SHARES: Final[Mapping[str, float]] = MappingProxyType({"verifier": 0.5, "copy": 0.25, "patch": 0.05, "moved": 0.2})
# What shares less than half of its variance with an image (0.7 squared) is no copy of it. And however alike patients
# are, a copy in 8 bits with some noise does not correlate by more than this: a threshold above it would find none.
FLOOR: Final = 0.7  # also where there are too few patients to settle a threshold by
CEILING: Final = 0.98
CALIBRATED: Final = 600  # patients of one image each, or images, at most, whose pairs make a law: 179,700 of them
BATCH: Final = 64  # images that a verifier sees at once
NUMBERS: Final = 1 << 22  # of features in memory at once, where pairs are verified
Say = Callable[[int, int], None]


class VerifierEmbeddings(Protocol):
    """A verifier's features of images."""

    @property
    def features(self) -> Tensor:
        """(n, f) float32, for verification."""

    @property
    def embeddings(self) -> Tensor:
        """(n, d) float32 of unit length, for retrieval."""


class Judge(Protocol):
    """A verifier with a retrieval embedder; :class:`agent.models.recognition.verifier.Verifier` is one."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def origin(self) -> Origin:
        """Of its file (P6)."""

    @property
    def tail(self) -> Tail:
        """Of pairs of two people of its public set whom it never saw."""

    def look(self, images: Tensor) -> VerifierEmbeddings:
        """(n, 1 | 3, h, w) in [-1, 1]."""

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        """Log-odds (p,) that two images are of one person: features (p, f) and (p, f), in either order."""


@dataclass(frozen=True, slots=True, eq=False)
class Vetting:
    """Public configuration: the verifiers, and the permitted rate of false drops."""

    verifier: Judge
    unseen: Judge  # measures what the first has left, and filters nothing
    top: int = 10  # nearest patients (not images) whose images are verified
    false_matches: float = 0.01  # probability that an image of nobody is dropped, by all checks together
    device: str = "cpu"  # where both look

    def __post_init__(self) -> None:
        """Refuse a network that measures itself, and a budget that is none."""
        if self.verifier.origin.sha256 == self.unseen.origin.sha256:
            raise ValueError("the unseen verifier must be another network than the one that filters")
        if type(self.top) is not int or not 1 <= self.top <= 1000:
            raise ValueError("between 1 and 1000 nearest patients are verified")
        if not 0.0 < self.false_matches <= 0.5:
            raise ValueError("an image of nobody is dropped with a probability in (0, 0.5]")

    @property
    def form(self) -> tuple[str, str, float]:
        """What a reference must have been made with to answer for this vetting."""
        return self.verifier.origin.sha256, self.unseen.origin.sha256, self.false_matches


class VerifierView(NamedTuple):
    """Images as one verifier sees them."""

    features: Tensor  # (n, f) float32
    embeddings: Tensor  # (n, d) float32

    def finite(self) -> Tensor:
        """(n,) bool: the verifier gave numbers."""
        return torch.isfinite(self.features).all(dim=1) & torch.isfinite(self.embeddings).all(dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Every image of every patient, in the order of pseudonyms. It never leaves the site."""

    form: tuple[str, str, float]  # of the vetting
    images: tuple[Image, ...] = field(repr=False)  # n, of one shape
    owners: NDArray[np.int64] = field(repr=False)  # (n,) rising: whose each is, by number
    seen: VerifierView = field(repr=False)  # by the verifier
    unseen: VerifierView = field(repr=False)  # by the other
    copies: Copies = field(repr=False)
    moved: ShiftedCopies = field(repr=False)
    thresholds: Mapping[str, float]  # "verifier" and "unseen": log-odds; "copy", "patch", "moved": correlations
    intervals: Mapping[str, tuple[float, float]]  # 95 % of the false-match probability at the verifiers' thresholds

    def __len__(self) -> int:
        """Images."""
        return len(self.images)

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w) or (h, w, 3)."""
        return self.images[0].pixels.shape

    @property
    def people(self) -> int:
        """Distinct patients."""
        return int(self.owners[-1]) + 1

    def image(self, place: int) -> NDArray[np.uint8]:
        """One image (h, w[, 3]), for the site's reviewer."""
        return to_bytes(self.images[place].pixels)


def reference_of(patients: Sequence[Patient], vetting: Vetting, say: Say = lambda _done, _of: None) -> Reference:
    """See every image of every patient once, and settle the thresholds for a gallery of that size.

    Args:
        patients: in any order; two values with one pseudonym are one patient.
        vetting: public configuration.
        say: told how many images have been seen, of how many.
    Raises:
        CohortTooSmallError: nobody, or one patient: nothing would say how alike two patients are.
        RecogniserError: a verifier gives no numbers for the reference's own images.
        ValueError: images of unlike shapes.
    """
    ordered = sorted(patients, key=lambda patient: patient.pseudonym)
    number = {name: place for place, name in enumerate(dict.fromkeys(patient.pseudonym for patient in ordered))}
    if not len(number) >= 2:
        raise CohortTooSmallError
    images = tuple(image for patient in ordered for image in patient.images)
    if len({image.pixels.shape for image in images}) != 1:
        raise ValueError("the images of a reference must have one shape")
    owners = np.array([number[patient.pseudonym] for patient in ordered for _ in patient.images], np.int64)
    (seen, unseen), small = look(_batches(images, say), (vetting.verifier, vetting.unseen), vetting.device)
    if not bool((seen.finite() & unseen.finite()).all()):
        raise RecogniserError("a verifier's output for the reference's own images is not finite: use another network")
    copies, moved = Copies.of(small), ShiftedCopies.of(small.fine)
    thresholds = _copy_thresholds(moved, small, owners, vetting.false_matches)
    intervals = {}
    for name, judge, sight in (("verifier", vetting.verifier, seen), ("unseen", vetting.unseen, unseen)):
        thresholds[name], intervals[name] = _delta(judge, sight, owners, vetting.false_matches * SHARES["verifier"])
    told = MappingProxyType(thresholds), MappingProxyType(intervals)
    return Reference(vetting.form, images, owners, seen, unseen, copies, moved, *told)


def look(batches: Iterable[Tensor], judges: Sequence[Judge], device: str) -> tuple[list[VerifierView], Thumbnails]:
    """Images, batch by batch (b, c, h, w) in [-1, 1], as each of the judges and the copy check see them."""
    parts: list[list[VerifierEmbeddings]] = [[] for _ in judges]
    small: list[Thumbnails] = []
    with torch.no_grad():
        for batch in batches:
            there = batch.to(device)
            small.append(thumbnail_vectors(there))
            for judge, part in zip(judges, parts, strict=True):
                part.append(judge.look(there))
    sights = [
        VerifierView(torch.cat([p.features.float() for p in part]), torch.cat([p.embeddings.float() for p in part]))
        for part in parts
    ]
    return sights, Thumbnails(*(torch.cat(part) for part in zip(*small, strict=True)))


def pair_logits(judge: Judge, a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Log-odds (p,) of the pairs (left, right) of rows of ``a`` and ``b`` (n, f), in pieces that fit in memory."""
    size = max(1, NUMBERS // max(1, a.shape[1]))
    with torch.no_grad():
        parts = [
            judge.logits(a[left[at : at + size]], b[right[at : at + size]]).float()
            for at in range(0, len(left), size)
        ]
    return torch.cat([a.new_zeros(0), *parts])


def _batches(images: Sequence[Image], say: Say) -> Iterator[Tensor]:
    for start in range(0, len(images), BATCH):
        yield to_tensor(np.stack([image.pixels for image in images[start : start + BATCH]]))
        say(min(start + BATCH, len(images)), len(images))


def _settling(owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of one image of each of so many patients: pseudonyms are keyed hashes, so the first are a draw."""
    return np.unique(owners, return_index=True)[1][:CALIBRATED].astype(np.int64)


def _places(owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """All places, one image of each patient before the second of any."""
    first = np.unique(owners, return_index=True)[1]
    return np.argsort(np.arange(len(owners)) - first[owners], kind="stable").astype(np.int64)


def _law(scores: NDArray[np.float64], owners: NDArray[np.int64]) -> Tail | None:
    """The law of different patients' scores; None where they are too few, or do not differ."""
    try:
        return fit_tail(scores, owners, np.random.Generator(np.random.Philox(0)))
    except TooFewScoresError:
        return None


def _delta(
    judge: Judge, sight: VerifierView, owners: NDArray[np.int64], false_matches: float
) -> tuple[float, tuple[float, float]]:
    """A verifier's threshold for this gallery, the lower of the two laws', and what is known of it by that law.

    Raises:
        RecogniserError: it gives no number for a pair of the reference's images.
    """
    features = sight.features[torch.from_numpy(_settling(owners))]
    a, b = torch.triu_indices(len(features), len(features), 1, device=features.device).unbind()
    told = torch.zeros(len(features), len(features), dtype=torch.float64)
    told[a.cpu(), b.cpu()] = pair_logits(judge, features, features, a, b).double().cpu()
    if not bool(torch.isfinite(told).all()):
        raise RecogniserError(
            "a verifier's output for pairs of the reference's own images is not finite: use another network"
        )
    own = _law((told + told.T).numpy(), np.arange(len(told)))
    law = min((judge.tail, own or judge.tail), key=lambda tail: tail.threshold(len(owners), false_matches))
    delta = law.threshold(len(owners), false_matches)
    return delta, law.interval(len(owners), delta)


def _copy_thresholds(
    moved: ShiftedCopies, small: Thumbnails, owners: NDArray[np.int64], false_matches: float
) -> dict[str, float]:
    """Of the correlations: the law of different patients' (as Fisher's z), between floor and ceiling."""
    # All images of a patient: of few patients, one of each is too little for a law so far out. Pairs of one patient
    # are no part of it, and of a large reference the first image of each is enough.
    chosen = np.sort(_places(owners)[:CALIBRATED])
    places = torch.from_numpy(chosen).to(small.whole.device)
    found = [*_as_strangers(small, owners, places), moved.every(small.fine[places], places)]
    out = {}
    for name, values in zip(("copy", "patch", "moved"), found, strict=True):
        # A synthetic image is compared in one direction. Pseudonyms are keyed hashes: which of two patients is the
        # synthetic one is random; the higher of both directions would be two comparisons.
        one_way = torch.triu(values.double().clamp(-1 + 1e-6, 1 - 1e-6), 1).cpu().numpy()
        law = _law(np.arctanh(one_way + one_way.T), owners[chosen])
        at = atanh(FLOOR) if law is None else law.threshold(len(owners), false_matches * SHARES[name])
        out[name] = min(CEILING, max(FLOOR, tanh(at)))
    return out


def _as_strangers(small: Thumbnails, owners: NDArray[np.int64], places: Tensor) -> tuple[Tensor, Tensor]:
    """(p, p) each, whole and patch: images at some places with each other, as if each row's patient were not in.

    A synthetic image of nobody has no part in the reference's mean, and a patient has: with a few patients that alone
    makes two of them less alike than a stranger is like either.
    """
    rows = small.rows()
    own = torch.from_numpy(owners).to(places.device)
    some = small.at(places)
    out = []
    for number, place in enumerate(places):
        others = own != own[place]
        means = tuple((part.mean(dim=0) * len(own) - part[~others].sum(dim=0)) / others.sum() for part in rows)
        without = Copies.of(some, (means[0], means[1]))
        out.append(without.correlations(some.at(torch.tensor([number])), slice(None)))
    whole, patch = (torch.cat(part) for part in zip(*out, strict=True))
    return whole, patch
