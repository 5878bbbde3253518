"""RFC 6962 Merkle tree as a compact range, inclusion and consistency proofs, and C2SP signed checkpoints.

Pure functions on bytes. The tree makes any edit, drop, reordering or truncation of the ledger visible to
whoever holds one older checkpoint.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protos.common.errors import ArtifactError

EMPTY_ROOT: Final = hashlib.sha256(b"").digest()
_ED25519: Final = b"\x01"  # C2SP signed-note: signature type 1
_COSIGNATURE: Final = b"\x04"  # C2SP tlog-cosignature: Ed25519, over a time and the note


class LedgerCheckpointError(ArtifactError, ValueError):
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


def _split(n: int) -> int:
    """The largest power of two smaller than n."""
    return 1 << ((n - 1).bit_length() - 1)


@dataclass(slots=True)
class MerkleTree:
    """A growing tree that keeps every perfect subtree's root: 64 bytes a leaf, any proof in O(log n)."""

    levels: list[bytearray] = field(default_factory=lambda: [bytearray()])

    @property
    def size(self) -> int:
        """How many leaves."""
        return len(self.levels[0]) // 32

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash."""
        self.levels[0] += leaf
        n, level = self.size, 0
        while n & 1 == 0:
            leaf = node_hash(self._at(level, n - 2), leaf)
            n, level = n >> 1, level + 1
            if level == len(self.levels):
                self.levels.append(bytearray())
            self.levels[level] += leaf

    def _at(self, level: int, index: int) -> bytes:
        return bytes(self.levels[level][32 * index : 32 * index + 32])

    def _range(self, start: int, end: int) -> bytes:
        """The root over leaves ``start`` to ``end``; ``start`` is where RFC 6962 would split."""
        n = end - start
        if n == 1 << (n.bit_length() - 1):
            level = n.bit_length() - 1
            return self._at(level, start >> level)
        k = _split(n)
        return node_hash(self._range(start, start + k), self._range(start + k, end))

    def root(self, size: int | None = None) -> bytes:
        """The tree head of RFC 6962 section 2.1 over the first ``size`` leaves; over all without one.

        Raises:
            ValueError: there are not so many leaves.
        """
        n = self.size if size is None else size
        if not 0 <= n <= self.size:
            raise ValueError("the tree is not that large")
        return self._range(0, n) if n else EMPTY_ROOT

    def inclusion_proof(self, index: int, size: int) -> list[bytes]:
        """PATH(index, D[size]) of RFC 6962 section 2.1.1.

        Raises:
            ValueError: there is no such leaf in a tree of that size.
        """
        if not 0 <= index < size <= self.size:
            raise ValueError("no such leaf")
        proof, start, end = [], 0, size
        while end - start > 1:
            k = start + _split(end - start)
            proof.append(self._range(k, end) if index < k else self._range(start, k))
            start, end = (start, k) if index < k else (k, end)
        return proof[::-1]

    def consistency_proof(self, old: int, size: int) -> list[bytes]:
        """PROOF(old, D[size]) of RFC 6962 section 2.1.2.

        Raises:
            ValueError: the old tree is empty, or either tree is larger than this one.
        """
        if not 0 < old <= size <= self.size:
            raise ValueError("the old size must lie in [1, size]")
        proof, start, end, whole = [], 0, size, True
        while old != end:
            k = start + _split(end - start)
            if old <= k:
                proof.append(self._range(k, end))
                end = k
            else:
                proof.append(self._range(start, k))
                start, whole = k, False
        return ([] if whole else [self._range(start, end)]) + proof[::-1]


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
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


def verify_consistency(old: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]) -> bool:
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
    """The head of one ledger: origin, size, root (C2SP tlog-checkpoint); from the second epoch on, the epoch too."""

    origin: str
    size: int
    root: bytes
    epoch: int = 1
    nonce: str = ""  # of the restore that the epoch began with

    def body(self) -> str:
        """The text that is signed, with its closing newline; the epoch is an extension line."""
        later = f"epoch {self.epoch} {self.nonce}\n" if self.epoch > 1 else ""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n{later}"


def key_id(name: str, public: bytes, kind: bytes = _ED25519) -> bytes:
    """C2SP signed-note: ``SHA-256(name || 0x0A || type || public)[:4]``."""
    return hashlib.sha256(name.encode() + b"\n" + kind + public).digest()[:4]


def _line(name: str, raw: bytes) -> str:
    return f"\u2014 {name} {base64.b64encode(raw).decode()}\n"


def sign_checkpoint(head: Checkpoint, key: Ed25519PrivateKey) -> str:
    """A signed note: the body, an empty line, one signature line."""
    public = key.public_key().public_bytes_raw()
    return f"{head.body()}\n{_line(head.origin, key_id(head.origin, public) + key.sign(head.body().encode()))}"


def open_checkpoint(note: str, public: bytes) -> Checkpoint:
    """Verify, then parse; cosignature lines may follow, which are :func:`cosigners`' business.

    Raises:
        LedgerCheckpointError: not exactly the form that :func:`sign_checkpoint` writes, or not signed by ``public``.
    """
    lines = note.split("\n")
    try:
        origin, size, root, *later = lines[: lines.index("")]
        line = lines[lines.index("") + 1]
        epoch, nonce = later[0].removeprefix("epoch ").split(" ") if later else ("1", "")
        head = Checkpoint(origin, int(size), base64.b64decode(root, validate=True), int(epoch), nonce)
        raw = base64.b64decode(line.rsplit(" ", 1)[1], validate=True)
        Ed25519PublicKey.from_public_bytes(public).verify(raw[4:], head.body().encode())
    except (ValueError, IndexError, binascii.Error, InvalidSignature):
        raise LedgerCheckpointError("the checkpoint is malformed or not signed by the expected key") from None
    expected = f"{head.body()}\n{_line(origin, key_id(origin, public) + raw[4:])}"
    if not note.startswith(expected) or not note.endswith("\n") or len(head.root) != 32 or head.size < 0:
        raise LedgerCheckpointError("the checkpoint is not in its one permitted form")
    for extra in note[len(expected) :].split("\n")[:-1]:
        if not _COSIGNED.fullmatch(extra):
            raise LedgerCheckpointError("a cosignature is not in its one permitted form")
    return head


_COSIGNED: Final = re.compile(r"\u2014 [a-z0-9][a-z0-9_-]{0,63} [A-Za-z0-9+/]{101}[AQgw]==")  # 4 + 8 + 64 bytes


def _cosigned(body: str, seconds: int) -> bytes:
    return f"cosignature/v1\ntime {seconds}\n{body}".encode()


def cosign(note: str, name: str, key: Ed25519PrivateKey, seconds: int) -> str:
    """A witness's cosignature line: it has seen this head, and the head extends every one it saw before.

    C2SP tlog-cosignature: the signature is over ``cosignature/v1``, the time and the note's body; its key id has type
    4, and the time (seconds since 1970, 8 bytes, big-endian) stands before the signature.
    """
    body = note.partition("\n\n")[0] + "\n"
    public = key.public_key().public_bytes_raw()
    raw = key_id(name, public, _COSIGNATURE) + seconds.to_bytes(8, "big") + key.sign(_cosigned(body, seconds))
    return _line(name, raw)


def cosigners(note: str, keys: Mapping[str, bytes]) -> set[str]:
    """Who of ``keys`` (name -> Ed25519 public key, raw) has validly cosigned this note."""
    body, _blank, signatures = note.partition("\n\n")
    found = set()
    for line in signatures.split("\n")[1:-1]:
        _dash, _, rest = line.partition(" ")
        name, _, encoded = rest.partition(" ")
        try:
            raw, public = base64.b64decode(encoded, validate=True), keys[name]
            if raw[:4] != key_id(name, public, _COSIGNATURE):
                continue
            said = _cosigned(body + "\n", int.from_bytes(raw[4:12], "big"))
            Ed25519PublicKey.from_public_bytes(public).verify(raw[12:], said)
        except (KeyError, ValueError, binascii.Error, InvalidSignature):
            continue
        found.add(name)
    return found
