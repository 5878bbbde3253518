"""The two Flower adapters against each other: real processes, real TLS, real SuperLink, no stand-ins.

This is the test that says whether a new Flower still fits: it runs one coordinator and three agents, each
in a process of its own (and its link in another) that may speak to loopback only, and conducts runs between them.
Agents come through the one gRPC port.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from agent.federation.fleet_transport import FleetTransport
from agent.gateway.channel import open_channel
from coordinator.federation.strategy import AWAY
from protos.federation.messages import STUB_DIGEST
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.support.flower.federation import ADD, ROOT, SITES, FlowerFederation
from tests.support.pki import Authority


class Proxy:
    """An HTTP proxy that can CONNECT, and remembers to what."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(4096)
                method, target, _ = head.split(None, 2)
                assert method == b"CONNECT"
                self.asked.append(target.decode())
                host, _, port = target.decode().rpartition(":")
                server = socket.create_connection((host, int(port)))
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()


def pump(source: Any, sink: Any) -> None:
    """Bytes from one connection to the other, to the end of either."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for line in (source, sink):
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerFederation]:
    """Three agents online at one coordinator."""
    made = FlowerFederation(tmp_path_factory.mktemp("federation"))
    try:
        for site in SITES:
            made.start_agent(site)
        for agent in made.agents.values():
            agent.wait_for("online")
        yield made
    finally:
        made.close()


def test_two_rounds_over_three_sites_give_exactly_the_uniform_mean(federation: FlowerFederation) -> None:
    report = federation.conduct("plain")
    assert report["shift"] == [6.0]  # (1 + 2 + 6) / 3, twice
    assert report["used"] == [list(SITES), list(SITES)]
    assert report["rounds_done"] == 2
    assert report["declined"] == {}
    assert report["granted"] == {site: f"grant plain {site}" for site in SITES}
    assert [point["first"] for point in report["checkpoints"]] == [3.0, 6.0]


def test_when_a_sites_answer_came_is_known_of_those_that_were_asked_alone(federation: FlowerFederation) -> None:
    """The report of a run tells it; a site that waits, and calls, answers nothing."""
    before, began = federation.coordinator.ask(do="signs"), time.time()
    federation.conduct("timed", sites=["north", "south"], rounds=1)
    after, ended = federation.coordinator.ask(do="signs"), time.time()
    for site in ("north", "south"):
        assert began <= after[site]["answered"] <= after[site]["at"] <= ended
    assert after["west"]["at"] > before["west"]["at"]
    assert after["west"]["answered"] == before["west"]["answered"]


def test_looks_take_turns_with_rounds_leave_the_model_and_are_summed(federation: FlowerFederation) -> None:
    report = federation.conduct("looked", rounds=4, looks=[1, 3])
    assert report["shift"] == [6.0], "two rounds moved it, and two looks did not"
    assert [point["first"] for point in report["checkpoints"]] == [3.0, 3.0, 6.0, 6.0]
    assert report["used"] == [list(SITES)] * 4
    assert report["sums"] == [[1, 9.0, 9.0, 3.0], [3, 9.0, 18.0, 3.0]]  # 1 + 2 + 6, thrice the model, three sites


def test_a_site_that_declines_the_price_is_left_out_and_the_run_goes_on(federation: FlowerFederation) -> None:
    report = federation.conduct("declined", {"decline": {"west": "budget"}}, rounds=1)
    assert report["declined"] == {"west": "budget"}
    assert report["used"] == [["north", "south"]]
    assert report["shift"] == [1.5]


def test_an_update_that_the_gate_refuses_is_not_aggregated(federation: FlowerFederation) -> None:
    report = federation.conduct("refused", {"gate_refuses": {"west": "no_grant"}}, rounds=1)
    assert sorted(report["reviewed"]) == sorted(SITES)
    assert report["refused"] == [{"west": "no_grant"}]
    assert report["shift"] == [1.5]


def test_a_gate_that_breaks_or_speaks_nonsense_admits_nothing(federation: FlowerFederation) -> None:
    config = {"gate_breaks": ["north"], "gate_refuses": {"west": "a text, not a code"}}
    report = federation.conduct("broken", config, rounds=1, min_sites=1)
    assert report["refused"] == [{"north": "internal", "west": "internal"}]
    assert report["shift"] == [2.0]


def test_too_few_usable_updates_fail_the_round_and_leave_no_checkpoint(federation: FlowerFederation) -> None:
    report = federation.conduct("failed", {"gate_refuses": {"west": "no_grant", "south": "no_grant"}})
    assert report["failed"] == "too_few_updates"
    assert report["refused"] == {"south": "no_grant", "west": "no_grant"}
    assert report["checkpoints"] == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [("extra", "schema"), ("float64", "schema"), ("short", "schema"), ("nan", "not_finite")],
)
def test_a_reply_of_another_shape_is_refused_before_the_gate_sees_it(
    federation: FlowerFederation, fault: str, code: str
) -> None:
    report = federation.conduct(f"rogue-{fault}", {"rogue": {"south": fault}}, rounds=1)
    assert report["refused"] == [{"south": code}]
    assert "south" not in report["reviewed"]
    assert report["shift"] == [3.5]


def test_an_exception_at_a_site_becomes_a_code_and_its_text_stays_there(federation: FlowerFederation) -> None:
    report = federation.conduct("raises", {"raise": {"north": 0}}, rounds=1)
    assert report["refused"] == [{"north": "internal"}]
    # a word with letters: digits alone may occur by chance in a time or in a node's number
    assert "ZEBRA" not in json.dumps(report) + federation.coordinator.errors()
    assert "ZEBRA" not in federation.agents["north"].errors()


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(federation: FlowerFederation) -> None:
    report = federation.conduct("resumed", rounds=3, first_round=2)
    assert [point["round"] for point in report["checkpoints"]] == [2]
    assert report["rounds_done"] == 3


def test_a_site_that_is_not_listed_is_not_asked(federation: FlowerFederation) -> None:
    report = federation.conduct("listed", sites=["north", "west"], rounds=1)
    assert report["granted"].keys() == {"north", "west"}
    assert report["shift"] == [3.5]


def test_the_private_port_answers_only_the_process_that_opened_it(federation: FlowerFederation) -> None:
    address = f"http://127.0.0.1:{federation.ready['private']}/v1/control/list-nodes"
    with httpx.Client(trust_env=False) as client:
        for headers in ({}, {"x-lazaret-private": "0" * 64}):
            kind = {"content-type": "application/protobuf"}
            assert client.post(address, headers={**kind, **headers}).status_code == 404


def test_secure_aggregation_has_messages_of_its_own(federation: FlowerFederation) -> None:
    payload = bytes(range(256)) * 5000
    got = federation.coordinator.ask(do="secure", site="north", step="shares", payload=payload.hex())
    assert bytes.fromhex(got) == b"shares" + payload[::-1]
    assert federation.coordinator.ask(do="secure", site="north", step="", payload="00") == "code 1003"


def test_a_canary_carries_a_whole_model_there_and_a_part_back_and_its_time_is_seen(
    federation: FlowerFederation,
) -> None:
    size, config = 1 << 20, {"short": {"south": -4}}
    before = federation.coordinator.ask(do="signs")
    found = federation.conduct("canary", config, rounds=1, checks="canary", size=size)
    assert (sorted(found["told"]), found["lost"]) == (["north", "west"], {"south": "size"})
    assert found["aggregated"] == ["north", "west"]
    assert found["told"]["north"]["seconds"] == found["told"]["west"]["seconds"] > 0
    for site, sign in federation.coordinator.ask(do="signs").items():
        assert sign["sent"] - before[site]["sent"] > 4 * size
        assert sign["received"] - before[site]["received"] > 4 * size - 8
        assert sign["down"] > 0
        assert sign["up"] > 0
    found = federation.conduct("check", rounds=1, checks="check")
    assert (sorted(found["told"]), found["lost"], found["aggregated"]) == (sorted(SITES), {}, [])


def test_the_link_is_a_process_without_torch_vault_or_ledger_and_the_agent_is_one_without_flower(
    federation: FlowerFederation,
) -> None:
    for site, agent in federation.agents.items():
        pid, *heavy = (agent.home / "link.txt").read_text().split()
        assert heavy == []
        assert int(pid) != agent.process.pid
        assert Path(f"/proc/{pid}/stat").read_text().split()[3] == str(agent.process.pid), site


def test_a_link_that_is_killed_costs_nothing_not_even_the_answer_that_it_was_waiting_for(
    federation: FlowerFederation,
) -> None:
    report = federation.conduct("cut", {"cut": {"south": 0}}, rounds=2)
    assert report["used"] == [list(SITES), list(SITES)]
    assert report["shift"] == [6.0]
    federation.agents["south"].wait_for("restarted")
    federation.agents["south"].wait_for("online")


def test_a_renewed_certificate_is_used_without_a_restart(federation: FlowerFederation) -> None:
    old, link = federation.serial("north"), (federation.agents["north"].home / "link.txt").read_text()
    federation.keys("north")
    assert federation.serial("north") != old
    federation.agents["north"].say("renew")
    time.sleep(1.0)
    assert federation.coordinator.ask(do="revoke", serial=old) == {}
    report = federation.conduct("renewed", rounds=1)
    assert report["used"] == [list(SITES)]
    assert (federation.agents["north"].home / "link.txt").read_text() == link


def test_a_certificate_that_is_turned_away_is_read_again_until_it_is_accepted(federation: FlowerFederation) -> None:
    assert federation.coordinator.ask(do="revoke", serial=federation.serial("north")) == {}
    federation.agents["north"].wait_for("turned away")
    federation.keys("north")
    federation.agents["north"].wait_for("online")


def test_a_site_that_joined_by_another_root_says_so_until_it_is_the_right_one(federation: FlowerFederation) -> None:
    root = federation.folder / "keys" / "north" / "root.crt"
    kept = root.read_bytes()
    root.write_bytes(Authority(federation.folder / "another").ca.read_bytes())
    federation.agents["north"].say("renew")
    federation.agents["north"].wait_for("another root")
    root.write_bytes(kept)
    federation.agents["north"].wait_for("online")


class Caller:
    """A site's certificate and node key, in the hands of someone who says what he likes."""

    def __init__(self, federation: FlowerFederation, site: str) -> None:
        keys = federation.folder / "keys" / site
        pem = (keys / "tls.pem").read_bytes()
        credentials = grpc.ssl_channel_credentials((keys / "root.crt").read_bytes(), pem, pem)
        self.channel = open_channel(f"127.0.0.1:{federation.ready['port']}", credentials)
        self.client = httpx.Client(transport=FleetTransport(lambda: self.channel), base_url="http://x")
        self.key = load_ssh_private_key(federation.node_keys[site][0].read_bytes(), None)
        assert isinstance(self.key, ec.EllipticCurvePrivateKey)

    def post(self, call: str, message: Any, key: Any = None) -> int:
        """The status of a Fleet call, signed as Flower wants it."""
        signer = key or self.key
        interceptor = NodeAuthHttpInterceptor(signer, signer.public_key())
        request = self.client.build_request(
            "POST",
            f"/v1/fleet/{call}",
            content=message.SerializeToString(),
            headers={"content-type": "application/protobuf"},
        )
        context = ProtobufRequestContext("", message, request)
        return interceptor.intercept(context, lambda made: self.client.send(made.request)).status_code

    def parts(self, *parts: gateway_pb2.FleetPart) -> list[gateway_pb2.FleetPart]:
        """The parts of the reply to exactly these parts."""
        return list(GatewayStub(self.channel).Fleet(iter(parts), timeout=20))


@pytest.fixture
def south(federation: FlowerFederation) -> Iterator[Caller]:
    """South, gone bad."""
    caller = Caller(federation, "south")
    yield caller
    caller.client.close()


def test_a_site_cannot_speak_as_another_sites_node(federation: FlowerFederation, south: Caller) -> None:
    nodes = {site: int(number) for site, number in federation.coordinator.ask(do="nodes").items()}
    before = len(federation.coordinator.ask(do="reports"))
    other = Node(node_id=nodes["north"])
    forged = [
        ("pull-messages", PullMessagesRequest(node=other)),
        ("send-node-heartbeat", SendNodeHeartbeatRequest(node=other, heartbeat_interval=10.0)),
        ("deactivate-node", DeactivateNodeRequest(node_id=nodes["north"])),
        ("get-run", GetRunRequest(node=other, run_id=1)),
        ("pull-object", PullObjectRequest(node=other, run_id=1, object_id="x")),
        ("push-object", PushObjectRequest(node=other, run_id=1, object_id="x")),
        ("push-messages", PushMessagesRequest(node=other)),
        ("confirm-message-received", ConfirmMessageReceivedRequest(node=other, run_id=1, message_object_id="x")),
    ]
    assert [south.post(call, message) for call, message in forged] == [403] * len(forged)
    assert federation.coordinator.ask(do="reports")[before:] == [["south", "node"]] * len(forged)
    assert south.post("send-node-heartbeat", SendNodeHeartbeatRequest(node=Node(node_id=7))) == 401
    own = SendNodeHeartbeatRequest(node=Node(node_id=nodes["south"]), heartbeat_interval=10.0)
    assert south.post("send-node-heartbeat", own) == 200
    assert "north" in federation.coordinator.ask(do="online")


def test_a_stolen_node_key_is_of_no_use_with_another_sites_certificate(
    federation: FlowerFederation, south: Caller
) -> None:
    stolen = load_ssh_private_key(federation.node_keys["north"][0].read_bytes(), None)
    assert isinstance(stolen, ec.EllipticCurvePrivateKey)
    request = ActivateNodeRequest(public_key=public_key_to_bytes(stolen.public_key()), heartbeat_interval=10.0)
    assert south.post("activate-node", request, stolen) == 403
    assert south.post("activate-node", request) == 403  # its own key in the header, another's in the request
    assert federation.coordinator.ask(do="reports")[-2:] == [["south", "node_key"]] * 2


def test_a_site_reaches_neither_anothers_messages_nor_objects_nor_sends_unasked(
    federation: FlowerFederation, south: Caller
) -> None:
    federation.conduct("bound", sites=["north"], rounds=1, min_sites=1)
    nodes = {site: int(number) for site, number in federation.coordinator.ask(do="nodes").items()}
    mail = federation.coordinator.ask(do="mail", site="north")
    own = Node(node_id=nodes["south"])
    pull = PullObjectRequest(node=own, run_id=int(mail["run"]), object_id=mail["object"])
    confirm = ConfirmMessageReceivedRequest(node=own, run_id=int(mail["run"]), message_object_id=mail["message"])
    assert south.post("pull-object", pull) == 403
    assert south.post("confirm-message-received", confirm) == 403
    assert south.post("get-run", GetRunRequest(node=own, run_id=int(mail["run"]))) == 403
    assert federation.coordinator.ask(do="reports")[-3:] == [
        ["south", "object"],
        ["south", "message"],
        ["south", "run"],
    ]
    metadata = Metadata(run_id=int(mail["run"]), src_node_id=nodes["north"], reply_to_message_id=mail["message"])
    for sender, status in ((nodes["north"], 403), (nodes["south"], 403)):
        metadata.src_node_id = sender
        reply = PushMessagesRequest(
            node=own, messages_list=[ProtoMessage(metadata=metadata)], message_object_trees=[ObjectTree()]
        )
        assert south.post("push-messages", reply) == status
    metadata.reply_to_message_id = ""  # no reply at all, but a message to another node
    unasked = PushMessagesRequest(
        node=own, messages_list=[ProtoMessage(metadata=metadata)], message_object_trees=[ObjectTree()]
    )
    assert south.post("push-messages", unasked) == 404
    assert south.post("pull-object", PullObjectRequest(node=own, run_id=1, object_id="0" * 64)) == 404


def test_the_tunnel_carries_an_agents_calls_only_and_bounded_bodies(
    federation: FlowerFederation, south: Caller
) -> None:
    for path in ("/v1/control/start-run", "/v1/fleet/get-fab", "/v1/fleet/register-node", "", "/docs"):
        assert [part.status for part in south.parts(gateway_pb2.FleetPart(path=path))] == [404]
    first = gateway_pb2.FleetPart(path="/v1/fleet/push-object")
    full = gateway_pb2.FleetPart(data=bytes(1 << 20))
    assert south.parts(first, *[full] * 33)[0].status == 413
    assert south.parts(first, gateway_pb2.FleetPart(data=bytes((1 << 20) + 1)))[0].status == 413
    assert south.parts(first, gateway_pb2.FleetPart(data=b"\xff\xff"))[0].status == 400
    assert federation.coordinator.ask(do="reports")[-1] == ["south", "bad_message"]


def test_the_link_goes_through_the_proxy_that_was_configured_and_no_other(federation: FlowerFederation) -> None:
    with Proxy() as proxy:
        federation.agents["west"].stop()
        agent = federation.start_agent("west", folder="west-proxied", proxy=proxy.address)
        agent.wait_for("online")
        report = federation.conduct("proxied", rounds=1)
        assert report["used"] == [list(SITES)]
        assert set(proxy.asked) == {f"127.0.0.1:{federation.ready['port']}"}


def test_registering_again_changes_nothing_and_a_key_belongs_to_one_site(federation: FlowerFederation) -> None:
    public = str(federation.node_keys["north"][1])
    assert federation.coordinator.ask(do="register", site="north", key=public) == {}
    assert federation.coordinator.ask(do="register", site="south", key=public) == "ValueError"
    assert federation.coordinator.ask(do="online") == sorted(SITES)


@pytest.mark.slow
def test_after_a_run_nothing_of_it_is_left_in_the_state(federation: FlowerFederation) -> None:
    frozen = federation.agents["west"].process
    os.kill(frozen.pid, signal.SIGSTOP)  # Flower believes it online; what is sent to it stays unread
    try:
        report = federation.conduct_without("purged", rounds=1)
        assert [*report["declined"]] == ["west"]  # at the price; the round is without it
        assert report["declined"]["west"] in AWAY
        assert report["shift"] == [1.5]
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    database = f"file:{federation.folder / 'state' / 'flower.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(database, uri=True)) as state:
        tables = {name for (name,) in state.execute("select name from sqlite_master where type = 'table'")}
        assert "objects" in tables
        assert state.execute("select count(*) from objects").fetchone() == (0,)
    assert (federation.folder / "state").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_an_agent_that_was_frozen_takes_part_again_afterwards(federation: FlowerFederation) -> None:
    assert federation.conduct("thawed", rounds=1)["used"] == [list(SITES)]


def test_an_agent_killed_in_a_round_costs_that_round_its_timeout_and_no_more(federation: FlowerFederation) -> None:
    dead = federation.agents["west"].process
    report = federation.conduct_without("killed", {"die": {"west": 0}})
    assert dead.wait(60) == -signal.SIGKILL
    assert report.get("used") == [["north", "south"], ["north", "south"]], report
    assert [*report["refused"][0]] == ["west"]
    assert report["refused"][0]["west"] in AWAY  # silent, or known to be offline
    assert report["refused"][1] == {"west": "offline"}
    assert report["shift"] == [3.0]
    sent = [(event["round_index"], event["sites"]) for event in report["events"] if event["stage"] == "sent"]
    assert sent == [(0, list(SITES)), (1, ["north", "south"])]  # nobody waits for it a second time
    link = int((federation.agents["west"].home / "link.txt").read_text().split()[0])
    until = time.monotonic() + 240
    while Path(f"/proc/{link}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{link}").exists()


@pytest.mark.slow
def test_in_a_long_round_a_site_that_is_away_for_a_while_is_waited_for_and_one_that_was_started_again_is_not(
    federation: FlowerFederation,
) -> None:
    """A round may last a day: a site is not given up after 20 seconds, and is not waited for to the day's end."""
    if federation.agents["west"].process.poll() is not None:
        federation.start_agent("west", folder="west-long").wait_for("online")
    frozen = federation.agents["west"].process
    config = {"add": ADD, "sleep": {"west": 2.0}, "die": {"north": 0}}
    plan = {"sites": list(SITES), "rounds": 1, "min_sites": 2, "round_timeout_s": 200.0, "seconds": 3_600}
    federation.coordinator.tell(do="conduct", run="long", config=config, **plan)
    assert federation.agents["north"].process.wait(60) == -signal.SIGKILL
    os.kill(frozen.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        time.sleep(30)  # Flower takes it for gone after 20
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    federation.start_agent("north", folder="north-again").wait_for("online")
    report = json.loads(federation.coordinator.hear(150.0))
    assert report.get("used") == [["south", "west"]], report
    assert report["refused"] == [{"north": "no_reply"}]
    assert time.monotonic() - began < 120


@pytest.mark.slow
def test_agents_stay_through_a_coordinator_killed_in_a_round_and_started_again(
    federation: FlowerFederation,
) -> None:
    config = {"add": ADD, "sleep": {"north": 4.0}}
    plan = {"sites": ["north", "south"], "rounds": 1, "min_sites": 2}
    federation.coordinator.tell(do="conduct", run="cut", config=config, **plan)
    time.sleep(3.0)  # north is training
    federation.coordinator.kill()
    federation.agents["south"].wait_for("unreachable")
    federation.restart()
    federation.agents["south"].wait_for("online")
    assert federation.agents["north"].process.poll() is None
    report = federation.conduct("again", sites=["north", "south"], rounds=1)
    assert report["shift"] == [1.5]


def test_an_agent_pinned_to_another_bundle_declines_everything(federation: FlowerFederation) -> None:
    federation.agents["west"].stop()
    federation.start_agent("west", digest="0" * 64, folder="west-pinned").wait_for("online")
    report = federation.conduct("pinned", rounds=1)
    assert report["declined"] == {"west": "bundle"}


def test_nobody_reached_beyond_loopback(federation: FlowerFederation) -> None:
    for process in (federation.coordinator, *federation.agents.values()):
        assert process.left_loopback() == ""
        assert "TELEMETRY" not in process.errors().upper()


def test_the_guard_that_says_so_does_bite(tmp_path: Path) -> None:
    code = (
        "import pathlib, socket, sys; from tests.support.flower.loopback import guard\n"
        f"guard(pathlib.Path({str(tmp_path / 'notes')!r}))\n"
        "socket.create_connection(('192.0.2.1', 80), timeout=0.1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert b"LeftLoopback" in done.stderr
    assert "192.0.2.1" in (tmp_path / "notes").read_text()


@pytest.mark.slow
def test_a_bundle_that_would_leave_a_trace_is_carried_and_never_run(tmp_path: Path) -> None:
    made = FlowerFederation(tmp_path, canary=str(tmp_path / "canary"))
    try:
        assert made.ready["digest"] != STUB_DIGEST
        for site in ("north", "south"):
            made.start_agent(site, digest=made.ready["digest"]).wait_for("online")
        report = made.conduct("canary", sites=["north", "south"], rounds=1)
        assert report["shift"] == [1.5]
        assert not (tmp_path / "canary").exists()
    finally:
        made.close()


@pytest.mark.slow
def test_an_agent_that_is_registered_late_comes_online_by_itself(tmp_path: Path) -> None:
    made = FlowerFederation(tmp_path, nodes={})
    try:
        agent = made.start_agent("north")
        agent.wait_for("unregistered")
        public = str(made.node_keys["north"][1])
        assert made.coordinator.ask(do="register", site="north", key=public) == {}
        agent.wait_for("online")
        report = made.conduct("late", sites=["north"], rounds=1, min_sites=1)
        assert report["shift"] == [1.0]
    finally:
        made.close()
