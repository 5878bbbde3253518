"""Bytes that are not a message, to every method and under every certificate: paced, written down, and forgotten.

gRPC's own parsing comes before any interceptor, and what it cannot parse it keeps: about 20 kB for each call, and one
of the 64 calls that a connection may have open. The guard therefore gets bytes, and parses them itself.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PushMessagesRequest

from coordinator.gateway import guard, service
from coordinator.gateway import server as port
from coordinator.gateway.calls import AGENT, JOINING, OPERATING, RETURNING
from coordinator.gateway.guard import ROLES
from protos.federation.messages import FLEET_CALLS
from protos.identity.certificates import agent_name, certify, joining_name, returning_name
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.attacks.ground import SERVICE, Code, Ground, Pass, call, now, refusal
from tests.benchmarks import network
from tests.support.federation_world import Federation, Site

AT_ONCE = 60  # calls of one connection: below the 64 that it may have open
GROWTH_MB = 20.0
NOT_MESSAGES = {
    "noise": b"\xff" * 100,
    "cut off": b"\x0a\x10abc",
    "a length beyond the end": b"\x0a\xff\xff\xff\xff\x0f",
    "groups in groups": b"\x0b" * 5000,
    "field number 0": b"\x00\x00",
}
STRANGE = {  # protobuf takes each of these for a message of any kind
    "nothing": b"",
    "unknown fields": b"\xf8\x07\x01" * 1000,
    "groups in groups, closed": b"\xfb\x07" * 90 + b"\xfc\x07" * 90,
    "numbers where texts are expected": b"\x08\x01\x10\x01\x18\x01\x20\x01",
    "another method's": gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=1, data=b"abc")).SerializeToString(),
}


def send(channel: grpc.Channel, method: str, *raws: bytes) -> grpc.StatusCode | None:
    """One call with these messages, as they are; the code with which it ends, None for OK."""
    path = f"/{SERVICE.full_name}/{method}"
    try:
        if SERVICE.methods_by_name[method].server_streaming:
            list(channel.stream_stream(path)(iter(raws), timeout=120, wait_for_ready=True))
        else:
            channel.stream_unary(path)(iter(raws), timeout=120, wait_for_ready=True)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


def drawn(name: str, federation: Federation) -> Pass:
    """A certificate of the federation's own authority, in no book."""
    key = ec.generate_private_key(ec.SECP256R1())
    return Pass(key, certify(key.public_key(), name, federation.home.ca(), now(), life=dt.timedelta(hours=1)))


@pytest.fixture
def channels(ground: Ground, site: Site) -> Iterator[Mapping[str, grpc.Channel]]:
    """One for each role."""
    ground.with_fleet()
    joining = drawn(joining_name("site-n"), ground.federation)
    away = drawn(returning_name("site-a"), ground.federation)
    with (
        ground.as_site(site) as own,
        ground.channel(*joining.pair) as waiting,
        ground.channel(*away.pair) as returning,
        ground.as_operator() as operator,
    ):
        yield {AGENT: own, JOINING: waiting, RETURNING: returning, OPERATING: operator}


def of_agents() -> int:
    """How many methods are for agents: only their refusals name a site in the ledger."""
    return sum(role == AGENT for role in ROLES.values())


@pytest.mark.parametrize("raw", NOT_MESSAGES.values(), ids=NOT_MESSAGES)
def test_bytes_that_are_not_a_message_are_refused_by_every_method_and_written_down(
    ground: Ground, site: Site, channels: Mapping[str, grpc.Channel], raw: bytes
) -> None:
    with ground.refused(*["bad_message"] * of_agents()):
        for method, role in sorted(ROLES.items()):
            assert send(channels[role], method, raw) == Code.INVALID_ARGUMENT, method
    ground.works(site)
    assert ground.log().count('"rule": "bad_message"') == len(ROLES)


def test_a_call_without_a_message_is_refused_by_every_method(
    ground: Ground, site: Site, channels: Mapping[str, grpc.Channel]
) -> None:
    """A stream's method decides by itself what a stream of nothing is."""
    single = {m.name for m in SERVICE.methods if not m.client_streaming}
    with ground.refused(*["bad_message"] * (of_agents() - 2), "bad_upload"):
        for method in sorted(single):
            assert send(channels[ROLES[method]], method) == Code.INVALID_ARGUMENT, method
        assert send(channels[AGENT], "Fleet") is None  # 404, in Flower's words
        assert send(channels[AGENT], "Upload") == Code.INVALID_ARGUMENT
    ground.works(site)


@pytest.mark.parametrize("raw", STRANGE.values(), ids=STRANGE)
def test_what_protobuf_takes_for_a_message_gets_an_answer_and_breaks_nothing(
    ground: Ground, site: Site, channels: Mapping[str, grpc.Channel], raw: bytes
) -> None:
    for method in sorted(set(ROLES) - {"Session"}):
        code = send(channels[ROLES[method]], method, raw)
        assert code not in (Code.INTERNAL, Code.UNKNOWN), method
    session = channels[AGENT].stream_stream(f"/{SERVICE.full_name}/Session")(iter([raw]), timeout=60)
    assert next(session)
    session.cancel()
    ground.works(site)
    assert '"event": "incident"' not in ground.log()


def test_a_bad_message_in_the_middle_of_an_upload_is_not_its_end(
    ground: Ground, site: Site, channels: Mapping[str, grpc.Channel]
) -> None:
    first = gateway_pb2.UploadPart(upload="0" * 64).SerializeToString()
    with ground.refused("bad_message"):
        assert send(channels[AGENT], "Upload", first, NOT_MESSAGES["noise"]) == Code.INVALID_ARGUMENT
    ground.works(site)


def nested(depth: int) -> bytes:
    """A body for push-messages with objects in objects, by hand: protobuf writes none so deep."""
    raw = b""
    for tag in (*[b"\x12"] * depth, b"\x1a"):  # ObjectTree.children; PushMessagesRequest.message_object_trees
        size = len(raw)
        raw = tag + (bytes([size & 127 | 128, size >> 7]) if size > 127 else bytes([size])) + raw
    return raw


def test_a_fleet_call_whose_body_is_not_a_message_is_refused_and_written_down(
    ground: Ground, site: Site, channels: Mapping[str, grpc.Channel]
) -> None:
    stub = GatewayStub(channels[AGENT])
    assert PushMessagesRequest.FromString(nested(90))
    bodies = [
        *((call, NOT_MESSAGES["noise"]) for call in sorted(FLEET_CALLS)),
        ("/v1/fleet/push-messages", nested(500)),
    ]
    with ground.refused(*["bad_message"] * len(bodies)):
        for path, body in bodies:
            (answer,) = stub.Fleet(
                iter([gateway_pb2.FleetPart(path=path), gateway_pb2.FleetPart(data=body)]), timeout=60
            )
            assert answer.status == 400, path
    ground.works(site)


def test_a_hundred_bad_messages_use_up_neither_their_connection_nor_their_address(
    ground: Ground, site: Site, other: Site
) -> None:
    with ground.as_site(site) as own, ground.as_site(other) as neighbour:
        assert call(neighbour, "Hello").policy
        for _ in range(100):
            assert send(own, "Reserve", NOT_MESSAGES["noise"]) == Code.INVALID_ARGUMENT
        assert call(own, "Hello").policy, "the same connection"
        assert call(neighbour, "Hello").policy, "the same address"
    ground.works(site)


def test_silent_calls_of_a_revoked_certificate_hold_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose message never comes: an unwelcome peer is told so without waiting for it."""
    monkeypatch.setattr(port, "THREADS", 4)
    with Federation(tmp_path) as federation:
        ground, site = Ground(federation), federation.join("site-a")
        stolen, over = ground.issued("site-a", agent_name("site-a"), dt.timedelta(hours=1)), threading.Event()
        federation.authority.revoke("site-a", f"{stolen.leaf.serial_number:x}", "lost")

        def nothing() -> Iterator[bytes]:
            over.wait(120)
            return
            yield

        with ground.channel(*stolen.pair) as thief:
            hello = thief.stream_unary(f"/{SERVICE.full_name}/Hello")
            calls = [hello.future(nothing(), timeout=60) for _ in range(8)]
            try:
                ground.works(site)
                assert {refusal(c.result).code() for c in calls} == {Code.PERMISSION_DENIED}
            finally:
                over.set()


def unheard(over: threading.Event) -> Iterator[bytes]:
    """A stream that is open, and in which nothing comes before the test is over."""
    over.wait(300)
    return
    yield


def test_a_call_whose_message_never_comes_is_ended_whatever_the_method(
    ground: Ground, site: Site, channels: Mapping[str, grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a good certificate of each role; a slow line is no offence, so nothing is counted or written down."""
    monkeypatch.setattr(guard, "FIRST_S", 0.1)
    monkeypatch.setattr(service, "UPLOAD_S", 0.1)
    monkeypatch.setattr(service, "FLEET_S", 0.1)
    over = threading.Event()
    single = {m.name for m in SERVICE.methods if not m.client_streaming}
    assert set(ROLES) - single == {"Upload", "Fleet"}
    with ground.refused():
        calls = {
            method: channels[role].stream_stream(f"/{SERVICE.full_name}/{method}")(unheard(over), timeout=120)
            for method, role in ROLES.items()
        }
        try:
            for method, made in calls.items():
                assert made.code() == Code.CANCELLED, method
        finally:
            over.set()
        until = time.monotonic() + 60
        while ground.federation.service.guard.open_calls() and time.monotonic() < until:
            time.sleep(0.05)
        assert not ground.federation.service.guard.open_calls()
    assert ground.log().count('"rule": "silent"') == len(single)
    patience = ground.federation.service.guard._welcome_ones.strikes.kept.values()
    assert {bucket.level for bucket in patience} == {guard.STRIKES}
    ground.works(site)


@pytest.mark.parametrize("role", [AGENT, JOINING])
def test_silent_calls_of_a_good_certificate_hold_a_thread_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(port, "THREADS", 4)
    monkeypatch.setattr(guard, "FIRST_S", 0.1)
    with Federation(tmp_path) as federation:
        ground, site, other = Ground(federation), federation.join("site-a"), federation.join("site-b")
        over, joining = threading.Event(), drawn(joining_name("site-n"), federation)
        method = "Hello" if role == AGENT else "Join"
        with (
            ground.as_site(site) if role == AGENT else ground.channel(*joining.pair) as silent,
            ground.as_site(other) as neighbour,
        ):
            one = silent.stream_unary(f"/{SERVICE.full_name}/{method}")
            calls = [one.future(unheard(over), timeout=120) for _ in range(guard.AT_ONCE)]
            try:
                assert call(neighbour, "Hello", timeout=100).policy
                assert {refusal(c.result).code() for c in calls} == {Code.CANCELLED}
            finally:
                over.set()


class Flood:
    """One certificate, calls without end, a new connection for every few; and somebody honest beside it."""

    def __init__(
        self, served: network.Served, dial: Callable[[], grpc.Channel], honest: Callable[[], object]
    ) -> None:
        self.served, self.dial, self.honest = served, dial, honest
        self.codes: Counter[grpc.StatusCode | None] = Counter()
        self.answered, self.seconds = 0, 0.0

    def run(self, methods: Sequence[str], count: int) -> float:
        """Send so many; megabytes by which the coordinator's memory grew."""
        before, began, over = self.served.megabytes(), time.monotonic(), threading.Event()
        with ThreadPoolExecutor(8) as many, ThreadPoolExecutor(1) as beside:
            meanwhile = beside.submit(self._ask, over)
            raws = cycle(NOT_MESSAGES.values())
            turns = islice(zip(cycle(methods), raws, strict=False), count)
            while batch := list(islice(turns, AT_ONCE)):
                with self.dial() as channel:
                    self.codes.update(many.map(lambda turn, c=channel: send(c, *turn), batch))  # type: ignore[misc]
            over.set()
            self.answered = meanwhile.result()
        self.seconds = time.monotonic() - began
        return self.served.megabytes() - before

    def _ask(self, over: threading.Event) -> int:
        """Call until the flood is over; how often that was answered before. One that is not raises."""
        answered = 0
        while True:
            self.honest()
            answered += not over.is_set()  # an answer that comes when all is over is none
            if over.wait(0.05):  # within an honest site's rate
                return answered

    def most(self, patience: float) -> float:
        """How many refusals are written down at most: the patience, and what came back of it meanwhile."""
        return patience + self.seconds / guard.STRIKE_S + 1


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process has")
def test_a_flood_of_bad_messages_is_paced_and_written_down_and_leaves_no_memory_behind(
    tmp_path: Path, count: int
) -> None:
    federation, (site, other) = network.found(tmp_path, ["site-a", "site-b"])
    with federation:
        stolen = Ground(federation).issued("site-a", agent_name("site-a"), dt.timedelta(hours=1))
        federation.authority.revoke("site-a", f"{stolen.leaf.serial_number:x}", "lost")
    joining = drawn(joining_name("site-n"), federation)
    ground = Ground(federation)
    floods: dict[str, Flood] = {}
    with network.coordinator(federation) as served, ground.as_site(other) as honest:
        agents = sorted(m for m, role in ROLES.items() if role == AGENT)
        for name, dial, methods in (
            ("revoked", lambda: ground.channel(*stolen.pair), sorted(ROLES)),
            ("joining", lambda: ground.channel(*joining.pair), ["Join"]),
            ("good", lambda: ground.as_site(site), agents),
        ):
            floods[name] = flood = Flood(served, dial, lambda: call(honest, "Hello"))
            assert flood.run(methods, count) < GROWTH_MB, name
            assert flood.answered > 0
    denied = {"revoked": Code.PERMISSION_DENIED, "joining": Code.INVALID_ARGUMENT, "good": Code.INVALID_ARGUMENT}
    patience = {"revoked": guard.STRANGE_STRIKES, "joining": guard.STRIKES, "good": guard.STRIKES}
    for name, flood in floods.items():
        assert set(flood.codes) == {denied[name], Code.RESOURCE_EXHAUSTED}, name
        assert flood.codes.total() == count
        assert patience[name] <= flood.codes[denied[name]] <= flood.most(patience[name]) + guard.AT_ONCE, name
    with federation:
        written = Counter(rule for rules in federation.findings() for rule in rules)
    for name, rule in (("good", "bad_message"), ("revoked", "revoked")):
        assert patience[name] <= written[rule] <= floods[name].most(patience[name])
    lines = ground.log().splitlines()
    assert sum('"turned_away"' in line for line in lines) == 3 * count
    assert sum('"site-n"' in line and '"bad_message"' in line for line in lines) >= guard.STRIKES
