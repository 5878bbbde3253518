"""The site's ledger as acts read and write it: in ``serve``, which holds it, or borrowed for one act.

One process writes a ledger. If ``serve`` takes part in rounds it is that process, and what commands and the console
ask of it at its control socket is done on the same :class:`policies.ledger.store.Store`. Otherwise no process may
hold the ledger open while idle: it is opened for writing for a single act. The console reads the file in both cases,
which readers may do at any time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import errors as agent_errors
from agent.runtime import AgentRuntime as Opened
from agent.runtime import open_runtime, recover_at_startup
from agent.storage import projects, read_only_access, site_directory
from agent.storage.site_ledger import site_policy
from policies.ledger.backends.sqlite import Sqlite, open_read_only, open_sqlite
from policies.ledger.entries import decode
from policies.ledger.merkle import leaf_hash
from policies.ledger.store import (
    Batch,
    LedgerBackend,
    LedgerBusyError,
    LedgerStoppedError,
    LedgerUnsoundError,
    SealedHead,
    Store,
    StoredRecord,
)
from policies.ledger_service import LedgerService
from policies.review.policy import Policy

_LOOKS = 5  # at a file that another process may be committing to


class LedgerMissingError(agent_errors.SiteConfigError):
    """There is nothing to show yet."""


class SiteLedger(Protocol):
    """The site's ledger."""

    def read(self) -> Store:
        """The ledger as of now, to look at. Append nothing to it."""

    def write(self) -> AbstractContextManager[Store]:
        """The ledger, to write into: one at a time."""

    def work(
        self, project: str = site_directory.MAIN, *, greeted: bool = True, patience_s: float = -1.0
    ) -> AbstractContextManager[Opened]:
        """Ledger, vault and gateway client together, for one action at a time.

        Args:
            project: whose vault.
            greeted: the coordinator must have answered before; not for what ends at this site's own ledger.
            patience_s: most seconds to wait for another action, which may be an upload of hours; -1: until it ends.
        Raises:
            LedgerBusyError: it has not ended by then.
        """


@dataclass(frozen=True, slots=True)
class Site:
    """What an act works with."""

    home: site_directory.SiteDirectory
    ledger: SiteLedger
    log: Any
    runs_jobs: bool = False  # this process does: see agent.service.job_runner
    told: Callable[[], dict[str, Any]] = lambda: {"processes": [], "received": None}  # service.process_monitoring


@contextlib.contextmanager
def _turn(one: threading.RLock, patience_s: float) -> Iterator[None]:
    if not one.acquire(timeout=patience_s):
        raise LedgerBusyError("another command of this site is at work: try again when it has ended")
    try:
        yield
    finally:
        one.release()


class SharedLedger:
    """The ledger that this process holds anyway."""

    def __init__(self, runtime: Opened) -> None:
        """``runtime``: opened by ``serve``, and open for longer than the control socket."""
        self._runtime, self._one = runtime, threading.RLock()

    def _policy(self) -> Policy:
        return site_policy(self._runtime.home, self.read())

    def read(self) -> Store:
        """The store itself: it may be read from any thread."""
        return self._runtime.site.ledger.store

    @contextlib.contextmanager
    def write(self) -> Iterator[Store]:
        """The same."""
        with self._one:
            yield self.read()

    @contextlib.contextmanager
    def work(
        self, project: str = site_directory.MAIN, *, greeted: bool = True, patience_s: float = -1.0
    ) -> Iterator[Opened]:
        """The same runtime with a vault of its own: one connection serves one thread, and SQLite separates two."""
        with _turn(self._one, patience_s):
            if greeted:  # `serve` keeps in touch, and the last time may be a while ago
                self._runtime.gateway.hello()
            vault = projects.open_vault(self._runtime.home, project)
            try:
                # the policy of now, which an amendment may have changed since `serve` began
                ledger = LedgerService(self.read(), lambda _site: self._policy())
                yield replace(
                    self._runtime, vault=vault, site=replace(self._runtime.site, vault=vault, ledger=ledger)
                )
            finally:
                vault.close()


class _Looking:
    """A ledger's file as a :class:`policies.ledger.store.LedgerBackend` that is opened for each look, and never
    written.

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
                disk = open_read_only(self._path)
            except FileNotFoundError:
                raise LedgerMissingError("there is no ledger yet: enrol the site, and appoint its persons") from None
            with contextlib.closing(disk):
                yield disk

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """All at once: the file is closed when they are given out."""
        with self._open() as disk:
            found = list(disk.bodies(upto))
        return iter(found)

    def head(self) -> SealedHead | None:
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
        raise LedgerStoppedError("a ledger that is looked at is not written")

    def marks(self) -> Sequence[SealedHead]:
        """What the ledger has acknowledged."""
        with self._open() as disk:
            return disk.marks()

    def mark(self, head: SealedHead) -> None:
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

    def grown(self, head: SealedHead | None) -> bool:
        """Read the entries up to ``head``; False if the log does not continue from the known state, so fold from the
        start.

        A size tells nothing of what is in a file: another ledger in its place may be just as long. The new entries
        count only where the tree over the folded ones and them has the root of the head, under this key's seal.
        """
        if head is None or self.at is None or head.size < self.at.size:
            return False
        bodies = self._looking.some(range(self.at.size, head.size))
        if None in bodies:
            return False
        with self._reviewing:  # no page reads between two entries of a commit
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


def _silent(_step: str, _detail: str) -> None:
    """Nobody reads along."""


class BorrowedLedger:
    """The ledger's file, opened to write for as long as one act takes."""

    def __init__(self, home: site_directory.SiteDirectory, say: Callable[[str, str], None] = _silent) -> None:
        """Nothing is opened yet. ``say``: hears of each step and its detail."""
        self._say = say
        self._home, self._one, self._opening = home, threading.RLock(), threading.Lock()
        self._disk = _Looking(home.root / "ledger.db", self._opening)
        self._folding = threading.Lock()
        self._store: _Fold | None = None

    def disk(self) -> LedgerBackend:
        """The file, to look at: for an index beside it."""
        return self._disk

    def lines(self, seqs: Sequence[int]) -> list[StoredRecord]:
        """Through one look at the file.

        Raises:
            LedgerUnsoundError: an entry is missing.
        """
        bodies = dict(zip(seqs, self._disk.some(seqs), strict=True))
        if missing := [seq for seq, body in bodies.items() if body is None]:
            raise LedgerUnsoundError(f"entry {missing[0]} is missing")
        return [StoredRecord(seq, decode(body)) for seq, body in bodies.items() if body is not None]

    def read(self) -> Store:
        """The state of the file now: new entries are added, and a different history is folded from the start.

        Raises:
            LedgerMissingError: the site has not begun one.
            LedgerUnsoundError: it does not fold.
        """
        with self._folding:
            for attempt in range(_LOOKS):
                head, known = self._disk.head(), self._store
                if known is not None and head is not None and (head == known.at or known.grown(head)):
                    return known
                self._store = None
                try:
                    self._store = _Fold(self._disk, self._origin(), self._home.sign_key())
                except LedgerUnsoundError:  # perhaps it looked between two parts of somebody's commit
                    if attempt == _LOOKS - 1:
                        raise
                    time.sleep(0.05)
                else:
                    return self._store
        raise AssertionError("the last look returns or raises")

    def _origin(self) -> str:
        return site_directory.origin(self._home.settings().site)

    @contextlib.contextmanager
    def write(self) -> Iterator[Store]:
        """The ledger, while no other process has it.

        Raises:
            LedgerBusyError: another command has; it is said again later.
            SiteConfigError: it is not the one that the site's vault knows.
        """
        with self._one:
            with self._opening:
                disk = open_sqlite(self._home.root / "ledger.db")
            with Store(disk, self._origin(), self._home.sign_key(), _now) as store:
                read_only_access.compare(self._home, store)  # in place of a lost ledger no other one is begun
                yield store

    @contextlib.contextmanager
    def work(
        self, project: str = site_directory.MAIN, *, greeted: bool = True, patience_s: float = -1.0
    ) -> Iterator[Opened]:
        """A runtime as every command opens it, after the coordinator was greeted and what was interrupted has an end.

        Raises:
            LedgerBusyError, SiteConfigError, CoordinatorUnreachableError: as the commands do.
        """
        with _turn(self._one, patience_s), contextlib.ExitStack() as stack:
            with self._opening:
                runtime = stack.enter_context(open_runtime(self._home.root, self._say, project))
            if greeted:
                recover_at_startup(runtime)
            yield runtime


def _now() -> int:
    return int(time.time())
