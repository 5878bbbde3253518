"""A directory that appears whole or not at all, and what a killed process left of it is used again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from coordinator.pool import PoolRefused

_MARK = ".plan"


@contextmanager
def building(out: Path, digest: str) -> Iterator[Path]:
    """``OUT.part``, for this process alone; it becomes ``OUT`` at the end, and is removed after an error.

    Args:
        digest: of everything that the contents follow from. What is there of another digest is removed first; of the
            same, it is what a killed or interrupted process left, and may be used.
    Raises:
        PoolRefused: something is in the way, another process builds it, or it cannot be written (a full disk).
    """
    part = out.with_name(out.name + ".part")
    mark = part / _MARK
    if out.exists() or out.is_symlink():
        raise PoolRefused(f"{out.name} exists already: name a directory that does not")
    if part.is_symlink() or (part.exists() and not mark.is_file()):
        raise PoolRefused(f"{part.name} is in the way, and nothing of ours left it there")
    try:
        part.mkdir(parents=True, exist_ok=True)
        with mark.open("a+b") as held:
            _hold(held, part)
            _begin(held, part, digest)
            try:
                yield part
                sync(part)
                os.rename(part, out)
            except Exception:  # whatever it was: nothing half-written stays, and it is passed on
                shutil.rmtree(part, ignore_errors=True)
                raise
        (out / _MARK).unlink()
        sync(out)
        sync(out.parent)
    except OSError as error:
        raise PoolRefused(f"{out.name} cannot be written: {error.strerror or type(error).__name__}") from None


def _hold(held: BinaryIO, part: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PoolRefused(f"{part.name} is being written by another process") from None


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


def sync(folder: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, body: bytes) -> None:
    """A file, durable when this returns."""
    with path.open("wb") as out:
        out.write(body)
        out.flush()
        os.fsync(out.fileno())


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as body:
        return hashlib.file_digest(body, "sha256").hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
