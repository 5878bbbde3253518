"""Files that survive a power loss: written, flushed and renamed, and their folder flushed too.

After a crash a replaced file holds the old bytes or the new ones, whole; nothing half-written stays under its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

_FILLING: Final = ".filling"  # in a folder: what is being made for it, and was never used
_FILLED: Final = ".filled"  # the same, whole: only to be moved


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


def create_file(path: Path, body: bytes, mode: int = 0o666) -> None:
    """Create a file whole or not at all, and never over another one; durable when this returns.

    Args:
        path: of the file.
        body: its bytes.
        mode: its permissions, before the umask.
    Raises:
        FileExistsError: there is something at ``path``.
        OSError: it could not be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        write_new(part, body, mode)
        os.link(part, path)  # refuses, unlike a renaming, where there is one
    finally:
        part.unlink(missing_ok=True)
    flush_directory(path.parent)


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


@contextlib.contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """Keep every other process that asks for the same away from a folder.

    Raises:
        BlockingIOError: another process is there.
        OSError: there is no such folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def fill_folder(folder: Path, fill: Callable[[Path], None], last: str) -> None:
    """Fill an empty folder, whole or not at all; the folder itself may be a mount, which cannot be exchanged.

    After a kill nothing of it is there, or :func:`finish_filling` finishes it.

    Args:
        folder: it is there, and empty.
        fill: writes everything into the folder that it is given.
        last: what appears last: once it is there, everything is.
    Raises:
        OSError: it could not be written; nothing is left.
    """
    making = folder / _FILLING
    making.mkdir(mode=0o700)
    try:
        fill(making)
        for path in making.rglob("*"):
            (flush_directory if path.is_dir() else flush_file)(path)
        flush_directory(making)
        os.replace(making, folder / _FILLED)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    finish_filling(folder, last)


def is_half_filled(folder: Path) -> bool:
    """Whether a kill left something of :func:`fill_folder`, or another process is at it."""
    return (folder / _FILLING).exists() or (folder / _FILLED).exists()


def finish_interrupted(folder: Path, last: str) -> None:
    """Finish, or clear away, what a killed :func:`fill_folder` left, if anything.

    Raises:
        BlockingIOError: another process fills it just now.
    """
    if is_half_filled(folder):
        with exclusively(folder):
            finish_filling(folder, last)


def finish_filling(folder: Path, last: str) -> bool:
    """Finish, or clear away, what a kill left of :func:`fill_folder`. The caller keeps others away.

    Returns:
        Whether there was something to finish: everything is in its place now.
    """
    if (folder / _FILLING).exists():  # it was not whole, so nobody has used anything of it
        shutil.rmtree(folder / _FILLING)
    filled = folder / _FILLED
    if not filled.exists():
        return False
    for path in sorted(filled.iterdir(), key=lambda one: one.name == last):
        if path.name == last:
            flush_directory(folder)
        os.replace(path, folder / path.name)
    filled.rmdir()
    flush_directory(folder)
    return True
