"""Bring a ledger's database to this program's form, so that every head signed before stays verifiable.

SQLite: a copy is upgraded and its contents are compared with the ledger byte by byte. Only then does it replace the
ledger, by one rename. An interruption leaves at most a copy that the next ``upgrade`` deletes. PostgreSQL
(:mod:`policies.ledger.backends.migrations.postgres`): everything is one transaction of the ledger's owner, compared
before it is committed. The steps are in :mod:`policies.ledger.backends.migrations.steps`. No other process may write
meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import apsw
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.ledger.backends.high_water_mark import Mark
from policies.ledger.backends.migrations.steps import sqlite_steps
from policies.ledger.backends.schema_version import FORM, require_readable
from policies.ledger.backends.sqlite import Sqlite, form_of, lock_file, mark_of
from policies.ledger.merkle import CompactRange, leaf_hash
from policies.ledger.store import LedgerUnsoundError, SealedHead, Store
from protos.common.durable_files import flush_directory, flush_file

_SUFFIX: Final = ".upgrading"  # of the copy
_BUSY_MS: Final = 2000


@dataclass(frozen=True, slots=True)
class Upgraded:
    """What an upgrade found and left."""

    before: int  # the form
    after: int
    size: int  # entries
    root: bytes  # of their tree; the same before and after


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The contents of a ledger in any form: its head, and digests over its entries and envelopes."""

    head: SealedHead | None
    size: int
    root: bytes
    entries: bytes
    envelopes: bytes


class ReadableLedger(Protocol):
    """What is compared of a ledger: a :class:`policies.ledger.store.LedgerBackend`, or rows within a transaction."""

    def bodies(self) -> Iterator[bytes]:
        """The entries in their order."""

    def envelopes(self) -> Iterator[bytes]:
        """All of them, in the order of their digests."""

    def head(self) -> SealedHead | None:
        """The head of the last commit."""


def summarise(disk: ReadableLedger) -> LedgerSummary:
    """Read all of a ledger.

    Raises:
        LedgerUnsoundError: an entry is missing, or something is unreadable.
    """
    tree, entries, envelopes = CompactRange(), hashlib.sha256(), hashlib.sha256()
    for body in disk.bodies():
        tree.append(leaf_hash(body))
        entries.update(len(body).to_bytes(8, "big") + body)
    for body in disk.envelopes():
        envelopes.update(len(body).to_bytes(8, "big") + body)
    return LedgerSummary(disk.head(), tree.size, tree.root(), entries.digest(), envelopes.digest())


def upgrade_sqlite(
    path: Path, origin: str, key: Ed25519PrivateKey, before_it: Callable[[], None] = lambda: None
) -> Upgraded:
    """Upgrade a ledger file in its place; nothing is done to one that has this program's form.

    Args:
        path: the ledger's file.
        origin: the ledger's name in checkpoints.
        key: signs its checkpoints: only with it can be told that the entries are the ones of the last commit.
        before_it: called when there is something to upgrade and nobody else writes, such as to make a backup.
    Raises:
        FileNotFoundError: there is no ledger.
        LedgerBusyError: another process has it open.
        SchemaVersionError: a newer program made it.
        LedgerUnsoundError: it does not fold, or would say something else afterwards; it is as it was.
    """
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path.name}")
    with lock_file(path.with_suffix(".lock")):
        with _reading(path) as disk:
            form = disk.form()
        require_readable(form)
        copy = path.with_name(path.name + _SUFFIX)
        _remove(copy)  # of an upgrade that was interrupted
        if form == FORM:
            with _reading(path) as disk:
                found = summarise(disk)
            return Upgraded(FORM, FORM, found.size, found.root)
        before_it()
        _alone(path)
        try:
            before = _copied(path, copy)
            _migrate(copy, form)
            head = _same(copy, before, origin, key, mark_of(path).read())
            with contextlib.closing(mark_of(path)) as mark:  # first: what is interrupted here is run again
                mark.begin(head)
            os.replace(copy, path)
        except BaseException:
            _remove(copy)
            raise
        flush_directory(path.parent)
        return Upgraded(form, FORM, before.size, before.root)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Sqlite]:
    """A ledger file of any form that is known, to read."""
    try:
        disk = Sqlite(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY))
    except apsw.Error as error:
        raise LedgerUnsoundError(f"{path.name} cannot be read ({type(error).__name__})") from None
    with contextlib.closing(disk):
        yield disk


def _alone(path: Path) -> None:
    """Bring the write-ahead log into the file, and do without one: a log left behind would be read into the new file.

    SQLite lets only the last connection leave its log, so this also finds whoever still reads.
    """
    database = apsw.Connection(str(path))
    try:
        database.set_busy_timeout(_BUSY_MS)
        mode = database.execute("PRAGMA journal_mode=DELETE").fetchall()
    except apsw.Error as error:
        raise LedgerUnsoundError(
            f"another process still reads {path.name}: stop it first ({type(error).__name__})"
        ) from None
    finally:
        database.close()
    logs = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
    if mode != [("delete",)] or any(log.exists() and log.stat().st_size for log in logs):
        raise LedgerUnsoundError(f"the log of {path.name} could not be brought into it; nothing was changed")


def _copied(path: Path, copy: Path) -> LedgerSummary:
    """The ledger as it is, into a file beside it; and what it says."""
    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
    with _reading(path) as disk:
        disk.copy(copy)
        return summarise(disk)


def _migrate(copy: Path, form: int) -> None:
    """All steps from a form to this program's, in one transaction over the copy, which has no write-ahead log."""
    with contextlib.closing(apsw.Connection(str(copy))) as database, database:
        for statement in sqlite_steps(form):
            database.execute(statement)


def _same(copy: Path, before: LedgerSummary, origin: str, key: Ed25519PrivateKey, mark: Mark | None) -> SealedHead:
    """Does the upgraded copy say what the ledger says, and does it fold under its key? Then make it durable.

    Args:
        copy: the upgraded copy.
        before: what the ledger says.
        origin: the ledger's name in checkpoints.
        key: signs its checkpoints.
        mark: the high-water mark that lies beside it already, left by an interrupted upgrade, or by a ledger of this
            form that stood there before: an older copy is no way around it.
    Returns:
        Its head, for the mark.
    """
    connection = apsw.Connection(str(copy))
    disk = Sqlite(connection)
    try:
        if form_of(connection) != FORM or summarise(disk) != before:
            raise LedgerUnsoundError("the upgraded copy says something else than the ledger; nothing was changed")
    except BaseException:
        disk.close()
        raise
    with Store(disk, origin, key, lambda: 0) as store:  # it folds, and its head is the one that was sealed
        if (store.state.size, before.root) != (before.size, summarise(disk).root):
            raise LedgerUnsoundError("the upgraded copy folds to something else; nothing was changed")
        store.reaches(() if mark is None else (mark.head,))
        head = store.head()
    flush_file(copy)
    return head


def _remove(copy: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        copy.with_name(copy.name + end).unlink(missing_ok=True)
