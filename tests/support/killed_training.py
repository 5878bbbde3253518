"""A training that is killed at one of its steps, for tests that let it go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class KilledError(Exception):
    """The end of the process, in the place of it."""


def killed_at(step: int) -> Callable[[Any], None]:
    """What a training tells of its progress, and what ends it at ``step``."""

    def say(progress: Any) -> None:
        if progress.step == step:
            raise KilledError

    return say
