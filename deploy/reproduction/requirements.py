"""What a table needs of its data set, asked before a network is trained. Data sets are public: counts may be said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.models.recognition.recogniser_training import ENOUGH, TooFewPeopleError
from agent.models.recognition.recogniser_training import split as recognised
from deploy.reproduction.experiment import Samples, Settings, Work, sizes
from deploy.reproduction.networks import officials, recognition

LEARNT: Final = 2  # images, or patients, from which networks can be trained at all


class TooFewPatientsError(ValueError):
    """The data set is too small for a table at its preset. The text says how many patients would do."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What one table or figure takes."""

    clusters: int = 1  # of the cohort, at the largest k that it tries
    held_out: int = 1  # patients of the test part
    middle: bool = False  # it tries one k only: :func:`middle`
    attacked: bool = False  # half of the test part is released as well, at every k
    graded: bool = False  # a classifier is tried on the test part
    second: bool = False  # everybody in the cohort has a second image
    recognisers: tuple[int, ...] = ()


def middle(settings: Settings) -> int:
    """The k of ablations and views: 5, as the paper, or the nearest of the menu."""
    return min(settings.ks, key=lambda k: (abs(k - 5), k))


def classes(samples: Samples) -> tuple[str, ...]:
    """What a classifier is taught of each image: of EyePACS "0", normal, or "1", retinopathy (section 4.4)."""
    if samples.name == "eyepacs":
        return tuple("0" if grade == "0" else "1" for grade in samples.labels)
    return samples.labels


def ready(work: Work, name: str, needs: Needs) -> None:
    """Refuse what is known to fail, before anything is trained.

    Raises:
        TooFewPatientsError: a part would be too small, or has no two grades.
        TooFewPeopleError: D0 has too few people with several images to train and calibrate a recogniser.
        ValueError, WeightsError: a published network that was named is not there, or not what it should be.
    """
    officials(work)
    if needs.second:
        _second(work)
    _parts(work, name, needs)
    if needs.graded:
        _graded(work)
    for which in needs.recognisers:
        _recognised(work, name, which)


def _parts(work: Work, name: str, needs: Needs) -> None:
    s = work.settings
    k = middle(s) if needs.middle else s.ks[-1]
    least = (LEARNT, needs.clusters * k, max(needs.held_out, 2 * k if needs.attacked else 0))
    people = len(np.unique(work.samples.owners))
    found = sizes(people, s)
    if all(a >= b for a, b in zip(found, least, strict=True)):
        return
    enough = people + 1
    while not all(a >= b for a, b in zip(sizes(enough, s), least, strict=True)):
        enough += 1
    why = f" ({needs.clusters} clusters)" if needs.clusters > 1 else ""
    half = ", half of whom are released too" if needs.attacked else ""
    raise TooFewPatientsError(
        f"{name} up to k = {k}: too few patients. It takes {least[0]} in the public part, {least[1]} in the "
        f"cohort{why}, {least[2]} in the test part{half}; there are {found[0]}, {found[1]} and {found[2]}. As far as "
        f"it is read, the data set has {people} patients in {len(work.samples.images)} images; {enough} patients "
        "would do"
    )


def _second(work: Work) -> None:
    for seed in work.settings.seeds:
        _, counts = np.unique(work.samples.owners[work.parts(seed).cohort], return_counts=True)
        if not counts.min() >= 2:
            lone = int((counts < 2).sum())
            raise TooFewPatientsError(
                f"Rank-1 needs two images of everybody in the cohort: {lone} of {len(counts)} have one only"
            )


def _graded(work: Work) -> None:
    told = np.array(classes(work.samples))
    for seed in work.settings.seeds:
        if len(np.unique(told[work.parts(seed).test])) < 2:
            raise TooFewPatientsError(
                "the images of the test part are of one grade: no classifier can be tried on them"
            )


def _recognised(work: Work, name: str, which: int) -> None:
    for seed in sorted({seed % work.settings.net_seeds for seed in work.settings.seeds}):
        rows, config = recognition(work, seed, which)
        owners = work.samples.owners[rows]
        corners = work.samples.images[:, :1, :1][rows]  # as many images, and none of their bytes
        try:
            recognised(corners, owners, config)
        except TooFewPeopleError as error:
            _, counts = np.unique(owners, return_counts=True)
            each = max(2.0, float(counts.mean())) if len(counts) else 2.0
            enough = _enough(each, config.false_match_rate, config.held_out)
            raise TooFewPeopleError(
                f"{name}: too few people to train, calibrate and judge its recognisers. The part that they learn "
                f"from has {len(counts)} people with two images or more, {len(owners)} images in all; with "
                f"{each:.2g} images each and a false match rate of {config.false_match_rate:g} it takes about "
                f"{enough}, of {_in_all(enough, work.settings)} in the data set"
            ) from error


def _enough(each: float, rate: float, held_out: float) -> int:
    """People with so many images each, of whom a held-out share makes enough pairs of two people."""
    people = 4
    while True:
        held = round(held_out * people)
        pairs = held * (held - 1) / 2 * each**2
        if held >= 2 and people - 2 * held >= 2 and pairs * rate >= ENOUGH:
            return people
        people += 1


def _in_all(learnt: int, settings: Settings) -> int:
    """Patients of a data set that leave so many to learn from."""
    people = learnt
    while sizes(people, settings)[1 if settings.as_published else 0] < learnt:
        people += 1
    return people
