"""The workspace of a long release: its checkpoint stores, and a progress callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.domain import CheckpointStore


@dataclass(frozen=True, slots=True)
class NullCheckpointStore:
    """A checkpoint store that keeps nothing: an interrupted job starts from the beginning."""

    def read(self) -> bytes | None:
        """Nothing."""
        return None

    def write(self, data: bytes) -> None:
        """Forgotten at once."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Places by name, sealed where they are a hospital's; and whoever shows progress: stage, step, of how many.

    A step is told by its number alone: no loss, norm or batch size, which would be functions of patients (P14).
    """

    place: Callable[[str], CheckpointStore] = lambda _: NullCheckpointStore()
    say: Callable[[str, int, int], None] = lambda _stage, _step, _of: None
