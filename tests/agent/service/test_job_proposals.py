"""Proposed jobs: who must approve, who may, and that nothing starts before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.event_log import open_log
from agent.service import job_acts, job_proposals, jobs
from agent.service.job_proposals import NotTheirApprovalError
from agent.service.job_rules import JobSettings, Surroundings, choose
from agent.service.jobs import JobStateError, JobStore
from agent.service.ledger_access import BorrowedLedger, Site
from agent.service.site import ACTS
from policies.governance import decisions
from tests.agent.console.hospital import Hospital, hospital
from tests.support.ledger_world import Person, policy


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hospital]:
    with hospital(tmp_path, patients=1) as one:
        yield one


def site_of(made: Hospital) -> Site:
    return Site(made.home, BorrowedLedger(made.home), open_log(made.home.root / "agent.log"), runs_jobs=True)


def proposed(site: Site, by: str = "rita") -> int:
    told: dict[str, Any] = {"words": ["release", "ksame"], "project": "main", "by": by, "price": {}, "cuda": False}
    return int(job_acts.propose(site, {**told, "key": ""})["number"])


def reason(site: Site, number: int) -> str:
    return str(job_acts.shown(site, number)["job"]["reason"])


def test_a_proposal_is_queued_when_every_role_of_the_policy_has_approved_and_each_stands_in_its_history(
    made: Hospital,
) -> None:
    site = site_of(made)
    number = proposed(site)
    assert reason(site, number) == "waits for approval by compliance and hospital"
    assert job_proposals.approve(site, number, "dora") == {"state": "proposed", "missing": ["hospital"]}
    assert reason(site, number) == "waits for approval by hospital"
    assert job_acts.listed(site)["jobs"][0]["reason"] == "waits for approval by hospital"
    assert job_proposals.approve(site, number, "hugo") == {"state": "queued", "missing": []}
    told = job_acts.shown(site, number)["history"]
    assert [(one["state"], one["by"], one["role"]) for one in told] == [
        ("proposed", "rita", ""),
        ("proposed", "dora", "compliance"),
        ("proposed", "hugo", "hospital"),
        ("queued", "", ""),
    ]
    with pytest.raises(JobStateError, match="is queued: it waits for no approval"):
        job_proposals.approve(site, number, "dora")


def test_nobody_approves_alone_for_another_role_or_what_they_have_proposed(made: Hospital) -> None:
    site = site_of(made)
    number, own = proposed(site), proposed(site, by="dora")
    job_proposals.approve(site, number, "dora")
    for by, why in (
        ("dora", "is approved by dora already"),
        ("rita", "rita is researcher"),
        ("olga", "is operator"),
        ("otto", "is auditor"),
        ("nobody", "nobody named nobody is in office"),
    ):
        with pytest.raises(NotTheirApprovalError, match=why):
            job_proposals.approve(site, number, by)
    with pytest.raises(NotTheirApprovalError, match="somebody else approves it"):
        job_proposals.approve(site, own, "dora")
    assert [job.state for job in JobStore(made.home.root).all()] == ["proposed", "proposed"]


def test_a_person_who_left_office_approves_nothing(made: Hospital) -> None:
    site = site_of(made)
    number = proposed(site, by="olga")
    with site.ledger.write() as store:
        for name in ("dora", "hugo"):
            decisions.approve(store, made.approval(name, "d-1", "dismiss", "rita", "researcher"))
        decisions.dismiss(store, "rita", "d-1")
    with pytest.raises(NotTheirApprovalError, match="nobody named rita is in office"):
        job_proposals.approve(site, number, "rita")


def test_an_approval_of_a_person_who_was_dismissed_since_does_not_count(made: Hospital) -> None:
    site = site_of(made)
    number = proposed(site)
    job_proposals.approve(site, number, "dora")
    dina = Person("dina", "compliance")
    with site.ledger.write() as store:
        for name in ("dora", "hugo"):
            decisions.approve(store, made.approval(name, "a-1", "appoint", "dina", f"compliance {dina.public.hex()}"))
        decisions.appoint(store, "dina", "compliance", dina.public, "a-1")
        for name in ("dora", "hugo"):
            decisions.approve(store, made.approval(name, "d-1", "dismiss", "dora", "compliance"))
        decisions.dismiss(store, "dora", "d-1")
    assert reason(site, number) == "waits for approval by compliance and hospital"
    assert job_proposals.approve(site, number, "hugo") == {"state": "proposed", "missing": ["compliance"]}
    assert job_proposals.approve(site, number, "dina") == {"state": "queued", "missing": []}


def test_a_refused_proposal_says_by_whom_and_why_and_begins_anew_only_as_a_proposal(made: Hospital) -> None:
    site = site_of(made)
    number = proposed(site)
    job_proposals.approve(site, number, "dora")
    assert job_proposals.refuse(site, number, "hugo", "the purpose is over") == {"state": "refused"}
    last = job_acts.shown(site, number)["history"][-1]
    assert (last["state"], last["by"], last["reason"]) == ("refused", "hugo", "the purpose is over")
    with pytest.raises(JobStateError, match="is refused"):
        job_proposals.approve(site, number, "hugo")
    again = job_acts.retry(site, number, "rita")["number"]
    assert reason(site, again) == "waits for approval by compliance and hospital"
    job_acts.cancel(site, again, "rita")
    assert JobStore(made.home.root).read(again).state == "cancelled"


def test_where_the_policy_names_nobody_a_proposal_is_queued_at_once(tmp_path: Path) -> None:
    with hospital(tmp_path, patients=1, approvals="[]") as made:
        site = site_of(made)
        assert JobStore(made.home.root).read(proposed(site)).state == "queued"


def test_a_policy_that_asks_for_more_meanwhile_holds_a_proposal_back(tmp_path: Path) -> None:
    with hospital(tmp_path, patients=1, approvals='["compliance"]') as made:
        site = site_of(made)
        number = proposed(site)
        (made.home.root / "policy.toml").write_text(policy(approvals='["compliance", "hospital"]'))
        assert job_proposals.approve(site, number, "dora") == {"state": "proposed", "missing": ["hospital"]}


def test_no_rule_starts_a_proposal_and_no_socket_approves_one(made: Hospital) -> None:
    import datetime as dt

    site = site_of(made)
    number = proposed(site)
    around = Surroundings(dt.datetime.now().astimezone())
    first, _ = choose(JobStore(made.home.root).all(), JobSettings(), lambda _: around)
    assert first is None
    assert "jobs/propose" in ACTS
    assert not [name for name in ACTS if "approve" in name or name.endswith("jobs/refuse")]
    assert JobStore(made.home.root).read(number).state == jobs.PROPOSED


def test_two_approvals_at_once_queue_a_proposal_once(made: Hospital) -> None:
    site = site_of(made)
    number = proposed(site)
    both = [threading.Thread(target=job_proposals.approve, args=(site, number, name)) for name in ("dora", "hugo")]
    for one in both:
        one.start()
    for one in both:
        one.join()
    states = [event.state for event in JobStore(made.home.root).read(number).history]
    assert states == ["proposed", "proposed", "proposed", "queued"]


def test_a_record_of_before_has_no_roles_and_is_read(made: Hospital) -> None:
    site = site_of(made)
    number = proposed(site)
    path = JobStore(made.home.root).folder(number) / "job.json"
    told = json.loads(path.read_bytes())
    for event in told["history"]:
        del event["role"]
    path.write_text(json.dumps(told))
    assert JobStore(made.home.root).read(number).approved == {}
