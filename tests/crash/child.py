"""The process that is crashed: the product's store on a real file, telling what it acknowledges.

Exit 0 the plan is done, 70 the ledger stopped (as the product's commands do), 4 it could not be opened, 3 it went on
after a failed write, which it never may; anything else is a fault of the harness.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final

import apsw

from policies.ledger.backends.sqlite import Sqlite, lock_file, mark_of, open_sqlite, prepare
from policies.ledger.store import Batch, LedgerBackend, LedgerStoppedError, LedgerUnsoundError, Store
from tests.crash.faults import Fault, FaultyVfs
from tests.crash.workload import KEY, ORIGIN, Clock, drive, hurry, plan

DONE: Final = 0
REFUSED: Final = 4
WENT_ON: Final = 3
STOPPED: Final = 70
OPENING: Final = -1
CLOSING: Final = -2


class UnsafeAcknowledgesFirst:
    """A disk that answers before it writes, one commit late: what the harness must find out. Never use it."""

    def __init__(self, disk: LedgerBackend) -> None:
        self._disk = disk
        self._late: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        """Everything else is the disk's own."""
        return getattr(self._disk, name)

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """As if it had been written."""
        self._write()
        return self._disk.bodies(upto)

    def body(self, seq: int) -> bytes | None:
        """As if it had been written."""
        late = {batch.first + i: body for batch in self._late for i, body in enumerate(batch.bodies)}
        return late.get(seq) or self._disk.body(seq)

    def commit(self, batch: Batch) -> None:
        """Write the commit before this one."""
        self._write()
        self._late.append(batch)

    def close(self) -> None:
        """Write what is late."""
        self._write()
        self._disk.close()

    def _write(self) -> None:
        while self._late:
            self._disk.commit(self._late.pop())


def session(disk: LedgerBackend, seed: int, stop: int, told: Callable[[int], object]) -> int:
    """Drive the plan's first ``stop`` steps, telling the size after each and when it closes; the exit code."""
    clock, planned = Clock(), plan(seed)
    try:
        store = Store(disk, ORIGIN, KEY, clock)
    except (apsw.Error, LedgerUnsoundError):
        return REFUSED
    try:
        drive(store, clock, planned, range(stop), told)
    except LedgerStoppedError:
        return STOPPED if _stays_stopped(store, seed) else WENT_ON
    told(CLOSING)
    try:
        store.close()
    except apsw.Error:  # everything was acknowledged; what a failed shutdown leaves is judged by the next process
        return STOPPED
    return DONE


def _stays_stopped(store: Store, seed: int) -> bool:
    """Whether a stopped ledger refuses to append and to sign."""
    append = plan(seed).steps[-1][0]
    for attempt in (lambda: store.append(append.key, append.draft), store.checkpoint):
        try:
            attempt()
        except LedgerStoppedError:
            continue
        return False
    return store.stopped


def live(path: Path, seed: int, told: Callable[[int], object], hasty: bool = False) -> int:
    """One life of the process: some steps, a clean restart, and the whole plan; the exit code."""
    apsw.connection_hooks.append(hurry)
    steps = len(plan(seed).steps)
    for stop in (Random(seed).randint(1, steps), steps):
        told(OPENING)
        try:
            disk: LedgerBackend = open_sqlite(path)
        except (LedgerUnsoundError, OSError):
            return REFUSED
        if code := session(UnsafeAcknowledgesFirst(disk) if hasty else disk, seed, stop, told):
            return code
    return DONE


def faulty(path: Path, seed: int, fault: Fault, pipe: Connection, hasty: bool = False) -> None:
    """A life with a fault. What is told is sent with the count of the operations before it."""
    _layer = FaultyVfs(fault)
    os._exit(live(path, seed, lambda size: pipe.send((size, fault.operations)), hasty))


def counted(path: Path, seed: int, fault: Fault, pipe: Connection) -> None:
    """A life without a fault; sends how many operations it had."""
    _layer = FaultyVfs(fault)
    code = live(path, seed, lambda _size: None)
    pipe.send(fault.operations)
    os._exit(code)


def short_of_bytes(path: Path, seed: int, most: int, pipe: Connection) -> None:
    """A life in which no file may grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    os._exit(live(path, seed, lambda size: pipe.send((size, 0))))


def short_of_pages(path: Path, seed: int, most: int, pipe: Connection) -> None:
    """A life in which the database may not grow beyond so many pages."""
    connection = apsw.Connection(str(path))
    prepare(connection)
    connection.execute(f"PRAGMA max_page_count={most}").fetchall()
    disk = Sqlite(connection, lock_file(path.with_suffix(".lock")), mark_of(path))
    os._exit(session(disk, seed, len(plan(seed).steps), lambda size: pipe.send((size, 0))))


def main() -> int:
    """A life without a fault of its own: something outside kills it, or makes its system calls fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.child", description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args()
    return live(arguments.path, arguments.seed, lambda size: os.write(1, f"{size}\n".encode()))


if __name__ == "__main__":
    raise SystemExit(main())
