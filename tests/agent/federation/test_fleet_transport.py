"""What a site says of itself while a round is on: its stage, and with it no more than the time of its answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from agent.federation import fleet_transport, supernode_process
from agent.federation.fleet_transport import AnotherRoot, FleetTransport
from agent.federation.supernode_process import LinkConfig, SuperNodeLink
from agent.federation.tasks import RoundAnswer, RoundTask, task_frame
from agent.gateway.channel import of_another_root
from protos.federation import messages
from protos.v1 import gateway_pb2
from tests.support.pki import Authority


class Stub:
    """A coordinator's end: notes the stage of each call."""

    def __init__(self, told: list[tuple[str, str]]) -> None:
        self.told = told

    def Fleet(self, parts: Iterator[gateway_pb2.FleetPart], timeout: float) -> Iterator[gateway_pb2.FleetPart]:
        first = next(parts)
        self.told.append((first.path, first.headers[messages.STAGE]))
        return iter([gateway_pb2.FleetPart(status=200)])


class Channel:
    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> tuple[FleetTransport, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(fleet_transport, "GatewayStub", lambda _channel: Stub(told))
    return FleetTransport(Channel), told  # type: ignore[arg-type]


def call(way: FleetTransport, name: str) -> None:
    way.handle_request(httpx.Request("POST", f"http://coordinator/v1/fleet/{name}"))


def test_each_call_says_what_the_site_is_at_in_a_word_of_the_list(
    way: tuple[FleetTransport, list[tuple[str, str]]],
) -> None:
    transport, told = way
    for name in ("pull-messages", "pull-object", "send-node-heartbeat", "push-object", "send-node-heartbeat"):
        call(transport, name)
    stages = [stage for _, stage in told]
    assert stages == ["idle", "receiving", "receiving", "sending", "sending"]
    assert set(stages) <= messages.STAGES


class WantsGreeting(grpc.RpcError):
    """What the coordinator says to a site that has not shown its ledger's head since its line was cut."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OUT_OF_RANGE


@pytest.mark.parametrize("helps", [True, False])
def test_where_a_greeting_is_wanted_it_is_made_once_and_the_call_again(
    way: tuple[FleetTransport, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    _, told = way
    greeted = list[int]()

    class Strict(Stub):
        def Fleet(self, parts: Iterator[gateway_pb2.FleetPart], timeout: float) -> Iterator[gateway_pb2.FleetPart]:
            found = Stub.Fleet(self, parts, timeout)
            if not (greeted and helps):
                raise WantsGreeting
            return found

    monkeypatch.setattr(fleet_transport, "GatewayStub", lambda _channel: Strict(told))
    transport = FleetTransport(Channel, lambda: greeted.append(len(told)))  # type: ignore[arg-type]
    with contextlib.nullcontext() if helps else pytest.raises(httpx.TransportError, match="OUT_OF_RANGE"):
        call(transport, "push-object")
    assert (len(told), greeted) == (2, [1]), "a piece is not carried again and again for nothing"


@pytest.mark.parametrize("seconds", [0.0, 0.6])
def test_a_site_works_until_its_answer_may_leave(
    way: tuple[FleetTransport, list[tuple[str, str]]], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the training is, of whichever number of patients: the pause is part of the work."""
    transport, told = way
    link = SuperNodeLink(LinkConfig("127.0.0.1:1", None, None))  # type: ignore[arg-type]
    link._transport = transport
    leaves = time.monotonic() + 0.8

    def handle(_: RoundTask) -> RoundAnswer:
        time.sleep(seconds)  # the training
        call(transport, "send-node-heartbeat")
        while time.monotonic() < leaves:  # and the pause, as `TaskHandler.handle` makes it
            call(transport, "send-node-heartbeat")
            time.sleep(0.1)
        return RoundAnswer(b"envelope")

    frames = iter([b"".join(task_frame(b"ticket", RoundTask("run-1", "price", 0, b"{}")))])

    class Child:
        """The link's process: one task, then its end."""

        class pipe:
            fileno = staticmethod(lambda: 0)
            poll = staticmethod(lambda _: True)

        sent: list[object] = []  # noqa: RUF012 - of this test alone

        def send(self, parts: object) -> None:
            self.sent.append(parts)

    def receive(_: int) -> bytearray:
        try:
            return bytearray(next(frames))
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(supernode_process.tasks, "receive_frame", receive)
    with pytest.raises(EOFError):
        link._converse(Child(), handle, threading.Event(), lambda _: None)  # type: ignore[arg-type]
    assert {stage for _, stage in told} == {"working"}
    call(transport, "push-messages")
    assert told[-1][1] == "sending"


def test_what_answers_with_a_certificate_of_another_root_is_said_as_such(tmp_path: Path) -> None:
    here, there = Authority(tmp_path / "here"), Authority(tmp_path / "there")
    certificate, key = there.server()
    server = grpc.server(ThreadPoolExecutor(1))
    own = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", own)
    server.start()
    try:
        for authority, fault in ((here, AnotherRoot), (there, httpx.TransportError)):
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            transport = FleetTransport(lambda c=credentials: grpc.secure_channel(f"127.0.0.1:{port}", c))  # type: ignore[misc]
            with pytest.raises(httpx.TransportError) as said:
                call(transport, "pull-messages")
            transport.close()
            assert type(said.value) is fault  # one that answers knows no such method
    finally:
        server.stop(None)


@pytest.mark.parametrize("end", ["certificate has expired", "certificate is not yet valid"])
def test_a_certificate_that_is_not_valid_now_is_not_taken_for_another_roots(end: str) -> None:
    said = "Ssl handshake failed: SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
    assert of_another_root(said + "unable to get local issuer certificate")
    assert not of_another_root(said + end)
    assert not of_another_root(None)
