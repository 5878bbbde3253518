"""Simulate a job with many sites before any is asked: the run's own strategy over Flower's simulation engine.

Real parts: the strategy (`coordinator.federation.strategy`), the job's aggregator, the gate that reviews and records
(`coordinator.federation.run_controller`) over a separate ledger in a temporary folder, and the enrolments,
reservations and signed releases of every site. Synthetic parts: the sites (`coordinator.federation.virtual_sites`),
which Ray runs on this machine's processors. Ray comes with the extra "simulation", and is imported only here and only
when a simulation starts.

Imported after :func:`protos.federation.flower_environment.configure_environment`, since Flower reads its environment
while it is imported.
"""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from coordinator.admission import AdmissionService
from coordinator.event_log import open_log
from coordinator.federation.events import EventStream
from coordinator.federation.job import PLAIN, Job, JobError, forecast, with_noise
from coordinator.federation.replies import pack
from coordinator.federation.run_controller import RunController
from coordinator.federation.strategy import GatedStrategy, RoundFailedError, RoundModel, RoundPlan, RoundProgress
from coordinator.federation.virtual_sites import (
    ROLL,
    Scenario,
    SyntheticCohort,
    Training,
    VirtualClientApp,
    name_of,
)
from coordinator.storage.directory import ORIGIN
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.state import Account
from policies.ledger.store import Store
from policies.ledger_service import open_accounts
from policies.review.policy import parse as parse_policy
from policies.review.rules import AccountContext, account_name
from protos.common.errors import ConfigError
from protos.federation import flower_environment
from protos.federation import messages as wire

_TIMEOUT_S: Final = 3600.0  # of a round: a thousand sites share a few processors
_ROLL_S: Final = 600.0
_NODES_S: Final = 60.0
_HELD_OUT: Final = -1  # the "site" whose patients nobody trains on
_POOR_EPSILON: Final = "epsilon = 1e-3"


class SimulationUnavailableError(ConfigError, RuntimeError):
    """This installation has no simulation; the text says what to do."""


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One closed round."""

    round: int  # from 1
    seconds: float  # from sending to the durable end
    used: int  # sites in the aggregate
    refused: Mapping[str, str]  # site to code
    accuracy: float  # of the new model on held-out made patients


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulation showed."""

    sites: int
    granted: int
    declined: Mapping[str, str]  # site to code, at the price
    rounds: tuple[RoundSeen, ...]
    failed: str  # why it ended before the last round; "" when it did not
    epsilon: str  # of the whole run for a site, at ``delta``; the forecast's words
    delta: str
    spent: Mapping[str, int]  # nano-nats at the account's order that the ledger holds, to how many sites
    updates: int  # admitted by the review, in the ledger
    start_seconds: float  # enrolment, Ray and its workers
    price_seconds: float
    peak_mb: float  # of this process, without Ray's

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


@dataclass(slots=True, eq=False)
class _Books:
    """What a conductor needs of :class:`coordinator.federation.run_manager.RunManager`."""

    root: Path
    intake: AdmissionService
    log: Any


class _Gate(RunController):
    """The run's own gate; a closed round is looked at, and the news go to who simulates."""

    def __init__(
        self, ledger: _Books, job: Job, closed: Callable[[RoundModel], None], told: Callable[[RoundProgress], None]
    ) -> None:
        super().__init__(cast(Any, ledger), job, EventStream())
        self.closed, self.told = closed, told
        self.folder.mkdir(parents=True)

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Durable and in the ledger, as ever; then the model is tried."""
        super().round_done(round_index, model, used, refused)
        self.closed(model)

    def progress(self, event: RoundProgress) -> None:
        """Nobody follows a simulated run."""
        self.told(event)


class NamedGrid(Grid):
    """The simulation's grid, whose nodes have no names: here each node gets its site's name."""

    def __init__(self, grid: Grid, names: Mapping[int, str]) -> None:
        """``names`` by node id; a node without one is nobody."""
        self._grid, self._names = grid, names

    def get_nodes(self) -> Iterable[Any]:
        """The nodes, named."""
        nodes = [deepcopy(node) for node in self._grid.get_nodes() if node.node_id in self._names]
        for node in nodes:
            node.name = self._names[node.node_id]
        return nodes

    def set_run(self, run: Any) -> None:
        """As it is."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As it is."""
        return self._grid.run

    def create_message(self, *args: Any, **more: Any) -> Message:
        """As it is."""
        return self._grid.create_message(*args, **more)

    def get_node_ids(self) -> Iterable[int]:
        """As they are."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As it is."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As it is."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As it is."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def virtual_job(job: Job, sites: int, policy: str) -> Job:
    """The same job for so many virtual sites, with the same share of them needed, and its noise found.

    ``policy``: TOML, by which the sites' accounts are opened.

    Raises:
        JobError: it cannot be simulated.
    """
    if job.mechanism != PLAIN:
        raise JobError(f"only jobs of the mechanism {PLAIN} can be simulated")
    names = tuple(name_of(i) for i in range(sites))
    least = min(sites, math.ceil(sites * job.min_sites / len(job.sites)))
    made = dataclasses.replace(job, sites=names, min_sites=least)
    opened = open_accounts(names[0], parse_policy(policy, "federation"))[0]
    made = with_noise(made, {names[0]: AccountContext(Account(opened))})
    training = Training.of(made)
    if made.parameters != (right := training.classes * (training.features + 1)):
        raise JobError(f"parameters: the task's network trains {right}")
    return made


@dataclass(slots=True, eq=False)
class Simulation:
    """One simulation, in a process that does nothing else."""

    job: Job  # the virtual one
    players: Scenario
    policy: str  # TOML: the federation's, and every site's but the poor ones'
    folder: Path  # thrown away afterwards
    tell: Callable[[RoundProgress | RoundSeen], None]
    began: float = field(default_factory=time.monotonic)
    rounds: list[RoundSeen] = field(default_factory=list)
    failed: str = ""
    _marks: dict[str, float] = field(default_factory=dict)

    def run(self, cpus: int) -> SimulationResult:
        """Enrol everybody, start Ray, conduct the run.

        Raises:
            SimulationUnavailableError: there is no Ray.
        """
        lines = (_POOR_EPSILON if s.startswith("epsilon ") else s for s in self.policy.splitlines())
        poor, disk = "\n".join(lines), open_sqlite(self.folder / "ledger.db")  # the same with next to no budget
        with Store(disk, ORIGIN, Ed25519PrivateKey.generate(), lambda: int(time.time())) as store:
            answers = VirtualClientApp(self.job, self.players, (poor, self.policy))
            intake = AdmissionService.over(store, parse_policy(self.policy, "federation"))
            for index in range(self.players.sites):
                intake.enrol(answers.site(index).enrolment())
            price = self._price(intake)
            ledger = _Books(self.folder / "runs", intake, open_log(self.folder / "simulation.log"))
            held_out = SyntheticCohort.make(Training.of(self.job), self.players.seed, _HELD_OUT, even=True)
            gate = _Gate(ledger, self.job, lambda model: self._closed(model, held_out), self._progress)
            strategy = GatedStrategy(self._plan(), gate)
            app = ServerApp()
            app.main()(lambda grid, _context: self._conduct(grid, _context, strategy))
            with _ray(cpus, self.folder) as backend:
                run_simulation(app, answers.app(), self.players.sites, backend_config=backend)
            return self._result(strategy, intake, price)

    def _plan(self) -> RoundPlan:
        job = self.job
        return RoundPlan(
            run=job.run,
            sites=job.sites,
            rounds=job.rounds,
            first_round=0,
            model=RoundModel(np.zeros(job.parameters, np.float32)),
            config=job.config.encode(),
            min_sites=job.min_sites,
            least_grants=len(job.sites) if job.all_or_none else job.min_sites,
            round_timeout_s=_TIMEOUT_S,
            node_wait_s=_NODES_S,
            aggregator=job.aggregator(),
        )

    def _conduct(self, grid: Grid, _context: Context, strategy: GatedStrategy) -> None:
        """In Flower's thread for a ServerApp: the roll, the price, the rounds."""
        try:
            named = NamedGrid(grid, self._roll(grid))
            self._marks["rolled"] = time.monotonic()
            strategy.price(named)
            plan = strategy.plan
            strategy.start(named, pack(plan.model.vector), plan.rounds, plan.round_timeout_s)
        except RoundFailedError as failure:
            self.failed = (
                f"{'price' if failure.round_index < 0 else f'round {failure.round_index + 1}'}: {failure.reason}"
            )
        except Exception as fault:  # noqa: BLE001 - Flower would print it, and end the process in its own way
            self.failed = f"internal fault ({type(fault).__name__})"

    def _roll(self, grid: Grid) -> dict[int, str]:
        """Node to site: the engine makes the nodes, and each says which site it is. Starts Ray's workers, too."""
        until = time.monotonic() + _NODES_S
        while len(nodes := list(grid.get_node_ids())) < self.players.sites and time.monotonic() < until:
            time.sleep(0.1)
        order = RecordDict({wire.ORDER: ConfigRecord({wire.RUN: self.job.run})})
        calls = [Message(order, node, ROLL, ttl=_ROLL_S, group_id="roll") for node in nodes]
        names = {}
        for reply in grid.send_and_receive(calls, timeout=_ROLL_S):
            if not reply.has_error():
                said = cast(ConfigRecord, reply.content[wire.ANSWER])[wire.ENVELOPE]
                names[reply.metadata.src_node_id] = name_of(int(cast(bytes, said)))
        return names

    def _progress(self, progress: RoundProgress) -> None:
        self._marks[progress.stage] = time.monotonic()
        if progress.stage == "done":  # after the gate, which has put the round there
            seen = dataclasses.replace(self.rounds[-1], used=len(progress.sites), refused=dict(progress.refused))
            self.rounds[-1] = seen
            self.tell(seen)
        else:
            self.tell(progress)

    def _closed(self, model: RoundModel, held_out: SyntheticCohort) -> None:
        took = time.monotonic() - self._marks["sent"]
        accuracy = Training.of(self.job).accuracy(model.vector, held_out)
        self.rounds.append(RoundSeen(len(self.rounds) + 1, round(took, 2), 0, {}, round(accuracy, 4)))

    def _price(self, intake: AdmissionService) -> tuple[str, str]:
        """Epsilon and delta of the whole run, for a site that is not poor, by the forecast of a real launch."""
        state, site = intake.register.store.state, self.job.sites[0]
        standing = AccountContext(
            state.accounts.get(account_name(site, self.job.mechanism)), frozen=False, revoked=False
        )
        one = dataclasses.replace(self.job, sites=(site,), min_sites=1, strategy='{"name":"fedavg"}')
        (cost,) = forecast(one, {site: standing}, {site: intake.register.policy_of(site)}, self.job.claim())
        return cost.epsilon, cost.delta

    def _result(self, strategy: GatedStrategy, intake: AdmissionService, price: tuple[str, str]) -> SimulationResult:
        state = intake.register.store.state
        accounts = [state.accounts[account_name(site, self.job.mechanism)] for site in self.job.sites]
        rolled = self._marks.get("rolled", time.monotonic())
        return SimulationResult(
            sites=self.players.sites,
            granted=len(strategy.granted),
            declined=dict(strategy.declined),
            rounds=tuple(self.rounds),
            failed=self.failed,
            epsilon=price[0],
            delta=price[1],
            spent={str(amount): n for amount, n in sorted(Counter(a.held + a.spent for a in accounts).items())},
            updates=len(state.updates),
            start_seconds=round(rolled - self.began, 1),
            price_seconds=round(self._marks.get("priced", rolled) - rolled, 1),
            peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        )


@contextmanager
def _ray(cpus: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Ray's settings, quiet and on loopback alone; whatever it started is stopped afterwards.

    Raises:
        SimulationUnavailableError: it is not installed.
    """
    if find_spec("ray") is None:
        raise SimulationUnavailableError('simulations need Ray: pip install "lazaret[simulation]"')
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when it is imported
    os.environ["OMP_NUM_THREADS"] = "1"  # of each worker
    import ray  # noqa: PLC0415 - an extra, and it reads its environment while it is imported

    init = {
        "num_cpus": cpus,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(folder / "ray"),
        "object_store_memory": 256 << 20,
    }
    try:
        yield {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    finally:
        ray.shutdown()


def simulate(
    job: Job, players: Scenario, policy: str, tell: Callable[[RoundProgress | RoundSeen], None], cpus: int = 2
) -> SimulationResult:
    """Conduct a job with virtual sites on this machine. Call it in a process that does nothing else.

    Args:
        job: as it would be launched; its sites are replaced.
        players: how many sites, and how many of them are out of the ordinary.
        policy: TOML, the federation's and every site's.
        tell: hears of the price, of each round as it is sent, and of each closed round.
        cpus: processors for the sites.
    Raises:
        JobError: it cannot be simulated, or not with so many sites.
        SimulationUnavailableError: this installation has no Ray.
        FlowerEnvironmentError: :func:`protos.federation.flower_environment.configure_environment` was not called.
    """
    flower_environment.require_configured()
    made = virtual_job(job, players.sites, policy)
    # A short path: Ray's sockets lie deep below it, and a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix=f"lz{secrets.token_hex(2)}-", ignore_cleanup_errors=True) as folder:
        return Simulation(made, players, policy, Path(folder), tell).run(cpus)
