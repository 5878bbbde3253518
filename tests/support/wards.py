"""Sites of a federated run without Flower: real ledgers and the product's own parts, called one by one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message
from flwr.supercore.task_identity import TaskIdentity

from agent.edges.records import read_task, records_of
from agent.edges.tasks import Answer, Declined, Reply, Task
from agent.masked import Sum
from agent.mechanisms.federated import Federated, FederatedMasked
from agent.nouns import Cohort, Image, Patient, Scan, Selection, Unreachable, Update
from agent.participant import Participant, read_mechanism
from agent.site import Refused, Site
from coordinator.edges.secure import SecureStrategy
from coordinator.edges.service import Staged
from coordinator.edges.strategy import Gate, GatedStrategy, Progress, Result, RoundPlan, pack
from coordinator.intake import Intake, Unwelcome
from policies.policy import parse as parse_policy
from policies.register import Register
from policies.review import Finding, Verdict
from policies.sqlite import open_sqlite
from policies.statement import PAYLOAD_TYPE, Release, parse
from policies.store import Store
from protos import rounds as wire
from protos.blocks import BadArtifact, Held
from protos.envelope import key_id, open_sealed
from protos.inspection import check
from protos.secagg_session import Acquaintance
from tests.support.books import Clock, Hospital, policy
from tests.support.entropy import UnsafeSeededEntropy

SHAPE = (8, 8)
LEVELS = '["A", "A*", "B"]'


def federated(rounds: int = 3, **changes: Any) -> Federated:
    """A small training job."""
    job = Federated(0.25, 1.8, 15, rounds, 0.1, 2, 25, 40.0, ("0", "1", "2"), SHAPE, (0.0,) * 64)
    return replace(job, **changes)


def masked(rounds: int = 2, sites: int = 3, **changes: Any) -> FederatedMasked:
    """A small training job in secret sums."""
    job = FederatedMasked(
        0.25, 1.8, rounds, 0.1, 2, 25, 4.0, ("0", "1", "2"), SHAPE, (0.0,) * 64, sites, 2, 4.0, 20, 32
    )
    return replace(job, **changes)


def goods(release: Release, artifact: bytes) -> Staged:
    """An artifact at hand, read by the very readers that the coordinator's sandbox runs."""

    def look() -> list[Finding]:
        try:
            check(Held(artifact), release.artifact_type, {})
        except BadArtifact as fault:
            return [Finding("artifact_malformed", str(fault))]
        return []

    return Staged(hashlib.sha256(artifact).hexdigest(), len(artifact), look)


@dataclass(frozen=True)
class Drawer:
    """One place in the vault, in memory."""

    blobs: dict[str, bytes]
    name: str

    def read(self) -> bytes | None:
        return self.blobs.get(self.name)

    def write(self, data: bytes) -> None:
        self.blobs[self.name] = data

    def clear(self) -> None:
        self.blobs.pop(self.name, None)


@dataclass
class Vault:
    """The vault's port in memory, which notes when patients are read."""

    patients: int = 12
    notes: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    reads: int = 0
    out: frozenset[str] = frozenset()  # who has opted out
    crash_at: str = ""  # a note's name: the process is gone before it is written
    seed: int = 1
    heads: tuple[Scan, ...] = ()
    unreadable: int = 0  # of the last patients, no image can be used: what only their pixels show

    def cohort(
        self, modality: str | Selection, shape: tuple[int, ...] | None = None, without: Iterable[str] = ()
    ) -> Cohort:
        self.reads += 1
        shape = modality.shape if isinstance(modality, Selection) else shape
        excluded = set(without) | self.out
        dice = np.random.default_rng(self.seed)
        found = []
        for i in range(self.patients - self.unreadable):
            images = tuple(Image(dice.random(shape).astype(np.float32), str(i % 3)) for _ in range(2))
            if f"{i:04d}" not in excluded:
                found.append(Patient(f"{i:04d}", images))
        return Cohort(tuple(found))

    def roster(self, selection: Selection, without: Iterable[str] = ()) -> tuple[tuple[str, ...], ...]:
        excluded = set(without) | self.out
        return tuple((str(i % 3),) * 2 for i in range(self.patients) if f"{i:04d}" not in excluded)

    def scans(self, modality: str) -> tuple[Scan, ...]:
        self.reads += 1
        return tuple(scan for scan in self.heads if scan.pseudonym not in self.out)

    def opted_out(self) -> frozenset[str]:
        return self.out

    def project_note(self, name: str) -> Any:
        return self.note(f"project/{name}")

    def write_project_note(self, name: str, value: Any) -> None:
        self.write_note(f"project/{name}", value)

    def place(self, name: str) -> Drawer:
        return Drawer(self.blobs, name)

    def note(self, name: str) -> Any:
        return json.loads(self.notes[name]) if name in self.notes else None

    def write_note(self, name: str, value: Any) -> None:
        if name == self.crash_at and value is not None:
            raise KeyboardInterrupt
        self.notes[name] = json.dumps(value)


@dataclass
class Door:
    """The door's port straight into a real coordinator's intake; it can be slammed."""

    intake: Intake
    site: str
    shut: bool = False

    def _ask(self, act: Any) -> Verdict:
        if self.shut:
            raise Unreachable("slammed")
        try:
            return act()  # type: ignore[no-any-return]
        except Unwelcome as refusal:
            return Verdict((refusal.finding,))

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.reserve(self.site, key, envelope))

    def settle(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.settle(self.site, key, envelope))

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        release = self.intake.release(self.site, key, envelope)
        return self._ask(lambda: self.intake.admit(self.site, key, envelope, release, goods(release, artifact)))

    def amend(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.amend(self.site, key, envelope))

    def present(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.present(self.site, key, envelope))

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        if self.shut:
            raise Unreachable("slammed")
        found = self.intake.outcome(self.site, key)
        return found[0] if found else None


def site_of(folder: Path, hospital: Hospital, vault: Vault, door: Door) -> Site:
    """A hospital's agent over its own ledger file; open it again after a crash."""
    store = Store(open_sqlite(folder / f"{hospital.name}.db"), "lazaret/test", hospital.key, Clock())
    own = parse_policy(hospital.policy_text, hospital.name)
    register = Register(store, lambda _site: own)
    if hospital.name not in store.state.sites:
        register.enrol(*hospital.enrolment(), own)
    made = iter(range(1000))

    def read(envelope: bytes) -> Release:
        statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"self": hospital.public}).payload)
        assert isinstance(statement, Release)
        return statement

    def new_id(prefix: str) -> str:
        return next(
            name for i in made if (name := f"{prefix}-{hospital.name}-{i}") not in register.store.state.grants
        )

    return Site(hospital.name, register, door, vault, hospital.seal, read, new_id, lambda _step, _detail: None)


@dataclass
class Ward:
    """One site in a run: what its link would hand to its desk comes to :meth:`handle`."""

    folder: Path
    hospital: Hospital
    intake: Intake
    partners: tuple[bytes, ...] = ()  # enrolled keys of the sites that it knows
    vault: Vault = field(default_factory=Vault)
    online: bool = True
    seed: int = 1
    asked: list[tuple[str, int, str]] = field(default_factory=list)  # kind, round, step
    part: Sum = field(init=False)
    door: Door = field(init=False)

    def __post_init__(self) -> None:
        self.door = Door(self.intake, self.hospital.name)
        self.start()

    def start(self) -> bool:
        """The process (again): a ledger file, a vault, and what was in memory is gone."""
        site = site_of(self.folder, self.hospital, self.vault, self.door)
        known = Acquaintance(frozenset(key_id(key) for key in self.partners), 1) if self.partners else None
        participant = Participant(site, "OT", UnsafeSeededEntropy(self.seed))
        self.part = Sum(participant, self.hospital.key, known, UnsafeSeededEntropy(self.seed + 1))
        return participant.resume()

    def crash(self) -> bool:
        """kill -9, and a start; was the part taken up?"""
        self.part.participant.site.books.store.close()
        self.vault.crash_at = ""
        return self.start()

    def handle(self, task: Task) -> Answer:
        """What `agent.edges.rounds` does with a task, without its pauses.

        Raises:
            Declined: with a code.
        """
        self.asked.append((task.kind, task.round_index, task.step))
        part = self.part.participant
        try:
            if task.kind == "price":
                return Answer(part.join(task.run, read_mechanism(task.config.decode())))
            if task.kind == "secure":
                return Answer(
                    payload=self.part.step(task.run, task.round_index + 1, task.step, task.payload, task.config)
                )
            assert task.vector is not None
            sent, update = part.train(task.run, task.round_index + 1, Update(task.vector.copy()))
            return Answer(sent.envelope, update.vector)
        except Refused as refusal:
            rules = {f.rule for f in refusal.verdict.findings}
            raise Declined("budget" if "budget" in rules else "policy") from None

    def account(self, kind: str = "rdp") -> tuple[int, int]:
        """(held, spent) in the site's own ledger."""
        account = self.part.participant.site.books.store.state.accounts[f"{self.hospital.name}/{kind}"]
        return account.held, account.spent


Twist = Callable[[str, Message, Message], list[Message]]  # site, what was sent, its honest reply -> what comes


@dataclass
class Grid:
    """A grid whose nodes are wards; every message passes through the product's records at both ends."""

    wards: dict[str, Ward]
    twist: Twist | None = None
    before: Callable[[str, Message], Message] = lambda _site, message: message  # what the way does to a message
    traffic: list[bytes] = field(default_factory=list)

    def get_nodes(self) -> list[Any]:
        """The wards that are online."""
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
            reply = self._answer(site, self.before(site, message))
            self.traffic += [_bytes(message), _bytes(reply)]
            replies += self.twist(site, message, reply) if self.twist else [reply]
        return replies

    def _answer(self, site: str, message: Message) -> Message:
        try:
            task = read_task(message.metadata.message_type, message.content)
            answer = self.wards[site].handle(task)
            assert answer.fits(task)
        except Declined as refusal:
            return Message(Error(wire.CODES[refusal.code], "patient 4711"), reply_to=message)
        return Message(records_of(Reply(b"", task.kind, answer)), reply_to=message)


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


def conduct_here(host: Host, plan: RoundPlan, gate: Gate, progress: Callable[[Progress], None]) -> Result:
    """`coordinator.edges.federation.conduct` without the run's own process: its strategy, over a grid of wards."""
    kind = GatedStrategy if plan.roster is None else SecureStrategy
    strategy = kind(plan, gate, progress, host.stopping)
    with host.grid() as grid:
        strategy.price(grid)
        strategy.start(
            grid=grid,
            initial_arrays=pack(plan.model.vector),
            num_rounds=plan.rounds - plan.first_round,
            timeout=plan.round_timeout_s,
        )
    return strategy.result()


def admitting(**changes: object) -> str:
    """A policy under which secret sums and a run of three rounds can be had."""
    return policy(**{"levels": LEVELS, **changes})
