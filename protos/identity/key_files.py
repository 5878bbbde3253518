"""Private files: private keys, and other secrets.

A key file is 0600, in a directory that is 0700, both of this very user, and none of them a symbolic link; otherwise
whoever reads it refuses, and so the program does not start.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from protos.common.durable_files import replace_file, write_new
from protos.common.errors import ConfigError


class KeyFileError(ConfigError, ValueError):
    """A private key is missing, readable by others, or of another kind."""


def write_private(path: Path, body: bytes) -> None:
    """Create a private file, 0600, never over an existing one.

    Raises:
        FileExistsError: there is one already.
    """
    write_new(path, body, 0o600)


def replace_private(path: Path, body: bytes) -> None:
    """Create or replace a private file, 0600: after a crash it holds the old bytes or the new ones, whole."""
    replace_file(path, body, 0o600)


def read_private(path: Path) -> bytes:
    """The bytes of a private file that nobody else can read, nor exchange.

    Raises:
        KeyFileError: it is missing, a symbolic link, another user's, or open to group or others, or its directory is.
    """
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        raise KeyFileError(f"{path.name} is missing: its directory does not exist, or is a symbolic link") from None
    try:
        _own(os.fstat(directory), f"the directory of {path.name}", "700")
        handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise KeyFileError(f"{path.name} is not a file")
            _own(found, path.name, "600")
            return file.read()
    except OSError:
        raise KeyFileError(f"{path.name} is missing, unreadable or a symbolic link") from None
    finally:
        os.close(directory)


def _own(found: os.stat_result, what: str, mode: str) -> None:
    if found.st_mode & 0o077:
        raise KeyFileError(f"{what} can be read by others: chmod {mode} it")
    if found.st_uid != os.geteuid():
        raise KeyFileError(f"{what} belongs to another user than the one who runs this: chown it")


def pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    """A private key as PKCS#8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def signing_key(path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in a private PEM file.

    Raises:
        KeyFileError: missing, readable by others, or of another kind.
    """
    key = _key(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path.name} is not an Ed25519 key")
    return key


def ec_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The elliptic-curve key at the beginning of a private PEM file.

    Raises:
        KeyFileError: missing, readable by others, or of another kind.
    """
    key = _key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileError(f"{path.name} is not an elliptic-curve key")
    return key


def _key(path: Path) -> object:
    body = read_private(path)
    try:
        return load_pem_private_key(body, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise KeyFileError(f"{path.name} is not a key") from None
