"""Several SQLite files copied as of one moment, while other processes go on writing them.

A ledger and a vault that are copied one after the other may disagree: a release may be in only one of them. So a read
transaction is opened on every file. The snapshot is valid only if no process committed to any file between the first
and the last; otherwise it is tried again. The copy holds what those transactions see.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import apsw

from protos.common.durable_files import flush_file
from protos.common.errors import StorageError

TRIES: Final = 200
PAUSE_S: Final = 0.05
_BUSY_MS: Final = 10_000


class SnapshotError(StorageError, RuntimeError):
    """No moment was found, or a file cannot be read; nothing was left behind."""


def consistent_snapshot(files: Sequence[tuple[Path, Path]]) -> None:
    """Copy databases as of one moment, each durable when this returns.

    Args:
        files: (database, new file beside nothing of that name).
    Raises:
        FileNotFoundError: a database is missing.
        FileExistsError: a new file is there already.
        SnapshotError: somebody commits all the time, or a file cannot be read.
    """
    for source, _ in files:
        if not source.exists():
            raise FileNotFoundError(2, "no such database", source.name)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as undo:
        try:
            readers = [stack.enter_context(contextlib.closing(_reader(source))) for source, _ in files]
            probes = [stack.enter_context(contextlib.closing(_reader(source))) for source, _ in files]
            _hold(readers, probes)
            for reader, (_, target) in zip(readers, files, strict=True):
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
                undo.callback(target.unlink, missing_ok=True)
                _copy(reader, target)
        except apsw.Error as error:
            raise SnapshotError(f"a database could not be copied ({type(error).__name__})") from None
        undo.pop_all()


def _reader(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(_BUSY_MS)
    return connection


def _hold(readers: Sequence[apsw.Connection], probes: Sequence[apsw.Connection]) -> None:
    """Open a read transaction on each, all of the same moment."""
    for _ in range(TRIES):
        before = [_version(probe) for probe in probes]
        for reader in readers:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # a transaction begins with a reading
        if [_version(probe) for probe in probes] == before:
            return
        for reader in readers:
            reader.execute("ROLLBACK")
        time.sleep(PAUSE_S)
    raise SnapshotError("another process keeps writing: wait for an ingest to end, or stop it, and try again")


def _version(probe: apsw.Connection) -> Any:
    """A number that another connection's commit changes (SQLite, PRAGMA data_version)."""
    ((version,),) = probe.execute("PRAGMA data_version").fetchall()
    return version


def _copy(reader: apsw.Connection, target: Path) -> None:
    """All pages that the reader's transaction sees; the copy needs no log beside it."""
    copy = apsw.Connection(str(target))
    try:
        with copy.backup("main", reader, "main") as pages:
            while not pages.done:
                pages.step(4096)
        copy.execute("PRAGMA journal_mode=DELETE").fetchall()
    finally:
        copy.close()
    flush_file(target)
