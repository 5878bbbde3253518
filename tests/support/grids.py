"""A federated run without Flower's processes: a grid whose nodes are called one by one. It needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from flwr.app import ConfigRecord, Error, Message
from flwr.supercore.task_identity import TaskIdentity

from agent.edges.records import read_task, records_of
from agent.edges.tasks import Answer, Declined, Reply, Task
from coordinator.edges.secure import SecureStrategy
from coordinator.edges.service import Staged
from coordinator.edges.strategy import Gate, GatedStrategy, Progress, Result, RoundPlan, pack
from policies.review import Finding
from policies.statement import Release
from protos import rounds as wire
from protos.blocks import BadArtifact, Held
from protos.inspection import check
from tests.support.books import policy

LEVELS = '["A", "A*", "B"]'


class Node(Protocol):
    """What answers for one site: ``tests.support.wards.Ward`` with a real agent behind it."""

    online: bool

    def handle(self, task: Task) -> Answer:
        """Do what is asked.

        Raises:
            Declined: with a code.
        """


def admitting(**changes: object) -> str:
    """A policy under which secret sums and a run of three rounds can be had."""
    return policy(**{"levels": LEVELS, **changes})


def goods(release: Release, artifact: bytes, expected: dict[str, Any] | None = None) -> Staged:
    """An artifact at hand, read by the very readers that the coordinator's sandbox runs."""

    def look() -> list[Finding]:
        try:
            check(Held(artifact), release.artifact_type, expected or {})
        except BadArtifact as fault:
            return [Finding("artifact_malformed", str(fault))]
        return []

    return Staged(hashlib.sha256(artifact).hexdigest(), len(artifact), look)


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
