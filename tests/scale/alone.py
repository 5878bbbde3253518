"""A network namespace of one's own: its loopback, what else there is, and what the kernel could route nowhere.

unshare -n python -m tests.scale.alone      tries to leave, so that a test can see that it is noticed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
from pathlib import Path

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def loopback_up() -> None:
    """As ``ip link set lo up``.

    Raises:
        OSError: this process may not.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        ask = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, ask))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def interfaces() -> list[str]:
    """What this namespace has besides loopback."""
    return sorted(name for _, name in socket.if_nameindex() if name != "lo")


def unrouted() -> dict[str, int]:
    """How many packets of this namespace had nowhere to go, so far."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Ip:"))
    four = dict(zip(names, values, strict=True))["OutNoRoutes"]
    six = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())["Ip6OutNoRoutes"]
    return {"ipv4": int(four), "ipv6": int(six)}


def leave() -> None:
    """What a careless library does: a name is looked up, an address is dialled."""
    with contextlib.suppress(OSError):
        socket.create_connection(("telemetry.example.org", 443), 2)
    with contextlib.suppress(OSError):
        socket.create_connection(("192.0.2.1", 443), 2)
    with contextlib.suppress(OSError):
        socket.create_connection(("2001:db8::1", 443), 2)


def report(told: str) -> None:
    """Say what there is besides loopback, and what the kernel counted."""
    print(json.dumps({"interfaces": interfaces(), "unrouted": unrouted(), "told": told}))


if __name__ == "__main__":
    loopback_up()
    leave()
    report("")
