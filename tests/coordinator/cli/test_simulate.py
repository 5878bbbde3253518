"""A simulation as it is typed: real processes of simulated sites over a small folder of made pictures."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.main import main
from coordinator.cli.simulate import _job
from coordinator.federation import simulated_sites_process
from coordinator.storage.directory import create
from policies.review.policy import preset
from policies.tasks.networks import NetworkSpec
from tests.support.coordinator_runs import evaluated_job
from tests.support.public_folders import public_folder, small_task
from tests.support.small_tasks import classification, linear_length, masked_config

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="the simulated sites train")
pytestmark = pytest.mark.timeout(1200)  # processes that import torch and train, on a machine that may be busy


@pytest.mark.parametrize(("rounds", "looks"), [(0, (1, 2)), (1, (1,)), (2, (1, 2)), (9, (1, 2))])
def test_fewer_rounds_have_the_looks_that_come_in_them_and_one_at_the_end(
    tmp_path: Path, rounds: int, looks: tuple[int, ...]
) -> None:
    made = evaluated_job()
    text = {key: value for key, value in asdict(made).items() if key != "run"}
    text |= {"config": json.loads(made.config), "strategy": json.loads(made.strategy)}
    (tmp_path / "job.json").write_text(json.dumps(text))
    found = _job(tmp_path / "job.json", rounds)
    assert (found.evaluate, found.claim()) == (looks, made.claim())


def world(folder: Path, patients: int = 160, **more: Any) -> list[str]:
    """A coordinator, a job of three sites, a folder of made patients; the words of a simulation of it."""
    create(folder / "hub", 'listen = "127.0.0.1:0"\n', preset("internal"), dt.datetime.now(dt.UTC))
    task = small_task()
    looks = {"looks": 1, "noise": 20.0, "held_out": 20, "bins": 10}
    config = {"task": task.to_table(), "epsilon": 8.0, "evaluate": looks}
    job = {"mechanism": "federated", "sites": ["site-a", "site-b", "site-c"], "rounds": 3, "min_sites": 2}
    job |= {"parameters": linear_length(task), "evaluate": [3], "config": config}
    (folder / "job.json").write_text(json.dumps({**job, **more}))
    public_folder(folder / "public", patients=patients)
    words = ["--home", str(folder / "hub"), "round", "simulate", str(folder / "job.json")]
    return [*words, "--data", str(folder / "public"), "--out", str(folder / "out"), "--json"]


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@needs_torch
def test_a_run_is_shown_beside_single_sites_and_beside_no_privacy_and_goes_on_where_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = world(tmp_path)
    assert main([*words, "--seeds", "2", "--alone", "1", "--epsilons", "3,8"]) == 0
    *events, whole = told(capsys)
    assert {event["arm"] for event in events} == {"together", "alone", "without privacy"}
    assert [row["epsilon"] for row in whole["prices"]] == ["3", "8"]
    low, high = whole["prices"]
    assert low["noise_multiplier"] > high["noise_multiplier"]
    # the halves of the pictures tell the classes apart: everybody learns it, and best without noise
    assert whole["before"]["mean"] == pytest.approx(0.5, abs=0.2)
    assert whole["without privacy"]["mean"] > 0.95
    assert whole["without privacy"]["mean"] + 0.02 >= high["together"]["mean"] > 0.75
    assert all(row[arm]["error"] is not None for row in whole["prices"] for arm in ("together", "alone"))
    for plot in ("rounds.png", "epsilons.png"):
        assert (tmp_path / "out" / plot).read_bytes().startswith(b"\x89PNG")

    before = (tmp_path / "out" / "results.jsonl").read_text()
    (tmp_path / "out" / "results.jsonl").write_text(before + '{"arm": "together", "epsil')  # killed within a line
    assert main([*words, "--seeds", "2", "--alone", "1", "--epsilons", "3,8"]) == 0
    assert told(capsys) == [whole], "nothing is trained again"
    assert (tmp_path / "out" / "results.jsonl").read_text() == before

    assert main([*words, "--seeds", "1", "--patients", "10"]) == 1
    assert "of another job, data or sizes" in capsys.readouterr().err


@needs_torch
def test_a_masked_run_is_simulated_with_one_noise_on_the_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = small_task(steps_per_round=1, rounds=40, momentum=0.0)
    config = {key: value for key, value in masked_config(task).items() if key != "noise_multiplier"}
    masked = {"mechanism": "federated-masked", "secure": True, "min_sites": 3, "rounds": 12, "evaluate": []}
    words = world(tmp_path, 1000, **masked, config={**config, "epsilon": 8.0, "value_bound": 16.0})
    assert main([*words, "--seeds", "1", "--alone", "1"]) == 0
    *_, whole = told(capsys)
    (row,) = whole["prices"]
    assert "A*" in row["refused"]
    assert row["together"]["mean"] > 0.9
    assert row["alone"]["mean"] is not None


@needs_torch
@pytest.mark.slow
def test_two_hundred_sites_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*world(tmp_path), "--sites", "200", "--patients", "5", "--seeds", "1", "--alone", "0", "--rounds", "2"]
    public_folder(tmp_path / "many", patients=1200)
    words[words.index("--data") + 1] = str(tmp_path / "many")
    assert main([*words, "--poisoned", "3", "--away", "40"]) == 0
    *_, whole = told(capsys)
    assert whole["failed"] == []
    assert whole["prices"][0]["together"]["mean"] is not None


@needs_torch
@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--patients", "21"], "--patients: one number, or one for each of the 3 sites, from 1 to"),
        (["--patients", "5,5"], "--patients: one number, or one for each of the 3 sites"),
        (["--epsilons", "low"], "--epsilons: numbers with commas between"),
        (["--epsilons", "0.0001"], "no noise keeps it under"),
        (["--seeds", "0"], "--seeds: 1 to 100"),
        (["--sites", "9"], "the simulated sites need 180"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], problem: str
) -> None:
    assert main([*world(tmp_path), *more]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_own_heads_are_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = NetworkSpec("small-cnn", {"width": 8, "convolutions": 2, "pooled": 1})
    task = classification(("dark", "bright"), (8, 8), network=network, head="own")
    words = world(tmp_path, parameters=1000, config={"task": task.to_table(), "epsilon": 8.0}, evaluate=[])
    assert main(words) == 1
    assert "training.head: a head of each site's own is not simulated" in capsys.readouterr().err


def test_without_the_agents_packages_it_is_said_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_sites_process, "find_spec", lambda _: None)
    assert main(world(tmp_path)) == 1
    said = capsys.readouterr().err
    assert 'trains on this machine, and torch is missing: pip install "lazaret[agent]"' in " ".join(said.split())
