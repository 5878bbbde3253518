"""The console's pages of jobs, over real TLS: who may look, who may act, and what a price means."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.event_log import open_log
from agent.release.budget import reserve
from agent.runtime import open_runtime
from agent.service import job_acts, jobs
from agent.service.jobs import JobStore
from agent.service.ledger_access import BorrowedLedger, Site
from agent.service.site import site_app
from agent.storage import projects
from agent.storage.vault import JOB_OUTPUTS
from policies.accounting.claims import KAnonymous, SubsampledGaussian
from policies.ledger.state import State
from policies.statements import Release, Reservation, claim_json, parse
from protos.service.control_socket import control_socket
from protos.web.sessions import LoginSessions
from tests.agent.console.hospital import Hospital, hospital, serving, words

NAMES = ("olga", "rita", "otto", "dora", "hugo")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Hospital]:
    with hospital(tmp_path, patients=1) as made, serving(made):
        yield made


def site_of(place: Hospital) -> Site:
    return Site(place.home, BorrowedLedger(place.home), open_log(place.home.root / "agent.log"))


def job(place: Hospital, *typed: str, by: str = "rita", propose: bool = False) -> int:
    told: dict[str, Any] = {"words": typed or ("release", "ksame", "--k=5"), "project": "main", "by": by}
    claim = claim_json(KAnonymous(5, 2, releases_per_patient=1))
    told |= {"price": {"claim": claim, "amount": 1, "left": 1}, "cuda": False, "key": ""}
    act = job_acts.propose if propose else job_acts.add
    return int(act(site_of(place), told)["number"])


def put(place: Hospital, number: int, state: str, **changed: Any) -> None:
    JobStore(place.home.root).change(number, lambda known: known.now(state, "as the test says", **changed))


def paid(place: Hospital, number: int) -> None:
    """The price of a job is held, in both ledgers."""
    claim, grant = KAnonymous(5, 2, releases_per_patient=1), JobStore(place.home.root).read(number).grant
    asked = Reservation(grant, "site-a", "", "ksame", claim, {"encoder": "public", "generator": "public"}, "OT")
    with open_runtime(place.home.root, lambda *_: None) as runtime:
        reserve(runtime.site, asked)


def state_of(place: Hospital, number: int) -> str:
    return JobStore(place.home.root).read(number).state


def test_every_role_sees_jobs_and_how_they_stand_and_an_unknown_number_is_a_sentence(place: Hospital) -> None:
    number = job(place)
    put(place, number, jobs.RUNNING, attempts=1)
    folder = JobStore(place.home.root).folder(number)
    now = time.time()
    lines = [{"at": now - 10, "step": "make", "detail": "cluster 1 of 4", "done": 1, "of": 4}]
    lines += [{"at": now, "step": "make", "detail": "cluster 3 of 4", "done": 3, "of": 4}]
    (folder / "said.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    for name in NAMES:
        with place.client(name) as person:
            told = words(person.get("/jobs"))
            step = "make" if name == "rita" else "make: cluster 3 of 4"
            assert f"release ksame main running {step}, 75 %, about 5 s left of this stage" in told
            page = person.get(f"/jobs/{number}")
            assert 'data-live="2"' in page.text
            assert "1 of the 1 releases without an epsilon" in words(page)
            assert person.get("/jobs/99").status_code == 404
            assert "There is no job 99" in words(person.get("/jobs/99"))
            assert "There is no such page" in words(person.get("/jobs/one"))


def test_what_a_job_printed_is_for_those_who_see_counts_and_its_files_for_those_who_see_patients(
    place: Hospital,
) -> None:
    number = job(place, "release", "ksalsa", "--sheet=out/sheet.html")
    put(place, number, jobs.DONE, attempts=1)
    (JobStore(place.home.root).folder(number) / "stdout").write_text("  read  24 patients\x1b[31m<b>\n")
    with closing(projects.open_vault(place.home, "main")) as vault:
        vault.place(f"{JOB_OUTPUTS}{number}/sheet.html").write(b"<html>faces</html>")
    for name in NAMES:
        with place.client(name) as person:
            page, file = person.get(f"/jobs/{number}"), person.get(f"/jobs/{number}/files/sheet.html")
            assert ("24 patients" in page.text) is (name != "rita"), name
            assert "\x1b" not in page.text
            assert "<b>" not in page.text.partition("What it printed")[2].partition("</pre>")[0]
            decides = name in ("dora", "hugo")
            assert ('/files/sheet.html"' in page.text) is decides, name
            assert file.status_code == (200 if decides else 403)
            if decides:
                assert file.content == b"<html>faces</html>"
                assert file.headers["content-disposition"].startswith("attachment")
                assert person.get(f"/jobs/{number}/files/other.html").status_code == 404
    with place.client("dora") as dora, closing(projects.open_vault(place.home, "main")) as vault:
        vault.place(f"{JOB_OUTPUTS}{number}/sheet.html").clear()
        assert "deleted since" in words(dora.get(f"/jobs/{number}/files/sheet.html"))


def test_a_training_shows_its_output_and_its_networks_to_the_researcher(place: Hospital) -> None:
    number = job(place, "train", "encoder", "--out=out/encoder")
    put(place, number, jobs.DONE, attempts=1)
    folder = JobStore(place.home.root).folder(number)
    (folder / "out" / "encoder").mkdir(parents=True)
    (folder / "out" / "encoder" / "encoder.safetensors").write_bytes(b"weights")
    (folder / "stdout").write_text("trained, on 40 public images\n")
    with place.client("rita") as rita:
        told = words(rita.get(f"/jobs/{number}"))
        assert "trained, on 40 public images" in told
        assert "encoder/encoder.safetensors" in told
    with place.client("dora") as dora:
        assert dora.get(f"/jobs/{number}/files/encoder").status_code == 404


def test_who_may_end_and_retry(place: Hospital) -> None:
    mine, other = job(place), job(place, by="somebody")
    with place.client("otto") as otto:
        assert {otto.post(f"/jobs/{mine}/{act}").status_code for act in ("cancel", "retry", "approve")} == {403}
    with place.client("rita") as rita:
        assert "Cancel …" not in words(rita.get(f"/jobs/{other}"))
        assert "a researcher ends and retries their own" in words(rita.post(f"/jobs/{other}/cancel"))
        assert rita.post(f"/jobs/{other}/retry").status_code == 403
        assert "No budget is spent" in words(rita.get(f"/jobs/{mine}/cancel"))
        assert "It is cancelled" in rita.told(f"/jobs/{mine}/cancel")
        assert "has ended already: cancelled" in words(rita.post(f"/jobs/{mine}/cancel"))
        assert "It begins anew as job 3" in rita.told(f"/jobs/{mine}/retry")
        assert rita.http.post(f"/jobs/{mine}/retry", data={"a": "b"}, headers=rita.own).status_code == 403, "no token"
    with place.client("olga") as olga:
        assert "It is cancelled" in olga.told(f"/jobs/{other}/cancel")
        assert "There is no job 99" in words(olga.post("/jobs/99/cancel"))
    history = JobStore(place.home.root).read(other).history
    assert (history[-1].state, history[-1].by) == ("cancelled", "olga")


def test_a_price_that_is_paid_is_lost_only_when_that_is_confirmed_by_who_may(place: Hospital) -> None:
    number = job(place)
    paid(place, number)
    put(place, number, jobs.INTERRUPTED, attempts=1, not_before=-1.0)
    with place.client("rita") as rita, place.client("hugo") as hugo:
        page = words(rita.get(f"/jobs/{number}"))
        assert "Retry goes on where it stood, and no price is paid twice" in page
        assert "Ask the operator" in words(rita.get(f"/jobs/{number}/cancel"))
        assert rita.post(f"/jobs/{number}/cancel", spend="yes").status_code == 403
        asked = hugo.get(f"/jobs/{number}/cancel")
        assert "stays spent whatever you do" in words(asked)
        assert re.search(r'name="spend" value="yes" required', asked.text)
        answer = hugo.post(f"/jobs/{number}/cancel")
        assert (answer.status_code, "Nothing was done" in words(answer)) == (409, True)
        assert state_of(place, number) == "interrupted"
        assert "It is cancelled" in hugo.told(f"/jobs/{number}/cancel", spend="yes")
    state: State = BorrowedLedger(place.home).read().state
    assert state.grants[JobStore(place.home.root).read(number).grant].state == "spent"


def test_a_part_in_a_run_is_seen_by_all_and_left_by_who_may(place: Hospital) -> None:
    number = job(place, "part", "run-1", by="")
    claim = SubsampledGaussian(0.25, 20.0, 9)
    with open_runtime(place.home.root, lambda *_: None) as runtime:
        asked = Reservation(
            "grant-part", "site-a", "run-1", "federated", claim, {"initial": "public", "centre": "public"}, "OT"
        )
        assert runtime.site.ledger.reserve("reserve-part", asked, runtime.site.seal(asked)).admitted
        amount = runtime.site.ledger.store.state.grants["grant-part"].reserved.amount
        note = {"run": "run-1", "grant": "grant-part", "modality": "OT", "rounds_trained": 0, "begun": 0}
        runtime.vault.write_note("run", note)
    price = {"mechanism": "federated", "claim": claim_json(claim), "amount": amount, "left": 2 * amount}
    put(place, number, jobs.INTERRUPTED, grant="grant-part", price=price, attempts=1)
    store = JobStore(place.home.root)
    store.change(number, lambda known: known.now(jobs.RUNNING, "round 1 of 3"))
    with place.client("rita") as rita, place.client("hugo") as hugo:
        page = words(rita.get(f"/jobs/{number}"))
        assert ("part run-1" in page, "round 1 of 3" in page, "Retry" in page, "As a command" in page) == (
            *(True, True),
            *(False, False),
        )
        assert "as the test says" not in page, "why a round came to nothing may be a patient's doing"
        assert "% of the lifetime budget" in page
        assert "No budget is spent" in words(hugo.get(f"/jobs/{number}/cancel"))
        store.change(number, lambda known: replace(known, attempts=2))
        asked_again = hugo.get(f"/jobs/{number}/cancel")
        assert "the rest of the price is returned" in words(asked_again)
        answer = hugo.post(f"/jobs/{number}/cancel")
        assert (answer.status_code, "Nothing was done" in words(answer)) == (409, True)
        assert "It is told to end" in hugo.told(f"/jobs/{number}/cancel", spend="yes")
    assert (store.read(number).wanted, store.read(number).wanted_by) == (jobs.SPENT, "hugo")
    state: State = BorrowedLedger(place.home).read().state
    assert state.grants["grant-part"].state == "held", "the record leaves no run; the service does"


def test_a_proposal_is_approved_by_each_role_with_their_own_login_and_by_nobody_else(place: Hospital) -> None:
    number = job(place, propose=True)
    folder = JobStore(place.home.root).folder(number)
    (folder / "in" / "0-ksalsa.toml").write_text('mechanism = "<i>ksalsa</i>"\n')
    with place.client("rita") as rita, place.client("olga") as olga:
        told = words(rita.get("/jobs"))
        assert "proposed waits for approval by compliance and hospital" in told
        assert "Approve as" not in rita.get(f"/jobs/{number}").text
        assert {one.post(f"/jobs/{number}/approve").status_code for one in (rita, olga)} == {403}
        assert {one.post(f"/jobs/{number}/refuse", why="no").status_code for one in (rita, olga)} == {403}
    with place.client("dora") as dora, place.client("hugo") as hugo:
        page = dora.get(f"/jobs/{number}")
        assert "&lt;i&gt;ksalsa" in page.text, "who approves sees what will be done"
        assert "SHA-256" in page.text
        assert "it waits for hospital" in dora.told(f"/jobs/{number}/approve")
        assert "Approve as" not in dora.get(f"/jobs/{number}").text
        assert "Job 1 is approved by dora already" in words(dora.post(f"/jobs/{number}/approve"))
        assert "it is queued" in hugo.told(f"/jobs/{number}/approve")
        told = words(hugo.get(f"/jobs/{number}"))
        assert "approved dora, compliance" in told
        assert "approved hugo, hospital" in told
        assert "starts when `serve` runs" in told
        assert "waits for no approval" in words(hugo.post(f"/jobs/{number}/refuse", why="late"))
    log = (place.home.root / "agent.log").read_text()
    assert log.count('"job_approved"') == 2


def test_who_is_logged_in_by_the_institutions_account_decides_about_no_proposal(
    place: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is decided bears no signature: another one's word that it is the person does not do."""
    number = job(place, propose=True)
    with place.client("dora") as dora:
        assert dora.get(f"/jobs/{number}").status_code == 200
        begun = LoginSessions.find

        def by_openid(*arguments: Any, **more: Any) -> Any:
            session = begun(*arguments, **more)
            if session is not None:
                session.certificate = b""
            return session

        monkeypatch.setattr(LoginSessions, "find", by_openid)
        page = words(dora.get(f"/jobs/{number}"))
        assert "To decide, log in with your own certificate" in page
        assert "login make dora --out FOLDER makes one, and the operator of this console pins it" in page
        assert "Approve as compliance" not in page
        for act, more in (("approve", {}), ("refuse", {"why": "no"})):
            answer = dora.post(f"/jobs/{number}/{act}", **more)
            assert (answer.status_code, "your own certificate" in words(answer)) == (403, True)
            assert "`lazaret-agent login make NAME --out FOLDER` makes one" in words(answer)
    assert JobStore(place.home.root).read(number).approved == {}


def test_a_refusal_needs_a_reason_and_stands_in_the_history(place: Hospital) -> None:
    number = job(place, propose=True)
    with place.client("hugo") as hugo, place.client("rita") as rita:
        for empty in ("", "  ", "x" * 501):
            assert hugo.post(f"/jobs/{number}/refuse", why=empty).status_code == 400
        assert "will not start" in hugo.told(f"/jobs/{number}/refuse", why="k = 5 is  too few <for us>")
        assert "refused hugo k = 5 is too few <for us>" in words(rita.get(f"/jobs/{number}"))
    assert state_of(place, number) == "refused"


def test_a_policy_that_asks_nobody_any_more_leaves_the_decision_to_one_person(place: Hospital) -> None:
    number = job(place, propose=True)
    store = JobStore(place.home.root)
    store.change(number, lambda known: known.approving("compliance", "dora").approving("hospital", "hugo"))
    with place.client("dora") as dora:
        assert "any one approving role" in words(dora.get(f"/jobs/{number}"))


def test_a_release_and_the_job_that_made_it_lead_to_each_other(tmp_path: Path) -> None:
    with hospital(tmp_path) as made:
        release = made.release()
        with closing(projects.open_vault(made.home)) as vault:
            statement = parse(vault.note("pending")[release]["statement"].encode())  # type: ignore[index]
        assert isinstance(statement, Release)
        number = job(made)
        JobStore(made.home.root).change(
            number, lambda known: replace(known, grant=statement.grant).now("made", attempts=1)
        )
        with serving(made), made.client("dora") as dora, made.client("rita") as rita:
            assert f'href="/releases/{release}"' in dora.get(f"/jobs/{number}").text
            assert f'href="/jobs/{number}"' in dora.get(f"/releases/{release}").text
            assert f'href="/releases/{release}"' not in rita.get(f"/jobs/{number}").text, "it would be refused there"


def test_a_console_beside_the_service_asks_it_over_the_control_socket(place: Hospital) -> None:
    """Another process runs the jobs: it says why one waits, and it ends a running one, which this one must not do."""
    site, waits, runs = site_of(place), job(place), job(place, "train", "encoder")
    put(place, runs, jobs.RUNNING, attempts=1)
    with place.client("olga") as olga:
        assert "starts when `serve` runs" in words(olga.get(f"/jobs/{waits}"))
        with control_socket(place.home.root, site_app(site.home, site.ledger, site.log), site.log):
            assert "starts now" in words(olga.get(f"/jobs/{waits}"))
            assert "It is told to end" in olga.told(f"/jobs/{runs}/cancel")
            assert "There is no job 99" in words(olga.get("/jobs/99"))
            assert state_of(place, runs) == "running", "its process has not ended"
    assert JobStore(place.home.root).read(runs).wanted_by == "olga"


def test_a_record_that_cannot_be_read_is_a_sentence(place: Hospital) -> None:
    number = job(place)
    (JobStore(place.home.root).folder(number) / "job.json").write_text("{")
    with place.client("dora") as dora:
        answer = dora.get("/jobs")
        assert (answer.status_code, "move the folder away" in words(answer)) == (200, True)


def test_what_may_count_patients_is_not_shown_to_the_researcher(place: Hospital) -> None:
    """C22: of a step and of a reason only those who may see counts read the words."""
    number = job(place)
    put(place, number, jobs.RUNNING, attempts=1)
    folder = JobStore(place.home.root).folder(number)
    line = {"at": 1.0, "step": "make", "detail": "37 patients are behind no image", "done": 0, "of": 0}
    (folder / "said.jsonl").write_text(json.dumps(line) + "\n")
    with place.client("rita") as rita, place.client("olga") as olga:
        for path in ("/jobs", f"/jobs/{number}"):
            assert ("37 patients" in words(olga.get(path)), "37 patients" in words(rita.get(path))) == (True, False)
        change = "only 38 patients qualify"
        JobStore(place.home.root).change(number, lambda known: known.now(jobs.REFUSED, change))
        for path in ("/jobs", f"/jobs/{number}"):
            assert (change in words(olga.get(path)), change in words(rita.get(path))) == (True, False)
        assert "why is for those who may see counts" in words(rita.get(f"/jobs/{number}"))
