"""The processes of simulated sites: started here, asked over a pipe, and ended with the command.

What they run is the agent's own training (``agent.federation.simulated_sites_main``), which this side never imports:
it is named, and an installation without the agent's packages is told what to install.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from protos.common.errors import ConfigError, TrainingError, WorkerError
from protos.operations import child_process
from protos.operations.pipe_messages import receive, send

MODULE: Final = "agent.federation.simulated_sites_main"
_MOST_BYTES: Final = 1 << 30  # of an answer
_NEEDED: Final = ("torch", "monai")  # of the agent's packages, those that a training cannot do without

Vector = NDArray[np.float32]


class SimulationError(ConfigError, ValueError):
    """The simulation cannot be done as it was asked for; the text says why, and what to do."""


class SimulationLostError(WorkerError, RuntimeError):
    """A process of the simulated sites died, or met a fault of ours. What was finished is kept: type it again."""


class DivergedTrainingError(TrainingError, ValueError):
    """A training came to numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Question:
    """What one process is asked: see ``agent.federation.simulated_sites_main``."""

    head: Mapping[str, Any]
    form: type[np.generic]  # of the numbers that come back


class _Process:
    """One process and our end of its pipe."""

    def __init__(self) -> None:
        """Start it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = child_process.start(MODULE, [], [theirs.fileno()], ())
        self._socket, self._source, self._sink = ours, ours.makefile("rb"), ours.makefile("wb")

    def ask(self, head: Mapping[str, Any], vector: Vector | None = None) -> tuple[dict[str, Any], bytes]:
        """One question.

        Raises:
            SimulationError: the folder, the task or the question is at fault.
            DivergedTrainingError: numbers that are not finite.
            SimulationLostError: the process is gone, or met a fault.
        """
        try:
            send(self._sink, dict(head), [] if vector is None else [np.ascontiguousarray(vector).data.cast("B")])
            told, parts = receive(self._source, _MOST_BYTES)
        except (OSError, EOFError, ValueError):
            raise SimulationLostError("a process of the simulated sites ended; perhaps memory ran out") from None
        if "error" in told:
            raise SimulationError(told["error"])
        if "diverged" in told:
            raise DivergedTrainingError("the training diverged")
        if "fault" in told:
            raise SimulationLostError(f"a process of the simulated sites met a fault ({told['fault']})")
        return told, parts[0] if parts else b""

    def end(self) -> None:
        """Close the pipe, which ends it."""
        for one in (self._source, self._sink, self._socket):
            one.close()
        child_process.end(self._process)


@dataclass(slots=True, eq=False)
class SimulatedSitesProcesses:
    """All processes, as a context manager that leaves none behind."""

    count: int
    _running: list[_Process] = field(init=False, default_factory=list)

    def __enter__(self) -> Self:
        """Start them.

        Raises:
            SimulationError: this installation cannot train.
        """
        if lacking := [name for name in _NEEDED if find_spec(name) is None]:
            raise SimulationError(
                f'`round simulate` trains on this machine, and {lacking[0]} is missing: pip install "lazaret[agent]"'
            )
        self._running = [_Process() for _ in range(self.count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._running:
            one.end()

    def open(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """Have every process open the folder; what the first one says of it."""
        with ThreadPoolExecutor(self.count) as pool:
            told: list[dict[str, Any]] = list(
                pool.map(lambda one: one.ask({"ask": "open", **head})[0], self._running)
            )
        return told[0]

    def left_out(self) -> dict[str, str]:
        """The images that were asked for and not used, as a site would not use them, and why."""
        told = [one.ask({"ask": "left out"})[0]["left_out"] for one in self._running]
        return {name: why for files in told for name, why in files.items()}

    def ask(self, questions: Sequence[Question], vector: Vector) -> list[NDArray[Any]]:
        """The numbers that answer each question. Question i goes to process i modulo their number, every time."""

        def of(start: int) -> list[NDArray[Any]]:
            return [
                np.frombuffer(self._running[start].ask(one.head, vector)[1], one.form)
                for one in questions[start :: self.count]
            ]

        with ThreadPoolExecutor(self.count) as pool:
            found = list(pool.map(of, range(self.count)))
        return [found[index % self.count][index // self.count] for index in range(len(questions))]
