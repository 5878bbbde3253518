"""What pages, ``doctor`` and ``status`` tell of a running service's processes."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from agent.operations.connection import connection_fault
from protos.operations.checks import CheckResult, failed, note, passed
from protos.operations.event_counters import PROCESS, EventCounters
from protos.operations.kept_process import ends_of
from protos.service.control_client import connect

AGAIN: Final = "see process_ended in agent.log; `serve` starts it again within a minute"


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process of the service, besides its own."""

    name: str  # of agent.operations.metrics.PROCESSES
    running: bool
    ended: int  # by itself, since the service began
    last: float  # seconds since 1970; 0: never
    how: str  # it ended the last time

    @property
    def words(self) -> str:
        """In a line."""
        runs = "it runs" if self.running else "it does not run"
        if not self.ended:
            return runs
        times = "once" if self.ended == 1 else f"{self.ended} times"
        last = f"{dt.datetime.fromtimestamp(self.last, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
        return f"{runs}; it ended {times} since the service began, last at {last}: {self.how}"


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What runs."""

    processes: tuple[ProcessStatus, ...] = ()
    received: Mapping[str, int] | None = None  # events of the C-STORE receiver, since it started; None: nobody serves
    unjoined: str = ""  # what parts this site from the coordinator, and since when; "": nothing, or it takes no part

    def running(self, name: str) -> bool:
        """Whether a process runs."""
        return any(one.running for one in self.processes if one.name == name)


def tell_status(
    running: Callable[[], Mapping[str, bool]],
    received: Callable[[], Mapping[str, int]],
    tally: EventCounters = PROCESS,
) -> Callable[[], dict[str, Any]]:
    """What a service says of itself: the fields of :class:`ServiceStatus`.

    Args:
        running: the processes that there should be, and whether each runs.
        received: see :class:`ServiceStatus`.
        tally: of the service's log.
    """

    def told() -> dict[str, Any]:
        found = []
        for name, runs in running().items():
            ends = ends_of(name, tally)
            found.append(asdict(ProcessStatus(name, runs, ends.count, ends.last, ends.how)))
        return {"processes": found, "received": dict(received()), "unjoined": connection_fault(tally) or ""}

    return told


def read_status(told: Mapping[str, Any]) -> ServiceStatus:
    """What a service said."""
    processes = tuple(ProcessStatus(**one) for one in told["processes"])
    return ServiceStatus(processes, told["received"], told.get("unjoined", ""))


def ask_status(home: Path) -> ServiceStatus:
    """What runs in a home directory; nothing where nobody serves.

    Raises:
        ServiceRefusedError, ServiceAnswerError: it cannot be asked.
    """
    service = connect(home)
    if service is None:
        return ServiceStatus()
    with service:
        return read_status(service.ask("/service/show", {}))


def check_processes(home: Path) -> Iterator[CheckResult]:
    """Of each process of the service that runs here: does it run, and how often did it end?

    Raises:
        ServiceRefusedError, ServiceAnswerError: it cannot be asked.
    """
    for one in ask_status(home).processes:
        name = f"process {one.name}"
        if not one.running:
            yield failed(name, one.words, AGAIN)
        else:
            yield note(name, one.words) if one.ended else passed(name, one.words)
