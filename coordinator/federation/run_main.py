"""The process of one run, started by `coordinator.federation.run_process.RunProcess` and never by hand.

    python -P -m coordinator.federation.run_main FD RELAY

FD is our end of the socket pair for everything else (coordinator/federation/run_messages.py); RELAY is our end of the
pair over which the parent makes our calls to Flower (protos/operations/http_relay.py). Flower's task identity belongs
to a process, so each run has its own. Data from sites is parsed here, without ledger, keys or stored releases; the
coordinator is asked for whatever needs them. Before anything is parsed this process is confined to the interpreter's
files and these two descriptors. It ends when the coordinator ends, also in the middle of a call.

This is a wall: foreign bytes are read here, and :class:`RemoteGate` asks the coordinator over a pipe without keys.
That looks like a detour to the gate. It is the only way from this process to the ledger.
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
from dataclasses import asdict
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

from coordinator.federation.grid import BoundedGrid, LoopbackEndpoint
from coordinator.federation.replies import pack
from coordinator.federation.run_messages import TO_RUN, Body, Pipe, RunFrameError, RunMessage, RunSpec
from coordinator.federation.secure_strategy import SecureStrategy
from coordinator.federation.strategy import GatedStrategy, RoundFailedError, RoundModel, RoundProgress
from protos.artifacts.arrays import vector_parts
from protos.common.errors import WorkerError
from protos.federation import flower_environment
from protos.federation.messages import FLEET_BODY
from protos.federation.site_check import SiteCheck
from protos.operations.confinement import CONVERSING, Allowed, ConfinementError, confine, interpreter
from protos.operations.http_relay import RelayedTransport

_INTERNAL: Final = 70


class NotAnsweredError(WorkerError):
    """The coordinator's gate failed at this question; why is for the coordinator to know."""


class RemoteGate:
    """The coordinator's gate, as the strategy sees it: every question goes over the pipe and waits for its answer."""

    def __init__(self, pipe: Pipe) -> None:
        """Nothing is asked yet."""
        self.pipe = pipe
        self.stopping = threading.Event()
        self._answers: queue.SimpleQueue[RunMessage] = queue.SimpleQueue()

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
        except RunFrameError:
            os._exit(0)  # there is nobody left to take a result

    def _ask(self, word: str, text: Mapping[str, Any], body: Body = b"", more: bytes = b"") -> RunMessage:
        self.pipe.send(word, text, body, more)
        answer = self._answers.get()
        if answer.word != "answer":
            raise NotAnsweredError(word)
        return answer

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """See `coordinator.federation.strategy.RunGate`."""
        sizes = [[site, len(envelope)] for site, envelope in sealed.items()]
        answer = self._ask("reserve", {"least": least, "sealed": sizes}, b"".join(sealed.values()))
        (refused,) = answer.values("refused")
        return dict(refused)

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """See `coordinator.federation.strategy.RunGate`."""
        (code,) = self._ask("admit", {"site": site, "round": round_index}, envelope, artifact).values("code")
        return None if code is None else str(code)

    def looked(self, round_index: int, sums: NDArray[np.float64]) -> None:
        """See `coordinator.federation.strategy.RunGate`."""
        self._ask("looked", {"round": round_index}, sums.astype("<f8").tobytes())

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """See `coordinator.federation.strategy.RunGate`; where it fails, the coordinator ends this process."""
        text = {"round": round_index, "used": used, "refused": dict(refused)}
        self._ask("done", text, vector_parts(model.vector), model.moments.to_bytes())

    def checked(self, told: Mapping[str, SiteCheck], lost: Mapping[str, str], aggregated: tuple[str, ...]) -> None:
        """See `coordinator.federation.strategy.RunGate`."""
        reports = {site: asdict(one) for site, one in told.items()}
        self._ask("checked", {"told": reports, "lost": dict(lost), "aggregated": aggregated})

    def progress(self, event: RoundProgress) -> None:
        """See `coordinator.federation.strategy.RunGate`."""
        text = {"stage": event.stage, "round": event.round_index, "sites": event.sites}
        self._ask("progress", {**text, "refused": dict(event.refused)})


def conduct(order: RunSpec, gate: RemoteGate, transport: httpx.BaseTransport) -> None:
    """Price, then the rounds, as the task that the order's token stands for.

    Raises:
        RoundFailedError: too few usable sites at the price or in a round, or told to stop.
        httpx.HTTPError: the SuperLink does not answer.
    """
    model, plan = order.take_model(), order.plan
    kind = GatedStrategy if plan.roster is None else SecureStrategy
    strategy = kind(plan, gate, gate.stopping, start_from=model)
    del model
    grid = BoundedGrid(LoopbackEndpoint("coordinator", "", transport), order.token, gate.stopping, plan.silence_s)
    outcome = "failed"
    try:
        grid.begin()
        if plan.checks:
            strategy.check(grid)
            outcome = "completed"
            return
        strategy.price(grid)
        strategy.start(
            grid=grid,
            initial_arrays=pack(strategy.model.vector),
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
    flower_environment.require_configured()
    pipe, calls = Pipe(socket.socket(fileno=descriptor), TO_RUN), socket.socket(fileno=relay)
    fault = ""
    try:
        confine(Allowed(CONVERSING, interpreter()))  # while there is one thread
    except ConfinementError as error:
        fault = type(error).__name__.lower()
    try:
        while not pipe.ready(60.0):  # the coordinator is starting Flower's task
            pass
        order = RunSpec.of(pipe.receive())
        if fault:
            pipe.send("fault", {"kind": fault})
            return _INTERNAL
        gate = RemoteGate(pipe)
        threading.Thread(target=gate.listen, name="pipe", daemon=True).start()
        _report(order, gate, RelayedTransport(calls, FLEET_BODY))
    except RunFrameError:
        return _INTERNAL
    return 0


def _report(order: RunSpec, gate: RemoteGate, transport: httpx.BaseTransport) -> None:
    """Conduct, and say how it ended; no text of an exception, since it may quote what came over the wire."""
    try:
        conduct(order, gate, transport)
    except RoundFailedError as failure:
        text = {"round": failure.round_index, "reason": failure.reason, "refused": failure.refused}
        gate.pipe.send("failed", text)
    except httpx.HTTPError:
        gate.pipe.send("fault", {"kind": "unreachable"})
    except RunFrameError:
        raise
    except Exception as fault:  # noqa: BLE001 - the coordinator must hear of it
        gate.pipe.send("fault", {"kind": type(fault).__name__.lower()[:64]})
    else:
        gate.pipe.send("over")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
