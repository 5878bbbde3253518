"""Simulated sites train by the mechanisms' own code, on patients dealt out once, beside the same recipe bare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.errors import DivergedError
from agent.federation.public_folder import PublicFolder, PublicFolderError
from agent.federation.simulated_sites import CHOOSING, TEST, Deal, SimulatedSites, simulated_mechanism
from agent.mechanisms.federated.mechanism import Federated
from policies.tasks.evaluation import HELD_OUT, TRAINED
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Task
from tests.support.public_folders import public_folder, small_task
from tests.support.small_tasks import classification, linear_length, plain_config

NAMES = [f"p{number:03d}" for number in range(90)]
LOOKS = {"looks": 1, "noise": 5.0, "held_out": 20, "bins": 10}


def everybody(deal: Deal) -> list[str]:
    return sorted(name for group in (*deal.sites.values(), *deal.parts.values()) for name in group)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_every_patient_is_in_one_place_and_those_to_choose_on_are_the_same_for_every_seed(seed: int) -> None:
    deal = Deal.of({"": NAMES}, {"a": 20, "b": 10}, seed)
    assert everybody(deal) == NAMES
    assert {site: len(names) for site, names in deal.sites.items()} == {"a": 20, "b": 10}
    assert deal.parts[CHOOSING] == Deal.of({"": NAMES}, {"a": 20, "b": 10}, seed + 1).parts[CHOOSING]
    assert deal.parts[TEST] != Deal.of({"": NAMES}, {"a": 20, "b": 10}, seed + 1).parts[TEST]


def test_where_the_table_names_the_sites_each_has_patients_of_its_own() -> None:
    groups = {"a": NAMES[:40], "b": NAMES[40:80], "elsewhere": NAMES[80:]}
    deal = Deal.of(groups, {"a": 20, "b": 20}, 0)
    assert everybody(deal) == NAMES
    assert set(deal.sites["a"]) <= set(groups["a"])
    assert set(deal.sites["b"]) <= set(groups["b"])
    mixed = Deal.of(groups, {"a": 20, "other": 20}, 0)
    assert not set(mixed.sites["a"]) <= set(groups["a"])


@pytest.mark.parametrize(
    ("groups", "problem"),
    [({"": NAMES[:30]}, "30 patients, and the simulated sites need 40"), ({"": NAMES[:50]}, "10 patients are left")],
)
def test_too_few_patients_are_refused(groups: Mapping[str, list[str]], problem: str) -> None:
    with pytest.raises(PublicFolderError, match=problem):
        Deal.of(groups, {"a": 20, "b": 20}, 0)


def test_a_sites_held_out_patients_are_trained_on_by_nobody() -> None:
    deal = Deal.of({"": NAMES}, {"a": 20, "b": 20}, 0)
    for site in ("a", "b"):
        trained, held_out = (set(deal.part(site, part, 20)) for part in (TRAINED, HELD_OUT))
        assert (len(trained), len(held_out), trained | held_out) == (16, 4, set(deal.sites[site]))
    assert deal.part("a", TRAINED, 0) == deal.sites["a"]


def sites(tmp_path: Path, task: Task) -> SimulatedSites:
    folder = PublicFolder.open(public_folder(tmp_path / "public"), task)
    return SimulatedSites(folder, {}, {"a": 20, "b": 20, "c": 20})


def config(task: Task, noise: float, parameters: int = 0) -> str:
    return json.dumps(plain_config(task, parameters or linear_length(task), noise) | {"evaluate": LOOKS})


def test_a_round_without_privacy_is_a_private_one_without_clipping_and_noise(tmp_path: Path) -> None:
    """The second implementation is the private one, with a clip that nobody reaches and little noise."""
    task = small_task(clip=10.0, learning_rate=0.2, momentum=0.5, proximal=0.3, ema=0.9, public_patients=16)
    here, mechanism = sites(tmp_path, task), simulated_mechanism(config(task, 0.0011))
    start = np.random.default_rng(1).normal(0, 0.1, linear_length(task)).astype(np.float32)
    private = here.round(mechanism, ("a", 0), start)  # of 16 patients: four are held out
    without = here.round_without_privacy(mechanism, ("a", 0), start, 0.2)
    assert float(np.abs(private - start).max()) > 0.05
    assert np.allclose(private, without, atol=5e-3)
    clipped = here.round_without_privacy(mechanism, ("a", 0), start, 0.4)
    assert not np.allclose(private, clipped, atol=5e-3)


def test_a_round_without_privacy_says_when_it_diverges(tmp_path: Path) -> None:
    task = small_task(momentum=0.9)
    here, mechanism = sites(tmp_path, task), simulated_mechanism(config(task, 3.0))
    with pytest.raises(DivergedError):
        here.round_without_privacy(mechanism, ("a", 0), np.zeros(linear_length(task), np.float32), 1e38)


def test_a_round_and_a_look_are_noisy_and_no_two_alike(tmp_path: Path) -> None:
    task = small_task()
    here, mechanism = sites(tmp_path, task), simulated_mechanism(config(task, 2.0))
    start = np.zeros(linear_length(task), np.float32)
    for ask in (here.round, here.look):
        first, second = ask(mechanism, ("a", 0), start), ask(mechanism, ("a", 0), start)
        assert first.shape == second.shape
        assert not np.array_equal(first, second)


def test_exact_sums_of_shares_add_up_to_those_of_all(tmp_path: Path) -> None:
    task = small_task()
    here, mechanism = sites(tmp_path, task), simulated_mechanism(config(task, 2.0))
    model = np.random.default_rng(2).normal(0, 0.1, linear_length(task)).astype(np.float32)
    whole = here.exact_sums(mechanism, (TEST, 0, 0, 1), model)
    shares = [here.exact_sums(mechanism, (TEST, 0, share, 3), model) for share in range(3)]
    assert np.allclose(np.sum(shares, axis=0), whole)
    assert whole.sum() == pytest.approx(len(here.deal(0).parts[TEST]))


def test_remembered_features_are_those_that_a_site_computes(tmp_path: Path) -> None:
    spec = NetworkSpec("small-cnn", {"width": 8, "convolutions": 2, "pooled": 1}, trained="head")
    task = classification(("dark", "bright"), (8, 8), spec)
    folder = PublicFolder.open(public_folder(tmp_path / "public"), task)
    text = config(task, 2.0, SimulatedSites(folder, {}, {"a": 20}).parameters())
    patients = [folder.patient(name) for name in folder.groups[""][:5]]
    pixels = torch.from_numpy(np.stack([patient.examples[0].pixels for patient in patients if patient]))
    real, simulated = Federated.from_json(text).network(), simulated_mechanism(text).network()
    assert real.trained.first > 0
    for _ in range(2):
        assert torch.equal(real.prepare(pixels), simulated.prepare(pixels))
