"""The proxies of the fault tests do what their names say, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from tests.support.connect_proxy import ConnectProxy
from tests.support.ports import free_port
from tests.support.tcp_proxy import TcpProxy, wait_until


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that says back what it hears, and ends when its peer has ended."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while heard := peer.recv(65_536):
                peer.sendall(heard)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def dial(address: str, timeout: float = 5.0) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def said(peer: socket.socket, count: int) -> bytes:
    out = b""
    while len(out) < count and (part := peer.recv(count - len(out))):
        out += part
    return out


def talk_for_ever(peer: socket.socket) -> None:
    while True:
        peer.sendall(bytes(5_000))
        peer.recv(1)


def test_it_passes_everything_both_ways_and_the_end_too(echo: str) -> None:
    text = bytes(range(256)) * 4096
    with TcpProxy(echo) as proxy, dial(proxy.address) as peer:

        def speak() -> None:
            peer.sendall(text)
            peer.shutdown(socket.SHUT_WR)

        threading.Thread(target=speak, daemon=True).start()
        assert said(peer, len(text) + 1) == text
        assert proxy.carried == 2 * len(text)
        assert proxy.connections == 1


def test_a_cut_is_a_reset_and_lasts_until_it_is_over(echo: str) -> None:
    with TcpProxy(echo) as proxy:
        with dial(proxy.address) as peer:
            peer.sendall(b"x")
            assert said(peer, 1) == b"x"
            assert proxy.cut() == 1
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        with pytest.raises(ConnectionResetError), dial(proxy.address) as peer:
            peer.recv(1)
        proxy.forward()
        with dial(proxy.address) as peer:
            peer.sendall(b"y")
            assert said(peer, 1) == b"y"


def test_a_half_open_connection_says_nothing_and_loses_nothing(echo: str) -> None:
    with TcpProxy(echo) as proxy, dial(proxy.address) as old:
        old.sendall(b"a")
        assert said(old, 1) == b"a"
        proxy.half_open()
        old.sendall(b"b")
        with dial(proxy.address) as new:  # accepted
            new.sendall(b"c")
            for peer in (old, new):
                peer.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    peer.recv(1)
                peer.settimeout(5)
            proxy.forward()
            assert said(old, 1) == b"b"
            assert said(new, 1) == b"c"


def test_delay_and_throttle_take_their_time(echo: str) -> None:
    with TcpProxy(echo) as proxy, dial(proxy.address) as peer:
        proxy.delay_s = 0.15
        start = time.monotonic()
        peer.sendall(b"x")
        assert said(peer, 1) == b"x"
        assert time.monotonic() - start >= 0.3  # there and back
        proxy.delay_s, proxy.bytes_per_s = 0.0, 200_000
        start = time.monotonic()
        threading.Thread(target=peer.sendall, args=(bytes(60_000),), daemon=True).start()
        assert len(said(peer, 60_000)) == 60_000
        assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize("after", [1, 20_000, 100_000])
def test_a_connection_ends_after_exactly_so_many_bytes(echo: str, after: int) -> None:
    with TcpProxy(echo) as proxy:
        proxy.reset_after(after)
        with dial(proxy.address) as peer, pytest.raises((ConnectionResetError, BrokenPipeError)):
            talk_for_ever(peer)
        assert wait_until(lambda: proxy.carried == after)
        assert not wait_until(lambda: proxy.carried > after, 0.1)


def test_a_target_that_is_gone_is_a_reset() -> None:
    address = f"127.0.0.1:{free_port()}"
    # it may come before the caller has seen the connection made
    with TcpProxy(address) as proxy, pytest.raises(ConnectionResetError), dial(proxy.address) as peer:
        peer.recv(1)


def connect(proxy: ConnectProxy, target: str, head: str = "CONNECT {} HTTP/1.1\r\nHost: {}\r\n\r\n") -> socket.socket:
    peer = dial(proxy.address)
    peer.sendall(head.replace("{}", target).encode())
    return peer


def status(peer: socket.socket) -> int:
    head = b""
    while not head.endswith(b"\r\n\r\n") and (part := peer.recv(1)):
        head += part
    return int(head.split()[1])


def test_a_tunnel_carries_bytes_and_is_counted(echo: str) -> None:
    with ConnectProxy() as proxy, connect(proxy, echo) as peer:
        assert status(peer) == 200
        peer.sendall(b"hello")
        assert said(peer, 5) == b"hello"
        assert proxy.tunnels == [echo]
        assert proxy.carried == 10


def test_nothing_but_connect_is_let_through(echo: str) -> None:
    with ConnectProxy(frozenset({"203.0.113.1:443"})) as proxy:
        for head, wanted in (
            ("GET http://{}/ HTTP/1.1\r\nHost: {}\r\n\r\n", 405),
            ("POST / HTTP/1.1\r\nHost: {}\r\n\r\n", 405),
            ("CONNECT {}/path HTTP/1.1\r\n\r\n", 400),
            ("CONNECT nowhere HTTP/1.1\r\n\r\n", 400),
            ("CONNECT {} HTTP/1.1\r\n\r\n", 403),
        ):
            with connect(proxy, echo, head) as peer:
                assert status(peer) == wanted
        assert proxy.refused == [405, 405, 400, 400, 403]
        assert proxy.tunnels == []
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy.url}))
        with pytest.raises(urllib.error.HTTPError) as refused:
            opener.open(f"http://{echo}/")
        assert refused.value.code == 405


def test_a_target_that_does_not_answer_is_a_bad_gateway() -> None:
    address = f"127.0.0.1:{free_port()}"
    with ConnectProxy() as proxy, connect(proxy, address) as peer:
        assert status(peer) == 502


def test_grpc_goes_through_the_tunnel(echo: str) -> None:
    def twice(request: bytes, _context: grpc.ServicerContext) -> bytes:
        return request + request

    server = grpc.server(futures.ThreadPoolExecutor(2))
    calls = {"Twice": grpc.unary_unary_rpc_method_handler(twice)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with ConnectProxy() as proxy:
            options = (("grpc.http_proxy", proxy.url),)
            with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                assert channel.unary_unary("/t.T/Twice")(b"ab", timeout=120) == b"abab"
            assert proxy.tunnels == [f"127.0.0.1:{port}"]
    finally:
        server.stop(None)


def test_a_proxy_ends_with_its_tunnels_open(echo: str) -> None:
    with ConnectProxy() as proxy:
        peer = connect(proxy, echo)
        assert status(peer) == 200
    with peer, contextlib.suppress(ConnectionResetError):
        assert peer.recv(1) == b""
