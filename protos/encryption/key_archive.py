"""Private files in one sealed box, which only a passphrase opens: how keys travel in a backup when somebody asks.

scrypt (RFC 7914) with N = 2^17, r = 8, p = 1 (128 MiB of memory for each guess) makes the key for AES-256-GCM. The
parameters are fixed: a box that names others is none of ours.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from protos.common.errors import ArtifactError

LEAST: Final = 14  # characters of a passphrase
MOST_BYTES: Final = 1 << 24
_MAGIC: Final = b"LZKEYS1\n"
_SALT, _NONCE = 16, 12
_PATH: Final = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,80}/){0,3}[A-Za-z0-9][A-Za-z0-9._-]{0,80}")


class KeyArchiveError(ArtifactError, ValueError):
    """The passphrase is another one or too short, or the box was changed."""


def ask_passphrase(given: Path | None, *, twice: bool) -> str:
    """A passphrase: from a file, or a line of standard input, or from the terminal, unseen.

    Args:
        given: the file; None: it is asked for.
        twice: typed at a terminal, it is asked for again.
    Raises:
        KeyArchiveError: the two that were typed differ.
    """
    if given is not None:
        return given.read_text().rstrip("\r\n")
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    first = getpass.getpass("passphrase: ")
    if twice and getpass.getpass("again: ") != first:
        raise KeyArchiveError("the two passphrases differ")
    return first


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=1 << 17, r=8, p=1).derive(passphrase.encode())


def seal_files(files: Mapping[str, bytes], passphrase: str) -> bytes:
    """Files by their relative names, sealed.

    Raises:
        KeyArchiveError: the passphrase has fewer than 14 characters, or all the same.
    """
    if not len(passphrase) >= LEAST or len(set(passphrase)) < 5:
        raise KeyArchiveError(f"the passphrase must have at least {LEAST} characters: five words, for example")
    if not all(_PATH.fullmatch(name) for name in files):
        raise KeyArchiveError("a file in the key directory has an invalid name: remove it first")
    salt, nonce = os.urandom(_SALT), os.urandom(_NONCE)
    plain = json.dumps({name: base64.b64encode(body).decode() for name, body in sorted(files.items())}).encode()
    return _MAGIC + salt + nonce + AESGCM(_key(passphrase, salt)).encrypt(nonce, plain, _MAGIC)


def open_files(box: bytes, passphrase: str) -> dict[str, bytes]:
    """The files.

    Raises:
        KeyArchiveError: another passphrase, or the box was changed.
    """
    if not box.startswith(_MAGIC) or not len(box) <= MOST_BYTES:
        raise KeyArchiveError("this is not a key archive")
    at = len(_MAGIC)
    salt, nonce = box[at : at + _SALT], box[at + _SALT : at + _SALT + _NONCE]
    try:
        plain = AESGCM(_key(passphrase, salt)).decrypt(nonce, box[at + _SALT + _NONCE :], _MAGIC)
    except (InvalidTag, ValueError):
        raise KeyArchiveError("the passphrase is wrong, or the key archive was changed") from None
    files = {name: base64.b64decode(body) for name, body in json.loads(plain).items()}
    if not all(_PATH.fullmatch(name) and ".." not in name for name in files):
        raise KeyArchiveError("a file in the key archive has an invalid name")
    return files


def files_of(folder: Path) -> dict[str, bytes]:
    """The plain files below a key directory, or a copy of one on a medium, by their names relative to it.

    Raises:
        KeyArchiveError: it is no directory, or holds a link or too much.
    """
    if not folder.is_dir():
        raise KeyArchiveError(f"{folder.name} is not a folder of keys")
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise KeyArchiveError(f"{folder.name} contains a symbolic link: remove it first")
        if path.is_file() and path.suffix != ".part":
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
            if not sum(map(len, found.values())) <= MOST_BYTES // 2:
                raise KeyArchiveError(f"{folder.name} contains files that are not keys")
    return found


def key_mark(body: bytes) -> str:
    """What tells one key file from another without telling the key: HKDF-SHA256, 32 hexadecimal digits."""
    return HKDF(SHA256(), 16, None, b"lazaret/backup/mark").derive(body).hex()
