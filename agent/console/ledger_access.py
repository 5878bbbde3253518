"""The site's ledger as the console reads and writes it: beside ``serve``, which holds it, or borrowed for one act.

One process writes a ledger. Where ``serve`` takes part in rounds it is that process, and the console works inside it
over the same :class:`policies.store.Store`. Everywhere else nobody should hold the ledger while nothing is written:
``release`` and ``ledger`` could not be typed. There the console looks at the file, which readers may do at any time,
and opens it for the one act that somebody asked for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.edges import home as homes
from agent.edges import looking, projects
from agent.edges.own_ledger import site_policy
from policies.entries import decode
from policies.merkle import leaf_hash
from policies.policy import Policy
from policies.register import Register
from policies.sqlite import Sqlite, look, open_sqlite
from policies.store import Batch, Disk, Head, LedgerStopped, LedgerUnsound, Line, Store

if TYPE_CHECKING:
    from agent.desk import Desk as Opened  # torch: two seconds that no page needs

_LOOKS = 5  # at a file that another process may be committing to


class NoLedger(homes.BadSite):
    """There is nothing to show yet."""


class Books(Protocol):
    """The site's ledger."""

    def read(self) -> Store:
        """The ledger as of now, to look at. Append nothing to it."""

    def lines(self, seqs: Sequence[int]) -> list[Line]:
        """Some entries, all at once."""

    def disk(self) -> Disk:
        """The ledger's file, to look at: for an index beside it."""

    def write(self) -> AbstractContextManager[Store]:
        """The ledger, to write into: one at a time."""

    def work(self, project: str = homes.MAIN, *, greeted: bool = True) -> AbstractContextManager[Opened]:
        """Ledger, vault and door, for what takes all of them: one at a time.

        Args:
            project: whose vault.
            greeted: the coordinator must have answered before; not for what ends at this site's own books.
        """


class Held:
    """The ledger that this process holds anyway."""

    def __init__(self, desk: Opened) -> None:
        """``desk``: opened by ``serve``, and open for longer than the console."""
        self._desk, self._one = desk, threading.RLock()

    def _policy(self) -> Policy:
        return site_policy(self._desk.home, self.read())

    def read(self) -> Store:
        """The store itself: it may be read from any thread."""
        return self._desk.site.books.store

    def lines(self, seqs: Sequence[int]) -> list[Line]:
        """Through the connection that is open anyway."""
        return [self.read().line(seq) for seq in seqs]

    def disk(self) -> Disk:
        """The ledger's file, to look at beside the one that this process holds."""
        return look(self._desk.home.root / "ledger.db")

    @contextlib.contextmanager
    def write(self) -> Iterator[Store]:
        """The same."""
        with self._one:
            yield self.read()

    @contextlib.contextmanager
    def work(self, project: str = homes.MAIN, *, greeted: bool = True) -> Iterator[Opened]:
        """The same desk with a vault of its own: a connection serves one thread at a time, SQLite keeps two apart."""
        del greeted  # `serve` keeps in touch
        with self._one:
            vault = projects.open_vault(self._desk.home, project)
            try:
                # the policy of now, which an amendment may have changed since `serve` began
                books = Register(self.read(), lambda _site: self._policy())
                yield replace(self._desk, vault=vault, site=replace(self._desk.site, vault=vault, books=books))
            finally:
                vault.close()


class _Looking:
    """A ledger's file as a :class:`policies.store.Disk` that is opened for each look, and never written.

    A connection that stays open would lose its locks: whoever opens the ledger to write, in this very process, closes
    a descriptor of the same file, and POSIX drops every lock that the process has on it (fcntl(2), close).
    """

    def __init__(self, path: Path, opening: threading.Lock) -> None:
        """``opening``: held by whoever opens the file to write, while it does."""
        self._path, self._opening = path, opening

    @contextlib.contextmanager
    def _open(self) -> Iterator[Sqlite]:
        with self._opening:
            try:
                disk = look(self._path)
            except FileNotFoundError:
                raise NoLedger("there is no ledger yet: enrol the site, and appoint its persons") from None
            with contextlib.closing(disk):
                yield disk

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """All at once: the file is closed when they are given out."""
        with self._open() as disk:
            found = list(disk.bodies(upto))
        return iter(found)

    def head(self) -> Head | None:
        """Of the last commit."""
        with self._open() as disk:
            return disk.head()

    def body(self, seq: int) -> bytes | None:
        """One entry."""
        return self.some((seq,))[0]

    def some(self, seqs: Sequence[int]) -> list[bytes | None]:
        """Several entries; the file is opened once for all of them."""
        with self._open() as disk:
            return [disk.body(seq) for seq in seqs]

    def envelope(self, digest: bytes) -> bytes | None:
        """The envelope with that SHA-256."""
        with self._open() as disk:
            return disk.envelope(digest)

    def envelopes(self) -> Iterator[bytes]:
        """All of them."""
        with self._open() as disk:
            found = list(disk.envelopes())
        return iter(found)

    def commit(self, batch: Batch) -> None:
        """Never."""
        raise LedgerStopped("a ledger that is looked at is not written")

    def marks(self) -> Sequence[Head]:
        """What the ledger has acknowledged."""
        with self._open() as disk:
            return disk.marks()

    def mark(self, head: Head) -> None:
        """Nothing is answered from here that the file does not hold."""

    def close(self) -> None:
        """Nothing is open."""


class _Fold(Store):
    """The fold of a file that other processes write: what they append is folded behind the rest."""

    def __init__(self, disk: _Looking, origin: str, key: Ed25519PrivateKey) -> None:
        """Fold all of it. Appends are refused by the disk."""
        super().__init__(disk, origin, key, _now)
        self._looking = disk
        self.at = self._head() if self.state.size else None  # the head that was folded

    def grown(self, head: Head | None) -> bool:
        """Take what was appended up to ``head``; False: it is not known to go on from here, so fold anew.

        A size tells nothing of what is in a file: another ledger in its place may be just as long. The new entries
        count only where the tree over the folded ones and them has the root of the head, under this key's seal.
        """
        if head is None or self.at is None or head.size < self.at.size:
            return False
        bodies = self._looking.some(range(self.at.size, head.size))
        if None in bodies:
            return False
        with self._books:  # no page reads between two entries of a commit
            for body in bodies:
                self._tree.append(leaf_hash(body or b""))
            if self._head() != head:
                return False
            try:
                for body in bodies:
                    self.state.apply(decode(body or b""))
            except ValueError:
                return False
            self._durable, self.at = head.size, head
        return True


class Lent:
    """The ledger's file, opened to write for as long as one act takes."""

    def __init__(self, home: homes.Home) -> None:
        """Nothing is opened yet."""
        self._home, self._one, self._opening = home, threading.RLock(), threading.Lock()
        self._disk = _Looking(home.root / "ledger.db", self._opening)
        self._folding = threading.Lock()
        self._store: _Fold | None = None

    def disk(self) -> Disk:
        """The file, to look at: for an index beside it."""
        return self._disk

    def lines(self, seqs: Sequence[int]) -> list[Line]:
        """Through one look at the file.

        Raises:
            LedgerUnsound: an entry is missing.
        """
        bodies = dict(zip(seqs, self._disk.some(seqs), strict=True))
        if missing := [seq for seq, body in bodies.items() if body is None]:
            raise LedgerUnsound(f"entry {missing[0]} is missing")
        return [Line(seq, decode(body)) for seq, body in bodies.items() if body is not None]

    def read(self) -> Store:
        """The fold of what is in the file now: what somebody has appended is added, another history folded anew.

        Raises:
            NoLedger: the site has not begun one.
            LedgerUnsound: it does not fold.
        """
        with self._folding:
            for attempt in range(_LOOKS):
                head, known = self._disk.head(), self._store
                if known is not None and head is not None and (head == known.at or known.grown(head)):
                    return known
                self._store = None
                try:
                    self._store = _Fold(self._disk, self._origin(), self._home.sign_key())
                except LedgerUnsound:  # perhaps it looked between two parts of somebody's commit
                    if attempt == _LOOKS - 1:
                        raise
                    time.sleep(0.05)
                else:
                    return self._store
        raise AssertionError("the last look returns or raises")

    def _origin(self) -> str:
        return homes.origin(self._home.settings().site)

    @contextlib.contextmanager
    def write(self) -> Iterator[Store]:
        """The ledger, while no other process has it.

        Raises:
            LedgerBusy: another command has; it is said again later.
            BadSite: it is not the one that the site's vault knows.
        """
        with self._one:
            with self._opening:
                disk = open_sqlite(self._home.root / "ledger.db")
            with Store(disk, self._origin(), self._home.sign_key(), _now) as store:
                looking.compare(self._home, store)  # in place of a lost ledger no other one is begun
                yield store

    @contextlib.contextmanager
    def work(self, project: str = homes.MAIN, *, greeted: bool = True) -> Iterator[Opened]:
        """A desk as every command opens it, after the coordinator was greeted and what was interrupted has an end.

        Raises:
            LedgerBusy, BadSite, Unreachable: as the commands do.
        """
        from agent.desk import open_desk, start_anew  # noqa: PLC0415 - torch: two seconds that no page needs

        with self._one, contextlib.ExitStack() as stack:
            with self._opening:
                desk = stack.enter_context(open_desk(self._home.root, lambda _name, _detail: None, project))
            if greeted:
                start_anew(desk)
            yield desk


def _now() -> int:
    return int(time.time())
