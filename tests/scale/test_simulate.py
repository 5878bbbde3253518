"""The run's own strategy and books over Flower's simulation engine: eight virtual sites here, hundreds when asked.

The long forms: ``python -m tests.scale simulate --sites 200``, and ``--sites 1000``; or ``pytest -m slow`` of this.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.admission import AdmissionService
from coordinator.federation.virtual_sites import Scenario, SyntheticCohort, Training, VirtualClientApp, name_of
from policies.review.policy import parse, preset
from tests.scale.jobs import job
from tests.support.ledger_world import open_register

ROOT = Path(__file__).resolve().parents[2]
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason='Ray is not installed: pip install "lazaret[simulation]"'
)
KRUM = '{"byzantine":2,"multi":3,"name":"krum"}'


def simulated(*words: str) -> dict[str, Any]:
    """As a user would, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.scale", "simulate", "--json", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@needs_ray
def test_eight_virtual_sites_converge_and_those_out_of_the_ordinary_are_named() -> None:
    found = simulated("--sites", "8", "--rounds", "2", "--poor", "1", "--away", "1")
    assert found["failed"] == ""
    assert found["declined"] == {name_of(7): "budget"}
    assert (found["granted"], found["updates"]) == (7, 2 * 6)
    assert [r["refused"] for r in found["rounds"]] == [{name_of(6): "unavailable"}] * 2
    assert [r["used"] for r in found["rounds"]] == [6, 6]
    assert found["rounds"][-1]["accuracy"] > 0.5
    assert sorted(found["spent"].values()) == [1, 7], "seven hold the run's price, the poor one nothing"
    assert found["spent"]["0"] == 1


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sites", [200, 1000])
def test_hundreds_of_virtual_sites_are_conducted_by_the_same_strategy(sites: int) -> None:
    found = simulated("--sites", str(sites), "--rounds", "1")
    assert found["failed"] == ""
    assert (found["granted"], found["updates"], found["rounds"][0]["used"]) == (sites, sites, sites)


def test_without_ray_it_is_said_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from pathlib import Path; import tempfile\n"
        "from protos.federation.flower_environment import configure_environment as c; c(Path(tempfile.mkdtemp()))\n"
        "from coordinator.federation import simulation as s\n"
        "from coordinator.federation.virtual_sites import Scenario\n"
        "from tests.scale.jobs import job\n"
        "from policies.review.policy import preset\n"
        "s.find_spec = lambda name: None\n"
        "try: s.simulate(job(1), Scenario(2, 0), preset('internal'), print)\n"
        "except s.SimulationUnavailableError as said: print(said)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == 'simulations need Ray: pip install "lazaret[simulation]"\n'


def test_a_virtual_sites_words_are_reviewed_like_any_others(tmp_path: Path) -> None:
    """Its enrolment, its reservation and its release pass the real books, and a release of more rounds does not."""
    one = dataclasses.replace(job(2), sites=(name_of(0),), min_sites=1)
    site = VirtualClientApp(one, Scenario(1, 0), (preset("internal"), preset("internal"))).site(0)
    register = open_register(tmp_path / "ledger.db")
    intake = AdmissionService.over(register.store, parse(preset("internal"), "federation"))
    intake.enrol(site.enrolment())
    assert intake.reserve_run(one.run, {site.name: site.reservation()}, 1)[site.name].admitted
    vector = np.zeros(one.parameters, np.float32)
    release = intake.release(site.name, "submit-1", site.update(0, vector))
    assert intake.register.dry_run_review(release, site.update(0, vector)).admitted
    late = site.update(2, vector)
    assert not intake.register.dry_run_review(intake.release(site.name, "submit-2", late), late).admitted


def test_made_patients_are_the_same_for_the_same_seed_and_each_site_has_its_own() -> None:
    training = Training.of(job(1))
    first, again, other = (SyntheticCohort.make(training, 0, site) for site in (0, 0, 1))
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)
    assert Counter(first.labels.tolist()) != Counter(other.labels.tolist())


def test_one_patient_moves_a_step_by_at_most_the_clip() -> None:
    training = dataclasses.replace(Training.of(job(1)), noise_multiplier=0.0, steps_per_round=1, sampling_rate=1.0)
    made, start = SyntheticCohort.make(training, 0, 0), np.zeros(650, np.float32)
    without = SyntheticCohort(made.images[1:], made.labels[1:])
    one, two = (training.train(start, m, np.random.default_rng(0)) for m in (made, without))
    bound = training.learning_rate * training.clip / training.public_patients
    assert 0 < np.linalg.norm(one - two) <= bound * (1 + 1e-4)


def test_the_cast_says_all_that_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match=r"sites: .*seed: .*poisoned, poor, away"):
        Scenario(0, -1, poisoned=2)
    assert [Scenario(4, 0, 1, 1, 1).part(i) for i in range(4)] == ["honest", "away", "poor", "poisoned"]
