"""The coordinator's directory: configuration, keys, ledger, admitted releases and runs."""

from __future__ import annotations

import datetime as dt
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.policy import Policy
from policies.policy import parse as parse_policy
from policies.sqlite import look, open_sqlite
from policies.store import Disk, Store
from protos.identity import (
    COORDINATOR,
    OPERATOR,
    issue,
    make_ca,
    pem,
    read_private,
    request,
    signing_key,
    write_private,
)

ORIGIN = "lazaret/coordinator"


class BadCoordinator(ValueError):
    """The directory cannot be used; the text says which file and what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``coordinator.toml``, checked."""

    listen: str  # host:port of the gRPC service
    superlink: str  # host:port of Flower's public listener
    ledger: str = ""  # a PostgreSQL address; nothing: the file ledger.db


@dataclass(frozen=True, slots=True)
class Home:
    """Paths and keys of the coordinator."""

    root: Path

    @property
    def keys(self) -> Path:
        """The key directory, 0700."""
        return self.root / "keys"

    @property
    def ledger(self) -> Path:
        """The ledger's database."""
        return self.root / "ledger.db"

    @property
    def releases(self) -> Path:
        """Admitted releases, a directory each."""
        return self.root / "releases"

    @property
    def witnesses(self) -> Path:
        """Heads that sites have cosigned."""
        return self.root / "witnesses"

    def settings(self) -> Settings:
        """Parse ``coordinator.toml``.

        Raises:
            BadCoordinator: missing, not TOML, or with missing, unknown or ill-typed keys.
        """
        try:
            table = tomllib.loads((self.root / "coordinator.toml").read_text())
        except FileNotFoundError:
            raise BadCoordinator("coordinator.toml is missing: run `lazaret-coordinator --home DIR init`") from None
        except tomllib.TOMLDecodeError as error:
            raise BadCoordinator(f"coordinator.toml: not TOML: {error}") from None
        address = table.pop("ledger", "")
        if set(table) != {"listen", "superlink"} or not all(_address(v) for v in table.values()):
            raise BadCoordinator("coordinator.toml: the keys are listen and superlink, each host:port, and ledger")
        if type(address) is not str or not address.isprintable():
            raise BadCoordinator("coordinator.toml: ledger is the address of a PostgreSQL database, or is left out")
        return Settings(table["listen"], table["superlink"], address)

    def policy_text(self) -> str:
        """The federation's policy, as written."""
        try:
            return (self.root / "policy.toml").read_text()
        except OSError:
            raise BadCoordinator("policy.toml is missing: without a policy nothing is admitted") from None

    def policy(self) -> Policy:
        """The federation's policy, parsed."""
        return parse_policy(self.policy_text(), "policy.toml")

    def ledger_key(self) -> Ed25519PrivateKey:
        """The key that signs checkpoints."""
        return signing_key(self.keys / "ledger.key")

    def ca(self) -> tuple[bytes, bytes]:
        """The federation's CA: (private key PEM, certificate PEM)."""
        return read_private(self.keys / "ca.key"), (self.keys / "ca.crt").read_bytes()


def _address(value: object) -> bool:
    host, colon, port = str(value).rpartition(":")
    return (
        isinstance(value, str) and bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65_536
    )


def create(root: Path, settings: str, policy: str, now: dt.datetime) -> Home:
    """Make the coordinator's directory, its CA, its own and the operator's certificate; nothing is overwritten.

    Raises:
        BadCoordinator: the directory holds something, or a text is not valid.
    """
    if root.exists() and any(root.iterdir()):
        raise BadCoordinator(f"{root.name} is not empty: nothing was written")
    parse_policy(policy, "policy.toml")
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    home = Home(root)
    (root / "coordinator.toml").write_text(settings)
    (root / "policy.toml").write_text(policy)
    home.keys.mkdir(mode=0o700)
    write_private(home.keys / "ledger.key", pem(Ed25519PrivateKey.generate()))
    ca = make_ca(now)
    write_private(home.keys / "ca.key", ca[0])
    (home.keys / "ca.crt").write_bytes(ca[1])
    host = home.settings().listen.rpartition(":")[0]
    for stem, name, hosts in (("tls", COORDINATOR, ("localhost", "127.0.0.1", host)), ("operator", OPERATOR, ())):
        key = ec.generate_private_key(ec.SECP256R1())
        write_private(home.keys / f"{stem}.key", pem(key))
        certificate = issue(request(key, name), name, ca, now, tuple(dict.fromkeys(hosts)))
        (home.keys / f"{stem}.crt").write_bytes(certificate)
    return home


def open_ledger(home: Home) -> Store:
    """The coordinator's ledger, for this process alone to append to.

    Raises:
        LedgerBusy: another process has it.
        LedgerUnsound: what is kept does not fold.
        BadCoordinator: it is in a database that cannot be used; the text says what to do.
    """
    address = home.settings().ledger
    disk: Disk = _database(lambda pg: pg.open_postgres(address)) if address else open_sqlite(home.ledger)
    return Store(disk, ORIGIN, home.ledger_key(), lambda: int(time.time()))


def look_at_ledger(home: Home) -> Disk:
    """The coordinator's ledger to read, also while another process writes it."""
    address = home.settings().ledger
    disk: Disk = _database(lambda pg: pg.look_postgres(address)) if address else look(home.ledger)
    return disk


def install_ledger(owner: str, writer: str) -> None:
    """Make the ledger's tables and functions in PostgreSQL, as their owner, who is not the coordinator.

    Raises:
        BadCoordinator: it cannot be done; the text says why.
    """
    _database(lambda pg: pg.install(owner, writer))


def _database(act: Callable[[Any], Any]) -> Any:
    """Do something with :mod:`policies.postgres`, whose driver is optional."""
    try:
        from policies import postgres  # noqa: PLC0415 - its driver is optional
    except ModuleNotFoundError:
        raise BadCoordinator("for a ledger in PostgreSQL install lazaret[postgres]") from None
    try:
        return act(postgres)
    except (ValueError, ConnectionError) as error:
        raise BadCoordinator(f"the ledger's database: {error}") from None


def write_durably(path: Path, body: bytes) -> None:
    """Write, flush to the disk, rename into place, flush the directory: all or nothing."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as out:
        out.write(body)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
