"""Federated rounds in which the coordinator learns the sum of the sites' updates and no single one.

The protocol is `protos.secagg.member`'s, five exchanges a round; here it travels as Flower messages, and each masked
vector goes through the same gate as any release before it counts. A round that fails after the sites have begun it
ends the run: no site takes part twice in one sum (`protos.secagg.member`, last paragraph).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from coordinator.federation.aggregation import Advancing, NoAggregateError
from coordinator.federation.replies import pack_payload
from coordinator.federation.strategy import GatedStrategy, RoundModel, RoundProgress
from protos.artifacts.arrays import pack_vector
from protos.artifacts.strict_safetensors import pack_ring
from protos.federation import messages
from protos.secagg import round
from protos.secagg.messages import SecAggError, SumStep
from protos.secagg.ring import Ring
from protos.secagg.server import Server
from protos.secagg.session import Quorum, SumSession


@dataclass(slots=True, eq=False)
class SecureStrategy(GatedStrategy):
    """As `GatedStrategy`, with sums in place of updates; the plan names every site's enrolled key."""

    def start(self, grid: Grid, *_: Any, num_rounds: int = 1, **__: Any) -> Any:
        """In place of Flower's loop: ``num_rounds`` rounds, five exchanges each.

        Raises:
            RoundFailedError: too few sites answered a step, or what they sent could not be unmasked.
        """
        for number in range(1, num_rounds + 1):
            self._round(grid, self.plan.first_round + number - 1)

    def _round(self, grid: Grid, index: int) -> None:
        self._lost = {}
        asked = self._present(grid, index)
        session = self._session(asked, index)
        hub = Server(session)
        self.gate.progress(RoundProgress("sent", index, asked, dict(self._lost)))
        try:
            for step in SumStep:
                self._step(grid, index, hub, step)
            total = hub.aggregate()
        except SecAggError:
            self._fail(index, "not_unmasked", self._without(hub))
        used = tuple(site for site in self.plan.sites if site in total.survivors)
        if not set(self.plan.required) <= set(used):
            self._fail(index, "required_site_lost", self._without(hub))  # for good: no site is in one sum twice
        self._expected = set(total.survivors)
        if index in self.plan.looks:
            self.gate.looked(index, session.params.ring.decode(total.lattice))
            self.close(index, self.model, used, self._without(hub))
            return
        delta = session.params.ring.decode(total.lattice) / len(total.survivors)
        aggregator = self.plan.aggregator
        assert isinstance(aggregator, Advancing), "the job was checked"
        try:
            vector, moments = aggregator.advance(self.model.vector, delta, self.model.moments)
        except NoAggregateError:
            self._fail(index, "no_aggregate", self._without(hub))
        self.close(index, RoundModel(vector, moments), used, self._without(hub))

    def _present(self, grid: Grid, index: int) -> tuple[str, ...]:
        """The granted sites that are online: the members of this round.

        Raises:
            RoundFailedError: fewer than ``min_sites``; nobody has begun the round.
        """
        granted = [site for site in self.plan.sites if site in self.granted]
        nodes = self._online(grid, granted)
        self._lost = {site: "offline" for site in granted if site not in nodes}
        asked = tuple(site for site in granted if site in nodes)
        if not len(asked) >= self.plan.min_sites:
            self._fail(index, "too_few_sites_online", self._lost)
        self._require(index, asked)
        return asked

    def _session(self, asked: tuple[str, ...], index: int) -> SumSession:
        config = json.loads(self.plan.config)
        quorum = Quorum.smallest(len(asked), round.CORRUPT, config["honest"])
        terms = round.RoundParams(self.plan.run, index, self.plan.config, self._purpose(index))
        assert self.plan.roster is not None, "a plan of a secure run has the sites' keys"
        roster = {site: self.plan.roster[site] for site in asked}
        look = None
        if index in self.plan.looks:
            assert self.plan.lattice is not None, "a plan with looks in secret sums has their lattice"
            look = Ring(self.plan.sums, round.LOOK_BITS, *self.plan.lattice)
        return round.session(terms, self.model.vector, roster, quorum, look)

    def _purpose(self, index: int) -> str:
        """What the sites are told that a sum is for."""
        return round.LOOK if index in self.plan.looks else self.plan.aggregator.to_json()

    def _without(self, hub: Server) -> dict[str, str]:
        """Site to code of those that are not in the sum; what a site is blamed for in words stays here."""
        return dict.fromkeys(hub.dropped, "masked") | self._lost

    def _step(self, grid: Grid, index: int, hub: Server, step: SumStep) -> None:
        requests = dict(hub.requests())
        if step is SumStep.ADVERTISE:
            start, strategy = pack_vector(self.model.vector), self._purpose(index)
            requests = dict.fromkeys(requests, round.RoundSetup(dict(hub.session.roster), strategy, start).encode())
        for site, payload in self._exchange(grid, index, step, requests).items():
            message = payload
            if step is SumStep.MASK:
                try:
                    envelope, message = round.unframe(payload)
                except round.SecAggSetupError:  # one site's nonsense is that site's trouble
                    self._lost[site] = "schema"
                    continue
                code = self._reviewed(site, index, envelope, hub, message)
                if code is not None:
                    self._lost[site] = code
                    continue
            hub.receive(site, message)
        hub.advance()

    def _reviewed(self, site: str, index: int, envelope: bytes, hub: Server, message: bytes) -> str | None:
        """A masked vector goes through the gate like any update: its envelope, its grant, its form."""
        try:
            artifact = pack_ring(round.masked_vector(hub.session, message))
        except ValueError:
            return "schema"
        try:
            return self.gate.admit(site, index, envelope, artifact)
        except Exception:  # noqa: BLE001 - whatever went wrong in a review, it was not a yes
            return "internal"

    def _exchange(self, grid: Grid, index: int, step: SumStep, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """One message to each site, and what came back in time; who is silent is noted."""
        nodes = {node.name: node.node_id for node in grid.get_nodes()}
        name = step.name.lower()
        # sites train for their masked vectors alone
        seconds = self.plan.round_timeout_s if step is SumStep.MASK else self.plan.step_timeout_s
        order = ConfigRecord(
            {
                messages.RUN: self.plan.run,
                messages.ROUND: index,
                messages.CONFIG: self.plan.config,
                messages.STEP: name,
                **self.plan.terms.order(),
            }
        )
        self._sent = {
            site: Message(
                RecordDict({messages.ORDER: order, messages.PAYLOAD: pack_payload(payload)}),
                nodes[site],
                messages.SECURE,
                ttl=seconds,
                group_id=f"{index}-{name}",
            )
            for site, payload in requests.items()
            if site in nodes
        }
        lost, self._lost = self._lost, {}
        replies = grid.send_and_receive(list(self._sent.values()), timeout=seconds)
        found = {}
        for site, content in self._match(replies):
            payload = _payload(content)
            if payload is None:
                self._lost[site] = "schema"
            else:
                found[site] = payload
        self._lost = lost | self._lost
        return found


def _payload(content: RecordDict) -> bytes | None:
    """The bytes of a reply; None for anything that is not exactly that."""
    try:
        record = content[messages.PAYLOAD]
        if (
            set(content) != {messages.PAYLOAD}
            or not isinstance(record, ArrayRecord)
            or list(record) != [messages.DATA]
        ):
            return None
        array = record[messages.DATA]
        length = int(array.shape[0])
        declared = array.dtype == "uint8" and len(array.shape) == 1 and 0 <= length <= messages.MAX_PAYLOAD
        if not declared or not length <= len(array.data) <= length + 4096:
            return None
        values = array.numpy()  # never unpickles
        return values.tobytes() if values.dtype == np.uint8 and values.shape == (length,) else None
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break is a wrong schema
        return None
