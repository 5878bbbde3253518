"""What a de-facing method makes of a head, and the checks that nothing passes by.

A method looks at one head, the finest series of a study, and gives a :class:`Change`: where, and what, in the
scanner's millimetres. The change is then laid onto every series of the study, each in its own grid, so that all of
them show the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent.domain import Volume
from agent.volumes.errors import NotDefacedError


@dataclass(frozen=True, slots=True, eq=False)
class Defaced:
    """A volume without a face, on the same grid."""

    values: NDArray[Any]  # (i, j, k), of the volume's own type
    changed: NDArray[np.bool_]  # (i, j, k), where the method was allowed to write


class Change(Protocol):
    """Where to change a head, and into what."""

    def onto(self, volume: Volume, keep: NDArray[np.bool_], rng: np.random.Generator) -> Defaced:
        """Lay the change onto a series of the study.

        Args:
            volume: RAS+ oriented (:func:`agent.volumes.grid.oriented`), in the same frame of reference.
            keep: (i, j, k) of the volume's grid, voxels that no method may touch: the brain.
            rng: of the run.
        """


def checked(volume: Volume, keep: NDArray[np.bool_], made: Defaced) -> Defaced:
    """The last look before anything is written: P-rules of faces hold bit for bit.

    Raises:
        NotDefacedError: ``brain_changed``; ``nothing_changed``; ``not_finite``.
        ValueError: another grid or type, or a voxel outside the changed mask differs.
    """
    if made.values.shape != volume.values.shape or made.values.dtype != volume.values.dtype:
        raise ValueError("a method keeps grid and type")
    differs = made.values.view(_bits(made.values)) != np.ascontiguousarray(volume.values).view(_bits(volume.values))
    if bool((differs & keep).any()):
        raise NotDefacedError("brain_changed")
    if bool((differs & ~made.changed).any()):
        raise ValueError("a voxel outside the changed mask differs")
    if not bool(differs.any()):
        raise NotDefacedError("nothing_changed")
    if made.values.dtype.kind == "f" and not bool(np.isfinite(made.values).all()):
        raise NotDefacedError("not_finite")
    return made


def _bits(values: NDArray[Any]) -> str:
    return f"u{values.dtype.itemsize}"  # so that -0.0 is not 0.0
