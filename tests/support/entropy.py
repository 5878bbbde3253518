"""Repeatable randomness for tests. Noise that can be drawn again can be subtracted: never in production."""

from __future__ import annotations

import numpy as np


class UnsafeSeededEntropy:
    """An ``agent.dp.noise.Entropy`` that repeats itself for the same seed."""

    def __init__(self, seed: int) -> None:
        """Start a stream that anyone who knows ``seed`` can draw again."""
        self._rng = np.random.default_rng(seed)

    def take(self, count: int) -> bytes:
        """Give ``count`` bytes of the stream."""
        return self._rng.bytes(count)
