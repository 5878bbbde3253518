"""The coordinator's directory: configuration, keys, ledger, admitted releases and runs."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.errors import CoordinatorConfigError
from coordinator.storage.ledger_evidence import collect, hold_against
from policies.ledger.backends.sqlite import open_read_only, open_sqlite
from policies.ledger.store import LedgerBackend, Store
from policies.review.policy import Policy
from policies.review.policy import parse as parse_policy
from protos.common.durable_files import exclusively, fill_folder, finish_filling
from protos.identity.certificates import (
    CA,
    COORDINATOR,
    OPERATOR,
    CertificateError,
    bears,
    issue,
    leaf_of,
    make_intermediate,
    make_root,
    request,
)
from protos.identity.key_files import (
    KeyFileError,
    ec_key,
    pem,
    read_private,
    replace_private,
    signing_key,
    write_private,
)
from protos.operations import toml_file

ORIGIN = "lazaret/coordinator"
_GOES_ON = "; to go on with it: lazaret-coordinator setup"
_RENEW_AT = 1 / 3  # of a leaf's life, when so much of it remains
_OFFLINE = """The federation's root key. Move this folder to an offline medium now, and keep it locked away.

The coordinator serves without it. It is needed once a year, to renew the intermediate authority:
`lazaret-coordinator --home DIR renew-ca FOLDER`, with this folder at hand; then take it away again.
Whoever holds root.key can be anybody in this federation. If it is lost, every site has to be enrolled anew.
"""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """``coordinator.toml``, checked."""

    listen: str  # host:port of the gRPC service, the one port that sites need
    ledger: str = ""  # a PostgreSQL address; nothing: the file ledger.db
    address: str = ""  # host:port at which sites reach `listen`, where that is another one
    superlink: str = ""  # of older versions: the listener for stock Flower nodes is gone

    def __post_init__(self) -> None:
        """Addresses are host:port; the ledger's has no control characters."""
        found = []
        if not _is_address(self.listen) or not _is_address(self.address or self.listen):
            found.append("listen and address must be host:port")
        if not self.ledger.isprintable():
            found.append("ledger is the address of a PostgreSQL database, or is left out")
        if self.superlink:
            found.append("there is no listener for stock Flower nodes; delete superlink")
        if found:
            raise CoordinatorConfigError("; ".join(found))

    @property
    def reached_at(self) -> str:
        """host:port that sites dial."""
        return self.address or self.listen


@dataclass(frozen=True, slots=True)
class CoordinatorDirectory:
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
    def enrolments(self) -> Path:
        """Invitations and requests to take part, a file for each site."""
        return self.root / "enrolments"

    @property
    def witnesses(self) -> Path:
        """Heads that sites have cosigned."""
        return self.root / "witnesses"

    @property
    def site_heads(self) -> Path:
        """The newest head of each site's own ledger."""
        return self.root / "site-heads"

    def settings(self) -> CoordinatorSettings:
        """Parse ``coordinator.toml``.

        Raises:
            CoordinatorConfigError: missing, not TOML, or with missing, unknown or ill-typed keys.
        """
        found = toml_file.read(self.root / "coordinator.toml", CoordinatorSettings, CoordinatorConfigError)
        if found is None:
            raise CoordinatorConfigError("coordinator.toml is missing: run `lazaret-coordinator --home DIR init`")
        return found

    def policy_text(self) -> str:
        """The federation's policy, as written."""
        try:
            return (self.root / "policy.toml").read_text()
        except OSError:
            raise CoordinatorConfigError("policy.toml is missing: without a policy nothing is admitted") from None

    def policy(self) -> Policy:
        """The federation's policy, parsed."""
        return parse_policy(self.policy_text(), "policy.toml")

    def ledger_key(self) -> Ed25519PrivateKey:
        """The key that signs checkpoints."""
        return signing_key(self.keys / "ledger.key")

    def root_crt(self) -> bytes:
        """The trust anchor of the federation, PEM.

        Raises:
            CoordinatorConfigError: it is missing.
        """
        return self._public("root.crt")

    def ca(self) -> CA:
        """The intermediate authority: (private key PEM, certificate PEM).

        Raises:
            CoordinatorConfigError, KeyFileError: a file is missing, or open to others.
        """
        return read_private(self.keys / "intermediate.key"), self._public("intermediate.crt")

    def ca_ends(self) -> dt.datetime:
        """When the intermediate ends, UTC: before that the root has to sign another one."""
        return leaf_of(self._public("intermediate.crt")).not_valid_after_utc

    def tls(self) -> tuple[bytes, bytes]:
        """The service's own credentials: (private key PEM, chain PEM); see :func:`own_certificate`."""
        return read_private(self.keys / "tls.key"), self._public("tls.crt")

    def _public(self, name: str) -> bytes:
        try:
            return (self.keys / name).read_bytes()
        except OSError:
            raise CoordinatorConfigError(f"keys/{name} is missing: restore it from a backup") from None


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65_536


def create(root: Path, settings: str, policy: str, now: dt.datetime) -> CoordinatorDirectory:
    """Make the coordinator's directory, its root and intermediate, its own and the operator's certificate.

    The root's key is written to ``offline/``, to be taken away. Nothing is overwritten.

    Raises:
        CoordinatorConfigError: the directory holds something, or a text is not valid.
    """
    parse_policy(policy, "policy.toml")
    toml_file.parse(settings, CoordinatorSettings, "coordinator.toml", root, CoordinatorConfigError)
    home = CoordinatorDirectory(root)
    root.mkdir(parents=True, exist_ok=True)
    with exclusively(root):
        if finish_filling(root, "coordinator.toml"):
            told = f"{root.name} was begun by an interrupted command and is complete now{_GOES_ON}"
            raise CoordinatorConfigError(told)
        if any(root.iterdir()):
            more = _GOES_ON if (root / "coordinator.toml").exists() else ""
            raise CoordinatorConfigError(f"{root.name} is not empty: nothing was written{more}")
        root.chmod(0o700)
        fill_folder(root, lambda made: _fill(CoordinatorDirectory(made), settings, policy, now), "coordinator.toml")
    return home


def _fill(home: CoordinatorDirectory, settings: str, policy: str, now: dt.datetime) -> None:
    """Everything that a coordinator's directory begins with."""
    (home.root / "coordinator.toml").write_text(settings)
    (home.root / "policy.toml").write_text(policy)
    home.keys.mkdir(mode=0o700)
    write_private(home.keys / "ledger.key", pem(Ed25519PrivateKey.generate()))
    root_ca = make_root(now)
    offline = home.root / "offline"
    offline.mkdir(mode=0o700)
    write_private(offline / "root.key", root_ca[0])
    (offline / "root.crt").write_bytes(root_ca[1])
    (offline / "README").write_text(_OFFLINE)
    (home.keys / "root.crt").write_bytes(root_ca[1])
    renew_intermediate(home, offline, now)
    for stem in ("tls", "operator"):
        write_private(home.keys / f"{stem}.key", pem(ec.generate_private_key(ec.SECP256R1())))
    own_certificate(home, now)
    operator_certificate(home, now)
    home.enrolments.mkdir(mode=0o700)


def renew_intermediate(home: CoordinatorDirectory, folder: Path, now: dt.datetime) -> None:
    """The ceremony of the year: the root, brought in ``folder``, signs a fresh intermediate.

    Certificates that were issued before stay good: a chain brings its own intermediate along. After a crash in the
    middle nothing is issued any more, and the ceremony is repeated.

    Raises:
        CoordinatorConfigError: the folder holds another federation's root, or one that has ended.
        KeyFileError: the root's key is missing, or open to others.
    """
    try:
        root = read_private(folder / "root.key"), (folder / "root.crt").read_bytes()
        if root[1] != home.root_crt():
            raise CoordinatorConfigError("that folder holds another federation's root")
        key, certificate = make_intermediate(root, now)
    except OSError:
        raise CoordinatorConfigError("root.crt is missing beside root.key") from None
    except CertificateError as error:
        raise CoordinatorConfigError(f"the root cannot sign: {error}") from None
    replace_private(home.keys / "intermediate.key", key)
    replace_private(home.keys / "intermediate.crt", certificate)


def own_certificate(home: CoordinatorDirectory, now: dt.datetime) -> tuple[bytes, bytes]:
    """The service's credentials, re-issued when less than a third of their life remains.

    Its key stays: a thief of this key could copy the intermediate's too, which is stored next to it.

    Returns:
        Private key and chain, PEM.
    Raises:
        CoordinatorConfigError: the intermediate has ended, and so has the certificate.
        KeyFileError: a key is missing, or open to others.
    """
    settings = home.settings()
    hosts = ["localhost", "127.0.0.1", *(a.rpartition(":")[0] for a in (settings.listen, settings.reached_at))]
    return _fresh(home, "tls", COORDINATOR, now, tuple(dict.fromkeys(hosts)))


def operator_certificate(home: CoordinatorDirectory, now: dt.datetime) -> tuple[bytes, bytes]:
    """The operator's credentials for calls from this machine; re-issued like the service's own."""
    return _fresh(home, "operator", OPERATOR, now)


def _fresh(
    home: CoordinatorDirectory, stem: str, name: str, now: dt.datetime, hosts: tuple[str, ...] = ()
) -> tuple[bytes, bytes]:
    """A leaf of the coordinator's own, and its key; renewed while it is still good, and for another address."""
    key, path = ec_key(home.keys / f"{stem}.key"), home.keys / f"{stem}.crt"
    chain = path.read_bytes() if path.exists() else b""
    left = _left(chain, key, now)
    if not left > _RENEW_AT or not bears(leaf_of(chain), hosts):
        try:
            chain = issue(request(key, name), name, home.ca(), now, hosts)
            replace_private(path, chain)
        except (CertificateError, KeyFileError, CoordinatorConfigError) as error:
            if not left > 0 or not bears(leaf_of(chain), hosts):
                raise CoordinatorConfigError(f"no certificate for {stem}: {error}") from None
    return pem(key), chain


def _left(chain: bytes, key: ec.EllipticCurvePrivateKey, now: dt.datetime) -> float:
    """How much of a leaf's life remains, of 1; 0 for one that is over, unreadable or another key's."""
    try:
        leaf = leaf_of(chain)
    except CertificateError:
        return 0.0
    start, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    return (end - now) / (end - start) if leaf.public_key() == key.public_key() and start <= now < end else 0.0


def open_ledger(home: CoordinatorDirectory) -> Store:
    """The coordinator's ledger, for this process alone to append to.

    Raises:
        LedgerBusyError: another process has it.
        LedgerUnsoundError: what is kept does not fold.
        LedgerTurnedBackError: it is behind its high-water mark, a head that a site cosigned, or the shelf.
        CoordinatorConfigError: it is in a database that cannot be used; the text says what to do.
    """
    evidence = collect(home.witnesses, home.releases)
    store = _store(home, _writer(home))
    try:
        hold_against(store, evidence)
    except BaseException:
        store.close()
        raise
    return store


def open_restored_ledger(home: CoordinatorDirectory) -> Store:
    """The same of a ledger that was brought back, which may lack what it acknowledged: for a new epoch alone."""
    disk = _writer(home)
    disk.brought_back()
    return _store(home, disk)


def _writer(home: CoordinatorDirectory) -> Any:
    address = home.settings().ledger
    return _database(lambda pg: pg.open_postgres(address)) if address else open_sqlite(home.ledger)


def _store(home: CoordinatorDirectory, disk: LedgerBackend) -> Store:
    return Store(disk, ORIGIN, home.ledger_key(), lambda: int(time.time()))


def look_at_ledger(home: CoordinatorDirectory) -> LedgerBackend:
    """The coordinator's ledger to read, also while another process writes it."""
    address = home.settings().ledger
    disk: LedgerBackend = (
        _database(lambda pg: pg.open_read_only_postgres(address)) if address else open_read_only(home.ledger)
    )
    return disk


def unmarked(home: CoordinatorDirectory) -> str:
    """What the marks of a ledger in PostgreSQL do not show, as a sentence; "" for one in a file.

    Raises:
        CoordinatorConfigError: the database cannot be used; the text says what to do.
    """
    address = home.settings().ledger
    if not address:
        return ""

    def asked(pg: Any) -> str:
        with contextlib.closing(pg.open_read_only_postgres(address)) as disk:
            return str(disk.unmarked())

    return str(_database(asked))


def install_ledger(owner: str, writer: str) -> None:
    """Make the ledger's tables and functions in PostgreSQL, as their owner, who is not the coordinator.

    Raises:
        CoordinatorConfigError: it cannot be done; the text says why.
    """
    _database(lambda pg: pg.install(owner, writer))


def _database(act: Callable[[Any], Any]) -> Any:
    """Do something with :mod:`policies.ledger.backends.postgres`, whose driver is optional."""
    try:
        from policies.ledger.backends import postgres  # noqa: PLC0415 - its driver is optional
    except ModuleNotFoundError:
        raise CoordinatorConfigError("for a ledger in PostgreSQL install lazaret[postgres]") from None
    try:
        return act(postgres)
    except (ValueError, ConnectionError) as error:
        raise CoordinatorConfigError(f"the ledger's database: {error}") from None
