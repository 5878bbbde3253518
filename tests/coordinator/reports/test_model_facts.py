"""The card of a model: what was found in the looks at it, its task, its data rule and its lineage; and its export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.dp.evaluation_sums import ScoredExample, look_sums
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_model import TaskModel, TrainedModel
from coordinator.cli.main import main
from coordinator.pools.architectures import approve_task, keep_task, kept_task
from coordinator.pools.model_averaging import average_runs
from coordinator.pools.selection import PoolRefusedError
from coordinator.reports import catalog
from policies.accounting.rdp import epsilon_nano
from policies.audit.certificate import read
from policies.audit.certificate_check import check
from policies.tasks.evaluation import EvaluationPlan
from policies.tasks.released_model import data_rule, data_rule_digest, data_rule_text
from policies.tasks.task import Card, Task, TaskError, task_from_json, task_from_table
from protos.common.canonical_json import canonical
from protos.identity.key_files import pem, write_private
from tests.support.pool_world import LAX, World
from tests.support.small_tasks import classification

OWN = Card("CC BY-NC 4.0", "Triage in studies; no diagnosis (see the card).")
TASK = replace(classification(("ill", "healthy")), card=OWN)
LOOKED = TaskModel(Federated(TASK, 130, 3.0, EvaluationPlan(1, 2.0, 20, 10)))
RIGHT = 60  # of 80 held-out patients


def trained(mechanism: TaskModel, seed: int = 0) -> bytes:
    """A model of which a look without noise says that it is right of 60 patients, and wrong of 20."""
    patients = [
        [ScoredExample(np.array([0.1, 0.9] if n < RIGHT else [0.9, 0.1], np.float32), np.array([1]))]
        for n in range(80)
    ]
    sums = look_sums(LOOKED.training.layout(), patients) if mechanism.bins else np.zeros(0)
    weights = np.random.default_rng(seed).normal(size=130)
    return mechanism.file(TrainedModel(weights.astype(np.float32), np.asarray(sums, np.float32)))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    monkeypatch.setattr(catalog, "ORIGIN", made.register.store.origin)
    made.home.keys.mkdir(mode=0o700)
    write_private(made.home.keys / "ledger.key", pem(made.register.store._key))
    (made.home.root / "policy.toml").write_text(LAX)
    yield made
    made.register.store.close()


def admitted(world: World, mechanism: TaskModel = LOOKED, grant: str = "g", seed: int = 0) -> str:
    claim = mechanism.claim()
    (opened,) = [
        one.opened for one in world.register.store.state.accounts.values() if one.opened.account == "north/rdp"
    ]
    charged = epsilon_nano(claim, float(opened.delta), opened.order)
    more: Any = {"epsilon_nano": charged, "delta": opened.delta}
    return world.admit(world.north, grant, trained(mechanism, seed), "model", claim, **more).release


def card_of(world: World, name: str, out: Path) -> dict[str, Any]:
    assert main(["--home", str(world.home.root), "pool", "export", str(out), "--model", name]) == 0
    told: dict[str, Any] = json.loads((out / "card.json").read_bytes())
    return told


def test_a_hospitals_own_model_is_exported_with_its_figures_its_rule_and_its_lineage(
    world: World, tmp_path: Path
) -> None:
    approve_task(world.home, TASK, 130, 10)
    name = admitted(world)
    told = card_of(world, name, tmp_path / "out")["model"]
    (look,) = told["evaluation"]
    accuracy = look["figures"]["accuracy"]
    assert accuracy["low"] < 0.75 < accuracy["high"]
    assert accuracy["high"] - accuracy["low"] > 0.1, "the noise is in the interval"
    assert told["task"]["sha256"] == TASK.digest
    assert told["data_rule"] == {"sha256": data_rule_digest(TASK), "text": data_rule_text(TASK)}
    assert (told["licence"], told["intended_use"]) == (OWN.licence, OWN.intended_use)
    assert told["public_weights"] == []
    page = (tmp_path / "out" / "card.md").read_text()
    for words in ("CC BY", "95 % interval", TASK.digest, data_rule_digest(TASK), "held out", "epsilon"):
        assert words in page.replace("\\", ""), words
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines())
    files = {"model.safetensors", "certificate.json", "card.json", "card.md", "ledger-certificate.json", "task.json"}
    assert sums.keys() == files
    signed = read((tmp_path / "out" / "ledger-certificate.json").read_bytes())
    check(signed)
    assert signed.words["task"] == hashlib.sha256((tmp_path / "out" / "task.json").read_bytes()).hexdigest()
    assert signed.facts["artifact_sha256"] == sums["model.safetensors"]
    for file, digest in sums.items():
        assert hashlib.sha256((tmp_path / "out" / file).read_bytes()).hexdigest() == digest


def test_without_a_look_the_card_says_that_nobody_paid_for_one(world: World, tmp_path: Path) -> None:
    approve_task(world.home, TASK, 130, 10)
    plain = TaskModel(replace(LOOKED.training, evaluate=None))
    told = card_of(world, admitted(world, plain), tmp_path / "out")["model"]
    assert (told["evaluation"], told["task"]["sha256"]) == ([], TASK.digest)
    assert "nobody paid for one" in (tmp_path / "out" / "card.md").read_text()


def test_a_model_that_was_changed_is_not_exported_and_a_task_of_another_digest_is_none(
    world: World, tmp_path: Path
) -> None:
    approve_task(world.home, TASK, 130, 10)
    name = admitted(world)
    text = world.home.root / "architectures" / f"{TASK.digest}.task"
    text.write_text(replace(TASK, seed=9).to_json())
    assert kept_task(world.home, TASK.digest) is None
    assert kept_task(world.home, "../../etc/passwd") is None
    told = card_of(world, name, tmp_path / "first")["model"]
    assert "task" not in told, "no other task's rule stands in its card"
    keep_task(world.home, TASK)
    path = world.home.releases / name / "model.safetensors"
    path.write_bytes(trained(LOOKED, seed=7))
    assert main(["--home", str(world.home.root), "pool", "export", str(tmp_path / "o"), "--model", name]) == 1
    assert not (tmp_path / "o").exists()


def test_models_with_the_sums_of_a_look_are_not_merged_since_a_mean_was_not_looked_at(
    world: World, tmp_path: Path
) -> None:
    names = [admitted(world, grant=grant, seed=n) for n, grant in enumerate(("g", "h"))]
    with pytest.raises(PoolRefusedError, match="a look at that very model"):
        average_runs(world.home, world.pool_ledger, tmp_path / "merged", names)
    plain = TaskModel(replace(LOOKED.training, evaluate=None))
    names = [admitted(world, plain, grant=grant, seed=n) for n, grant in enumerate(("i", "j"))]
    assert average_runs(world.home, world.pool_ledger, tmp_path / "merged", names).level == "A"


def test_the_card_of_a_task_is_digested_with_it_bounded_and_left_out_where_it_says_nothing() -> None:
    bare = replace(TASK, card=Card())
    assert "card" not in bare.to_table(), "tasks of before have the digest that they had"
    assert bare.digest != TASK.digest
    assert task_from_json(TASK.to_json()) == TASK
    for value in ("<b>free</b>", "two\nlines", "a" * 101, "[link](http://x)", "\u202eecnecil"):
        with pytest.raises(TaskError, match=r"card.licence: must be a line"):
            task_from_table({**bare.to_table(), "card": {"licence": value}})
    with pytest.raises(TaskError, match=r"card.author"):
        task_from_table({**bare.to_table(), "card": {"author": "x"}})


def test_the_data_rule_is_the_same_for_tasks_that_see_the_same_patients() -> None:
    other = replace(TASK, seed=5, card=Card(), training=replace(TASK.training, rounds=9))
    assert data_rule_digest(other) == data_rule_digest(TASK)
    assert hashlib.sha256(canonical(data_rule(TASK))).hexdigest() == data_rule_digest(TASK)
    changed: list[Task] = [
        replace(TASK, input=replace(TASK.input, body_part="CHEST")),
        replace(TASK, training=replace(TASK.training, images_per_patient=5)),
        replace(TASK, labels=replace(TASK.labels, classes=("ill", "well"))),
    ]
    assert len({data_rule_digest(TASK), *map(data_rule_digest, changed)}) == 4
    assert "modality OT; as grey of 8 x 8; learned: ill, healthy, of the images' own labels" in data_rule_text(TASK)
