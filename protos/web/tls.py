"""The console's own certificate: the hospital's, or a self-signed one whose fingerprint people compare."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos.identity.key_files import KeyFileError, ec_key, pem, replace_private, write_private
from protos.web.settings import ConsoleConfigError, ConsoleSettings

_DAYS: Final = 397  # as long as browsers take one
_RENEW_DAYS: Final = 30  # before its end, at a start


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """The files, and their description for the operator."""

    chain: Path
    key: Path
    fingerprint: str  # SHA-256 of the certificate, in hexadecimal
    ends: dt.datetime  # UTC


def own_certificate(keys: Path, settings: ConsoleSettings, now: dt.datetime) -> ServerCertificate:
    """The configured certificate, or the one in ``keys``, which is made when it is missing or about to end.

    Raises:
        ConsoleConfigError: a file is missing, is no certificate, or a key is open to others.
    """
    if settings.certificate is not None and settings.key is not None:
        found = _read(settings.certificate)
        if found is None:
            raise ConsoleConfigError("console.toml: certificate is missing, or is no PEM certificate")
        return _told(settings.certificate, settings.key, found)
    chain, key = keys / "console.crt", keys / "console.key"
    try:
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not key.exists():
            write_private(key, pem(ec.generate_private_key(ec.SECP256R1())))
        private = ec_key(key)
        found = _read(chain)
        if found is None or not _still_good(found, private, settings, now):
            replace_private(chain, _self_signed(private, settings.names, now))
            found = _read(chain)
    except (OSError, KeyFileError) as error:
        raise ConsoleConfigError(f"keys/console.key and keys/console.crt cannot be used: {error}") from None
    if found is None:
        raise ConsoleConfigError("keys/console.crt cannot be read")
    return _told(chain, key, found)


def _told(chain: Path, key: Path, certificate: x509.Certificate) -> ServerCertificate:
    return ServerCertificate(
        chain, key, certificate.fingerprint(hashes.SHA256()).hex(), certificate.not_valid_after_utc
    )


def _read(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0]
    except (OSError, ValueError):
        return None


def _still_good(
    found: x509.Certificate, private: ec.EllipticCurvePrivateKey, settings: ConsoleSettings, now: dt.datetime
) -> bool:
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    same = {str(name.value) for name in names} == set(settings.names)
    left = found.not_valid_after_utc - now
    return same and left > dt.timedelta(days=_RENEW_DAYS) and found.public_key() == private.public_key()


def _self_signed(private: ec.EllipticCurvePrivateKey, names: tuple[str, ...], now: dt.datetime) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Lazaret console")])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
