"""A head that was looked at and found fit: the one way to get what every method starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Brain
from agent.domain import Volume


@dataclass(frozen=True, slots=True, eq=False)
class HeadScan:
    """A volume with its head and its brain, all on the oriented grid."""

    volume: Volume  # oriented RAS+
    skin: NDArray[np.bool_]  # (i, j, k), the head without holes
    brain: Brain

    def __post_init__(self) -> None:
        """One grid."""
        if not self.volume.values.shape == self.skin.shape == self.brain.mask.shape or self.skin.dtype != np.bool_:
            raise ValueError("a head, its skin and its brain lie on one grid")
