"""Federated runs in a test: the coordinator's real ledger, release store and job files, without Flower's processes.

A grid calls its nodes one by one. A ward answers for a site with a real agent, which needs torch. Without torch there
are none, and a test that has a site take part in a run skips (``agents``); everything else is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from agent.federation.supernode import read_task, records_of
from agent.federation.tasks import Reply, RoundAnswer, RoundTask, TaskDeclinedError
from coordinator.admission import AdmissionService
from coordinator.event_log import open_log
from coordinator.federation.job import Job
from coordinator.federation.run_manager import RunManager
from coordinator.federation.secure_strategy import SecureStrategy
from coordinator.federation.strategy import GatedStrategy, RoundPlan, RunGate, pack
from coordinator.gateway.service import StagedArtifact
from coordinator.storage.release_store import ReleaseStore
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.review.policy import parse
from policies.review.rules import Finding
from policies.statements import Release
from protos.artifacts.arrays import unpack_vector
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.inspection import check
from protos.artifacts.strict_safetensors import Architecture
from protos.federation import messages as wire
from protos.federation.flower_arrays import put_together
from tests.support.ledger_world import Clock, Hospital, policy
from tests.support.small_tasks import classification, masked_config, plain_config

LEVELS = '["A", "A*", "B"]'


class Node(Protocol):
    """What answers for one site: ``tests.support.federated_sites.FederatedSite`` with a real agent behind it."""

    online: bool

    def handle(self, task: RoundTask) -> RoundAnswer:
        """Do what is asked.

        Raises:
            TaskDeclinedError: with a code.
        """


def admitting(**changes: object) -> str:
    """A policy under which secret sums and a run of three rounds can be had."""
    return policy(**{"levels": LEVELS, **changes})


def signed(release: Release, artifact: bytes, expected: dict[str, Any] | None = None) -> StagedArtifact:
    """An artifact at hand, read by the very readers that the coordinator's sandbox runs."""

    def look() -> list[Finding]:
        try:
            told = expected or {}
            if release.artifact_type == "model":  # which architectures are approved is not asked here
                told = {"architecture": Architecture.shown_by(BytesSource(artifact)).encode().decode()}
            check(BytesSource(artifact), release.artifact_type, told)
        except ArtifactFormatError as fault:
            return [Finding("artifact_malformed", str(fault))]
        return []

    return StagedArtifact(hashlib.sha256(artifact).hexdigest(), len(artifact), look)


Twist = Callable[[str, Message, Message], list[Message]]  # site, what was sent, its honest reply -> what comes


@dataclass
class Grid:
    """A grid whose nodes are sites; every message passes through the product's records at both ends."""

    wards: Mapping[str, Node]
    twist: Twist | None = None
    before: Callable[[str, Message], Message] = lambda _site, message: message  # what the way does to a message
    traffic: list[bytes] = field(default_factory=list)

    def get_nodes(self) -> list[Any]:
        """The sites that are online."""
        names = sorted(self.wards)
        return [
            SimpleNamespace(name=name, node_id=10 + names.index(name), online_until=1.0)
            for name, ward in self.wards.items()
            if ward.online
        ]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Give each message an identifier, as Flower does when it pushes, and collect the answers."""
        names, replies = sorted(self.wards), list[Message]()
        for message in messages:
            site = names[message.metadata.dst_node_id - 10]
            group = f"{message.metadata.message_type}-{message.metadata.group_id}-{site}"
            message.metadata.__dict__["_message_id"] = group
            message.content = carried(message.content)
            reply = self._answer(site, self.before(site, message))
            self.traffic += [_bytes(message), _bytes(reply)]
            replies += self.twist(site, message, reply) if self.twist else [reply]
        return replies

    def _answer(self, site: str, message: Message) -> Message:
        try:
            task = read_task(message.metadata.message_type, message.content)
            answer = self.wards[site].handle(task)
            assert answer.fits(task)
        except TaskDeclinedError as refusal:
            return Message(Error(wire.CODES[refusal.code], "patient 4711"), reply_to=message)
        return Message(carried(records_of(Reply(b"", task.kind, answer))), reply_to=message)


def carried(content: RecordDict) -> RecordDict:
    """Records as they come out at the other end: sent in pieces, and put together."""
    pieces = {name: one.deflate() for name, one in get_all_nested_objects(content).items()}
    return cast(RecordDict, put_together(content.object_id, pieces))


def _bytes(message: Message) -> bytes:
    """All that a message carries."""
    if message.has_error():
        return b""
    found = []
    for record in message.content.values():
        if isinstance(record, ConfigRecord):
            found += [v if isinstance(v, bytes) else str(v).encode() for v in record.values()]
        else:
            found += [array.data for array in record.values()]  # type: ignore[union-attr]
    return b"\n".join(found)


class Host:
    """In the embedded SuperLink's place: a grid of wards."""

    def __init__(self, grid: Grid) -> None:
        self.inner, self.stopping = grid, threading.Event()
        self.registered: dict[str, bytes] = {}

    @contextlib.contextmanager
    def grid(self) -> Iterator[Any]:
        """One run."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        yield self.inner

    def register(self, site: str, node_key: bytes) -> None:
        """A node key is let in."""
        self.registered[site] = node_key


def conduct_here(host: Host, plan: RoundPlan, gate: RunGate) -> None:
    """`coordinator.federation.superlink.conduct` without the run's own process: its strategy, over a grid of
    wards.
    """
    kind = GatedStrategy if plan.roster is None else SecureStrategy
    strategy = kind(plan, gate, host.stopping)
    with host.grid() as grid:
        if plan.checks:
            strategy.check(grid)
            return
        strategy.price(grid)
        strategy.start(
            grid=grid,
            initial_arrays=pack(plan.model.vector),
            num_rounds=plan.rounds - plan.first_round,
            timeout=plan.round_timeout_s,
        )


if TYPE_CHECKING:
    from tests.support.federated_sites import FederatedSite

SITES = ("north", "south", "west")
PARAMETERS = 195  # of the small model: three classes of 64 pixels and a constant
AGENTS = importlib.util.find_spec("torch") is not None
NEEDS_AGENT = "agent: a site takes part in a run, and its agent needs torch"
agents = pytest.mark.skipif(not AGENTS, reason=NEEDS_AGENT)


@dataclass
class Federation:
    """A coordinator with its runs, and a ward for each site."""

    folder: Path
    sites: tuple[str, ...] = SITES
    strangers: tuple[str, ...] = ()  # sites that name no partners
    policies: dict[str, str] = field(default_factory=dict)
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    told: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    wards: dict[str, FederatedSite] = field(default_factory=dict)
    hospitals: dict[str, Hospital] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open()
        self.hospitals = {site: Hospital(site, self.policies.get(site, admitting())) for site in self.sites}
        for hospital in self.hospitals.values():
            self.intake.enrol(hospital.enrolment()[1])
        if AGENTS:
            self._add_wards()
        self.start()

    def _add_wards(self) -> None:
        from tests.support.federated_sites import FederatedSite  # a real agent: it imports torch
        from tests.support.site_world import MemoryVault

        for i, hospital in enumerate(self.hospitals.values()):
            known = () if hospital.name in self.strangers else self.hospitals.values()
            others = tuple(other.public for other in known if other is not hospital)
            vault = MemoryVault(seed=i)
            self.wards[hospital.name] = FederatedSite(
                self.folder, hospital, self.intake, others, vault, seed=10 * i + 1
            )

    def open(self) -> None:
        self.store = Store(open_sqlite(self.folder / "hub.db"), "lazaret/coordinator", self.key, Clock())
        self.intake = AdmissionService.over(self.store, parse(admitting(), "federation"))
        self.grid = Grid(self.wards)

    def start(self) -> None:
        self.host, self.shelf = Host(self.grid), ReleaseStore(self.folder / "releases", self.store)
        log = open_log(self.folder / "coordinator.log")
        self.runs = RunManager(
            self.folder / "runs", self.host, self.intake, self.shelf, log, lambda *said: self.told.append(said)
        )

    def restart(self) -> None:
        """The coordinator was killed; another process opens what is on the disk."""
        self.host.stopping.set()
        for feed in self.runs._feeds.values():
            list(feed.follow())
        self.store.close()
        self.open()
        for ward in self.wards.values():
            ward.intake = ward.gateway.intake = self.intake
        self.start()

    def state(self, run: str = "run-1") -> str:
        return dict((job.run, state) for job, state in self.runs.known())[run]

    def grants(self) -> list[str]:
        return sorted(g.state for g in self.store.state.grants.values())

    def model(self, run: str, number: int) -> NDArray[np.float32]:
        return unpack_vector((self.folder / "runs" / run / f"round-{number}.safetensors").read_bytes())


def configuration(rounds: int = 3) -> dict[str, Any]:
    """The training of a ``federated`` job as JSON, without torch: ``tests.support.federated_sites.federated``."""
    return plain_config(classification(rounds=rounds))


def secret_configuration(rounds: int = 2, sites: int = 3) -> dict[str, Any]:
    """The same of ``tests.support.federated_sites.masked``."""
    return masked_config(classification(rounds=rounds, steps_per_round=1, learning_rate=4.0), sites=sites)


def written(values: dict[str, Any]) -> str:
    """A configuration as the mechanisms write it."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def job(rounds: int = 3, sites: tuple[str, ...] = SITES, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "run": "run-1",
        "mechanism": "federated",
        "config": written(configuration(rounds)),
        "parameters": PARAMETERS,
        "sites": sites,
        "rounds": rounds,
        "min_sites": 2,
        **changes,
    }
    return Job(**values)


LOOKS = {"looks": 2, "noise": 20.0, "held_out": 25, "bins": 4}


def evaluated_job(rounds: int = 2, evaluate: tuple[int, ...] = (1, 2), **changes: Any) -> Job:
    """A run with looks at its model, as ``tests.support.federated_sites.evaluated`` prices them."""
    config = written({**configuration(rounds), "evaluate": LOOKS})
    return job(rounds, **{"config": config, "evaluate": evaluate, **changes})


def secret_job(rounds: int = 2, sites: tuple[str, ...] = SITES, min_sites: int = 3, **changes: Any) -> Job:
    """A run in secret sums."""
    config = written(secret_configuration(rounds, len(sites)))
    values: dict[str, Any] = {"mechanism": "federated-masked", "config": config, "secure": True, **changes}
    return job(rounds, sites, min_sites=min_sites, **values)
