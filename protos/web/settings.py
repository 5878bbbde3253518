"""``console.toml``: whether there is a console, where it listens, and who may log in by which way.

The file is parsed once, at the edge, and everything that is wrong with it is said at once. A file that is not there
means that there is no console.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

FILE: Final = "console.toml"
_T = TypeVar("_T")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?){0,9}")
PERSON: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # as the ledger writes persons


class BadConsole(ValueError):
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
    """Logins by the institution's OpenID provider: it says who somebody is, the ledger says what that person may."""

    issuer: str  # as the provider's own tokens name it
    client_id: str
    client_secret_file: Path  # 0600, in a folder that is 0700
    persons: Mapping[str, str]  # the claim's value -> the person's name in the ledger
    claim: str = "sub"
    ca: Path | None = None  # PEM of whoever signs the provider's TLS certificate; None: the system's

    def __post_init__(self) -> None:
        """Check everything that can be checked without opening a file or a connection."""
        found = list(self._problems())
        if found:
            raise BadConsole("; ".join(found))

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
    key: Path | None = None
    metrics: str = ""  # host:port of plain HTTP for Prometheus and health checks; "": none
    idle_minutes: int = 15  # after which a login that is not used ends
    hours: int = 8  # after which every login ends
    oidc: Oidc | None = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without opening a file."""
        found = list(self._problems())
        if found:
            raise BadConsole("; ".join(found))

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


_KINDS: Final[Mapping[str, tuple[type, str]]] = MappingProxyType(
    {
        "listen": (str, "a text"),
        "names": (list, "a list of texts"),
        "certificate": (str, "a path"),
        "key": (str, "a path"),
        "metrics": (str, "a text"),
        "idle_minutes": (int, "a whole number"),
        "hours": (int, "a whole number"),
        "oidc": (dict, "a table"),
    }
)
_OIDC_KINDS: Final[Mapping[str, tuple[type, str]]] = MappingProxyType(
    {
        "issuer": (str, "a text"),
        "client_id": (str, "a text"),
        "client_secret_file": (str, "a path"),
        "persons": (dict, "a table"),
        "claim": (str, "a text"),
        "ca": (str, "a path"),
    }
)


@dataclass(frozen=True, slots=True)
class _Parser:
    """Reads a table, keeps what fits, and remembers what does not."""

    home: Path
    problems: list[str] = field(default_factory=list)

    def take(
        self, table: Mapping[str, Any], kinds: Mapping[str, tuple[type, str]], where: str = ""
    ) -> dict[str, Any]:
        """The entries of a known name and type; paths made absolute."""
        unknown = sorted(set(table) - set(kinds))
        if unknown:
            self.problems.append(f"unknown keys: {', '.join(where + name for name in unknown)}")
        out: dict[str, Any] = {}
        for name, (kind, words) in kinds.items():
            if name not in table:
                continue
            value: Any = table[name]
            texts: Any = value if kind is list else value.values() if kind is dict and name == "persons" else ()
            fits = type(value) is kind
            if not fits or not all(type(text) is str for text in texts):
                self.problems.append(f"{where}{name} must be {words}")
            elif words == "a path":
                out[name] = self.home / value
            else:
                out[name] = tuple(value) if kind is list else value
        return out

    def build(self, make: Callable[..., _T], given: dict[str, Any]) -> _T | None:
        """What the entries make, or None with the problems remembered."""
        try:
            return make(**given)
        except BadConsole as error:
            self.problems.append(str(error))
        return None


def parse(text: str, home: Path) -> ConsoleSettings:
    """Settings from TOML; paths in it are relative to ``home``.

    Raises:
        BadConsole: with every problem that was found.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadConsole(f"{FILE}: not TOML: {error}") from None
    parser = _Parser(home)
    given = parser.take(table, _KINDS)
    if "oidc" in given:
        of_oidc = parser.take(given.pop("oidc"), _OIDC_KINDS, "oidc.")
        missing = sorted({"issuer", "client_id", "client_secret_file", "persons"} - set(table["oidc"]))
        if missing:
            parser.problems.append(f"missing keys: {', '.join('oidc.' + name for name in missing)}")
        elif len(of_oidc) == len(table["oidc"]):
            given["oidc"] = parser.build(lambda **k: Oidc(**k | {"persons": MappingProxyType(k["persons"])}), of_oidc)
    settings = parser.build(ConsoleSettings, given)
    if parser.problems or settings is None:
        raise BadConsole(f"{FILE}: {'; '.join(parser.problems)}")
    return settings


def read(home: Path) -> ConsoleSettings | None:
    """The settings in a home directory; None without the file: there is no console then.

    Raises:
        BadConsole: the file cannot be read, or with every problem that was found in it.
    """
    try:
        text = (home / FILE).read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise BadConsole(f"{FILE} cannot be read: check whose it is") from None
    return parse(text, home)
