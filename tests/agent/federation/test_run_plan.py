"""Persons approve the plan of a run; whatever of it changes is another plan, and a site makes nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import ReviewRejectedError
from agent.federation import run_plan
from agent.federation.run_plan import RunPlan
from agent.mechanisms.federated.mechanism import Federated
from policies.governance import decisions
from policies.ledger.approvals import refusal
from policies.ledger.entries import InvalidEntryError
from policies.statements import PAYLOAD_TYPE
from policies.tasks.task import Labels
from protos.common.dsse import seal
from protos.federation.round_times import RoundTerms
from tests.support.federated_sites import START, FederatedSite, federated, part
from tests.support.ledger_world import Hospital, policy
from tests.support.site_world import admission

TERMS = RoundTerms(3_600, 2_000_000_000)
JOB = federated()
WANTED = frozenset({"compliance", "hospital"})


class People:
    """An officer and a physician of a site that wants both for a run."""

    def __init__(self, folder: Path) -> None:
        law = policy(run_approvals='["compliance", "hospital"]')
        hospital = Hospital("site-a", law)
        self.site = FederatedSite(folder, hospital, admission(folder / "hub.db", policy(), hospital))
        self.keys = {"officer": Ed25519PrivateKey.generate(), "physician": Ed25519PrivateKey.generate()}
        for (name, key), role in zip(self.keys.items(), ("compliance", "hospital"), strict=True):
            decisions.appoint(self.store, name, role, key.public_key().public_bytes_raw())

    @property
    def store(self):
        """The site's own ledger."""
        return part(self.site).site.ledger.store

    def sign(self, person: str, serial: str, *words: str) -> None:
        """A person's word, written down."""
        raw = decisions.statement_bytes("approval/v1", (person, self.store.origin, serial, *words))
        decisions.approve(self.store, seal(raw, PAYLOAD_TYPE, self.keys[person]))

    def approve(self, plan: RunPlan, *persons: str) -> None:
        """They approve it."""
        for person in persons or self.keys:
            self.sign(person, plan.serial, *plan.words())

    def plan(self, job: Federated = JOB, terms: RoundTerms = TERMS) -> RunPlan:
        """Of the run."""
        return part(self.site).plan_of("run-1", job, terms)


@pytest.fixture
def people(tmp_path: Path) -> People:
    """A site, and its persons."""
    return People(tmp_path)


def rules(act: Callable[[], object]) -> set[str]:
    """By which rules it is refused."""
    with pytest.raises(ReviewRejectedError) as refusal_of:
        act()
    return {finding.rule for finding in refusal_of.value.verdict.findings}


def test_a_site_prices_no_run_before_every_role_of_its_policy_has_approved_the_plan(people: People) -> None:
    p = part(people.site)
    assert rules(lambda: p.join("run-1", JOB, TERMS)) == {"waiting"}
    people.approve(people.plan(), "officer")
    assert rules(lambda: p.join("run-1", JOB, TERMS)) == {"waiting"}
    assert people.site.account() == (0, 0), "nothing is held for a run that nobody approved"
    people.approve(people.plan(), "physician")
    assert p.join("run-1", JOB, TERMS)
    assert people.site.account()[0] > 0


def test_whatever_the_coordinator_asks_for_a_site_trains_no_run_that_it_did_not_approve(people: People) -> None:
    p = part(people.site)
    assert rules(lambda: p.consider("run-1", JOB, TERMS)) == {"waiting"}
    assert rules(lambda: p.train("run-1", 1, START)) == {"round"}
    assert people.site.vault.reads == 0


def test_what_is_waited_for_can_be_seen_and_is_gone_with_the_run(people: People) -> None:
    p = part(people.site)
    assert rules(lambda: p.consider("run-1", JOB, TERMS)) == {"waiting"}
    assert run_plan.kept(people.site.vault.note(run_plan.NOTE)) == {"run-1": people.plan()}
    people.approve(people.plan())
    p.consider("run-1", JOB, TERMS)
    p.join("run-1", JOB, TERMS)
    p.leave_run()
    assert run_plan.kept(people.site.vault.note(run_plan.NOTE)) == {}


@pytest.mark.parametrize(
    ("job", "terms"),
    [
        (federated(rounds=4), TERMS),
        (federated(learning_rate=39.0), TERMS),
        (replace(JOB, task=replace(JOB.task, labels=Labels(classes=("0", "1", "3")))), TERMS),
        (JOB, RoundTerms(3_601, TERMS.approve_by)),
        (JOB, RoundTerms(3_600, TERMS.approve_by + 1)),
    ],
)
def test_a_changed_or_extended_plan_needs_a_new_approval(people: People, job: Federated, terms: RoundTerms) -> None:
    people.approve(people.plan())
    p = part(people.site)
    p.consider("run-1", JOB, TERMS)
    assert rules(lambda: p.consider("run-1", job, terms)) == {"waiting"}
    assert rules(lambda: p.consider("run-2", JOB, TERMS)) == {"waiting"}
    p.join("run-1", JOB, TERMS)
    assert rules(lambda: p.consider("run-1", job, terms)) == {"waiting"}, "also while the run is under way"


def test_a_round_under_other_times_than_were_approved_is_refused(people: People) -> None:
    people.approve(people.plan())
    p = part(people.site)
    p.join("run-1", JOB, TERMS)
    p.same_terms("run-1", TERMS)
    assert rules(lambda: p.same_terms("run-1", RoundTerms(86_400, TERMS.approve_by))) == {"round"}
    assert people.site.crash()
    part(people.site).same_terms("run-1", TERMS)
    assert rules(lambda: part(people.site).same_terms("run-1", RoundTerms())) == {"round"}


def test_a_refusal_by_one_person_stands_whoever_approves(people: People) -> None:
    plan = people.plan()
    people.approve(plan)
    people.sign("officer", refusal(plan.serial), "refuse", "run-1", f"{plan.digest} purpose")
    assert rules(lambda: part(people.site).join("run-1", JOB, TERMS)) == {"plan"}
    assert run_plan.standing(people.store.state, plan, WANTED) == "refused"


def test_a_refusal_is_of_the_plan_and_of_no_other_under_the_runs_name(people: People) -> None:
    plan, other = people.plan(), people.plan(federated(rounds=4))
    with pytest.raises(InvalidEntryError, match="plan of its own SHA-256"):  # the words are of another plan
        people.sign("officer", refusal(plan.serial), "refuse", "run-1", f"{other.digest} purpose")
    with pytest.raises(InvalidEntryError, match="plan of its own SHA-256"):  # the words refuse nothing
        people.sign("officer", refusal(plan.serial), *plan.words())
    assert not run_plan.is_refused(people.store.state, plan)
    people.sign("officer", refusal(other.serial), "refuse", "run-1", f"{other.digest} purpose")
    people.approve(plan)
    p = part(people.site)
    assert rules(lambda: p.consider("run-1", federated(rounds=4), TERMS)) == {"plan"}
    p.consider("run-1", JOB, TERMS)


DAY = TERMS.approve_by


@pytest.mark.parametrize(
    ("now", "by", "persons", "found"),
    [
        (DAY - 1.0, DAY, (), {"waiting"}),
        (float(DAY), DAY, (), {"approve_by"}),
        (float(DAY), DAY, ("officer",), {"approve_by"}),
        (DAY + 3_600.0, DAY, ("officer", "physician"), set()),
        (DAY + 86_400.0, DAY, ("officer", "physician"), {"approve_by"}),
        (0.0, 0, ("officer", "physician"), {"approve_by"}),
        (float(DAY), 0, ("officer", "physician"), {"approve_by"}),
    ],
)
def test_an_approval_is_good_until_the_run_begins_after_its_day_and_no_longer(
    people: People, now: float, by: int, persons: tuple[str, ...], found: set[str]
) -> None:
    """The coordinator begins when the day is over, with those that have approved; and not whenever it likes."""
    p, terms = part(people.site), RoundTerms(3_600, by)
    p.now = lambda: now
    if persons:
        people.approve(people.plan(terms=terms), *persons)
    if not found:
        assert p.join("run-1", JOB, terms)
        return
    for act in (p.consider, p.join):
        assert rules(lambda act=act: act("run-1", JOB, terms)) == found
    assert people.site.account() == (0, 0)
    assert bool(run_plan.kept(people.site.vault.note(run_plan.NOTE))) is (found == {"waiting"}), "nobody is asked"


def test_a_run_that_was_priced_in_time_goes_on_whatever_its_day(people: People) -> None:
    people.approve(people.plan())
    p = part(people.site)
    p.now = lambda: DAY - 1.0
    envelope = p.join("run-1", JOB, TERMS)
    p.now = lambda: DAY + 1e7
    assert p.join("run-1", JOB, TERMS) == envelope


def test_a_site_whose_policy_wants_nobody_asks_for_no_day(tmp_path: Path) -> None:
    hospital = Hospital("site-a", policy())
    w = FederatedSite(tmp_path, hospital, admission(tmp_path / "hub.db", policy(), hospital))
    part(w).now = lambda: float(DAY)
    assert part(w).join("run-1", JOB, RoundTerms(3_600, 1))


def test_who_was_dismissed_has_approved_nothing(people: People) -> None:
    plan = people.plan()
    people.approve(plan)
    key = Ed25519PrivateKey.generate()
    value = f"hospital {key.public_key().public_bytes_raw().hex()}"
    for person in people.keys:
        people.sign(person, "p1", "appoint", "successor", value)
        people.sign(person, "p2", "dismiss", "physician", "hospital")
    decisions.appoint(people.store, "successor", "hospital", key.public_key().public_bytes_raw(), "p1")
    decisions.dismiss(people.store, "physician", "p2")
    assert run_plan.missing_roles(people.store.state, plan, WANTED) == {"hospital"}


def test_nobody_signs_prose_for_a_plan(people: People) -> None:
    with pytest.raises(InvalidEntryError, match="cannot be carried out"):
        people.sign("officer", people.plan().serial, "run", "run-1", "yes, all of it")


def test_a_round_longer_than_the_site_allows_is_refused_with_a_sentence(people: People) -> None:
    p = part(people.site)
    p.most_round_seconds = 600
    with pytest.raises(
        ReviewRejectedError, match=r"up to 3600 seconds, and most_round_seconds in site.toml allows 600"
    ):
        p.join("run-1", JOB, TERMS)


def test_only_so_many_plans_are_kept(people: People) -> None:
    p = part(people.site)
    for number in range(run_plan.MOST + 3):
        assert rules(lambda number=number: p.consider(f"run-{number}", JOB, TERMS)) == {"waiting"}
    kept = run_plan.kept(people.site.vault.note(run_plan.NOTE))
    assert list(kept) == [f"run-{number}" for number in range(3, run_plan.MOST + 3)]


def test_a_policy_of_before_runs_were_approved_wants_nobody(tmp_path: Path) -> None:
    text = "\n".join(line for line in policy().splitlines() if not line.startswith("run_approvals"))
    hospital = Hospital("site-a", text)
    w = FederatedSite(tmp_path, hospital, admission(tmp_path / "hub.db", policy(), hospital))
    assert part(w).join("run-1", JOB, TERMS)


def test_what_a_person_approves_names_task_patients_start_price_evaluation_and_rounds(people: People) -> None:
    facts = people.plan().facts()
    assert {"task", "cohort", "start", "price", "evaluation", "rounds", "round_seconds", "approve_by"} <= set(facts)
    assert (facts["evaluation"], facts["rounds"]) == ("none", 3)
    other = replace(JOB, task=replace(JOB.task, seed=JOB.task.seed + 1))
    assert people.plan(other).facts()["start"] != facts["start"]
    training = replace(JOB.task.training, images_per_patient=JOB.task.training.images_per_patient + 1)
    more = replace(JOB, task=replace(JOB.task, training=training))
    assert people.plan(more).facts()["cohort"] != facts["cohort"], "the rule says how many images a patient has in it"
    faster = replace(JOB.task.training, learning_rate=39.0)
    assert people.plan(replace(JOB, task=replace(JOB.task, training=faster))).facts()["cohort"] == facts["cohort"]
    assert RunPlan.of_note(people.plan().to_note()) == people.plan()
