"""Sites of a federated run without Flower: real ledgers and the product's own parts, called one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.federation.participant import Participant
from agent.federation.readiness import SiteMachine, examine
from agent.federation.secure_aggregation import SecureAggregationClient, _ring_of_look
from agent.federation.service import TaskHandler
from agent.federation.tasks import RoundAnswer, RoundTask
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from coordinator.admission import AdmissionService
from coordinator.federation.run_controller import UpdateArtifact
from policies.ledger_service import LedgerService
from policies.statements import PAYLOAD_TYPE, Release
from policies.statements import parse as parse_statement
from policies.tasks.evaluation import EvaluationPlan
from protos.artifacts.arrays import pack_vector
from protos.artifacts.strict_safetensors import pack_ring
from protos.common.dsse import key_id, open_sealed
from protos.federation.round_times import RoundTerms
from protos.secagg import round
from protos.secagg.messages import SumStep
from protos.secagg.server import Server
from protos.secagg.session import KnownPartners, Quorum, SumSession
from tests.support.coordinator_runs import admitting
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.ledger_world import Hospital, policy
from tests.support.site_world import SHAPE, DirectCoordinatorClient, MemoryVault, admission, site_of
from tests.support.small_tasks import changed, classification, linear_length


def federated(rounds: int = 3, **changes: Any) -> Federated:
    """A small training job."""
    task = classification(size=SHAPE, rounds=rounds)
    return changed(Federated(task, linear_length(task), 1.8), **changes)


PLAN = EvaluationPlan(looks=2, noise=20.0, held_out=25, bins=4)


def evaluated(rounds: int = 3, **changes: Any) -> Federated:
    """The same with looks."""
    return federated(rounds, **{"evaluate": PLAN, **changes})


def masked(rounds: int = 2, sites: int = 3, **changes: Any) -> FederatedMasked:
    """A small training job in secret sums."""
    task = classification(size=SHAPE, rounds=rounds, steps_per_round=1, learning_rate=4.0)
    return changed(FederatedMasked(task, linear_length(task), 1.8, sites, 2, 4.0, 20, 32), **changes)


@dataclass
class FederatedSite:
    """One site in a run: a task that its link would receive goes to :meth:`handle`."""

    folder: Path
    hospital: Hospital
    intake: AdmissionService
    partners: tuple[bytes, ...] = ()  # enrolled keys of the sites that it knows
    vault: MemoryVault = field(default_factory=MemoryVault)
    online: bool = True
    seed: int = 1
    modality: str = "OT"
    asked: list[tuple[str, int, str]] = field(default_factory=list)  # kind, round, step
    part: SecureAggregationClient = field(init=False)
    gateway: DirectCoordinatorClient = field(init=False)

    def __post_init__(self) -> None:
        self.gateway = DirectCoordinatorClient(self.intake, self.hospital.name)
        self.start()

    def start(self) -> bool:
        """The process (again): a ledger file, a vault, and what was in memory is gone."""
        site = site_of(self.folder, self.hospital, self.vault, self.gateway)
        known = KnownPartners(frozenset(key_id(key) for key in self.partners), 1) if self.partners else None
        participant = Participant(site, self.modality, UnsafeSeededEntropy(self.seed))
        self.part = SecureAggregationClient(participant, self.hospital.key, known, UnsafeSeededEntropy(self.seed + 1))
        return participant.resume()

    def crash(self) -> bool:
        """kill -9, and a start; was the part taken up?"""
        self.part.participant.site.ledger.store.close()
        self.vault.crash_at = ""
        return self.start()

    def handle(self, task: RoundTask) -> RoundAnswer:
        """What `agent.federation.service` does with a task, without its pauses.

        Raises:
            TaskDeclinedError: with a code.
        """
        self.asked.append((task.kind, task.round_index, task.step))
        handler = TaskHandler(self.part, threading.Lock(), ErrorLog(), threading.Event())
        here = SiteMachine(self.folder, 30.0, self.part.participant.site.run)
        handler.examine = lambda run, job, *more: examine(self.part.participant, job, run, more[0], here, more[1])
        return handler._answer(task)

    def account(self, kind: str = "rdp") -> tuple[int, int]:
        """(held, spent) in the site's own ledger."""
        account = self.part.participant.site.ledger.store.state.accounts[f"{self.hospital.name}/{kind}"]
        return account.held, account.spent


START = federated().initial()


def federated_site(tmp_path: Path) -> FederatedSite:
    """One site and one coordinator, with real ledgers."""
    hospital = Hospital("site-a")
    return FederatedSite(tmp_path, hospital, admission(tmp_path / "hub.db", policy(), hospital))


def part(w: FederatedSite) -> Participant:
    return w.part.participant


def granted(w: FederatedSite, job: Federated, run: str = "run-1") -> bytes:
    envelope = part(w).join(run, job)
    assert w.intake.reserve_run(run, {"site-a": envelope}, 1)["site-a"].admitted
    return envelope


def gone(*_: object, **__: object) -> None:
    """The process is gone: nothing after this line runs."""
    raise KeyboardInterrupt


def read_and_gone(vault: MemoryVault, *_: object) -> None:
    vault.reads += 1
    raise KeyboardInterrupt


def after(method: Callable[..., object]) -> Callable[..., object]:
    def crash(*arguments: object) -> None:
        method(*arguments)
        raise KeyboardInterrupt

    return crash


def in_training(_: FederatedSite, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryVault, "cohort", read_and_gone)


def before_it_set_out(_: FederatedSite, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerService, "send", gone)


def when_it_had_set_out(_: FederatedSite, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerService, "send", after(LedgerService.send))


NAMES = ("north", "south", "west")
STRATEGY = '{"name":"fedavg"}'
SECURE_JOB = masked(rounds=2)
_TERMS = RoundTerms()


@dataclass
class SecureRun:
    """Three sites that know each other, a coordinator's books, and a hub that plays by hand."""

    folder: Path
    strangers: tuple[str, ...] = ()  # sites that name no partners
    job: FederatedMasked = SECURE_JOB
    terms: RoundTerms = _TERMS
    vaults: Mapping[str, MemoryVault] = field(
        default_factory=lambda: {name: MemoryVault(seed=i) for i, name in enumerate(NAMES)}
    )
    wards: dict[str, FederatedSite] = field(default_factory=dict)
    hub: Server | None = None

    def __post_init__(self) -> None:
        hospitals = {name: Hospital(name, admitting()) for name in self.vaults}
        self.intake = admission(self.folder / "hub.db", admitting(), *hospitals.values())
        self.roster = {name: hospital.public for name, hospital in hospitals.items()}
        for i, (name, hospital) in enumerate(hospitals.items()):
            others = tuple(key for other, key in self.roster.items() if other != name)
            partners = () if name in self.strangers else others
            vault = self.vaults[name]
            self.wards[name] = FederatedSite(self.folder, hospital, self.intake, partners, vault, seed=10 * i + 1)

    @property
    def config(self) -> bytes:
        return self.job.to_json().encode()

    def granted(self, run: str = "run-1") -> None:
        sealed = {name: ward.part.participant.join(run, self.job, self.terms) for name, ward in self.wards.items()}
        assert all(v.admitted for v in self.intake.reserve_run(run, sealed, 3).values())

    def session(
        self, index: int = 0, start: np.ndarray | None = None, run: str = "run-1", strategy: str = STRATEGY
    ) -> SumSession:
        start = self.job.initial().vector if start is None else start
        quorum = Quorum.smallest(3, round.CORRUPT, self.job.honest)
        ring = _ring_of_look(self.job) if strategy == round.LOOK else None
        terms = round.RoundParams(run, index, self.config, strategy)
        return round.session(terms, start, self.roster, quorum, ring)

    def setup(self, start: np.ndarray | None = None, strategy: str = STRATEGY) -> bytes:
        start = self.job.initial().vector if start is None else start
        return round.RoundSetup(self.roster, strategy, pack_vector(start)).encode()

    def step(self, site: str, step: SumStep, payload: bytes, number: int = 1) -> bytes:
        return self.wards[site].part.step("run-1", number, step.name.lower(), payload, self.config)

    def play(self, until: SumStep, index: int = 0, strategy: str = STRATEGY) -> Server:
        """Honestly up to, and not into, ``until``; each masked vector is admitted at the coordinator."""
        hub = Server(self.session(index, strategy=strategy))
        for step in SumStep:
            if step is until:
                break
            self.once(hub, step, index, strategy)
        return hub

    def once(self, hub: Server, step: SumStep, index: int = 0, strategy: str = STRATEGY) -> None:
        for site, request in hub.requests().items():
            payload = self.setup(strategy=strategy) if step is SumStep.ADVERTISE else request
            answer = self.step(site, step, payload, index + 1)
            if step is SumStep.MASK:
                envelope, answer = round.unframe(answer)
                self.admit(site, envelope, pack_ring(round.masked_vector(hub.session, answer)))
            assert hub.receive(site, answer) is None
        hub.advance()

    def admit(self, site: str, envelope: bytes, artifact: bytes) -> Release:
        raw = open_sealed(envelope, PAYLOAD_TYPE, {site: self.roster[site]}).payload
        release = parse_statement(raw)
        assert isinstance(release, Release)
        in_hand = UpdateArtifact(artifact, self.job.parameters, "")
        key = f"submit-{release.release}"
        assert self.intake.admit(site, key, envelope, release, in_hand).admitted
        return release


class ErrorLog:
    """A log that keeps the names of what went wrong."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, name: str, **_: object) -> None:
        """Something is wrong."""
        self.said.append(name)

    def info(self, name: str, **_: object) -> None:
        """Nothing is wrong."""

    warning = info
