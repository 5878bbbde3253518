"""A head that was looked at and found fit: the one way to get what every method starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.heads.brain import Atlas, Brain, Register, extract
from agent.heads.grid import check, oriented
from agent.heads.quality import judge
from agent.heads.skin import head_mask
from agent.nouns import Volume


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A volume with its head and its brain, all on the oriented grid."""

    volume: Volume  # oriented RAS+
    skin: NDArray[np.bool_]  # (i, j, k), the head without holes
    brain: Brain

    def __post_init__(self) -> None:
        """One grid."""
        if not self.volume.values.shape == self.skin.shape == self.brain.mask.shape or self.skin.dtype != np.bool_:
            raise ValueError("a head, its skin and its brain lie on one grid")


def examined(volume: Volume, atlas: Atlas, register: Register, mask: NDArray[np.bool_] | None = None) -> Head:
    """Find head and brain, and refuse what cannot be trusted.

    Args:
        volume: as it was read, any orientation.
        atlas, register: of :mod:`agent.edges.atlas`.
        mask: a brain mask of the operator's own, on the *oriented* grid.

    Raises:
        NotDefaced: with the rule that it broke.
    """
    check(volume)
    upright = oriented(volume)
    head = Head(upright, head_mask(upright), extract(upright, atlas, register, mask))
    judge(head)
    return head
