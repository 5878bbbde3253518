"""Plans of runs as persons meet them: in ``status``, by ``run``, by number, and signed with their own keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.federation import run_plan
from agent.federation.run_plan import RunPlan
from agent.service import run_plans
from agent.storage import projects
from agent.storage.label_tables import LabelColumn, LabelTable, keep_table, stay_with
from policies.accounting.claims import SubsampledGaussian
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.read_only import read_store
from policies.review.policy import parse
from policies.statements import claim_json
from protos.federation.round_times import RoundTerms
from protos.identity.key_files import pem, write_private
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site
from tests.support.ledger_world import Person
from tests.support.release_site import site
from tests.support.site_serving import serving

__all__ = ["site", "typed"]  # fixtures

DPO, HEAD = Person("dpo-1", "compliance"), Person("head-1", "hospital")
CONFIG = {"classes": ["0", "1"], "shape": [8, 8], "rounds": 3, "centre": [0.0] * 64}
LATE = 4_000_000_000


def plan(run: str = "run-1", approve_by: int = LATE) -> RunPlan:
    """What a coordinator asks for."""
    claim = claim_json(SubsampledGaussian(0.25, 1.8, 45))
    text = json.dumps(CONFIG, sort_keys=True)
    return RunPlan(run, "federated", text, claim, 3, "OT", "main", RoundTerms(600, approve_by))


@pytest.fixture
def asked(site: Site, typed: Typed, tmp_path: Path) -> Site:
    """A site whose policy wants both roles, with both in office, that was asked for a run."""
    (tmp_path / "keys").mkdir(mode=0o700)
    for person in (DPO, HEAD):
        write_private(tmp_path / "keys" / person.name, pem(person.key))
        words = ("ledger", "appoint", person.name, person.role, person.public.hex())
        assert typed(*at(site), *words).status == 0
    policy = site.home.root / "policy.toml"
    text = policy.read_text().replace("run_approvals = []", 'run_approvals = ["compliance", "hospital"]')
    policy.write_text(text)
    assert parse(text, "policy.toml").run_approvals
    ask_for(site, plan())
    return site


def ask_for(site: Site, *plans: RunPlan) -> None:
    """As the service keeps what a coordinator asks for."""
    vault = projects.open_vault(site.home)
    for one in plans:
        vault.change_note(run_plan.NOTE, lambda note, one=one: run_plan.with_plan(note, one))
    vault.close()


def decide(typed: Typed, asked: Site, what: str, person: Person, *more: str):
    """A person decides."""
    key = asked.home.root.parent / "keys" / person.name
    return typed(*at(asked), "run", what, "run-1", *more, "--person", person.name, "--key", key, "--yes")


def standing(asked: Site, now: float = 0.0) -> tuple[str, tuple[str, ...]]:
    """How it stands by the ledger."""
    wanted = parse((asked.home.root / "policy.toml").read_text(), "policy.toml")
    note = run_plan.with_plan(None, plan())
    disk = open_read_only(asked.home.root / "ledger.db")
    with read_store(disk, "lazaret/site-a", asked.home.sign_key()) as store:
        (view,) = run_plans.plans(note, store.state, wanted, now)
    return view.standing, view.missing


def test_a_plan_is_shown_and_approved_by_both_and_stands_on_the_status_until_then(asked: Site, typed: Typed) -> None:
    status = typed(*at(asked), "status").out
    assert "plan 1, run run-1" in status
    assert "compliance and hospital must approve it" in status
    assert "lazaret-agent run show run-1" in status
    shown = typed(*at(asked), "run", "show", "run-1").out
    start = f"public start: {plan().facts()['start']}"
    for words in ("3 rounds of at most 600 seconds", plan().digest, start, "evaluation: none"):
        assert words in shown
    assert "epsilon" in shown
    assert "before you decide" in shown
    assert "lazaret-agent task preview --run run-1 --out run-1.html" in shown
    assert "centre = [0.0, 0.0, 0.0, … 64 numbers]" in shown
    assert decide(typed, asked, "approve", DPO).status == 0
    assert standing(asked) == ("waiting", ("hospital",))
    assert "hospital must approve it" in typed(*at(asked), "status").out
    assert decide(typed, asked, "approve", HEAD).status == 0
    assert standing(asked) == ("approved", ())
    assert "plan 1" not in typed(*at(asked), "status").out
    assert "run-1: approved" in typed(*at(asked), "run", "list").out


def test_a_plan_is_signed_by_its_number_too_beside_a_service(asked: Site, typed: Typed) -> None:
    key = asked.home.root.parent / "keys" / DPO.name
    with serving(asked):
        words = ("ledger", "sign", 1, "--person", DPO.name, "--key", key, "--yes")
        signed = typed(*at(asked), *words)
        assert (signed.status, "plan 1, run run-1" in signed.out) == (0, True), signed.err
        assert decide(typed, asked, "approve", HEAD).status == 0
    assert standing(asked) == ("approved", ())


def test_a_refusal_is_final(asked: Site, typed: Typed) -> None:
    refused = decide(typed, asked, "refuse", DPO, "purpose")
    assert refused.status == 0, refused.err
    assert standing(asked)[0] == "refused"
    again = decide(typed, asked, "approve", HEAD)
    assert (again.status, "was refused: that is final" in again.err) == (1, True)
    assert "plan 1" not in typed(*at(asked), "status").out


def test_who_is_in_no_office_approves_nothing(asked: Site, typed: Typed) -> None:
    stranger = Person("mallory", "hospital")
    write_private(asked.home.root.parent / "keys" / stranger.name, pem(stranger.key))
    assert decide(typed, asked, "approve", stranger).status == 1
    assert standing(asked) == ("waiting", ("compliance", "hospital"))


def test_after_its_day_nobody_is_asked_and_nobody_approves(asked: Site, typed: Typed) -> None:
    ask_for(asked, plan(approve_by=1))
    assert "run-1" not in typed(*at(asked), "status").out
    late = decide(typed, asked, "approve", DPO)
    assert (late.status, "launch another run" in late.err) == (1, True)
    assert "its day is over" in typed(*at(asked), "run", "list").out


def test_a_run_that_was_not_asked_for_has_no_plan(asked: Site, typed: Typed) -> None:
    found = typed(*at(asked), "run", "show", "run-2")
    assert (found.status, "no plan of a run run-2 was asked for here; those that were: run-1" in found.err) == (
        1,
        True,
    )


def begin(site: Site, *runs: str) -> str:
    """Their first rounds read the label table; its version."""
    vault = projects.open_vault(site.home)
    columns = (LabelColumn("grade", "category", ("low", "high")),)
    table = keep_table(vault, LabelTable("t", "patient-id", "patient", columns, {("p", "p"): (0,)}))
    for run in runs:
        stay_with(vault, run, table)
    vault.close()
    return table.version


def test_a_run_names_the_version_of_the_label_table_that_it_learns_from(asked: Site, typed: Typed) -> None:
    assert "label table" not in typed(*at(asked), "run", "show", "run-1").out
    version = begin(asked, "run-1", "run-0")
    shown = typed(*at(asked), "run", "show", "run-1").out
    assert f"it learns from the label table t, version {version}" in " ".join(shown.split())
    told = json.loads(typed(*at(asked), "run", "show", "run-1", "--json").out)
    assert told["labels"] == {"table": "t", "version": version}
    assert (told["digest"], version in json.dumps(plan().facts())) == (plan().digest, False), "no part of the plan"
    over = typed(*at(asked), "run", "show", "run-0")
    assert (over.status, f"label table t, version {version}" in " ".join(over.out.split())) == (0, True)
    assert json.loads(typed(*at(asked), "run", "show", "run-0", "--json").out)["labels"] == told["labels"]
    assert typed(*at(asked), "run", "approve", "run-0", "--person", "x", "--key", "x").status == 1


def test_plans_can_be_read_by_a_program(asked: Site, typed: Typed) -> None:
    (one,) = json.loads(typed(*at(asked), "run", "list", "--json").out)
    assert (one["run"], one["standing"], one["missing"]) == ("run-1", "waiting", ["compliance", "hospital"])
    assert one["labels"] is None
    shown = json.loads(typed(*at(asked), "run", "show", "run-1", "--json").out)
    assert (shown["digest"], shown["config"]) == (plan().digest, CONFIG)
