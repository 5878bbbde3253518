"""The process of one run, started by `coordinator.edges.conducting.Child` and never by hand.

    python -P -m coordinator.edges.running FD RELAY

FD is our end of the socket pair over which everything else comes (coordinator/edges/runframes.py); RELAY that of the
pair over which our calls to Flower are made for us (protos/operations/http_relay.py). Flower's task identity belongs
to a process, so each run has one. What sites send is parsed here, where there is neither ledger nor key nor shelf;
whatever needs them is asked of the coordinator. Before anything is parsed this process is confined to the
interpreter's files and these two descriptors. When the coordinator ends, so does it, in any call.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

import httpx

from coordinator.edges.grid import PrivateWay, PromptGrid
from coordinator.edges.replies import pack
from coordinator.edges.runframes import TO_RUN, BadFrame, Frame, Order, Pipe
from coordinator.edges.secure import SecureStrategy
from coordinator.edges.strategy import GatedStrategy, Model, Progress, RoundFailed
from protos import quiet
from protos.artifact import pack_vector
from protos.operations.confinement import CONVERSING, Allowed, ConfinementError, confine, interpreter
from protos.operations.http_relay import RelayedTransport
from protos.rounds import FLEET_BODY

_INTERNAL: Final = 70


class NotAnswered(Exception):
    """The coordinator's gate failed at this question; why is for the coordinator to know."""


class Gate:
    """The coordinator's gate, as the strategy sees it: every question goes over the pipe and waits for its answer."""

    def __init__(self, pipe: Pipe) -> None:
        """Nothing is asked yet."""
        self.pipe = pipe
        self.stopping = threading.Event()
        self._answers: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def listen(self) -> None:
        """The second thread: what the coordinator says. The end of the pipe ends the process."""
        try:
            while True:
                if self.pipe.ready(3600.0):
                    frame = self.pipe.receive()
                    if frame.word == "stop":
                        self.stopping.set()
                    else:
                        self._answers.put(frame)
        except BadFrame:
            os._exit(0)  # there is nobody left to take a result

    def _ask(self, word: str, text: Mapping[str, Any], body: bytes = b"", more: bytes = b"") -> Frame:
        self.pipe.send(word, text, body, more)
        answer = self._answers.get()
        if answer.word != "answer":
            raise NotAnswered(word)
        return answer

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """See `coordinator.edges.strategy.Gate`."""
        sizes = [[site, len(envelope)] for site, envelope in sealed.items()]
        answer = self._ask("reserve", {"least": least, "sealed": sizes}, b"".join(sealed.values()))
        (refused,) = answer.values("refused")
        return dict(refused)

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """See `coordinator.edges.strategy.Gate`."""
        (code,) = self._ask("admit", {"site": site, "round": round_index}, envelope, artifact).values("code")
        return None if code is None else str(code)

    def round_done(self, round_index: int, model: Model, used: tuple[str, ...], refused: Mapping[str, str]) -> None:
        """See `coordinator.edges.strategy.Gate`; where it fails, the coordinator ends this process."""
        text = {"round": round_index, "used": used, "refused": dict(refused)}
        self._ask("done", text, pack_vector(model.vector), model.moments.to_bytes())

    def progress(self, event: Progress) -> None:
        """Let the coordinator's caller know."""
        text = {"stage": event.stage, "round": event.round_index, "sites": event.sites}
        self._ask("progress", {**text, "refused": dict(event.refused)})


def conduct(order: Order, gate: Gate, transport: httpx.BaseTransport) -> None:
    """Price, then the rounds, as the task that the order's token stands for.

    Raises:
        RoundFailed: too few usable sites at the price or in a round, or told to stop.
        httpx.HTTPError: the SuperLink does not answer.
    """
    plan = order.plan
    kind = GatedStrategy if plan.roster is None else SecureStrategy
    strategy = kind(plan, gate, gate.progress, gate.stopping)
    grid = PromptGrid(PrivateWay("coordinator", "", transport), order.token, gate.stopping)
    outcome = "failed"
    try:
        grid.begin()
        strategy.price(grid)
        strategy.start(
            grid=grid,
            initial_arrays=pack(plan.model.vector),
            num_rounds=plan.rounds - plan.first_round,
            timeout=plan.round_timeout_s,
        )
        outcome = "completed"
    finally:
        grid.end(outcome)


def main(descriptor: int, relay: int) -> int:
    """Conduct the run that is ordered; everything that is to be said goes through the pipe."""
    # A terminal's interrupt and a service manager's signal are for the coordinator, which then says stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold updates
    quiet.require()
    pipe, calls = Pipe(socket.socket(fileno=descriptor), TO_RUN), socket.socket(fileno=relay)
    fault = ""
    try:
        confine(Allowed(CONVERSING, interpreter()))  # while there is one thread
    except ConfinementError as error:
        fault = type(error).__name__.lower()
    try:
        while not pipe.ready(60.0):  # the coordinator is starting Flower's task
            pass
        order = Order.of(pipe.receive())
        if fault:
            pipe.send("fault", {"kind": fault})
            return _INTERNAL
        gate = Gate(pipe)
        threading.Thread(target=gate.listen, name="pipe", daemon=True).start()
        _report(order, gate, RelayedTransport(calls, FLEET_BODY))
    except BadFrame:
        return _INTERNAL
    return 0


def _report(order: Order, gate: Gate, transport: httpx.BaseTransport) -> None:
    """Conduct, and say how it ended; no text of an exception, since it may quote what came over the wire."""
    try:
        conduct(order, gate, transport)
    except RoundFailed as failure:
        text = {"round": failure.round_index, "reason": failure.reason, "refused": failure.refused}
        gate.pipe.send("failed", text)
    except httpx.HTTPError:
        gate.pipe.send("fault", {"kind": "unreachable"})
    except BadFrame:
        raise
    except Exception as fault:  # noqa: BLE001 - the coordinator must hear of it
        gate.pipe.send("fault", {"kind": type(fault).__name__.lower()[:64]})
    else:
        gate.pipe.send("over")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
