"""A disk in memory that loses what was not synced, in every way that a real one may.

What it keeps, whatever happens: bytes of a file that a sync of that file has covered, and names that a sync of the
directory has covered. Of what was written since, a power cut leaves (:class:`Loss`):

* ``NOTHING``: none of it;
* ``PREFIX``: the first so many changes, as a disk without reordering does;
* ``SUBSET``: any of the changes, in their order, as a drive's cache does;
* ``GARBAGE``: any of them, and some of those as noise;
* ``EVERYTHING``: all of it, as ``kill -9`` does.

A change is the write of (a part of) one 512-byte sector, so that a page of 4096 bytes may be torn in eight; or a
truncation; or, in the directory, the creation or deletion of a file, each of which may be forgotten by itself: a new
file vanishes with all that was synced into it, and a deleted one comes back. Noise spoils the bytes being written and
not their neighbours in the sector ("powersafe overwrite", which SQLite takes for granted on Unix).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

SECTOR: Final = 512
T = TypeVar("T")


class PowerCut(Exception):
    """The power is off: nothing more reaches this disk, nor comes from it."""


class Loss(enum.Enum):
    """What a power cut does to the changes that were not synced."""

    NOTHING = "nothing"
    PREFIX = "prefix"
    SUBSET = "subset"
    GARBAGE = "garbage"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at an offset."""

    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        """Write; a hole before the offset is zeros."""
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def sectors(self) -> list[Write | Truncate]:
        """The same write as the disk does it: a piece for each sector."""
        pieces: list[Write | Truncate] = []
        at, end = self.offset, self.offset + len(self.data)
        while at < end:
            stop = min((at // SECTOR + 1) * SECTOR, end)
            pieces.append(Write(at, self.data[at - self.offset : stop - self.offset]))
            at = stop
        return pieces

    def noise(self, dice: Random) -> Write | Truncate:
        """Other bytes in the same place."""
        return Write(self.offset, dice.randbytes(len(self.data)))


@dataclass(frozen=True, slots=True)
class Truncate:
    """A new size."""

    size: int

    def apply(self, content: bytearray) -> None:
        """Cut, or extend with zeros."""
        del content[self.size :]
        content.extend(bytes(self.size - len(content)))

    def sectors(self) -> list[Write | Truncate]:
        """A size changes at once."""
        return [self]

    def noise(self, dice: Random) -> Write | Truncate:
        """A size is old or new, never noise."""
        return self


@dataclass(slots=True, eq=False)
class File:
    """One file's bytes: as the process sees them, as they are safe, and the changes between the two."""

    seen: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    changes: list[Write | Truncate] = field(default_factory=list)

    def change(self, change: Write | Truncate) -> None:
        """Do it where the process sees it."""
        change.apply(self.seen)
        self.changes.append(change)

    def sync(self) -> None:
        """What is seen is safe from here on."""
        if self.changes:
            self.safe = bytes(self.seen)
            self.changes.clear()

    def after(self, loss: Loss, dice: Random) -> bytearray:
        """What a power cut leaves of it."""
        if loss is Loss.EVERYTHING:
            return bytearray(self.seen)
        content = bytearray(self.safe)
        pieces = [piece for change in self.changes for piece in change.sectors()]
        for piece in _kept(pieces, loss, dice):
            spoiled = loss is Loss.GARBAGE and dice.random() < 0.4
            (piece.noise(dice) if spoiled else piece).apply(content)
        return content


def _kept(changes: list[T], loss: Loss, dice: Random) -> list[T]:
    if loss is Loss.EVERYTHING:
        return changes
    if loss is Loss.NOTHING:
        return []
    if loss is Loss.PREFIX:
        return changes[: dice.randint(0, len(changes))]
    share = dice.random()
    return [change for change in changes if dice.random() < share]


@dataclass(slots=True)
class Disk:
    """Files in one directory, until the power is cut before a chosen operation."""

    cut: int = 0  # the power goes at the cut-th writing operation; 0 never
    operations: int = 0
    off: bool = False
    files: dict[str, File] = field(default_factory=dict)  # as the process sees the directory
    safe: dict[str, File] = field(default_factory=dict)  # as it is safe
    changes: list[tuple[str, File | None]] = field(default_factory=list)  # of the directory; None deletes

    def powered(self) -> None:
        """Every operation begins here.

        Raises:
            PowerCut: the power is off.
        """
        if self.off:
            raise PowerCut

    def step(self) -> None:
        """Every operation that writes or syncs begins here.

        Raises:
            PowerCut: the power is off, or goes off now.
        """
        self.powered()
        self.operations += 1
        if self.operations == self.cut:
            self.off = True
            raise PowerCut

    def create(self, name: str) -> File:
        """Make a file; its name is not safe before :meth:`sync_names`."""
        self.step()
        self.files[name] = file = File()
        self.changes.append((name, file))
        return file

    def delete(self, name: str) -> None:
        """Delete a file; it may come back before :meth:`sync_names`."""
        self.step()
        if self.files.pop(name, None) is not None:
            self.changes.append((name, None))

    def sync_names(self) -> None:
        """Make the directory safe."""
        self.step()
        self.safe = dict(self.files)
        self.changes.clear()

    def after(self, loss: Loss, dice: Random) -> Disk:
        """The disk that the next process finds, with everything on it safe."""
        names = dict(self.safe)
        for name, file in _kept(self.changes, loss, dice):
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file
        files = {}
        for name, file in sorted(names.items()):
            content = file.after(loss, dice)
            files[name] = File(content, bytes(content))
        return Disk(files=files, safe=dict(files))
