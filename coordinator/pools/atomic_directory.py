"""A directory that appears completely or not at all, and reuses what a killed process left."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from coordinator.pools.selection import PoolRefusedError
from protos.common.durable_files import flush_directory

_MARK = ".plan"


@contextmanager
def atomic_directory(out: Path, digest: str) -> Iterator[Path]:
    """``OUT.part``, for this process alone; it becomes ``OUT`` at the end, and is removed after an error.

    Args:
        digest: of everything that the contents follow from. What is there of another digest is removed first; of the
            same, it is what a killed or interrupted process left, and may be used.
    Raises:
        PoolRefusedError: something is in the way, another process builds it, or it cannot be written (a full disk).
    """
    part = out.with_name(out.name + ".part")
    mark = part / _MARK
    if out.exists() or out.is_symlink():
        raise PoolRefusedError(f"{out.name} exists already: name a new directory")
    if part.is_symlink() or (part.exists() and not mark.is_file()):
        raise PoolRefusedError(f"{part.name} already exists and was not made by this command: move it away")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with mark.open("a+b") as held:
            _hold(held, part)
            _begin(held, part, digest)
            try:
                yield part
                flush_directory(part)
                os.rename(part, out)
            except Exception:  # whatever it was: nothing half-written stays, and it is passed on
                shutil.rmtree(part, ignore_errors=True)
                raise
        (out / _MARK).unlink()
        flush_directory(out)
        flush_directory(out.parent)
    except OSError as error:
        raise PoolRefusedError(f"{out.name} cannot be written: {error.strerror or type(error).__name__}") from None


def _hold(held: BinaryIO, part: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PoolRefusedError(f"{part.name} is being written by another process") from None


def _begin(held: BinaryIO, part: Path, digest: str) -> None:
    """Keep what is there if it is of the same plan."""
    held.seek(0)
    if held.read() == digest.encode():
        return
    for path in part.iterdir():
        if path.name != _MARK:
            path.unlink()
    held.truncate(0)
    held.write(digest.encode())
    held.flush()
    os.fsync(held.fileno())


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as body:
        return hashlib.file_digest(body, "sha256").hexdigest()
