"""SQLite's operating system for :class:`tests.crash.disk.Disk`: every read and write of a connection goes there.

It does what SQLite's own ``unix`` layer does where that matters to a power cut: a journal or write-ahead log syncs
its directory at its first sync, the main file never does; deleting syncs the directory when SQLite asks for it; the
sector size is 4096 with powersafe overwrite. There is no shared memory, so a connection must set
``locking_mode=EXCLUSIVE`` before WAL, which moves the WAL's index to the heap and changes nothing on the disk.
"""

from __future__ import annotations

from typing import Any, Final

import apsw

from tests.crash.disk import Disk, File, Truncate, Write

NAME: Final = "lazaret-power-loss"
LEDGER: Final = "ledger.db"
_SYNCS_ITS_NAME: Final = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL


class _Handle:
    """An open file, as SQLite sees it."""

    def __init__(self, disk: Disk, file: File, syncs_its_name: bool) -> None:
        self._disk, self._file, self._syncs_its_name = disk, file, syncs_its_name

    def xRead(self, amount: int, offset: int) -> bytes:
        self._disk.powered()
        return bytes(self._file.seen[offset : offset + amount])

    def xWrite(self, data: Any, offset: int) -> None:
        self._disk.step()
        self._file.change(Write(offset, bytes(data)))

    def xTruncate(self, size: int) -> None:
        self._disk.step()
        self._file.change(Truncate(size))

    def xSync(self, _flags: int) -> None:
        self._disk.step()
        self._file.sync()
        if self._syncs_its_name:
            self._disk.sync_names()
            self._syncs_its_name = False

    def xFileSize(self) -> int:
        self._disk.powered()
        return len(self._file.seen)

    def xLock(self, _level: int) -> None:
        """One process, one connection: nobody to lock out."""

    def xUnlock(self, _level: int) -> None:
        """See :meth:`xLock`."""

    def xCheckReservedLock(self) -> bool:
        return False

    def xClose(self) -> None:
        """Closing makes nothing durable."""

    def xFileControl(self, _operation: int, _pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return int(apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE)


class PowerLossVfs(apsw.VFS):
    """Registered once per process; connections opened with it use the disk of the moment."""

    def __init__(self) -> None:
        self.disk, self.syncs_names = Disk(), True
        super().__init__(NAME, "")

    def xOpen(self, name: Any, flags: list[int]) -> _Handle:  # type: ignore[override]
        self.disk.powered()
        if name is None:  # a temporary file, which nobody looks for after a crash
            return _Handle(self.disk, File(), False)
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        file = self.disk.files.get(path)
        if file is None:
            if not flags[0] & apsw.SQLITE_OPEN_CREATE:
                raise apsw.CantOpenError("no such file")
            file = self.disk.create(path)
        flags[1] = flags[0]
        return _Handle(self.disk, file, self.syncs_names and bool(flags[0] & _SYNCS_ITS_NAME))

    def xAccess(self, path: str, _flags: int) -> bool:
        self.disk.powered()
        file = self.disk.files.get(path)
        return file is not None and bool(file.seen)  # an empty file counts as none, as in SQLite's unix layer

    def xDelete(self, path: str, sync_names: bool) -> None:
        self.disk.delete(path)
        if sync_names and self.syncs_names:
            self.disk.sync_names()

    def xFullPathname(self, path: str) -> str:
        return path
