"""A volume GAN of the smallest size, and balls of heads to train it on."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent.defacing.deid_gan.network import PRESETS
from agent.defacing.deid_gan.training import Example, VolumeGanTraining
from agent.defacing.privacy_transform import Gamma
from agent.volumes.grid import Cube

TINY = PRESETS["tiny16"]


def config(**changes: Any) -> VolumeGanTraining:
    told: dict[str, Any] = {"steps": 6, "checkpoint_every": 2, "say_every": 1}
    return VolumeGanTraining(TINY, **(told | changes))


def example(number: int, side: int = 16) -> Example:
    """A ball of a head with a brain in it and a nose of its own."""
    rng = np.random.Generator(np.random.Philox(number))
    at = ((np.indices((side,) * 3).transpose(1, 2, 3, 0) + 0.5) / side - 0.5) / rng.uniform(0.9, 1.1, 3)
    away = np.linalg.norm(at, axis=-1)
    nose = np.linalg.norm(at - (0.0, 0.4, rng.uniform(-0.1, 0.1)), axis=-1) < 0.1
    head, brain = (away < 0.38) | nose, away < 0.25
    volume = (0.4 * head + 0.3 * brain + 0.05 * rng.uniform(size=head.shape)).astype(np.float32)
    cube = Cube(side, np.diag([256.0 / side] * 3 + [1.0]))
    return Example(volume, Gamma(away < 0.47, brain, np.where(brain, volume, np.float32(0.0)), cube), f"p{number}")


def some(count: int = 4) -> list[Example]:
    return [example(i) for i in range(count)]
