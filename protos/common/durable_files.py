"""Files that survive a power loss: written, flushed and renamed, and their folder flushed too.

After a crash a replaced file holds the old bytes or the new ones, whole; nothing half-written stays under its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path


def flush_directory(folder: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: it is no folder, or the disk refused.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_file(path: Path) -> None:
    """Make the bytes of a file durable, whoever wrote them.

    Raises:
        OSError: it cannot be read, or the disk refused.
    """
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def write_new(path: Path, body: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Create a file, its bytes durable when this returns. An existing file, or a link, is never written over.

    The name is durable after :func:`flush_directory` of its folder.

    Args:
        path: of the file.
        body: its bytes, or pieces of them.
        mode: its permissions, before the umask.
    Raises:
        FileExistsError: there is something at ``path``.
        OSError: it could not be written; a part of it may be there.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as out:
        for piece in (body,) if isinstance(body, bytes) else body:
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())


def replace_file(path: Path, body: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Create or replace a file: a crash leaves the old bytes or the new ones. Durable when this returns.

    The bytes are written to ``<name>.part`` first, under a lock: two writers wait for each other, and the next one
    overwrites what a crash left there.

    Args:
        path: of the file. A link in its place is replaced, not followed.
        body: its bytes, or pieces of them.
        mode: its permissions, before the umask.
    Raises:
        OSError: it could not be written; the old file is as it was.
    """
    part = path.with_name(f"{path.name}.part")
    with os.fdopen(_locked(part, mode), "wb") as out:
        try:
            for piece in (body,) if isinstance(body, bytes) else body:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    flush_directory(path.parent)


def _locked(part: Path, mode: int) -> int:
    """A descriptor of the empty file at ``part``, which nobody else writes until it is closed."""
    if part.is_symlink():
        part.unlink()
    while True:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # moved away meanwhile by who held the lock before
                if os.path.samestat(os.fstat(handle), os.lstat(part)):
                    if os.fstat(handle).st_mode & 0o777 & ~mode:
                        os.fchmod(handle, mode)
                    os.ftruncate(handle, 0)
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def move_durably(source: Path, target: Path) -> None:
    """Flush a file and give it another name, in a folder that is made if it is missing.

    After a power loss the file has one of the two names, whole.

    Raises:
        OSError: it could not be moved.
    """
    target.parent.mkdir(exist_ok=True)
    flush_file(source)
    os.replace(source, target)
    for folder in (target.parent, target.parent.parent, source.parent):
        flush_directory(folder)
