"""The agent's side of a transfer, against a real gRPC server: lines cut, a server killed, replies lost."""

from __future__ import annotations

import datetime as dt
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.errors import AnotherRootError, CoordinatorUnreachableError
from agent.gateway.client import Patience, send
from coordinator.storage.uploads import Uploads
from protos.artifacts.chunks import CHUNK
from protos.identity.certificates import make_root
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.support import upload_server
from tests.support.federation_world import Federation
from tests.support.upload_server import Cutter, Receiver, announce, serving

WINDOW = 8
QUICK = Patience(still_s=120.0, first_pause_s=0.05, longest_pause_s=0.2, rng=random.Random(1))


def artifact(mib: float) -> bytes:
    return random.Random(7).randbytes(int(mib * CHUNK))


@pytest.fixture
def receiver(tmp_path: Path) -> Receiver:
    return Receiver(Uploads(tmp_path / "staging", time.time, keep_free=0))


@contextmanager
def dialled(port: int) -> Iterator[GatewayStub]:
    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        yield GatewayStub(channel)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.gateway.client.WINDOW", WINDOW)


def test_an_artifact_arrives_whole_from_bytes_and_from_a_file(receiver: Receiver, tmp_path: Path) -> None:
    body = artifact(9.5)
    source = tmp_path / "source"
    source.write_bytes(body)
    told: list[tuple[int, int]] = []
    with serving(receiver) as port, dialled(port) as stub:
        assert send(stub, announce(body, "k1"), body, QUICK, lambda done, total: told.append((done, total))).admitted
        assert receiver.finished[0].read_bytes() == body
        receiver.finished[0].unlink()
        receiver.puts.clear()
        assert send(stub, announce(source, "k2"), source, QUICK).admitted
    assert receiver.puts == list(range(10))
    assert told == [(0, len(body)), (WINDOW * CHUNK, len(body)), (len(body), len(body))]


def test_a_cut_line_costs_at_most_one_window(receiver: Receiver) -> None:
    """Three resets in the middle; what was durable is not sent again."""
    body = artifact(40)
    with serving(receiver) as port:
        cutter = Cutter(port, [12 * CHUNK, 14 * CHUNK, 9 * CHUNK])
        with dialled(cutter.port) as stub:
            assert send(stub, announce(body), body, QUICK).admitted
        cutter.close()
    assert cutter.reset == 3
    assert receiver.finished[0].read_bytes() == body
    assert len(receiver.puts) <= 40 + 3 * WINDOW
    assert len(set(receiver.puts)) == 40


def test_a_server_that_is_killed_between_two_pieces_goes_on_after_its_start(tmp_path: Path) -> None:
    body = artifact(24)
    command = [sys.executable, "-m", "tests.support.upload_server", str(tmp_path / "staging")]

    def start(port: str, die_after: str) -> tuple[subprocess.Popen[str], int]:
        child = subprocess.Popen([*command, port, die_after], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        return child, int(child.stdout.readline())

    first, port = start("0", "13")
    second: list[subprocess.Popen[str]] = []
    sent: list[int] = []

    def pause(_seconds: float) -> None:
        if not second:
            assert first.wait(60) == -9
            second.append(start(str(port), "0")[0])
        time.sleep(0.1)

    patience = Patience(still_s=120.0, rng=random.Random(1), sleep=pause)
    try:
        with dialled(port) as stub:
            assert send(stub, announce(body), body, patience, lambda done, _total: sent.append(done)).admitted
    finally:
        for child in (first, *second):
            child.kill()
            child.wait()
    assert [path.read_bytes() == body for path in (tmp_path / "staging/ready/site-a").iterdir()] == [True]
    assert sent == [0, 8 * CHUNK, 16 * CHUNK, 24 * CHUNK]  # the first window was durable when the kill came


def test_a_lost_reply_to_submit_is_asked_for_by_its_key(receiver: Receiver) -> None:
    body = artifact(1)
    receiver.lose_reply = True
    with serving(receiver) as port, dialled(port) as stub:
        assert send(stub, announce(body), body, QUICK).admitted
    assert len(receiver.finished) == 1
    assert receiver.puts == [0]


def test_an_upload_that_the_coordinator_has_forgotten_is_offered_again(receiver: Receiver) -> None:
    body = artifact(12)
    upload, forgets = receiver.Upload, [True]

    def forgetful(parts: Any, context: Any) -> Any:
        reply = upload(parts, context)
        if forgets:
            forgets.clear()
            receiver.uploads.expire(-1)
        return reply

    receiver.Upload = forgetful  # type: ignore[method-assign]
    with serving(receiver) as port, dialled(port) as stub:
        assert send(stub, announce(body), body, QUICK).admitted
    assert receiver.finished[0].read_bytes() == body
    assert sorted(receiver.puts) == sorted([*range(WINDOW), *range(12)])


def test_a_refused_offer_is_the_answer_and_nothing_is_sent(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_server, "QUOTA", CHUNK)
    body = artifact(2)
    with serving(receiver) as port, dialled(port) as stub:
        reply = send(stub, announce(body), body, QUICK)
    assert not reply.admitted
    assert [finding.rule for finding in reply.findings] == ["artifact_size"]
    assert receiver.puts == []


def test_bytes_other_than_those_announced_are_refused_at_once(receiver: Receiver) -> None:
    """The statement names other bytes than those that come: no second try would help."""
    body = artifact(2)
    sealed = announce(body[:-1] + bytes([body[-1] ^ 1]))
    with (
        serving(receiver) as port,
        dialled(port) as stub,
        pytest.raises((CoordinatorUnreachableError, grpc.RpcError)),
    ):
        send(stub, sealed, body, QUICK)
    assert receiver.finished == []


def test_patience_ends_when_nothing_moves(tmp_path: Path) -> None:
    class Clock:
        now, pauses = 0.0, 0

        def sleep(self, seconds: float) -> None:
            self.pauses += 1
            self.now += max(seconds, 0.5)

    clock = Clock()
    patience = Patience(still_s=20.0, rng=random.Random(3), now=lambda: clock.now, sleep=clock.sleep)
    with serving(Receiver(Uploads(tmp_path / "staging", time.time, keep_free=0))) as port:
        pass  # and it is gone
    with dialled(port) as stub, pytest.raises(grpc.RpcError) as caught:
        send(stub, announce(b"x"), b"x", patience)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert clock.pauses > 3
    assert 20.0 <= clock.now < 51.0


def test_every_call_has_a_deadline(receiver: Receiver) -> None:
    """A server that takes a stream and says nothing does not hold the agent."""
    upload, silent = receiver.Upload, [True]

    def slow(parts: Any, context: Any) -> Any:
        if silent:
            silent.clear()
            time.sleep(1.5)
        return upload(parts, context)

    receiver.Upload = slow  # type: ignore[method-assign]
    body = artifact(1)
    patience = Patience(still_s=10.0, window_s=0.5, first_pause_s=0.05, rng=random.Random(1))
    with serving(receiver) as port, dialled(port) as stub:
        assert send(stub, announce(body), body, patience).admitted


def test_the_agent_does_not_read_ahead_of_a_server_that_does_not_listen(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's flow control asks for the next piece; a stalled server is not answered with a file in memory."""
    read: list[int] = []
    piece = sys.modules["agent.gateway.client"].piece
    monkeypatch.setattr("agent.gateway.client.piece", lambda a, i: (read.append(i), piece(a, i))[1])
    monkeypatch.setattr("agent.gateway.client.WINDOW", 64)

    def deaf(_parts: Any, context: Any) -> Any:
        time.sleep(1.0)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "enough")

    receiver.Upload = deaf  # type: ignore[method-assign]
    body = artifact(64)
    with serving(receiver) as port, dialled(port) as stub, pytest.raises(grpc.RpcError):
        send(stub, announce(body), body, QUICK)
    assert 0 < len(read) <= 8


def test_an_answer_about_another_artifact_is_not_followed(receiver: Receiver) -> None:
    def elsewhere(_request: Any, _context: Any) -> Any:
        return gateway_pb2.OfferReply(upload="f" * 64, missing=b"\x01")

    receiver.Offer = elsewhere  # type: ignore[method-assign]
    with (
        serving(receiver) as port,
        dialled(port) as stub,
        pytest.raises(CoordinatorUnreachableError, match="another artifact"),
    ):
        send(stub, announce(b"x"), b"x", QUICK)


@pytest.mark.parametrize("missing", [b"", b"\x02", b"\x01\x00"])
def test_a_bitmap_of_another_length_is_not_followed(receiver: Receiver, missing: bytes) -> None:
    sealed = announce(b"x")
    name = upload_server.manifest(b"x").sha256
    receiver.Offer = lambda _r, _c: gateway_pb2.OfferReply(upload=name, missing=missing)  # type: ignore[method-assign]
    with (
        serving(receiver) as port,
        dialled(port) as stub,
        pytest.raises(CoordinatorUnreachableError, match="missing chunks"),
    ):
        send(stub, sealed, b"x", QUICK)


def test_what_answers_with_another_root_is_said_as_such_and_gets_nothing(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        site = federation.join("site-a")
        assert site.gateway().hello() is not None
        said = len(federation.recorder.messages)
        (site.home.keys / "root.crt").write_bytes(make_root(dt.datetime.now(dt.UTC))[1])
        with pytest.raises(AnotherRootError, match="not of the root that this site joined by"):
            site.gateway().hello()
        assert len(federation.recorder.messages) == said
