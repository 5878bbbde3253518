"""Ports for programs that are told theirs before they bind it, and for those that nobody is to answer on."""

from __future__ import annotations

import fcntl
import random
import socket
from pathlib import Path
from typing import Final

_FIRST: Final = 20_000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: list[socket.socket] = []  # the claims of this process, to its end


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on, and that no other test gets while this process lives.

    A port that the system chose, and that was let go to be bound again, may go to another process meanwhile. So this
    one is of those that the system never chooses by itself, and it is claimed among all processes of tests by an
    abstract socket of its name, which ends with the process (unix(7)).

    Raises:
        OSError: none is left.
    """
    last = int(_RANGE.read_text().split()[0])
    ports = range(_FIRST, last) if last - _FIRST >= 1000 else range(1024, 1 << 16)
    start = random.SystemRandom().randrange(len(ports))
    for port in (*ports[start:], *ports[:start]):
        if (claim := claimed(port)) is not None:
            _held.append(_out_of_the_way(claim))
            return port
    raise OSError("no port is free")


def _out_of_the_way(claim: socket.socket) -> socket.socket:
    """The same under a high number: libraries that wait by select(2) need those below 1024."""
    try:
        number = fcntl.fcntl(claim.fileno(), fcntl.F_DUPFD_CLOEXEC, 1 << 11)
    except OSError:  # this process may have no so high one
        return claim
    claim.close()
    return socket.socket(fileno=number)


def claimed(port: int) -> socket.socket | None:
    """The claim of a port; None when another has it, or somebody listens there."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0lazaret-test-port-{port}")
        for host in ("127.0.0.1", ""):
            socket.create_server((host, port)).close()
    except OSError:
        claim.close()
        return None
    return claim
