"""Faults at a real file: a layer over SQLite's own that dies or fails at one chosen operation.

Registered as SQLite's default, so that the product opens its file as it always does. Operations are counted over all
files of the connection, from the first byte of the schema on.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any, Final

import apsw

NAME: Final = "lazaret-faults"
KINDS: Final = ("kill before", "kill half way", "kill after", "eio", "enospc")


@dataclass(slots=True)
class Fault:
    """What happens at the ``at``-th operation; the count of operations so far."""

    kind: str = ""
    at: int = 0
    operations: int = 0

    def next(self) -> bool:
        """Count one operation; whether it is the one."""
        self.operations += 1
        return self.operations == self.at

    def fail(self) -> None:
        """Die, or fail as the operating system does."""
        if self.kind == "eio":
            raise apsw.IOError("injected EIO")
        if self.kind == "enospc":
            raise apsw.FullError("injected ENOSPC")
        os.kill(os.getpid(), signal.SIGKILL)


class _Faulty(apsw.VFSFile):
    def __init__(self, name: Any, flags: list[int], fault: Fault) -> None:
        self._fault = fault
        super().__init__("unix", name, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        if not self._fault.next():
            super().xWrite(data, offset)
            return
        raw = bytes(data)
        part = {"kill half way": raw[: len(raw) // 2], "kill after": raw}.get(self._fault.kind, b"")
        if part:
            super().xWrite(part, offset)
        self._fault.fail()

    def xSync(self, flags: int) -> None:
        self._around(super().xSync, flags)

    def xTruncate(self, size: int) -> None:
        self._around(super().xTruncate, size)

    def _around(self, operation: Any, value: int) -> None:
        chosen = self._fault.next()
        if not chosen or self._fault.kind == "kill after":
            operation(value)
        if chosen:
            self._fault.fail()


class FaultyVfs(apsw.VFS):
    """SQLite's unix layer with one fault; the default from its registration on."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        super().__init__(NAME, "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> _Faulty:
        if self._fault.next():
            self._fault.fail()
        return _Faulty(name, flags, self._fault)

    def xDelete(self, path: str, sync_names: bool) -> None:
        chosen = self._fault.next()
        if not chosen or self._fault.kind == "kill after":
            super().xDelete(path, sync_names)
        if chosen:
            self._fault.fail()
