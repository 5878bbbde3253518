"""A log file that costs nothing when the disk is full; both sides log into one."""

from __future__ import annotations

import contextlib
from pathlib import Path


class Lossy:
    """A file that only grows. What the disk has no room for is not logged: a log changes nothing of what is done."""

    def __init__(self, path: Path) -> None:
        """Open it, 0600."""
        path.touch(mode=0o600)
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def write(self, text: str) -> None:
        """Append; after a line that found room for its beginning only, on a new line."""
        raw, done = ("\n" if self._torn else "").encode() + text.encode(), 0
        with contextlib.suppress(OSError):
            done = self._file.write(raw)
        self._torn = 0 < done < len(raw) or (self._torn and not done)

    def flush(self) -> None:
        """Nothing is held back."""
