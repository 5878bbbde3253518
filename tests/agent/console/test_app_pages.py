"""The site console's other pages, over real TLS: who may, what is done, what hostile text does in every field."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.console.context import SiteConsoleContext
from agent.console.optout import Consequences, preview
from agent.deidentify.record import Record
from agent.domain import Selection
from agent.event_log import open_log
from agent.ingest.context import open_ingest
from agent.service.ledger_access import BorrowedLedger, LedgerMissingError
from agent.storage import projects
from agent.storage.site_directory import MAIN
from agent.storage.spool import ReceivedFile
from policies.governance import amendments
from policies.governance import decisions as governance
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import LedgerBusyError, Store
from tests.agent.console.hospital import Client, Hospital, hospital, serving, words
from tests.support.ledger_world import policy

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}../../etc/passwd%0a\u202e"
PAGES = {
    "/": 5,
    "/budget": 5,
    "/ledger": 5,
    "/ledger/0": 5,
    "/people": 5,
    "/policy": 5,
    "/jobs": 5,
    "/releases": 4,
    "/ingest": 4,
    "/quarantine": 4,
    "/pacs": 4,
    "/ledger/export/file": 4,
    "/opt-out": 2,
    "/policy/edit": 2,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospital]:
    """One hospital for tests that spend nothing of it."""
    with hospital(tmp_path_factory.mktemp("place")) as made:
        (made.home.root / "ingest.toml").write_text(
            '[listener]\nae_title = "LAZARET"\nplain_tcp = true\nport = 11112\n'
            'callers = [{ae_title = "PACS1", addresses = ["10.1.2.0/24"]}]\n'
            '[pacs.main]\naet = "MAINPACS"\nhost = "127.0.0.1"\nport = 9\ncalling = "LAZARET"\n'
            '[site]\npull = ["main"]\n'
        )
        with serving(made):
            yield made


def idle(client: Client, page: str) -> str:
    for _ in range(300):
        told = words(client.get(page))
        if "Running" not in told:
            return told
        time.sleep(0.1)
    raise AssertionError(told)


def test_each_role_sees_its_pages_and_no_other(place: Hospital) -> None:
    allowed = {5: set("abcde"), 4: set("abde"), 2: set("de")}
    for letter, name in zip("abcde", ("olga", "otto", "rita", "dora", "hugo"), strict=True):
        with place.client(name) as client:
            for path, roles in PAGES.items():
                wanted = 200 if letter in allowed[roles] else 403
                assert client.get(path).status_code == wanted, (name, path)
            menu = re.findall(r'<li><a href="([^"]+)"', client.get("/").text)
            assert all(client.get(path).status_code == 200 for path in menu), name


def test_nothing_is_done_by_who_may_not_or_without_the_forms_own_token(place: Hospital) -> None:
    acts = ["/quarantine/main/drop", "/quarantine/main/retry", "/ingest/main", "/pacs/pacs/main/ask"]
    decisions = ["/policy/check", "/policy/force", "/policy/discard", "/policy/approve"]
    decisions += ["/opt-out/look", "/opt-out/do", "/opt-out/undo"]
    with place.client("otto") as auditor, place.client("olga") as operator, place.client("dora") as dora:
        assert {auditor.post(path).status_code for path in acts + decisions} == {403}
        assert {operator.post(path).status_code for path in decisions} == {403}
        assert dora.http.post("/opt-out/do", data={"sure": "yes"}, headers=dora.own).status_code == 403
        own = dora.own | {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
        assert dora.http.post("/opt-out/do", data={"sure": "yes"}, headers=own).status_code == 403


def test_hostile_text_in_any_field_is_text_or_refused(place: Hospital) -> None:
    name = place.refuse(1, source=HOSTILE)[0]
    with place.client("dora") as client:
        tried = [
            client.get("/quarantine?code=not_dicom"),
            client.http.get("/quarantine", params={"code": "<script>alert(1)</script>"}),
            client.http.get("/quarantine", params={"project": "../main"}),
            client.http.get("/ledger", params={"text": "<script>alert(1)</script> OR 1=1 --", "kind": '"><b>'}),
            client.http.get("/ledger", params={"before": "-1; DROP TABLE line"}),
            client.http.get("/policy/edit", params={"start": "../../../etc/passwd"}),
            client.post("/policy/check", policy="<script>alert(1)</script>"),
            client.post("/policy/check", policy=policy(name='"<script>alert(1)</script>"')),
            client.post("/opt-out/look", patients="<script>alert(1)</script>", issuer="{{7*7}}"),
            client.post("/opt-out/look", patients=HOSTILE),
            client.post("/quarantine/main/retry", name=[HOSTILE[:50]]),
            client.post("/pacs/pacs/..%2f..%2fetc/ask"),
            client.get("/releases/..%2f..%2fetc%2fpasswd"),
            client.get("/releases/<script>/refuse?why=other"),
            client.get("/jobs/<script>"),
            client.get("/jobs/1/files/..%2f..%2fetc%2fpasswd"),
            client.post("/jobs/99/refuse", why=HOSTILE[:50]),
        ]
        for answer in tried:
            assert answer.status_code < 500, (answer.request.url, words(answer))
            assert "<script>alert" not in answer.text, answer.request.url
            assert "onerror=alert(2)>" not in answer.text.replace("&#39;", "'") or "&lt;img" in answer.text
            assert "root:" not in answer.text
            assert "> 49" not in words(answer)
        client.post("/quarantine/main/drop", name=[name], sure="yes")
    log = (place.home.root / "agent.log").read_text()
    assert "alert" not in log
    assert all(json.loads(line) for line in log.splitlines())


# -- ingest


def test_refused_files_are_listed_tried_again_and_given_up(place: Hospital) -> None:
    names = place.refuse(3)
    with place.client("olga") as olga, place.client("otto") as otto:
        assert "export/DOE^JOHN.dcm" in words(olga.get("/quarantine?code=not_dicom"))
        page = otto.get("/quarantine?code=not_dicom").text
        assert "DOE" not in page, "an auditor sees counts and reasons"
        assert "not_dicom" in page
        assert "Choose files" in words(olga.post("/quarantine/main/drop", name=names[:1])), "it is not confirmed"
        assert olga.post("/quarantine/main/retry", name=names[:2]).status_code == 303
        assert "0 kept, 0 duplicates, 2 rejected." in idle(olga, "/quarantine")
        assert words(olga.get("/quarantine?code=not_dicom")).count("folder") == 3
        assert "2 file(s) deleted" in olga.told("/quarantine/main/drop", name=names[:2], sure="yes")
        assert "not in quarantine any more" in words(olga.post("/quarantine/main/drop", name=names[:1], sure="yes"))
        olga.post("/quarantine/main/retry", code="not_dicom", once_more="yes")
        assert "1 rejected" in idle(olga, "/quarantine")
        assert olga.get("/quarantine?project=other").status_code == 404
        olga.post("/quarantine/main/drop", name=names[2:], sure="yes")
    log = (place.home.root / "agent.log").read_text()
    assert log.count("quarantine_dropped") >= 3
    assert "DOE" not in log


def test_ids_that_may_be_one_person_are_shown_until_a_person_decides(place: Hospital) -> None:
    with place.client("olga") as olga:
        assert "that may be one person each" not in words(olga.get("/ingest"))
        with open_ingest(place.home, MAIN) as way:
            head = next(head for head in way.vault.heads())
            everybody = way.vault.images(Selection("OT", head.shape or ()))
            image = next(image for who, image in everybody if who == head.person)
            names = [f"{kind:032x}" for kind in range(0xF00, 0xF05)]
            twin = Record(*names[:4], "OT", "image", "", image.pixels, b"twin", False, names[4], "EYE")
            way.vault.keep(twin)
            assert "1 groups of patient ids that may be one person each" in words(olga.get("/ingest"))
            (group,) = way.vault.alike()
            way.vault.tell_apart(group.name)
        assert "that may be one person each" not in words(olga.get("/ingest"))
        with open_ingest(place.home, MAIN) as way:
            way.vault.purge({twin.pseudonym})


def test_what_waits_is_counted_and_read_on_demand(place: Hospital) -> None:
    with open_ingest(place.home, MAIN) as way:
        way.inbox.put(ReceivedFile("dimse", "PACS1", b"no image either"))
    with place.client("olga") as olga:
        assert "1 pending" in words(olga.get("/ingest"))
        assert olga.post("/ingest/main").status_code == 303
        assert "0 kept" in idle(olga, "/ingest")
        assert "0 pending" in words(olga.get("/ingest"))
        assert "eligible for releases 24 12" in words(olga.get("/ingest"))
    with open_ingest(place.home, MAIN) as way:
        for entry in way.quarantine.entries():
            way.quarantine.remove(entry.name)


def test_the_pacs_page_says_what_the_log_told_of_and_knocks_when_asked(place: Hospital) -> None:
    log = open_log(place.home.root / "agent.log")
    log.error("pull_failed", where="main", reason="Unreachable", state="main: nobody answers there.")
    log.info("listener", state="rejected_calling", count=4)
    with place.client("olga") as olga:
        told = words(olga.get("/pacs"))
        assert "C-STORE as LAZARET, plain TCP 127.0.0.1:11112 serve is not running" in told
        assert "failed main: nobody answers there." in told
        assert "Add it to the callers. 4 check this" in told
        answer = olga.post("/pacs/pacs/main/ask")
        assert answer.status_code == 409
        assert "main:" in words(answer)
        assert "has no [pacs.other]" in words(olga.post("/pacs/pacs/other/ask"))


# -- books


def test_an_entry_is_proved_and_the_search_finds_it(place: Hospital) -> None:
    with place.client("rita") as rita:
        found = words(rita.get("/ledger?text=dora"))
        assert "person dora, role compliance" in found
        assert "person hugo" not in found
        assert "No entry matches" in words(rita.get("/ledger?text=nobody"))
        seq = re.search(r'href="/ledger/(\d+)"', rita.get("/ledger?text=dora").text)
        assert seq is not None
        told = words(rita.get(f"/ledger/{seq[1]}"))
        assert "proved" in told
        proof = rita.get(f"/ledger/{seq[1]}/proof").json()
        assert proof["seq"] == int(seq[1])
        assert rita.get("/ledger/999999").status_code == 404
        assert "epsilon 8, delta" in words(rita.get("/ledger?kind=opened"))
        assert "per patient (add or remove one)" in words(rita.get("/budget"))


def test_a_person_who_is_dismissed_may_do_nothing_any_more(tmp_path: Path) -> None:
    with hospital(tmp_path, patients=1) as made, serving(made), made.client("rita") as rita:
        assert rita.get("/budget").status_code == 200
        disk = open_sqlite(made.home.root / "ledger.db")
        with Store(disk, "lazaret/site-a", made.home.sign_key(), lambda: 2) as store:
            for name in ("dora", "hugo"):
                sealed = made.approval(name, "d-1", "dismiss", "rita", "researcher")
                governance.approve(store, sealed)
            governance.dismiss(store, "rita", "d-1")
        assert rita.http.get("/budget").status_code == 303, "to the login"


def test_without_a_ledger_the_console_says_what_to_do(tmp_path: Path) -> None:
    from agent.storage.site_directory import SiteDirectory

    with pytest.raises(LedgerMissingError, match="appoint its persons"):
        BorrowedLedger(SiteDirectory(tmp_path)).read()


def test_while_another_process_holds_the_ledger_it_is_read_and_not_written(place: Hospital) -> None:
    ledger = BorrowedLedger(place.home)
    size = ledger.read().state.size
    code = "import sys, time\nfrom policies.ledger.backends.sqlite import open_sqlite\nfrom pathlib import Path\n"
    code += "kept = open_sqlite(Path(sys.argv[1]))\nprint('open', flush=True)\ntime.sleep(60)"
    command = [sys.executable, "-c", code, str(place.home.root / "ledger.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"open\n"
            assert ledger.read().state.size == size
            with pytest.raises(LedgerBusyError), ledger.write():
                pass
            with place.client("dora") as dora:
                assert dora.get("/ledger").status_code == 200
        finally:
            other.kill()
    with ledger.write() as store:
        assert store.state.size == size


# -- the policy


def test_problems_of_a_policy_are_shown_together_and_nothing_is_kept(place: Hospital) -> None:
    with place.client("dora") as dora:
        answer = dora.post("/policy/check", policy=policy(epsilon=-1, k_min=0), keep="yes")
        assert answer.status_code == 422
        assert "2 problems" in words(answer)
        assert not (place.home.root / "policy.proposed.toml").exists()
        assert dora.get("/policy/draft").status_code == 404
        told = words(dora.post("/policy/check", policy=policy(k_min=50, epsilon=8.0)))
        assert "No problem" in told
        assert not (place.home.root / "policy.proposed.toml").exists()


def keep(client: Client, text: str) -> str:
    answer = client.post("/policy/check", policy=text, keep="yes")
    assert answer.status_code == 303, words(answer)
    return client.get("/policy/draft").text


def force(client: Client) -> str:
    found = re.search(r'name="digest" value="([0-9a-f]{64})"', client.get("/policy/draft").text)
    answer = client.post("/policy/force", digest=found[1] if found else "")
    return words(client.get(answer.headers["location"])) if answer.status_code == 303 else words(answer)


def test_what_tightens_is_put_in_force_by_one_and_what_loosens_only_by_both(tmp_path: Path) -> None:
    both = '["compliance", "hospital"]'
    with hospital(tmp_path, patients=1) as made, serving(made):
        with made.client("dora") as dora, made.client("hugo") as hugo:
            assert "It loosens nothing" in keep(dora, policy(approvals=both, k_min=7))
            assert "in force" in force(dora)
            assert "k_min = 7" in made.home.policy_text()
            loose = policy(approvals="[]", k_min=7)
            page = keep(dora, loose)
            assert "It loosens approvals" in page
            assert 'name="digest"' not in page, "there is no button"
            digest, serial = _asked(page)
            answer = dora.post("/policy/force", digest=digest)
            assert "not approved by compliance and hospital" in words(answer), "nor does the act itself"
            _sign(dora, "dora", serial, digest)
            assert "not approved by hospital" in words(dora.post("/policy/force", digest=digest))
            _sign(hugo, "hugo", serial, digest)
            keep(hugo, policy(approvals="[]", k_min=6))  # what was signed was another text
            changed = _asked(hugo.get("/policy/draft").text)[0]
            assert "not approved" in words(hugo.post("/policy/force", digest=changed))
            assert "look at it again" in words(hugo.post("/policy/force", digest=digest))
            keep(hugo, loose)
            assert "in force" in force(hugo)
        assert made.home.policy().approvals == frozenset()
        assert BorrowedLedger(made.home).read().state.amended["site-a"] > 1
        assert made.federation.store.state.amended["site-a"] > 1


def test_a_file_that_is_tighter_than_what_was_signed_binds_and_one_person_does_not_undo_it(tmp_path: Path) -> None:
    with hospital(tmp_path, patients=1) as made, serving(made), made.client("dora") as dora:
        (made.home.root / "policy.toml").write_text(policy(approvals='["compliance", "hospital"]', k_min=25))
        loose = policy(approvals='["compliance", "hospital"]', k_min=7)
        assert "It loosens k_min" in keep(dora, loose)
        answer = dora.post("/policy/force", digest=amendments.digest(loose.strip() + "\n"))
        assert "not approved by compliance and hospital" in words(answer)
        assert "k_min = 25" in made.home.policy_text()


def _asked(page: str) -> tuple[str, str]:
    digest = re.search(r"<code>([0-9a-f]{64})</code>", page)
    serial = re.search(r"amend-[0-9]+-[0-9a-f]{16}", page)
    assert digest is not None
    return digest[1], serial[0] if serial else ""


def _sign(client: Client, name: str, serial: str, digest: str) -> None:
    sealed = client.hospital.approval(name, serial, "amend", "site-a", digest)
    answer = client.post("/policy/approve", files={"envelope": sealed})
    assert answer.status_code == 303, words(answer)


# -- a patient's no


def test_an_opt_out_does_what_was_foreseen_and_nothing_before_it_is_confirmed(tmp_path: Path) -> None:
    with hospital(tmp_path) as made:
        release = made.release()
        with serving(made), made.client("dora") as dora, made.client("hugo") as hugo:
            ids = f"{made.patient_id(0)}\n{made.patient_id(1)}\n{made.patient_id(0)}\nUNKNOWN-1\n"
            page = dora.post("/opt-out/look", patients=ids)
            told = words(page)
            assert "PAT-" not in page.text, "patient ids are not said again"
            assert "3 patients named; 2 of them known here" in told
            assert "4 instances in 1 project are deleted" in told
            assert "1 can never be sent" in told
            assert release in told
            assert "Budget that was spent stays spent" in told
            foreseen = _foreseen(made, ids)
            assert _instances(made) == 24
            token = re.search(r'name="token" value="([^"]+)"', page.text)
            assert token is not None
            assert "Confirm" in words(dora.post("/opt-out/do", token=token[1]))
            assert "preview has expired" in words(hugo.post("/opt-out/do", token=token[1], sure="yes")), (
                "another's look"
            )
            assert "preview has expired" in words(dora.post("/opt-out/do", token="x", sure="yes"))
            assert _instances(made) == 24
            assert "3 patient(s) have opted out; 4 of their" in dora.told("/opt-out/do", token=token[1], sure="yes")
            assert "preview has expired" in words(dora.post("/opt-out/do", token=token[1], sure="yes")), "once"
            assert _instances(made) == 24 - foreseen.instances
            assert foreseen.dying == (release,)
            assert "can never be sent" in words(dora.get(f"/releases/{release}"))
            again = words(dora.post("/opt-out/look", patients=ids))
            assert "had opted out before" in again
            assert "0 instances" in again
            assert "may be kept again" in dora.told("/opt-out/undo", patients="UNKNOWN-1")
            assert len(projects.opted_out(made.home)) == 2
            for empty in ("", "  \n ", "x" * 65, "\n".join(str(n) for n in range(1001))):
                assert dora.post("/opt-out/look", patients=empty).status_code == 400
        log = (made.home.root / "agent.log").read_text()
        assert "PAT-" not in log
        assert '"count": 3' in log


def test_what_has_left_is_said_to_stay_and_its_pictures_to_be_forgotten(tmp_path: Path) -> None:
    from agent.mechanisms.ksame.mechanism import KSame
    from agent.release.pipeline import release_synthetic
    from agent.runtime import open_runtime
    from tests.agent.console.hospital import public_basis

    with hospital(tmp_path, approvals="[]") as made:
        with open_runtime(made.home.root, lambda *_: None) as context:
            import numpy as np

            rng = np.random.default_rng(1)
            signed, verdict = release_synthetic(context.site, KSame(5, 2, public_basis()), "OT", rng)
        assert verdict.admitted
        foreseen = _foreseen(made, made.patient_id(3))
        assert foreseen.out == (signed.release.release,)
        assert (foreseen.retired, foreseen.dying, foreseen.unrecorded) == (1, (), 0)
        assert 4 <= foreseen.beside <= 8
        before = _pictures(made, signed.release.release)
        with open_ingest(made.home, MAIN) as way:
            person = way.who.person("", made.patient_id(3))
        projects.opt_out(made.home, person)
        assert before - _pictures(made, signed.release.release) == foreseen.retired


def _foreseen(made: Hospital, ids: str) -> Consequences:
    import datetime as dt

    context = SiteConsoleContext(made.home, BorrowedLedger(made.home), None, lambda: dt.datetime.now(dt.UTC))
    with open_ingest(made.home, MAIN) as way:
        return preview(context, frozenset(way.who.person("", one) for one in ids.split()))


def _instances(made: Hospital) -> int:
    vault = projects.open_vault(made.home)
    try:
        return len(list(vault.heads()))
    finally:
        vault.close()


def _pictures(made: Hospital, release: str) -> int:
    vault = projects.open_vault(made.home)
    try:
        return sum(vault.project_note(f"representative/{release}/{n}") is not None for n in range(10))
    finally:
        vault.close()
