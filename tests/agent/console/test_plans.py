"""Plans of runs in the site's console: seen by those who look on, decided by the roles of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.federation import run_plan
from agent.storage import projects
from policies.ledger.approvals import refusal
from tests.agent.console.hospital import BOTH, PLAN, Client, Hospital, hospital, serving, words


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hospital]:
    with hospital(tmp_path, run_approvals=BOTH) as one:
        vault = projects.open_vault(one.home)
        vault.change_note(run_plan.NOTE, lambda note: run_plan.with_plan(note, PLAN))
        vault.close()
        yield one


def decide(client: Client, name: str, what: str, serial: str, *signed: str) -> str:
    sealed = client.hospital.approval(name, serial, *signed)
    answer = client.post(f"/plans/run-1/{what}", files={"envelope": sealed})
    return words(client.get(answer.headers["location"])) if answer.status_code == 303 else words(answer)


def test_a_plan_stands_on_the_first_page_until_both_have_signed_it(made: Hospital) -> None:
    with serving(made), made.client("dora") as dora, made.client("hugo") as hugo:
        assert "1 plans of runs waiting for approval" in words(dora.get("/"))
        page = words(dora.get("/plans/run-1"))
        assert PLAN.digest in page
        assert "3 rounds of at most 600 seconds" in page
        assert "lazaret-agent task preview --run run-1 --out run-1.html" in page
        decide(dora, "dora", "approve", PLAN.serial, *PLAN.words())
        assert "missing: hospital" in words(hugo.get("/plans/run-1"))
        decide(hugo, "hugo", "approve", PLAN.serial, *PLAN.words())
        assert "0 plans of runs waiting for approval" in words(dora.get("/"))
        assert "approved" in words(dora.get("/plans"))


def test_a_signature_for_another_plan_is_none(made: Hospital) -> None:
    with serving(made), made.client("dora") as dora:
        answer = decide(dora, "dora", "approve", PLAN.serial, "run", "run-1", "0" * 64)
        assert "for another text" in answer
        answer = decide(dora, "hugo", "approve", PLAN.serial, *PLAN.words())
        assert "sign with your own key" in answer


def test_a_refusal_is_final_and_needs_a_reason_of_the_list(made: Hospital) -> None:
    with serving(made), made.client("dora") as dora, made.client("hugo") as hugo:
        serial = refusal(PLAN.serial)
        assert dora.get("/plans/run-1/refuse?why=mood").status_code == 400
        assert "does not justify" in words(dora.get("/plans/run-1/refuse?why=purpose"))
        assert "unknown reason" in decide(dora, "dora", "refuse", serial, "refuse", "run-1", f"{PLAN.digest} mood")
        decide(dora, "dora", "refuse", serial, "refuse", "run-1", f"{PLAN.digest} purpose")
        assert "decided already" in decide(hugo, "hugo", "approve", PLAN.serial, *PLAN.words())
        assert dora.get("/plans/run-2").status_code == 404


def test_who_decides_about_nothing_signs_nothing(made: Hospital) -> None:
    with serving(made), made.client("olga") as olga:
        assert olga.get("/plans/run-1").status_code == 200
        assert olga.post("/plans/run-1/approve", files={"envelope": b"{}"}).status_code == 403
