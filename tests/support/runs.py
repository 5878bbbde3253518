"""A coordinator's runs in a test: real books, shelf and job files, with a ward for each site."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coordinator.edges.log import open_log
from coordinator.edges.runs import Runs
from coordinator.edges.shelf import Shelf
from coordinator.intake import Intake
from coordinator.plan import Job
from policies.policy import parse
from policies.sqlite import open_sqlite
from policies.store import Store
from protos.artifact import unpack_vector
from tests.support.books import Clock, Hospital
from tests.support.wards import Grid, Host, Vault, Ward, admitting, federated, masked

SITES = ("north", "south", "west")


@dataclass
class Federation:
    """A coordinator with its runs, and a ward for each site."""

    folder: Path
    sites: tuple[str, ...] = SITES
    strangers: tuple[str, ...] = ()  # sites that name no partners
    policies: dict[str, str] = field(default_factory=dict)
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    told: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    wards: dict[str, Ward] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open()
        hospitals = [Hospital(site, self.policies.get(site, admitting())) for site in self.sites]
        for i, hospital in enumerate(hospitals):
            self.intake.enrol(hospital.enrolment()[1])
            others = tuple(h.public for h in hospitals if h is not hospital and hospital.name not in self.strangers)
            vault = Vault(seed=i)
            self.wards[hospital.name] = Ward(self.folder, hospital, self.intake, others, vault, seed=10 * i + 1)
        self.start()

    def open(self) -> None:
        self.store = Store(open_sqlite(self.folder / "hub.db"), "lazaret/coordinator", self.key, Clock())
        self.intake = Intake.over(self.store, parse(admitting(), "federation"))
        self.grid = Grid(self.wards)

    def start(self) -> None:
        self.host, self.shelf = Host(self.grid), Shelf(self.folder / "releases", self.store)
        log = open_log(self.folder / "coordinator.log")
        self.runs = Runs(
            self.folder / "runs", self.host, self.intake, self.shelf, log, lambda *said: self.told.append(said)
        )

    def restart(self) -> None:
        """The coordinator was killed; another process opens what is on the disk."""
        self.host.stopping.set()
        for feed in self.runs._feeds.values():
            list(feed.follow())
        self.store.close()
        self.open()
        for ward in self.wards.values():
            ward.intake = ward.door.intake = self.intake
        self.start()

    def state(self, run: str = "run-1") -> str:
        return dict((job.run, state) for job, state in self.runs.known())[run]

    def grants(self) -> list[str]:
        return sorted(g.state for g in self.store.state.grants.values())

    def model(self, run: str, number: int) -> NDArray[np.float32]:
        return unpack_vector((self.folder / "runs" / run / f"round-{number}.safetensors").read_bytes())


def job(rounds: int = 3, sites: tuple[str, ...] = SITES, **changes: Any) -> Job:
    mechanism = federated(rounds=rounds)
    values: dict[str, Any] = {
        "run": "run-1",
        "mechanism": "federated",
        "config": mechanism.to_json(),
        "parameters": mechanism.parameters,
        "sites": sites,
        "rounds": rounds,
        "min_sites": 2,
        **changes,
    }
    return Job(**values)


def secret_job(rounds: int = 2, sites: tuple[str, ...] = SITES, min_sites: int = 3, **changes: Any) -> Job:
    """A run in secret sums."""
    mechanism = masked(rounds=rounds, sites=len(sites))
    values: dict[str, Any] = {"mechanism": mechanism.name, "config": mechanism.to_json(), "secure": True, **changes}
    return job(rounds, sites, min_sites=min_sites, **values)
