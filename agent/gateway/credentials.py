"""The site's certificate on the wire, and its renewal while everything runs.

Key and chain are one private file, replaced by a rename: whatever happens, it holds a key and the certificate for it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from agent.errors import SiteConfigError
from protos.identity.certificates import (
    CertificateError,
    checked_chain,
    leaf_of,
    number_of,
    request,
    returning_name,
    site_of,
    uri_of,
)
from protos.identity.key_files import pem, read_private, replace_private

FILE: Final = "tls.pem"
RETURNING: Final = "return.pem"  # the same of the certificate to come back with, after that one has ended
RENEW_AT: Final = 2 / 3  # of its life
_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_AGAIN: Final = "ask the coordinator for an invitation, and run `lazaret-agent enrol`"


@dataclass(frozen=True, slots=True)
class _Held:
    """A key and the chain for it, as one value, so that no reader sees the half of a renewal."""

    key: bytes  # PEM
    chain: bytes  # PEM, leaf first
    name: str
    number: str
    start: dt.datetime
    end: dt.datetime


class Credentials:
    """The site's credentials at the coordinator. Renewal replaces them inside this object."""

    def __init__(self, keys: Path) -> None:
        """Read ``tls.pem`` and ``root.crt``.

        Args:
            keys: the site's key directory.
        Raises:
            SiteConfigError: the site has no certificate, or the file holds no key with its certificate.
            KeyFileError: the file is open to others.
        """
        self._keys = keys
        try:
            self._root = (keys / "root.crt").read_bytes()
        except OSError:
            raise SiteConfigError(f"the site is not enrolled: {_AGAIN}") from None
        if not (keys / FILE).exists():
            raise SiteConfigError(f"the site has no certificate: {_AGAIN}")
        self._held = _read(read_private(keys / FILE))

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that is opened now: Python gRPC gives an open one no other certificate."""
        held = self._held
        return grpc.ssl_channel_credentials(self._root, held.key, held.chain)

    def root(self) -> bytes:
        """The federation's trust anchor, PEM."""
        return self._root

    def key(self) -> bytes:
        """The private key, PEM."""
        return self._held.key

    def chain(self) -> bytes:
        """The certificate and its intermediate, PEM."""
        return self._held.chain

    @property
    def number(self) -> str:
        """The certificate's serial number, hexadecimal: it changes with every renewal."""
        return self._held.number

    @property
    def not_after(self) -> dt.datetime:
        """The certificate's end, UTC."""
        return self._held.end

    def due(self, now: dt.datetime, jitter: float = 0.0) -> bool:
        """Is it time for a renewal? After two thirds of its life, and for ever after.

        Args:
            now: UTC.
            jitter: added to the two thirds, so that not all sites come at once: random, within 0.1 either way.
        Raises:
            ValueError: another jitter.
        """
        if not -0.1 <= jitter <= 0.1:
            raise ValueError("the jitter lies within 0.1")
        held = self._held
        return not now < held.start + (RENEW_AT + jitter) * (held.end - held.start)

    def renew(self, ask: Callable[[bytes], Certified], now: dt.datetime) -> None:
        """Make a fresh key, have it certified, and take both into use; until then the old ones stay.

        Args:
            ask: a signing request, PEM -> what the coordinator issued.
            now: UTC.
        Raises:
            SiteConfigError: the answer is not a certificate for this site and this key that leads to the federation's
                root. Exception: whatever ``ask`` raises.
        """
        name, key = self._held.name, ec.generate_private_key(ec.SECP256R1())
        issued = ask(request(key, name))
        install(self._keys, self._root, name, key, issued, now)
        self._held = _read(pem(key) + issued.chain)


@dataclass(frozen=True, slots=True)
class Certified:
    """What a coordinator issues for a key: PEM, leaf first."""

    chain: bytes
    returning: bytes  # to come back with; b"" of an older coordinator


def install(
    keys: Path, root: bytes, name: str, key: ec.EllipticCurvePrivateKey, issued: Certified, now: dt.datetime
) -> None:
    """Check what was issued, and put it into ``tls.pem`` and ``return.pem`` with its key; durable when this returns.

    Args:
        keys: the site's key directory.
        root: the trust anchor, PEM.
        name: what the certificate must say.
        key: what it must be for.
        issued: the chains.
        now: UTC.
    Raises:
        SiteConfigError: it is anything else; nothing was written.
    """
    site = site_of(name) or ""
    try:
        checked_chain(issued.chain, root, name, key.public_key(), now)
        if issued.returning:
            checked_chain(issued.returning, root, returning_name(site), key.public_key(), now)
    except CertificateError as error:
        raise SiteConfigError(f"the certificate that the coordinator issued cannot be used: {error}") from None
    replace_private(keys / FILE, pem(key) + issued.chain)
    if issued.returning:  # last: the older one is good, too
        replace_private(keys / RETURNING, pem(key) + issued.returning)


def way_back(keys: Path, now: dt.datetime) -> tuple[bytes, bytes] | None:
    """Key and chain to come back with; None while the certificate is good, and where there is no way back any more.

    Args:
        keys: the site's key directory.
        now: UTC.
    Raises:
        SiteConfigError: a file is damaged.
        KeyFileError: a file is open to others.
    """
    if not (keys / RETURNING).exists() or not (keys / FILE).exists():
        return None
    if now < _read(read_private(keys / FILE)).end:
        return None
    held = _read(read_private(keys / RETURNING))
    return (held.key, held.chain) if held.start <= now < held.end else None


def _read(body: bytes) -> _Held:
    """Take ``tls.pem`` apart.

    Raises:
        SiteConfigError: it holds no key, no certificate, or such as do not belong together.
    """
    key_pem, begin, rest = body.partition(_BEGIN)
    try:
        key, leaf = load_pem_private_key(key_pem, None), leaf_of(begin + rest)
        name = uri_of(leaf)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise SiteConfigError(f"{FILE} is damaged: {_AGAIN}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != leaf.public_key():
        raise SiteConfigError(f"{FILE} contains a certificate for another key: {_AGAIN}")
    return _Held(key_pem, begin + rest, name, number_of(leaf), leaf.not_valid_before_utc, leaf.not_valid_after_utc)
