"""A ledger's bytes in SQLite: WAL, ``synchronous=FULL``, one writer.

Uses ``apsw``, whose SQLite has the WAL-reset fix that the standard library's may lack. Any setting weaker than FULL
loses acknowledged spends at a power cut; ``tests/policies/ledger/backends/test_sqlite_power_loss.py`` shows this for
the weaker setting. A lock file keeps a second writer out; readers may read while the writer works. Each commit is
marked in a file next to the database (:mod:`policies.ledger.backends.high_water_mark`) before it is acknowledged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import apsw
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.ledger.backends.high_water_mark import MarkFile
from policies.ledger.backends.schema_version import FORM, TABLE, parse_version, require_readable, require_writable
from policies.ledger.store import (
    Batch,
    LedgerBusyError,
    LedgerTurnedBackError,
    LedgerUnsoundError,
    SealedHead,
    StoredRecord,
    export,
    lines,
    turned_back,
)
from protos.common.durable_files import flush_directory, flush_file

SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS entry(seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS envelope(digest BLOB PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS head(one INTEGER PRIMARY KEY CHECK(one = 1), size INTEGER NOT NULL, root BLOB NOT NULL,
  seal BLOB NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS entry_is_kept BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS entry_is_fixed BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS envelope_is_kept BEFORE DELETE ON envelope
  BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS envelope_is_fixed BEFORE UPDATE ON envelope
  BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS head_is_kept BEFORE DELETE ON head BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS head_grows BEFORE UPDATE ON head WHEN NEW.size < OLD.size
  BEGIN SELECT RAISE(ABORT, 'a head only grows'); END;
CREATE TABLE IF NOT EXISTS {TABLE}(version_num VARCHAR(32) NOT NULL,
  CONSTRAINT {TABLE}_pkc PRIMARY KEY (version_num));
INSERT OR IGNORE INTO {TABLE} VALUES('{FORM}');
"""
_HEAD: Final = """INSERT INTO head VALUES(1, ?, ?, ?)
  ON CONFLICT(one) DO UPDATE SET size = excluded.size, root = excluded.root, seal = excluded.seal"""
PRAGMAS: Final = ("journal_mode=WAL", "synchronous=FULL", "trusted_schema=OFF", "mmap_size=0", "cell_size_check=ON")
CHECKPOINT: Final = 1000  # pages in the write-ahead log
PAGE: Final = 10_000  # entries read at a time


class Sqlite:
    """The :class:`policies.ledger.store.LedgerBackend` in one SQLite file."""

    def __init__(
        self, connection: apsw.Connection, lock: IO[str] | None = None, mark: MarkFile | None = None
    ) -> None:
        """Use :func:`open_sqlite` or :func:`open_read_only`; only simulators pass their own connection, unmarked."""
        self._db, self._lock, self._mark = connection, lock, mark
        self._brought_back = False
        self._one = threading.Lock()  # a connection serves one thread at a time

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        try:
            with self._one:
                return self._db.execute(query, values).fetchall()
        except (apsw.Error, UnicodeDecodeError) as error:
            raise LedgerUnsoundError(f"the database cannot be read ({type(error).__name__})") from None

    def _one_of(self, query: str, values: tuple[Any, ...]) -> bytes | None:
        rows = self._rows(query, values)
        return _bytes(rows[0][0]) if rows else None

    def form(self) -> int:
        """The database's form: see :mod:`policies.ledger.backends.schema_version`.

        Raises:
            LedgerUnsoundError: it does not say one, or cannot be read.
        """
        try:
            with self._one:
                return form_of(self._db)
        except apsw.Error as error:
            raise LedgerUnsoundError(f"the database cannot be read ({type(error).__name__})") from None

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """The entries in their order."""
        end, at = (1 << 62) if upto is None else upto, 0
        while at < end:
            query = "SELECT seq, body FROM entry WHERE seq >= ? AND seq < ? ORDER BY seq LIMIT ?"
            rows = self._rows(query, (at, end, PAGE))
            for seq, body in rows:
                if seq != at:
                    raise LedgerUnsoundError(f"entry {at} is missing")
                at += 1
                yield _bytes(body)
            if len(rows) < PAGE:
                return

    def head(self) -> SealedHead | None:
        """The head of the last commit."""
        rows = self._rows("SELECT size, root, seal FROM head")
        return SealedHead(*rows[0]) if rows else None

    def body(self, seq: int) -> bytes | None:
        """One entry."""
        return self._one_of("SELECT body FROM entry WHERE seq = ?", (seq,))

    def envelope(self, digest: bytes) -> bytes | None:
        """The envelope with that SHA-256."""
        return self._one_of("SELECT body FROM envelope WHERE digest = ?", (digest,))

    def envelopes(self) -> Iterator[bytes]:
        """All of them, in the order of their digests."""
        last = b""
        while True:
            query = "SELECT digest, body FROM envelope WHERE digest > ? ORDER BY digest LIMIT ?"
            rows = self._rows(query, (last, PAGE))
            for last, body in rows:  # noqa: B007 - the last digest is where the next page begins
                yield _bytes(body)
            if len(rows) < PAGE:
                return

    def commit(self, batch: Batch) -> None:
        """One transaction; SQLite has synced the write-ahead log, and then the mark is, when it returns."""
        head = batch.head
        with self._one, self._undone():
            self._db.execute("BEGIN IMMEDIATE")
            sealed = [(hashlib.sha256(body).digest(), body) for body in batch.envelopes]
            self._db.executemany("INSERT OR IGNORE INTO envelope VALUES(?, ?)", sealed)
            self._db.executemany("INSERT INTO entry VALUES(?, ?)", enumerate(batch.bodies, batch.first))
            self._db.execute(_HEAD, (head.size, head.root, head.seal))
            self._db.execute("COMMIT")
        if self._mark is not None:
            self._mark.write(head)

    def marks(self) -> Sequence[SealedHead]:
        """The mark in the file beside it; none where there is no entry, or an older form, and there never was one.

        Raises:
            LedgerUnsoundError: it is missing, damaged, or was damaged where a newer one may have stood.
        """
        if self._mark is None or self._brought_back:
            return ()
        mark, head = self._mark.read(), self.head()
        if mark is None and head is not None and self.form() == FORM:
            raise LedgerUnsoundError(
                f"the ledger's high-water mark ({self._mark.path.name}) is missing, so it is unknown whether "
                "entries were lost: put it back, or bring the ledger back with `restore`: deploy/docs/restore.md"
            )
        if mark is not None and mark.damaged and not (head is not None and head.size > mark.head.size):
            raise LedgerUnsoundError(
                f"the ledger's high-water mark ({self._mark.path.name}) is damaged, and a newer one may have stood "
                "there: bring the ledger back with `restore`: deploy/docs/restore.md"
            )
        return () if mark is None else (mark.head,)

    def mark(self, head: SealedHead) -> None:
        """Begin the mark's file anew; but of a ledger that came from a backup, only with its first commit.

        Raises:
            LedgerUnsoundError: it cannot be written.
        """
        if self._mark is not None and self._lock is not None and not self._brought_back:
            try:
                self._mark.begin(head)
            except OSError as error:
                raise LedgerUnsoundError(f"{self._mark.path.name} cannot be written: {error.strerror}") from None
        _keep_log(self._db, False)

    def brought_back(self) -> None:
        """For `restore` alone: a mark of before does not bind. The next commit, a new epoch's, makes another one."""
        self._brought_back = True
        _keep_log(self._db, False)

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """After a failure nothing half-written is read or blocks another."""
        try:
            yield
        except BaseException:
            if not self._db.get_autocommit():
                with contextlib.suppress(apsw.Error):
                    self._db.execute("ROLLBACK")
            raise

    def copy(self, to: Path) -> None:
        """Write everything, as of one commit, into an empty file."""
        self._rows("VACUUM INTO ?", (str(to),))

    def close(self) -> None:
        """Let go of the file and its lock; what was not committed is rolled back."""
        with self._one:
            try:
                self._db.close(force=True)
            finally:
                if self._mark is not None:
                    self._mark.close()
                if self._lock is not None:
                    self._lock.close()


def _bytes(value: object) -> bytes:
    """A blob; a page that rotted may hold anything."""
    if type(value) is not bytes:
        raise LedgerUnsoundError("the database holds something else than bytes")
    return value


def form_of(connection: apsw.Connection) -> int:
    """The form of a ledger's database: see :mod:`policies.ledger.backends.schema_version`; 0 where it holds nothing
    yet.

    Raises:
        LedgerUnsoundError: it does not say one form.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if TABLE not in tables:
        return 1 if tables & {"entry", "envelope", "head"} else 0
    said = connection.execute(f"SELECT version_num FROM {TABLE}").fetchall()  # noqa: S608 - a constant
    try:
        ((form,),) = said
        return parse_version(form)
    except ValueError:
        raise LedgerUnsoundError("the database does not say its form: it is damaged") from None


def prepare(connection: apsw.Connection) -> None:
    """The settings and tables that a writer needs.

    Raises:
        SchemaVersionError: the tables are there, in another form than this program's; nothing was changed.
    """
    form = form_of(connection)
    require_writable(form)
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").fetchall()
    connection.set_wal_hook(_checkpoint)  # instead of SQLite's own, which ignores that it failed
    if not form:
        connection.execute(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT")  # whole or not at all: a half would be an older form


def _checkpoint(connection: apsw.Connection, name: str, pages: int) -> int:
    """After a commit: an error here is an I/O error like any other, and must stop the ledger."""
    if pages >= CHECKPOINT:
        connection.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
    return apsw.SQLITE_OK


def open_sqlite(path: Path) -> Sqlite:
    """Open or create a ledger file for this process alone to write.

    Raises:
        LedgerBusyError: another process has it open for writing.
        LedgerUnsoundError: the file is no ledger, or cannot be read or written.
        LedgerTurnedBackError: it is gone, and its mark is there.
        SchemaVersionError: an older or a newer program made it.
        FileNotFoundError: its directory does not exist.
    """
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(lock_file(path.with_suffix(".lock")))
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            connection = apsw.Connection(str(path))
            undo.callback(connection.close, True)
            _keep_log(connection, True)
            # nothing is begun in the place of a ledger that is gone; a mark is made after the tables that it is of
            if not form_of(connection) and (lost := mark_of(path).path).exists():
                raise LedgerTurnedBackError(turned_back(f"the ledger is empty or missing, but {lost.name} exists"))
            prepare(connection)
        except apsw.Error as error:
            raise LedgerUnsoundError(f"{path.name} cannot be opened ({type(error).__name__})") from None
        flush_directory(path.parent)
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.pwrite(lock.fileno(), b"%d\n" % os.getpid(), 0)
        undo.pop_all()
    return Sqlite(connection, lock, mark_of(path))


def _keep_log(connection: apsw.Connection, keep: bool) -> None:
    """Until a ledger is accepted its write-ahead log stays as it was found: what is refused is the auditor's."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, keep)


def mark_of(path: Path) -> MarkFile:
    """The high-water mark of the ledger in that file."""
    return MarkFile(path.with_suffix(".mark"))


def open_read_only(path: Path) -> Sqlite:
    """Open a ledger file to read, also while another process is writing it.

    Raises:
        FileNotFoundError: there is no ledger.
        SchemaVersionError: a newer program made it.
        LedgerUnsoundError: it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path.name}")
    disk = Sqlite(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY), mark=mark_of(path))
    try:
        require_readable(disk.form())
    except BaseException:
        disk.close()
        raise
    return disk


def lock_file(path: Path) -> IO[str]:
    """Keep every other writer out until it is closed. The file may hold the number of the process that has it.

    Raises:
        LedgerBusyError: somebody else has it.
    """
    handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        found = handle.read(32).strip()
        handle.close()
        alive = found.isdigit() and os.path.exists(f"/proc/{found}")  # else it is of another container, or has ended
        who = f"process {found}" if alive else "another process"
        raise LedgerBusyError(
            f"{who} is writing the {path.stem}: wait until it has ended, or stop it first"
        ) from None
    if os.fstat(handle.fileno()).st_size:  # the number of who had it before
        with contextlib.suppress(OSError):
            os.ftruncate(handle.fileno(), 0)
    return handle


def read_lines(path: Path) -> list[StoredRecord]:
    """All records of a ledger file, while another process may be writing it.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    with contextlib.closing(open_read_only(path)) as disk:
        return lines(disk)


def backup_file(path: Path, to: Path) -> None:
    """A copy of a ledger file as of one commit, durable; also while another process is writing.

    Copying the file by other means leaves out what its write-ahead log holds.

    Raises:
        FileNotFoundError: there is no ledger.
        FileExistsError: there is something at ``to``; nothing was written.
        LedgerUnsoundError: the database cannot be read.
    """
    os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        with contextlib.closing(open_read_only(path)) as disk:
            disk.copy(to)
        flush_file(to)
    except BaseException:
        to.unlink()
        raise


def export_file(path: Path, origin: str, key: Ed25519PrivateKey, witnessed: Sequence[str] = ()) -> bytes:
    """Everything an auditor needs, as one text for ``lazaret-verify``; also while another process is writing.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    with contextlib.closing(open_read_only(path)) as disk:
        return export(disk, origin, key, witnessed=witnessed)
