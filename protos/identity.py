"""Who is who on the wire: key files, SPIFFE names, certificates, and what makes a peer acceptable.

Keys are born where they are used and never travel; a certificate carries exactly one URI name. Certificates are
made with ``cryptography``'s own builders; a CA product (step-ca, cfssl) would be a second server at every
federation, and enrolment by ledger entry is ours to define.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DOMAIN: Final = "lazaret"
COORDINATOR: Final = f"spiffe://{DOMAIN}/coordinator"
OPERATOR: Final = f"spiffe://{DOMAIN}/person/operator"
_SITE: Final = re.compile(rf"spiffe://{DOMAIN}/hospital/([a-z0-9][a-z0-9-]{{0,62}})/agent")
SITE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
LEAF_DAYS: Final = 90
CA_DAYS: Final = 3650


class BadKeyFile(ValueError):
    """A private key is missing, readable by others, or of another kind."""


def agent_name(site: str) -> str:
    """The SPIFFE name of a site's agent."""
    return f"spiffe://{DOMAIN}/hospital/{site}/agent"


def site_of(name: str) -> str | None:
    """The site whose agent bears this name, or None."""
    match = _SITE.fullmatch(name)
    return match.group(1) if match else None


def write_private(path: Path, body: bytes) -> None:
    """Create a private file, 0600, never over an existing one.

    Raises:
        FileExistsError: there is one already.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(body)
        out.flush()
        os.fsync(out.fileno())


def read_private(path: Path) -> bytes:
    """The bytes of a private file that nobody else can read.

    Raises:
        BadKeyFile: missing, or open to group or others.
    """
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise BadKeyFile(f"{path.name} can be read by others: chmod 600 it")
        return path.read_bytes()
    except OSError:
        raise BadKeyFile(f"{path.name} is missing or unreadable") from None


def pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    """A private key as PKCS#8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def signing_key(path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in a private PEM file.

    Raises:
        BadKeyFile: missing, readable by others, or of another kind.
    """
    try:
        key = load_pem_private_key(read_private(path), None)
    except ValueError as error:
        raise BadKeyFile(str(error) if isinstance(error, BadKeyFile) else f"{path.name} is no key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise BadKeyFile(f"{path.name} is not an Ed25519 key")
    return key


def request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """A certificate signing request for one SPIFFE name (proof of possession), PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name)]), critical=True
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def make_ca(now: dt.datetime) -> tuple[bytes, bytes]:
    """A federation's own CA: (private key PEM, certificate PEM)."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Lazaret federation CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return pem(key), certificate.public_bytes(Encoding.PEM)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: dt.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(days=days))
    )


def issue(csr_pem: bytes, name: str, ca: tuple[bytes, bytes], now: dt.datetime, hosts: tuple[str, ...] = ()) -> bytes:
    """A leaf certificate for the key of a signing request, PEM.

    Args:
        csr_pem: signed by the key it asks for; the name it asks for must be ``name``.
        name: the one URI name the certificate carries.
        ca: (private key PEM, certificate PEM).
        now: the time of issue, UTC.
        hosts: DNS names and addresses, for a server.
    Raises:
        ValueError: the request is malformed, not self-signed, or for another name.
    """
    csr = x509.load_pem_x509_csr(csr_pem)
    public = csr.public_key()
    asked = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if not csr.is_signature_valid or not isinstance(public, ec.EllipticCurvePublicKey):
        raise ValueError("the signing request does not prove possession of an EC key")
    if [n.value for n in asked] != [name]:
        raise ValueError(f"the signing request is not for {name} alone")
    ca_key, ca_crt = load_pem_private_key(ca[0], None), x509.load_pem_x509_certificate(ca[1])
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(name), *map(_host, hosts)]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    certificate = (
        _builder(x509.Name([]), ca_crt.subject, public, now, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return certificate.public_bytes(Encoding.PEM)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def node_public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A Flower node key's public half, OpenSSH."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
