"""A log file that costs nothing when the disk is full, and does not grow for ever; both sides log into one."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path


class BestEffortFile:
    """An append-only file. If the disk is full, lines are dropped: logging never affects the work.

    Several processes may append to it. Whoever finds it full renames it (NAME.1 is the newest of the old ones), and
    every other process goes on in the fresh one: the name is looked at before each line.
    """

    def __init__(
        self, path: Path, most: int = 0, keep: int = 1, lost: Callable[[int], None] = lambda _lines: None
    ) -> None:
        """Open it, 0600.

        Args:
            path: of the log.
            most: bytes after which a fresh file is begun; 0: never.
            keep: how many old ones are kept; at least 1.
            lost: hears how many lines found no room.
        """
        self._path, self._most, self._keep, self._lost = path, most, keep, lost
        self._file = self._opened()
        self._torn = False

    def _opened(self) -> io.FileIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self._path, flags, 0o600), "ab", buffering=0)

    def write(self, text: str) -> None:
        """Append; after a line that found room for its beginning only, on a new line."""
        raw, done = ("\n" if self._torn else "").encode() + text.encode(), 0
        with contextlib.suppress(OSError):
            self._follow(len(raw))
        with contextlib.suppress(OSError):
            done = self._file.write(raw) or 0
        self._torn = 0 < done < len(raw) or (self._torn and not done)
        if done < len(raw):
            self._lost(1)

    def _follow(self, more: int) -> None:
        """Go on in the file that bears the name now; begin a fresh one when it is full."""
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        ours = os.fstat(self._file.fileno())
        if named is None or (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
            self._reopen()
        elif self._most and ours.st_size and ours.st_size + more > self._most:
            self._rotate()

    def _reopen(self) -> None:
        fresh = self._opened()
        self._file.close()
        self._file, self._torn = fresh, False

    def _rotate(self) -> None:
        """One process renames; another that finds the lock taken writes one more line into the old file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino:
            free = next((n for n in range(1, self._keep) if not self._numbered(n).exists()), self._keep)
            for number in range(free, 1, -1):
                os.replace(self._numbered(number - 1), self._numbered(number))
            os.replace(self._path, self._numbered(1))
        self._reopen()  # which lets go of the lock

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def flush(self) -> None:
        """Nothing is held back."""
