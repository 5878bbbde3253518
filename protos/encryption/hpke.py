"""Encrypt an artifact to a reader other than the coordinator, which stores and reviews it but cannot read it.

HPKE (RFC 9180) in base mode wraps a fresh key, with the hybrid of ML-KEM-768 and X25519, so that a future quantum
computer cannot decrypt what is recorded today. The body is AES-256-GCM for each MiB in the STREAM construction
(Hoang, Reyhanitabar, Rogaway & Vizar 2015, section 5): a nonce is prefix, index and a flag on the last piece, so
pieces cannot be left out, moved or taken from another file. Base mode does not authenticate the sender; the DSSE
statement does, which is signed over the SHA-256 of the *encrypted* bytes. Rejected: age (pyrage), one more dependency
for the same construction, without ML-KEM in its releases.

    "LZREADER" | SHA-256 of the reader's public key | 2 bytes n | n bytes of HPKE | 7 bytes nonce prefix | pieces
    piece      AES-256-GCM of up to 1 MiB, 16 bytes longer than it; all but the last are full
    nonce      7 bytes prefix | 4 bytes index | 1 byte: 1 on the last piece, else 0
    AAD        SHA-256 of everything before the pieces
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from protos.artifacts.chunks import CHUNK, Artifact
from protos.common.durable_files import replace_file
from protos.common.errors import ArtifactError
from protos.identity.certificates import read_private, write_private

PUBLIC_BYTES: Final = 1184 + 32  # ML-KEM-768, X25519
PRIVATE_BYTES: Final = 64 + 32  # the seed of FIPS 203, X25519
_SUITE: Final = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_INFO: Final = b"lazaret/artifact-to-reader/v1\n"
_MAGIC: Final = b"LZREADER"
_HEAD: Final = struct.Struct(">8s32sH")
_PREFIX: Final = 7
_TAG: Final = 16
_WRAPPED: Final = 1088 + 32 + 32 + _TAG  # of the suite: ML-KEM-768's ciphertext, X25519's share, the key sealed
_LAST: Final = (1 << 32) - 1  # the highest index of a piece: 4 PiB
_PRIVATE_LABEL: Final = b"lazaret-reader-private-1"
_PUBLIC_LABEL: Final = b"lazaret-reader-1"


class SealedFileError(ArtifactError, ValueError):
    """Not a sealed artifact, for another reader, or changed since it was sealed."""


class ReaderKeyError(ArtifactError, ValueError):
    """Not a reader's key."""


def fingerprint(reader_public: bytes) -> str:
    """The name of a reader: SHA-256 of the public key, 64 hexadecimal digits. Statements name readers by it."""
    return hashlib.sha256(reader_public).hexdigest()


def make_reader() -> tuple[bytes, bytes]:
    """A reader's new key pair: (private, public), of :data:`PRIVATE_BYTES` and :data:`PUBLIC_BYTES`."""
    kem, curve = MLKEM768PrivateKey.generate(), X25519PrivateKey.generate()
    private = kem.private_bytes_raw() + curve.private_bytes_raw()
    return private, kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()


def write_reader(folder: Path, name: str) -> str:
    """Make a reader's key pair as files: ``<name>.key`` (0600, stays with the reader) and ``<name>.pub``.

    Returns:
        The fingerprint, for people to compare.
    Raises:
        FileExistsError: there is a key of that name; nothing is overwritten.
    """
    private, public = make_reader()
    write_private(folder / f"{name}.key", _text(_PRIVATE_LABEL, private))
    with (folder / f"{name}.pub").open("xb") as out:
        out.write(_text(_PUBLIC_LABEL, public))
    return fingerprint(public)


def read_reader_private(path: Path) -> bytes:
    """The private key in a file of :func:`write_reader`.

    Raises:
        ReaderKeyError: it is not one.
        KeyFileError: missing, or open to others.
    """
    return _from_text(_PRIVATE_LABEL, read_private(path), PRIVATE_BYTES)


def read_reader_public(path: Path) -> bytes:
    """The public key in a file of :func:`write_reader`.

    Raises:
        ReaderKeyError: it is not one.
        OSError: it cannot be read.
    """
    raw = _from_text(_PUBLIC_LABEL, path.read_bytes(), PUBLIC_BYTES)
    _public(raw)
    return raw


def _text(label: bytes, raw: bytes) -> bytes:
    return label + b" " + base64.b64encode(raw) + b"\n"


def _from_text(label: bytes, text: bytes, size: int) -> bytes:
    found, _, body = text.strip().partition(b" ")
    try:
        raw = base64.b64decode(body, validate=True)
    except ValueError:
        raw = b""
    if found != label or len(raw) != size:
        raise ReaderKeyError(f"the file holds no {label.decode()} key")
    return raw


def _public(raw: bytes) -> MLKEM768X25519PublicKey:
    if len(raw) != PUBLIC_BYTES:
        raise ReaderKeyError("a reader's public key has another length")
    try:
        kem = MLKEM768PublicKey.from_public_bytes(raw[:-32])
    except ValueError:
        raise ReaderKeyError("not an ML-KEM-768 public key") from None
    return MLKEM768X25519PublicKey(kem, X25519PublicKey.from_public_bytes(raw[-32:]))


def _private(raw: bytes) -> tuple[MLKEM768X25519PrivateKey, bytes]:
    """The key, and its public half."""
    if len(raw) != PRIVATE_BYTES:
        raise ReaderKeyError("a reader's private key has another length")
    kem, curve = MLKEM768PrivateKey.from_seed_bytes(raw[:-32]), X25519PrivateKey.from_private_bytes(raw[-32:])
    public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
    return MLKEM768X25519PrivateKey(kem, curve), public


def sealed_bytes(clear: int) -> int:
    """How many bytes an artifact of ``clear`` bytes has once it is sealed."""
    return _HEAD.size + _WRAPPED + _PREFIX + clear + _TAG * max(1, -(-clear // CHUNK))


def seal_to(reader_public: bytes, artifact: Artifact, out: Path, random: Callable[[int], bytes] = os.urandom) -> None:
    """Seal an artifact to one reader, a MiB at a time; ``out`` appears whole or not at all.

    Args:
        reader_public: :data:`PUBLIC_BYTES`; compare its :func:`fingerprint` with the reader by another way first.
        artifact: a file or bytes.
        out: the sealed artifact; what a statement signs is the SHA-256 of this file.
        random: n random bytes; the content key and the nonce prefix come from it, HPKE has its own source.
    Raises:
        ReaderKeyError: not a public key.
        OSError: reading or writing failed.
    """
    key, prefix = random(32), random(_PREFIX)
    wrapped = _SUITE.encrypt(key, _public(reader_public), _INFO + hashlib.sha256(reader_public).digest())
    head = _HEAD.pack(_MAGIC, hashlib.sha256(reader_public).digest(), len(wrapped)) + wrapped + prefix
    cipher, bound = AESGCM(key), hashlib.sha256(head).digest()

    def body() -> Iterator[bytes]:
        yield head
        for index, data, last in _read_ahead(artifact, CHUNK):
            yield cipher.encrypt(_nonce(prefix, index, last), data, bound)

    replace_file(out, body(), 0o600)


def open_sealed_artifact(reader_private: bytes, path: Path, out: Path) -> None:
    """Open what was sealed to this reader; ``out`` appears only after the last piece was found genuine.

    Compare the SHA-256 of ``path`` with the signed statement first: HPKE's base mode does not say who sealed.

    Raises:
        SealedFileError: of another form, for another reader, cut short, reordered or changed in any bit; no ``out``.
        ReaderKeyError: not a private key.
        OSError: reading or writing failed.
    """
    private, public = _private(reader_private)
    with path.open("rb") as stream:
        cipher, prefix, bound = _open_head(stream, private, public)

        def body() -> Iterator[bytes]:
            for index, data, last in _read_ahead(stream, CHUNK + _TAG):
                try:
                    plain = cipher.decrypt(_nonce(prefix, index, last), data, bound)
                except InvalidTag:
                    raise SealedFileError(f"piece {index} is not the one that was sealed here") from None
                if index and not plain:
                    raise SealedFileError("not in its one form")
                yield plain

        replace_file(out, body(), 0o600)


def check_form(path: Path, reader: str) -> None:
    """Check an encrypted artifact without a key: its head names this reader, and complete pieces follow.

    That the pieces are ciphertext, and that the reader can open them, nobody else can see: random or even plain bytes
    behind such a head pass. Reads the head alone.

    Args:
        path: the artifact.
        reader: the :func:`fingerprint` that it is said to be sealed to.
    Raises:
        SealedFileError: it has not that form.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        _, wrapped = _read_head(stream, reader)
    if wrapped != _WRAPPED:
        raise SealedFileError("its key is of another length")
    whole, rest = divmod(path.stat().st_size - _HEAD.size - _WRAPPED - _PREFIX, CHUNK + _TAG)
    if whole < 0 or not (rest >= _TAG or (whole and not rest)) or (whole and rest == _TAG):
        raise SealedFileError("not whole pieces")


def _read_head(stream: BinaryIO, reader: str) -> tuple[bytes, int]:
    """The bytes of a head for this reader, and how long its wrapped key is."""
    start = stream.read(_HEAD.size)
    magic, named, wrapped = _HEAD.unpack(start) if len(start) == _HEAD.size else (b"", b"", 0)
    if magic != _MAGIC:
        raise SealedFileError("not a sealed artifact")
    if named.hex() != reader:
        raise SealedFileError("encrypted to another recipient")
    return start, wrapped


def _open_head(stream: BinaryIO, private: MLKEM768X25519PrivateKey, public: bytes) -> tuple[AESGCM, bytes, bytes]:
    """What opens the pieces: their cipher, the nonces' prefix, and what each is bound to."""
    start, size = _read_head(stream, fingerprint(public))
    rest = stream.read(size + _PREFIX)
    if len(rest) != size + _PREFIX:
        raise SealedFileError("cut short")
    try:
        key = _SUITE.decrypt(rest[:size], private, _INFO + hashlib.sha256(public).digest())
    except (InvalidTag, ValueError):
        raise SealedFileError("its key does not open") from None
    if len(key) != 32:
        raise SealedFileError("its key is of another length")
    return AESGCM(key), rest[size:], hashlib.sha256(start + rest).digest()


def _nonce(prefix: bytes, index: int, last: bool) -> bytes:
    if index > _LAST:
        raise SealedFileError("too many pieces")
    return prefix + index.to_bytes(4, "big") + bytes([last])


def _read_ahead(source: Artifact | BinaryIO, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """(index, piece, is it the last?); of nothing, one empty piece."""
    if isinstance(source, bytes):
        total = max(1, -(-len(source) // size))
        yield from ((i, source[i * size : (i + 1) * size], i == total - 1) for i in range(total))
    elif isinstance(source, Path):
        with source.open("rb") as stream:
            yield from _read_ahead(stream, size)
    else:
        index, data = 0, source.read(size)
        while True:
            following = source.read(size) if len(data) == size else b""
            yield index, data, not following
            if not following:
                return
            index, data = index + 1, following
