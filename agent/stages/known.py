"""Whether recognisers know this cohort's patients again at all: one that does not can vet nothing made of them.

What a recogniser reached on its public set (:class:`agent.nets.siamese.Judged`) says nothing of pictures of another
kind. A cohort in which patients have several images shows it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.nets.siamese import KnowsNobody
from agent.nouns import Patient
from agent.stages.gallery import Gallery
from agent.wilson import bounds

ABOVE_CHANCE: Final = 0.1  # the share of images found again must exceed chance by more than this
_BLOCK: Final = 256


def refuse_blind(gallery: Gallery, patients: Sequence[Patient]) -> None:
    """Refuse where a recogniser does not find patients again in their own images.

    An image is found again if the recogniser, at its threshold, takes another image of the same patient for the same
    person. By chance, as strangers' images are taken for it at a rate f, one of q other images would be, at a rate of
    1 - (1 - f)^q. Both are averaged over the patient's images and then over patients, so that each patient with two
    images or more counts once; Wilson's lower bound of the first mean must exceed the second by ``ABOVE_CHANCE``, for
    every recogniser. A distance that is not a number finds nobody again, and takes every stranger.

    What it cannot see: where no patient has two images there is nothing to look at, and the recognisers' own
    judgement on their public set is all there is. Equal images are one; a second image that is nearly the first again
    is easy to find and proves little. Where the images of a patient show different things, a left and a right eye,
    a recogniser of eyes is refused: nothing here tells it from one that knows nobody.

    Args:
        gallery: of all these patients' images, in their order.
        patients: those of the cohort, and whoever else is in the gallery.
    Raises:
        KnowsNobody: one recogniser or more cannot be told from chance. The text names and counts nobody.
    """
    images, owners = _distinct(patients)
    several = np.flatnonzero((np.bincount(owners, minlength=len(patients)) >= 2)[owners])
    if not len(several):
        return
    for judge, seen in zip(gallery.judges, gallery.embeddings, strict=True):
        found, chance = _found_again(seen[images], owners, several, judge.threshold)
        again, luck = (_by_patient(each, owners[several]) for each in (found, chance))
        if not bounds(float(again.sum()), len(again))[0] > luck.mean() + ABOVE_CHANCE:
            raise KnowsNobody(
                "a recogniser does not know this cohort's patients again from one of their images to another: "
                "train it on public pictures of the same kind, and with the same thing counted as one identity"
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
