"""The whole cohort as recognisers see it, and which of it a made picture is taken for.

AnonFACES, section 3.4, compares a picture with the members of its cluster. A picture that looks like a patient of
another cluster harms that patient as much, so here it is compared with every picture of every patient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.nets.pictures import to_tensor
from agent.nouns import Cohort, Patient


class Judge(Protocol):
    """A recogniser with its own threshold."""

    @property
    def name(self) -> str:
        """Which one."""

    @property
    def threshold(self) -> float:
        """Euclidean distance of embeddings below which two pictures are one person's."""

    def embed(self, images: Tensor) -> Tensor:
        """(n, c, h, w) in [-1, 1] as (n, d)."""


@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """Every picture of every patient, as each recogniser sees it. Private."""

    judges: tuple[Judge, ...]
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
        """(b, patients): whether any of the first ``judges`` recognisers takes a picture for a patient.

        A distance that is not a number counts as no distance at all.
        """
        risk = np.zeros((len(images), len(self.patients)), np.bool_)
        for judge, known in list(zip(self.judges, self.embeddings, strict=True))[:judges]:
            seen = _embedded(judge, images.astype(np.float32) / np.float32(255.0))
            squares = (seen**2).sum(axis=1)[:, None] + (known**2).sum(axis=1) - 2.0 * (seen @ known.T)
            near = ~(np.sqrt(np.maximum(squares, 0.0)) >= judge.threshold)
            risk |= np.logical_or.reduceat(near, self.starts, axis=1)
        return risk


def _embedded(judge: Judge, images: NDArray[np.float32]) -> NDArray[np.float64]:
    with torch.no_grad():
        out: NDArray[np.float64] = judge.embed(to_tensor(images)).double().cpu().numpy()
    return out


def gallery_of(cohort: Cohort, judges: Sequence[Judge], others: Sequence[Patient] = (), batch: int = 256) -> Gallery:
    """Show the whole cohort to every recogniser, once, and after it whoever else is to be unlike what is made.

    Args:
        cohort: the patients of whom pictures are made; they come first.
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
