"""Before anything is held a site builds what a run would train, and looks what its labels declare."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from agent import runtime
from agent.domain import Update
from agent.errors import ReviewRejectedError
from agent.federation.tasks import RoundTask, TaskDeclinedError
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError
from agent.mechanisms.federated.task_training import network_of
from agent.storage import site_directory
from agent.storage.label_tables import LabelColumn, LabelTable, keep_table
from policies.review.policy import preset
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Input, Labels
from protos.artifacts.arrays import unpack_vector
from tests.support.federated_sites import FederatedSite, federated, federated_site, granted, masked, part
from tests.support.federation_world import SETTINGS
from tests.support.ledger_world import Hospital, policy
from tests.support.site_world import admission
from tests.support.small_tasks import changed, classification
from tests.support.vault_records import key_of, open_vault, record

CNN = NetworkSpec("small-cnn", {"width": 8, "convolutions": 2, "pooled": 1})


@pytest.fixture
def site(tmp_path: Path) -> FederatedSite:
    return federated_site(tmp_path)


def untouched(site: FederatedSite) -> None:
    assert site.account() == (0, 0)
    assert site.vault.reads == 0
    assert part(site).run == ""


@pytest.mark.parametrize("job", [federated(), masked()])
def test_a_length_that_is_not_the_networks_own_is_refused_and_nothing_is_held(
    site: FederatedSite, job: Federated
) -> None:
    with pytest.raises(FederatedConfigError, match="trains 195"):
        part(site).join("run-1", changed(job, parameters=196))
    untouched(site)


def test_a_task_of_another_modality_is_refused_and_nothing_is_held(site: FederatedSite) -> None:
    job = federated()
    other = replace(job, task=replace(job.task, input=Input("CT", job.task.input.size)))
    with pytest.raises(ReviewRejectedError, match="modality"):
        part(site).join("run-1", other)
    untouched(site)


def labelled(*classes: str, table: str = "findings") -> Federated:
    """A run that learns a column of a table."""
    job = federated()
    labels = Labels(table=table, columns=("grade",), classes=classes)
    return replace(job, task=replace(job.task, labels=labels))


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (labelled("low", "middle", "highest"), "findings.grade: the table does not declare all classes of the task"),
        (labelled("low", "middle", "high", table="others"), "there is no label table of that name"),
    ],
)
def test_a_task_of_labels_that_the_site_does_not_declare_is_refused_before_a_price_and_its_people_hear_why(
    tmp_path: Path, job: Federated, why: str
) -> None:
    """Found out in the first round, it would burn one round after another, and tell the coordinator less."""
    hospital, told = Hospital("site-a"), list[str]()
    vault = open_vault(tmp_path)
    site = FederatedSite(
        tmp_path,
        hospital,
        admission(tmp_path / "hub.db", policy(), hospital),
        vault=vault,  # type: ignore[arg-type]
    )
    column = LabelColumn("grade", "category", ("low", "middle", "high"))
    owner = key_of(1, 3)
    keep_table(vault, LabelTable("findings", "patient-id", "patient", (column,), {(owner, owner): (1,)}))
    vault.keep(record(1, 1))
    part(site).site = replace(part(site).site, say=lambda _, detail: told.append(detail))
    with pytest.raises(TaskDeclinedError, match="policy"):
        site.handle(RoundTask("run-1", "price", 0, job.to_json().encode()))
    assert (site.account(), part(site).run, part(site).site.ledger.store.state.grants) == ((0, 0), "", {})
    assert told == [next(line for line in told if line.startswith(f"run-1: this site takes no part: labels: {why}"))]
    site.handle(RoundTask("run-2", "price", 0, labelled("low", "middle", "high").to_json().encode()))
    assert site.account()[0] > 0
    vault.close()


def test_a_public_start_that_the_site_does_not_vouch_for_is_refused_and_one_that_it_has_is_trained(
    site: FederatedSite,
) -> None:
    plain = network_of(classification(size=(16, 16), network=CNN), {}.__getitem__)
    raw = safetensors.torch.save({n: t.contiguous() for n, t in plain.module.net.state_dict().items()})
    digest = hashlib.sha256(raw).hexdigest()
    task = classification(size=(16, 16), network=replace(CNN, weights=digest), steps_per_round=2, learning_rate=0.1)
    job = Federated(task, plain.parameters, noise_multiplier=3.0)
    with pytest.raises(FederatedConfigError, match=digest):
        part(site).join("run-1", job)
    untouched(site)
    part(site).site = replace(part(site).site, public_file={digest: raw}.get)
    granted(site, job)
    signed = part(site).train("run-1", 1, Update(np.zeros(job.parameters, np.float32)))
    assert unpack_vector(signed.artifact).any()


def test_a_file_of_public_weights_counts_only_where_the_site_vouches_for_it(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    settings = SETTINGS.format(site="site-a", listen="127.0.0.1:1")
    home = site_directory.create(tmp_path / "site-a", settings, preset("internal"))
    (home.root / runtime.WEIGHTS).mkdir()
    (home.root / runtime.WEIGHTS / f"{digest}.safetensors").write_bytes(b"weights")
    assert runtime.public_file(home, digest) is None
    path = home.root / "site.toml"
    path.write_text(path.read_text().replace("public_components = []", f'public_components = ["{digest}"]'))
    assert runtime.public_file(home, digest) == b"weights"
    assert runtime.public_file(home, "0" * 64) is None
