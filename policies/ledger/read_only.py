"""A ledger folded as its writer would fold it at a start: nothing is written, and another process may write.

A doctor asks so, before `serve` would refuse. The head is read first, and as many entries as it counts: what is
committed meanwhile is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.ledger.store import Batch, LedgerBackend, LedgerStoppedError, LedgerUnsoundError, SealedHead, Store

_EACH: Final = 5_000  # entries between two words of how far it is
Heed = Callable[[int, int], None]  # entries folded so far, and of how many


def _unheard(_done: int, _all: int) -> None:
    """Nobody watches."""


class PinnedBackend:
    """A :class:`policies.ledger.store.LedgerBackend` as of the head that it had first, and never written."""

    def __init__(self, disk: LedgerBackend, heed: Heed = _unheard) -> None:
        """Read the head; ``disk`` is closed with this, ``heed`` hears how far the entries are read."""
        self._disk, self._heed = disk, heed
        self._marks = tuple(disk.marks())  # before the head, which is at it or beyond
        self._head = disk.head()

    @property
    def size(self) -> int:
        """How many entries the head counts."""
        return self._head.size if self._head else 0

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """The entries that the head counts.

        Raises:
            LedgerUnsoundError: one is missing; or there are more, and no newer head that counts them.
        """
        size = self.size if upto is None else min(upto, self.size)
        for done, body in enumerate(self._disk.bodies(size)):
            if not done % _EACH:
                self._heed(done, size)
            yield body
        more = self._disk.body(self.size) is not None  # asked first: a commit brings entries and head at once
        if more and self._disk.head() == self._head:
            raise LedgerUnsoundError("there are more entries than this key committed")

    def head(self) -> SealedHead | None:
        """As it was first."""
        return self._head

    def body(self, seq: int) -> bytes | None:
        """One entry."""
        return self._disk.body(seq) if seq < self.size else None

    def envelope(self, digest: bytes) -> bytes | None:
        """The envelope with that SHA-256."""
        return self._disk.envelope(digest)

    def envelopes(self) -> Iterator[bytes]:
        """All of them, in the order of their digests."""
        return self._disk.envelopes()

    def commit(self, _batch: Batch) -> None:
        """Never: who reads does not write."""
        raise LedgerStoppedError("this ledger was opened to be read")

    def marks(self) -> Sequence[SealedHead]:
        """As they were just before the head was read."""
        return self._marks

    def mark(self, _head: SealedHead) -> None:
        """Nothing is answered from here."""

    def close(self) -> None:
        """Let go of it."""
        self._disk.close()


def read_store(disk: LedgerBackend, origin: str, key: Ed25519PrivateKey, heed: Heed = _unheard) -> Store:
    """The fold of what a disk holds, with which nothing can be appended; the disk is closed with it.

    Raises:
        LedgerUnsoundError: a start would refuse it, for the reason that it would give.
    """
    try:
        pinned = PinnedBackend(disk, heed)
    except BaseException:
        disk.close()
        raise
    return Store(pinned, origin, key, lambda: 0)
