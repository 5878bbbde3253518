"""The spool: received files, unchanged and encrypted until they are parsed; and rejected files with their reason.

Identifying data goes no further than the spool. A spool file is two AES-256-GCM boxes (its source; its bytes), so a
killed process, a backup or a stolen disk holds only ciphertext (P15). File names are generated here and reveal
nothing: no UID, no path, no patient's name is ever used as one.

A receiver with untrusted peers does not get the spool's key. It gets a ``SpoolWriter``: a fresh key of its own, and
that key encrypted for the spool. It encrypts what it receives, and can decrypt neither pending files nor those of
other receivers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import math
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protos.common.durable_files import flush_directory
from protos.common.errors import Signal, StorageError

Road = Literal["dimse", "pull", "wado", "stow", "folder"]
ROADS: Final = frozenset(get_args(Road))
_RECEIVED: Final = ("dimse", "stow")  # by which receivers of our own take in
_NAME: Final = re.compile(r"[0-9a-f]{32}")
_HEAD: Final = struct.Struct(">4sI")  # magic and format, length of the sealed head
_MAGIC: Final = b"LZR1"
_DEPOSITED: Final = b"LZR2"  # then a receiver's key, sealed with the room's, and a mark of the body; then as LZR1
_NONCE: Final = 12
_TAG: Final = 16
_KEY, _MARK = 32, 32
_SEALED_KEY: Final = _NONCE + _KEY + _TAG
HEAD_BYTES: Final = 65536  # a head is shorter: an AE title, a path, a patient id


class SpoolError(StorageError, RuntimeError):
    """A file of a room cannot be opened: another key, a changed or a cut file. The text names no patient."""


class AlreadyClaimed(Signal):
    """Another process works with a waiting file, or has let it in already."""


@dataclass(frozen=True, slots=True)
class MaskedVolume:
    """What a NIfTI mask is of."""

    body: bytes = field(repr=False)  # the volume's file, as it lies
    segment: str = ""  # the one segment that the mask is of, where its name says it


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    """One file as a road brought it. Everything in it may identify a patient."""

    road: Road
    source: str  # who sent it or where it lies: an AE title, a remote's name, a path below the folder
    body: bytes = field(repr=False)  # a DICOM Part 10 or NIfTI file; empty when the file stays where it lies
    patient_id: str = field(default="", repr=False)  # for formats that carry none (NIfTI), by the hospital's list
    issuer: str = field(default="", repr=False)
    label: str = ""  # the hospital's own label; "" when it has none
    instance: str = field(default="", repr=False)  # SOP Instance UID as the sender announced it; "" when not told
    mask_of: MaskedVolume | None = field(default=None, repr=False)  # of a mask in a folder, which is never sealed

    def __post_init__(self) -> None:
        """A known road."""
        if self.road not in ROADS:
            raise ValueError("unknown road")


_SAID: Final = tuple(f.name for f in fields(ReceivedFile) if f.name not in ("body", "mask_of"))  # in a head


def room_key(vault_key: bytes, purpose: str = "rooms") -> bytes:
    """The rooms' key (32 bytes), derived from the vault's by HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), 32, None, b"lazaret/" + purpose.encode()).derive(vault_key)


@dataclass(frozen=True, slots=True)
class SpoolWriter:
    """A receiver's restricted access to a spool: it can add files, and open those that it added."""

    key: bytes = field(repr=False)  # 32 bytes, fresh
    sealed: bytes = field(repr=False)  # that key, for the room alone
    names: bytes = field(repr=False)  # 32 bytes: names files, so that one instance waits once

    def words(self) -> list[str]:
        """As JSON, for the receiver's setup."""
        return [self.key.hex(), self.sealed.hex(), self.names.hex()]

    @classmethod
    def of(cls, words: list[str]) -> SpoolWriter:
        """The reverse. Raises: ValueError, they are none."""
        key, sealed, names = map(bytes.fromhex, words)
        return cls(key, sealed, names)


def new_name() -> str:
    """A fresh name: 32 hex characters, in the order of arrival."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


class Sealer:
    """Seals arrivals to bytes and opens them again."""

    def __init__(self, key: bytes | SpoolWriter) -> None:
        """Take the room's 32-byte key, or what a receiver is given in its place."""
        self._sealed = b""  # a receiver's own key, for the room
        if isinstance(key, SpoolWriter):
            self._sealed, self._names, key = key.sealed, key.names, key.key
        else:
            self._names = room_key(key, "names")
        if len(key) != _KEY:
            raise ValueError("a room's key has 32 bytes")
        self._aead = AESGCM(key)

    def deposit(self) -> SpoolWriter:
        """A fresh one, for one receiver while it lives. Raises: ValueError, this is a receiver's sealer."""
        if self._sealed:
            raise ValueError("a receiver has no room to give access to")
        key = secrets.token_bytes(_KEY)
        return SpoolWriter(key, bytes(self._box("deposit", key)), self._names)

    def name_of(self, *what: str) -> str:
        """A name that is always the same for the same: HMAC-SHA256, 32 hex characters, which says nothing of it."""
        told = json.dumps(what).encode()
        return hmac.digest(self._names, told, "sha256")[:16].hex()

    def seal(self, name: str, arrival: ReceivedFile, digest: str = "") -> tuple[bytes, bytearray]:
        """Head and body as they are written, one after the other."""
        told = {name: getattr(arrival, name) for name in _SAID}
        told |= {"received": time.time_ns(), "digest": digest}
        head = self._box(name + "/head", json.dumps(told).encode())
        front = _HEAD.pack(_DEPOSITED if self._sealed else _MAGIC, len(head))
        if self._sealed:
            front += self._sealed + self._mark(name, arrival.body)
        return front + head, self._box(name + "/body", arrival.body)

    def _mark(self, name: str, body: bytes) -> bytes:
        """By which a receiver sees that the same bytes wait already, though it cannot open them."""
        return hmac.digest(self._names, b"body" + name.encode() + body, "sha256")

    def same(self, name: str, raw: bytes, arrival: ReceivedFile) -> bool:
        """Does a file of that name hold the arrival's bytes? Of what cannot be told: no."""
        if self._sealed:
            at = _HEAD.size + _SEALED_KEY
            return raw.startswith(_DEPOSITED) and raw[at : at + _MARK] == self._mark(name, arrival.body)
        try:
            return self.open(name, raw).body == arrival.body
        except SpoolError:
            return False

    def _box(self, what: str, plain: bytes) -> bytearray:
        nonce = os.urandom(_NONCE)
        box = bytearray(_NONCE + len(plain) + _TAG)  # sealed in place: an image is not copied behind its nonce
        box[:_NONCE] = nonce
        self._aead.encrypt_into(nonce, plain, what.encode(), memoryview(box)[_NONCE:])
        return box

    def _unbox(self, what: str, box: bytes, aead: AESGCM | None = None) -> bytes:
        try:
            return (aead or self._aead).decrypt(box[:_NONCE], box[_NONCE:], what.encode())
        except (InvalidTag, ValueError):
            raise SpoolError("a waiting file was changed, cut or sealed with another key") from None

    def open(self, name: str, raw: bytes) -> ReceivedFile:
        """What ``seal`` was given.

        Raises:
            SpoolError: it was changed, cut, renamed or sealed with another key.
        """
        told, end = self.head(name, raw)
        del told["received"], told["digest"]
        key, start = self._key_of(raw)
        body = self._unbox(name + "/body", raw[end:], key)
        if raw.startswith(_DEPOSITED) and raw[start - _MARK : start] != self._mark(name, body):
            raise SpoolError("a waiting file was changed, cut or sealed with another key")
        return ReceivedFile(body=body, **told)

    def head(self, name: str, raw: bytes) -> tuple[dict[str, Any], int]:
        """The head alone, and where the body's box starts."""
        if len(raw) < _HEAD.size or not raw.startswith((_MAGIC, _DEPOSITED)):
            raise SpoolError("a waiting file has no head: it was cut or is not one of this room's")
        _, length = _HEAD.unpack_from(raw)
        key, start = self._key_of(raw)
        end = start + length
        try:
            told = json.loads(self._unbox(name + "/head", raw[start:end], key))
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or (raw.startswith(_DEPOSITED) and not _may_say(told)):
            raise SpoolError("a waiting file says of itself what no receiver knows")
        return told, end

    def _key_of(self, raw: bytes) -> tuple[AESGCM, int]:
        """With what a file is sealed, and where its boxes begin. A receiver has its own key alone."""
        if raw.startswith(_MAGIC):
            return self._aead, _HEAD.size
        sealed, start = raw[_HEAD.size : _HEAD.size + _SEALED_KEY], _HEAD.size + _SEALED_KEY + _MARK
        if self._sealed:
            return self._aead, start
        return AESGCM(self._unbox("deposit", sealed)), start


def _may_say(told: dict[str, Any]) -> bool:
    """Is this the head of a receiver's file? One that was taken over may write anything, and knows no label or id."""
    named = {*_SAID, "digest"}
    if told.keys() != named | {"received"}:
        return False
    texts = {key: told[key] for key in named}
    given = any(texts[key] for key in ("patient_id", "issuer", "label", "digest"))
    return all(type(v) is str for v in texts.values()) and texts["road"] in _RECEIVED and not given


class Spool:
    """A folder of sealed arrivals, one file each, written whole or not at all."""

    def __init__(self, folder: Path, key: bytes | SpoolWriter, *, durable: bool = True) -> None:
        """Make the folder (0700) when it is missing; files that a crash left half-written are removed by ``sweep``.

        Args:
            folder: of this room alone.
            key: 32 bytes; or a receiver's deposit, which lets it put something in.
            durable: an arrival is on the disk, not only with the system, when ``put`` returns. Without it, a loss
                of power loses what the system had not yet written; a killed process loses nothing either way.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.folder, self._sealer, self._durable = folder, Sealer(key), durable

    def deposit(self) -> SpoolWriter:
        """What one receiver is given, while it lives, in place of this room's key."""
        return self._sealer.deposit()

    def put(self, arrival: ReceivedFile) -> str:
        """Keep an arrival; its name. It is in the room, whole, when this returns.

        A pending instance, from the same sender with the same bytes, is not stored twice. With other bytes, or from
        another sender, it is stored in addition: no sender can replace or block another's file.

        Raises:
            OSError: nothing was kept.
        """
        name = self.named(arrival.instance, arrival.road, arrival.source) if arrival.instance else new_name()
        try:
            self._write(name, self._sealer.seal(name, arrival))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if self._sealer.same(name, (self.folder / checked(name)).read_bytes(), arrival):
                    return name
            name = new_name()
            self._write(name, self._sealer.seal(name, arrival))
        return name

    def named(self, instance: str, road: str, source: str) -> str:
        """The name of an instance as somebody sent it."""
        return self._sealer.name_of("instance", instance, road, source)

    def holds(self, instance: str, senders: Iterable[tuple[str, str]]) -> bool:
        """Does the instance of a SOP Instance UID wait here, as one of these (road, source) sent it?"""
        return any((self.folder / self.named(instance, road, source)).exists() for road, source in senders)

    def _write(self, name: str, parts: tuple[bytes | bytearray, ...], final: str = "") -> None:
        part = self.folder / f".{name}.{secrets.token_hex(4)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(part, flags, 0o600), "wb", buffering=0) as stream:
                for piece in parts:
                    view = memoryview(piece)
                    while view:
                        view = view[stream.write(view) :]
                if self._durable:
                    os.fsync(stream.fileno())
            os.link(part, self.folder / (final or name))  # unlike a renaming, it never replaces what is there
        finally:
            part.unlink(missing_ok=True)
        if self._durable:
            flush_directory(self.folder)

    def names(self) -> list[str]:
        """What waits, oldest first."""
        found = []
        with os.scandir(self.folder) as files:
            for file in files:
                if _NAME.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):  # somebody else took it
                        found.append((file.stat(follow_symlinks=False).st_mtime_ns, file.name))
        return [name for _, name in sorted(found)]

    def open(self, name: str) -> ReceivedFile:
        """One arrival.

        Raises:
            SpoolError: the file was changed, or is another key's.
            FileNotFoundError: somebody else took it.
        """
        return self._sealer.open(name, (self.folder / checked(name)).read_bytes())

    def claim(self, name: str) -> tuple[ReceivedFile | None, int]:
        """One arrival, and a descriptor that keeps every other process from it until it is closed.

        Returns:
            The arrival, None when it cannot be unsealed; the descriptor.
        Raises:
            AlreadyClaimed: somebody else works with it, or it is gone.
        """
        path = self.folder / checked(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise AlreadyClaimed from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or path.stat().st_ino != os.fstat(descriptor).st_ino:
                raise AlreadyClaimed
            with os.fdopen(os.dup(descriptor), "rb") as stream:
                raw = stream.read()
            return self._sealer.open(name, raw), descriptor
        except SpoolError:
            return None, descriptor
        except (BlockingIOError, FileNotFoundError, AlreadyClaimed):
            os.close(descriptor)
            raise AlreadyClaimed from None
        except BaseException:
            os.close(descriptor)
            raise

    def remove(self, name: str) -> None:
        """Forget an arrival: it is kept elsewhere now. Removing twice is no error."""
        (self.folder / checked(name)).unlink(missing_ok=True)

    def sweep(self, older_than: float = math.inf) -> int:
        """Remove what a killed process left half-written; how many.

        Args:
            older_than: seconds since 1970; only what was begun before. Without it nothing else may write here.
        """
        torn = [part for part in self.folder.glob(".*.part") if _begun(part) < older_than]
        for part in torn:
            part.unlink(missing_ok=True)
        return len(torn)


def _begun(part: Path) -> float:
    try:
        return part.stat().st_mtime
    except FileNotFoundError:
        return math.inf  # finished meanwhile


def checked(name: str) -> str:
    """A name of a room. Raises: ValueError, it is none."""
    if not _NAME.fullmatch(name):
        raise ValueError("not a name of this room")
    return name
