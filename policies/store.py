"""The one impure module of the law: a ledger in SQLite, one writer, durable before visible.

WAL with ``synchronous=FULL`` (anything weaker loses acknowledged spends at a power cut), through ``apsw``, whose
SQLite has the WAL-reset fix that the standard library's may lack. A lock file keeps a second writer out, and
readers may look while the writer works. The entries are the truth: the state in memory is their fold, made
again at every start. Any error while writing stops the ledger; a restart replays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import apsw
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.cbor import MalformedEntry
from policies.ledger import Entry, InvalidEntry, KeyReused, Record, State, decode, encode, fingerprint
from policies.merkle import Checkpoint, CompactRange, leaf_hash, open_checkpoint, sign_checkpoint
from policies.verify import Export

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS entry(seq INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS envelope(digest BLOB PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS head(one INTEGER PRIMARY KEY CHECK(one = 1), note TEXT NOT NULL) STRICT;
CREATE TRIGGER IF NOT EXISTS entry_is_kept BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS entry_is_fixed BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""


class LedgerBusy(RuntimeError):
    """Another process writes this ledger."""


class LedgerUnsound(RuntimeError):
    """What is on disk does not fold; nothing may be appended before an audit."""


class LedgerStopped(RuntimeError):
    """A write failed. What the disk holds is unknown until the process is restarted."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Entries to append together under one idempotency key, with the envelopes they rest on."""

    entries: tuple[Entry, ...]
    envelopes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """A record in its place."""

    seq: int
    record: Record


def read_lines(path: Path) -> list[Line]:
    """All records of a ledger file, while another process may be writing it.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path.name}")
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    with contextlib.closing(db):
        return [Line(seq, decode(body)) for seq, body in db.execute("SELECT seq, body FROM entry ORDER BY seq")]


class Store:
    """A ledger that this process alone appends to."""

    def __init__(self, path: Path, origin: str, key: Ed25519PrivateKey, clock: Callable[[], int]) -> None:
        """Open or create the ledger and fold it.

        Args:
            path: the database file; its directory must exist.
            origin: the name in checkpoints (C2SP), for example ``lazaret/site-a``.
            key: signs checkpoints.
            clock: seconds since 1970, for the ``at`` of records; no decision rests on it.
        Raises:
            LedgerBusy: another process has it open for writing.
            LedgerUnsound: the entries on disk do not fold.
        """
        self.origin, self._key, self._clock = origin, key, clock
        self._mutex = threading.RLock()
        self._stopped = False
        self._lock = _lock_file(path.with_suffix(".lock"))
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = apsw.Connection(str(path))
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "trusted_schema=OFF", "mmap_size=0"):
            self._db.execute(f"PRAGMA {pragma}").fetchall()
        self._db.execute(SCHEMA)
        self.state, self._tree = State(), CompactRange()
        self._fold()

    def _fold(self) -> None:
        """Fold what is on disk aside, then put it in place: nobody sees half a ledger."""
        state, tree = State(), CompactRange()
        try:
            for seq, body in self._db.execute("SELECT seq, body FROM entry ORDER BY seq"):
                if seq != state.size:
                    raise InvalidEntry("an entry is missing")
                state.apply(decode(body))
                tree.append(leaf_hash(body))
            self.state, self._tree = state, tree
            self._compare_head()
        except ValueError as error:
            self.close()
            raise LedgerUnsound(f"entry {state.size} of {self.origin}: {error}") from None

    def _compare_head(self) -> None:
        """What is on disk must be exactly what this key signed last: no cut tail, no edited last entry."""
        notes = [note for (note,) in self._db.execute("SELECT note FROM head")]
        if not notes and not self.state.size:
            return
        head = open_checkpoint(notes[0] if notes else "", self.public)
        if head != Checkpoint(self.origin, self._tree.size, self._tree.root()):
            raise InvalidEntry("the entries are not the ones under the signed head")

    def close(self) -> None:
        """Release the file and its lock."""
        self._db.close()
        self._lock.close()

    def __enter__(self) -> Store:
        """Use as a context."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close at the end of the context."""
        self.close()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[State]:
        """Hold the writer's place: nothing is appended by another thread between a review and its entry."""
        with self._mutex:
            yield self.state

    def append(self, key: str, draft: Draft) -> list[Line]:
        """Append the draft's entries, all or none, durable when this returns.

        A key that is known returns the lines it made before, if the content is the same (exactly once).

        Raises:
            KeyReused: the key stands for other content.
            InvalidEntry: an entry breaks the books; nothing was appended.
            LedgerStopped: the disk failed; the process must end.
        """
        with self._mutex:
            self._not_stopped()
            keys = [key if i == 0 else f"{key}+{i}" for i in range(len(draft.entries))]
            known = self.state.keys.get(key)
            if known is not None:
                return self._again(keys, draft)
            return self._write(keys, draft)

    def _not_stopped(self) -> None:
        if self._stopped:
            raise LedgerStopped("an earlier write failed; restart to replay the ledger")

    def _again(self, keys: Sequence[str], draft: Draft) -> list[Line]:
        for key, entry in zip(keys, draft.entries, strict=True):
            if self.state.keys.get(key, (0, b""))[1] != fingerprint(entry):
                raise KeyReused("the key was used for something else")
        return [self.line(self.state.keys[key][0]) for key in keys]

    def _write(self, keys: Sequence[str], draft: Draft) -> list[Line]:
        now, lines = self._clock(), []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for body in draft.envelopes:
                digest = hashlib.sha256(body).digest()
                self._db.execute("INSERT OR IGNORE INTO envelope VALUES(?, ?)", (digest, body))
            for key, entry in zip(keys, draft.entries, strict=True):
                record = Record(now, key, self.state.last, entry)
                seq, body = self.state.size, encode(record)
                _readable(record, body)
                self.state.apply(record)
                self._db.execute("INSERT INTO entry VALUES(?, ?)", (seq, body))
                self._tree.append(leaf_hash(body))
                lines.append(Line(seq, record))
            self._db.execute("INSERT OR REPLACE INTO head VALUES(1, ?)", (self._head(),))
            self._db.execute("COMMIT")
        except (InvalidEntry, MalformedEntry) as error:
            self._db.execute("ROLLBACK")
            if lines:  # the first of several was taken into the books before another broke them
                self._fold()
            raise InvalidEntry(str(error)) from None
        except BaseException:  # noqa: BLE001 - whatever it was, what the disk holds is unknown: stop
            self._stopped = True
            with contextlib.suppress(apsw.Error):
                self._db.execute("ROLLBACK")
            raise LedgerStopped("the ledger could not be written; restart to replay it") from None
        return lines

    def line(self, seq: int) -> Line:
        """One record by its place."""
        with self._mutex:
            return self._line(seq)

    def _line(self, seq: int) -> Line:
        for (body,) in self._db.execute("SELECT body FROM entry WHERE seq = ?", (seq,)):
            return Line(seq, decode(body))
        raise LedgerUnsound(f"entry {seq} is missing")

    def envelope(self, digest: bytes) -> bytes | None:
        """The sealed envelope with that SHA-256, or None."""
        with self._mutex:
            row = self._db.execute("SELECT body FROM envelope WHERE digest = ?", (digest,)).fetchone()
            return None if row is None else row[0]

    def answer(self, key: str) -> list[Line]:
        """What an idempotency key has led to; empty if it is unknown."""
        with self._mutex:
            self._not_stopped()
            found, i = [], 0
            while (name := key if i == 0 else f"{key}+{i}") in self.state.keys:
                found.append(self.line(self.state.keys[name][0]))
                i += 1
            return found

    @property
    def public(self) -> bytes:
        """The Ed25519 key that signs checkpoints, raw."""
        return self._key.public_key().public_bytes_raw()

    @property
    def stopped(self) -> bool:
        """True once a write failed: the process must end, and a restart replays."""
        return self._stopped

    def checkpoint(self) -> str:
        """The signed head of what is durable now.

        Raises:
            LedgerStopped: a write failed, so what is durable is unknown until a restart.
        """
        with self._mutex:
            self._not_stopped()
            return self._head()

    def _head(self) -> str:
        with self._mutex:
            return sign_checkpoint(Checkpoint(self.origin, self._tree.size, self._tree.root()), self._key)


def export_file(path: Path, origin: str, key: Ed25519PrivateKey) -> bytes:
    """Everything an auditor needs, as one text for ``lazaret-verify``; also while another process is writing.

    Raises:
        FileNotFoundError: there is no ledger.
    """
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path.name}")
    with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as db, db:
        entries = tuple(body for (body,) in db.execute("SELECT body FROM entry ORDER BY seq"))
        envelopes = tuple(body for (body,) in db.execute("SELECT body FROM envelope ORDER BY digest"))
    tree = CompactRange()
    for body in entries:
        tree.append(leaf_hash(body))
    note = sign_checkpoint(Checkpoint(origin, tree.size, tree.root()), key)
    return Export(key.public_key().public_bytes_raw(), entries, envelopes, note).encode()


def _readable(record: Record, body: bytes) -> None:
    """An entry that could not be read back would end the ledger at the next start; it is not written."""
    if decode(body) != record:
        raise InvalidEntry("the entry does not read back as it was written")


def _lock_file(path: Path) -> IO[str]:
    handle = path.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise LedgerBusy(f"another process is writing {path.stem}; stop it first") from None
    return handle
