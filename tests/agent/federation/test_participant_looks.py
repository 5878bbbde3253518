"""Looks at a model: paid for before the first step, at other patients than those trained on, and each made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import TaskCohort, Update
from agent.errors import ReviewRejectedError
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError
from policies.accounting.claims import Evaluated, SubsampledGaussian
from policies.accounting.rdp import cost
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.statements import Release
from policies.tasks.evaluation import HELD_OUT, TRAINED, EvaluationPlan
from protos.artifacts.arrays import unpack_vector
from protos.common.errors import WorkerError
from tests.support.federated_sites import (
    PLAN,
    START,
    FederatedSite,
    before_it_set_out,
    evaluated,
    federated,
    federated_site,
    granted,
    in_training,
    part,
    when_it_had_set_out,
)
from tests.support.ledger_world import policy
from tests.support.site_world import MemoryVault
from tests.support.small_tasks import classification

SUMS = 9 + 8  # of three classes and four bins


def claim_of(release: Release) -> tuple[int, int]:
    """Steps and looks that a release covers."""
    claim = release.claim
    if isinstance(claim, Evaluated):
        return claim.training.steps, claim.looks
    assert isinstance(claim, SubsampledGaussian)
    return claim.steps, 0


def site(tmp_path: Path, patients: int = 40) -> FederatedSite:
    w = federated_site(tmp_path)
    w.vault.patients = patients
    return w


# --- who is looked at


def test_the_held_out_patients_are_never_trained_on_and_stay_held_out_over_runs(tmp_path: Path) -> None:
    """Whom a round and a look are given, in two runs, the second with other sizes and later patients."""
    w, seen = site(tmp_path), dict[str, list[set[str]]]()

    def watched(call: Callable[..., Update], cohort: TaskCohort, *rest: Any) -> Update:
        seen.setdefault(call.__name__, []).append({p.pseudonym for p in cohort.patients})
        return call(cohort, *rest)

    for run, job in (("run-1", evaluated(2)), ("run-2", evaluated(1, noise_multiplier=3.0))):
        part(w).site = replace(part(w).site, run=watched)
        granted(w, job, run)
        part(w).train(run, 1, START)
        part(w).look(run, 2, START)
        part(w).leave_run("over")
        w.vault.patients += 20
    (first, second), (looked, again) = seen["run_round"], seen["run_look"]
    assert len(first | looked) == 40
    assert first & looked == set()
    assert (first | second) & (looked | again) == set(), "whoever was held out once is trained on in no run"
    assert first < second
    assert looked < again
    assert 4 <= len(looked) <= 16, "a quarter of 40, by chance"


def test_without_looks_everybody_is_trained_on(tmp_path: Path) -> None:
    assert federated().examples(TRAINED).split is None
    split = evaluated().examples(HELD_OUT).split
    assert split is not None
    assert (split.name, dict(split.parts)) == ("evaluation", {"held-out": 25, "trained": 75})


def test_with_a_smaller_share_fewer_are_held_out_and_no_others(tmp_path: Path) -> None:
    vault = MemoryVault(patients=300)
    few, many = (
        {
            p.pseudonym
            for p in vault.examples(evaluated(evaluate=replace(PLAN, held_out=n)).examples(HELD_OUT)).patients
        }
        for n in (10, 30)
    )
    assert few < many


# --- what it costs, and what leaves


def test_the_price_of_all_looks_is_held_before_the_first_step_and_all_of_it_is_spent(tmp_path: Path) -> None:
    w = site(tmp_path)
    job = evaluated(2)
    granted(w, job)
    assert w.account() == (cost(job.claim(), 4), 0)
    assert w.account()[0] == cost(federated(2).claim(), 4) + cost(PLAN.query(), 4) * 2 > cost(federated(2).claim(), 4)
    made = [part(w).train("run-1", 1, START), part(w).look("run-1", 2, START), part(w).train("run-1", 3, START),
            part(w).look("run-1", 4, START)]  # fmt: skip
    assert [claim_of(signed.release) for signed in made] == [(15, 0), (15, 1), (30, 1), (30, 2)]
    assert [s.release.artifact_type for s in made] == ["update", "evaluation"] * 2
    for signed in made:
        assert w.gateway.submit(f"submit-{signed.release.release}", signed.envelope, signed.artifact).admitted
    assert [len(unpack_vector(signed.artifact)) for signed in made] == [195, SUMS, 195, SUMS]
    assert part(w).follow()
    assert w.account() == (0, cost(job.claim(), 4))
    part(w).site.ledger.store.close()
    assert verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key)).releases == 4


def test_a_run_that_ends_early_gives_back_the_looks_that_were_not_made(tmp_path: Path) -> None:
    w = site(tmp_path)
    granted(w, evaluated(2))
    part(w).train("run-1", 1, START)
    part(w).look("run-1", 2, START)
    part(w).leave_run("over")
    training = replace(federated(2).claim(), steps=15)
    assert w.account() == (0, cost(PLAN.claim(training), 4) - cost(PLAN.query(), 4))


def test_a_look_asked_for_again_is_the_same_and_reads_nobody(tmp_path: Path) -> None:
    w = site(tmp_path)
    granted(w, evaluated(2))
    part(w).train("run-1", 1, START)
    signed = part(w).look("run-1", 2, START)
    reads = w.vault.reads
    again = part(w).look("run-1", 2, START)
    assert (again.envelope, w.vault.reads, part(w).looks) == (signed.envelope, reads, 1)
    assert again.artifact == signed.artifact


def test_no_look_before_the_first_round_none_beyond_the_price_and_none_that_was_not_priced(tmp_path: Path) -> None:
    w = site(tmp_path)
    granted(w, evaluated(2))
    with pytest.raises(ReviewRejectedError, match="not covered"):
        part(w).look("run-1", 1, START)
    part(w).train("run-1", 1, START)
    for number in (2, 3):
        part(w).look("run-1", number, START)
    reads = w.vault.reads
    with pytest.raises(ReviewRejectedError, match="not covered"):
        part(w).look("run-1", 4, START)
    with pytest.raises(ReviewRejectedError, match="not covered"):
        part(w).look("run-2", 4, START)
    assert w.vault.reads == reads, "nothing is read for a look that is refused"
    part(w).leave_run("over")
    granted(w, federated(2), "run-2")
    part(w).train("run-2", 1, START)
    with pytest.raises(ReviewRejectedError, match="not covered"):
        part(w).look("run-2", 2, START)


def test_a_site_whose_policy_does_not_name_evaluations_is_in_no_run_with_looks(tmp_path: Path) -> None:
    w = site(tmp_path)
    old = policy(artifact_types='["image-set", "model", "update", "masked-update"]')
    ledger = part(w).site.ledger
    from policies.review.policy import parse

    part(w).site = replace(part(w).site, ledger=replace(ledger, policy_of=lambda _: parse(old, "old")))
    with pytest.raises(ReviewRejectedError, match="does not admit evaluation"):
        part(w).join("run-1", evaluated())
    part(w).join("run-2", federated())


def test_sums_of_another_size_do_not_leave_and_the_look_is_paid(tmp_path: Path) -> None:
    """They come from a confined process, whose word is no word to rely on."""
    w = site(tmp_path)
    granted(w, evaluated(2))
    part(w).train("run-1", 1, START)
    part(w).site = replace(part(w).site, run=lambda *_: Update(np.zeros(SUMS + 1, np.float32)))
    with pytest.raises(WorkerError, match="other sums than were priced"):
        part(w).look("run-1", 2, START)
    assert (part(w).looks, len(part(w).site.ledger.store.state.sent)) == (1, 1)


def test_a_look_during_which_a_patient_opts_out_does_not_leave_and_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = site(tmp_path)
    granted(w, evaluated(2))
    part(w).train("run-1", 1, START)
    honest = Federated.run_look

    def meanwhile(self: Federated, cohort: TaskCohort, *rest: Any) -> Update:
        w.vault.out = frozenset({cohort.patients[0].pseudonym})
        return honest(self, cohort, *rest)

    monkeypatch.setattr(Federated, "run_look", meanwhile)
    with pytest.raises(ReviewRejectedError, match="opted_out"):
        part(w).look("run-1", 2, START)
    assert (part(w).looks, len(part(w).site.ledger.store.state.sent)) == (1, 1)
    monkeypatch.undo()
    part(w).look("run-1", 3, START)
    with pytest.raises(ReviewRejectedError, match="not covered"):
        part(w).look("run-1", 4, START)


# --- kills


@pytest.mark.parametrize("moment", [in_training, before_it_set_out, when_it_had_set_out])
def test_a_look_in_which_the_agent_is_killed_counts_as_made(
    tmp_path: Path, moment: Callable[[FederatedSite, pytest.MonkeyPatch], None]
) -> None:
    w = site(tmp_path)
    granted(w, evaluated(2))
    part(w).train("run-1", 1, START)
    with pytest.MonkeyPatch.context() as patch:
        moment(w, patch)
        with pytest.raises(KeyboardInterrupt):
            part(w).look("run-1", 2, START)
    assert w.crash()
    assert (part(w).rounds_trained, part(w).looks) == (1, 1)
    reads = w.vault.reads
    part(w).look("run-1", 2, START)
    again = moment is in_training
    assert (w.vault.reads - reads, part(w).looks) == (again, 1 + again), "what was sealed is sent, and not made again"


def test_a_vault_from_before_a_look_does_not_forget_it(tmp_path: Path) -> None:
    """An older copy of the vault comes back: the site's ledger knows what set out."""
    w = site(tmp_path)
    granted(w, evaluated(2))
    part(w).train("run-1", 1, START)
    before = dict(w.vault.notes)
    part(w).look("run-1", 2, START)
    w.vault.notes = before
    assert w.crash()
    assert (part(w).rounds_trained, part(w).looks, part(w).begun) == (1, 1, 2)


# --- the configuration


def test_a_configuration_without_looks_has_the_bytes_that_it_always_had() -> None:
    assert "evaluate" not in federated().to_json()
    assert Federated.from_json(federated().to_json()) == federated()
    assert Federated.from_json(evaluated().to_json()) == evaluated()
    assert evaluated().claim() == PLAN.claim(federated().claim())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    ["null", "{}", "3", '{"looks":2,"noise":20.0,"held_out":25}', '{"bins":3,"looks":2,"noise":20.0,"held_out":25}'],
)
def test_a_configuration_whose_looks_make_no_sense_is_refused_with_the_key(plan: str) -> None:
    text = federated().to_json()[:-1] + f',"evaluate":{plan}}}'
    with pytest.raises(FederatedConfigError, match="evaluate"):
        Federated.from_json(text)


def test_too_many_classes_for_a_look_are_refused_with_the_configuration() -> None:
    with pytest.raises(ValueError, match="sums for so many outputs"):
        Federated(classification([str(n) for n in range(300)]), 10, 1.8, EvaluationPlan(1, 20.0, 20, 10))
