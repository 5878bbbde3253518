"""A task's model from price to verdict: what it costs, whom it is made of, and which labels it learns from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import ExampleRule, TaskCohort
from agent.errors import ReviewRejectedError
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_model import TaskModel
from agent.release.pipeline import release_resumable
from agent.release.preflight import RefusedBeforehandError
from agent.release.resumable import ReleaseInProgressError, held_for
from agent.storage.label_tables import LabelColumn, LabelTable, keep_table
from policies.accounting.rdp import cost, epsilon_nano
from policies.tasks.evaluation import TRAINED, EvaluationPlan
from policies.tasks.task import Labels
from protos.common.errors import WorkerError
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.site_world import SiteWorld, site_world
from tests.support.small_tasks import classification
from tests.support.vault_records import key_of, open_vault, record

PLAN = EvaluationPlan(1, 20.0, 25, 10)
SMALL = Federated(classification(rounds=2, steps_per_round=3), 195, noise_multiplier=2.0)
LOOKED = TaskModel(replace(SMALL, evaluate=PLAN))
LEARNS = TaskModel(
    replace(
        SMALL,
        task=replace(SMALL.task, labels=Labels("findings", ("grade",), ("low", "middle", "high"))),
    )
)


def released(s: SiteWorld, mechanism: TaskModel = LOOKED) -> Any:
    return release_resumable(s.site, mechanism, mechanism.rules()[TRAINED], UnsafeSeededEntropy(1))


def test_both_ledgers_are_charged_the_training_with_its_look_and_it_is_one_model_of_level_a(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=24)
    signed, verdict = released(s)
    account = s.site.ledger.store.state.accounts["site-a/rdp"].opened
    price = cost(LOOKED.claim(), account.order)
    assert s.spent("rdp") == ((0, price), (0, price))
    assert price > cost(TaskModel(SMALL).claim(), account.order), "the look is not for nothing"
    r = signed.release
    assert (verdict.admitted, verdict.level, r.artifact_type, r.mechanism) == (True, "A", "model", "model")
    assert r.epsilon_nano == epsilon_nano(LOOKED.claim(), float(account.delta), account.order)
    assert (r.run, r.round, held_for(s.site)) == ("", 0, "")
    assert not s.vault.blobs, "no checkpoint outlives the release"


def test_no_patient_is_both_trained_on_and_looked_at_and_all_are_one_or_the_other(tmp_path: Path) -> None:
    s, seen = site_world(tmp_path, patients=24), list[dict[str, TaskCohort]]()

    def watched(call: Any, cohort: Any, *more: Any) -> Any:
        seen.append(cohort)
        return call(cohort, *more)

    s.site = replace(s.site, run=watched)
    released(s)
    who = {part: {patient.pseudonym for patient in cohort.patients} for part, cohort in seen[0].items()}
    assert who.keys() == {"trained", "held-out"}
    assert not who["trained"] & who["held-out"]
    assert len(who["trained"] | who["held-out"]) == 24
    assert who["held-out"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"mechanisms": '["federated"]'}, "does not admit model"),
        ({"artifact_types": '["model"]'}, "does not admit evaluation"),
        ({"artifact_types": '["evaluation"]'}, "does not admit model"),
    ],
)
def test_a_policy_admits_the_method_the_model_and_the_look_or_nothing_is_read(
    tmp_path: Path, changes: dict[str, object], rule: str
) -> None:
    s = site_world(tmp_path, patients=24, **changes)
    with pytest.raises((ReviewRejectedError, RefusedBeforehandError)) as refused:
        released(s)
    told = str(refused.value) + " ".join(
        finding.detail for finding in getattr(getattr(refused.value, "verdict", None), "findings", ())
    )
    assert rule in told
    assert (s.vault.reads, s.spent("rdp")) == (0, ((0, 0), (0, 0)))


def test_who_opts_out_while_it_is_trained_keeps_it_here(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=24)

    def opts_out(call: Any, *given: Any) -> Any:
        s.vault.out = frozenset({"0003"})
        return call(*given)

    s.site = replace(s.site, run=opts_out)
    with pytest.raises(ReviewRejectedError):
        released(s)
    assert not s.intake.register.store.state.releases
    (held, spent), _ = s.spent("rdp")
    assert (held, spent > 0) == (0, True)


def test_a_model_of_another_size_than_was_priced_is_kept_nowhere_and_its_grant_stays_held(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=24)
    s.site = replace(s.site, run=lambda call, *given: replace(made := call(*given), parameters=made.parameters[:9]))
    with pytest.raises(WorkerError, match="another model than was priced"):
        released(s)
    assert [grant.state for grant in s.site.ledger.store.state.grants.values()] == ["held"]
    assert not s.intake.register.store.state.releases


def table(first: int) -> LabelTable:
    """Each of nine patients has a grade, from ``first`` on."""
    column = LabelColumn("grade", "category", ("low", "middle", "high"))
    rows = {(key_of(n, 3), key_of(n, 3)): ((n + first) % 3,) for n in range(1, 10)}
    return LabelTable("findings", "patient-id", "patient", (column,), rows)


def test_it_stays_with_the_version_of_its_label_table_over_an_interruption(tmp_path: Path) -> None:
    """Half a model of one table and half of another would be nobody's."""
    vault = open_vault(tmp_path)
    for n in range(1, 10):
        dice = np.random.default_rng(n)
        vault.keep(replace(record(n, n), pixels=dice.random((8, 8), np.float32)))
    keep_table(vault, table(0))
    s = site_world(tmp_path, vault=vault)  # type: ignore[arg-type]

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    whole, s.site = s.site, replace(s.site, run=killed)
    with pytest.raises(KeyboardInterrupt):
        released(s, LEARNS)
    s.site = whole
    keep_table(vault, table(1))
    for _ in range(2):
        with pytest.raises(
            ReleaseInProgressError, match=r"label table was replaced .*import the former version again"
        ):
            released(s, LEARNS)
    assert [grant.state for grant in whole.ledger.store.state.grants.values()] == ["held"]
    keep_table(vault, table(0))
    assert released(s, LEARNS)[1].admitted
    assert [grant.state for grant in whole.ledger.store.state.grants.values()] == ["spent"]
    keep_table(vault, table(1))
    assert released(s, LEARNS)[1].admitted, "another release learns from the new table"
    vault.close()


def test_labels_that_the_site_does_not_declare_are_refused_before_a_price(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=24)
    asked = list[ExampleRule]()

    def misfit(rule: ExampleRule) -> str:
        asked.append(rule)
        return "findings.grade: the table does not declare all classes of the task"

    s.site = replace(s.site, label_misfit=misfit)
    with pytest.raises(RefusedBeforehandError, match=r"findings.grade"):
        released(s, LEARNS)
    assert (s.vault.reads, s.spent("rdp"), len(asked)) == (0, ((0, 0), (0, 0)), 1)
