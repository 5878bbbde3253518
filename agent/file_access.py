"""Files that somebody else wrote: found without following a link, read within a bound."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from agent.deidentify.errors import FileRejectedError


def walk(folder: Path, leave_out: Iterable[Path]) -> Iterator[str]:
    """Paths of all but directories below a folder, relative to it. No link is followed."""
    left_out = {path.resolve() for path in leave_out}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(folder / inside) as found:
                entries = list(found)
        except OSError:
            yield inside  # a directory that cannot be read is listed, not passed over
            continue
        for entry in entries:
            path = os.path.join(inside, entry.name)
            if not entry.is_dir(follow_symlinks=False):
                yield path
            elif Path(entry.path).resolve() not in left_out:
                waiting.append(path)


def contents(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file, at most ``max_bytes``.

    Raises:
        FileRejectedError: ``not_a_file``, ``unreadable``, ``too_large``.
    """
    try:
        # without O_NONBLOCK, opening a named pipe would wait for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:  # ELOOP: a link; ENXIO: a socket
        raise FileRejectedError("not_a_file" if error.errno in (errno.ELOOP, errno.ENXIO) else "unreadable") from None
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise FileRejectedError("not_a_file")
    with os.fdopen(descriptor, "rb") as stream:
        if state.st_size > max_bytes:
            raise FileRejectedError("too_large")
        try:
            data = stream.read(state.st_size + 1)  # it takes so much memory, and not what max_bytes allows
            if len(data) > state.st_size:
                data += stream.read(max_bytes + 1 - len(data))
        except OSError:
            raise FileRejectedError("unreadable") from None
    if len(data) > max_bytes:  # it grew while it was read
        raise FileRejectedError("too_large")
    return data
