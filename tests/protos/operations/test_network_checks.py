"""The way to the coordinator: each way in which it can be closed is told apart, over real sockets and TLS."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from protos.identity.certificates import COORDINATOR, issue, make_intermediate, make_root, pem, request
from protos.operations.checks import CheckResult
from protos.operations.network_checks import Endpoint, is_open, resolves, seconds_of, skew, tls_is_direct
from tests.support.answering import answering
from tests.support.connect_proxy import ConnectProxy
from tests.support.pki import Authority
from tests.support.ports import free_port

NOW = dt.datetime.now(dt.UTC)


@contextmanager
def tls(certificate: Path, key: Path, alpn: str = "h2") -> Iterator[int]:
    """A server that shakes hands and hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if alpn:
        context.set_alpn_protocols([alpn])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                plain.settimeout(10)
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            with socket.create_connection(listening.getsockname()):
                pass
            thread.join()


class Coordinator:
    """A federation's root, and a leaf of the coordinator's name under it."""

    def __init__(self, folder: Path, now: dt.datetime = NOW, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")):
        folder.mkdir()
        ca = make_root(now)
        self.root = folder / "root.crt"
        self.root.write_bytes(ca[1])
        key = ec.generate_private_key(ec.SECP256R1())
        chain = issue(request(key, COORDINATOR), COORDINATOR, make_intermediate(ca, now), now, hosts)
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.certificate.write_bytes(chain)
        self.key.write_bytes(pem(key))


def one(found: Iterator[CheckResult]) -> CheckResult:
    (finding,) = found
    return finding


def test_the_coordinators_own_chain_is_found_straight_and_through_a_proxy(tmp_path: Path) -> None:
    hub = Coordinator(tmp_path / "hub")
    with tls(hub.certificate, hub.key) as port, ConnectProxy() as proxy:
        for by in ("", proxy.address):
            way = Endpoint(f"localhost:{port}", by, hub.root)
            assert one(is_open(way)).state == "pass"
            assert one(tls_is_direct(way)).state == "pass"
        assert proxy.tunnels == [f"localhost:{port}"] * 3


def test_who_reads_along_is_named(tmp_path: Path) -> None:
    """A hospital's inspecting proxy: TLS ends there, with a certificate of the hospital's own authority."""
    hub, inspector = Coordinator(tmp_path / "hub"), Authority(tmp_path / "proxy", "Hospital Inspection CA")
    with tls(*inspector.server()) as port:
        found = one(tls_is_direct(Endpoint(f"localhost:{port}", "", hub.root)))
        assert found.state == "fail"
        assert "Hospital Inspection CA" in found.said
        assert "exempt" in found.fix
        before = one(tls_is_direct(Endpoint(f"localhost:{port}")))
        assert before.state == "fail", "before enrolment too: it does not even say that it is a coordinator"
    with tls(hub.certificate, hub.key) as port:
        assert one(tls_is_direct(Endpoint(f"localhost:{port}"))).state == "note", "nothing is proved without a root"


def test_another_federation_another_name_and_a_wrong_clock_are_told_apart(tmp_path: Path) -> None:
    hub, other = Coordinator(tmp_path / "hub"), Coordinator(tmp_path / "other")
    late = Coordinator(tmp_path / "late", NOW - dt.timedelta(days=3))
    early = Coordinator(tmp_path / "early", NOW + dt.timedelta(days=3))
    named = Coordinator(tmp_path / "named", hosts=("hub.example",))
    cases = [(other, hub.root, "another federation"), (late, late.root, "over, by this clock")]
    cases += [(early, early.root, "not valid yet"), (named, named.root, "another name")]
    for server, root, words in cases:
        with tls(server.certificate, server.key) as port:
            found = one(tls_is_direct(Endpoint(f"localhost:{port}", "", root)))
        assert found.state == "fail"
        assert words in found.said


def test_what_strips_http_2_is_found(tmp_path: Path) -> None:
    hub = Coordinator(tmp_path / "hub")
    with tls(hub.certificate, hub.key, alpn="") as port:
        found = one(tls_is_direct(Endpoint(f"localhost:{port}", "", hub.root)))
    assert (found.state, "HTTP/2" in found.said) == ("fail", True)


def test_something_that_speaks_no_tls_is_found(tmp_path: Path) -> None:
    hub = Coordinator(tmp_path / "hub")
    with answering(b"SSH-2.0-x\r\n") as address:
        assert one(is_open(Endpoint(address))).state == "pass"
        for root in (hub.root, None):
            assert one(tls_is_direct(Endpoint(address, "", root))).state == "fail"


def test_a_closed_way_is_told_once_and_nothing_is_claimed_of_what_lies_behind(tmp_path: Path) -> None:
    way = Endpoint(f"127.0.0.1:{free_port()}", "", Coordinator(tmp_path / "hub").root)
    assert "refused" in one(is_open(way)).said
    assert one(tls_is_direct(way)).state == "note"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "needs a user name"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "forbids"),
        (b"HTTP/1.0 502 Bad Gateway\r\n\r\n", "cannot reach"),
        (b"HTTP/1.1 418 Teapot\r\n\r\n", "answers 418"),
        (b"220 mail ready\r\n", "does not answer as a proxy"),
        (b"HTTP/1.1 " + b"9" * 50_000, "does not answer as a proxy"),
        (b"", "does not answer as a proxy"),
    ],
)
def test_what_a_proxy_says_becomes_what_to_ask_its_owner(said: bytes, words: str) -> None:
    with answering(said) as proxy:
        found = one(is_open(Endpoint("hub.example:443", proxy)))
    assert found.state == "fail"
    assert words in found.said
    assert found.fix


def test_a_real_proxy_that_forbids_the_target_is_told() -> None:
    with ConnectProxy(frozenset({"elsewhere:443"})) as proxy:
        assert "forbids" in one(is_open(Endpoint("hub.example:443", proxy.address))).said


def test_a_name_that_nobody_knows_is_a_fault_of_dns_and_behind_a_proxy_its_own_business() -> None:
    """RFC 6761, section 6.4: names in .invalid have no address."""
    assert one(resolves(Endpoint("hub.invalid:443"))).state == "fail"
    assert "127.0.0.1" in one(resolves(Endpoint("hub.invalid:443", "localhost:3128"))).said
    assert one(resolves(Endpoint("hub.example:443", "proxy.invalid:3128"))).state == "fail"


def test_clocks_are_compared_to_a_minute_and_what_is_no_number_fails() -> None:
    assert skew("x", 1000.0, 1059.0, "y").state == "pass"
    assert "61 s behind y" in skew("x", 1000.0, 1061.0, "y").said
    assert "before y" in skew("x", 1100.0, 1000.0, "y").said
    assert skew("x", 1000.0, float("nan"), "y").state == "fail"
    assert skew("x", 1000.0, None, "y").state == "note"
    assert seconds_of("Sun, 06 Nov 1994 08:49:37 GMT") == 784111777.0
    assert seconds_of("yesterday") is None
