"""One site's directory: configuration, keys and where everything lies. Keys are born here and never leave."""

from __future__ import annotations

import base64
import secrets
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from agent.errors import SiteConfigError
from policies.ledger.ed25519 import is_owned
from policies.review.policy import Policy
from policies.review.policy import parse as parse_policy
from policies.statements import HEX, PAYLOAD_TYPE, Amendment, Enrolment, StatementError, encode
from policies.statements import parse as parse_statement
from protos.common.dsse import EnvelopeError, open_sealed, seal
from protos.common.durable_files import (
    create_file,
    exclusively,
    fill_folder,
    finish_filling,
    flush_directory,
)
from protos.federation import round_times
from protos.identity.certificates import SITE_NAME, agent_name, node_public, request
from protos.identity.key_files import ec_key, pem, read_private, signing_key, write_private
from protos.operations.confinement import AVAILABLE, DEMANDS

_KEYS = {
    "site": str,
    "coordinator": str,
    "input": str,
    "modalities": list,
    "secondary_capture_modalities": list,
    "public_components": list,
}
_OPTIONAL = {
    "proxy": str,
    "partners": list,
    "least_partners": int,
    "confinement": str,
    "most_round_seconds": int,
    "device": str,
    "engine": str,
}
_DEVICES = ("auto", "cpu", "cuda")
_ENGINES = ("own", "opacus")
_GOES_ON = "; to go on with it: lazaret-agent setup"
MAIN = "main"  # the project that every site has from the beginning
_NOT_ENROLLED = "the site is not enrolled: run `lazaret-agent enrol` with the coordinator's invitation"


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """``site.toml``, checked."""

    site: str  # short name of the hospital, agreed with the coordinator's operator
    coordinator: str  # host:port of the coordinator's gRPC service, the one port that is dialled
    input: Path  # the folder that `ingest` reads
    modalities: frozenset[str]  # DICOM modalities that may come in
    # of these, captured screens may come in too: they may show names, so vouch for each
    secondary_capture_modalities: frozenset[str]
    public_components: frozenset[str]  # SHA-256 of bases and models that the site vouches to be public (P6)
    proxy: str = ""  # host:port of an HTTP proxy that CONNECTs to the coordinator; nothing: straight
    partners: frozenset[str] = frozenset()  # key ids of sites that this hospital knows by its own means
    least_partners: int = 1  # how many of them must be in a secret sum beside this site
    confinement: str = AVAILABLE  # of the readers of foreign bytes: the kernel's layers, or "required": all
    most_round_seconds: int = round_times.MOST_S  # the longest round in which this site takes part
    device: str = "auto"  # of rounds: "cpu", "cuda", or "auto", an accelerator where there is one that may be used
    engine: str = "own"  # of rounds: "own", or "opacus", where its hooks are exact


@dataclass(frozen=True, slots=True)
class SiteDirectory:
    """Paths and keys of one site."""

    root: Path

    @property
    def keys(self) -> Path:
        """The key directory, 0700."""
        return self.root / "keys"

    def settings(self) -> SiteSettings:
        """Parse ``site.toml``; all problems at once.

        Raises:
            SiteConfigError: missing, not TOML, or with missing, unknown or ill-typed keys.
        """
        try:
            text = (self.root / "site.toml").read_text()
        except FileNotFoundError:
            raise SiteConfigError("site.toml is missing: run `lazaret-agent --home DIR init` first") from None
        except (OSError, UnicodeDecodeError):
            raise SiteConfigError(_unreadable("site.toml")) from None
        return parse_settings(self.root, text)

    def policy_text(self) -> str:
        """The site's own policy, as written.

        Raises:
            SiteConfigError: missing, or no text.
        """
        try:
            return (self.root / "policy.toml").read_text()
        except FileNotFoundError:
            raise SiteConfigError("policy.toml is missing: without a policy nothing may leave") from None
        except (OSError, UnicodeDecodeError):
            raise SiteConfigError(_unreadable("policy.toml")) from None

    def policy(self) -> Policy:
        """The site's own policy, parsed."""
        return parse_policy(self.policy_text(), "policy.toml")

    def sign_key(self) -> Ed25519PrivateKey:
        """The key the site seals with."""
        return signing_key(self.keys / "sign.key")

    def secret(self, name: str) -> bytes:
        """One of the site's 32-byte secrets: ``vault`` or ``deidentify``."""
        return read_private(self.keys / f"{name}.key")

    @property
    def project_keys(self) -> Path:
        """A folder for each research project, with its key or the mark that it has ended."""
        return self.keys / "projects"

    def signed_policy(self, envelope: bytes) -> Policy:
        """The site's own policy as it was sealed in its request to take part, or amended since.

        Raises:
            SiteConfigError: the envelope was changed.
        """
        try:
            public = self.sign_key().public_key().public_bytes_raw()
            statement = parse_statement(open_sealed(envelope, PAYLOAD_TYPE, {"self": public}).payload)
        except (EnvelopeError, StatementError):
            raise SiteConfigError(
                "request.json, or the ledger's copy of the policy, was changed: restore it"
            ) from None
        assert isinstance(statement, Enrolment | Amendment)
        return parse_policy(statement.policy, "the signed policy")

    def federation_policy(self) -> Policy:
        """The federation's policy, as received at enrolment."""
        try:
            return parse_policy((self.keys / "federation.toml").read_text(), "federation.toml")
        except FileNotFoundError:
            raise SiteConfigError(_NOT_ENROLLED) from None
        except (OSError, UnicodeDecodeError):
            raise SiteConfigError(_unreadable("keys/federation.toml")) from None

    def coordinator_key(self) -> bytes:
        """The Ed25519 key that signs the coordinator's ledger, as received at enrolment."""
        try:
            key = base64.b64decode((self.keys / "coordinator.pub").read_text(), validate=True)
        except (OSError, ValueError):
            raise SiteConfigError(_NOT_ENROLLED) from None
        if not is_owned(key):
            raise SiteConfigError("keys/coordinator.pub is not a safe key (small or mixed order): enrol again")
        return key


def _unreadable(name: str) -> str:
    return f"{name} cannot be read: it must be a file of UTF-8 text that this user may read"


def parse_settings(root: Path, text: str) -> SiteSettings:
    """Parse ``site.toml``; all problems at once.

    Args:
        root: the site's directory, which ``input`` is relative to.
        text: the TOML document.
    Raises:
        SiteConfigError: not TOML, or with missing, unknown or senseless keys.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SiteConfigError(f"site.toml: not TOML: {error}") from None
    problems = [f"{k}: missing" for k in _KEYS if k not in table]
    problems += [f"{k}: unknown key" for k in table if k not in _KEYS | _OPTIONAL]
    typed = [(k, t) for k, t in (_KEYS | _OPTIONAL).items() if k in table]
    problems += [f"{k}: must be a {t.__name__}" for k, t in typed if type(table[k]) is not t]
    if not SITE_NAME.fullmatch(str(table.get("site", "x"))):
        problems.append("site: must be a short name of a-z, 0-9 and -")
    problems += _senseless(table)
    for key in ("coordinator", "proxy"):
        if table.get(key, "") != "" and not _address(table[key]):
            problems.append(f"{key}: must be host:port")
    if table.get("modalities") == []:
        problems.append('modalities: name the accepted modalities, for example ["CT", "MR"]')
    if problems:
        raise SiteConfigError("site.toml: " + "; ".join(problems))
    return SiteSettings(
        table["site"],
        table["coordinator"],
        root / table["input"],
        frozenset(table["modalities"]),
        frozenset(table["secondary_capture_modalities"]),
        frozenset(table["public_components"]),
        table.get("proxy", ""),
        frozenset(table.get("partners", [])),
        table.get("least_partners", 1),
        table.get("confinement", AVAILABLE),
        table.get("most_round_seconds", round_times.MOST_S),
        table.get("device", "auto"),
        table.get("engine", "own"),
    )


def _senseless(table: dict[str, object]) -> Iterator[str]:
    """What is wrong with keys that may be left out."""
    partners, least = table.get("partners", []), table.get("least_partners", 1)
    if isinstance(partners, list) and not all(type(p) is str and HEX.fullmatch(p) for p in partners):
        yield "partners: key ids, 64 hexadecimal digits each"
    if type(least) is int and not least >= 1:
        yield "least_partners: at least 1"
    if table.get("confinement", AVAILABLE) not in DEMANDS:
        yield f"confinement: one of {', '.join(DEMANDS)}"
    if table.get("device", "auto") not in _DEVICES:
        yield f"device: one of {', '.join(_DEVICES)}"
    if table.get("engine", "own") not in _ENGINES:
        yield f"engine: one of {', '.join(_ENGINES)}"
    most = table.get("most_round_seconds", round_times.MOST_S)
    if type(most) is int and not round_times.LEAST_S <= most <= round_times.MOST_S:
        yield f"most_round_seconds: {round_times.LEAST_S} to {round_times.MOST_S}"


def _address(value: object) -> bool:
    host, colon, port = str(value).rpartition(":")
    return bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65_536


def origin(site: str) -> str:
    """The name of a site's ledger in checkpoints."""
    return f"lazaret/{site}"


def create(root: Path, settings: str, policy: str) -> SiteDirectory:
    """Make a site's directory, its keys and its sealed request to take part, whole or not at all.

    Nothing is overwritten.

    Args:
        root: the directory, which must be new or empty.
        settings: text of ``site.toml``.
        policy: text of ``policy.toml``.
    Raises:
        SiteConfigError: the directory holds something, or a text is not valid.
    """
    parse_policy(policy, "policy.toml")
    parse_settings(root, settings)
    home = SiteDirectory(root)
    root.mkdir(parents=True, exist_ok=True)
    with exclusively(root):
        if finish_filling(root, "site.toml"):
            raise SiteConfigError(f"{root.name} was begun by an interrupted command and is complete now{_GOES_ON}")
        if any(root.iterdir()):
            more = _GOES_ON if (root / "site.toml").exists() else ""
            raise SiteConfigError(f"{root.name} is not empty: nothing was written{more}")
        root.chmod(0o700)
        fill_folder(root, lambda folder: _fill(SiteDirectory(folder), settings, policy), "site.toml")
    return home


def _fill(home: SiteDirectory, settings: str, policy: str) -> None:
    """Everything that a site's directory begins with."""
    (home.root / "site.toml").write_text(settings)
    (home.root / "policy.toml").write_text(policy)
    home.keys.mkdir(mode=0o700)
    write_private(home.keys / "sign.key", pem(Ed25519PrivateKey.generate()))
    write_private(home.keys / "request.key", pem(ec.generate_private_key(ec.SECP256R1())))
    node = ec.generate_private_key(ec.SECP384R1())  # Flower accepts NIST curves only
    write_private(home.keys / "node.key", node.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (home.keys / "node.pub").write_bytes(node_public(node))
    for name in ("vault", "deidentify"):
        write_private(home.keys / f"{name}.key", secrets.token_bytes(32))
    home.project_keys.mkdir(mode=0o700)
    new_key(home.project_keys / MAIN)
    (home.root / "request.json").write_bytes(enrolment(home))


def new_key(folder: Path) -> None:
    """A fresh 32-byte ``key`` in a folder of its own, whole or not at all, durable when this returns.

    Raises:
        FileExistsError: there is one; a key is never replaced, since what it sealed would be lost.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_file(folder / "key", secrets.token_bytes(32), 0o600)
    for place in (folder.parent, folder.parent.parent):
        flush_directory(place)


def enrolment(home: SiteDirectory, asking: ec.EllipticCurvePrivateKey | None = None) -> bytes:
    """The sealed request to take part: public keys and the site's own policy.

    Args:
        home: the site's directory.
        asking: the key to ask a certificate for; None: that of ``keys/request.key``.
    """
    site, key = home.settings().site, home.sign_key()
    statement = Enrolment(
        site=site,
        sign_key=base64.b64encode(key.public_key().public_bytes_raw()).decode(),
        csr=request(asking or ec_key(home.keys / "request.key"), agent_name(site)).decode(),
        node_key=(home.keys / "node.pub").read_text(),
        policy=home.policy_text(),
    )
    return seal(encode(statement), PAYLOAD_TYPE, key)
