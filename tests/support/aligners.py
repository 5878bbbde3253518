"""A small aligner for other people's tests: trained in seconds on made-up chests, or not at all."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from agent.intervals import Proportion
from agent.models.diffusion.aligner import (
    Aligner,
    AlignerArchitecture,
    AlignerNet,
    AlignerQuality,
    aligner_bytes,
    aligner_from,
)
from agent.models.diffusion.aligner_training import AlignmentConfig, Labelled, train_aligner_of
from agent.models.diffusion.prompts import Conditions
from agent.models.features.trunk import TrunkArchitecture
from agent.models.training_loop import seeded
from deploy.phantoms.chest import FINDINGS, chest_patients, label_of

CHESTS = Conditions(("none", *FINDINGS))
SMALL = AlignerArchitecture(TrunkArchitecture(16, 1, width=8, depth=2), embedding=32, width=32)


def unsafe_fitness(conditions: Conditions, right: float = 0.9) -> AlignerQuality:
    """A lie, for tests alone: nobody measured these figures."""
    share = Proportion(right, max(0.0, right - 0.05), min(1.0, right + 0.05))
    return AlignerQuality(share, 1 / conditions.count, 0.5, 0.0, (0.9,) * len(conditions.findings))


@cache
def untrained_file(conditions: Conditions = CHESTS, channels: int = 1, seed: int = 0, right: float = 0.9) -> bytes:
    """An aligner of random weights, with figures that nobody measured: made at once."""
    trunk = TrunkArchitecture(16, channels, width=8, depth=2)
    with seeded(seed):
        net = AlignerNet(AlignerArchitecture(trunk), conditions.vocabulary.size, conditions.length)
    return aligner_bytes("untrained", net, conditions, unsafe_fitness(conditions, right), {})


def untrained(conditions: Conditions = CHESTS, channels: int = 1, seed: int = 0) -> Aligner:
    """The same, as somebody vouches for it."""
    return aligner_from(untrained_file(conditions, channels, seed), "public")


def chests(
    count: int, seed: int, conditions: Conditions = CHESTS, side: int = 16, most: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Radiographs (n, side, side) of made-up people, one each, and the places of their conditions (n,)."""
    patients = chest_patients(count, np.random.default_rng(seed), side, most=most)
    labels = [conditions.place(label_of(patient.findings[0])) for patient in patients]
    return np.stack([patient.radiographs[0] for patient in patients]), np.array(labels, np.int64)


@cache
def trained_file(steps: int = 100) -> bytes:
    """An aligner for the six conditions of ``CHESTS`` at 16 px that knows what it is about: about 3 seconds."""
    images, labels = chests(600, 0)
    config = AlignmentConfig("chests", SMALL, steps, batch=48, learning_rate=4e-3)
    with TemporaryDirectory() as folder:
        return train_aligner_of(Labelled(images, labels, np.arange(len(images))), CHESTS, config, Path(folder))


def trained() -> Aligner:
    """The same, as somebody vouches for it."""
    return aligner_from(trained_file(), "public")
