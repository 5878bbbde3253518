"""RFC 6962 Merkle tree as a compact range, inclusion and consistency proofs, and C2SP signed checkpoints.

Pure functions on bytes. The tree makes any edit, drop, reordering or truncation of the ledger visible to
whoever holds one older checkpoint.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

EMPTY_ROOT: Final = hashlib.sha256(b"").digest()
_ED25519: Final = b"\x01"  # C2SP signed-note: signature type 1


class BadCheckpoint(ValueError):
    """A checkpoint that is malformed, unsigned, or not this log's."""


def leaf_hash(entry: bytes) -> bytes:
    """RFC 6962 section 2.1: ``SHA-256(0x00 || entry)``."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """RFC 6962 section 2.1: ``SHA-256(0x01 || left || right)``."""
    return hashlib.sha256(b"\x01" + left + right).digest()


@dataclass(slots=True)
class CompactRange:
    """The roots of the perfect subtrees of a growing tree: O(log n) state, O(1) amortised append."""

    size: int = 0
    peaks: list[bytes] = field(default_factory=list)

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash."""
        n = self.size
        while n & 1:
            leaf = node_hash(self.peaks.pop(), leaf)
            n >>= 1
        self.peaks.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        """The tree head of RFC 6962 section 2.1 for the leaves so far."""
        if not self.peaks:
            return EMPTY_ROOT
        root = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            root = node_hash(peak, root)
        return root


def root_of(leaves: Sequence[bytes]) -> bytes:
    """The root over ``leaves`` (leaf hashes)."""
    tree = CompactRange()
    for leaf in leaves:
        tree.append(leaf)
    return tree.root()


def _split(n: int) -> int:
    """The largest power of two smaller than n."""
    return 1 << ((n - 1).bit_length() - 1)


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """PATH(index, leaves) of RFC 6962 section 2.1.1."""
    if not 0 <= index < len(leaves):
        raise ValueError("no such leaf")
    if len(leaves) == 1:
        return []
    k = _split(len(leaves))
    if index < k:
        return [*inclusion_proof(leaves[:k], index), root_of(leaves[k:])]
    return [*inclusion_proof(leaves[k:], index - k), root_of(leaves[:k])]


def included(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """RFC 9162 section 2.1.3.2: does the proof lead from ``leaf`` at ``index`` to ``root`` of ``size``?"""
    if not 0 <= index < size:
        return False
    fn, sn, r = index, size - 1, leaf
    for p in proof:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            r = node_hash(p, r)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            r = node_hash(r, p)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and r == root


def consistency_proof(leaves: Sequence[bytes], old: int) -> list[bytes]:
    """PROOF(old, leaves) of RFC 6962 section 2.1.2."""
    if not 0 < old <= len(leaves):
        raise ValueError("the old size must lie in [1, size]")
    return _subproof(leaves, old, True)


def _subproof(leaves: Sequence[bytes], m: int, whole: bool) -> list[bytes]:
    n = len(leaves)
    if m == n:
        return [] if whole else [root_of(leaves)]
    k = _split(n)
    if m <= k:
        return [*_subproof(leaves[:k], m, whole), root_of(leaves[k:])]
    return [*_subproof(leaves[k:], m - k, False), root_of(leaves[:k])]


def consistent(old: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]) -> bool:
    """RFC 9162 section 2.1.4.2: is the tree of ``size`` an extension of the one of ``old``?"""
    if old == size:
        return not proof and old_root == root
    if not 0 < old < size or not proof:
        return False
    path = list(proof) if old & (old - 1) else [old_root, *proof]
    fn, sn = old - 1, size - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    fr = sr = path[0]
    for c in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            fr, sr = node_hash(c, fr), node_hash(c, sr)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            sr = node_hash(sr, c)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and fr == old_root and sr == root


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The head of one ledger: origin, size, root (C2SP tlog-checkpoint)."""

    origin: str
    size: int
    root: bytes

    def body(self) -> str:
        """The text that is signed, with its closing newline."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def key_id(origin: str, public: bytes) -> bytes:
    """C2SP signed-note: ``SHA-256(name || 0x0A || 0x01 || public)[:4]``."""
    return hashlib.sha256(origin.encode() + b"\n" + _ED25519 + public).digest()[:4]


def sign_checkpoint(head: Checkpoint, key: Ed25519PrivateKey) -> str:
    """A signed note: the body, an empty line, one signature line."""
    public = key.public_key().public_bytes_raw()
    signature = base64.b64encode(key_id(head.origin, public) + key.sign(head.body().encode())).decode()
    return f"{head.body()}\n\u2014 {head.origin} {signature}\n"


def open_checkpoint(note: str, public: bytes) -> Checkpoint:
    """Verify, then parse.

    Raises:
        BadCheckpoint: not exactly the form that :func:`sign_checkpoint` writes, or not signed by ``public``.
    """
    lines = note.split("\n")
    try:
        origin, size, root, _blank, line, _end = lines
        head = Checkpoint(origin, int(size), base64.b64decode(root, validate=True))
        raw = base64.b64decode(line.rsplit(" ", 1)[1], validate=True)
        Ed25519PublicKey.from_public_bytes(public).verify(raw[4:], head.body().encode())
    except (ValueError, IndexError, binascii.Error, InvalidSignature):
        raise BadCheckpoint("the checkpoint is malformed or not signed by the expected key") from None
    expected = f"{head.body()}\n\u2014 {origin} {base64.b64encode(key_id(origin, public) + raw[4:]).decode()}\n"
    if note != expected or len(head.root) != 32:
        raise BadCheckpoint("the checkpoint is not in its one permitted form")
    return head
