"""The workspace of a long release: its checkpoint stores, and a progress callback."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from agent.domain import CheckpointStore

Say = Callable[[str, int, int], None]  # stage, step, of how many
# A confined process names them, and no other: :func:`of_round` numbers those of later rounds.
STAGES: Final = frozenset(
    {
        "draw and vet",
        "fine-tuning",
        "pre-training",
        "student",
        "teacher",
        "train",
        "Fréchet distance to one half of the held-out patients",
        "semantics: of the set, and of the public images",
        *(f"{name}: trained on the set, tested on held-out patients" for name in ("LR", "MLP", "CNN")),
    }
)


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
    say: Say = lambda _stage, _step, _of: None


def of_round(stage: str, number: int) -> str:
    """The name of a stage that comes in several rounds, of which the first is 1."""
    return stage if number == 1 else f"{stage} {number}"


def is_stage(text: str) -> bool:
    """Whether it is one of the stages that there are."""
    stage, _, number = text.rpartition(" ")
    return text in STAGES or (stage in STAGES and re.fullmatch(r"[2-9]|10", number) is not None)


def in_twentieths(say: Say) -> Say:
    """Tells every stage twenty times, and only as it goes forward; its beginning too."""
    last: dict[str, int] = {}

    def told(stage: str, step: int, of: int) -> None:
        part = 20 * step // max(of, 1)
        if part > last.get(stage, -1):
            last[stage] = part
            say(stage, step, of)

    return told
