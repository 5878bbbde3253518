"""A confined process's HTTP calls are made for it: to one address, with a proof that it does not hold."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from protos.operations.http_relay import HOOKS, Relay, RelayedTransport

MOST = 1 << 20


@dataclass
class Server:
    """A real one, on loopback; it remembers who called."""

    heard: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    address: str = ""
    hold: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server() -> Iterator[Server]:
    """Answers with the body, backwards; ``/slow`` when it may."""
    kept = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.heard.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if self.path == "/slow":
                kept.hold.wait(60)
            self.send_response(418 if self.path == "/odd" else 200)
            self.send_header("content-type", "application/protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[::-1])

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    kept.address = f"http://127.0.0.1:{http.server_address[1]}"
    yield kept
    kept.hold.set()
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.mark.parametrize("hooked", [True, False])
def test_the_bytes_of_a_response_go_with_it_and_wait_for_no_collection(server: Server, hooked: bool) -> None:
    """Without the hook a response stands in a ring with its stream: a model's pieces would stay, one and all."""
    gc.disable()
    try:
        with httpx.Client(base_url=server.address, event_hooks=HOOKS if hooked else {}) as client:
            response = client.post("/call", content=b"abc")
            assert response.content == b"cba"
            gone = weakref.ref(response)
            del response
            assert (gone() is None) is hooked
    finally:
        gc.enable()


@dataclass
class Pair:
    """Both ends, and the socket under the confined one."""

    client: httpx.Client
    relay: Relay
    end: socket.socket


class Turned(httpx.TransportError):
    """A fault that callers know by its name."""


@pytest.fixture
def pair(server: Server) -> Iterator[Pair]:
    """A relay to the server, with a proof."""
    ours, theirs = socket.socketpair()
    with httpx.Client(base_url=server.address, trust_env=False, timeout=60) as real:
        relay = Relay(ours, real, MOST, lambda: {"x-proof": "signed"})
        transport = RelayedTransport(theirs, MOST, {"Turned": Turned})
        with httpx.Client(transport=transport, trust_env=False, timeout=60) as client:
            yield Pair(client, relay, theirs)
        relay.close()
        theirs.close()


def test_a_call_arrives_with_its_proof_and_its_answer_comes_back(pair: Pair, server: Server) -> None:
    said = {"content-type": "text/x", "x-more": "1"}
    answer = pair.client.post("http://anybody/v1/pull", content=b"abc", headers=said)
    assert (answer.status_code, answer.content) == (200, b"cba")
    assert answer.headers["content-type"] == "application/protobuf"
    path, headers, body = server.heard[0]
    assert (path, body) == ("/v1/pull", b"abc")
    assert headers["host"] == server.address.removeprefix("http://")
    assert (headers["x-proof"], headers["x-more"], headers["content-type"]) == ("signed", "1", "text/x")
    assert pair.client.post("http://anybody/odd", content=b"").status_code == 418


def test_a_process_cannot_prove_itself_nor_reach_another_host(pair: Pair, server: Server) -> None:
    pair.client.post("http://169.254.169.254/v1/pull", content=b"", headers={"X-Proof": "forged", "Host": "evil"})
    _, headers, _ = server.heard[0]
    assert headers["x-proof"] == "signed"
    assert headers["host"] == server.address.removeprefix("http://")


def test_calls_go_side_by_side_and_each_gets_its_own_answer(pair: Pair, server: Server) -> None:
    with ThreadPoolExecutor(20) as pool:
        slow = pool.submit(pair.client.post, "http://a/slow", content=b"late")
        quick = [pool.submit(pair.client.post, f"http://a/q{n}", content=str(n).encode()) for n in range(40)]
        assert [call.result().content.decode()[::-1] for call in quick] == [str(n) for n in range(40)]
        assert not slow.done()
        server.hold.set()
        assert slow.result().content == b"etal"


def test_a_fault_is_told_by_its_name_and_no_text(server: Server) -> None:
    class Broken(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            raise (Turned if request.url.path == "/turned" else OSError)("patient 4711")

    ours, theirs = socket.socketpair()
    with httpx.Client(transport=Broken(), base_url="http://a") as real, theirs:
        relay = Relay(ours, real, MOST)
        client = httpx.Client(transport=RelayedTransport(theirs, MOST, {"Turned": Turned}))
        with pytest.raises(Turned, match=r"^Turned$"):
            client.post("http://a/turned")
        with pytest.raises(httpx.TransportError, match=r"^OSError$"):
            client.post("http://a/other")
        relay.close()


def test_a_relay_that_is_gone_fails_what_waits_and_what_comes(pair: Pair, server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.client.post, "http://a/slow", content=b"x")
        while not server.heard:
            pass
        pair.relay.close()
        with pytest.raises(httpx.TransportError):
            waiting.result(60)
    with pytest.raises(httpx.TransportError):
        pair.client.post("http://a/later")


def message(head: Any, body: bytes = b"", lengths: tuple[int, int] | None = None) -> bytes:
    told = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack(">IIQ", 7, *(lengths or (len(told), len(body)))) + told + body


@pytest.mark.parametrize(
    "said",
    [
        message({"path": "http://evil/x", "headers": {}}),
        message({"path": "//evil/x", "headers": {}}),
        message({"path": "/a/../b", "headers": {}}),
        message({"path": "/a?b=c", "headers": {}}),
        message({"path": "/a@evil", "headers": {}}),
        message({"path": 1, "headers": {}}),
        message({"path": "/a"}),
        message({"path": "/a", "headers": {"host": "evil"}}),
        message({"path": "/a", "headers": {"x\r\ny": "1"}}),
        message({"path": "/a", "headers": {"x": "1\r\nhost: evil"}}),
        message({"path": "/a", "headers": {"content-length": "9"}}),
        message({"path": "/a", "headers": {"x": 1}}),
        message([]),
        message(b"\xff"),
        message(b"[" * 60_000),
        message({}, lengths=(1 << 17, 0)),
        message({}, lengths=(2, MOST + 1)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_call_ends_the_relay_and_reaches_nobody(pair: Pair, server: Server, said: bytes) -> None:
    pair.end.sendall(said)
    pair.end.shutdown(socket.SHUT_WR)
    pair.end.settimeout(60)
    with contextlib.suppress(ConnectionResetError):  # what it said was not read to its end
        assert pair.end.recv(16) == b""
    assert server.heard == []
