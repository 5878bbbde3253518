"""A round of 11 million parameters, and of 100 million with ``--entries 100000000``: time beside bare Flower, memory.

One coordinator and one site on the loopback, each as installed, with a mechanism that trains nothing
(``made/made_mechanism.py``). The policy admits updates of 2 GiB; the presets' 256 MiB hold 67 million parameters.

``governed_vs_bare_11m``: a round of the product over one of the same link and the same embedded Flower whose agent
adds to it and whose coordinator admits all; without the agents' pause, as in :mod:`.rounds`.

``above_parameters_mb``: of each process the most memory (VmHWM, while rounds are on) beyond what the same process has
in a run of a thousand parameters, and beyond one copy of the parameters. The goal is 64 on either side.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import grpc

from coordinator.storage.directory import operator_certificate
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.benchmarks import network
from tests.benchmarks.made.made_mechanism import configuration
from tests.benchmarks.report import Report, Row
from tests.benchmarks.rounds import ROLES, stock
from tests.support.federation_world import Federation
from tests.support.ports import free_port

SITE: Final = "site-a"
MADE: Final = Path(__file__).parent / "made"  # of the mechanism, which the confined process imports
SMALL: Final = 1_000
MIDDLE: Final = 11_000_000
ROUNDS: Final = 4
_EVERY_S: Final = 0.02
_MIB: Final = float(1 << 20)
_NAMES: Final = {
    "coordinator": "coordinator: serve",
    "coordinator.federation.run_main": "coordinator: process of the run",
    "tests.benchmarks.roles": "agent: serve",
    "agent.federation.supernode_main": "agent: link",
    "agent.release.maker_main": "agent: training",
}


@dataclass(slots=True)
class Watcher:
    """The most memory of each kind of process below this one, in MiB."""

    most: dict[str, float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Until it is over."""
        while not self.over.wait(_EVERY_S):
            for pid in _below(os.getpid()):
                with contextlib.suppress(OSError, ValueError, StopIteration):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                    name = _NAMES.get(words[words.index("-m") + 1], "")
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    line = next(one for one in status if one.startswith("VmHWM"))
                    if name:
                        self.most[name] = max(self.most.get(name, 0.0), int(line.split()[1]) / 1024)


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found, rest = list[int](), [pid]
    while rest:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{(at := rest.pop())}/task"):
                rest += map(int, Path(f"/proc/{at}/task/{task}/children").read_text().split())
        found = [*dict.fromkeys([*found, *rest])]
    return found


@dataclass(slots=True)
class Pair:
    """A coordinator and a site that run."""

    federation: Federation
    runs: int = 0

    def rounds(self, parameters: int, rounds: int = ROUNDS) -> list[float]:
        """Seconds of each round of a new run but the first."""
        self.runs += 1
        request = gateway_pb2.LaunchRequest(
            run=f"run-{self.runs}",
            mechanism="federated",
            config=configuration(parameters, rounds),
            parameters=parameters,
            sites=[SITE],
            rounds=rounds,
            min_sites=1,
        )
        home = self.federation.home
        key, chain = operator_certificate(home, dt.datetime.now(dt.UTC))
        credentials = grpc.ssl_channel_credentials(home.root_crt(), key, chain)
        options = [("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", USER_AGENT)]
        closed, said = [], []
        with grpc.secure_channel(f"127.0.0.1:{self.federation.port}", credentials, options) as channel:
            for event in GatewayStub(channel).Launch(request, timeout=1800):
                said.append(f"{event.round} {event.state} {' '.join(event.sites)} {event.reason}")
                if event.state == "closed":
                    closed.append(time.perf_counter())
        if len(closed) != rounds:
            raise AssertionError(f"the run did not finish: {said}")
        return [b - a for a, b in pairwise(closed)]


@contextlib.contextmanager
def pair(folder: Path, hub: str, agent: str) -> Iterator[Pair]:
    """Enrol one site, start both sides, and wait until the link is there; ``hub`` and ``agent`` are roles."""
    federation, (site,) = network.found(folder, [SITE], f'listen = "127.0.0.1:{free_port()}"\n')
    with contextlib.ExitStack() as stack:
        command = ["-m", ROLES, hub, str(folder / "coordinator")] if hub else []
        stack.enter_context(network.coordinator(federation, command))
        stock(site, 0)
        stack.enter_context(network.started(["-m", ROLES, agent, str(site.home.root)], r"link: (online)"))
        yield Pair(federation)


@contextlib.contextmanager
def watched() -> Iterator[Watcher]:
    """Memory, while the block lasts."""
    watcher = Watcher()
    thread = threading.Thread(target=watcher.watch, daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        watcher.over.set()
        thread.join()


def memory(folder: Path, parameters: int) -> tuple[list[Row], float]:
    """What each process has above one copy of the parameters, and the most of it."""
    most: dict[int, dict[str, float]] = {}
    for size in (SMALL, parameters):
        with pair(folder / str(size), "", "sized") as both, watched() as watcher:
            both.rounds(size, 2)
        most[size] = watcher.most
    copy = 4 * parameters / _MIB
    above = {name: most[parameters].get(name, 0.0) - base - copy for name, base in sorted(most[SMALL].items())}
    rows = [
        Row(f"{name}: above {parameters:,} parameters ({copy:.0f} MiB)", value, "MiB")
        for name, value in above.items()
    ]
    return rows, max(above.values())


def main(parameters: int = MIDDLE) -> Report:
    """Measure; about three minutes."""
    rows: list[Row] = []
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MADE), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        found, most = memory(Path(name), parameters)
        rows += found
        if parameters != MIDDLE:
            return Report(tuple(rows), {"above_parameters_mb": most})
        with (
            pair(Path(name) / "governed", "", "sized") as governed,
            pair(Path(name) / "bare", "hub", "flat") as bare,
        ):
            times: dict[str, list[float]] = {"governed": [], "bare": []}
            for turn in range(3):
                for kind, one in (("governed", governed), ("bare", bare))[:: 1 if turn % 2 else -1]:
                    times[kind] += one.rounds(parameters)
    rows += [Row(f"{kind} round", median(seconds), "s") for kind, seconds in times.items()]
    ratio = median(times["governed"]) / median(times["bare"])
    return Report(tuple(rows), {"governed_vs_bare_11m": ratio, "above_parameters_mb": most})
