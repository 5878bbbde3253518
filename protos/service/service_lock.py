"""One running service in a home directory, on either side."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from protos.common.errors import RefusedError

LOCK: Final = "service.lock"  # in the home directory; the lock is what counts, not the file


class ServiceBusyError(RefusedError):
    """Another service runs in this home directory."""


@contextlib.contextmanager
def service_lock(home: Path) -> Iterator[None]:
    """One service in a home directory: two would answer at one socket, and run the same jobs.

    Raises:
        ServiceBusyError: another one runs; the text has its process number.
    """
    handle = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            number = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
            told = f"a service runs in {home.name} already (process {number}), and commands reach it"
            raise ServiceBusyError(f"{told}: stop it to start another") from None
        os.pwrite(handle, f"{os.getpid():<20}".encode(), 0)
        yield
    finally:
        os.close(handle)
