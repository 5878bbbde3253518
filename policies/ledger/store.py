"""A ledger that one process appends to: durable before visible, many at once, exactly once.

The entries are authoritative; the state in memory is computed from them at every start. A review and its entry happen
under one lock (:meth:`Store.exclusive`). The wait for the disk comes after it, so one commit carries everything
staged meanwhile (group commit). A :class:`LedgerBackend` stores the bytes:
:class:`policies.ledger.backends.sqlite.Sqlite` by default, or :class:`policies.ledger.backends.postgres.Postgres`.
Any write error stops the ledger; a restart replays it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from policies.ledger.cbor import EntryEncodingError
from policies.ledger.entries import Entry, InvalidEntryError, Record, Restored, decode, encode
from policies.ledger.export import Export
from policies.ledger.merkle import Checkpoint, CompactRange, MerkleTree, leaf_hash, sign_checkpoint
from policies.ledger.state import KeyReusedError, State
from protos.common.errors import LedgerIntegrityError, StorageError

_SEAL: Final = b"lazaret ledger head/1"


class LedgerBusyError(StorageError, RuntimeError):
    """Another process writes this ledger."""


class LedgerUnsoundError(LedgerIntegrityError, RuntimeError):
    """What is on disk does not fold; nothing may be appended before an audit."""


class LedgerTurnedBackError(LedgerUnsoundError):
    """The ledger is behind what it has acknowledged: its log was lost, or an older copy replaced it."""


class MarkUnknownError(LedgerUnsoundError):
    """The holder of the high-water mark does not answer, so a rollback of the ledger cannot be excluded."""


class LedgerStoppedError(LedgerIntegrityError, RuntimeError):
    """A write failed. What the disk holds is unknown until the process is restarted."""


@dataclass(frozen=True, slots=True)
class SealedHead:
    """The stored head: size, root, and a MAC by this ledger's key over both."""

    size: int
    root: bytes
    seal: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """What one commit makes durable: all of it or nothing."""

    first: int  # the seq of the first body
    bodies: tuple[bytes, ...]
    envelopes: tuple[bytes, ...]
    head: SealedHead


class LedgerBackend(Protocol):
    """Where a ledger's bytes are kept. One writer; every method may be called from any thread."""

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """The entries in their order, the first ``upto`` of them; a gap raises :class:`LedgerUnsoundError`."""

    def head(self) -> SealedHead | None:
        """The head of the last commit; None before the first."""

    def body(self, seq: int) -> bytes | None:
        """One entry."""

    def envelope(self, digest: bytes) -> bytes | None:
        """The envelope with that SHA-256."""

    def envelopes(self) -> Iterator[bytes]:
        """All of them, in the order of their digests."""

    def commit(self, batch: Batch) -> None:
        """Durable when this returns, and marked as such; after any exception it may or may not be."""

    def marks(self) -> Sequence[SealedHead]:
        """Heads that were acknowledged, kept where what turns the entries back does not reach them.

        Raises:
            LedgerUnsoundError: there should be one, and it is missing or cannot be read.
            MarkUnknownError: nobody who could hold one answers.
        """

    def mark(self, head: SealedHead) -> None:
        """The ledger was held against its marks, and is at this head: durable before anything is answered from it."""

    def close(self) -> None:
        """Let go of the files, the lock, the connection."""


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """Entries to append together under one idempotency key, with the envelopes they rest on."""

    entries: tuple[Entry, ...]
    envelopes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record in its place."""

    seq: int
    record: Record


@dataclass(frozen=True, slots=True)
class ProofBundle:
    """The proof that a ledger gives to a client that has seen an earlier head."""

    checkpoint: str  # signed note of what is durable
    proof: tuple[bytes, ...]  # RFC 6962 consistency with what was seen
    entry: bytes  # the entry asked for; empty for none
    included: tuple[bytes, ...]  # and the proof that the checkpoint's tree holds it
    epoch: int
    restored_at: int  # epoch > 1: seq of the entry that opened it,
    restored: bytes  # the entry,
    restored_proof: tuple[bytes, ...]  # and the proof that the checkpoint's tree holds it there


@dataclass(slots=True)
class _Pending:
    """Entries that are in the ledger and not yet on the disk."""

    bodies: list[bytes] = field(default_factory=list)
    envelopes: dict[bytes, bytes] = field(default_factory=dict)


class Store:
    """A ledger that this process alone appends to."""

    def __init__(self, disk: LedgerBackend, origin: str, key: Ed25519PrivateKey, clock: Callable[[], int]) -> None:
        """Fold what the disk holds.

        Args:
            disk: where the entries are; it is closed with the store, and when they do not fold.
            origin: the name in checkpoints (C2SP), for example ``lazaret/site-a``.
            key: signs checkpoints.
            clock: seconds since 1970, for the ``at`` of records; no decision rests on it. Where it went back, a
                record bears the time of the one before it.
        Raises:
            LedgerUnsoundError: the entries on disk do not fold, or are not those of the last commit.
            LedgerTurnedBackError: they end before what was acknowledged.
        """
        self.origin, self._disk, self._key, self._clock = origin, disk, key, clock
        self._mac = _mac_key(key)
        self._reviewing = threading.RLock()  # a review and its entry
        self._writing = threading.Lock()  # one commit at a time; taken before a review, never inside one
        self._depth = 0
        self._stopped = False
        self._staged, self._flying = _Pending(), _Pending()
        self._durable = 0
        try:
            # before the entries: who only looks must not take what comes meanwhile for lost
            self.marks: Final = tuple(disk.marks())
            self._fold()
            self.reaches(self.marks)
            disk.mark(self.head())
        except BaseException:
            disk.close()
            raise

    def _fold(self) -> None:
        """Everything on the disk.

        Raises:
            LedgerUnsoundError: it does not fold, or is not what was committed last.
        """
        try:
            self._replay(None)
            self._durable = self.state.size
            if self._disk.head() != (self._head() if self.state.size else None):
                raise InvalidEntryError("the entries are not the ones that this key committed last")
        except (ValueError, LedgerUnsoundError) as error:
            raise LedgerUnsoundError(f"entry {self.state.size} of {self.origin}: {error}") from None

    def reaches(self, marks: Sequence[SealedHead]) -> None:
        """Does the ledger hold everything that it has acknowledged?

        Raises:
            LedgerTurnedBackError: it does not.
        """
        for mark in marks:
            if mark.size > self.state.size:
                evidence = f"{self.origin} has {self.state.size} entries, and its high-water mark is at {mark.size}"
                raise LedgerTurnedBackError(turned_back(evidence))
            if mark != _sealed(self.origin, mark.size, self._tree.root(mark.size), self._mac):
                raise LedgerTurnedBackError(turned_back(f"the high-water mark of {self.origin} is of other entries"))

    def _replay(self, upto: int | None, pending: Sequence[bytes] = ()) -> None:
        """Fold the disk's entries and what is pending."""
        self.state, self._tree = State(), MerkleTree()
        for source in (self._disk.bodies(upto), pending):
            for body in source:
                self.state.apply(decode(body))
                self._tree.append(leaf_hash(body))

    def head(self) -> SealedHead:
        """Size and root of what is durable, sealed."""
        with self._reviewing:
            return _sealed(self.origin, self._durable, self._tree.root(self._durable), self._mac)

    def _head(self) -> SealedHead:
        return _sealed(self.origin, self._tree.size, self._tree.root(), self._mac)

    def close(self) -> None:
        """Release the disk."""
        self._disk.close()

    def __enter__(self) -> Store:
        """Use as a context."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close at the end of the context."""
        self.close()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[State]:
        """Hold the writer's place: nothing is appended by another thread between a review and its entry.

        Whatever the ledger holds when the outermost block ends is durable when it is left.

        Raises:
            LedgerStoppedError: the disk failed, now or before; the process must end.
        """
        self._reviewing.acquire()
        self._depth += 1
        try:
            self._not_stopped()
            yield self.state
        finally:
            self._depth -= 1
            outermost, size = not self._depth, self.state.size
            self._reviewing.release()
            if outermost:
                self._flush(size)

    def _flush(self, size: int) -> None:
        """Wait until ``size`` entries are durable; whoever comes first takes along all that are staged."""
        if self._durable >= size and not self._stopped:
            return
        with self._writing:
            self._not_stopped()
            if self._durable >= size:
                return
            try:
                with self._reviewing:  # the check too: others stage the next batch as soon as it is let go
                    self._flying, self._staged = self._staged, _Pending()
                    flying, head = self._flying, self._head()
                    if not self.state.size == head.size == self._durable + len(flying.bodies):
                        raise InvalidEntryError("the ledger state has entries that are not staged")
                bodies, envelopes = tuple(flying.bodies), tuple(flying.envelopes.values())
                self._disk.commit(Batch(self._durable, bodies, envelopes, head))
            except BaseException:  # noqa: BLE001 - whatever it was, what the disk holds is unknown: stop
                self._stopped = True
                raise LedgerStoppedError("the ledger could not be written; restart to replay it") from None
            with self._reviewing:
                self._durable, self._flying = head.size, _Pending()

    def append(self, key: str, draft: AppendRequest) -> list[StoredRecord]:
        """Append the draft's entries, all or none; durable when this returns, or inside :meth:`exclusive` at its end.

        A key that is known returns the lines it made before, if the content is the same (exactly once).

        Raises:
            KeyReusedError: the key stands for other content.
            InvalidEntryError: an entry breaks the ledger; nothing was appended.
            LedgerStoppedError: the disk failed; the process must end.
        """
        with self.exclusive():
            keys = [key if i == 0 else f"{key}+{i}" for i in range(len(draft.entries))]
            if key in self.state.keys:
                return self._again(keys, draft)
            return self._stage(keys, draft)

    def _not_stopped(self) -> None:
        if self._stopped:
            raise LedgerStoppedError("an earlier write failed; restart to replay the ledger")

    def _again(self, keys: Sequence[str], draft: AppendRequest) -> list[StoredRecord]:
        lines = self.answer(keys[0])
        if [line.record.entry for line in lines] != list(draft.entries):
            raise KeyReusedError("the key was used for something else")
        return lines

    def _stage(self, keys: Sequence[str], draft: AppendRequest) -> list[StoredRecord]:
        if not draft.entries or "+" in keys[0]:
            raise InvalidEntryError("a draft has entries, and its key no plus sign")
        now = max(self._clock(), self.state.latest)  # a clock that went back tells none earlier
        lines, bodies = [], []
        try:
            for key, entry in zip(keys, draft.entries, strict=True):
                record = Record(now, key, entry)
                body = encode(record)
                if decode(body) != record:  # it would end the ledger at the next start
                    raise InvalidEntryError("the entry does not read back as it was written")
                lines.append(StoredRecord(self.state.size, record))
                self.state.apply(record)
                bodies.append(body)
            for body in bodies:
                self._tree.append(leaf_hash(body))
            self._staged.bodies += bodies
            self._staged.envelopes.update((hashlib.sha256(e).digest(), e) for e in draft.envelopes)
        except (InvalidEntryError, EntryEncodingError) as error:
            if bodies:  # the first of several was taken into the ledger before another broke them
                self._replay(self._durable, [*self._flying.bodies, *self._staged.bodies])
            raise InvalidEntryError(str(error)) from None
        except BaseException:  # no memory, an interrupt: the ledger may hold what is staged nowhere
            self._stopped = True
            raise
        return lines

    def line(self, seq: int) -> StoredRecord:
        """One record by its place."""
        with self._reviewing:
            at = seq - self._durable
            pending = [*self._flying.bodies, *self._staged.bodies] if at >= 0 else []
            body = pending[at] if 0 <= at < len(pending) else self._disk.body(seq)
        if body is None:
            raise LedgerUnsoundError(f"entry {seq} is missing")
        return StoredRecord(seq, decode(body))

    def envelope(self, digest: bytes) -> bytes | None:
        """The sealed envelope with that SHA-256, or None."""
        with self._reviewing:
            pending = self._staged.envelopes.get(digest) or self._flying.envelopes.get(digest)
        return pending or self._disk.envelope(digest)

    def answer(self, key: str) -> list[StoredRecord]:
        """What an idempotency key has led to, durable; empty if it is unknown."""
        with self.exclusive() as state:
            found, i = [], 0
            while (name := key if i == 0 else f"{key}+{i}") in state.keys:
                found.append(self.line(state.keys[name]))
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
            LedgerStoppedError: a write failed, so what is durable is unknown until a restart.
        """
        return self.prove(0).checkpoint

    def prove(self, seen: int, seq: int = -1) -> ProofBundle:
        """The signed head of what is durable, and what it proves.

        Args:
            seen: the proof is that the head extends the tree of so many entries; empty when there is nothing to
                prove, because that is none, the whole tree, or more than there is.
            seq: the entry to show, with the proof that the head's tree holds it; -1 for none.
        """
        with self._reviewing:
            self._not_stopped()
            size, at = self._durable, self.state.restored_at
            epoch = self.state.epoch if at < size else 1
            head = Checkpoint(self.origin, size, self._tree.root(size), epoch, self.state.nonce if epoch > 1 else "")
            proof = tuple(self._tree.consistency_proof(seen, size)) if 0 < seen < size else ()
            restored: tuple[bytes, ...] = ()
            if epoch > 1:
                restored = tuple(self._tree.inclusion_proof(at, size))
            included = tuple(self._tree.inclusion_proof(seq, size)) if 0 <= seq < size else ()
        body = self._disk.body(at) if epoch > 1 else None
        entry = self._disk.body(seq) if 0 <= seq < size else None
        note = sign_checkpoint(head, self._key)
        return ProofBundle(note, proof, entry or b"", included, epoch, at, body or b"", restored)

    def holds(self, head: Checkpoint) -> bool:
        """Is this a head of this ledger, of now or of earlier?"""
        with self._reviewing:
            known = head.origin == self.origin and head.size <= self._tree.size
            return known and self._tree.root(head.size) == head.root

    def stop(self) -> None:
        """Write nothing more: something outside this process proved that the ledger is not what it was."""
        self._stopped = True

    def restore(self, nonce: str) -> None:
        """Open a new epoch over a ledger that came back from a backup: nothing is granted before receipts are in.

        Args:
            nonce: random; receipts are for the restore that bears it, and for no other.
        """
        with self.exclusive() as state:
            entry = Restored(state.epoch + 1, state.size, self._tree.root(), nonce)
            self.append(f"restore-{entry.epoch}", AppendRequest((entry,)))


def turned_back(evidence: str) -> str:
    """The sentence for an operator whose ledger is behind something that it once said."""
    return (
        f"{evidence}: acknowledged entries are missing here, because the write-ahead log was lost or an older copy "
        "lies in the ledger's place. It is frozen, and nothing is granted. Keep these files for the auditor, and "
        "bring the ledger back with `restore`, which opens a new epoch: deploy/docs/restore.md"
    )


def _mac_key(key: Ed25519PrivateKey) -> bytes:
    """What seals the head on disk: from the key that signs checkpoints, and usable for nothing else."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=_SEAL).derive(key.private_bytes_raw())


def _sealed(origin: str, size: int, root: bytes, mac: bytes) -> SealedHead:
    return SealedHead(size, root, hmac.digest(mac, f"{origin}\n{size}\n".encode() + root, "sha256"))


def export(disk: LedgerBackend, origin: str, key: Ed25519PrivateKey, witnessed: Sequence[str] = ()) -> bytes:
    """Everything an auditor needs of what a disk holds, as one text for ``lazaret-verify``.

    The head is read first, so that what another process commits meanwhile is left out, entries and envelopes alike.

    Raises:
        LedgerUnsoundError: the entries are not those of the last commit; the ledger's key signs nothing about them.
    """
    bodies, resting = list[bytes](), set[bytes]()

    def keep(body: bytes, entry: Entry) -> None:
        bodies.append(body)
        resting.add(getattr(entry, "envelope", b""))

    note = signed_head(disk, origin, key, keep)
    envelopes = tuple(e for e in disk.envelopes() if hashlib.sha256(e).digest() in resting)
    seen = tuple(n for n in witnessed if _later(n) == _later(note))  # of before a restore, others may be gone
    return Export(key.public_key().public_bytes_raw(), tuple(bodies), envelopes, note, seen).encode()


def signed_head(
    disk: LedgerBackend,
    origin: str,
    key: Ed25519PrivateKey,
    heed: Callable[[bytes, Entry], None] = lambda _body, _entry: None,
) -> str:
    """The signed checkpoint of what a disk holds, entry by entry; ``heed`` gets each.

    Raises:
        LedgerUnsoundError: the entries are not those of the last commit; the ledger's key signs nothing about them.
    """
    head, tree = disk.head(), CompactRange()
    epoch, nonce = 1, ""
    try:
        for body in disk.bodies(head.size if head else 0):
            tree.append(leaf_hash(body))
            entry = decode(body).entry
            heed(body, entry)
            epoch, nonce = (entry.epoch, entry.nonce) if isinstance(entry, Restored) else (epoch, nonce)
    except ValueError as error:
        raise LedgerUnsoundError(f"entry {tree.size - 1}: {error}") from None
    if head != (_sealed(origin, tree.size, tree.root(), _mac_key(key)) if tree.size else None):
        raise LedgerUnsoundError("the entries are not the ones that this key committed last; nothing was signed")
    return sign_checkpoint(Checkpoint(origin, tree.size, tree.root(), epoch, nonce), key)


def _later(note: str) -> list[str]:
    """A checkpoint's extension lines."""
    return note.partition("\n\n")[0].split("\n")[3:]


def lines(disk: LedgerBackend) -> list[StoredRecord]:
    """All records that a disk holds."""
    return [StoredRecord(seq, decode(body)) for seq, body in enumerate(disk.bodies())]
