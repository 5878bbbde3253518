"""``console.toml``: whether there is a console, where it listens, and who may log in by which way.

The file is parsed once, at the edge, and everything that is wrong with it is said at once. A file that is not there
means that there is no console.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from protos.common.errors import ConfigError
from protos.operations import toml_file

FILE: Final = "console.toml"
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?){0,9}")
PERSON: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # as the ledger writes persons


class ConsoleConfigError(ConfigError, ValueError):
    """The console cannot be opened as it is configured. The text is for the operator and names every problem."""


def is_loopback(host: str) -> bool:
    """Whether a host is this very machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 address stands in brackets.

    Raises:
        ValueError: it is no such address.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError("not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets")
    return host, int(port)


def is_host(name: str) -> bool:
    """Whether a text is a host's name in lower case, or an address."""
    try:
        return str(ipaddress.ip_address(name)) == name
    except ValueError:
        return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Oidc:
    """Logins by the institution's OpenID provider: the provider authenticates, the ledger authorises."""

    issuer: str  # as the provider's own tokens name it
    client_id: str  # name under which the provider knows this console
    client_secret_file: Path  # 0600, in a folder that is 0700
    persons: Mapping[str, str]  # the claim's value -> the person's name in the ledger
    claim: str = "sub"  # of the token, that names the person
    ca: Path | None = None  # PEM of whoever signs the provider's TLS certificate; None: the system's

    def __post_init__(self) -> None:
        """Check everything that can be checked without opening a file or a connection."""
        found = list(self._problems())
        if found:
            raise ConsoleConfigError("; ".join(found))

    def _problems(self) -> list[str]:
        url = urlsplit(self.issuer)
        safe = url.scheme == "https" or (url.scheme == "http" and is_loopback(url.hostname or ""))
        found = []
        if not (safe and url.hostname) or url.query or url.fragment or url.username:
            found.append("oidc.issuer must be an https address without query")
        if not self.client_id or not self.client_id.isprintable():
            found.append("oidc.client_id must be the name under which the provider knows this console")
        if not re.fullmatch(r"[A-Za-z0-9_:/.-]{1,100}", self.claim):
            found.append("oidc.claim must be the name of a claim, such as sub or email")
        if not self.persons or not all(subject and PERSON.fullmatch(name) for subject, name in self.persons.items()):
            found.append('oidc.persons must map claims to names in the ledger: "anna@hospital.example" = "anna"')
        if len(set(self.persons.values())) != len(self.persons):
            found.append("oidc.persons: two claims lead to one person; everybody has a name of their own")
        return found


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """``console.toml``, checked."""

    listen: str = "127.0.0.1:8743"  # host:port of the console; port 0: any free one
    names: tuple[str, ...] = ("localhost", "127.0.0.1")  # under which browsers reach it; no other is answered
    certificate: Path | None = None  # PEM chain of the hospital's PKI; None: one is made, in keys/console.crt
    key: Path | None = None  # of the certificate, PEM
    metrics: str = ""  # host:port of plain HTTP for Prometheus and health checks; "": none
    idle_minutes: int = 15  # after which a login that is not used ends
    hours: int = 8  # after which every login ends
    oidc: Oidc | None = None  # logins by an OpenID provider; left out: certificates only

    def __post_init__(self) -> None:
        """Check everything that can be checked without opening a file."""
        found = list(self._problems())
        if found:
            raise ConsoleConfigError("; ".join(found))

    def _problems(self) -> list[str]:
        found = []
        for name, address in (("listen", self.listen), ("metrics", self.metrics or "127.0.0.1:0")):
            try:
                split(address)
            except ValueError:
                found.append(f'{name} must be host:port, such as "127.0.0.1:8743"')
        if not self.names or not all(is_host(name) for name in self.names):
            found.append('names must list the host names of the console, in lower case: ["console.hospital.example"]')
        if (self.certificate is None) != (self.key is None):
            found.append("certificate and key belong together")
        if not 1 <= self.idle_minutes <= 120:
            found.append("idle_minutes must lie in 1 to 120")
        if not 1 <= self.hours <= 24:
            found.append("hours must lie in 1 to 24")
        return found


def draft(name: str) -> str:
    """The text of a ``console.toml`` for one name under which browsers reach the console.

    A name of this very machine makes a console that nobody else reaches.

    Args:
        name: NAME or NAME:PORT.
    Raises:
        ValueError: it is no such name.
    """
    host, _, port = name.partition(":")
    if not is_host(host) or not (port or "0").isdigit() or int(port or 0) > 65_535:
        raise ValueError("a name in lower case as browsers reach this machine, such as console.hospital.example")
    listen = f"{'127.0.0.1' if is_loopback(host) else '0.0.0.0'}:{port or 8743}"  # noqa: S104 - browsers of the hospital
    return f"listen = {json.dumps(listen)}\nnames = {json.dumps([host])}\n"


def parse(text: str, home: Path) -> ConsoleSettings:
    """Settings from TOML; paths in it are relative to ``home``.

    Raises:
        ConsoleConfigError: with every problem that was found.
    """
    return toml_file.parse(text, ConsoleSettings, FILE, home, ConsoleConfigError)


def read(home: Path) -> ConsoleSettings | None:
    """The settings in a home directory; None without the file: there is no console then.

    Raises:
        ConsoleConfigError: the file cannot be read, or with every problem that was found in it.
    """
    return toml_file.read(home / FILE, ConsoleSettings, ConsoleConfigError)
