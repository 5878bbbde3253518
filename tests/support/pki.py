"""A small certificate authority for tests: real X.509, valid for a day, keys without a passphrase."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """A CA that writes PEM files into one directory."""

    def __init__(self, folder: Path, common_name: str = "test CA") -> None:
        """Make the CA's key (kept in memory) and certificate (``ca.crt``)."""
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._now = dt.datetime.now(dt.UTC)
        self._key = ec.generate_private_key(ec.SECP384R1())
        self._name = _name(common_name)
        self._cert = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(ca=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA384())
        )
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(self._cert.public_bytes(Encoding.PEM))

    def server(self, stem: str = "server") -> tuple[Path, Path]:
        """Certificate and key of a server at localhost and 127.0.0.1."""
        loopback = ipaddress.ip_address("127.0.0.1")
        names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(loopback)]
        return self._leaf(stem, names, ExtendedKeyUsageOID.SERVER_AUTH)

    def agent(self, site: str) -> tuple[Path, Path]:
        """Certificate and key of a site's agent, named by a SPIFFE id."""
        uri = x509.UniformResourceIdentifier(f"spiffe://lazaret/hospital/{site}/agent")
        return self._leaf(site, [uri], ExtendedKeyUsageOID.CLIENT_AUTH)

    def _leaf(self, stem: str, names: list[x509.GeneralName], purpose: x509.ObjectIdentifier) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP384R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        cert = (
            self._builder(_name(stem), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(self._key, hashes.SHA384())
        )
        cert_file, key_file = self.folder / f"{stem}.crt", self.folder / f"{stem}.key"
        cert_file.write_bytes(cert.public_bytes(Encoding.PEM))
        key_file.touch(mode=0o600)
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return cert_file, key_file

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - dt.timedelta(minutes=5))
            .not_valid_after(self._now + dt.timedelta(days=1))
        )


def node_key(folder: Path, site: str) -> tuple[Path, Path]:
    """An EC P-384 pair in OpenSSH format, as Flower wants for nodes: private and public file."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / f"{site}.node", folder / f"{site}.node.pub"
    private.touch(mode=0o600)
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private, public


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )
