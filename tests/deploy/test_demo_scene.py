"""The demo says in a command's own words why it failed; its policies admit what it shows and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from agent.mechanisms.federated.mechanism import FederatedConfigError
from agent.mechanisms.registry import MECHANISMS
from coordinator.federation.job import Job
from deploy.demo import chests, heads
from deploy.demo.jobs import federated_job, job_file, masked_job, public_start
from deploy.demo.own_policies import SITES, amended, policies
from deploy.demo.scale import BASE, MAIN, Scale, full, main_job
from deploy.demo.scene import DemoError, Scene
from deploy.phantoms.heads import isotropic
from policies.review.policy import PolicyError, parse, preset
from protos.artifacts.shards import Nifti, plain_bytes

SAYS = "import sys; print({answer!r}); print('every cluster is at risk', file=sys.stderr); sys.exit({status})"


def command(answer: str, status: int) -> list[str]:
    return [sys.executable, "-c", SAYS.format(answer=answer, status=status)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, tmp_path, Scale(5, 1))


def test_a_verdict_that_refuses_is_part_of_the_story(scene: Scene) -> None:
    assert scene.run(command('{"admitted": false}', 1), may_refuse=True) == '{"admitted": false}\n'
    with pytest.raises(DemoError, match="exit 1"):
        scene.run(command('{"admitted": false}', 1))


@pytest.mark.parametrize(("answer", "status"), [("", 1), ("", 70), ("{}", 70), ("{}", 2)])
def test_a_release_that_never_came_to_a_verdict_ends_the_demo_with_its_reason(
    scene: Scene, answer: str, status: int
) -> None:
    with pytest.raises(DemoError, match="every cluster is at risk"):
        scene.run(command(answer, status), may_refuse=True)


def test_the_main_jobs_policies_are_the_preset_but_for_how_often_and_the_poor_sites_budget() -> None:
    own = preset("internal")
    texts = policies(MAIN)
    twice = own.replace("max_releases_per_patient = 1 ", "max_releases_per_patient = 2 ")
    assert [texts[name] for name in ("site-a", "site-b", "site-c", "federation")] == [own, twice, own, twice]
    assert texts["poor"] == own.replace("epsilon = 8.0 ", "epsilon = 2.0 ")
    assert set(policies(BASE).values()) == {own, texts["poor"]}


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name not in MAIN])
def test_what_no_preset_admits_is_admitted_only_if_it_is_shown(name: str) -> None:
    internal = parse(preset("internal"), "internal")
    beyond = {"federated-masked": {"A*"}, "distill": {"C"}, "remodel": {"C"}}
    for text in policies((*MAIN, name)).values():
        law = parse(text, "demo")
        assert set(law.levels) - set(internal.levels) == beyond.get(name, set())
        assert ("private" in law.components) is ("C" in law.levels)
        assert (law.max_reid_rate > internal.max_reid_rate) is (name == "remodel")
        assert (law.mechanisms != internal.mechanisms) is (name == "remodel")


def test_the_policies_let_as_many_bytes_leave_as_the_clinics_heads_may_take() -> None:
    """Before one is read, nobody knows whether NIfTI heads are of whole numbers: four bytes a voxel."""
    grid = Nifti((heads.CLINIC_MM, 0, 0, 0, 0, heads.CLINIC_MM, 0, 0, 0, 0, heads.CLINIC_MM, 0))
    most = plain_bytes(heads.PATIENTS, isotropic(heads.CLINIC_MM).shape, grid, np.float32)
    for text in policies((*MAIN, "remodel")).values():
        assert most <= parse(text, "demo").max_artifact_bytes


@pytest.mark.parametrize("mechanism", chests.SITES)
def test_the_reviewers_sheet_is_beside_the_hospitals_and_not_where_results_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    """Results are what the demo leaves in its folder, and of them the coordinator's releases."""
    typed: list[list[str]] = []

    def run(_: Scene, command: list[str], may_refuse: bool = False) -> str:
        typed.append(command)
        return '{"admitted": true, "level": "C"}'

    monkeypatch.setattr(Scene, "run", run)
    scene = Scene(tmp_path / "out", tmp_path / "work", Scale(5, 1, (mechanism,)))
    (scene.work / "networks").mkdir(parents=True)
    scene.networks = dict.fromkeys(chests.STEPS, "0" * 64)
    scene.distilled(lambda _: None)
    (command,) = typed
    sheet = Path(command[command.index("--sheet") + 1])
    assert sheet.parent == scene.work
    assert sheet.name.startswith(chests.SITES[mechanism])


def test_a_policys_key_that_there_is_not_is_not_amended() -> None:
    with pytest.raises(AssertionError):
        amended(preset("internal"), {"epsilom": "1.0"})
    with pytest.raises(PolicyError):
        parse(amended(preset("internal"), {"epsilon": "-1.0"}), "demo")


def test_each_mechanism_is_shown_or_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (True, False):
        monkeypatch.setattr(heads, "there", lambda found=installed: found)
        for scale in (main_job(5, 1), full(5, 1)):
            assert set(scale.mechanisms) | scale.left_out.keys() == MECHANISMS.keys()
            assert not set(scale.mechanisms) & scale.left_out.keys()
            assert all(scale.left_out.values())
        assert ("remodel" in full(5, 1).mechanisms) is installed


def test_each_job_of_the_demo_can_be_launched_and_its_network_built() -> None:
    plain = federated_job(2)
    for mechanism, least in ((plain, 2), (masked_job(plain), 3)):
        told = job_file(mechanism, least)
        told |= {"config": mechanism.to_json(), "sites": SITES, "evaluate": tuple(told.get("evaluate", ()))}
        job = Job("digits", **told)
        assert job.claim() == mechanism.claim(), "both sides price the same"
        assert mechanism.network(files=public_start()).parameters == job.parameters
        with pytest.raises(FederatedConfigError, match="public weights"):
            mechanism.network()
