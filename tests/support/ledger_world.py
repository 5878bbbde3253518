"""Real sites for tests: keys, sealed statements, registers over real SQLite ledgers."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.claims import (
    Claim,
    Composed,
    Evaluated,
    GaussianQuery,
    KAnonymous,
    SubsampledGaussian,
)
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.ledger_service import LedgerService
from policies.review.policy import Policy, parse, preset, strictest
from policies.statements import (
    PAYLOAD_TYPE,
    Approval,
    Enrolment,
    Release,
    Request,
    Reservation,
    Statement,
    encode,
    release_id,
)
from protos.common.dsse import seal
from protos.identity.certificates import agent_name, node_public, request

K5 = KAnonymous(k=5, l_diversity=2, releases_per_patient=1)
COMPONENTS = {
    "ksame": {"encoder": "public", "generator": "public"},
    "federated": {"initial": "public", "centre": "public"},
    "federated-masked": {"initial": "public", "centre": "public"},
    "model": {"initial": "public"},
    "privimage": {"semantics": "public", "pretraining": "public"},
    "centroids": {"encoder": "public", "generator": "public", "codebook": "public"},
    "distill": {"teacher": "private", "autoencoder": "public", "verifier": "public", "aligner": "public"},
    "remodel": {"generator": "public", "atlas": "public"},
    "distill-dp": dict.fromkeys(("pretraining", "autoencoder", "verifier", "aligner"), "public"),
}
DP = SubsampledGaussian(sampling_rate=0.25, noise_multiplier=1.8, steps=60)
HISTOGRAM = GaussianQuery(noise=60.0, contribution=1, votes=4)
LOOKED = Evaluated(DP, GaussianQuery(noise=30.0, contribution=1, votes=1), looks=3)
BOTH = Composed((HISTOGRAM, SubsampledGaussian(sampling_rate=0.1, noise_multiplier=3.0, steps=50)))


def policy(**changes: object) -> str:
    """The text of the preset "internal" with some keys changed."""
    text = preset("internal")
    for key, value in changes.items():
        lines = [f"{key} = {value}" if line.startswith(f"{key} ") else line for line in text.splitlines()]
        text = "\n".join(lines)
    return text


@dataclass
class Hospital:
    """One site's signing key and what it would send."""

    name: str
    policy_text: str = field(default_factory=policy)
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    node_key: str = field(default_factory=lambda: node_public(ec.generate_private_key(ec.SECP384R1())).decode())
    csr: str = ""  # of a key of its own, unless it is given

    def __post_init__(self) -> None:
        self.csr = self.csr or request(ec.generate_private_key(ec.SECP256R1()), agent_name(self.name)).decode()

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def seal(self, statement: Statement) -> bytes:
        return seal(encode(statement), PAYLOAD_TYPE, self.key)

    def enrolment(self) -> tuple[Enrolment, bytes]:
        key = base64.b64encode(self.public).decode()
        statement = Enrolment(self.name, key, self.csr, self.node_key, self.policy_text)
        return statement, self.seal(statement)

    def reservation(self, grant: str, claim: Claim = K5, mechanism: str = "ksame", run: str = "") -> Reservation:
        return Reservation(grant, self.name, run, mechanism, claim, COMPONENTS.get(mechanism, {}), "OT")

    def release(self, grant: str, **changes: object) -> Release:
        values: dict[str, object] = {
            "release": release_id(self.name, grant, changes.get("round", 0)),  # type: ignore[arg-type]
            "grant": grant,
            "site": self.name,
            "run": "",
            "round": 0,
            "mechanism": "ksame",
            "artifact_type": "image-set",
            "artifact_sha256": "ab" * 32,
            "artifact_bytes": 100,
            "claim": K5,
            "epsilon_nano": None,
            "delta": None,
            "components": {"encoder": "public", "generator": "public"},
            "modality": "OT",
            "vetted_against": "nothing",
            "reid_rate": None,
            "approvals": {},
            "reader": "",
            **changes,
        }
        return Release(**values)  # type: ignore[arg-type]


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now = 1_700_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


def open_register(path: Path, *hospitals: Hospital, key: Ed25519PrivateKey | None = None) -> LedgerService:
    """A register over a new or existing ledger, with these hospitals enrolled."""
    federation: Policy = parse(policy(max_releases_per_patient=9), "federation")
    own = {h.name: parse(h.policy_text, h.name) for h in hospitals}
    store = Store(open_sqlite(path), "lazaret/test", key or Ed25519PrivateKey.generate(), Clock())
    register = LedgerService(store, lambda site: strictest(own[site], federation))
    for hospital in hospitals:
        if hospital.name not in store.state.sites:
            statement, envelope = hospital.enrolment()
            register.enrol(statement, envelope, register.policy_of(hospital.name))
    return register


@dataclass
class Person:
    """Somebody who may approve, with a key of their own."""

    name: str
    role: str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    def approval(
        self, serial: str, action: str, subject: str, value: str, origin: str = "lazaret/test", name: str = ""
    ) -> bytes:
        statement = Approval(name or self.name, origin, serial, action, subject, value)
        return seal(encode(statement), PAYLOAD_TYPE, self.key)

    def request(self, serial: str, action: str, subject: str, value: str, origin: str = "lazaret/test") -> bytes:
        return seal(encode(Request(self.name, origin, serial, action, subject, value)), PAYLOAD_TYPE, self.key)
