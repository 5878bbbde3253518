"""The console's own certificate: the hospital's, or a self-signed one whose fingerprint people compare."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from protos.identity.certificates import self_signed
from protos.identity.key_files import KeyFileError, ec_key, pem, replace_private, write_private
from protos.web.settings import ConsoleConfigError, ConsoleSettings

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
            found = self_signed(private, "Lazaret console", ExtendedKeyUsageOID.SERVER_AUTH, now, settings.names)
            replace_private(chain, found.public_bytes(Encoding.PEM))
    except (OSError, KeyFileError) as error:
        raise ConsoleConfigError(f"keys/console.key and keys/console.crt cannot be used: {error}") from None
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
