"""A call that came in, who made it, and how it is refused: what the guard and the services all know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography import x509
from grpc import StatusCode

from protos.common.errors import PeerError
from protos.identity.certificates import OPERATOR, joining_site_of, returning_site_of, site_of

AGENT: Final = "agent"  # the roles of peers
JOINING: Final = "joining"
RETURNING: Final = "returning"
OPERATING: Final = "operator"


class CallRejectedError(PeerError):
    """The call is over: a status, a text that the peer may read, and the rule by which it was turned away."""

    def __init__(self, code: StatusCode, text: str, rule: str = "turned_away") -> None:
        super().__init__(text)
        self.code, self.text, self.rule = code, text, rule


class PeerCertificateError(CallRejectedError):
    """Turned away for what the certificate is, whatever was asked: nobody's patience but its own is touched."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, by the certificate it was opened with."""

    role: str
    site: str  # "" for an operator
    number: str  # the certificate's serial number, lower-case hexadecimal
    leaf: x509.Certificate = field(repr=False)

    @property
    def name(self) -> str:
        """For the log: the role, or the site."""
        return self.site or self.role


def peer_of(auth: Mapping[str, list[bytes]]) -> Peer:
    """The peer of a connection; not yet whether it is welcome.

    Raises:
        CallRejectedError: older TLS, no certificate, no or several names, or a name of no role.
    """
    if auth.get("ssl_tls_version") != [b"TLSv1.3"]:
        raise CallRejectedError(StatusCode.UNAUTHENTICATED, "TLS 1.3 is required", "old_tls")
    try:
        leaf = x509.load_pem_x509_certificate(auth["x509_pem_cert"][0])
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (KeyError, IndexError, ValueError, x509.ExtensionNotFound):
        raise CallRejectedError(
            StatusCode.UNAUTHENTICATED, "a client certificate with a name is required", "no_name"
        ) from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise CallRejectedError(
            StatusCode.UNAUTHENTICATED, "the certificate must bear exactly one URI name", "several_names"
        )
    number = f"{leaf.serial_number:x}"
    for role, of in ((AGENT, site_of), (JOINING, joining_site_of), (RETURNING, returning_site_of)):
        site = of(uris[0])
        if site is not None:
            return Peer(role, site, number, leaf)
    if uris[0] == OPERATOR:
        return Peer(OPERATING, "", number, leaf)
    raise CallRejectedError(StatusCode.PERMISSION_DENIED, "this certificate belongs to no role here", "no_role")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a service's method gets in place of gRPC's context."""

    peer: Peer
    method: str
    context: Any = field(repr=False)

    @property
    def alive(self) -> bool:
        """Is the peer still there?"""
        return bool(self.context.is_active())

    def cancel(self) -> None:
        """End the call, whatever it is waiting for."""
        self.context.cancel()
