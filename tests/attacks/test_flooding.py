"""Too much, too often, too slow: one site's noise is not the others' trouble, nor fills memory, disk or ledger."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.gateway import calls, guard, service
from coordinator.gateway import server as port
from protos.identity.certificates import agent_name, leaf_of
from protos.identity.key_files import pem
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.attacks.ground import SERVICE, Code, Ground, call, forged_leaf, now, refusal, signer_of
from tests.benchmarks import network
from tests.support.federation_world import Federation, Site, pictures
from tests.support.ledger_world import DP


def stood_still(ground: Ground) -> None:
    """For this test no time passes in which a peer may call again."""
    vars(ground.federation.service.guard).update(_clock=lambda: 1000.0)


def occupied(root: Path) -> int:
    """Bytes of the disk below a folder, the ledger apart."""
    return sum(p.stat().st_blocks * 512 for p in root.rglob("*") if p.is_file() and "ledger" not in p.name)


@contextlib.contextmanager
def connections(ground: Ground, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """TCP connections that say next to nothing."""
    made = [socket.create_connection(("127.0.0.1", ground.federation.port)) for _ in range(count)]
    try:
        for line in made:
            line.sendall(said)
        yield made
    finally:
        for line in made:
            line.close()


def ended(line: socket.socket, seconds: float) -> bool:
    """Did the other end hang up?"""
    line.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        try:
            return line.recv(1) == b""
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n"])
def test_silent_connections_do_not_keep_a_site_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(port, "HANDSHAKE_MS", 900_000)  # while this test lasts no silent one is given up
    with Federation(tmp_path) as federation:
        ground, site = Ground(federation), federation.join("site-a")
        with ground.refused(), connections(ground, 300, said) as lines:
            ground.works(site)
            if not said.startswith(b"PRI"):  # which is no handshake, and is hung up on at once
                assert not any(ended(line, 0.001) for line in lines), "the answer came while they were silent"
        ground.audit()


@pytest.mark.slow
def test_a_handshake_that_is_never_finished_is_given_up(ground: Ground, site: Site) -> None:
    with connections(ground, 1) as (line,):
        assert ended(line, 100.0)  # gRPC's own patience is 120 s
    ground.works(site)


def silent(wait: threading.Event) -> Iterator[gateway_pb2.UploadPart]:
    """A stream that is open and says nothing."""
    wait.wait(900)
    return
    yield


def test_silent_streams_of_one_site_leave_the_others_their_places(
    ground: Ground, site: Site, other: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UPLOAD_S", 900.0)  # the streams that are let in stay
    monkeypatch.setattr(service, "FLEET_S", 900.0)
    wait = threading.Event()
    with ground.as_site(site) as channel, ground.refused():
        stub = GatewayStub(channel)
        uploads = [stub.Upload.future(silent(wait)) for _ in range(30)]
        fleets = [stub.Fleet(silent(wait)) for _ in range(30)]
        until = time.monotonic() + 200
        while sum(u.done() for u in uploads) < 28 and time.monotonic() < until:
            time.sleep(0.05)
        ground.works(other)
        turned = [u for u in uploads if u.done()]
        assert len(turned) == 28
        assert {u.code() for u in turned} == {Code.RESOURCE_EXHAUSTED}
        assert ground.federation.service.guard.open_calls()["Upload"] == 2, "the answer came while they were silent"
        assert sum(ground.federation.service.guard.open_calls().values()) <= guard.AT_ONCE
        wait.set()
        for stream in fleets:
            stream.cancel()
    other.reserved("grant-b")
    assert '"rule": "busy"' in ground.log()


def test_a_stream_in_which_nothing_arrives_gives_its_place_back(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UPLOAD_S", 1.0)
    monkeypatch.setattr(service, "FLEET_S", 1.0)
    wait = threading.Event()
    ground.with_fleet()
    with ground.as_site(site) as channel, ground.refused():
        # each deadline is shorter than the patience would be without this test's word, and would have another code
        assert refusal(lambda: GatewayStub(channel).Upload(silent(wait), timeout=100)).code() == Code.CANCELLED
        assert refusal(lambda: list(GatewayStub(channel).Fleet(silent(wait), timeout=50))).code() == Code.CANCELLED
        wait.set()
    until = time.monotonic() + 60
    while ground.federation.service.guard.open_calls() and time.monotonic() < until:
        time.sleep(0.05)
    assert not ground.federation.service.guard.open_calls()
    ground.works(site)


@pytest.mark.parametrize("said", [gateway_pb2.FleetPart(data=b"x"), gateway_pb2.FleetPart()])
def test_a_fleet_call_may_last_while_parts_come_and_not_longer(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch, said: gateway_pb2.FleetPart
) -> None:
    """A body of 32 MiB needs minutes on a slow line; a part that says nothing keeps nothing open."""
    monkeypatch.setattr(service, "FLEET_S", 4.0)
    ground.with_fleet()

    def parts() -> Iterator[gateway_pb2.FleetPart]:
        yield gateway_pb2.FleetPart(path="/v1/fleet/push-object")
        for _ in range(10):
            time.sleep(1.0)
            yield said

    with ground.as_site(site) as channel, ground.refused(*(["node_key"] if said.data else [])):
        made = GatewayStub(channel).Fleet(parts(), timeout=100)
        if said.data:
            assert next(made).status == 403, "the whole body was read, and has no node's key"
        else:
            assert refusal(lambda: list(made)).code() == Code.CANCELLED


def test_half_a_body_that_was_ended_for_its_silence_is_no_offence(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FLEET_S", 0.1)
    ground.with_fleet()
    monkeypatch.setattr(ground.federation.service, "_not_behind", lambda *_, **__: None)
    line = Line("site-a", gateway_pb2.FleetPart(path="/v1/fleet/push-object"), gateway_pb2.FleetPart(data=b"\xff"))
    with ground.refused(), pytest.raises(calls.CallRejectedError, match="did not come in time"):
        list(ground.federation.service.Fleet(line.parts(), line))


class Line:
    """A call whose stream, once it was cancelled here, ends as if the peer had finished it: gRPC may do so."""

    def __init__(self, site: str, *said: Any) -> None:
        self.peer = calls.Peer("agent", site, "1", None)  # type: ignore[arg-type]
        self.said = said
        self.over = threading.Event()
        self.cancel = self.over.set

    def parts(self) -> Iterator[Any]:
        yield from self.said
        assert self.over.wait(60)


def test_a_line_that_was_ended_for_its_silence_is_no_offence(
    ground: Ground, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UPLOAD_S", 0.1)
    line = Line(site.home.settings().site)
    assert ground.federation.service.Upload(line.parts(), line) == gateway_pb2.UploadReply()
    with pytest.raises(calls.CallRejectedError, match="names the upload"):  # one that the peer itself finished is
        ground.federation.service.Upload(iter(()), line)


def test_too_many_calls_are_turned_away_and_the_other_sites_are_not(ground: Ground, site: Site, other: Site) -> None:
    stood_still(ground)
    outcomes: list[grpc.StatusCode | None] = []

    def hello(_: int) -> grpc.StatusCode | None:
        try:
            call(channel, "Outcome", gateway_pb2.OutcomeRequest(key="x"))
        except grpc.RpcError as error:
            return error.code()
        return None

    with ground.as_site(site) as channel, ground.refused(), ThreadPoolExecutor(8) as many:
        outcomes = list(many.map(hello, range(int(guard.BURST) + 60)))
        assert outcomes.count(None) == guard.BURST
        assert outcomes.count(Code.RESOURCE_EXHAUSTED) == 60
        ground.works(other)
    vars(ground.federation.service.guard).update(_clock=lambda: 1002.0)
    ground.works(site)


@pytest.mark.parametrize("how", ["revoked", "expired", "wrong_role"])
def test_a_stolen_certificate_that_was_revoked_or_has_ended_does_not_starve_its_site(
    ground: Ground, site: Site, other: Site, how: str
) -> None:
    """Whoever stole it calls without end; the site goes on with its own, and the ledger grows by a bound."""
    stood_still(ground)
    life = dt.timedelta(hours=1) if how != "expired" else ground.moment(site)
    stolen = ground.issued("site-a", agent_name("site-a"), life)
    size = ground.federation.store.state.size + (how == "revoked")
    with ground.channel(*stolen.pair) as thief, ground.as_operator() as operator, ground.as_site(site) as own:
        call(thief, "Outcome", gateway_pb2.OutcomeRequest(key="x"))  # within its life, so that the connection stands
        if how == "revoked":
            number = f"{stolen.leaf.serial_number:x}"
            call(operator, "Revoke", gateway_pb2.RevokeRequest(site="site-a", certificate=number, reason="lost"))
        if how == "expired":
            time.sleep(max(0.0, (stolen.leaf.not_valid_after_utc - now()).total_seconds()) + 0.1)
        for _ in range(int(guard.BURST) + 60):
            refusal(lambda: call(thief, "Stop" if how == "wrong_role" else "Outcome"))
        assert refusal(lambda: call(thief, "Stop")).code() == Code.RESOURCE_EXHAUSTED
        assert call(own, "Hello").policy
    assert ground.federation.store.state.size - size == guard.STRANGE_STRIKES
    assert ground.federation.findings()[-1] == [how]
    site.reserved("grant-1")
    ground.works(other)


def test_the_certificates_of_a_site_that_are_turned_away_share_what_is_written_of_them(
    ground: Ground, site: Site
) -> None:
    """As after a theft of the intermediate's key, or of several certificates: a fresh one buys no further entries."""
    stood_still(ground)
    ca, size = ground.federation.home.ca(), ground.federation.store.state.size
    for _ in range(int(guard.ENTRIES // guard.STRANGE_STRIKES) + 2):
        key, leaf = forged_leaf(leaf_of(ca[1]), signer_of(ca), [agent_name("site-a")])
        with ground.channel(pem(key), leaf + ca[1]) as channel:
            for _ in range(int(guard.STRANGE_STRIKES) + 1):
                refusal(lambda channel=channel: call(channel, "Hello"))
    assert ground.federation.store.state.size - size == guard.ENTRIES
    ground.works(site)


@pytest.mark.parametrize("kind", ["envelope", "review", "offer"])
def test_a_flood_of_refused_calls_grows_the_ledger_no_further_than_its_bound(
    ground: Ground, site: Site, other: Site, kind: str
) -> None:
    stood_still(ground)
    bad = site.hospital.reservation("grant", DP, "ksame")  # another kind of claim than the mechanism's
    asked = {
        "envelope": ("Reserve", lambda i: gateway_pb2.SealedRequest(key=f"k{i}", envelope=b"{}")),
        "review": ("Reserve", lambda i: gateway_pb2.SealedRequest(key=f"k{i}", envelope=site.seal(bad))),
        "offer": ("Offer", lambda i: _offer(site, i)),
    }
    method, request = asked[kind]
    size = ground.federation.store.state.size
    with ground.as_site(site) as channel:
        for i in range(int(guard.STRIKES) + 40):
            with contextlib.suppress(grpc.RpcError):
                call(channel, method, request(i))
        error = refusal(lambda: call(channel, "Hello"))
    assert (error.code(), "too many refused calls" in error.details()) == (Code.RESOURCE_EXHAUSTED, True)
    assert ground.federation.store.state.size - size <= guard.STRIKES + 1
    ground.works(other)


def _offer(site: Site, index: int) -> gateway_pb2.OfferRequest:
    release = site.release(f"none-{index}", b"x")
    return gateway_pb2.OfferRequest(
        sealed=gateway_pb2.SealedRequest(key=f"k{index}", envelope=site.seal(release)), chunks=[bytes(32)]
    )


@pytest.mark.parametrize("listed", [1, 10_240])
@pytest.mark.parametrize("size", [-1, 0, 10 << 30, 1 << 62])
def test_an_announcement_of_ten_gigabytes_is_refused_before_a_block_is_set_aside(
    ground: Ground, site: Site, size: int, listed: int
) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    before, free = occupied(ground.federation.home.root), os.statvfs(ground.federation.root).f_bavail
    rule, spent = ("bad_statement", "") if size not in range(1 << 53) else ("artifact_size", "grant-1")
    with ground.as_site(site) as channel:
        release = site.release("grant-1", artifact, artifact_bytes=size)
        with ground.refused(rule, spends=spent):
            reply = ground.offer(GatewayStub(channel), site, release, artifact, "k", (bytes(32),) * listed)
    assert not reply.decided.admitted
    assert not reply.upload
    assert occupied(ground.federation.home.root) - before < 1 << 16
    assert free - os.statvfs(ground.federation.root).f_bavail < (1 << 30) // 4096
    assert not list((ground.federation.uploads.root / "open").glob("*/*"))


def test_a_list_of_chunks_that_is_longer_than_the_artifact_is_refused(ground: Ground, site: Site) -> None:
    site.reserved("grant-1")
    artifact = pictures()
    with ground.as_site(site) as channel:
        for count in (2, 20_000):
            with ground.refused("bad_manifest"):
                release = site.release("grant-1", artifact)
                reply = ground.offer(GatewayStub(channel), site, release, artifact, f"k{count}", (bytes(32),) * count)
            assert [f.rule for f in reply.decided.findings] == ["bad_manifest"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process has")
def test_a_message_above_the_limit_is_not_even_read(tmp_path: Path) -> None:
    """By gRPC itself. All that the guard learns is that no message came, and by chance whether the peer hung up."""
    federation, (site, other) = network.found(tmp_path, ["site-a", "site-b"])
    ground, sent = Ground(federation), 0
    with network.coordinator(federation) as served, ground.as_site(other) as honest:
        assert call(honest, "Hello").policy
        before = served.megabytes()
        served.forget_peak()
        for size, count in ((service.MAX_PART + 1, 20), (64 << 20, 2)):
            raw = bytes(size)
            for method in ("Hello", "Reserve", "Upload", "Session") * count:
                with ground.as_site(site) as channel:
                    stream = channel.stream_stream(f"/{SERVICE.full_name}/{method}")
                    error = refusal(lambda stream=stream, raw=raw: list(stream(iter([raw]), timeout=60)))
                sent += 1
                assert error.code() == Code.RESOURCE_EXHAUSTED, (method, size)
                assert "larger than max" in error.details(), (method, size)
                assert call(honest, "Hello").policy
        assert served.peak_megabytes() - before < 32.0  # none of 64 MiB was held
    with federation:
        written = Counter("+".join(rules) for rules in federation.findings())
        assert written.keys() <= {"bad_message", "bad_upload"}
        assert written["bad_upload"] <= sent // 4, "an entry for a call of Upload at most"
        assert written["bad_message"] <= sent - sent // 4
        told = (json.loads(line) for line in ground.log().splitlines())
        assert written == Counter(line["rule"] for line in told if line["event"] == "turned_away"), "as counted"
        assert not federation.store.state.grants


def test_a_compressed_message_is_not_inflated_beyond_the_limit(ground: Ground, site: Site) -> None:
    """100 MB of nothing in 100 kB; the server gives up as soon as it grows too large."""
    with ground.as_site(site) as channel, ground.refused(perhaps="bad_message"):
        bomb = gateway_pb2.SealedRequest(key="k", envelope=bytes(100 << 20))
        stub = GatewayStub(channel)
        error = refusal(lambda: stub.Reserve(bomb, compression=grpc.Compression.Gzip, timeout=120))
        assert error.code() in (Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED)
    ground.works(site)


def test_headers_above_the_limit_are_refused_and_the_port_goes_on(ground: Ground, site: Site) -> None:
    with ground.as_site(site) as channel, ground.refused():
        stub = GatewayStub(channel)
        for metadata in ((("x-bomb", "a" * 60_000),), tuple((f"x-{i}", "a" * 500) for i in range(200))):
            error = refusal(
                lambda metadata=metadata: stub.Hello(gateway_pb2.HelloRequest(), metadata=metadata, timeout=120)
            )
            assert error.code() in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.INTERNAL, Code.CANCELLED)
    ground.works(site)


def test_bytes_that_are_no_message_are_refused_without_words(ground: Ground, site: Site) -> None:
    with ground.as_site(site) as channel, ground.refused(*["bad_message"] * 3):
        for raw in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", random.Random(1).randbytes(1000)):
            error = refusal(lambda raw=raw: channel.unary_unary("/lazaret.v1.Gateway/Reserve")(raw, timeout=120))
            assert error.code() == Code.INVALID_ARGUMENT
            assert "Traceback" not in error.details()
            assert "/" not in error.details()
    ground.works(site)
