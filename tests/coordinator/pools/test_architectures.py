"""The architecture of a task's model follows from the task on both sides; the operator's launch approves it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_model import TaskModel
from coordinator.cli.main import main
from coordinator.federation.job import Job, JobError
from coordinator.gateway.service import inspect_artifact
from coordinator.pools.architectures import FOLDER, approve_models, task_architecture
from coordinator.storage.directory import CoordinatorDirectory
from policies.tasks.evaluation import EvaluationPlan
from policies.tasks.task import Labels, Task
from protos.artifacts.strict_safetensors import Architecture
from tests.support.ledger_world import Hospital
from tests.support.small_tasks import classification, plain_config

TASK = classification()
PLAIN = TaskModel(Federated(TASK, 195, 2.0))
LOOKED = TaskModel(Federated(TASK, 195, 2.0, EvaluationPlan(1, 20.0, 20, 10)))
MODEL = Hospital("north").release("g", artifact_type="model", mechanism="model")


def job(task: Task = TASK, bins: int = 0) -> Job:
    config = plain_config(task)
    looks = {"evaluate": {"looks": 1, "noise": 20.0, "held_out": 20, "bins": bins}} if bins else {}
    more = {"evaluate": (3,)} if bins else {}
    return Job("run-1", "federated", json.dumps({**config, **looks}), config["parameters"], ("north",), 3, 1, **more)


@pytest.fixture
def home(tmp_path: Path) -> CoordinatorDirectory:
    (tmp_path / FOLDER).mkdir()
    return CoordinatorDirectory(tmp_path)


def refused(home: CoordinatorDirectory, mechanism: TaskModel) -> list[str]:
    path = home.root / "artifact"
    path.write_bytes(mechanism.untrained())
    return [finding.rule for finding in inspect_artifact(path, MODEL, home.root / FOLDER)]


@pytest.mark.parametrize(("mechanism", "bins"), [(PLAIN, 0), (LOOKED, 10)])
def test_both_sides_derive_the_same_architecture(tmp_path: Path, mechanism: TaskModel, bins: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw := mechanism.untrained())
    derived = task_architecture(TASK, 195, bins)
    assert raw.startswith(derived.header())
    assert len(raw) == len(derived.header()) + derived.nbytes


def test_after_a_launch_the_models_of_that_very_task_are_admitted_and_no_others(home: CoordinatorDirectory) -> None:
    assert refused(home, PLAIN) == ["architecture"]
    approve_models(home, job())
    assert (refused(home, PLAIN), refused(home, LOOKED)) == ([], [])
    other = replace(TASK, seed=7)
    assert refused(home, TaskModel(Federated(other, 195, 2.0))) == ["architecture"]
    twelve = TaskModel(replace(LOOKED.training, evaluate=EvaluationPlan(1, 20.0, 20, 12)))
    assert refused(home, twelve) == ["architecture"]
    approve_models(home, job(bins=12))
    assert refused(home, twelve) == []
    assert (home.root / FOLDER / f"{TASK.digest}.task").read_text() == TASK.to_json()


def test_a_task_of_too_many_outputs_for_a_look_is_approved_without_one(home: CoordinatorDirectory) -> None:
    many = replace(TASK, labels=Labels(classes=tuple(f"c{n}" for n in range(300))))
    approve_models(home, job(many))
    (only,) = (home.root / FOLDER).glob("*.json")
    assert [tensor.name for tensor in Architecture.parse(only.read_bytes()).tensors] == ["flat"]


def test_where_another_architecture_has_the_name_the_launch_is_refused_in_a_sentence(
    home: CoordinatorDirectory,
) -> None:
    (home.root / FOLDER / f"task-{TASK.digest[:32]}-195.json").write_bytes(b"{}")
    with pytest.raises(JobError, match=r"models of the task cannot be approved: .*another architecture"):
        approve_models(home, job())


def test_an_operator_approves_the_models_of_a_task_file_without_any_run(
    home: CoordinatorDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        task = {name = "digits", kind = "classification"}
        labels.classes = ["0", "1"]
        input = {modality = "OT", size = [8, 8]}
        training.public_patients = 200
        network.name = "linear"
    """
    (tmp_path / "digits.toml").write_text(text)
    command = ["--home", str(home.root), "pool", "architecture", "--task", str(tmp_path / "digits.toml")]
    assert main([*command, "--parameters", "130", "--approve", "digits"]) == 0
    assert "kind: task-model" in capsys.readouterr().out
    shown = Architecture.parse((home.root / FOLDER / "digits.json").read_bytes())
    told = json.loads(shown.told)["config"]
    assert (told["name"], told["bins"]) == ("digits", 0)
    assert (home.root / FOLDER / f"{told['task']}.task").exists()
    for wrong, why in (
        ([], "--parameters: "),
        (["--parameters", "130", "--bins", "7"], "--bins: an even number"),
        ([str(tmp_path / "model.safetensors")], "not both"),
    ):
        assert main([*command, *wrong]) == 1
        assert why in capsys.readouterr().err
