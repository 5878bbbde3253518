"""What a file needs of the disk beyond :mod:`pathlib`: blocks set aside, writes at a place, names that last."""

from __future__ import annotations

import os
from pathlib import Path


def reserve(path: Path, size: int) -> None:
    """Create a file of ``size`` zero bytes, 0600, with its blocks set aside.

    Raises:
        OSError: it is there already, or there is no room.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_at(handle: int, data: bytes, at: int) -> None:
    """All of ``data`` at the offset ``at``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done
