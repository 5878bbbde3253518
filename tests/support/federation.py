"""A real coordinator service in this process, over TCP with mutual TLS; sites enrolled by the product's own steps."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from agent.edges import home as agent_home
from agent.edges.door import GrpcDoor
from agent.edges.watch import Watch
from coordinator.edges import home as coordinator_home
from coordinator.edges.log import open_log
from coordinator.edges.service import Service, start
from coordinator.edges.shelf import Shelf
from coordinator.edges.witnesses import Witnesses
from coordinator.intake import Intake
from policies.accounting import epsilon_nano
from policies.claims import SubsampledGaussian
from policies.policy import preset
from policies.statement import PAYLOAD_TYPE, Release, Statement, encode
from protos.artifact import pack_images, pack_vector
from protos.envelope import seal
from protos.identity import agent_name, issue
from tests.support.books import DP, K5, Hospital

SETTINGS = (
    'site = "{site}"\ncoordinator = "{listen}"\nsuperlink = "127.0.0.1:1"\ninput = "../input"\n'
    'modalities = ["OT"]\nsecondary_capture_modalities = ["OT"]\npublic_components = []\n'
)


def pictures(seed: int = 0, count: int = 3) -> bytes:
    """A small image set."""
    images = np.random.default_rng(seed).integers(0, 256, (count, 8, 8)).astype(np.uint8)
    return pack_images(images, tuple("012"[i % 3] for i in range(count)))


def vector(seed: int = 0) -> bytes:
    """A small update."""
    return pack_vector(np.random.default_rng(seed).normal(size=10).astype(np.float32))


@dataclass
class Site:
    """An enrolled site, and what it would honestly say; tests bend it."""

    home: agent_home.Home
    hospital: Hospital
    federation: Federation

    def seal(self, statement: Statement) -> bytes:
        return seal(encode(statement), PAYLOAD_TYPE, self.home.sign_key())

    def door(self, patience_s: float = 0.0) -> GrpcDoor:
        target = f"127.0.0.1:{self.federation.port}"
        return GrpcDoor(
            target, self.home.keys, Watch(self.home.root / "watch", self.home.coordinator_key()), patience_s
        )

    def reserved(self, grant: str, claim: Any = K5, mechanism: str = "ksame", run: str = "") -> None:
        """Reserve, and expect a yes."""
        reservation = self.hospital.reservation(grant, claim, mechanism, run)
        verdict = self.door().reserve(f"reserve-{grant}", self.seal(reservation))
        assert verdict.admitted, verdict

    def release(self, grant: str, artifact: bytes, **changes: object) -> Release:
        digest = hashlib.sha256(artifact).hexdigest()
        values: dict[str, object] = {"artifact_sha256": digest, "artifact_bytes": len(artifact), **changes}
        return self.hospital.release(grant, **values)

    def update(self, grant: str, artifact: bytes, steps: int, **changes: object) -> Release:
        claim = SubsampledGaussian(DP.sampling_rate, DP.noise_multiplier, steps)
        values: dict[str, object] = {
            "mechanism": "federated",
            "artifact_type": "update",
            "claim": claim,
            "epsilon_nano": epsilon_nano(claim, 4e-6, 4),
            "delta": "4e-06",
            "components": {"initial": "public", "centre": "public"},
            **changes,
        }
        return self.release(grant, artifact, **values)


class Recorder(grpc.ServerInterceptor):  # type: ignore[misc]
    """Keeps every message that reaches or leaves the service, as bytes."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        deserialize, serialize = handler.request_deserializer, handler.response_serializer

        def heard(raw: bytes) -> Any:
            self.messages.append(raw)
            return deserialize(raw)

        def said(message: Any) -> Any:
            raw = serialize(message)
            self.messages.append(raw)
            return raw

        return handler._replace(request_deserializer=heard, response_serializer=said)


@dataclass
class Federation:
    """A coordinator that serves, without the Flower side."""

    root: Path
    policy: str = "internal"
    port: int = 0
    home: coordinator_home.Home = field(init=False)
    recorder: Recorder = field(default_factory=Recorder)

    def __enter__(self) -> Self:
        if not (self.root / "coordinator").exists():
            settings = 'listen = "127.0.0.1:0"\nsuperlink = "127.0.0.1:0"\n'
            self.home = coordinator_home.create(
                self.root / "coordinator", settings, preset(self.policy), dt.datetime.now(dt.UTC)
            )
        self.home = coordinator_home.Home(self.root / "coordinator")
        self.store = coordinator_home.open_ledger(self.home)
        self.intake = Intake.over(self.store, self.home.policy())
        self.shelf = Shelf(self.home.releases, self.store)
        log = open_log(self.home.root / "coordinator.log")
        service = Service(
            self.intake,
            self.shelf,
            Witnesses(self.home.witnesses),
            self.home.policy_text(),
            log,
            lambda _request: iter(()),
        )
        self.server, self.port = start(self.home, service, (self.recorder,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop(0).wait()
        self.store.close()

    def join(self, site: str, policy: str | None = None, approve: bool = True) -> Site:
        """Make a site by the product's own steps; without ``approve`` it has a certificate but is not enrolled."""
        hospital = Hospital(site, policy or preset("internal"))
        home = agent_home.create(
            self.root / site, SETTINGS.format(site=site, listen="127.0.0.1:1"), hospital.policy_text
        )
        envelope = agent_home.enrolment(home)
        request = json.loads(base64.b64decode(json.loads(envelope)["payload"]))["predicate"]
        if approve:
            self.intake.enrol(envelope)
        now = dt.datetime.now(dt.UTC)
        bundle = {
            "site": site,
            "certificate": issue(request["csr"].encode(), agent_name(site), self.home.ca(), now).decode(),
            "ca": self.home.ca()[1].decode(),
            "policy": self.home.policy_text(),
            "ledger_key": base64.b64encode(self.store.public).decode(),
        }
        agent_home.accept(home, json.dumps(bundle).encode())
        return Site(home, hospital, self)

    def findings(self) -> list[list[str]]:
        """The rules of every refusal in the ledger, oldest first."""
        entries = [self.store.line(seq).record.entry for seq in range(self.store.state.size)]
        return [entry.findings for entry in entries if type(entry).__name__ == "Refused"]  # type: ignore[union-attr]
