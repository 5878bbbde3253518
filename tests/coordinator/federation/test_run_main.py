"""One process for each run: what it is given, what is believed of what it says, and what its death costs."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.event_log import open_log
from coordinator.federation import run_process
from coordinator.federation.aggregation import FedAdam, Moments
from coordinator.federation.events import EventStream, RunEvent, RunQueue
from coordinator.federation.grid import LoopbackEndpoint
from coordinator.federation.job import Job
from coordinator.federation.run_controller import RunContext, RunController
from coordinator.federation.run_messages import TO_RUN, Pipe, RunFrameError, RunMessage, RunSpec, from_run
from coordinator.federation.run_process import RunLostError, RunProcess, RunRequestHandler
from coordinator.federation.strategy import GatedStrategy, RoundFailedError, RoundModel, RoundPlan, RoundProgress
from coordinator.federation.superlink_listeners import KEY_HEADER, PrivateGate
from protos.artifacts.arrays import pack_update, pack_vector
from protos.artifacts.bfloat16 import BFLOAT16, rounded
from protos.artifacts.strict_safetensors import pack_ring
from protos.federation.site_check import SiteCheck
from tests.support.federation_world import Federation as Books
from tests.support.federation_world import Site, vector
from tests.support.flower.federation import ADD, SITES, FlowerFederation
from tests.support.ledger_world import DP
from tests.support.small_tasks import classification, plain_config

START = np.linspace(-1.0, 1.0, 10, dtype=np.float32)
PLAN = RoundPlan(
    run="run-1",
    sites=SITES,
    rounds=2,
    first_round=0,
    model=RoundModel(START),
    config=b"{}",
    min_sites=2,
    least_grants=2,
    round_timeout_s=5.0,
    node_wait_s=1.0,
)
WAY = LoopbackEndpoint("127.0.0.1:9", "k" * 64)
NONE = Moments(1).to_bytes()


@dataclass
class Gate:
    """Says yes and remembers what it was asked; ``breaks`` names what fails."""

    breaks: str = ""
    asked: list[Any] = field(default_factory=list)
    models: list[RoundModel] = field(default_factory=list)
    events: list[RoundProgress] = field(default_factory=list)

    def _hear(self, what: str, *about: Any) -> None:
        self.asked.append((what, *about))
        if what == self.breaks:
            raise OSError("no space left on device")

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        self._hear("reserve", dict(sealed), least)
        return {"west": "budget"}

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        self._hear("admit", site, round_index, envelope, artifact)
        return "a text, not a code" if envelope == b"odd" else None

    def looked(self, round_index: int, sums: np.ndarray) -> None:
        self._hear("looked", round_index, sums.tolist())

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        self._hear("done", round_index, used, dict(refused))
        self.models.append(model)

    def checked(self, told: Mapping[str, SiteCheck], lost: Mapping[str, str], aggregated: tuple[str, ...]) -> None:
        self._hear("checked", dict(told), dict(lost), aggregated)

    def progress(self, event: RoundProgress) -> None:
        self._hear("progress", event.stage)
        self.events.append(event)


def context(plan: RoundPlan = PLAN, breaks: str = "") -> tuple[RunRequestHandler, Gate]:
    """A desk whose gate remembers."""
    gate = Gate(breaks)
    return RunRequestHandler(plan, gate), gate


def reserve(**sealed: bytes) -> RunMessage:
    sizes = [[site, len(envelope)] for site, envelope in sealed.items()]
    return RunMessage("reserve", {"least": 2, "sealed": sizes}, b"".join(sealed.values()))


def admit(site: str, index: int = 0, artifact: bytes | None = None, envelope: bytes = b"e") -> RunMessage:
    return RunMessage("admit", {"site": site, "round": index}, envelope, artifact or pack_vector(START))


def done(index: int, *used: str, vector: bytes | None = None, moments: bytes = NONE, **refused: str) -> RunMessage:
    text = {"round": index, "used": list(used), "refused": refused}
    return RunMessage("done", text, vector or pack_vector(START), moments)


def priced(plan: RoundPlan = PLAN, breaks: str = "") -> tuple[RunRequestHandler, Gate]:
    """A desk after the price: north and south are granted."""
    made, gate = context(plan)
    made.take(reserve(north=b"n", south=b"ss", west=b""))
    gate.breaks = breaks
    return made, gate


# ---------------------------------------------------------------- frames


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe, socket.socket]]:
    """The coordinator's end, the run's end, and the socket under the latter."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours, from_run(PLAN)), Pipe(theirs, TO_RUN), theirs


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, first_round=1, aggregator=FedAdam(0.1, 0.9, 0.99, 1e-3)),
        replace(PLAN, config=bytes(range(256)), roster={site: bytes([i] * 32) for i, site in enumerate(SITES)}),
        replace(PLAN, model=RoundModel(START, Moments(3, np.ones(10), np.full(10, 0.1)))),
        replace(PLAN, looks=frozenset({1}), sums=3),
        replace(PLAN, update_precision=BFLOAT16),
        replace(PLAN, checks="canary"),
        replace(PLAN, looks=frozenset({1}), sums=3, lattice=(64.0, 18), roster=dict.fromkeys(SITES, bytes(32))),
    ],
)
def test_a_plan_arrives_bit_for_bit(pipes: tuple[Pipe, Pipe, socket.socket], plan: RoundPlan) -> None:
    ours, theirs, _ = pipes
    RunSpec(plan, "token").send(ours)
    order = RunSpec.of(theirs.receive())
    assert order.token == "token"
    assert order.plan.model.vector.tobytes() == plan.model.vector.tobytes()
    assert order.plan.model.moments.to_bytes() == plan.model.moments.to_bytes()
    same = replace(order.plan, model=plan.model)
    assert all(getattr(same, name) == getattr(plan, name) for name in RoundPlan.__slots__)


def test_who_has_started_a_run_does_not_keep_its_model() -> None:
    order = RunSpec(PLAN, "token")
    model = order.take_model()
    assert model.vector is PLAN.model.vector
    left = order.plan.model.vector
    assert left.shape == model.vector.shape  # by which what a site sends is measured
    assert left.strides == (0,), "it takes no memory"
    assert (order.plan.size_of(0), from_run(order.plan)) == (PLAN.size_of(0), from_run(PLAN))
    with pytest.raises(ValueError, match="needs the numbers"):
        GatedStrategy(order.plan, Gate())
    assert GatedStrategy(order.plan, Gate(), start_from=model).model is model


def test_a_plan_is_sent_once_and_its_model_let_go_of(pipes: tuple[Pipe, Pipe, socket.socket]) -> None:
    ours, _, _ = pipes
    order = RunSpec(replace(PLAN, model=RoundModel(START.copy())), "token")
    gone = weakref.ref(order.plan.model.vector)
    order.send(ours)
    assert gone() is None
    with pytest.raises(ValueError, match="was taken"):
        order.send(ours)


def raw(word: bytes, text: bytes = b"{}", sizes: tuple[int, int] = (0, 0)) -> bytes:
    return struct.pack(">8sQQQ", word, len(text), *sizes) + text


@pytest.mark.parametrize(
    "said",
    [
        raw(b"start"),  # what only the coordinator says
        raw(b"\xff\xff"),
        raw(b"over", b"[]"),
        raw(b"over", b"{" + b'"a":' * 100_000),
        raw(b"fault", b'{"kind":"a","kind":"b"}'),
        raw(b"fault", b'{"kind":NaN}'),
        raw(b"over", sizes=(1, 0)),
        raw(b"done", sizes=(4 * 10 + 4097, 0)),
        raw(b"admit", sizes=(0, 1 << 63)),
        struct.pack(">8sQQQ", b"over", (4 << 20) + 1, 0, 0),
    ],
)
def test_what_is_not_a_frame_is_refused_before_its_bytes_are_waited_for(
    pipes: tuple[Pipe, Pipe, socket.socket], said: bytes
) -> None:
    ours, _, end = pipes
    threading.Thread(target=end.sendall, args=(said,), daemon=True).start()
    began = time.monotonic()
    with pytest.raises(RunFrameError):
        ours.receive()
    assert time.monotonic() - began < 200.0


def test_a_frame_that_breaks_off_is_refused(pipes: tuple[Pipe, Pipe, socket.socket]) -> None:
    ours, _, end = pipes
    end.sendall(raw(b"done", sizes=(40, 0)) + bytes(39))
    end.shutdown(socket.SHUT_WR)
    with pytest.raises(RunFrameError, match="the end"):
        ours.receive()


# ---------------------------------------------------------------- what is believed


def test_an_honest_run_is_answered_and_its_result_is_what_the_gate_said() -> None:
    made, gate = priced()
    moved = (START + 1).astype(np.float32)
    text = {"stage": "priced", "round": 0, "sites": ["north", "south"], "refused": {"west": "budget"}}
    assert made.take(RunMessage("progress", text)) == ("answer", {})
    for index in range(2):
        assert made.take(admit("north", index)) == ("answer", {"code": None})
        assert made.take(admit("south", index, envelope=b"odd")) == ("answer", {"code": "internal"})
        assert made.take(RunMessage("progress", {**text, "stage": "sent", "round": index})) == ("answer", {})
        if index == 0:
            with pytest.raises(RunFrameError):
                made.take(done(0, "north"))  # the plan wants two
            made, gate = priced(replace(PLAN, min_sites=1))
            made.take(RunMessage("progress", text))
            made.take(admit("north"))
        assert made.take(done(index, "north", vector=pack_vector(moved), south="internal")) == ("answer", {})
    assert made.take(RunMessage("over", {})) is None
    assert (made._granted, made.index) == ({"north": b"n", "south": b"ss"}, 2)
    assert (gate.events[0].stage, gate.events[0].refused) == ("priced", {"west": "budget"})
    closed = [said[1:] for said in gate.asked if said[0] == "done"]
    assert closed == [(index, ("north",), {"south": "internal"}) for index in range(2)]
    assert [model.vector.tobytes() for model in gate.models] == [moved.tobytes()] * 2
    assert gate.asked[0] == ("reserve", {"north": b"n", "south": b"ss", "west": b""}, 2)


NAN = START.copy()
NAN[3] = np.nan


def safetensors(vector: NDArray[Any]) -> bytes:
    """A vector's file with values that `pack_vector` would refuse."""
    return pack_vector(START)[: -4 * START.size] + vector.tobytes()


@pytest.mark.parametrize(
    "frame",
    [
        reserve(north=b"n"),  # a second time
        RunMessage("reserve", {"least": 1, "sealed": []}),
        admit("west"),  # declined
        admit("east"),
        admit("north", 1),
        admit("north", artifact=pack_vector(START[:-1])),
        admit("north", artifact=safetensors(NAN)),
        admit("north", artifact=pack_vector(START) + b"\0"),
        admit("north", artifact=pack_update(rounded(START))),  # in a run of float32
        admit("north", artifact=pack_ring(np.arange(10, dtype=np.uint32))),
        RunMessage("admit", {"site": ["north"], "round": 0}, b"e", pack_vector(START)),
        RunMessage("admit", {"site": "north", "round": False}, b"e", pack_vector(START)),
        RunMessage("admit", {"site": "north", "round": 0, "and": 1}, b"e", pack_vector(START)),
        done(0, "north", "south"),  # never admitted
        done(0),
        RunMessage("over", {}),
        RunMessage("failed", {"round": 2, "reason": "few", "refused": {}}),
        RunMessage("failed", {"round": 0, "reason": "patient 4711", "refused": {}}),
        RunMessage("failed", {"round": 0, "reason": "few", "refused": {"east": "few"}}),
        RunMessage("failed", {"round": 0, "reason": "few", "refused": {"north": "patient 4711"}}),
        RunMessage("progress", {"stage": "odd", "round": 0, "sites": [], "refused": {}}),
        RunMessage("progress", {"stage": "sent", "round": 0, "sites": ["north", "north"], "refused": {}}),
        RunMessage("progress", {"stage": "sent", "round": 0.0, "sites": [], "refused": {}}),
        RunMessage("progress", {"stage": "sent", "round": 0, "sites": [], "refused": []}),
        RunMessage("fault", {"kind": "patient 4711"}),
    ],
)
def test_nonsense_of_a_runs_process_is_refused_and_never_reaches_the_gate(frame: RunMessage) -> None:
    made, gate = priced()
    before = list(gate.asked)
    with pytest.raises(RunFrameError):
        made.take(frame)
    assert gate.asked == before


def test_what_a_check_found_is_passed_on() -> None:
    made, gate = context(replace(PLAN, checks="canary"))
    one = SiteCheck("0.1.0", "none", "cpu", 1.5, 2.0)
    told = {"told": {"north": asdict(one)}, "lost": {"west": "size"}, "aggregated": ["north"]}
    made.take(RunMessage("checked", json.loads(json.dumps(told))))
    assert gate.asked == [("checked", {"north": one}, {"west": "size"}, ("north",))]
    with pytest.raises(RunFrameError, match="not asked"):
        context()[0].take(RunMessage("checked", told))


@pytest.mark.parametrize("checks", ["check", "canary"])
@pytest.mark.parametrize(
    "frame",
    [
        RunMessage("reserve", {"least": 2, "sealed": [["north", 1]]}, b"n"),
        RunMessage("admit", {"site": "north", "round": 0}, b"e", pack_vector(START)),
        RunMessage("looked", {"round": 0}),
        RunMessage("done", {"round": 0, "used": ["north"], "refused": {}}, pack_vector(START), NONE),
        RunMessage("progress", {"stage": "done", "round": 0, "sites": [], "refused": {}}),
        RunMessage("checked", {"told": {}, "lost": {}, "aggregated": ["north"]}),
    ],
    ids=lambda frame: frame.word,
)
def test_the_process_of_a_check_has_nothing_held_admitted_or_closed(frame: RunMessage, checks: str) -> None:
    """Nor is a site aggregated that sent no report."""
    made, gate = context(replace(PLAN, checks=checks))
    with pytest.raises(RunFrameError):
        made.take(frame)
    assert gate.asked == []


@pytest.mark.parametrize(
    "sealed",
    [
        [["north", 2]],
        [["north", 0]],
        [["north", -1], ["south", 2]],
        [["north", 1], ["north", 0]],
        [["north"]],
        ["n"],
        {},
    ],
)
def test_reservations_that_do_not_add_up_are_refused(sealed: object) -> None:
    made, gate = context()
    with pytest.raises(RunFrameError):
        made.take(RunMessage("reserve", {"least": 2, "sealed": sealed}, b"n"))
    assert gate.asked == []


@pytest.mark.parametrize(
    "frame",
    [
        done(0, "north", "south", "west"),
        done(0, "north", "north"),
        done(1, "north", "south"),
        done(0, "north", "south", vector=pack_vector(START[:-1])),
        done(0, "north", "south", vector=safetensors(NAN)),
        done(0, "north", "south", moments=Moments(1, np.ones(9), np.ones(9)).to_bytes()),
        done(0, "north", "south", moments=b""),
        done(0, "north", "south", west="patient 4711"),
        admit("north"),  # asked before
    ],
)
def test_a_round_is_closed_only_as_it_was_reviewed(frame: RunMessage) -> None:
    made, gate = priced()
    for site in ("north", "south"):
        made.take(admit(site))
    before = list(gate.asked)
    with pytest.raises(RunFrameError):
        made.take(frame)
    assert gate.asked == before


def test_an_update_of_one_round_does_not_count_in_the_next() -> None:
    made, _ = priced()
    for site in ("north", "south"):
        made.take(admit(site))
    made.take(done(0, "north", "south"))
    with pytest.raises(RunFrameError):
        made.take(done(1, "north", "south"))


LOOKS = replace(PLAN, rounds=3, looks=frozenset({1}), sums=3)


def looked(index: int, *sums: float) -> RunMessage:
    return RunMessage("looked", {"round": index}, np.array(sums, "<f8").tobytes())


def in_a_look() -> tuple[RunRequestHandler, Gate]:
    """The second turn is a look, and north and south were admitted in it."""
    made, gate = priced(LOOKS)
    for site in ("north", "south"):
        made.take(admit(site))
    made.take(done(0, "north", "south"))
    for site in ("north", "south"):
        made.take(admit(site, 1, pack_vector(START[:3])))
    return made, gate


def test_a_look_is_closed_with_the_sums_that_were_said_of_it_and_the_next_turn_is_a_round() -> None:
    made, gate = in_a_look()
    assert made.take(looked(1, 1.5, -2.0, 3e9)) == ("answer", {})
    made.take(done(1, "north", "south"))
    assert gate.asked[-2:] == [("looked", 1, [1.5, -2.0, 3e9]), ("done", 1, ("north", "south"), {})]
    for site in ("north", "south"):
        made.take(admit(site, 2))
    made.take(done(2, "north", "south"))
    assert made.take(RunMessage("over", {})) is None


@pytest.mark.parametrize(
    "frames",
    [
        [done(1, "north", "south")],  # without its sums
        [looked(1, 1.0, 2.0)],
        [looked(1, 1.0, 2.0, math.nan)],
        [looked(1, 1.0, 2.0, math.inf)],
        [looked(2, 1.0, 2.0, 3.0)],
        [looked(0, 1.0, 2.0, 3.0)],
        [looked(1, 1.0, 2.0, 3.0), looked(1, 1.0, 2.0, 3.0)],  # twice
        [admit("west", 1)],  # parameters where sums are asked for
    ],
)
def test_a_look_is_closed_only_as_it_was_reviewed(frames: list[RunMessage]) -> None:
    made, gate = in_a_look()
    for frame in frames[:-1]:
        made.take(frame)
    before = list(gate.asked)
    with pytest.raises(RunFrameError):
        made.take(frames[-1])
    assert gate.asked == before


def test_sums_in_a_round_that_is_no_look_are_refused() -> None:
    made, _ = priced(LOOKS)
    for site in ("north", "south"):
        made.take(admit(site))
    with pytest.raises(RunFrameError):
        made.take(looked(0, 1.0, 2.0, 3.0))
    with pytest.raises(RunFrameError):
        made.take(admit("west", artifact=pack_vector(START[:3])))


@pytest.mark.parametrize(
    "changes",
    [{"looks": frozenset({0}), "sums": 3}, {"looks": frozenset({2}), "sums": 3}, {"looks": frozenset({1})},
     {"looks": frozenset({1}), "sums": 1 << 17}, {"looks": frozenset({1}), "sums": 3, "lattice": (64.0, 18)},
     {"lattice": (64.0, 18)}],
)  # fmt: skip
def test_a_plan_whose_looks_make_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="run plan"):
        replace(PLAN, **changes)


def test_a_round_beyond_the_last_is_refused() -> None:
    made, _ = priced(replace(PLAN, rounds=1))
    for site in ("north", "south"):
        made.take(admit(site))
    made.take(done(0, "north", "south"))
    for frame in (admit("north", 1), done(1, "north", "south")):
        with pytest.raises(RunFrameError):
            made.take(frame)


def test_a_masked_update_is_as_many_elements_of_the_ring() -> None:
    plan = replace(PLAN, roster={site: bytes(32) for site in SITES})
    made, _ = priced(plan)
    assert made.take(admit("north", artifact=pack_ring(np.arange(10, dtype=np.uint64)))) == ("answer", {"code": None})
    for artifact in (pack_ring(np.arange(9, dtype=np.uint64)), pack_vector(START)):
        with pytest.raises(RunFrameError):
            made.take(admit("south", artifact=artifact))


def test_an_update_of_16_bits_is_admitted_where_the_run_says_so_and_sums_are_not_rounded() -> None:
    made, _ = priced(replace(PLAN, update_precision=BFLOAT16, looks=frozenset({1}), sums=3))
    said = pack_update(rounded(START))
    with pytest.raises(RunFrameError):
        made.take(admit("north"))  # float32
    for site in ("north", "south"):
        assert made.take(admit(site, artifact=said)) == ("answer", {"code": None})
    made.take(done(0, "north", "south"))
    with pytest.raises(RunFrameError):
        made.take(admit("north", 1, artifact=pack_update(rounded(START[:3]))))
    assert made.take(admit("north", 1, artifact=pack_vector(START[:3]))) == ("answer", {"code": None})


def test_what_a_gate_raises_stays_with_the_coordinator() -> None:
    made, gate = context(breaks="reserve")
    assert made.take(reserve(north=b"n", south=b"s")) == ("broken", {})
    assert gate.asked[-1][0] == "reserve"
    with pytest.raises(RunFrameError):  # nobody is granted
        made.take(admit("north"))
    made, _ = priced(breaks="admit")
    assert made.take(admit("north")) == ("broken", {})
    with pytest.raises(RunFrameError):
        made.take(done(0, "north"))


def test_a_round_that_cannot_be_made_durable_ends_the_run_with_its_own_error() -> None:
    made, gate = priced()
    for site in ("north", "south"):
        made.take(admit(site))
    gate.breaks = "done"
    with pytest.raises(OSError, match="no space"):
        made.take(done(0, "north", "south"))
    assert (made.index, gate.models) == (0, [])


# ---------------------------------------------------------------- a process that was taken over


@pytest.fixture
def rogue(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gate]:
    """Let such a process conduct a run; gives the gate when it is over."""
    monkeypatch.setattr(run_process, "MODULE", "tests.support.flower.rogue_run")

    def conduct(what: bytes, stopping: threading.Event | None = None) -> Gate:
        plan = replace(PLAN, config=what)
        made, gate = context(plan)
        with RunProcess(plan) as child:
            process = vars(child)["_process"]
            try:
                child.conduct(RunSpec(plan, "token"), WAY, made, stopping or threading.Event())
            finally:
                child.end()
                assert process.returncode is not None
        return gate

    return conduct


@pytest.mark.parametrize("what", [b"noise", b"announce", b"done", b"over", b"part", b"fault"])
def test_a_process_that_speaks_nonsense_is_ended_and_the_run_lost(rogue: Callable[..., Gate], what: bytes) -> None:
    with pytest.raises(RunLostError) as lost:
        rogue(what)
    assert "4711" not in str(lost.value)


def test_a_process_that_does_not_heed_a_stop_is_ended(
    rogue: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_process, "_LEAVE_S", 1.0)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(RoundFailedError, match="stopped"):
        rogue(b"deaf", stopping)


def test_a_process_that_says_nothing_for_longer_than_the_plan_allows_is_ended(
    rogue: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_process, "_SLACK_S", -4.0)  # of six seconds
    with pytest.raises(RunLostError, match="silent"):
        rogue(b"mute")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/runtime/pull-messages", "task", 200),
        ("/v1/runtime/acquire-task", "task", 404),
        ("/v1/runtime/create-task", "task", 404),
        ("/v1/control/start-run", "task", 404),
        ("/v1/control/register-node", "task", 404),
        ("/v1/fleet/pull-messages", "task", 404),
        ("/v1/runtime/pull-messages", "over", 404),
        ("/v1/control/start-run", "whole", 200),
    ],
)
def test_a_runs_key_opens_a_tasks_calls_and_nothing_else(path: str, key: str, status: int) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    said: list[dict[str, Any]] = []

    async def call() -> None:
        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        scope = {"type": "http", "path": path, "headers": [(KEY_HEADER.encode(), key.encode())]}
        await PrivateGate(app, "whole", {"task"})(scope, lambda: None, send)

    asyncio.run(call())
    assert said[0]["status"] == status


# ---------------------------------------------------------------- whose turn it is


class Turns:
    """Runs that stand in a line until they are told to go on."""

    def __init__(self, line: RunQueue) -> None:
        self.line, self.going, self.ends = line, [], {}  # type: ignore[var-annotated]

    def come(self, name: str, *sites: str) -> None:
        standing, end = threading.Event(), threading.Event()
        self.ends[name] = end

        def take() -> None:
            with self.line.take(standing, sites):
                self.going.append(name)
                end.wait(200)
                self.going.remove(name)

        threading.Thread(target=take, daemon=True).start()
        assert standing.wait(60)

    def end(self, name: str) -> None:
        self.ends[name].set()

    def settle(self, *names: str) -> None:
        """Until exactly these have their turn, and a little longer."""
        until = time.monotonic() + 240
        while sorted(self.going) != sorted(names) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        assert sorted(self.going) == sorted(names)


def test_runs_that_share_a_site_wait_for_one_another_and_others_go_side_by_side() -> None:
    turns = Turns(RunQueue())
    turns.come("first", "north", "south")
    turns.come("second", "south", "west")
    turns.come("third", "west", "east")  # not before the second, which came earlier and wants the west too
    turns.come("fourth", "far")
    turns.settle("first", "fourth")
    turns.end("first")
    turns.settle("second", "fourth")
    turns.end("second")
    turns.settle("third", "fourth")
    turns.end("third")
    turns.end("fourth")
    turns.settle()


def test_no_more_runs_than_the_bound_go_at_once() -> None:
    turns = Turns(RunQueue(2))
    for name in "abcd":
        turns.come(name, name)
    turns.settle("a", "b")
    turns.end("b")
    turns.settle("a", "c")
    turns.end("a")
    turns.settle("c", "d")
    turns.end("c")
    turns.end("d")
    turns.settle()


# ---------------------------------------------------------------- the conductor


CONFIG = plain_config(classification(("0", "1"), rounds=4, public_patients=40), 10)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site of a coordinator with real books."""
    with Books(tmp_path) as ledger:
        yield ledger.join("site-a")


@pytest.fixture
def run(site: Site) -> RunController:
    """A run's real conductor over these books, without Flower."""
    ledger = site.federation
    host: Any = SimpleNamespace(stopping=threading.Event())
    root, log = ledger.root / "runs", open_log(ledger.root / "run.log")
    (root / "run-1").mkdir(parents=True)
    context = RunContext(root, host, ledger.intake, ledger.shelf, log, lambda *_: None)
    return RunController(context, Job("run-1", "federated", json.dumps(CONFIG), 10, ("site-a",), 4, 1), EventStream())


def test_a_run_whose_process_dies_again_and_again_in_the_same_round_has_failed(
    run: RunController, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def dies(done: int) -> RunEvent:
        tried.append(done)
        raise RunLostError("the run's process is lost: the end")

    monkeypatch.setattr(run, "_conduct", dies)
    run.run()
    assert tried == [0, 0, 0]
    lost = ("waiting", "run_process_lost")
    assert [(e.state, e.reason) for e in run.feed.follow()] == [lost, lost, ("failed", "internal")]


def test_a_closed_round_gives_a_run_new_tries(
    run: RunController, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def dies(done: int) -> RunEvent:
        tried.append(done)
        if len(tried) == 2:
            run.register.close_round("run-1", 1, ["site-a"], bytes(32))
        raise RunLostError("the run's process is lost: the end")

    site.reserved("grant-1", DP, "federated", "run-1")
    release = site.update("grant-1", vector(), 15, run="run-1", round=1)
    assert site.gateway().submit("k", site.seal(release), vector()).admitted
    monkeypatch.setattr(run, "_conduct", dies)
    run.run()
    assert tried == [0, 0, 1, 1, 1]


# ---------------------------------------------------------------- real rounds


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerFederation]:
    """Three agents online at one coordinator, in whose environment a password stands."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGPASSWORD", "hunter2-of-the-ledger")
        made = FlowerFederation(tmp_path_factory.mktemp("running"))
    try:
        for site in SITES:
            made.start_agent(site)
        for agent in made.agents.values():
            agent.wait_for("online")
        yield made
    finally:
        made.close()


def processes(federation: FlowerFederation, most_s: float = 60.0) -> list[int]:
    """The processes of the runs that the coordinator conducts; waits for one."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if (
                    parent == federation.coordinator.process.pid
                    and b"flower.running" in (path / "cmdline").read_bytes()
                ):
                    found.append(int(path.name))
            except (OSError, IndexError):
                continue
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("no run has a process")


def begin(federation: FlowerFederation, run: str, **plan: Any) -> dict[str, Any]:
    """Start a run in which north takes its time over every round; gives the plan."""
    config = {"add": ADD, "sleep": {"north": 3.0}}
    plan = {
        "run": run,
        "config": config,
        "sites": SITES,
        "rounds": 2,
        "min_sites": 3,
        "round_timeout_s": 120.0,
        **plan,
    }
    federation.coordinator.tell(do="conduct", **plan)
    return plan


def test_nothing_secret_is_on_the_processs_command_line_or_in_its_environment(federation: FlowerFederation) -> None:
    begin(federation, "seen", rounds=1)
    (pid,) = processes(federation)
    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[1:4] == [b"-P", b"-m", b"tests.support.flower.running"]
    assert len(words) == 6  # and two descriptors
    assert words[4].isdigit()
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"FLWR_TELEMETRY_ENABLED=0" in environment
    assert b"MALLOC_MMAP_THRESHOLD_=131072" in environment  # a model that it lets go of is the system's again
    assert b"hunter2" in Path(f"/proc/{federation.coordinator.process.pid}/environ").read_bytes()
    assert b"hunter2" not in environment
    assert not re.search(rb"[0-9a-f]{64}", environment)
    report = federation.coordinator.hear(180.0)
    assert '"rounds_done": 1' in report, report


def test_a_process_killed_in_the_middle_of_a_round_loses_that_round_only(federation: FlowerFederation) -> None:
    plan = begin(federation, "cut")
    (pid,) = processes(federation)
    time.sleep(5.0)  # a round is being trained
    os.kill(pid, signal.SIGKILL)
    report = json.loads(federation.coordinator.hear(120.0))
    assert "lost" in report
    closed = len(report["checkpoints"])
    again = federation.conduct(**{**plan, "first_round": closed, "config": plan["config"]})
    assert again["rounds_done"] == 2
    assert again["used"] == [list(SITES)] * (2 - closed)
    assert again["shift"] == [3.0 * (2 - closed)]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_its_process_and_not_the_next_run(
    federation: FlowerFederation,
) -> None:
    report = federation.conduct("full", {"disk_full": 1})
    assert report["lost"] == "no space left on device"
    assert [point["round"] for point in report["checkpoints"]] == [0]
    with pytest.raises(AssertionError, match="no run has a process"):
        processes(federation, 0.5)
    assert federation.conduct("full", first_round=1)["shift"] == [3.0]


def test_runs_of_other_sites_go_side_by_side_and_do_not_mix(federation: FlowerFederation) -> None:
    common = {"rounds": 2, "min_sites": 1, "round_timeout_s": 120.0}
    one = {"run": "one", "sites": ["north"], "config": {"add": ADD, "sleep": {"north": 2.0}}, **common}
    two = {"run": "two", "sites": ["south", "west"], "config": {"add": ADD, "sleep": {"west": 2.0}}, **common}
    first, second = federation.coordinator.ask(do="conduct", runs=[one, two])
    assert (first["shift"], second["shift"]) == ([2.0], [8.0])
    assert (first["used"], second["used"]) == ([["north"]] * 2, [["south", "west"]] * 2)
    assert first["granted"] == {"north": "grant one north"}
    assert max(first["span"][0], second["span"][0]) < min(first["span"][1], second["span"][1])


def test_the_process_ends_with_the_coordinator(federation: FlowerFederation) -> None:
    begin(federation, "orphan")
    (pid,) = processes(federation)
    time.sleep(2.0)
    federation.coordinator.kill()
    until = time.monotonic() + 240
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_the_process_does_nothing_without_the_settings_that_keep_flower_quiet() -> None:
    code = (
        "import socket; from coordinator.federation.run_main import main; "
        "a, b = socket.socketpair(); main(b.fileno(), a.fileno())"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    ended = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, check=False, timeout=240)
    assert b"FlowerEnvironmentError" in ended.stderr
