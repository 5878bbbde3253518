"""Networks of a distillation, small enough for a test and trained by nobody: what their files say is a lie."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from agent.intervals import Proportion
from agent.models.diffusion.prompts import Conditions
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.score_tail import fit_tail
from agent.models.recognition.verifier import (
    CHANGES,
    VerifierArchitecture,
    VerifierNet,
    VerifierQuality,
    verifier_bytes,
)
from agent.models.training_loop import seeded
from tests.support.aligners import untrained_file
from tests.support.latents import tiny_autoencoder_file

SIDE = 16
CONDITIONS = Conditions(("effusion", "none"))


@cache
def verifier_file(seed: int = 0) -> bytes:
    """A verifier of random weights, with a tail of made-up scores and figures that nobody measured."""
    architecture = VerifierArchitecture(TrunkArchitecture(SIDE, 1, width=8, depth=2), features=16, embedding=16)
    with seeded(seed):
        net = VerifierNet(architecture)
    dice = np.random.default_rng(seed)
    scores = dice.normal(-6.0, 1.0, (120, 120))
    tail = fit_tail((scores + scores.T) / 2, np.arange(60).repeat(2), dice)
    lie = Proportion(0.99, 0.98, 1.0)
    judged = VerifierQuality(lie, lie, lie, lie, dict.fromkeys(CHANGES, lie))
    return verifier_bytes(f"untrained-{seed}", net, tail, judged, {})


@cache
def network_files() -> dict[str, bytes]:
    """The four files, by their keys in ``[networks]``."""
    return {
        "autoencoder": tiny_autoencoder_file(),
        "verifier": verifier_file(0),
        "unseen": verifier_file(1),
        "aligner": untrained_file(CONDITIONS),
    }


@cache
def public_images(count: int = 40) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(n, 16, 16): blobs of nobody, bright below where there is an effusion; and the places of their conditions."""
    dice, labels = np.random.default_rng(4), np.arange(count) % 2
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    pictures = [
        120 * np.exp(-((x - a) ** 2 + (y - b) ** 2) / 0.05) + 90 * (y > 0.7) * (label == 0)
        for label, a, b in zip(labels, *dice.uniform(0.3, 0.7, (2, count)), strict=True)
    ]
    noisy = np.stack(pictures) + dice.uniform(0, 40, (count, SIDE, SIDE))
    return noisy.astype(np.uint8), labels.astype(np.int64)
