"""The site's memory of the coordinator's ledger, so that a rewritten history is detected.

Kept durable before anything is done on the strength of a reply: the newest head that was verified, and its epoch.
Each later head must extend it, by an RFC 6962 consistency proof. When one does not, both signed notes are kept, which
prove the fork to anybody, and the site refuses to go on. Only a restore that the coordinator's own tree records (a
new epoch, proved to be in it) starts afresh, and then this site shows its receipts first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import CoordinatorUnreachableError, LedgerForkError
from policies.audit.inclusion_proof import restore_that_opened
from policies.ledger import merkle
from policies.ledger.cbor import EntryEncodingError
from policies.ledger.entries import InvalidEntryError, Restored, decode
from protos.common.durable_files import replace_file

MOST_RESTORES = 1000  # that a site may have missed; more is no honest number


class EpochChangedError(CoordinatorUnreachableError):
    """The coordinator's ledger was restored meanwhile: it has to be greeted before anything else."""


@dataclass(frozen=True, slots=True)
class WitnessState:
    """The file ``seen.json``."""

    epoch: int = 1
    note: str = ""  # the newest verified head, as signed
    restored: str = ""  # the nonce of the restore that the epoch began with
    presented: str = ""  # the nonce of the last restore that this site has shown its receipts after
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class IncludedEntry:
    """The entry that a verdict is, its place, and the proof that the tree holds it there."""

    entry: bytes
    seq: int
    proof: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Epoch:
    """A reply's proof of the restore that its ledger's epoch began with."""

    number: int
    entry: bytes
    at: int
    proof: tuple[bytes, ...]

    @property
    def nonce(self) -> str:
        """Of the restore; nothing where the entry cannot be read."""
        try:
            entry = decode(self.entry).entry
        except (InvalidEntryError, EntryEncodingError):
            return ""
        return entry.nonce if isinstance(entry, Restored) else ""


class LedgerWitness:
    """The witness: one head in memory and on disk, and a check for every later one."""

    def __init__(self, folder: Path, ledger_key: bytes, forgetful: bool = False) -> None:
        """Read what was seen; ``folder`` is made when something is written.

        A forgetful one writes nothing: for a look beside the process that holds the site's ledger and alone writes.

        Raises:
            LedgerForkError: what was kept cannot be read, so nothing can be compared with it.
        """
        self._folder, self._key, self._forgetful = folder, ledger_key, forgetful
        self.memory, self.head = WitnessState(), merkle.Checkpoint("", 0, b"")
        path = folder / "seen.json"
        if not path.exists():
            return
        try:
            table = json.loads(path.read_bytes())
            self.memory = WitnessState(**table)
            self.head = merkle.open_checkpoint(self.memory.note, ledger_key)
        except (ValueError, TypeError, merkle.LedgerCheckpointError, OSError, RecursionError):
            raise LedgerForkError(
                f"{folder.name}/seen.json cannot be read: restore it from this site's backup"
            ) from None

    @property
    def seen(self) -> int:
        """The size of the newest verified head; 0 before the first."""
        return self.head.size

    @property
    def must_present(self) -> bool:
        """Has the ledger been restored since this site last showed its receipts?"""
        return self.memory.presented != self.memory.restored

    def check(self, note: str, proof: Sequence[bytes]) -> None:
        """Take a newer head, durable before this returns.

        Raises:
            LedgerForkError: it is not an extension of the one seen before; both notes are kept.
        """
        head = self._open(note)
        if self.memory.frozen:
            raise LedgerForkError(self._advice())
        known = self.head
        if known.size and head.epoch >= known.epoch and head.nonce != known.nonce:
            raise EpochChangedError(
                "the coordinator's ledger was restored meanwhile: this site synchronises with it first"
            )
        if known.size and not self._extends(head, proof):
            self._keep(f"fork-{known.size}-seen.note", self.memory.note)
            self._keep(f"fork-{head.size}-shown.note", note)
            self._remember(replace(self.memory, frozen=True))
            raise LedgerForkError(self._advice())
        if (head.size, head.root) != (known.size, known.root):
            self._remember(replace(self.memory, epoch=head.epoch, note=note))
            self.head = head

    def _extends(self, head: merkle.Checkpoint, proof: Sequence[bytes]) -> bool:
        known = self.head
        if (known.origin, known.epoch, known.nonce) != (head.origin, head.epoch, head.nonce):
            return False
        same = (head.size, head.root) == (known.size, known.root)
        return same or (
            head.size > known.size and merkle.verify_consistency(known.size, known.root, head.size, head.root, proof)
        )

    def included(self, shown: IncludedEntry, kinds: tuple[type, ...], envelope: bytes) -> None:
        """Is the yes that was heard an entry of that kind in the ledger under the newest head, about this envelope?

        Raises:
            LedgerForkError: a yes that is in no ledger is none.
        """
        try:
            written = decode(shown.entry).entry
        except (InvalidEntryError, EntryEncodingError):
            written = None
        about = isinstance(written, kinds) and getattr(written, "envelope", b"") == envelope
        leaf = merkle.leaf_hash(shown.entry)
        if not about or not merkle.verify_inclusion(leaf, shown.seq, self.head.size, shown.proof, self.head.root):
            raise LedgerForkError(
                "the coordinator said yes but cannot prove it from its ledger: this does not count as an answer"
            )

    def renewed(self, epoch: Epoch) -> bool:
        """Does a reply speak of a restore that this site has not met yet?"""
        known = self.memory
        return epoch.number > known.epoch or (epoch.number > 1 and epoch.nonce not in ("", known.restored))

    def restored(self, note: str, epoch: Epoch, proof: Sequence[bytes]) -> None:
        """Take the head of a restored ledger, if its own tree records the restore; both old and new head are kept.

        What this site saw before the backup must still be there.

        Raises:
            LedgerForkError: the restore is not in the tree under that head, or the tree is another one.
        """
        head, known = self._open(note), self.head
        entry = restore_that_opened(head, epoch.entry, epoch.at, epoch.proof)
        if entry is None or not head.epoch == epoch.number <= max(known.epoch, 1) + MOST_RESTORES:
            raise LedgerForkError("the coordinator reports a restore that its ledger does not contain")
        if known.size and known.origin != head.origin:
            raise LedgerForkError("the coordinator shows another ledger")
        if 0 < known.size <= epoch.at and not merkle.verify_consistency(
            known.size, known.root, head.size, head.root, proof
        ):
            self._keep(f"fork-{known.size}-seen.note", self.memory.note)
            self._keep(f"fork-{head.size}-shown.note", note)
            raise LedgerForkError(self._advice())
        if self.memory.note:
            self._keep(f"epoch-{self.memory.epoch}-last.note", self.memory.note)
        self._keep(f"epoch-{epoch.number}-{epoch.nonce[:8]}-first.note", note)
        self._remember(WitnessState(epoch.number, note, entry.nonce, self.memory.presented))
        self.head = head

    def presented(self) -> None:
        """Every receipt was shown after this restore."""
        self._remember(replace(self.memory, presented=self.memory.restored))

    def cosigned(self, site: str, key: Ed25519PrivateKey, seconds: int) -> str:
        """The newest verified head with this site's cosignature; nothing before the first, or when frozen."""
        if not self.seen or self.memory.frozen:
            return ""
        return self.memory.note + merkle.cosign(self.memory.note, site, key, seconds)

    def _open(self, note: str) -> merkle.Checkpoint:
        try:
            return merkle.open_checkpoint(note, self._key)
        except merkle.LedgerCheckpointError:
            raise LedgerForkError("the coordinator's ledger is signed by another key than at enrolment") from None

    def _advice(self) -> str:
        return (
            "the coordinator's ledger is not the one this site saw before: its history was rewritten, or an older "
            f"copy was put in its place. Both signed heads are in {self._folder.name}/: show them to both compliance "
            "officers. If the coordinator restored a backup, it must do so again, and run `ledger restore` before it "
            "serves"
        )

    def _remember(self, memory: WitnessState) -> None:
        fields: dict[str, Any] = {name: getattr(memory, name) for name in WitnessState.__slots__}
        self._keep("seen.json", json.dumps(fields, indent=2) + "\n")
        self.memory = memory

    def _keep(self, name: str, text: str) -> None:
        if self._forgetful:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(self._folder / name, text.encode())
