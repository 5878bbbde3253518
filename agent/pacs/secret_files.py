"""Passwords and tokens in files of their own, which only their owner can read; and where none may go in clear."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protos.common.errors import ConfigError

_MOST: Final = 4096  # bytes


class SecretFileError(ConfigError, RuntimeError):
    """The file of a secret cannot be used. The text reveals nothing of its contents."""


def read_secret(path: Path, what: str) -> str:
    """The one line of a secret's file. ``what`` is what the settings call it.

    Raises:
        SecretFileError: it cannot be read, others could read it too, or it holds nothing that can be sent.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise SecretFileError(f"{what}: others can read the file; chmod 600 it")
        with path.open(encoding="utf-8") as stream:
            value = stream.read(_MOST).strip()
    except (OSError, UnicodeDecodeError):
        raise SecretFileError(f"{what}: the file cannot be read") from None
    if not value or not value.isprintable():
        raise SecretFileError(f"{what}: the file contains nothing that can be sent")
    return value


def make_secret(path: Path, random: Callable[[int], bytes] = os.urandom) -> None:
    """Write a new token of 256 bits (RFC 6750's alphabet) to a new file, 0600.

    Raises:
        FileExistsError: there is one already, which is left as it is.
    """
    token = base64.urlsafe_b64encode(random(32)).rstrip(b"=")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
        stream.write(token + b"\n")


def is_loopback(host: str) -> bool:
    """Does a host name mean this machine?"""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
