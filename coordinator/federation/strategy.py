"""The Flower strategy that refuses before it aggregates. Flower's public API only.

A run takes turns: rounds of training, and looks at the model in between, both asked of all sites and both reviewed.

`GatedStrategy` first prices a run (only sites that grant it take part), then lets Flower's own round loop
(`Strategy.start`) send the parameters and collect the replies. Each reply is matched to the message it answers,
checked against the exact schema of `protos.federation.messages`, and passed to the caller's `Gate`, which reviews
envelope and grant. Only admitted updates reach the run's aggregator.

Every undecided case is a refusal with a code: an exception in the gate, an unreadable reply, a verdict that is
neither None nor a short code. Texts from a site are never stored, logged or forwarded.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Final, Literal, NoReturn, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from coordinator.federation.aggregation import Aggregator, FedAvg, Moments, NoAggregateError, vector_problem
from coordinator.federation.canary import Part, PartForm, read_answer
from coordinator.federation.events import NOT_APPROVED_YET
from coordinator.federation.replies import InvalidReplyError, error_name, pack, pack_payload, payload, read
from protos.artifacts.arrays import pack_update
from protos.artifacts.bfloat16 import FLOAT32, PRECISIONS, Numbers
from protos.common.errors import TrainingError
from protos.federation import messages as wire
from protos.federation import round_times
from protos.federation.round_times import RoundTerms
from protos.federation.site_check import MOST, PROBE, SiteCheck

_POLL_S: Final = 0.2
SLUG: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")  # a code
AWAY: Final = frozenset({"offline", "no_reply"})  # codes of sites that may come back
MISSING: Final = "required_site_missing"  # why a round failed
CHECK: Final = "check"
WAITING: Final = "waiting"  # the code of a site whose persons have not approved the run yet


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Something happened in a run: safe to log."""

    stage: Literal["priced", "sent", "done"]
    round_index: int  # the first round when ``stage`` is "priced"
    sites: tuple[str, ...]  # who granted, was asked, was aggregated
    refused: Mapping[str, str]  # site to code; at "sent" those that are not there to be asked


class RunGate(Protocol):
    """The caller's review and ledger. Called from the thread that conducts the run.

    This is a wall: no budget is held, no update is aggregated and no round is closed but by a yes of the gate.
    """

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """Hold the budgets of the sites that sent reservations, if at least so many can be granted.

        Returns:
            Site to code for those that are not granted: with fewer than ``least``, all of them.
        """

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """None admits the update; anything else is the code of its refusal."""

    def looked(self, round_index: int, sums: NDArray[np.float64]) -> None:
        """Take the sum of what the admitted sites said in a look; it is said before the look is done."""

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Make the new global parameters durable. An exception ends the run."""

    def progress(self, event: RoundProgress) -> None:
        """Let whoever follows the run know. An exception ends the run."""

    def checked(self, told: Mapping[str, SiteCheck], lost: Mapping[str, str], aggregated: tuple[str, ...]) -> None:
        """Take what the sites answered that were asked whether they could take part; ``lost``: site to code.

        ``aggregated``: of a canary, the sites of whose parts the aggregator made a model.
        """


@dataclass(frozen=True, slots=True, eq=False)
class RoundModel:
    """What a round starts from and leaves behind."""

    vector: NDArray[np.float32]  # (p,), the global parameters
    moments: Moments = field(default_factory=Moments)  # of the server's optimiser
    packed: bytes = b""  # the vector's file, where it is at hand: it is not made a second time
    elsewhere: bool = False  # the vector is a placeholder of the model's length, which takes no memory


@dataclass(frozen=True, slots=True, eq=False)
class RoundPlan:
    """One federated run. Rounds count from 0; ``first_round`` is 0 or the rounds already done."""

    run: str
    sites: tuple[str, ...]  # the only sites asked, and the order of the sum
    rounds: int  # of the whole run, looks included
    first_round: int
    model: RoundModel  # before ``first_round``
    config: bytes  # the mechanism's public configuration
    min_sites: int  # in each round
    least_grants: int  # at the price
    round_timeout_s: float  # from sending to the last usable reply of a site that trains, or looks at a model
    node_wait_s: float  # how long to wait for expected sites that are offline
    aggregator: Aggregator = field(default_factory=FedAvg)
    roster: Mapping[str, bytes] | None = None  # secure aggregation: site -> enrolled Ed25519 key
    looks: frozenset[int] = frozenset()  # those of the rounds that are looks at the model
    sums: int = 0  # length of what a site says in one
    update_precision: str = FLOAT32  # of the numbers of an update in clear
    lattice: tuple[float, int] | None = None  # secure aggregation: bound and scale of such a sum

    terms: RoundTerms = field(default_factory=RoundTerms)
    longest_step_s: float = round_times.STEP_S  # the same for a price, a plan, and a step in which nobody trains
    silence_s: float = 0.0  # how long a site that is asked may be offline in a round before it counts as gone
    required: tuple[str, ...] = ()  # sites without which no round counts
    checks: str = ""  # not a run: the sites are asked whether they could take part, by a CHECK or by messages.CANARY

    def without_numbers(self) -> RoundPlan:
        """The same plan with the length of its model in the model's place: no run starts from that."""
        nothing = np.broadcast_to(np.float32(0), self.model.vector.shape)
        return replace(self, model=RoundModel(nothing, elsewhere=True))

    @property
    def step_timeout_s(self) -> float:
        """From sending to the last usable reply of a site that does not train."""
        return min(self.longest_step_s, self.round_timeout_s)

    def size_of(self, index: int) -> int:
        """The length of what a site says in a round."""
        return self.sums if index in self.looks else int(self.model.vector.size)

    def precision_of(self, index: int) -> str:
        """The precision of what a site says in a round; of a look's sums it is always the full one."""
        return FLOAT32 if index in self.looks else self.update_precision

    def __post_init__(self) -> None:
        """Refuse a plan that cannot be carried out as written, all problems at once."""
        wrong = [
            name
            for name, right in {
                "run": bool(self.run) and len(self.run) <= wire.MAX_RUN,
                "sites": bool(self.sites) and len(set(self.sites)) == len(self.sites) and all(self.sites),
                "rounds": 0 <= self.first_round < self.rounds,
                "vector": self.model.vector.size > 0
                and vector_problem(self.model.vector, self.model.vector.size) is None,
                "config": len(self.config) <= wire.MAX_CONFIG,
                "min_sites": 1 <= self.min_sites <= len(self.sites),
                "least_grants": self.min_sites <= self.least_grants <= len(self.sites),
                "round_timeout_s": math.isfinite(self.round_timeout_s) and self.round_timeout_s > 0,
                "looks": self.looks <= set(range(1, self.rounds)),
                "lattice": (self.lattice is not None) is bool(self.roster is not None and self.looks),
                "update_precision": self.update_precision in PRECISIONS,
                "sums": (0 if not self.looks else 1) <= self.sums <= wire.MAX_SUMS,
                "node_wait_s": math.isfinite(self.node_wait_s) and self.node_wait_s >= 0,
                "checks": self.checks in ("", CHECK, wire.CANARY),
                "silence_s": math.isfinite(self.silence_s) and self.silence_s >= 0,
                "required": set(self.required) <= set(self.sites),
                "longest_step_s": math.isfinite(self.longest_step_s) and self.longest_step_s > 0,
            }.items()
            if not right
        ]
        if wrong:
            raise ValueError(f"run plan: these do not make sense: {', '.join(wrong)}")


class RoundFailedError(TrainingError):
    """A round (or the pricing, ``round_index`` -1) has too few usable sites; nothing was aggregated."""

    def __init__(self, round_index: int, reason: str, refused: Mapping[str, str]) -> None:
        """Keep the codes; the text holds nothing else."""
        where = "pricing" if round_index < 0 else f"round {round_index}"
        codes = ", ".join(f"{site}: {code}" for site, code in sorted(refused.items())) or "none refused"
        super().__init__(f"{where}: {reason} ({codes})")
        self.round_index, self.reason, self.refused = round_index, reason, dict(refused)


@dataclass(slots=True, eq=False)
class GatedStrategy(Strategy):
    """Price, train, review, aggregate. One object conducts one run."""

    plan: RoundPlan
    gate: RunGate
    stopping: threading.Event = field(default_factory=threading.Event)
    now: Callable[[], float] = time.time  # for the day by which persons have to approve a run
    start_from: InitVar[RoundModel | None] = None  # None: the plan's model
    model: RoundModel = field(init=False)
    granted: dict[str, bytes] = field(init=False, default_factory=dict)
    declined: dict[str, str] = field(init=False, default_factory=dict)
    _sent: dict[str, Message] = field(init=False, default_factory=dict)
    _carried: ArrayRecord = field(init=False, default_factory=ArrayRecord)  # the model in the messages that were sent
    _lost: dict[str, str] = field(init=False, default_factory=dict)  # granted, but not sent to this time
    _expected: set[str] = field(init=False, default_factory=set)  # answered last time: worth waiting for
    # Sites that gave no reply, with Flower's "online until" as it was when that was noticed.
    _silent: dict[str, float | None] = field(init=False, default_factory=dict)

    def __post_init__(self, start_from: RoundModel | None) -> None:
        """Start from the plan's parameters, or those that were taken out of it.

        Raises:
            ValueError: there are none.
        """
        self.model = start_from or self.plan.model
        if self.model.elsewhere:
            raise ValueError("a run needs the numbers that it starts from")
        self._expected = set(self.plan.sites)

    def price(self, grid: Grid) -> None:
        """Ask every listed site for its sealed reservation; those whose budgets are then held take part.

        Where persons approve runs, no site is asked for a price before all have decided, or their time is over: a
        price is held from the moment when it is asked for. Whoever has not approved by then is not asked.

        Raises:
            RoundFailedError: fewer than ``min_sites`` grant it, or persons at a site may still approve it.
        """
        undecided = self._undecided(grid)
        sites = [site for site in self.plan.sites if site not in undecided]
        for site, content in self._ask(grid, sites, wire.PRICE):
            try:
                self.granted[site], _ = read(content, None)
            except InvalidReplyError as refusal:
                self._lost[site] = str(refusal)
        self._lost |= undecided
        least, away = self.plan.least_grants, {s for s, code in self._lost.items() if code in AWAY}
        lacking = [site for site in self.plan.required if site not in self.granted]
        if lacking:  # nobody is asked to hold a price for a run that cannot begin
            self.declined = dict(self._lost)
            self.gate.progress(RoundProgress("priced", self.plan.first_round, (), self.declined))
            self._fail(-1, MISSING, self.declined)
        if len(self.granted) >= least or not len(self.granted) + len(away) >= least:  # else: once they are back
            self._lost |= self._reserve(least)
            self.granted = {site: sealed for site, sealed in self.granted.items() if site not in self._lost}
        self.declined = dict(self._lost)
        self._expected = set(self.granted)
        self.gate.progress(RoundProgress("priced", self.plan.first_round, tuple(self.granted), self.declined))
        if not len(self.granted) >= least:
            self._fail(-1, "too_few_grants", self.declined)
        self._require(-1, self.granted)

    def check(self, grid: Grid) -> None:
        """Ask every site at once whether it could take part. Nothing is priced, held or trained on patients.

        In a canary each gets a model and sends the numbers of a round on made patients; they are aggregated here, and
        go nowhere.
        """
        plan, start = self.plan, self.model.vector
        form = PartForm.of(plan.config, start.size, plan.update_precision) if plan.checks == wire.CANARY else None
        messages = self._address(grid, plan.sites, wire.CHECK, 0, None)
        # pieces that are alike are carried once
        carried = pack_payload(os.urandom(PROBE) if form is None else start.astype("<f4", copy=False))
        for message in messages:
            message.content[wire.PAYLOAD] = carried
        told: dict[str, SiteCheck] = {}
        parts: dict[str, Part] = {}
        for site, content in self._match(grid.send_and_receive(messages, timeout=plan.round_timeout_s)):
            try:
                report, numbers = read_answer(payload(content, MOST + max(PROBE, 8 * start.size)))
                content.clear()
                if form is not None and (numbers or report.could):  # none where the site says why
                    parts[site] = form.read(numbers)
                told[site] = report
            except InvalidReplyError as refusal:
                self._lost[site] = str(refusal)
        if form is None:
            self.gate.checked(told, dict(self._lost), ())
            return
        for site in [site for site, code in self._lost.items() if code == "malformed"]:
            self._lost[site] = "no_canary"
        named = [(site, parts[site]) for site in plan.sites if site in parts]
        made = form.is_aggregated(named, start, plan.aggregator)
        self.gate.checked(told, dict(self._lost), tuple(site for site, _ in named) if made else ())

    def _undecided(self, grid: Grid) -> dict[str, str]:
        """The sites whose persons have not approved the run in time, or have refused it, and the code of each.

        An agent of a version before runs were approved does not know the question, and has no policy that wants it.

        Raises:
            RoundFailedError: there is still time to.
        """
        if not self.plan.terms.approve_by or self.plan.first_round:
            return {}
        self._ask(grid, self.plan.sites, wire.PLAN)
        found = {site: code for site, code in self._lost.items() if code not in AWAY and code != "message_type"}
        waiting = {site: code for site, code in found.items() if code == WAITING}
        if waiting and self.now() < self.plan.terms.approve_by:
            self._fail(-1, NOT_APPROVED_YET, waiting)
        return found

    def _ask(self, grid: Grid, sites: Sequence[str], kind: str) -> list[tuple[str, RecordDict]]:
        """The contents of what ``sites`` answer to a question for which nobody trains; all else is noted."""
        messages = self._address(grid, sites, kind, 0, None)
        return self._match(grid.send_and_receive(messages, timeout=self.plan.step_timeout_s))

    def _reserve(self, least: int) -> dict[str, str]:
        """Site to code, for those whose budget the coordinator's ledger does not hold; all if it cannot tell."""
        try:
            refused = self.gate.reserve(dict(self.granted), least)
            return {site: code if SLUG.fullmatch(code) else "internal" for site, code in refused.items()}
        except Exception:  # noqa: BLE001 - whatever went wrong in the ledger, it was not a yes
            return dict.fromkeys(self.granted, "internal")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Flower's hook: one message for each granted site that is online, after a bounded wait.

        Raises:
            RoundFailedError: fewer than ``min_sites`` of them are.
        """
        del config  # the plan's configuration is the only one
        self._carried = arrays
        index = self.plan.first_round + server_round - 1
        asked = tuple(site for site in self.plan.sites if site in self.granted)
        kind = wire.EVALUATE if index in self.plan.looks else wire.TRAIN
        messages = self._address(grid, asked, kind, index, arrays)
        if not len(messages) >= self.plan.min_sites:
            self._fail(index, "too_few_sites_online", self._lost)
        self._require(index, self._sent)
        self.gate.progress(RoundProgress("sent", index, tuple(self._sent), dict(self._lost)))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Flower's hook: review every reply, then the uniform mean of the admitted updates; a look leaves the model.

        Raises:
            RoundFailedError: fewer than ``min_sites`` updates are admitted.
        """
        index = self.plan.first_round + server_round - 1
        self._carried.clear()  # Flower holds it until the next one; its numbers are the model's, and many
        admitted: dict[str, Numbers] = {}
        answered: set[str] = set()
        for site, content in self._match(replies):
            answered.add(site)
            try:
                admitted[site] = self._admit(site, index, content)
            except InvalidReplyError as refusal:
                self._lost[site] = str(refusal)
        self._expected = answered
        refused = dict(self._lost)
        self._silent |= {site: None for site, code in refused.items() if code == "no_reply"}
        if not len(admitted) >= self.plan.min_sites:
            self._fail(index, "too_few_updates", refused)
        self._require(index, admitted)
        if index in self.plan.looks:
            self.gate.looked(index, np.sum([v.astype(np.float64) for v in admitted.values()], axis=0))
            self.close(index, self.model, tuple(s for s in self.plan.sites if s in admitted), refused)
            return pack(self.model.vector), None
        try:
            vector, moments, used = self.plan.aggregator.step(
                self.model.vector, [(s, admitted[s]) for s in self.plan.sites if s in admitted], self.model.moments
            )
        except NoAggregateError:  # too few for this strategy, or no finite result
            self._fail(index, "no_aggregate", refused)
        refused |= dict.fromkeys(admitted.keys() - set(used), "not_selected")  # by Krum
        admitted.clear()  # before the new model is written down: each is as large
        self.close(index, RoundModel(vector, moments), used, refused)
        return pack(vector), None

    def close(self, index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]) -> None:
        """A round is over: durable first, then known."""
        self.gate.round_done(index, model, used, refused)
        self.model = model
        self.gate.progress(RoundProgress("done", index, used, refused))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Flower's hook, unused: a look is a release, and is a round of its own."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Flower's hook, unused."""
        return None

    def summary(self) -> None:
        """Flower's hook for its log, which is off: the caller hears of progress instead."""

    def _require(self, index: int, there: Collection[str]) -> None:
        """Go on only with every site that the job requires.

        Raises:
            RoundFailedError: one of them is not ``there``.
        """
        if not set(self.plan.required) <= set(there):
            self._fail(index, MISSING, self._lost)

    def _fail(self, index: int, reason: str, refused: Mapping[str, str]) -> NoReturn:
        raise RoundFailedError(index, "stopped" if self.stopping.is_set() else reason, refused)

    def _address(
        self, grid: Grid, sites: Sequence[str], kind: str, index: int, arrays: ArrayRecord | None
    ) -> list[Message]:
        """One message for each of ``sites`` that is online; the others are noted as offline."""
        nodes = self._online(grid, sites)
        order = ConfigRecord({wire.RUN: self.plan.run, wire.ROUND: index, wire.CONFIG: self.plan.config})
        order.update(self.plan.terms.order())
        if self.plan.checks == wire.CANARY:
            order[wire.STEP] = wire.CANARY
        records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {wire.ORDER: order}
        if arrays is not None:
            records[wire.PARAMETERS] = arrays
        self._sent = {
            site: Message(
                RecordDict(records),
                nodes[site],
                kind,
                # Expired when the round is over: a site that comes back late must not start on it.
                ttl=self.plan.round_timeout_s
                if kind in (wire.TRAIN, wire.EVALUATE, wire.CHECK)
                else self.plan.step_timeout_s,
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
            undecided = {node.name for node in there} - nodes.keys()  # back, or not yet called offline: a beat tells
            enough = wanted <= nodes.keys() and len(nodes) >= self.plan.min_sites and not undecided
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
                self._lost[site] = error_name(reply.error.code)
            elif reply.metadata.src_node_id != self._sent[site].metadata.dst_node_id:
                self._lost[site] = "wrong_source"
            else:
                contents.append((site, reply.content))
        answered = {site for site, _ in contents} | self._lost.keys()
        self._lost.update({site: "no_reply" for site in self._sent if site not in answered})
        return contents

    def _admit(self, site: str, index: int, content: RecordDict) -> Numbers:
        """The numbers (p,) of a reply as they came, once the gate said yes to them.

        Raises:
            InvalidReplyError: it cannot be read; else with the gate's code, or "internal" when the gate failed or
            spoke nonsense.
        """
        envelope, numbers = read(content, self.plan.size_of(index), self.plan.precision_of(index))
        content.clear()  # the numbers are all that is needed of it, and they may be many
        if numbers is None:
            raise InvalidReplyError("schema")
        try:
            verdict = self.gate.admit(site, index, envelope, pack_update(numbers))
        except Exception:  # noqa: BLE001 - whatever went wrong in a review, it was not a yes
            raise InvalidReplyError("internal") from None
        if verdict is not None:
            raise InvalidReplyError(verdict if isinstance(verdict, str) and SLUG.fullmatch(verdict) else "internal")
        numbers.setflags(write=False)
        return numbers
