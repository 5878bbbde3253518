"""Bring a ledger's database to this program's form, so that every head signed before stays verifiable.

SQLite: a copy is upgraded and compared with the ledger, byte by byte in what it says, and only then takes its place
by one renaming; until then the ledger is what it was, and whatever interrupts it leaves at most a copy that the next
``upgrade`` throws away. PostgreSQL (:mod:`policies.migrations.owner`): all of it is one transaction of the ledger's
owner, compared before it is committed. Alembic decides which steps there are; nobody writes meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import apsw
import sqlalchemy
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.forms import FORM, TABLE, readable
from policies.high_water_mark import Mark
from policies.merkle import CompactRange, leaf_hash
from policies.sqlite import Sqlite, form_of, lock_file, mark_of
from policies.store import Head, LedgerUnsound, Store

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
class Said:
    """Everything that a ledger says, whatever its form: its head, and digests over its entries and envelopes."""

    head: Head | None
    size: int
    root: bytes
    entries: bytes
    envelopes: bytes


class Told(Protocol):
    """What is compared of a ledger: a :class:`policies.store.Disk`, or rows within a transaction."""

    def bodies(self) -> Iterator[bytes]:
        """The entries in their order."""

    def envelopes(self) -> Iterator[bytes]:
        """All of them, in the order of their digests."""

    def head(self) -> Head | None:
        """The head of the last commit."""


def said(disk: Told) -> Said:
    """Read all of a ledger.

    Raises:
        LedgerUnsound: an entry is missing, or something is unreadable.
    """
    tree, entries, envelopes = CompactRange(), hashlib.sha256(), hashlib.sha256()
    for body in disk.bodies():
        tree.append(leaf_hash(body))
        entries.update(len(body).to_bytes(8, "big") + body)
    for body in disk.envelopes():
        envelopes.update(len(body).to_bytes(8, "big") + body)
    return Said(disk.head(), tree.size, tree.root(), entries.digest(), envelopes.digest())


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
        LedgerBusy: another process has it open.
        WrongForm: a newer program made it.
        LedgerUnsound: it does not fold, or would say something else afterwards; it is as it was.
    """
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path.name}")
    with lock_file(path.with_suffix(".lock")):
        form = _form(path)
        readable(form)
        copy = path.with_name(path.name + _SUFFIX)
        _remove(copy)  # of an upgrade that was interrupted
        if form == FORM:
            return _unchanged(path)
        before_it()
        _alone(path)
        try:
            before = _copied(path, copy)
            _migrate(_engine(copy), form)
            head = _same(copy, before, origin, key, mark_of(path).read())
            with contextlib.closing(mark_of(path)) as mark:  # first: what is interrupted here is run again
                mark.begin(head)
            os.replace(copy, path)
        except BaseException:
            _remove(copy)
            raise
        _synced(path.parent)
        return Upgraded(form, FORM, before.size, before.root)


def _form(path: Path) -> int:
    with _reading(path) as disk:
        return disk.form()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Sqlite]:
    """A ledger file of any form that is known, to read."""
    try:
        disk = Sqlite(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY))
    except apsw.Error as error:
        raise LedgerUnsound(f"{path.name} cannot be read ({type(error).__name__})") from None
    with contextlib.closing(disk):
        yield disk


def _unchanged(path: Path) -> Upgraded:
    with _reading(path) as disk:
        found = said(disk)
    return Upgraded(FORM, FORM, found.size, found.root)


def _alone(path: Path) -> None:
    """Bring the write-ahead log into the file, and do without one: a log left behind would be read into the new file.

    SQLite lets only the last connection leave its log, so this also finds whoever still reads.
    """
    database = apsw.Connection(str(path))
    try:
        database.set_busy_timeout(_BUSY_MS)
        mode = database.execute("PRAGMA journal_mode=DELETE").fetchall()
    except apsw.Error as error:
        raise LedgerUnsound(f"somebody still reads {path.name}: stop it first ({type(error).__name__})") from None
    finally:
        database.close()
    logs = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
    if mode != [("delete",)] or any(log.exists() and log.stat().st_size for log in logs):
        raise LedgerUnsound(f"the log of {path.name} could not be brought into it; nothing was changed")


def _copied(path: Path, copy: Path) -> Said:
    """The ledger as it is, into a file beside it; and what it says."""
    os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
    with _reading(path) as disk:
        disk.copy(copy)
        return said(disk)


def _engine(path: Path) -> sqlalchemy.Engine:
    """SQLAlchemy over the standard library's SQLite: one connection, no write-ahead log, and a copy.

    Its defect with write-ahead logs (see policies/sqlite.py) cannot meet a file that has none.
    """
    connect = lambda: sqlite3.connect(path, isolation_level=None)  # noqa: E731 - what SQLAlchemy calls
    return sqlalchemy.create_engine("sqlite+pysqlite://", creator=connect, poolclass=sqlalchemy.StaticPool)


def _migrate(engine: sqlalchemy.Engine, form: int, schema: str | None = None) -> None:
    """All steps from a form to this program's, in one transaction."""
    try:
        with engine.begin() as connection:
            migrate(connection, form, schema)
    finally:
        engine.dispose()


def migrate(connection: Any, form: int, schema: str | None = None, to: int = FORM) -> None:
    """Alembic's steps over an open transaction.

    Args:
        connection: SQLAlchemy's.
        form: the database's, as found: form 1 does not say it, so it is said here first.
        schema: PostgreSQL's; None in SQLite.
        to: the form to reach.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)

    def stamp(_now: Any, _context: Any) -> Any:
        return script._stamp_revs(str(form), ())

    def step(now: Any, _context: Any) -> Any:
        return script._upgrade_revs(str(to), now)

    for act in ([stamp] if form == 1 else []) + [step]:
        with EnvironmentContext(config, script, fn=act) as environment:
            environment.configure(
                connection=connection, version_table=TABLE, version_table_schema=schema, transactional_ddl=True
            )
            environment.run_migrations()


def _same(copy: Path, before: Said, origin: str, key: Ed25519PrivateKey, mark: Mark | None) -> Head:
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
        if form_of(connection) != FORM or said(disk) != before:
            raise LedgerUnsound("the upgraded copy says something else than the ledger; nothing was changed")
    except BaseException:
        disk.close()
        raise
    with Store(disk, origin, key, lambda: 0) as store:  # it folds, and its head is the one that was sealed
        if (store.state.size, before.root) != (before.size, said(disk).root):
            raise LedgerUnsound("the upgraded copy folds to something else; nothing was changed")
        store.reaches(() if mark is None else (mark.head,))
        head = store.head()
    with copy.open("rb") as whole:
        os.fsync(whole.fileno())
    return head


def _remove(copy: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        copy.with_name(copy.name + end).unlink(missing_ok=True)


def _synced(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
