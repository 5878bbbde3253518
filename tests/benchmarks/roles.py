"""The processes of the benchmark of rounds: ``python -m tests.benchmarks.roles ROLE HOME``.

``governed`` is the product's agent without the pause before its answers (agent/edges/pace.py), ``paced`` with it.
``trained``, ``flat`` and ``many`` are agents over the same link that train the same, or only add 1 to what they get,
and neither price, seal nor write anything down. ``hub`` is the product's coordinator with a conductor that admits
whatever arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from protos import quiet

quiet.hush(Path(sys.argv[2]) / "flower")

from agent import commands  # noqa: E402 - Flower reads its environment while it is imported
from agent.edges import projects  # noqa: E402
from agent.edges import rounds as agent_rounds  # noqa: E402
from agent.edges.home import Home as AgentHome  # noqa: E402
from agent.edges.link import Link, LinkConfig  # noqa: E402
from agent.edges.tasks import Answer, Task  # noqa: E402
from agent.mechanisms import federated  # noqa: E402
from agent.nouns import Update  # noqa: E402
from agent.stages.noise import SystemEntropy  # noqa: E402
from coordinator.edges import runs, server  # noqa: E402
from coordinator.edges.conductor import Conductor  # noqa: E402
from coordinator.edges.federation import RoundPlan, conduct  # noqa: E402
from coordinator.edges.feed import Event  # noqa: E402
from coordinator.edges.home import Home  # noqa: E402
from coordinator.edges.strategy import Model  # noqa: E402

MODALITY: Final = "OT"
TENSORS: Final = 320
MOST_CLASSES: Final = 1 << 20  # the linear model has a million parameters only with very many classes


def governed(home: Path, paced: bool) -> int:
    """``lazaret-agent serve``."""
    if not paced:
        agent_rounds.rest = lambda _seconds: 0.0
    return commands.serve(argparse.Namespace(home=home, modality=MODALITY))


def bare(home: Path, answer: Callable[[AgentHome, Task], Answer]) -> int:
    """The link alone."""
    site = AgentHome(home)
    settings, stop = site.settings(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(1)
    link = Link(LinkConfig(settings.coordinator, site.keys, site.keys / "node.key", settings.proxy))
    link.run(lambda task: answer(site, task), stop, lambda state: print(f"link: {state}", flush=True))
    return 0


def trained(site: AgentHome, task: Task) -> Answer:
    """The same training from the same vault."""
    if task.vector is None:
        return Answer(b"-")
    mechanism = federated.Federated.from_json(task.config.decode())
    vault = projects.open_vault(site)
    try:
        cohort = vault.cohort(MODALITY, mechanism.shape)
    finally:
        vault.close()
    return Answer(b"-", mechanism.run_round(cohort, Update(task.vector.copy()), SystemEntropy()).vector)


def flat(_site: AgentHome, task: Task) -> Answer:
    """A model of one tensor: take it, add 1, send it."""
    return Answer(b"-", None if task.vector is None else task.vector + np.float32(1))


def many(_site: AgentHome, task: Task) -> Answer:
    """The same in :data:`TENSORS` tensors: unpacked after it came, packed before it leaves."""
    if task.vector is None:
        return Answer(b"-")
    model = {f"layer-{n}": part.copy() for n, part in enumerate(np.array_split(task.vector, TENSORS))}
    model = {name: tensor + np.float32(1) for name, tensor in model.items()}
    return Answer(b"-", np.concatenate(list(model.values())))


class AdmitAll:
    """The gate of a coordinator that checks nothing and keeps nothing."""

    def __init__(self, tell: Callable[[int, tuple[str, ...]], None]) -> None:
        """``tell`` hears of each closed round."""
        self._tell = tell

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """Everybody takes part."""
        del sealed, least
        return {}

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """Anything."""
        del site, round_index, envelope, artifact
        return None

    def round_done(self, round_index: int, model: Model, used: tuple[str, ...], refused: Mapping[str, str]) -> None:
        """Only the news."""
        del model, refused
        self._tell(round_index + 1, used)


class Ungoverned(Conductor):
    """Conducts a run without any of our checks: no books, no review, no checkpoint."""

    def run(self) -> None:
        """To its end."""
        job = self.job

        def tell(number: int, used: tuple[str, ...]) -> None:
            self.feed.put(Event(job.run, number, "closed", used))

        plan = RoundPlan(
            run=job.run,
            sites=job.sites,
            rounds=job.rounds,
            first_round=0,
            model=Model(np.zeros(job.parameters, np.float32)),
            config=job.config.encode(),
            min_sites=job.min_sites,
            least_grants=len(job.sites),
            round_timeout_s=60.0,
            node_wait_s=30.0,
        )
        with self.runs.turn.take(self.feed.waiting):
            conduct(self.runs.host, plan, AdmitAll(tell), self._progress)
        self.feed.put(Event(job.run, job.rounds, "finished", job.sites))


def hub(home: Path) -> int:
    """``lazaret-coordinator serve`` with that conductor."""
    runs.Conductor = Ungoverned  # type: ignore[misc]
    return server.serve(Home(home), lambda text: print(text, flush=True), lambda _parts: contextlib.nullcontext(()))


def main(role: str, home: Path) -> int:
    """Play a role until told to stop."""
    federated.MOST_CLASSES = MOST_CLASSES  # type: ignore[misc]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    roles: dict[str, Callable[[], int]] = {
        "governed": lambda: governed(home, paced=False),
        "paced": lambda: governed(home, paced=True),
        "trained": lambda: bare(home, trained),
        "flat": lambda: bare(home, flat),
        "many": lambda: bare(home, many),
        "hub": lambda: hub(home),
    }
    return roles[role]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
