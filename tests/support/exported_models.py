"""A model of a task, admitted by a coordinator and exported as its operator does, and a site of that coordinator."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_model import TaskModel, TrainedModel
from agent.mechanisms.federated.task_training import network_of
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import initialise_ledger
from coordinator.cli.main import main
from coordinator.federation import run_controller
from coordinator.federation.job import Job
from coordinator.pools.architectures import approve_task
from coordinator.reports import catalog
from coordinator.storage.directory import CoordinatorDirectory
from policies.accounting.rdp import epsilon_nano
from policies.governance import decisions
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.tasks.task import Task
from protos.identity.key_files import pem, write_private
from tests.support.coordinator_runs import Federation, admitting, conduct_here
from tests.support.ledger_world import Person
from tests.support.pool_world import LAX, World

NO_SUMS = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Exported:
    """The folder of `pool export --model`, and the coordinator's public key and policy."""

    folder: Path
    ledger_key: bytes
    policy: str
    parameters: NDArray[np.float32]


def exported_model(
    folder: Path,
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
    *,
    scale: float = 0.02,
    noise: float = 8.0,
    count: int = 0,
    with_task: bool = True,
) -> Exported:
    """A model of the task, with numbers from a fixed seed. Its hospital states the modality OT.

    ``count``: of its numbers, which a changed hospital may have wrong; 0: the network's.
    """
    count = count or network_of(task, {}.__getitem__).parameters
    parameters = np.random.default_rng(5).normal(0, scale, count).astype(np.float32)
    mechanism = TaskModel(Federated(task, count, noise))
    world = World(folder)
    monkeypatch.setattr(catalog, "ORIGIN", world.register.store.origin)
    world.home.keys.mkdir(mode=0o700)
    key = world.register.store._key
    write_private(world.home.keys / "ledger.key", pem(key))
    (world.home.root / "policy.toml").write_text(LAX)
    approve_task(world.home, task, count, 10)
    if not with_task:  # as of before its text was kept
        (world.home.root / "architectures" / f"{task.digest}.task").unlink()
    accounts = world.register.store.state.accounts
    opened = accounts["north/rdp"].opened
    charged = epsilon_nano(mechanism.claim(), float(opened.delta), opened.order)
    more: Any = {"epsilon_nano": charged, "delta": opened.delta}
    body = mechanism.file(TrainedModel(parameters, NO_SUMS))
    name = world.admit(world.north, "g", body, "model", mechanism.claim(), **more).release
    out = folder / "model"
    assert main(["--home", str(world.home.root), "pool", "export", str(out), "--model", name]) == 0
    world.register.store.close()
    return Exported(out, key.public_key().public_bytes_raw(), LAX, parameters)


def exported_run(folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch, away: str = "") -> Exported:
    """The model of a run that real agents of three hospitals have just carried out; ``away``: one that is offline."""
    home = CoordinatorDirectory(folder)
    home.keys.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(run_controller, "conduct", conduct_here)
    fed = Federation(folder)
    monkeypatch.setattr(catalog, "ORIGIN", fed.store.origin)
    for ward in fed.wards.values():
        ward.vault.patients, ward.online = 60, ward.hospital.name != away
    events = list(fed.runs.launch(job))
    assert events[-1].state == "finished", events
    fed.host.stopping.set()
    parameters = fed.model(job.run, job.turns)
    fed.store.close()
    home.ledger.symlink_to(folder / "hub.db")
    write_private(home.keys / "ledger.key", pem(fed.key))
    (folder / "coordinator.toml").write_text('listen = "127.0.0.1:0"\n')
    (folder / "policy.toml").write_text(admitting())
    out = folder / "model"
    assert main(["--home", str(folder), "pool", "export", str(out), "--model", job.run]) == 0
    return Exported(out, fed.key.public_key().public_bytes_raw(), admitting(), parameters)


def join(home: Path, exported: Exported) -> None:
    """What enrolment leaves at a site: the coordinator's key and policy, and a ledger of its own."""
    site = SiteDirectory(home)
    (site.keys / "federation.toml").write_text(exported.policy)
    (site.keys / "coordinator.pub").write_text(base64.b64encode(exported.ledger_key).decode())
    with _ledger(site) as store:
        initialise_ledger(site, store)


def appoint(home: Path, person: Person) -> None:
    """A person of the site, with their key in a file of their name."""
    with _ledger(SiteDirectory(home)) as store:
        decisions.appoint(store, person.name, person.role, person.public)
    write_private(home.parent / f"{person.name}.key", pem(person.key))


def _ledger(site: SiteDirectory) -> Store:
    disk = open_sqlite(site.root / "ledger.db")
    return Store(disk, origin(site.settings().site), site.sign_key(), lambda: int(time.time()))
