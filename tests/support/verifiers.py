"""Small verifiers: of some seconds' training on chest phantoms, or of none, with figures that nobody measured."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.intervals import Proportion
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.score_tail import Tail
from agent.models.recognition.verifier import (
    CHANGES,
    Verifier,
    VerifierArchitecture,
    VerifierNet,
    VerifierQuality,
    verifier_bytes,
)
from agent.models.recognition.verifier import verifier_from as _read
from agent.models.recognition.verifier_training import VerificationConfig, fit_verifier, second_opinion
from agent.models.training_loop import seeded
from agent.vetting.reference import Vetting
from deploy.demo.train_networks import kept_network
from deploy.phantoms.chest import chest_patients, stacked


@cache
def demo_vetting() -> Vetting:
    """By the demo's own verifiers, of made-up chests."""
    one, other = (_read(kept_network(name), "public") for name in ("verifier", "unseen"))
    return Vetting(one, other)


TINY = VerifierArchitecture(TrunkArchitecture(16, 1, 8, 2), grid=8, features=32, hidden=16, embedding=32)


def chests(people: int, seed: int, side: int = 16, visits: int = 2) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Radiographs (n, side, side) of made-up people at visits with changed findings, and whose each is (n,)."""
    pictures, owners, _ = stacked(chest_patients(people, np.random.default_rng(seed), side, visits))
    return np.rint(pictures * 255).astype(np.uint8), owners


def unsafe_judged() -> VerifierQuality:
    """A lie, for tests alone: nobody measured these figures. They are as good as is demanded."""
    good = Proportion(0.95, 0.9, 1.0)
    return VerifierQuality(good, good, good, good, dict.fromkeys(CHANGES, good))


def unsafe_tail(start: float = 0.0) -> Tail:
    """The same of a tail: one pair of a hundred above ``start``, and ten times fewer for every 0.23 more."""
    return Tail(start, 0.01, 0.0, 0.1, 100, 4950, ((0.01, 0.0, 0.1), (0.012, -0.1, 0.1)))


def drawn_verifier_file(seed: int, channels: int = 1, tail: Tail | None = None) -> bytes:
    """An untrained verifier's file, with figures that nobody measured."""
    trunk = TrunkArchitecture(16, channels, 8, 2)
    with seeded(seed):
        net = VerifierNet(VerifierArchitecture(trunk, grid=2, features=16, hidden=8, embedding=16))
    return verifier_bytes(f"drawn-{seed}", net.eval(), tail or unsafe_tail(), unsafe_judged(), {})


def tiny_verifier_file(seed: int = 0) -> bytes:
    """Some five seconds of training at 16 px, once: it tells strangers apart, and finds copies in another light.

    Odd seeds are another opinion: other people, another split, another trunk.
    """
    return _trained(seed)


@cache
def _trained(seed: int) -> bytes:
    config = VerificationConfig("tiny", TINY, steps=150, people=32, seed=seed, learning_rate=8e-3)
    if seed % 2:
        config = second_opinion(config)
    with tempfile.TemporaryDirectory() as folder:
        return fit_verifier(*chests(240, seed), config, Path(folder)).file


def tiny_verifier(seed: int = 0) -> Verifier:
    """:func:`tiny_verifier_file`, and somebody vouches for it."""
    return _read(tiny_verifier_file(seed), "public")
