"""The high-water mark of a ledger file: size and root of its last commit, kept beside it, synced before an answer.

A ledger that lost its write-ahead log, or was replaced by an older copy, is consistent in itself: it only ends too
early, and would grant the same budget twice. The mark reveals this. It is a separate file, so neither SQLite nor a
copy of ``ledger.db`` moves it back.

One commit writes one of two slots, in turn, and syncs it: no name changes, so that one ``fdatasync`` is all it costs.
A slot that a crash tore is told by its checksum; the other one holds the commit before. The root binds the epoch,
since the entry that opened it is a leaf of the tree.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from policies.ledger.store import LedgerUnsoundError, SealedHead
from protos.common.durable_files import flush_directory

SLOT: Final = 4096  # bytes: each slot lies in a sector, and in a page, of its own
_MAGIC: Final = b"lazaret ledger mark/1\n\0\0"
_BODY: Final = struct.Struct(">24sQQ32s32s")  # what it is, the writing's number, size, root, seal
_SUM: Final = 32  # SHA-256 over the body
_DAMAGED: Final = "the ledger's high-water mark ({}) cannot be read, so it is unknown whether entries were lost"


@dataclass(frozen=True, slots=True)
class Mark:
    """The contents of the file."""

    head: SealedHead
    damaged: bool  # a slot cannot be read: a crash tore it, or it is older damage; a newer head may have stood there


class MarkFile:
    """The file; one process writes it, others may look."""

    def __init__(self, path: Path) -> None:
        """Nothing is opened yet."""
        self.path = path
        self._file: int | None = None
        self._number = 0

    def read(self) -> Mark | None:
        """The contents of the file; None if there is none.

        Raises:
            LedgerUnsoundError: no slot of it can be read.
        """
        for _ in range(3):  # a writer may be in the middle of one slot
            found = self._slots()
            if found is None:
                return None
            if len(found) == 2:
                break
        if not found:
            raise LedgerUnsoundError(_DAMAGED.format(self.path.name))
        return Mark(max(found, key=lambda one: one[0])[1], len(found) < 2)

    def _slots(self) -> list[tuple[int, SealedHead]] | None:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            raise LedgerUnsoundError(_DAMAGED.format(self.path.name)) from None
        slots = (raw[at : at + _BODY.size + _SUM] for at in (0, SLOT))
        return [one for slot in slots if (one := _decoded(slot)) is not None]

    def begin(self, head: SealedHead) -> None:
        """Say ``head``, durable when this returns; a file that says it already goes on as it is.

        Raises:
            OSError: it cannot be written.
        """
        self.close()
        found = self._slots() or []
        number, said = max(found, key=lambda one: one[0], default=(0, None))
        if len(found) == 2 and said == head:
            self._go_on(number)
        else:
            self._begin_anew(head)

    def _go_on(self, number: int) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            os.fdatasync(file)  # who wrote it may have died before it was on the disk
        except BaseException:
            os.close(file)
            raise
        self._file, self._number = file, number

    def _begin_anew(self, head: SealedHead) -> None:
        """Put a new file in the old one's place."""
        part = self.path.with_name(self.path.name + ".part")
        file = os.open(part, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            both = _encoded(1, head).ljust(SLOT, b"\0") + _encoded(2, head).ljust(SLOT, b"\0")
            _whole(os.pwrite(file, both, 0), both)
            os.fsync(file)
            os.replace(part, self.path)
            flush_directory(self.path.parent)
        except BaseException:
            os.close(file)
            raise
        self._file, self._number = file, 2

    def write(self, head: SealedHead) -> None:
        """Say ``head`` from here on, durable when this returns.

        Raises:
            OSError: it could not be written; the file may say this head or the one before.
        """
        if self._file is None:
            self.begin(head)
            return
        self._number += 1
        slot = _encoded(self._number, head)
        _whole(os.pwrite(self._file, slot, SLOT * (1 - self._number % 2)), slot)
        os.fdatasync(self._file)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was written is synced
                os.close(self._file)
            self._file = None


def _whole(written: int, what: bytes) -> None:
    if written != len(what):
        raise OSError(errno.ENOSPC, "the mark was written in part")


def _encoded(number: int, head: SealedHead) -> bytes:
    body = _BODY.pack(_MAGIC, number, head.size, head.root, head.seal)
    return body + hashlib.sha256(body).digest()


def _decoded(slot: bytes) -> tuple[int, SealedHead] | None:
    """The writing's number and the head; None for what is not whole."""
    body = slot[: _BODY.size]
    if len(slot) != _BODY.size + _SUM or hashlib.sha256(body).digest() != slot[_BODY.size :]:
        return None
    magic, number, size, root, seal = _BODY.unpack(body)
    return (number, SealedHead(size, root, seal)) if magic == _MAGIC else None
