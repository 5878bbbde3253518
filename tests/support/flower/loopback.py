"""Refuse and note every look-up, connection or listener of this process that is not on loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class LeftLoopback(ConnectionError):
    """The process tried to reach, find or serve something that is not on this machine."""


def _local(host: object) -> bool:
    if host in (None, "", "localhost", b"localhost"):
        return True
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else str(host)).is_loopback
    except ValueError:
        return False


def guard(notes: Path, on: Callable[[], bool] = lambda: True) -> None:
    """Install an audit hook below every library, Python's own sockets included; append hosts to ``notes``.

    It cannot be taken out again: it looks only while it is ``on``.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("socket.getaddrinfo", "socket.gethostbyname"):
            host = args[0]
        elif event in ("socket.connect", "socket.sendto", "socket.bind"):
            sock, address = args[0], args[1]
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return
            host = address[0]
        else:
            return
        if on() and not _local(host):
            with notes.open("a") as out:
                out.write(f"{event} {host!r}\n")
            raise LeftLoopback(event)

    sys.addaudithook(hook)


@contextlib.contextmanager
def guarded(notes: Path) -> Iterator[None]:
    """The same for a while, in a process that goes on."""
    inside = [True]
    guard(notes, lambda: bool(inside))
    try:
        yield
    finally:
        inside.clear()
