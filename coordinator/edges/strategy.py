"""The Flower strategy that refuses before it aggregates. Flower's public API only.

`GatedStrategy` prices a run first (only sites that grant it take part), then lets Flower's own round
loop (`Strategy.start`) send the parameters and hand it the replies. Each reply is matched to the
message it answers, checked against the exact schema of `protos.rounds`, and shown to the caller's
`Gate`, which reviews envelope and grant. Only what the gate admits enters the uniform mean.

Every "cannot tell" is a refusal with a code: an exception in the gate, an unreadable reply, a verdict
that is neither None nor a short code. Texts that a site sends are never kept, logged or passed on.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn, Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from coordinator.rounds import aggregate, usable
from protos import rounds as wire

_POLL_S: Final = 0.2
_SLUG: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_NPY_HEADER: Final = 4096  # bytes that numpy's header may take in front of the values
# Flower's own numbers (3 and 4: message or reply unavailable, 5: node unavailable), then the sites'.
_ERRORS: Final = {3: "no_reply", 4: "no_reply", 5: "offline"} | {n: name for name, n in wire.CODES.items()}


class Gate(Protocol):
    """The caller's review and books. Called from the thread that conducts the run."""

    def admit(self, site: str, round_index: int, envelope: bytes, vector: NDArray[np.float32]) -> str | None:
        """None admits the update; anything else is the code of its refusal. ``vector`` is read-only."""

    def round_done(
        self, round_index: int, vector: NDArray[np.float32], used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Make the new global parameters durable. An exception ends the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundPlan:
    """One federated run. Rounds count from 0; ``first_round`` is 0 or the rounds already done."""

    run: str
    sites: tuple[str, ...]  # the only sites asked, and the order of the sum
    rounds: int  # of the whole run
    first_round: int
    vector: NDArray[np.float32]  # (p,), the parameters before ``first_round``
    config: bytes  # the mechanism's public configuration
    min_sites: int
    round_timeout_s: float  # from sending to the last usable reply; also for pricing
    node_wait_s: float  # how long to wait for expected sites that are offline

    def __post_init__(self) -> None:
        """Refuse a plan that cannot be carried out as written, all problems at once."""
        wrong = [
            name
            for name, right in {
                "run": bool(self.run) and len(self.run) <= wire.MAX_RUN,
                "sites": bool(self.sites) and len(set(self.sites)) == len(self.sites) and all(self.sites),
                "rounds": 0 <= self.first_round < self.rounds,
                "vector": self.vector.size > 0 and usable(self.vector, self.vector.size) is None,
                "config": len(self.config) <= wire.MAX_CONFIG,
                "min_sites": 1 <= self.min_sites <= len(self.sites),
                "round_timeout_s": math.isfinite(self.round_timeout_s) and self.round_timeout_s > 0,
                "node_wait_s": math.isfinite(self.node_wait_s) and self.node_wait_s >= 0,
            }.items()
            if not right
        ]
        if wrong:
            raise ValueError(f"run plan: these do not make sense: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class Progress:
    """Something happened in a run: safe to log."""

    stage: Literal["priced", "sent", "done"]
    round_index: int  # the first round when ``stage`` is "priced"
    sites: tuple[str, ...]  # who granted, was asked, was aggregated
    refused: Mapping[str, str]  # site to code; at "sent" those that are not there to be asked


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a run gave."""

    vector: NDArray[np.float32]  # (p,), the global parameters after the last round
    rounds_done: int  # of the whole run
    granted: Mapping[str, bytes]  # site to the envelope of its price answer
    declined: Mapping[str, str]  # site to code, at the price
    used: tuple[tuple[str, ...], ...]  # for each round conducted here
    refused: tuple[Mapping[str, str], ...]  # for each round conducted here, site to code


class RoundFailed(Exception):
    """A round (or the pricing, ``round_index`` -1) has too few usable sites; nothing was aggregated."""

    def __init__(self, round_index: int, reason: str, refused: Mapping[str, str]) -> None:
        """Keep the codes; the text holds nothing else."""
        where = "pricing" if round_index < 0 else f"round {round_index}"
        codes = ", ".join(f"{site}: {code}" for site, code in sorted(refused.items())) or "none refused"
        super().__init__(f"{where}: {reason} ({codes})")
        self.round_index, self.reason, self.refused = round_index, reason, dict(refused)


class _Refused(Exception):
    """A reply is not usable; the argument is the code."""


@dataclass(slots=True, eq=False)
class GatedStrategy(Strategy):
    """Price, train, review, aggregate. One object conducts one run."""

    plan: RoundPlan
    gate: Gate
    progress: Callable[[Progress], None]
    stopping: threading.Event = field(default_factory=threading.Event)
    vector: NDArray[np.float32] = field(init=False)
    granted: dict[str, bytes] = field(init=False, default_factory=dict)
    declined: dict[str, str] = field(init=False, default_factory=dict)
    used: list[tuple[str, ...]] = field(init=False, default_factory=list)
    refused: list[Mapping[str, str]] = field(init=False, default_factory=list)
    _sent: dict[str, Message] = field(init=False, default_factory=dict)
    _lost: dict[str, str] = field(init=False, default_factory=dict)  # granted, but not sent to this time
    _expected: set[str] = field(init=False, default_factory=set)  # answered last time: worth waiting for
    # Sites that gave no reply, with Flower's "online until" as it was when that was noticed.
    _silent: dict[str, float | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Start from the plan's parameters."""
        self.vector = self.plan.vector
        self._expected = set(self.plan.sites)

    def price(self, grid: Grid) -> None:
        """Ask every listed site what the run costs it; those that answer with an envelope take part.

        Raises:
            RoundFailed: fewer than ``min_sites`` grant it.
        """
        messages = self._address(grid, self.plan.sites, wire.PRICE, 0, None)
        replies = grid.send_and_receive(messages, timeout=self.plan.round_timeout_s)
        for site, content in self._match(replies):
            try:
                self.granted[site], _ = _read(content, None)
            except _Refused as refusal:
                self._lost[site] = str(refusal)
        self.declined = dict(self._lost)
        self._expected = set(self.granted)
        self.progress(Progress("priced", self.plan.first_round, tuple(self.granted), self.declined))
        if not len(self.granted) >= self.plan.min_sites:
            self._fail(-1, "too_few_grants", self.declined)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Flower's hook: one message for each granted site that is online, after a bounded wait.

        Raises:
            RoundFailed: fewer than ``min_sites`` of them are.
        """
        del config  # the plan's configuration is the only one
        index = self.plan.first_round + server_round - 1
        asked = tuple(site for site in self.plan.sites if site in self.granted)
        messages = self._address(grid, asked, wire.TRAIN, index, arrays)
        if not len(messages) >= self.plan.min_sites:
            self._fail(index, "too_few_sites_online", self._lost)
        self.progress(Progress("sent", index, tuple(self._sent), dict(self._lost)))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Flower's hook: review every reply, then the uniform mean of the admitted updates.

        Raises:
            RoundFailed: fewer than ``min_sites`` updates are admitted.
        """
        index = self.plan.first_round + server_round - 1
        admitted: dict[str, NDArray[np.float32]] = {}
        answered: set[str] = set()
        for site, content in self._match(replies):
            answered.add(site)
            try:
                envelope, vector = _read(content, self.vector.size)
                admitted[site] = self._admit(site, index, envelope, vector)
            except _Refused as refusal:
                self._lost[site] = str(refusal)
        self._expected = answered
        refused = dict(self._lost)
        self._silent |= {site: None for site, code in refused.items() if code == "no_reply"}
        if not len(admitted) >= self.plan.min_sites:
            self._fail(index, "too_few_updates", refused)
        used = tuple(site for site in self.plan.sites if site in admitted)
        self.vector = aggregate([admitted[site] for site in used])
        self.gate.round_done(index, self.vector, used, refused)
        self.used.append(used)
        self.refused.append(refused)
        self.progress(Progress("done", index, used, refused))
        return pack(self.vector), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Flower's hook, unused: a metric is a release, and goes through the door like any other."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Flower's hook, unused."""
        return None

    def summary(self) -> None:
        """Flower's hook for its log, which is off: the caller hears of progress instead."""

    def result(self) -> Result:
        """What the run gave so far."""
        return Result(
            vector=self.vector,
            rounds_done=self.plan.first_round + len(self.used),
            granted=dict(self.granted),
            declined=self.declined,
            used=tuple(self.used),
            refused=tuple(self.refused),
        )

    def _fail(self, index: int, reason: str, refused: Mapping[str, str]) -> NoReturn:
        raise RoundFailed(index, "stopped" if self.stopping.is_set() else reason, refused)

    def _address(
        self, grid: Grid, sites: Sequence[str], kind: str, index: int, arrays: ArrayRecord | None
    ) -> list[Message]:
        """One message for each of ``sites`` that is online; the others are noted as offline."""
        nodes = self._online(grid, sites)
        order = ConfigRecord({wire.RUN: self.plan.run, wire.ROUND: index, wire.CONFIG: self.plan.config})
        records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {wire.ORDER: order}
        if arrays is not None:
            records[wire.PARAMETERS] = arrays
        self._sent = {
            site: Message(
                RecordDict(records),
                nodes[site],
                kind,
                # Expired when the round is over: a site that comes back late must not start on it.
                ttl=self.plan.round_timeout_s,
                group_id=str(index),
            )
            for site in sites
            if site in nodes
        }
        self._lost = {site: "offline" for site in sites if site not in nodes}
        return list(self._sent.values())

    def _online(self, grid: Grid, sites: Sequence[str]) -> dict[str, int]:
        """Site to Flower's node id, once all expected sites are there or the wait is over."""
        until = time.monotonic() + self.plan.node_wait_s
        wanted = self._expected & set(sites)
        while True:
            there = [node for node in grid.get_nodes() if node.name in sites]
            nodes = {n.name: n.node_id for n in there if self._lives(n.name, n.online_until)}
            enough = wanted <= nodes.keys() and len(nodes) >= self.plan.min_sites
            if enough or self.stopping.is_set() or not time.monotonic() < until:
                return nodes
            self.stopping.wait(_POLL_S)

    def _lives(self, site: str, online_until: float) -> bool:
        """Whether to ask a site that Flower calls online, which it does until two heartbeats are missing.

        After no reply, not before another heartbeat: else a dead site would cost every round its timeout.
        """
        if site not in self._silent:
            return True
        noticed = self._silent[site]
        if noticed is None:
            self._silent[site] = online_until
        elif online_until > noticed:
            del self._silent[site]
            return True
        return False

    def _match(self, replies: Iterable[Message]) -> list[tuple[str, RecordDict]]:
        """Replies with content by the site that was asked; everything else is noted as refused.

        A reply belongs to the message it answers, not to the source it names: Flower's own error
        replies name node 1. The identifier of a sent message was set when Flower pushed it.
        """
        asked = {message.metadata.message_id: site for site, message in self._sent.items()}
        asked.pop("", None)  # never pushed
        contents: list[tuple[str, RecordDict]] = []
        for reply in replies:
            site = asked.pop(reply.metadata.reply_to_message_id, None)
            if site is None:
                continue  # unsolicited, or a second reply to the same message
            if reply.has_error():
                self._lost[site] = _error_name(reply.error.code)
            elif reply.metadata.src_node_id != self._sent[site].metadata.dst_node_id:
                self._lost[site] = "wrong_source"
            else:
                contents.append((site, reply.content))
        answered = {site for site, _ in contents} | self._lost.keys()
        self._lost.update({site: "no_reply" for site in self._sent if site not in answered})
        return contents

    def _admit(
        self, site: str, index: int, envelope: bytes, vector: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """The vector, once the gate said yes to it.

        Raises:
            _Refused: with the gate's code, or "internal" when the gate failed or spoke nonsense.
        """
        if vector is None:
            raise _Refused("schema")
        vector.setflags(write=False)
        try:
            verdict = self.gate.admit(site, index, envelope, vector)
        except Exception:  # noqa: BLE001 - whatever went wrong in a review, it was not a yes
            raise _Refused("internal") from None
        if verdict is None:
            return vector
        raise _Refused(verdict if isinstance(verdict, str) and _SLUG.fullmatch(verdict) else "internal")


def pack(vector: NDArray[np.float32]) -> ArrayRecord:
    """(p,) float32 as the one flat tensor of a message."""
    return ArrayRecord({wire.FLAT: Array(np.ascontiguousarray(vector))})


def _error_name(code: int) -> str:
    """The refusal code for an Error's number; its text is not read."""
    return _ERRORS.get(code, "failed")


def _read(content: RecordDict, size: int | None) -> tuple[bytes, NDArray[np.float32] | None]:
    """Envelope and, when ``size`` is given, the (size,) float32 vector of a reply.

    Raises:
        _Refused: "schema" or "not_finite". The records are exact: nothing is missing, nothing extra.
    """
    try:
        return _envelope(content, size), None if size is None else _vector(content, size)
    except _Refused:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break is a wrong schema
        raise _Refused("schema") from None


def _envelope(content: RecordDict, size: int | None) -> bytes:
    answer = content[wire.ANSWER]
    records = {wire.ANSWER} if size is None else {wire.ANSWER, wire.PARAMETERS}
    if set(content) != records or not isinstance(answer, ConfigRecord) or list(answer) != [wire.ENVELOPE]:
        raise _Refused("schema")
    envelope = answer[wire.ENVELOPE]
    if not isinstance(envelope, bytes) or not len(envelope) <= wire.MAX_ENVELOPE:
        raise _Refused("schema")
    return envelope


def _vector(content: RecordDict, size: int) -> NDArray[np.float32]:
    parameters = content[wire.PARAMETERS]
    if not isinstance(parameters, ArrayRecord) or list(parameters) != [wire.FLAT]:
        raise _Refused("schema")
    array = parameters[wire.FLAT]
    # Declared first, so that no foreign header makes numpy allocate; what was decoded counts, below.
    declared = (array.dtype, tuple(array.shape)) == ("float32", (size,))
    if not declared or not 4 * size <= len(array.data) <= 4 * size + _NPY_HEADER:
        raise _Refused("schema")
    vector = array.numpy()  # never unpickles
    fault = usable(vector, size)
    if fault is not None:
        raise _Refused(fault)
    return vector
