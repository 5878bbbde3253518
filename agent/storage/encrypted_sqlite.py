"""One SQLite file of sealed rows: AES-256-GCM for every value, what it is as associated data.

What a killed process leaves behind (the database, its write-ahead log) is ciphertext. SQLCipher was rejected: no
wheel is kept for it, and sealing rows with ``cryptography`` needs no second cryptographic library. What is deleted
is overwritten in the file, and the log is cut: see :meth:`EncryptedDatabase.truncate`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import apsw
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from agent.errors import SiteStorageError
from protos.common.durable_files import flush_directory

FORMAT: Final = 3  # of the files; 1 had records and notes in one, 2 named studies, series and instances by UIDs alone
_BUSY_MS: Final = 30_000
_NONCE: Final = 12
_PART: Final = 1 << 22  # bytes of a long value in one row: so much of it is in memory three times
_NOTES: Final = "CREATE TABLE IF NOT EXISTS note(name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;"
_FAULTS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (apsw.FullError, "the disk is full, and nothing was saved: free some space and run the command again"),
    (apsw.IOError, "the disk could not be read or written, and nothing was saved: check the disk"),
    (apsw.TooBigError, "a record is larger than the vault can hold, and nothing was saved"),
    (
        apsw.BusyError,
        "another process uses the vault, and nothing was saved: run the command again later",
    ),
    (
        apsw.LockedError,
        "another process uses the vault, and nothing was saved: run the command again later",
    ),
    (apsw.CorruptError, "the vault's file is damaged: restore it from a backup"),
    (apsw.NotADBError, "the vault's file is damaged: restore it from a backup"),
    (apsw.ReadOnlyError, "the vault cannot be written: check its owner and permissions"),
    (apsw.PermissionsError, "the vault cannot be written: check its owner and permissions"),
    (apsw.CantOpenError, "the vault cannot be opened: check its owner and permissions"),
)


class VaultError(SiteStorageError):
    """The vault's key is another one, a row was changed, or the disk failed. The text names no patient."""


class OlderVaultError(VaultError):
    """An older program made the file; nothing was changed in it."""

    def __init__(self) -> None:
        """Say what to do."""
        super().__init__(
            "the vault was made by an older version of this program: stop everything, and run "
            "`lazaret-agent upgrade`, which makes a backup first"
        )


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """SQLite's errors as sentences for the operator.

    Raises:
        VaultError: with what to do.
    """
    try:
        yield
    except apsw.Error as error:
        said = next((text for kind, text in _FAULTS if isinstance(error, kind)), "")
        raise VaultError(said or f"the vault could not be used: {type(error).__name__}") from None


def derive(key: bytes, purpose: str) -> bytes:
    """A 32-byte key for one purpose, by HKDF-SHA256 (RFC 5869) with ``lazaret/PURPOSE`` as info."""
    return HKDF(SHA256(), 32, None, b"lazaret/" + purpose.encode()).derive(key)


def form_of(database: apsw.Connection) -> int:
    """The form of a sealed file: see :data:`FORMAT`; 0 where it holds nothing yet."""
    ((version,),) = database.execute("PRAGMA user_version").fetchall()
    if version:
        return int(version)
    return 1 if database.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall() else 0  # form 1 said nothing


class EncryptedDatabase:
    """A database whose values only the key opens. Notes are in every one; other tables are its user's."""

    def __init__(self, path: Path, key: bytes, schema: str = "", *, upgrading: bool = False) -> None:
        """Open or create (0600).

        Args:
            path: of the file.
            key: 32 bytes.
            schema: statements that make the tables beside ``note``; each must bear being said again.
            upgrading: take an older program's file into this form (:func:`agent.storage.projects.upgrade` alone).
        Raises:
            OlderVaultError: an older program made it.
            VaultError: the key does not open it, or a newer program made it.
        """
        self._aead, self._index = AESGCM(key), derive(key, "vault/index")
        try:  # never opened beside SQLite once it exists: closing such a descriptor would drop SQLite's own locks
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            flush_directory(path.parent)
        except FileExistsError:
            pass
        with faults():
            self._db = apsw.Connection(str(path))
        try:
            with faults():
                self._prepare(schema, upgrading)
            self._greet()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, schema: str, upgrading: bool) -> None:
        self._db.set_busy_timeout(_BUSY_MS)
        version = form_of(self._db)
        if not version <= FORMAT:
            raise VaultError("the vault was made by a newer version of this program: use that one")
        if 0 < version < FORMAT and not upgrading:
            raise OlderVaultError
        for pragma in (
            "page_size=16384",  # of a new file: images are long rows
            "journal_mode=WAL",
            "synchronous=FULL",
            "secure_delete=ON",
            "wal_autocheckpoint=4096",
            "journal_size_limit=67108864",
        ):
            self._db.execute(f"PRAGMA {pragma}").fetchall()
        if version == FORMAT:  # to open takes no lock then
            return
        with self.transaction():
            self._db.execute(_NOTES + schema)
            if not version:
                self._db.execute(f"PRAGMA user_version={FORMAT}")

    def upgraded(self) -> bool:
        """Is the file in this program's form?"""
        return form_of(self._db) == FORMAT

    def finish_upgrade(self) -> None:
        """Everything of an older form has come over: from here on the file says that it has this one."""
        self.rows(f"PRAGMA user_version={FORMAT}")

    def _greet(self) -> None:
        if self.note("opened") is None:
            self.write_note("opened", {"format": FORMAT})

    def close(self) -> None:
        """Release the file."""
        with faults():
            self._db.close()

    def seal(self, what: str, plain: bytes) -> bytes:
        """AES-256-GCM with a fresh nonce; opens as ``what`` only."""
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, plain, what.encode())

    def unseal(self, what: str, box: bytes) -> bytes:
        """What was sealed.

        Raises:
            VaultError: another key, a changed row, or a row that was moved.
        """
        try:
            return self._aead.decrypt(box[:_NONCE], box[_NONCE:], what.encode())
        except (InvalidTag, ValueError):
            raise VaultError("the vault's key is wrong, or a row was changed") from None

    def mac(self, what: str, value: bytes) -> str:
        """The name under which a row is found that may not say what it is of: HMAC-SHA256, 32 hex characters."""
        return hmac.new(self._index, what.encode() + b"\0" + value, sha256).hexdigest()[:32]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of what follows is durable when this ends, or none of it happened. The only writer meanwhile.

        Raises:
            VaultError: a full or failing disk, another process that does not end; nothing happened.
        """
        with faults():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # after some faults SQLite has rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run one statement; all rows of its answer.

        Raises:
            VaultError: a fault of the disk.
        """
        with faults():
            return list(self._db.execute(statement, values))

    def stream(self, statement: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of an answer one by one. Write nothing through this file before the last one.

        Raises:
            VaultError: a fault of the disk.
        """
        with faults():
            yield from self._db.execute(statement, values)

    def note(self, name: str) -> Any:
        """A private note (JSON value), or None."""
        for (body,) in self.rows("SELECT body FROM note WHERE name = ?", (name,)):
            return json.loads(self.unseal(f"note:{name}", body))
        return None

    def write_note(self, name: str, value: Any) -> None:
        """Store a private note, durable when this returns."""
        sealed = self.seal(f"note:{name}", json.dumps(value).encode())
        self.rows("INSERT OR REPLACE INTO note VALUES(?, ?)", (name, sealed))

    def change_note(self, name: str, change: Callable[[Any], Any]) -> None:
        """Store what ``change`` makes of a private note; no other process writes it meanwhile."""
        with self.transaction():
            self.write_note(name, change(self.note(name)))

    def blob(self, name: str) -> bytes | None:
        """Long private bytes, or None."""
        head = self.note(f"blob/{name}")
        if head is None:
            return None
        parts = [self._part(name, head["of"], number) for number in range(head["parts"])]
        return b"".join(parts)

    def blobs(self, start: str) -> tuple[str, ...]:
        """The names of all long private bytes that begin with ``start``, sorted."""
        begins = f"blob/{start}"
        named = "SELECT name FROM note WHERE substr(name, 1, ?) = ? ORDER BY name"
        return tuple(name.removeprefix("blob/") for (name,) in self.rows(named, (len(begins), begins)))

    def _part(self, name: str, version: str, number: int) -> bytes:
        ((body,),) = self.rows("SELECT body FROM note WHERE name = ?", (f"part/{name}/{number}",))
        return self.unseal(f"part:{name}/{version}/{number}", body)

    def write_blob(self, name: str, data: bytes | None) -> None:
        """Store long private bytes in the place of what was there, or nothing; durable when this returns."""
        self._replace_blob(name, lambda: data)

    def change_blob(self, name: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Store what ``change`` makes of long private bytes, or of None; no other process writes meanwhile."""
        self._replace_blob(name, lambda: change(self.blob(name)))

    def _replace_blob(self, name: str, made: Callable[[], bytes | None]) -> None:
        """SQLite holds no row above 1 GB, and a model with its optimiser may be longer: it is cut into parts."""
        with self.transaction():
            old, data = self.note(f"blob/{name}"), made()
            for number in range((old or {"parts": 0})["parts"]):
                self.rows("DELETE FROM note WHERE name = ?", (f"part/{name}/{number}",))
            self.rows("DELETE FROM note WHERE name = ?", (f"blob/{name}",))
            if data is None:
                return
            version, starts = os.urandom(16).hex(), range(0, len(data), _PART)
            for number, start in enumerate(starts):
                sealed = self.seal(f"part:{name}/{version}/{number}", data[start : start + _PART])
                self.rows("INSERT INTO note VALUES(?, ?)", (f"part/{name}/{number}", sealed))
            self.write_note(f"blob/{name}", {"of": version, "parts": len(starts)})

    def truncate(self) -> bool:
        """Bring the log into the file and cut it to nothing, so that deleted rows are in neither.

        The file needs no VACUUM: ``secure_delete`` has overwritten freed pages with zeros.

        Returns:
            False when another process still reads an older state; to be said again.
        """
        busy, _, _ = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")[0]
        return not busy


@dataclass(frozen=True, slots=True)
class EncryptedCheckpointStore:
    """Where a training from patients keeps its checkpoint: sealed, and gone with the key."""

    file: EncryptedDatabase
    name: str

    def read(self) -> bytes | None:
        """What was written last."""
        return self.file.blob(self.name)

    def write(self, data: bytes) -> None:
        """Replace it, all or nothing."""
        self.file.write_blob(self.name, data)

    def change(self, change: Callable[[bytes | None], bytes | None]) -> None:
        """Replace it by what ``change`` makes of it, all or nothing; no other process writes meanwhile."""
        self.file.change_blob(self.name, change)
        self.file.truncate()

    def clear(self) -> None:
        """Nothing of it stays, in the file or in its log."""
        self.file.write_blob(self.name, None)
        self.file.truncate()
