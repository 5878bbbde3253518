"""One entry's inclusion proof, followed step by step so that a person can follow it too. Pure.

RFC 9162 section 2.1.3.2: the entry's leaf hash is joined with one neighbour after the other, up to the root of the
tree, which the ledger's key has signed. Everything is computed here from the bytes shown; no statement of the ledger
is trusted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from policies.ledger.cbor import EntryEncodingError
from policies.ledger.entries import InvalidEntryError, Restored, decode
from policies.ledger.merkle import (
    Checkpoint,
    LedgerCheckpointError,
    leaf_hash,
    node_hash,
    open_checkpoint,
    verify_inclusion,
)


def restore_that_opened(head: Checkpoint, body: bytes, at: int, proof: Sequence[bytes]) -> Restored | None:
    """Verify that the tree under a head records the restore with which the head's epoch began.

    Args:
        head: whose signature was verified.
        body: the entry.
        at: its place.
        proof: RFC 6962 inclusion of the entry at that place.
    Returns:
        The entry; None where it is none, is of another epoch, or is not in the tree.
    """
    try:
        entry = decode(body).entry
    except (InvalidEntryError, EntryEncodingError):
        return None
    if not isinstance(entry, Restored) or (entry.epoch, entry.nonce, entry.size) != (head.epoch, head.nonce, at):
        return None
    return entry if verify_inclusion(leaf_hash(body), at, head.size, proof, head.root) else None


@dataclass(frozen=True, slots=True)
class ProofStep:
    """Two hashes joined into the one above them."""

    left: bytes
    right: bytes
    joined: bytes  # SHA-256(0x01 || left || right)
    given: str  # which of the two the proof gave: "left" | "right"
    first: int  # the entries that the joined hash stands for, this and
    last: int  # this among them


@dataclass(frozen=True, slots=True)
class Proof:
    """What was computed for one entry, and whether it leads to a root that the ledger's key signed."""

    seq: int
    entry: bytes
    leaf: bytes  # SHA-256(0x00 || entry)
    steps: tuple[ProofStep, ...]
    root: bytes  # where the steps lead
    path: tuple[bytes, ...]  # the neighbours, as the ledger gave them
    checkpoint: str  # the signed note
    head: Checkpoint | None  # None: it is malformed, or not signed by the key
    public: bytes  # the ledger's Ed25519 key, raw
    fault: str  # what does not hold, as a sentence; "" when all of it does

    @property
    def holds(self) -> bool:
        """Whether the entry stands in the tree whose root was signed."""
        return not self.fault

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ledger's key, as ``lazaret-verify`` prints it."""
        return hashlib.sha256(self.public).hexdigest()

    def to_json(self) -> bytes:
        """Everything that somebody else needs to check it again, as one JSON text."""
        document = {
            "seq": self.seq,
            "entry": base64.b64encode(self.entry).decode(),
            "leaf_sha256": self.leaf.hex(),
            "inclusion_proof": [node.hex() for node in self.path],
            "checkpoint": self.checkpoint,
            "ledger_key": self.public.hex(),
        }
        return (json.dumps(document, indent=2) + "\n").encode()


def walk(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> tuple[ProofStep, ...]:
    """The joins of RFC 9162 section 2.1.3.2; the last one's result is the root that the proof leads to.

    Raises:
        ValueError: there is no such leaf in a tree of that size, or the proof is too long for it.
    """
    if not 0 <= index < size:
        raise ValueError("no such leaf")
    fn, sn, r, level = index, size - 1, leaf, 0
    steps = []
    for p in path:
        if sn == 0:
            raise ValueError("the proof is longer than the tree is high")
        on_left = bool(fn & 1) or fn == sn
        left, right = (p, r) if on_left else (r, p)
        while on_left and not fn & 1 and fn:  # its subtree has no neighbour on this level, so it stands one higher
            fn, sn, level = fn >> 1, sn >> 1, level + 1
        fn, sn, level, r = fn >> 1, sn >> 1, level + 1, node_hash(left, right)
        first = fn << level
        steps.append(
            ProofStep(left, right, r, "left" if on_left else "right", first, min(first + (1 << level), size) - 1)
        )
    return tuple(steps)


def check(seq: int, entry: bytes, path: Sequence[bytes], checkpoint: str, ledger: tuple[str, bytes]) -> Proof:
    """Check that an entry stands at a place of the tree whose root a checkpoint signs.

    Args:
        seq: the place, from 0.
        entry: its bytes.
        path: the inclusion proof, from the leaf upwards.
        checkpoint: the signed note.
        ledger: its name and its Ed25519 key, raw, as the reader knows them from elsewhere.
    """
    origin, public = ledger
    leaf, head, fault = leaf_hash(entry), None, ""
    steps: tuple[ProofStep, ...] = ()
    try:
        head = open_checkpoint(checkpoint, public)
        steps = walk(leaf, seq, head.size, path)
        if head.origin != origin:
            fault = "The checkpoint is another ledger's."
        elif not verify_inclusion(leaf, seq, head.size, path, head.root):
            fault = "The steps do not lead to the root that was signed."
    except LedgerCheckpointError as error:
        fault = f"The checkpoint does not hold: {error}."
    except ValueError as error:
        fault = f"The proof does not hold: {error}."
    root = steps[-1].joined if steps else leaf
    if head is not None and not fault and root != head.root:  # two ways of the same computation: they must agree
        fault = "The steps shown do not lead to the root that was signed."
    return Proof(seq, entry, leaf, steps, root, tuple(path), checkpoint, head, public, fault)
