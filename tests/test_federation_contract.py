"""The two Flower adapters against each other: real processes, real TLS, real SuperLink, no stand-ins.

This is the test that says whether a new Flower still fits: it runs one coordinator and three agents, each
in a process of its own (and its link in another) that may speak to loopback only, and conducts runs between them.
Agents come through the one gRPC port; the public listener is up as well, for stock nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sqlite3
import ssl
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
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
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

from agent.edges.channel import open_channel
from agent.edges.tunnel import FleetTransport
from coordinator.edges.strategy import AWAY
from protos import quiet
from protos.keyfile import replace_private
from protos.rounds import STUB_DIGEST
from protos.v1 import gateway_pb2 as pb
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.support.pki import Authority, node_key
from tests.support.ports import free_port

SITES = ("north", "south", "west")
ADD = {"north": 1.0, "south": 2.0, "west": 6.0}
ROOT = Path(__file__).parents[1]


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


class Process:
    """A helper process; its output lines arrive in a queue."""

    def __init__(self, module: str, home: Path, settings: dict[str, Any]) -> None:
        self.home, self.module = home, module
        home.mkdir(parents=True, exist_ok=True)
        self.settings = home / "settings.json"
        self.settings.write_text(json.dumps({"home": str(home), **settings}))
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        # A proxy in the environment must not be used, by either side.
        nowhere = "http://192.0.2.1:3128"
        names = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "grpc_proxy", "ALL_PROXY")
        env = {**os.environ, **dict.fromkeys(names, nowhere)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.flower.{module}", str(self.settings)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / "stderr.txt").open("w"),
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def hear(self, seconds: float = 120.0) -> str:
        """The next line."""
        until = time.monotonic() + seconds
        try:
            while self.lines.empty() and self.process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            line = self.lines.get(timeout=0.5)
        except queue.Empty:
            raise AssertionError(f"{self.module} is silent: {self.errors()[-2000:]}") from None
        self.said.append(line)
        return line

    def wait_for(self, state: str, seconds: float = 120.0) -> None:
        """Until that line was said."""
        until = time.monotonic() + seconds
        while (line := self.hear(max(0.1, until - time.monotonic()))) != state:
            assert not line.startswith("failed"), line

    def tell(self, **command: Any) -> None:
        """One command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def say(self, line: str) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        """One command, one answer."""
        self.tell(**command)
        return json.loads(self.hear(180.0))

    def errors(self) -> str:
        """What it wrote to standard error."""
        return (self.home / "stderr.txt").read_text()

    def left_loopback(self) -> str:
        """What it tried to reach outside this machine."""
        notes = self.home / "network.txt"
        return notes.read_text() if notes.exists() else ""

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        """End in an orderly way."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


class Federation:
    """One coordinator, three agents, their certificates and keys."""

    def __init__(self, folder: Path, **coordinator: Any) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        cert, key = self.authority.server()
        self.node_keys = {site: node_key(self._private(site), site) for site in SITES}
        self.settings = {
            "state": str(folder / "state"),
            "ca": str(self.authority.ca),
            "cert": str(cert),
            "key": str(key),
            "nodes": {site: str(public) for site, (_, public) in self.node_keys.items()},
            **coordinator,
        }
        self.coordinator = Process("coordinator_process", folder / "coordinator", self.settings)
        self.ready = json.loads(self.coordinator.hear())
        self.agents: dict[str, Process] = {}

    def restart(self) -> None:
        """The coordinator again, on the same state and ports."""
        again = {**self.settings, **{name: self.ready[name] for name in ("port", "public", "private")}}
        self.coordinator = Process("coordinator_process", self.folder / "again", again)
        self.ready = json.loads(self.coordinator.hear())

    def _private(self, site: str) -> Path:
        folder = self.folder / "keys" / site
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        return folder

    def keys(self, site: str) -> Path:
        """The site's key directory, with a fresh certificate."""
        folder = self._private(site)
        cert, key = self.authority.agent(site)
        replace_private(folder / "tls.pem", key.read_bytes() + cert.read_bytes())
        (folder / "root.crt").write_bytes(self.authority.ca.read_bytes())
        return folder

    def serial(self, site: str) -> str:
        """Of the certificate in the site's key directory, hexadecimal."""
        pem = (self.folder / "keys" / site / "tls.pem").read_bytes()
        return f"{x509.load_pem_x509_certificates(pem)[0].serial_number:x}"

    def start_agent(
        self, site: str, digest: str | None = None, folder: str | None = None, proxy: str = ""
    ) -> Process:
        """An agent of ``site``; a replaced one gets a folder of its own."""
        self.agents[site] = Process(
            "agent_process",
            self.folder / (folder or site),
            {
                "site": site,
                "target": f"127.0.0.1:{self.ready['port']}",
                "keys": str(self.keys(site)),
                "proxy": proxy,
                "node_key": str(self.node_keys[site][0]),
                "digest": digest,
            },
        )
        return self.agents[site]

    def conduct(self, run: str, config: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
        """Conduct a run and return the coordinator's report."""
        plan = {"sites": SITES, "rounds": 2, "min_sites": 2, **plan}
        report: dict[str, Any] = self.coordinator.ask(
            do="conduct", run=run, config={"add": ADD, **(config or {})}, **plan
        )
        return report

    def conduct_without(self, run: str, config: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
        """Conduct a run in which one site falls silent, and report.

        It is missed after two heartbeats (20 s). The round's timeout is far beyond that: only a safety net, so that a
        busy machine does not make it the deadline of the healthy sites, too.
        """
        plan = {"sites": SITES, "rounds": 2, "min_sites": 2, "round_timeout_s": 200.0, "node_wait_s": 100.0, **plan}
        self.coordinator.tell(do="conduct", run=run, config={"add": ADD, **(config or {})}, **plan)
        report: dict[str, Any] = json.loads(self.coordinator.hear(280.0))
        return report

    def tls(self, site: str | None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """A client's context, with that site's certificate or none."""
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        context.maximum_version = version
        if site is not None:
            context.load_cert_chain(*self.authority.agent(site))
        return context

    def post(self, path: str, context: ssl.SSLContext, content: bytes = b"") -> int:
        """The status of a POST to the public listener."""
        url = f"https://127.0.0.1:{self.ready['public']}{path}"
        with httpx.Client(verify=context, trust_env=False) as client:
            return client.post(url, content=content, headers={"content-type": "application/protobuf"}).status_code

    def close(self) -> None:
        """End everything."""
        for process in (*self.agents.values(), self.coordinator):
            process.stop()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Three agents online at one coordinator."""
    made = Federation(tmp_path_factory.mktemp("federation"))
    try:
        for site in SITES:
            made.start_agent(site)
        for agent in made.agents.values():
            agent.wait_for("online")
        yield made
    finally:
        made.close()


def test_two_rounds_over_three_sites_give_exactly_the_uniform_mean(federation: Federation) -> None:
    report = federation.conduct("plain")
    assert report["shift"] == [6.0]  # (1 + 2 + 6) / 3, twice
    assert report["used"] == [list(SITES), list(SITES)]
    assert report["rounds_done"] == 2
    assert report["declined"] == {}
    assert report["granted"] == {site: f"grant plain {site}" for site in SITES}
    assert [point["first"] for point in report["checkpoints"]] == [3.0, 6.0]


def test_a_site_that_declines_the_price_is_left_out_and_the_run_goes_on(federation: Federation) -> None:
    report = federation.conduct("declined", {"decline": {"west": "budget"}}, rounds=1)
    assert report["declined"] == {"west": "budget"}
    assert report["used"] == [["north", "south"]]
    assert report["shift"] == [1.5]


def test_an_update_that_the_gate_refuses_is_not_aggregated(federation: Federation) -> None:
    report = federation.conduct("refused", {"gate_refuses": {"west": "no_grant"}}, rounds=1)
    assert sorted(report["reviewed"]) == sorted(SITES)
    assert report["refused"] == [{"west": "no_grant"}]
    assert report["shift"] == [1.5]


def test_a_gate_that_breaks_or_speaks_nonsense_admits_nothing(federation: Federation) -> None:
    config = {"gate_breaks": ["north"], "gate_refuses": {"west": "a text, not a code"}}
    report = federation.conduct("broken", config, rounds=1, min_sites=1)
    assert report["refused"] == [{"north": "internal", "west": "internal"}]
    assert report["shift"] == [2.0]


def test_too_few_usable_updates_fail_the_round_and_leave_no_checkpoint(federation: Federation) -> None:
    report = federation.conduct("failed", {"gate_refuses": {"west": "no_grant", "south": "no_grant"}})
    assert report["failed"] == "too_few_updates"
    assert report["refused"] == {"south": "no_grant", "west": "no_grant"}
    assert report["checkpoints"] == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [("extra", "schema"), ("float64", "schema"), ("short", "schema"), ("nan", "not_finite")],
)
def test_a_reply_of_another_shape_is_refused_before_the_gate_sees_it(
    federation: Federation, fault: str, code: str
) -> None:
    report = federation.conduct(f"rogue-{fault}", {"rogue": {"south": fault}}, rounds=1)
    assert report["refused"] == [{"south": code}]
    assert "south" not in report["reviewed"]
    assert report["shift"] == [3.5]


def test_an_exception_at_a_site_becomes_a_code_and_its_text_stays_there(federation: Federation) -> None:
    report = federation.conduct("raises", {"raise": {"north": 0}}, rounds=1)
    assert report["refused"] == [{"north": "internal"}]
    # a word with letters: digits alone may occur by chance in a time or in a node's number
    assert "ZEBRA" not in json.dumps(report) + federation.coordinator.errors()
    assert "ZEBRA" not in federation.agents["north"].errors()


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(federation: Federation) -> None:
    report = federation.conduct("resumed", rounds=3, first_round=2)
    assert [point["round"] for point in report["checkpoints"]] == [2]
    assert report["rounds_done"] == 3


def test_a_second_run_of_the_same_sites_at_the_same_time_is_refused(federation: Federation) -> None:
    report = federation.coordinator.ask(
        do="conduct", run="outer", nested=True, config={"add": ADD}, sites=SITES, rounds=1, min_sites=3
    )
    assert set(report["nested"]) == {"a site of this run takes part in another one"}
    assert report["shift"] == [3.0]


def test_a_site_that_is_not_listed_is_not_asked(federation: Federation) -> None:
    report = federation.conduct("listed", sites=["north", "west"], rounds=1)
    assert report["granted"].keys() == {"north", "west"}
    assert report["shift"] == [3.5]


def test_the_public_port_wants_a_client_certificate_of_the_federation(federation: Federation, tmp_path: Path) -> None:
    stranger = federation.tls(None)
    stranger.load_cert_chain(*Authority(tmp_path, "another CA").agent("north"))
    for context in (federation.tls(None), stranger):
        with pytest.raises(httpx.TransportError):
            federation.post("/v1/fleet/pull-messages", context)
    assert federation.post("/v1/fleet/pull-messages", federation.tls("north")) in range(400, 500)


def test_the_public_port_speaks_nothing_older_than_tls_1_3(federation: Federation) -> None:
    with pytest.raises(httpx.TransportError):
        federation.post("/v1/fleet/pull-messages", federation.tls("north", ssl.TLSVersion.TLSv1_2))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/control/list-nodes",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/list-nodes",
        "/docs",
        "/",
    ],
)
def test_the_public_port_offers_nothing_but_a_nodes_fleet_calls(federation: Federation, path: str) -> None:
    assert federation.post(path, federation.tls("north")) == 404


def test_the_public_port_refuses_a_body_that_is_too_great_before_reading_it(federation: Federation) -> None:
    with (
        socket.create_connection(("127.0.0.1", federation.ready["public"]), timeout=10) as plain,
        federation.tls("north").wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert line.recv(64).startswith(b"HTTP/1.1 413")


def test_the_private_port_answers_only_the_process_that_opened_it(federation: Federation) -> None:
    address = f"http://127.0.0.1:{federation.ready['private']}/v1/control/list-nodes"
    with httpx.Client(trust_env=False) as client:
        for headers in ({}, {"x-lazaret-private": "0" * 64}):
            kind = {"content-type": "application/protobuf"}
            assert client.post(address, headers={**kind, **headers}).status_code == 404


def test_secure_aggregation_has_messages_of_its_own(federation: Federation) -> None:
    payload = bytes(range(256)) * 5000
    got = federation.coordinator.ask(do="secure", site="north", step="shares", payload=payload.hex())
    assert bytes.fromhex(got) == b"shares" + payload[::-1]
    assert federation.coordinator.ask(do="secure", site="north", step="", payload="00") == "code 1003"


def test_the_link_is_a_process_without_torch_vault_or_ledger_and_the_agent_is_one_without_flower(
    federation: Federation,
) -> None:
    for site, agent in federation.agents.items():
        pid, *heavy = (agent.home / "link.txt").read_text().split()
        assert heavy == []
        assert int(pid) != agent.process.pid
        assert Path(f"/proc/{pid}/stat").read_text().split()[3] == str(agent.process.pid), site


def test_a_link_that_is_killed_costs_nothing_not_even_the_answer_that_it_was_waiting_for(
    federation: Federation,
) -> None:
    report = federation.conduct("cut", {"cut": {"south": 0}}, rounds=2)
    assert report["used"] == [list(SITES), list(SITES)]
    assert report["shift"] == [6.0]
    federation.agents["south"].wait_for("restarted")
    federation.agents["south"].wait_for("online")


def test_a_renewed_certificate_is_used_without_a_restart(federation: Federation) -> None:
    old, link = federation.serial("north"), (federation.agents["north"].home / "link.txt").read_text()
    federation.keys("north")
    assert federation.serial("north") != old
    federation.agents["north"].say("renew")
    time.sleep(1.0)
    assert federation.coordinator.ask(do="revoke", serial=old) == {}
    report = federation.conduct("renewed", rounds=1)
    assert report["used"] == [list(SITES)]
    assert (federation.agents["north"].home / "link.txt").read_text() == link


def test_a_certificate_that_is_turned_away_is_read_again_until_it_is_accepted(federation: Federation) -> None:
    assert federation.coordinator.ask(do="revoke", serial=federation.serial("north")) == {}
    federation.agents["north"].wait_for("turned away")
    federation.keys("north")
    federation.agents["north"].wait_for("online")


class Caller:
    """A site's certificate and node key, in the hands of someone who says what he likes."""

    def __init__(self, federation: Federation, site: str) -> None:
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

    def parts(self, *parts: pb.FleetPart) -> list[pb.FleetPart]:
        """The parts of the reply to exactly these parts."""
        return list(GatewayStub(self.channel).Fleet(iter(parts), timeout=20))


@pytest.fixture
def south(federation: Federation) -> Iterator[Caller]:
    """South, gone bad."""
    caller = Caller(federation, "south")
    yield caller
    caller.client.close()


def test_a_site_cannot_speak_as_another_sites_node(federation: Federation, south: Caller) -> None:
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


def test_a_stolen_node_key_is_of_no_use_with_another_sites_certificate(federation: Federation, south: Caller) -> None:
    stolen = load_ssh_private_key(federation.node_keys["north"][0].read_bytes(), None)
    assert isinstance(stolen, ec.EllipticCurvePrivateKey)
    request = ActivateNodeRequest(public_key=public_key_to_bytes(stolen.public_key()), heartbeat_interval=10.0)
    assert south.post("activate-node", request, stolen) == 403
    assert south.post("activate-node", request) == 403  # its own key in the header, another's in the request
    assert federation.coordinator.ask(do="reports")[-2:] == [["south", "node_key"]] * 2


def test_a_site_reaches_neither_anothers_messages_nor_objects_nor_sends_unasked(
    federation: Federation, south: Caller
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


def test_the_tunnel_carries_an_agents_calls_only_and_bounded_bodies(federation: Federation, south: Caller) -> None:
    for path in ("/v1/control/start-run", "/v1/fleet/get-fab", "/v1/fleet/register-node", "", "/docs"):
        assert [part.status for part in south.parts(pb.FleetPart(path=path))] == [404]
    first = pb.FleetPart(path="/v1/fleet/push-object")
    full = pb.FleetPart(data=bytes(1 << 20))
    assert south.parts(first, *[full] * 33)[0].status == 413
    assert south.parts(first, pb.FleetPart(data=bytes((1 << 20) + 1)))[0].status == 413
    assert south.parts(first, pb.FleetPart(data=b"\xff\xff"))[0].status == 400
    assert federation.coordinator.ask(do="reports")[-1] == ["south", "bad_message"]


def test_the_link_goes_through_the_proxy_that_was_configured_and_no_other(federation: Federation) -> None:
    with Proxy() as proxy:
        federation.agents["west"].stop()
        agent = federation.start_agent("west", folder="west-proxied", proxy=proxy.address)
        agent.wait_for("online")
        report = federation.conduct("proxied", rounds=1)
        assert report["used"] == [list(SITES)]
        assert set(proxy.asked) == {f"127.0.0.1:{federation.ready['port']}"}


def test_registering_again_changes_nothing_and_a_key_belongs_to_one_site(federation: Federation) -> None:
    public = str(federation.node_keys["north"][1])
    assert federation.coordinator.ask(do="register", site="north", key=public) == {}
    assert federation.coordinator.ask(do="register", site="south", key=public) == "ValueError"
    assert federation.coordinator.ask(do="online") == sorted(SITES)


@pytest.mark.slow
def test_after_a_run_nothing_of_it_is_left_in_the_state(federation: Federation) -> None:
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
def test_an_agent_that_was_frozen_takes_part_again_afterwards(federation: Federation) -> None:
    assert federation.conduct("thawed", rounds=1)["used"] == [list(SITES)]


def test_an_agent_killed_in_a_round_costs_that_round_its_timeout_and_no_more(federation: Federation) -> None:
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
    until = time.monotonic() + 60
    while Path(f"/proc/{link}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{link}").exists()


@pytest.mark.slow
def test_agents_stay_through_a_coordinator_killed_in_a_round_and_started_again(
    federation: Federation,
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


def test_an_agent_pinned_to_another_bundle_declines_everything(federation: Federation) -> None:
    federation.agents["west"].stop()
    federation.start_agent("west", digest="0" * 64, folder="west-pinned").wait_for("online")
    report = federation.conduct("pinned", rounds=1)
    assert report["declined"] == {"west": "bundle"}


def test_nobody_reached_beyond_loopback(federation: Federation) -> None:
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
    made = Federation(tmp_path, canary=str(tmp_path / "canary"))
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
    made = Federation(tmp_path, nodes={})
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


@contextlib.contextmanager
def forwarder(federation: Federation, site: str) -> Iterator[int]:
    """The TLS forwarder that a stock node needs, which shows no client certificate: TLS in, mutual TLS out."""
    inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inward.load_cert_chain(*federation.authority.server("forwarder"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client = inward.wrap_socket(listener.accept()[0], server_side=True)
                    plain = socket.create_connection(("127.0.0.1", federation.ready["public"]))
                    server = federation.tls(site).wrap_socket(plain, server_hostname="localhost")
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_a_stock_node_joins_through_a_forwarder_and_finds_nothing_to_run_in_the_bundle(tmp_path: Path) -> None:
    made = Federation(tmp_path)
    stock = None
    try:
        made.start_agent("north").wait_for("online")
        with forwarder(made, "west") as port, (tmp_path / "stock.txt").open("w") as out:
            environment = {**os.environ, **quiet.SETTINGS, "FLWR_HOME": str(tmp_path / "stock"), "PYTHONPATH": ""}
            stock = subprocess.Popen(
                [
                    *(str(Path(sys.executable).parent / "flower-supernode"), "--superlink", f"127.0.0.1:{port}"),
                    *("--root-certificates", str(made.authority.ca)),
                    *("--auth-supernode-private-key", str(made.node_keys["west"][0])),
                    *("--host", "127.0.0.1", "--port", str(free_port())),
                ],
                env={**environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            until = time.monotonic() + 60
            while made.coordinator.ask(do="online") != ["north", "west"] and time.monotonic() < until:
                time.sleep(0.5)
            report = made.conduct("stock", sites=["north", "west"], rounds=1, min_sites=1, round_timeout_s=80.0)
        assert report["declined"] == {"west": "failed"}, (tmp_path / "stock.txt").read_text()[-3000:]
        assert report["used"] == [["north"]]
    finally:
        if stock is not None:
            os.killpg(stock.pid, signal.SIGKILL)
        made.close()
