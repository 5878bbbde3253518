"""Many agents in one process, each with its own certificate and channels: ``python -m tests.scale.agents FILE``.

Each is made of the product's own parts: a door (`agent.gateway.client`), a session stream, and the Flower link's
polls and heartbeats through the tunnel (`agent.federation.supernode.serve`, which the product runs in a process of
its own). What an agent was told goes into a report, to be compared with the ledger.
"""

# ruff: noqa: E402 - configure_environment comes first, as in the product

from __future__ import annotations

import hashlib
import json
import queue
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protos.federation.flower_environment import configure_environment

SETTINGS: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
configure_environment(Path(SETTINGS["out"]).with_suffix(".flwr"))

import grpc
import httpx

from agent.errors import CoordinatorUnreachableError
from agent.federation import fleet_transport, supernode
from agent.federation.supernode_process import LinkConfig, LinkSetup, _NodeKey
from agent.gateway import client as door_module
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Credentials
from agent.gateway.witness import LedgerWitness
from agent.storage.site_directory import SiteDirectory
from policies.statements import PAYLOAD_TYPE, Settlement, Statement, encode
from protos.common.dsse import seal
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.scale.measure import Calls, Timer
from tests.support.federation_world import pictures
from tests.support.ledger_world import Hospital

CALLS = Calls()
TARGET = f"127.0.0.1:{SETTINGS['port']}"
PATIENCE_S = 60.0


def timed(channel: grpc.Channel) -> Any:
    """The product's stub, on a channel that notes how long each call takes."""
    return GatewayStub(grpc.intercept_channel(channel, Timer(CALLS)))


class Signing(httpx.BaseTransport):
    """The tunnel with the node's proof on each call: what the relay does between the product's two processes."""

    def __init__(self, way: httpx.BaseTransport, key: _NodeKey) -> None:
        self.way, self.key = way, key

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers.update(self.key.proof())
        return self.way.handle_request(request)

    def close(self) -> None:
        self.way.close()


@dataclass
class Agent:
    """One site's agent, and what it was told."""

    name: str
    told: dict[str, dict[str, Any]] = field(default_factory=dict)  # by grant
    faults: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # of the link
    notices: list[str] = field(default_factory=list)  # of the session

    def __post_init__(self) -> None:
        self.home = SiteDirectory(Path(SETTINGS["root"]) / self.name)
        self.key, self.hospital = self.home.sign_key(), Hospital(self.name)
        self.rng = random.Random(self.name)
        watch = LedgerWitness(self.home.root / "watch", self.home.coordinator_key())
        self.gateway = GatewayClient(TARGET, Credentials(self.home.keys), watch, PATIENCE_S)
        self.stop = threading.Event()

    def seal(self, statement: Statement) -> bytes:
        return seal(encode(statement), PAYLOAD_TYPE, self.key)

    def link(self) -> None:
        """Poll for messages and send heartbeats, as the link's own process does."""
        keys = self.home.keys
        tasks = supernode.TaskQueue(
            task=lambda _ticket, _task: self.faults.append("task"),
            state=self.states.append,
            node=lambda _node: None,
            replies=queue.SimpleQueue(),
            wake=threading.Event(),
            stop=self.stop,
        )
        key, config = _NodeKey(keys / "node.key"), LinkConfig(TARGET, keys, keys / "node.key")
        setup = LinkSetup(key.public.decode(), config.bundle_digest, config.demand)
        supernode.serve(setup, Signing(config.transport(), key), tasks)

    def listen(self) -> None:
        """Hold the session stream open."""
        stream = self.gateway.session("load")
        threading.Thread(target=lambda: (self.stop.wait(), stream.cancel()), daemon=True).start()
        try:
            for notice in stream:
                self.notices.append(notice.kind)
        except grpc.RpcError as error:
            if not self.stop.is_set():
                self.faults.append(f"session {error.code().name}")

    def work(self, until: float) -> None:
        """Reserve and release, reserve and settle, and ask, over and over."""
        number = 0
        while time.monotonic() < until:
            try:
                self.gateway.hello()
                self._released(f"{self.name}-r{number}", number)
                self._settled(f"{self.name}-s{number}")
            except CoordinatorUnreachableError as fault:
                self.faults.append(str(fault)[:200])
            except Exception as fault:  # noqa: BLE001 - whatever breaks is what is looked for
                self.faults.append(f"{type(fault).__name__}: {fault}"[:200])
            number += 1
            self.stop.wait(self.rng.uniform(0, SETTINGS["pause_s"]))

    def _reserve(self, grant: str) -> bool:
        note = self.told[grant] = {"reserved": None, "released": None, "settled": None}
        sealed = self.seal(self.hospital.reservation(grant))
        verdict = self.gateway.reserve(f"reserve-{grant}", sealed)
        note["reserved"] = verdict.admitted or [finding.rule for finding in verdict.findings]
        return verdict.admitted

    def _released(self, grant: str, number: int) -> None:
        if not self._reserve(grant):
            return
        artifact = pictures(self.rng.randrange(1 << 31), 3)
        digest = hashlib.sha256(artifact).hexdigest()
        release = self.hospital.release(grant, artifact_sha256=digest, artifact_bytes=len(artifact))
        verdict = self.gateway.submit(f"submit-{release.release}", self.seal(release), artifact)
        self.told[grant]["released"] = verdict.admitted or [finding.rule for finding in verdict.findings]
        self.told[grant]["release"] = release.release

    def _settled(self, grant: str) -> None:
        if not self._reserve(grant):
            return
        settlement = Settlement(grant, self.name, "", "ksame", "expired", "timeout", 0)
        self.told[grant]["settled"] = self.gateway.settle(f"settle-{grant}", self.seal(settlement)).admitted


def main() -> None:
    """All agents of this process, for so many seconds from the moment they are told to begin."""
    vars(door_module)["GatewayStub"] = vars(fleet_transport)["GatewayStub"] = timed
    agents = [Agent(name) for name in SETTINGS["sites"]]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    around = [threading.Thread(target=act, daemon=True) for a in agents for act in (a.link, a.listen)]
    working = [threading.Thread(target=a.work, args=(began + SETTINGS["seconds"],)) for a in agents]
    for thread in (*around, *working):
        thread.start()
    for thread in working:
        thread.join()
    ended = time.monotonic()
    for agent in agents:
        agent.stop.set()
    for thread in around:
        thread.join(30)
    report = {
        "seconds": ended - began,
        "took": CALLS.took,
        "agents": {
            a.name: {"told": a.told, "faults": a.faults, "states": a.states, "notices": a.notices} for a in agents
        },
    }
    Path(SETTINGS["out"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
