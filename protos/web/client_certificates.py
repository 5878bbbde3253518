"""Logins by client certificate: which certificate is whose, as the operator pinned it.

``HOME/logins/NAME.crt`` holds the certificate of the person NAME: a self-signed one, made on the person's own
machine, or that of a smart card. No certificate authority is trusted, only these exact certificates, so nobody else
can issue one. The certificate proves identity; the ledger decides what that person may do.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl
import threading
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding
from cryptography.hazmat.primitives.serialization.pkcs12 import serialize_key_and_certificates
from cryptography.x509.oid import ExtendedKeyUsageOID

from protos.common.errors import ConfigError
from protos.identity.certificates import self_signed
from protos.identity.key_files import pem, replace_private
from protos.web.settings import PERSON

_MOST_BYTES: Final = 16_384  # of one certificate's file


class LoginConfigError(ConfigError, ValueError):
    """A certificate cannot be pinned. The text is for the operator."""


def make(name: str, now: dt.datetime, password: str) -> tuple[bytes, bytes, bytes]:
    """A fresh key and a self-signed certificate for a person, to be made on that person's own machine.

    Args:
        name: as the ledger will name the person.
        now: of UTC.
        password: that seals the third result.
    Returns:
        Private key PEM; certificate PEM, which the operator pins; both as PKCS#12, which a browser imports.
    Raises:
        LoginConfigError: no such name.
    """
    if not PERSON.fullmatch(name):
        raise LoginConfigError("a person's name is 1 to 64 of a-z, 0-9, - and _")
    key = ec.generate_private_key(ec.SECP256R1())
    crt = self_signed(key, f"Lazaret {name}", ExtendedKeyUsageOID.CLIENT_AUTH, now)
    sealed = BestAvailableEncryption(password.encode())
    p12 = serialize_key_and_certificates(f"Lazaret {name}".encode(), key, crt, None, sealed)
    return pem(key), crt.public_bytes(Encoding.PEM), p12


class PinnedCertificates:
    """The pinned certificates in a folder. What changes there counts at once, without a restart."""

    def __init__(self, folder: Path) -> None:
        """``folder`` need not be there yet."""
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: tuple[tuple[str, int, int, int], ...] = ()
        self._names: dict[bytes, str] = {}
        self._anchored: set[bytes] = set()
        self._context: ssl.SSLContext | None = None

    def trust(self, name: str, crt: bytes) -> str:
        """Pin a person's certificate; it replaces the one before.

        Args:
            name: as the ledger names the person.
            crt: PEM or DER.
        Returns:
            Its SHA-256 in hexadecimal, to be compared with what the person reads out.
        Raises:
            LoginConfigError: no such name, not one certificate, or one that is another person's.
        """
        if not PERSON.fullmatch(name):
            raise LoginConfigError("a person's name is 1 to 64 of a-z, 0-9, - and _")
        certificate = _certificate(crt)
        der = certificate.public_bytes(Encoding.DER)
        owner = self.name_of(der)
        if owner not in (None, name):
            raise LoginConfigError(f"that certificate belongs to {owner} already: each person needs their own")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_private(self._folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM))
        return certificate.fingerprint(hashes.SHA256()).hex()

    def forget(self, name: str) -> bool:
        """Unpin a person's certificate: logged in or not, it opens nothing any more.

        Returns:
            Whether there was one.
        """
        if not PERSON.fullmatch(name):
            return False
        try:
            (self._folder / f"{name}.crt").unlink()
        except FileNotFoundError:
            return False
        return True

    @staticmethod
    def fingerprint(crt: bytes) -> str:
        """SHA-256 of a certificate, PEM or DER, in hexadecimal.

        Raises:
            LoginConfigError: it is not one certificate.
        """
        return _certificate(crt).fingerprint(hashes.SHA256()).hex()

    def names(self) -> dict[str, x509.Certificate]:
        """Everybody who has a certificate, with it."""
        with self._lock:
            self._refresh()
            return {name: x509.load_der_x509_certificate(der) for der, name in self._names.items()}

    def name_of(self, der: bytes) -> str | None:
        """Whose certificate this is; None for nobody's."""
        with self._lock:
            self._refresh()
            return self._names.get(der)

    def context(self, chain: Path, key: Path) -> ssl.SSLContext:
        """TLS for the console: a client certificate is asked for, and only pinned ones are taken.

        A browser without one may still log in by OpenID. Nothing is resumed: each connection proves its key anew.

        Args:
            chain: of the console, PEM.
            key: of the console, PEM.
        Raises:
            OSError, ssl.SSLError: a file is missing, or no certificate and key that belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        context.load_cert_chain(chain, key)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a pinned leaf is an anchor itself
        context.sni_callback = self._before_handshake
        with self._lock:
            self._context, self._anchored, self._seen = context, set(), ()
            self._refresh()
        return context

    def _before_handshake(self, _socket: object, _name: str | None, _context: ssl.SSLContext) -> None:
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        """Read the folder again if it changed. An anchor stays in the context until a restart, and opens nothing."""
        try:
            with os.scandir(self._folder) as entries:
                files = sorted(
                    (e.name, s.st_mtime_ns, s.st_size, s.st_ino)
                    for e in entries
                    if e.name.endswith(".crt") and PERSON.fullmatch(e.name[:-4]) and e.is_file(follow_symlinks=False)
                    for s in (e.stat(follow_symlinks=False),)
                )
        except OSError:
            files = []
        if tuple(files) != self._seen:
            self._names, taken = {}, []
            for name, *_ in files:
                try:
                    der = _certificate((self._folder / name).read_bytes()).public_bytes(Encoding.DER)
                except (OSError, LoginConfigError):
                    continue  # it opens nothing
                taken.append((der, name[:-4]))
            for der, name in taken:  # a certificate that two names claim is nobody's
                if sum(der == other for other, _ in taken) == 1:
                    self._names[der] = name
            self._seen = tuple(files)
        if self._context is not None:
            for der in set(self._names) - self._anchored:
                self._context.load_verify_locations(cadata=der)
                self._anchored.add(der)


def _certificate(raw: bytes) -> x509.Certificate:
    if len(raw) > _MOST_BYTES:
        raise LoginConfigError("that is too large for one certificate")
    try:
        if raw.lstrip().startswith(b"-----BEGIN"):
            (certificate,) = x509.load_pem_x509_certificates(raw)
            return certificate
        return x509.load_der_x509_certificate(raw)
    except ValueError:
        raise LoginConfigError(
            "that is not one certificate, PEM or DER; a private key stays with the person"
        ) from None
