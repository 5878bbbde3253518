"""The model of a run as ``predict`` reads it: the run's one vector, under the statements of its updates or looks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.mechanisms.federated.mechanism import Federated
from agent.prediction.model_folder import ExportedModel, ModelFolderError, read_model_folder
from agent.prediction.model_use import use_of
from coordinator.federation.job import Job
from policies.review.policy import parse
from tests.support.coordinator_runs import SITES, admitting, agents, evaluated_job, job
from tests.support.exported_models import Exported, exported_run

pytestmark = agents
RUNS = {"update": job(rounds=2, run="run-2"), "evaluation": evaluated_job()}  # by what each hospital said last


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Exported]:
    with pytest.MonkeyPatch.context() as patched:
        done: Job = RUNS[request.param]
        return request.param, exported_run(tmp_path_factory.mktemp(request.param), done, patched)


def findings(model: ExportedModel, site: str = "north", **policy: object) -> list[str]:
    found = use_of(model.name, model.sha256, model.facts, model.statements, site, parse(admitting(**policy), "site"))
    return [one.rule for one in found.findings]


def test_a_run_that_has_ended_is_read_with_its_one_vector_and_its_hospitals_statements(
    run: tuple[str, Exported],
) -> None:
    last, made = run
    model = read_model_folder(made.folder, made.ledger_key)
    assert (model.name, model.facts["kind"], model.facts["sites"]) == (RUNS[last].run, "model", list(SITES))
    assert {said.artifact_type for said in model.statements} == {last}
    assert np.array_equal(model.parameters, made.parameters)
    network = model.network(lambda _digest: None)
    same = Federated(model.task, made.parameters.size, 4.0).network(made.parameters)
    for name, tensor in network.module.state_dict().items():
        assert tensor.equal(same.module.state_dict()[name])


def test_the_sites_policy_is_asked_of_every_hospitals_last_statement(run: tuple[str, Exported]) -> None:
    _, made = run
    model = read_model_folder(made.folder, made.ledger_key)
    assert findings(model) == []
    assert findings(model, epsilon=0.5) == ["epsilon"]
    assert findings(model, levels='["B"]') == ["level"]
    assert findings(model, artifact_types='["image-set"]') == ["artifact_type_not_allowed"]
    assert findings(model, site="away", run_approvals='["compliance"]') == ["run_approvals"]


def test_a_run_is_refused_under_another_key_and_of_another_task(run: tuple[str, Exported], tmp_path: Path) -> None:
    _, made = run
    with pytest.raises(ModelFolderError, match="another key"):
        read_model_folder(made.folder, bytes(32))
    other = replace(read_model_folder(made.folder, None).task, seed=9)
    with pytest.raises(ModelFolderError, match="is not the task that the certificate"):
        read_model_folder(made.folder, None, other)
    shutil.copytree(made.folder, tmp_path / "changed")
    (tmp_path / "changed" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFolderError, match="is not the file in SHA256SUMS"):
        read_model_folder(tmp_path / "changed", None)
