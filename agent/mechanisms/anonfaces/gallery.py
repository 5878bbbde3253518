"""Embeddings of the whole cohort, and which patient a synthetic image is recognised as.

AnonFACES, section 3.4, compares an image with the members of its cluster. An image that looks like a patient of
another cluster harms that patient just as much, so here it is compared with every image of every patient.

A recogniser that cannot re-identify the cohort's own patients cannot vet images made of them. Its quality on the
public set (:class:`agent.models.recognition.recogniser.RecogniserQuality`) says nothing about images of another kind,
so :func:`refuse_blind` tests it on patients with several images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.domain import Cohort, Patient
from agent.intervals import bounds
from agent.models.image_tensors import to_tensor
from agent.models.recognition.recogniser import RecogniserError


class GalleryJudge(Protocol):
    """A recogniser with its own threshold."""

    @property
    def name(self) -> str:
        """Which one."""

    @property
    def threshold(self) -> float:
        """Euclidean distance of embeddings below which two images are one person's."""

    def embed(self, images: Tensor) -> Tensor:
        """(n, c, h, w) in [-1, 1] as (n, d)."""


@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """Every image of every patient, as each recogniser sees it. Private."""

    judges: tuple[GalleryJudge, ...]
    embeddings: tuple[NDArray[np.float64], ...]  # one (images, d) for each judge
    starts: NDArray[np.int64]  # (patients,): the first image of each
    patients: tuple[str, ...]

    def __post_init__(self) -> None:
        """One recogniser that both guides and judges would be fooled by what guided it: two, of different names."""
        if len({judge.name for judge in self.judges}) < 2 or len(self.judges) != len(self.embeddings):
            raise ValueError("a gallery is seen by two different recognisers or more")
        if not all(0.0 < judge.threshold < np.inf for judge in self.judges):
            raise ValueError("every recogniser has a positive threshold")

    def at_risk(self, images: NDArray[np.uint8], judges: int | None = None) -> NDArray[np.bool_]:
        """(b, patients): whether any of the first ``judges`` recognisers takes an image for a patient.

        A distance that is not a number counts as no distance at all.
        """
        risk = np.zeros((len(images), len(self.patients)), np.bool_)
        for judge, known in list(zip(self.judges, self.embeddings, strict=True))[:judges]:
            seen = _embedded(judge, images.astype(np.float32) / np.float32(255.0))
            squares = (seen**2).sum(axis=1)[:, None] + (known**2).sum(axis=1) - 2.0 * (seen @ known.T)
            near = ~(np.sqrt(np.maximum(squares, 0.0)) >= judge.threshold)
            risk |= np.logical_or.reduceat(near, self.starts, axis=1)
        return risk


def _embedded(judge: GalleryJudge, images: NDArray[np.float32]) -> NDArray[np.float64]:
    with torch.no_grad():
        out: NDArray[np.float64] = judge.embed(to_tensor(images)).double().cpu().numpy()
    return out


def gallery_of(
    cohort: Cohort, judges: Sequence[GalleryJudge], others: Sequence[Patient] = (), batch: int = 256
) -> Gallery:
    """Embed the entire cohort with every recogniser, once, and then all others that images must not resemble.

    Args:
        cohort: the patients of whom images are made; they come first.
        judges: the recognisers.
        others: patients of whom none are made now, since an earlier release was made of them.
        batch: images at a time.

    Raises:
        ValueError: fewer than two recognisers.
    """
    everybody = (*cohort.patients, *others)
    images = [image.pixels for patient in everybody for image in patient.images]
    parts = range(0, len(images), batch)
    embeddings = tuple(
        np.concatenate([_embedded(judge, np.stack(images[a : a + batch])) for a in parts]) for judge in judges
    )
    counts = np.array([len(patient.images) for patient in everybody])
    patients = tuple(patient.pseudonym for patient in everybody)
    return Gallery(tuple(judges), embeddings, (counts.cumsum() - counts).astype(np.int64), patients)


ABOVE_CHANCE: Final = 0.1  # the share of images found again must exceed chance by more than this
_BLOCK: Final = 256


def refuse_blind(gallery: Gallery, patients: Sequence[Patient]) -> None:
    """Refuse where a recogniser does not find patients again in their own images.

    An image is re-identified if the recogniser, at its threshold, matches it with another image of the same patient.
    Strangers' images match at a rate f, so by chance one of q other images would match at a rate of 1 - (1 - f)^q.
    Both are averaged over the patient's images and then over patients, so that each patient with two images or more
    counts once; Wilson's lower bound of the first mean must exceed the second by ``ABOVE_CHANCE``, for every
    recogniser. A distance that is not a number re-identifies nobody, and matches every stranger.

    Limits: if no patient has two images there is nothing to test, and only the recognisers' quality on their public
    set remains. Equal images count as one; a second image that is nearly the first is easy to find and proves little.
    If the images of a patient show different things, a left and a right eye, a recogniser of eyes is refused: this
    test cannot tell it from one that recognises nobody.

    Args:
        gallery: of all these patients' images, in their order.
        patients: those of the cohort, and whoever else is in the gallery.
    Raises:
        RecogniserError: one recogniser or more cannot be told from chance. The text names and counts nobody.
    """
    images, owners = _distinct(patients)
    several = np.flatnonzero((np.bincount(owners, minlength=len(patients)) >= 2)[owners])
    if not len(several):
        return
    for judge, seen in zip(gallery.judges, gallery.embeddings, strict=True):
        found, chance = _found_again(seen[images], owners, several, judge.threshold)
        again, luck = (_by_patient(each, owners[several]) for each in (found, chance))
        if not bounds(float(again.sum()), len(again))[0] > luck.mean() + ABOVE_CHANCE:
            raise RecogniserError(
                "a recogniser does not match different images of the same patient in this cohort: "
                "train it on public images of the same kind, with the same definition of an identity"
            )


def _distinct(patients: Sequence[Patient]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places in the gallery of all images but a patient's repeated ones, and whose each is."""
    places, owners, place = [], [], 0
    for number, patient in enumerate(patients):
        held: set[bytes] = set()
        for image in patient.images:
            raw = np.rint(image.pixels * 255.0).astype(np.uint8).tobytes()
            if raw not in held:
                held.add(raw)
                places.append(place)
                owners.append(number)
            place += 1
    return np.array(places, np.int64), np.array(owners, np.int64)


def _found_again(
    seen: NDArray[np.float64], owners: NDArray[np.int64], rows: NDArray[np.int64], threshold: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of these rows: whether another image of the same patient is near, and how likely it were by chance."""
    found, chance = np.empty(len(rows)), np.empty(len(rows))
    lengths = (seen**2).sum(axis=1)
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK]
        squares = lengths[part, None] + lengths - 2.0 * (seen[part] @ seen.T)
        far = np.sqrt(np.maximum(squares, 0.0))
        same = owners[part, None] == owners
        strangers = (~same).sum(axis=1)
        taken = (~(far >= threshold) & ~same).sum(axis=1)
        rate = np.where(strangers > 0, taken / np.maximum(strangers, 1), 1.0)  # nobody else: nothing can be told
        same[np.arange(len(part)), part] = False
        found[start : start + _BLOCK] = ((far < threshold) & same).any(axis=1)
        chance[start : start + _BLOCK] = 1.0 - (1.0 - rate) ** same.sum(axis=1)
    return found, chance


def _by_patient(values: NDArray[np.float64], owners: NDArray[np.int64]) -> NDArray[np.float64]:
    _, index = np.unique(owners, return_inverse=True)
    mean: NDArray[np.float64] = np.bincount(index, values) / np.bincount(index)
    return mean
