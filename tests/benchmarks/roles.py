"""The processes of the benchmark of rounds: ``python -m tests.benchmarks.roles ROLE HOME``.

``governed`` is the product's agent without the pause before its answers (agent/federation/service.py), ``paced`` with
it. ``trained``, ``flat`` and ``many`` are agents over the same link that train the same, or only add to what they
get, and neither price, seal nor write anything down. ``hub`` is the product's coordinator with a conductor that
admits whatever arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from protos.federation import flower_environment

flower_environment.configure_environment(Path(sys.argv[2]) / "flower")

from agent.cli import serve  # noqa: E402 - Flower reads its environment while it is imported
from agent.domain import Update  # noqa: E402
from agent.dp.noise import SystemEntropy  # noqa: E402
from agent.federation import service  # noqa: E402
from agent.federation.supernode_process import LinkConfig, SuperNodeLink  # noqa: E402
from agent.federation.tasks import RoundAnswer, RoundTask  # noqa: E402
from agent.mechanisms.federated.mechanism import Federated  # noqa: E402
from agent.mechanisms.federated.task_training import example_rule  # noqa: E402
from agent.storage import projects  # noqa: E402
from agent.storage.examples import task_cohort  # noqa: E402
from agent.storage.site_directory import SiteDirectory as AgentHome  # noqa: E402
from coordinator import daemon  # noqa: E402
from coordinator.federation import run_manager  # noqa: E402
from coordinator.federation.events import RunEvent  # noqa: E402
from coordinator.federation.run_controller import RunController  # noqa: E402
from coordinator.federation.strategy import RoundModel, RoundPlan, RoundProgress  # noqa: E402
from coordinator.federation.superlink import conduct  # noqa: E402
from coordinator.storage.directory import CoordinatorDirectory  # noqa: E402

MODALITY: Final = "OT"
TENSORS: Final = 320


def governed(home: Path, paced: bool) -> int:
    """``lazaret-agent serve``."""
    if not paced:
        service.response_delay = lambda *_: 0.0
    return serve.serve(argparse.Namespace(home=home, modality=MODALITY, project="main"))


def sized(home: Path) -> int:
    """``lazaret-agent serve`` without the pause, and with a model of any length that nobody trains."""
    made = importlib.import_module("made_mechanism")  # by PYTHONPATH: the confined process may read no tests
    service.read_mechanism = made.Made.from_json
    return governed(home, paced=False)


def bare(home: Path, answer: Callable[[AgentHome, RoundTask], RoundAnswer]) -> int:
    """The link alone."""
    site = AgentHome(home)
    settings, stop = site.settings(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(1)
    link = SuperNodeLink(LinkConfig(settings.coordinator, site.keys, site.keys / "node.key", settings.proxy))
    link.run(lambda task: answer(site, task), stop, lambda state: print(f"link: {state}", flush=True))
    return 0


def trained(site: AgentHome, task: RoundTask) -> RoundAnswer:
    """The same training from the same vault."""
    if task.vector is None:
        return RoundAnswer(b"-")
    mechanism = Federated.from_json(task.config.decode())
    vault = projects.open_vault(site)
    try:
        cohort = task_cohort(vault, example_rule(mechanism.task))
    finally:
        vault.close()
    return RoundAnswer(b"-", mechanism.run_round(cohort, Update(task.vector.copy()), SystemEntropy()).vector)


def flat(_site: AgentHome, task: RoundTask) -> RoundAnswer:
    """A model of one tensor: take it, add 0, 1, 2..., send it: equal pieces would be carried once."""
    return RoundAnswer(b"-", None if task.vector is None else task.vector + ramp(task.vector))


def ramp(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """0, 1, 2... of its length."""
    return np.arange(len(vector), dtype=np.float32)


def many(_site: AgentHome, task: RoundTask) -> RoundAnswer:
    """The same in :data:`TENSORS` tensors: unpacked after it came, packed before it leaves."""
    if task.vector is None:
        return RoundAnswer(b"-")
    model = {f"layer-{n}": part.copy() for n, part in enumerate(np.array_split(task.vector, TENSORS))}
    model = {name: tensor + ramp(tensor) for name, tensor in model.items()}
    return RoundAnswer(b"-", np.concatenate(list(model.values())))


class AdmitAll:
    """The gate of a coordinator that checks nothing and keeps nothing."""

    def __init__(
        self, tell: Callable[[int, tuple[str, ...]], None], progress: Callable[[RoundProgress], None]
    ) -> None:
        """``tell`` hears of each closed round, ``progress`` of all else."""
        self._tell, self.progress = tell, progress

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """Everybody takes part."""
        del sealed, least
        return {}

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """Anything."""
        del site, round_index, envelope, artifact
        return None

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Only the news."""
        del model, refused
        self._tell(round_index + 1, used)


class Ungoverned(RunController):
    """Conducts a run without any of our checks: no books, no review, no checkpoint."""

    def run(self) -> None:
        """To its end."""
        job = self.job

        def tell(number: int, used: tuple[str, ...]) -> None:
            self.feed.put(RunEvent(job.run, number, "closed", used))

        plan = RoundPlan(
            run=job.run,
            sites=job.sites,
            rounds=job.rounds,
            first_round=0,
            model=RoundModel(np.zeros(job.parameters, np.float32)),
            config=job.config.encode(),
            min_sites=job.min_sites,
            least_grants=len(job.sites),
            round_timeout_s=60.0,
            node_wait_s=30.0,
        )
        with self.context.turn.take(self.feed.waiting):
            conduct(self.context.host, plan, AdmitAll(tell, self.progress))
        self.feed.put(RunEvent(job.run, job.rounds, "finished", job.sites))


def hub(home: Path) -> int:
    """``lazaret-coordinator serve`` with that conductor."""
    run_manager.RunController = Ungoverned  # type: ignore[misc]
    return daemon.serve(
        CoordinatorDirectory(home), lambda text: print(text, flush=True), lambda _parts: contextlib.nullcontext(())
    )


def main(role: str, home: Path) -> int:
    """Play a role until told to stop."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    roles: dict[str, Callable[[], int]] = {
        "governed": lambda: governed(home, paced=False),
        "paced": lambda: governed(home, paced=True),
        "sized": lambda: sized(home),
        "trained": lambda: bare(home, trained),
        "flat": lambda: bare(home, flat),
        "many": lambda: bare(home, many),
        "hub": lambda: hub(home),
    }
    return roles[role]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
