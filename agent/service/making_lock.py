"""One making at a time: two releases, searches or evaluations would choose among the same patients."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from protos.common.errors import RefusedError

_MOMENT_S: Final = 0.2


class MakingBusyError(RefusedError):
    """One making at a time."""


@contextlib.contextmanager
def making_lock(root: Path) -> Iterator[None]:
    """Nothing else reads patients for a release meanwhile. The home directory itself is locked: no file is left.

    Raises:
        MakingBusyError: something does.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            _lock(folder)
        except BlockingIOError:
            raise MakingBusyError(
                "another release, search or evaluation is at work: run this again when it has ended"
            ) from None
        yield
    finally:
        os.close(folder)


def _lock(folder: int) -> None:
    """Somebody who only looks whether a making is at work has the lock for a moment."""
    until = time.monotonic() + _MOMENT_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        else:
            return
        time.sleep(0.01)
