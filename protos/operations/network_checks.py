"""The way to the coordinator, step by step, so that a doctor can say which step does not work.

Name, connection (through the hospital's proxy by CONNECT), TLS with the federation's own root as the only anchor. It
uses the standard library's sockets and not gRPC, which tells no step from another.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from protos.common.errors import UnreachableError
from protos.common.text import printable
from protos.identity.certificates import COORDINATOR, CertificateError, uri_of
from protos.operations.checks import CheckResult, failed, note, passed

SECONDS: Final = 10.0
_HEAD: Final = 16_384  # bytes of a proxy's answer
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")
NAME, WAY, INSPECTED = "the name resolves", "the way out is open", "nobody reads along (TLS inspection)"
_EXEMPT: Final = "ask the proxy's owner to exempt this host from TLS inspection, which breaks the authentication"
_PROXY_SAID: Final = {
    407: (
        "the proxy needs a user name",
        "ask the proxy's owner to permit this machine without one, to this host and port",
    ),
    403: ("the proxy forbids it", "ask the proxy's owner to allow CONNECT to this host and port"),
    405: ("the proxy does not support CONNECT", "check that `proxy` names the forward proxy and its port"),
    502: ("the proxy cannot reach the coordinator", "ask the proxy's owner whether it resolves and reaches the host"),
    503: ("the proxy cannot reach the coordinator", "ask the proxy's owner whether it resolves and reaches the host"),
    504: ("the proxy got no answer", "ask the proxy's owner whether it resolves and reaches the host"),
}


class CheckFailedError(UnreachableError):
    """A step fails: the problem, and the remedy."""

    def __init__(self, said: str, fix: str) -> None:
        """Both for the operator."""
        super().__init__(said)
        self.said, self.fix = said, fix


@dataclass(frozen=True, slots=True)
class Endpoint:
    """From here to the coordinator."""

    target: str  # host:port
    proxy: str = ""  # host:port; "": straight
    root: Path | None = None  # PEM of the federation's root; None: not enrolled yet

    @property
    def first(self) -> str:
        """What is dialled from here."""
        return self.proxy or self.target


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolves(way: Endpoint) -> Iterator[CheckResult]:
    """Is the name known that is dialled from here? Behind a proxy the coordinator's name is the proxy's business."""
    host = split_address(way.first)[0]
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        fix = f"enter {host} in the hospital's DNS, or correct it in the settings"
        yield failed(NAME, f"{host} has no address here", fix)
        return
    whose = "the proxy " if way.proxy else ""
    yield passed(NAME, f"{whose}{host}: {', '.join(found[:4])}")


def is_open(way: Endpoint) -> Iterator[CheckResult]:
    """Can a connection be had, through the proxy where there is one?"""
    try:
        connect(way)[0].close()
    except CheckFailedError as blocked:
        yield failed(WAY, blocked.said, blocked.fix)
        return
    yield passed(WAY, f"{way.target} by CONNECT through {way.proxy}" if way.proxy else f"{way.target}, straight")


def connect(way: Endpoint) -> tuple[socket.socket, float | None]:
    """A connection to the coordinator, and the time that the proxy told on the way (seconds since 1970), if it did.

    Raises:
        CheckFailedError: what is wrong and what to do.
    """
    host, port = split_address(way.first)
    try:
        connection = socket.create_connection((host, port), timeout=SECONDS)
    except TimeoutError:
        fix = f"have the firewall's owner allow TCP from this machine to {way.first}"
        raise CheckFailedError(f"{way.first} does not answer: a firewall drops the packets", fix) from None
    except OSError as error:
        fix = f"check that {way.first} is right and can be reached from this machine"
        raise CheckFailedError(f"{way.first} cannot be reached: {error.strerror or 'no such name'}", fix) from None
    if not way.proxy:
        return connection, None
    try:
        return connection, _connect(connection, way.target)
    except BaseException:
        connection.close()
        raise


def _connect(connection: socket.socket, target: str) -> float | None:
    """CONNECT (RFC 9110, section 9.3.6); the time in the proxy's answer.

    Raises:
        CheckFailedError: it opens no tunnel.
    """
    answer = b""
    try:
        connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode("ascii"))
        while b"\r\n\r\n" not in answer and len(answer) < _HEAD:
            more = connection.recv(1)  # not a byte beyond the head: the next one is TLS
            if not more:
                break
            answer += more
    except OSError:
        answer = b""
    status = _STATUS.match(answer)
    if status is None:
        raise CheckFailedError(
            "the host in `proxy` does not answer as a proxy", "check that `proxy` names the forward proxy"
        )
    code = int(status[1])
    if code != 200:
        usual = (f"the proxy answers {code}", "ask the proxy's owner why")
        raise CheckFailedError(*_PROXY_SAID.get(code, usual))
    date = re.search(rb"\r\ndate: *([^\r]{1,64})\r", answer, re.IGNORECASE)
    return seconds_of(date[1].decode("ascii", "replace")) if date else None


def seconds_of(date: str) -> float | None:
    """An HTTP date (RFC 9110, section 5.6.7) as seconds since 1970; None: it is none."""
    with contextlib.suppress(ValueError, TypeError):
        return email.utils.parsedate_to_datetime(date).timestamp()
    return None


def tls_is_direct(way: Endpoint) -> Iterator[CheckResult]:
    """Is it the coordinator's own certificate that comes here, from the federation's root and no other?

    Before enrolment there is no root to pin: then the certificate's own words are all there is, which prove nothing.
    """
    try:
        connect(way)[0].close()
    except CheckFailedError:
        yield note(INSPECTED, "unknown while the outbound connection is closed")
        return
    try:
        if way.root is not None:
            yield _pinned(way, way.root)
            return
        leaf = peer_certificate(way)
    except CheckFailedError as blocked:
        yield failed(INSPECTED, blocked.said, blocked.fix)
        return
    if _coordinators(leaf):
        yield note(INSPECTED, "the certificate says that it is a coordinator's; this is verified after enrolment")
    else:
        yield failed(INSPECTED, f"the received certificate is signed by {_signer(leaf)}", _EXEMPT)


def _pinned(way: Endpoint, root: Path) -> CheckResult:
    context = ssl.create_default_context(cafile=root)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    host = split_address(way.target)[0]
    connection = connect(way)[0]
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            if secured.selected_alpn_protocol() != "h2":
                said = "the chain is right, but HTTP/2 is not offered: a device in between removes it"
                return failed(INSPECTED, said, "let the proxy pass TLS through unchanged (TCP passthrough)")
            return passed(INSPECTED, f"the chain ends in the federation's own root; {secured.version()}")
    except ssl.SSLCertVerificationError as error:
        return _unverified(way, error.verify_code, error.verify_message)
    except OSError:
        connection.close()
        said = "no TLS connection: a device in between breaks it off, or there is no coordinator"
        return failed(INSPECTED, said, _EXEMPT)


# OpenSSL's X509_V_ERR: not yet valid, expired, host name, IP address
_EARLY, _ENDED, _NAMES = 9, 10, (62, 64)


def _unverified(way: Endpoint, code: int, why: str) -> CheckResult:
    if code in (_EARLY, _ENDED):
        said = f"the coordinator's certificate is {'not valid yet' if code == _EARLY else 'over'}, by this clock"
        return failed(INSPECTED, said, "set this machine's clock by NTP; if it is right, tell the coordinator")
    leaf = peer_certificate(way)
    if code in _NAMES and _coordinators(leaf):
        said = "it is the coordinator, but under another name than the one in the settings"
        return failed(INSPECTED, said, "use the name that the coordinator gave, or ask its operator to set `address`")
    if _coordinators(leaf):
        said = "the certificate is from another federation, or the root here is outdated"
        return failed(INSPECTED, said, "compare the root's fingerprint with the coordinator by phone")
    return failed(INSPECTED, f"the certificate that comes is signed by {_signer(leaf)} ({why})", _EXEMPT)


def peer_certificate(way: Endpoint) -> x509.Certificate:
    """The certificate that arrives, whoever signed it, to find out who intercepts the connection. Nothing is sent
    over it.

    Raises:
        CheckFailedError: none comes.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    connection = connect(way)[0]
    try:
        with context.wrap_socket(connection, server_hostname=split_address(way.target)[0]) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        connection.close()
        raise CheckFailedError("no TLS connection", _EXEMPT) from None


def _coordinators(leaf: x509.Certificate) -> bool:
    try:
        return uri_of(leaf) == COORDINATOR
    except CertificateError:
        return False


def _signer(leaf: x509.Certificate) -> str:
    """Who signed it, in its own words: printable and short."""
    for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME):
        for attribute in leaf.issuer.get_attributes_for_oid(kind):
            return printable(attribute.value)[:80]
    return "somebody who gives no name"


def skew(name: str, ours: float, theirs: float | None, whose: str, most: float = 60.0) -> CheckResult:
    """How far the clocks are apart, in seconds.

    Args:
        name: of the check.
        ours: seconds since 1970, here.
        theirs: there; None: not told.
        whose: clock it is.
        most: seconds beyond which it fails; certificates are good five minutes before their beginning.
    """
    if theirs is None:
        return note(name, f"{whose} reported no time, so the clocks cannot be compared")
    apart = ours - theirs
    if not abs(apart) <= most:
        said = f"{abs(apart):.0f} s {'before' if apart > 0 else 'behind'} {whose}"
        return failed(
            name, said, "set this machine's clock by NTP (chrony, timesyncd), or ask the other side to do it"
        )
    return passed(name, f"{abs(apart):.1f} s from {whose}")
