"""A coordinator's runs in a test: real books, shelf and job files, with a ward for each site.

A ward holds a real agent, which needs torch. Without torch there are none, and a test that has a site take part in a
run skips (``agents``); everything else of the coordinator is the same.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
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
from tests.support.grids import Grid, Host, admitting

if TYPE_CHECKING:
    from tests.support.wards import Ward

SITES = ("north", "south", "west")
PARAMETERS = 195  # of the small model: three classes of 64 pixels and a constant
AGENTS = importlib.util.find_spec("torch") is not None
NEEDS_AGENT = "agent: a site takes part in a run, and its agent needs torch"
agents = pytest.mark.skipif(not AGENTS, reason=NEEDS_AGENT)


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
    hospitals: dict[str, Hospital] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open()
        self.hospitals = {site: Hospital(site, self.policies.get(site, admitting())) for site in self.sites}
        for hospital in self.hospitals.values():
            self.intake.enrol(hospital.enrolment()[1])
        if AGENTS:
            self._add_wards()
        self.start()

    def _add_wards(self) -> None:
        from tests.support.wards import Vault, Ward  # a real agent: it imports torch

        for i, hospital in enumerate(self.hospitals.values()):
            known = () if hospital.name in self.strangers else self.hospitals.values()
            others = tuple(other.public for other in known if other is not hospital)
            vault = Vault(seed=i)
            self.wards[hospital.name] = Ward(self.folder, hospital, self.intake, others, vault, seed=10 * i + 1)

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


def configuration(rounds: int = 3) -> dict[str, Any]:
    """What a job of ``federated`` says of its training: ``tests.support.wards.federated`` as JSON, without torch."""
    return {
        **{"centre": [0.0] * 64, "classes": ["0", "1", "2"], "clip": 0.1, "images_per_patient": 2},
        **{"learning_rate": 40.0, "noise_multiplier": 1.8, "proximal": 0.0, "public_patients": 25},
        **{"rounds": rounds, "sampling_rate": 0.25, "shape": [8, 8], "steps_per_round": 15},
    }


def secret_configuration(rounds: int = 2, sites: int = 3) -> dict[str, Any]:
    """The same of ``tests.support.wards.masked``."""
    own = {"honest": 2, "learning_rate": 4.0, "ring_bits": 32, "scale": 20, "sites": sites, "value_bound": 4.0}
    shared = configuration(rounds)
    return {key: shared[key] for key in shared if key not in ("proximal", "steps_per_round")} | own


def written(values: dict[str, Any]) -> str:
    """A configuration as the mechanisms write it."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def job(rounds: int = 3, sites: tuple[str, ...] = SITES, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "run": "run-1",
        "mechanism": "federated",
        "config": written(configuration(rounds)),
        "parameters": PARAMETERS,
        "sites": sites,
        "rounds": rounds,
        "min_sites": 2,
        **changes,
    }
    return Job(**values)


def secret_job(rounds: int = 2, sites: tuple[str, ...] = SITES, min_sites: int = 3, **changes: Any) -> Job:
    """A run in secret sums."""
    config = written(secret_configuration(rounds, len(sites)))
    values: dict[str, Any] = {"mechanism": "federated-masked", "config": config, "secure": True, **changes}
    return job(rounds, sites, min_sites=min_sites, **values)
