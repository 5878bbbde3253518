"""A real coordinator service in this process, over TCP with mutual TLS; sites enrolled by the product's own steps."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.gateway import enrolment
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Certified, Credentials, install
from agent.gateway.witness import LedgerWitness
from agent.storage import site_directory
from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority
from coordinator.event_log import open_log
from coordinator.gateway.context import GatewayContext
from coordinator.gateway.notifications import NotificationStreams
from coordinator.gateway.server import start
from coordinator.gateway.service import Service
from coordinator.storage import directory as coordinator_home
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.site_heads import SiteHeads
from coordinator.storage.uploads import Uploads
from coordinator.storage.witness_store import Witnesses
from policies.accounting.accountant import epsilon_nano
from policies.accounting.claims import SubsampledGaussian
from policies.governance import decisions
from policies.review.policy import preset
from policies.statements import PAYLOAD_TYPE, Release, Statement, encode
from protos.artifacts.arrays import pack_images, pack_vector
from protos.common.dsse import open_sealed, seal
from protos.identity.certificates import agent_name, issue, leaf_of, pem, signing_key, write_private
from protos.identity.key_files import ec_key
from protos.v1 import gateway_pb2
from tests.support.ledger_world import DP, K5, Hospital, Person

SETTINGS = (
    'site = "{site}"\ncoordinator = "{listen}"\ninput = "../input"\n'
    'modalities = ["OT"]\nsecondary_capture_modalities = ["OT"]\npublic_components = []\n'
)


def pictures(seed: int = 0, count: int = 3) -> bytes:
    """A small image set."""
    images = np.random.default_rng(seed).integers(0, 256, (count, 8, 8)).astype(np.uint8)
    return pack_images(images, tuple("012"[i % 3] for i in range(count)))


def vector(seed: int = 0) -> bytes:
    """A small update."""
    return pack_vector(np.random.default_rng(seed).normal(size=10).astype(np.float32))


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@dataclass
class Site:
    """An enrolled site, and what it would honestly say; tests bend it."""

    home: site_directory.SiteDirectory
    hospital: Hospital
    federation: Federation

    def seal(self, statement: Statement) -> bytes:
        return seal(encode(statement), PAYLOAD_TYPE, self.home.sign_key())

    def gateway(self, patience_s: float = 0.0) -> GatewayClient:
        target = f"127.0.0.1:{self.federation.port}"
        return GatewayClient(
            target,
            Credentials(self.home.keys),
            LedgerWitness(self.home.root / "watch", self.home.coordinator_key()),
            patience_s,
        )

    def reserved(self, grant: str, claim: Any = K5, mechanism: str = "ksame", run: str = "") -> None:
        """Reserve, and expect a yes."""
        reservation = self.hospital.reservation(grant, claim, mechanism, run)
        verdict = self.gateway().reserve(f"reserve-{grant}", self.seal(reservation))
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


class NoFlower:
    """A coordinator without its Flower side."""

    def handle(self, site: str, parts: Iterator[Any]) -> Iterator[Any]:
        """There is nothing behind."""
        del site, parts
        yield gateway_pb2.FleetPart(status=503)


class NoRuns:
    """A coordinator that conducts nothing."""

    def launch(self, request: Any) -> Iterator[Any]:
        """No events."""
        del request
        return iter(())

    watch = resume = launch

    def plan(self, request: Any) -> Any:
        """No costs."""
        del request
        return gateway_pb2.PlanReply()

    def check(self, request: Any) -> Any:
        """Nobody is asked."""
        del request
        return gateway_pb2.CheckReply()

    def stop(self, run: str) -> str:
        """Nothing to stop."""
        del run
        return "unknown"


@dataclass
class Federation:
    """A coordinator that serves, without the Flower side."""

    root: Path
    policy: str = "internal"
    port: int = 0
    home: coordinator_home.CoordinatorDirectory = field(init=False)
    recorder: Recorder = field(default_factory=Recorder)

    def __enter__(self) -> Self:
        if not (self.root / "coordinator").exists():
            settings = 'listen = "127.0.0.1:0"\n'
            self.home = coordinator_home.create(
                self.root / "coordinator", settings, preset(self.policy), dt.datetime.now(dt.UTC)
            )
        self.home = coordinator_home.CoordinatorDirectory(self.root / "coordinator")
        self.store = coordinator_home.open_ledger(self.home)
        self.intake = AdmissionService.over(self.store, self.home.policy())
        self.authority = Authority(self.home, self.intake, lambda: dt.datetime.now(dt.UTC))
        self.persons = [self._person("dpo-1", "compliance"), self._person("chief-1", "hospital")]
        self.shelf = ReleaseStore(self.home.releases, self.store)
        log = open_log(self.home.root / "coordinator.log")
        self.uploads = Uploads(self.home.root / "uploads", time.time)
        self.service = Service(
            GatewayContext(
                intake=self.intake,
                uploads=self.uploads,
                shelf=self.shelf,
                witnesses=Witnesses(self.home.witnesses),
                site_heads=SiteHeads(self.home.site_heads),
                authority=self.authority,
                fleet=NoFlower(),
                conducting=NoRuns(),
                enrolled=lambda _site: None,
                architectures=self.home.root / "architectures",
                policy=self.home.policy_text(),
                log=log,
            ),
            NotificationStreams(log),
        )
        self.server, self.port = start(self.home, self.service, (self.recorder,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.sessions.close()
        self.server.stop(0).wait()
        self.store.close()

    def _person(self, name: str, role: str) -> Person:
        """Somebody who may approve; appointed when the federation was made, with a key that outlives a restart."""
        folder = self.root / "persons"
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (folder / f"{name}.key").exists():
            write_private(folder / f"{name}.key", pem(Ed25519PrivateKey.generate()))
        person = Person(name, role, signing_key(folder / f"{name}.key"))
        if name not in self.store.state.persons:
            decisions.appoint(self.store, name, role, person.public)
        return person

    def join(self, site: str, policy: str | None = None, approve: bool = True) -> Site:
        """Make a site by the product's own steps; without ``approve`` it has a certificate but is not enrolled."""
        hospital = Hospital(site, policy or preset("internal"))
        settings = SETTINGS.format(site=site, listen=f"127.0.0.1:{self.port or 1}")
        home = site_directory.create(self.root / site, settings, hospital.policy_text)
        if approve:
            self.invited(home)
            self.approve(site)
            progress = enrolment.enrol(home, None, self.calls(home.keys / enrolment.WAITING), _now())
            assert progress.state == "enrolled", progress
        else:
            self._forged(home, site)
        return Site(home, hospital, self)

    def invited(self, home: site_directory.SiteDirectory) -> enrolment.EnrolmentProgress:
        """Invite a site that has a directory, and have it hand in its request."""
        invitation = self.authority.invite(home.settings().site)
        given = enrolment.Given(invitation.body, invitation.token, invitation.fingerprint)
        chain = json.loads(invitation.body)["certificate"].encode()
        return enrolment.enrol(home, given, self.context(home.settings().site, chain), _now())

    def calls(self, waiting: Path) -> enrolment.Join:
        """A call under the waiting certificate in that file."""
        chain = json.loads(waiting.read_bytes())["certificate"].encode()
        return self.context(waiting.parent.parent.name, chain)

    def context(self, site: str, chain: bytes) -> enrolment.Join:
        """What the service does with a joining site's call, without the wire."""

        def join(_credentials: Any, _target: str, envelope: bytes) -> Any:
            found = self.authority.join(site, leaf_of(chain), envelope)
            return gateway_pb2.JoinReply(
                state=found.state,
                fingerprint=found.fingerprint,
                waiting_certificate=found.waiting_certificate,
                certificate=found.certificate,
                policy=found.policy,
                ledger_key=found.ledger_key,
                returning_certificate=found.returning_certificate,
            )

        return join

    def approvals(self, site: str, serial: str, digest: str) -> list[bytes]:
        """Every person's sealed approval of a site's request."""
        return [p.approval(serial, "enrol", site, digest, self.store.origin) for p in self.persons]

    def approve(self, site: str) -> None:
        """Both persons approve the request that waits, and the site is enrolled."""
        (digest,) = [p.digest for p in self.authority.enrolments() if p.site == site]
        serial = f"enrol-{site}-{self.store.state.size}"
        self.authority.enrol(site, serial, self.approvals(site, serial, digest))

    def _forged(self, home: site_directory.SiteDirectory, site: str) -> None:
        """A certificate that the authority signed and no entry knows: as after a theft of the intermediate's key."""
        request = json.loads(
            open_sealed(
                site_directory.enrolment(home), PAYLOAD_TYPE, {"": home.sign_key().public_key().public_bytes_raw()}
            ).payload
        )
        csr, now = request["predicate"]["csr"].encode(), _now()
        (home.keys / "root.crt").write_bytes(self.home.root_crt())
        (home.keys / "federation.toml").write_text(self.home.policy_text())
        (home.keys / "coordinator.pub").write_text(base64.b64encode(self.store.public).decode())
        chain, key = issue(csr, agent_name(site), self.home.ca(), now), ec_key(home.keys / "request.key")
        install(home.keys, self.home.root_crt(), agent_name(site), key, Certified(chain, b""), now)

    def findings(self) -> list[list[str]]:
        """The rules of every refusal in the ledger, oldest first."""
        entries = [self.store.line(seq).record.entry for seq in range(self.store.state.size)]
        return [entry.findings for entry in entries if type(entry).__name__ == "Refused"]  # type: ignore[union-attr]
