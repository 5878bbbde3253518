"""Federated rounds of a model of a million parameters over three sites, with our checks and without.

Every coordinator and agent is a process of its own on the loopback, over the product's gRPC port and its embedded
Flower; all stand from the start, and runs take turns. A round's time is from one closed round to the next, as an
operator's ``Launch`` call hears of them, so pricing and start of a run are not in it.

``governed_vs_bare``: the product (price, grant, training, sealed update, review, two ledgers, checkpoint) over a
coordinator that admits all and agents that train the same and do nothing else (:mod:`.roles`). The product's agents
answer only at 2, 4, 8... seconds after they were asked, so that the time of an answer does not tell how many patients
were trained on. That pause is idle and no check, and would hide the checks' own cost in whole seconds: the ratio is
without it, and ``paced_s_per_round`` is what a user sees.

``many_tensors_vs_flat``: without checks or training on both sides, agents that take the parameters apart into 320
tensors and pack them again over agents that use them as they come; the wire carries one flat tensor either way.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import grpc
import numpy as np

from agent.deidentify.record import Record
from agent.mechanisms.federated.mechanism import Federated
from agent.storage import projects
from coordinator.storage.directory import operator_certificate
from policies.tasks.networks import NetworkSpec
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.benchmarks import network
from tests.benchmarks.report import Report, Row
from tests.support.federation_world import Federation, Site
from tests.support.ports import free_port
from tests.support.small_tasks import classification, linear_length

SITES: Final = ("site-a", "site-b", "site-c")
ROUNDS, TURNS, PACED = 6, 4, 3
CLASSES: Final = 975  # of 1,024 features and a bias: 999,375 parameters
PATIENTS: Final = 12
ROLES: Final = "tests.benchmarks.roles"


def job(rounds: int) -> Federated:
    """The public configuration: one cheap private step a round, so that training does not hide what is measured."""
    wide = NetworkSpec("linear", {"pooled": 32})
    steps = {"rounds": rounds, "steps_per_round": 1, "images_per_patient": 1, "public_patients": 250}
    task = classification([str(n) for n in range(CLASSES)], (32, 32), wide, learning_rate=1.0, **steps)
    return Federated(task, linear_length(task), noise_multiplier=8.0)


def stock(site: Site, seed: int) -> None:
    """Patients for the site's vault, as an ingest would leave them."""
    rng = np.random.default_rng(seed)
    vault = projects.open_vault(site.home)
    for patient in range(PATIENTS):
        name = rng.bytes(16).hex()
        pixels = rng.random((32, 32)).astype(np.float32)
        who = f"{patient:032x}"
        vault.keep(Record(name, name, who, who, "OT", "image", str(patient % 10), pixels, b"-", False))
    vault.close()


@dataclass(slots=True)
class Camp:
    """A coordinator and three agents that run; runs are numbered."""

    federation: Federation
    parameters: int
    config: bytes
    runs: int = 0

    def rounds(self, rounds: int) -> list[float]:
        """Seconds of each round of a new run, the first left out."""
        self.runs += 1
        request = gateway_pb2.LaunchRequest(
            run=f"run-{self.runs}",
            mechanism="federated",
            config=self.config,
            parameters=self.parameters,
            sites=list(SITES),
            rounds=rounds,
            min_sites=len(SITES),
            all_or_none=True,
        )
        home = self.federation.home
        key, chain = operator_certificate(home, dt.datetime.now(dt.UTC))
        credentials = grpc.ssl_channel_credentials(home.root_crt(), key, chain)
        target = f"127.0.0.1:{self.federation.port}"
        closed, said = [], []
        with grpc.secure_channel(
            target, credentials, [("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", USER_AGENT)]
        ) as channel:
            for event in GatewayStub(channel).Launch(request, timeout=240):
                said.append(f"{event.round} {event.state} {' '.join(event.sites)} {event.reason}")
                if event.state == "closed":
                    if len(event.sites) != len(SITES):
                        raise AssertionError(f"a site is missing: {said}")
                    closed.append(time.perf_counter())
        if len(closed) != rounds or not said[-1].split()[1] == "finished":
            raise AssertionError(f"the run did not finish: {said}")
        return [b - a for a, b in pairwise(closed)]


@contextlib.contextmanager
def camp(folder: Path, hub: str, agents: str, rounds: int) -> Iterator[Camp]:
    """Enrol three sites, start everybody, and wait until all are online.

    Args:
        folder: for all directories.
        hub: "" for the product's coordinator, else a role.
        agents: their role.
        rounds: of each run.
    """
    listen = f'listen = "127.0.0.1:{free_port()}"\n'
    federation, sites = network.found(folder, SITES, listen)
    with contextlib.ExitStack() as stack:
        command = ["-m", ROLES, hub, str(folder / "coordinator")] if hub else []
        stack.enter_context(network.coordinator(federation, command))
        for seed, site in enumerate(sites):
            stock(site, seed)
        starting = [network.started(["-m", ROLES, agents, str(s.home.root)], r"link: (online)") for s in sites]
        with ThreadPoolExecutor(len(sites)) as threads:  # each imports for seconds
            running = list(threads.map(stack.enter_context, starting))
        mechanism = job(rounds)
        try:
            yield Camp(federation, mechanism.parameters, mechanism.to_json().encode())
        finally:
            for agent in running:  # all at once: each signs off in its own time
                agent.process.terminate()


def main() -> Report:
    """Measure; about two minutes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    pairs = {
        "governed_vs_bare": ({"governed": ("", "governed"), "bare": ("hub", "trained")}, TURNS),
        "many_tensors_vs_flat": ({"many": ("hub", "many"), "flat": ("hub", "flat")}, 2),
    }
    what = {
        "governed": "a governed round, without the agents' pause",
        "bare": "the same round without our checks",
        "many": "a round of 320 tensors, packed flat",
        "flat": "a round of one flat tensor",
    }
    for ratio, (kinds, turns) in pairs.items():
        times: dict[str, list[list[float]]] = {name: [] for name in kinds}
        with (
            tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name,
            contextlib.ExitStack() as all_,
        ):
            camps = {k: all_.enter_context(camp(Path(name) / k, *kind, ROUNDS)) for k, kind in kinds.items()}
            for turn in range(turns):
                for kind in camps if turn % 2 else reversed(camps):
                    times[kind].append(camps[kind].rounds(ROUNDS))
        ours, peer = (times[kind] for kind in kinds)
        values = [median(a) / median(b) for a, b in zip(ours, peer, strict=True)]
        for kind, runs in times.items():
            flat = sorted(value for run in runs for value in run)
            rows.append(Row(what[kind], median(flat), "s"))
            rows.append(Row(f"  fastest of {len(flat)}", flat[0], "s"))
            rows.append(Row("  slowest", flat[-1], "s"))
        rows += [Row(f"{ratio}: lowest of {turns} runs", min(values), "x"), Row("  highest", max(values), "x")]
        ratios[ratio] = median(values)
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name,
        camp(Path(name), "", "paced", PACED) as users,
    ):
        paced = median(users.rounds(PACED))
    rows.append(Row("a governed round as users see it, with the agents' pause", paced, "s"))
    return Report(tuple(rows), {**ratios, "paced_s_per_round": paced})
