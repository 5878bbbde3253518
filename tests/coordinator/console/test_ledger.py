"""The ledger, one entry, refusals, overview and budgets: over real TLS, for each role, with a real ledger behind."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import html
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from coordinator.console import ledger, overview, rounds
from coordinator.gateway.notifications import Presence
from coordinator.storage import directory as homes
from coordinator.storage.witness_store import Witnesses
from policies.accounting.claims import KAnonymous
from policies.audit.inclusion_proof import check
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.entries import Refused, decode, kind_of
from policies.ledger.merkle import cosign
from policies.ledger.store import AppendRequest, export
from tests.support.coordinator_console import ROLES, Caller, Served, serving, words_of
from tests.support.coordinator_runs import AGENTS, agents, job

THIN = KAnonymous(k=2, l_diversity=1, releases_per_patient=1)
HOSTILE = (
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "{{ 7*191 }}{% raw %}",
    "javascript:alert(1)",
    "../../etc/passwd",
    "a&site=west#x",
    "é\u202e drow\x07",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A coordinator with a release, a run, refusals of three sorts and an open proposal."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("hub")
        with serving(folder, patch, (overview.add, ledger.add, rounds.add)) as made:
            hub = made.hub
            hub.release("north", "g1")
            if AGENTS:
                list(hub.runs.launch(job(rounds=1)))
                hub.finish("run-1")
            north = hub.hospitals["north"]
            for n in range(60):
                thin = north.reservation(f"thin-{n}", THIN)
                hub.intake.register.reserve(f"t{n}", thin, north.seal(thin))
            for n, text in enumerate(HOSTILE):  # a hospital's own words, as far as any reach the books
                odd = Refused(text, "west", text, text, [text, "bad_envelope"], b"")
                hub.store.append(f"odd-{n}", AppendRequest((odd,)))
            decisions.request(hub.store, hub.request("rita", "limit-1", "limit", "north/rdp", "9.0"))
            yield made


@pytest.fixture(scope="module")
def otto(served: Served) -> Iterator[Caller]:
    with served.as_("otto") as caller:
        yield caller


def numbers(page: str) -> list[int]:
    """The entries that a list shows."""
    return [int(n) for n in re.findall(r'href="/ledger/([0-9]+)"', page)]


def plain(page: str) -> str:
    """A page's words."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def entries(served: Served) -> list[Any]:
    store = served.hub.store
    return [store.line(seq).record for seq in range(store.state.size)]


@pytest.mark.parametrize("name", sorted(ROLES))
def test_every_role_may_look_and_nothing_here_can_be_done(served: Served, name: str) -> None:
    with served.as_(name) as caller:
        told = () if ROLES[name] == "researcher" else ("/refusals",)
        for path in ("/", "/ledger", "/ledger/3", "/budgets/north", *told):
            page = caller.text(path)
            assert not re.search(r'<form[^>]*method="post"(?![^>]*action="/logout")', page), path
        assert caller.post("/ledger").status_code == 405


def test_nobody_looks_without_a_login(served: Served) -> None:
    import ssl

    import httpx

    tls = ssl.create_default_context(cafile=str(served.hub.home.keys / "console.crt"))
    with httpx.Client(base_url=served.base, verify=tls, trust_env=False) as stranger:
        for path in ("/", "/ledger", "/ledger/3", "/ledger/3/proof.json", "/refusals", "/budgets/north"):
            answer = stranger.get(path)
            assert (answer.status_code, answer.headers["location"][:6]) == (303, "/login"), path


def test_pages_lead_through_every_entry_once_and_back(served: Served, otto: Caller) -> None:
    size = served.hub.store.state.size
    page, seen, newest = otto.text("/ledger"), list[int](), ""
    newest = page
    while True:
        seen += numbers(page)
        older = re.search(r'href="([^"]+)" rel="next"', page)
        if older is None:
            break
        page = otto.text(html.unescape(older[1]))
    assert seen == list(range(size))[::-1]
    back = re.search(r'href="([^"]+)" rel="prev"', page)
    assert back is not None
    assert numbers(otto.text(html.unescape(back[1])))[:1] == numbers(newest)[:1]


@pytest.mark.parametrize(
    "query",
    [
        {"kind": "refused"},
        {"site": "north", "kind": "reserved"},
        {"text": "run-1", "kind": "admitted"},
        {"text": "rule=min_k thin-7"},
        {"text": "run-*", "site": "south"},
        {"kind": "admitted", "since": "2000-01-01", "until": "2999-12-31"},
        {"until": "2000-01-01"},
    ],
)
def test_a_filter_finds_what_a_reading_of_everything_finds(
    served: Served, otto: Caller, query: dict[str, str]
) -> None:
    state = served.hub.store.state

    def fits(record: Any) -> bool:
        e, text = record.entry, query.get("text", "")
        grant = state.grants.get(getattr(e, "grant", ""))
        site = (
            getattr(e, "site", "") or getattr(e, "account", "").rpartition("/")[0] or (grant and grant.reserved.site)
        )
        run = getattr(e, "run", "") or (grant and grant.reserved.run) or ""
        words = {"": True, "run-1": run == "run-1", "run-*": run.startswith("run-")}
        thin = "min_k" in getattr(e, "findings", ()) and getattr(e, "subject", "") == "thin-7"
        right = ("kind" not in query or kind_of(e) == query["kind"]) and (
            "site" not in query or site == query["site"]
        )
        return right and words.get(text, thin) and query.get("until") != "2000-01-01"

    expected = [seq for seq, record in enumerate(entries(served)) if fits(record)][::-1]
    page = otto.text("/ledger", **query)
    assert numbers(page) == expected[:50]
    count = f"{len(expected)} {'entry' if len(expected) == 1 else 'entries'} found."
    assert count in plain(page)
    if "until" in query and not expected:
        assert "No entry matches" in page


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"kind": "everything"}, "no such kind"),
        ({"since": "yesterday"}, "2026-01-31"),
        ({"until": "2026-13-01"}, "2026-01-31"),
        ({"before": "1", "after": "2"}, "before an entry or after one"),
        ({"before": "one"}, "look at before"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_what_to_do(
    otto: Caller, query: dict[str, str], sentence: str
) -> None:
    answer = otto.get("/ledger", **query)
    assert answer.status_code == 400
    assert sentence in words_of(answer)


def test_a_star_that_is_too_wide_and_a_number_are_understood(otto: Caller) -> None:
    assert "3 letters or more" in otto.text("/ledger", text="t*")
    assert '<a href="/ledger/12">entry 12</a>' in otto.text("/ledger", text="#12")
    assert "The entry of that number" not in otto.text("/ledger", text="99999999")


@pytest.mark.parametrize("text", [*HOSTILE, '" OR kind=admitted', "x" * 900, "%00", "'; DROP TABLE words; --"])
def test_what_is_typed_is_shown_as_text_and_obeyed_by_nobody(otto: Caller, text: str) -> None:
    if not text.isprintable():
        assert otto.get("/ledger", text=text).status_code == 400
        return
    for name in ("text", "site"):
        page = otto.text("/ledger", **{name: text})
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert 'value="1337' not in page
        shown = re.search(r'name="text" type="search" value="([^"]*)"', page)
        assert shown is not None
        assert html.unescape(shown[1]) == (text.strip() if name == "text" else "")
    assert otto.get("/refusals", site=text).status_code == 200
    assert otto.get(f"/budgets/{text.replace('/', '%2F')[:500]}").status_code in (400, 404)


def test_what_a_hospital_wrote_is_shown_as_text_everywhere(served: Served, otto: Caller) -> None:
    odd = [seq for seq, r in enumerate(entries(served)) if r.key.startswith("odd-")]
    for path in ("/", "/ledger?kind=refused", "/refusals", *(f"/ledger/{seq}" for seq in odd)):
        page = otto.text(path)
        for bad in ("<script>alert", "<img src=x", 'href="javascript:', ">1337<"):
            assert bad not in page, (path, bad)
        assert not set(page) & {"\u202e", "\x07"}, "nor does anything turn the writing around"
    assert html.unescape(otto.text(f"/ledger/{odd[0]}")).count(HOSTILE[0]) >= 3, "it is told as it is"


def test_an_entry_is_proved_on_its_page_and_again_with_what_is_downloaded(served: Served, otto: Caller) -> None:
    store = served.hub.store
    for seq in (0, 7, store.state.size - 1):
        page = otto.text(f"/ledger/{seq}")
        assert "✓ proof checked" in page
        assert "<b>the same</b>" in page
        told = json.loads(otto.text(f"/ledger/{seq}/proof.json"))
        raw, path = base64.b64decode(told["entry"]), [bytes.fromhex(node) for node in told["inclusion_proof"]]
        assert decode(raw) == store.line(seq).record
        again = check(seq, raw, path, told["checkpoint"], (store.origin, store.public))
        assert again.holds, again.fault
        assert again.leaf.hex() in page
        assert again.root.hex() in page
    note = otto.text("/ledger/7/checkpoint")
    with contextlib.closing(homes.look_at_ledger(served.hub.home)) as disk:
        found = verify(export(disk, store.origin, served.hub.home.ledger_key()), note)
    fingerprint = re.search(r"--key ([0-9a-f]{16,64})", page)
    assert fingerprint is not None
    assert found.key.startswith(fingerprint[1]), "the command on the page is the one that works"


def test_the_statement_behind_an_entry_is_checked_against_its_signers_key(served: Served, otto: Caller) -> None:
    seqs = {kind_of(r.entry): seq for seq, r in enumerate(entries(served)) if getattr(r.entry, "envelope", b"")}
    assert {"enrolled", "reserved", "admitted", "refused", "requested"} <= set(seqs)
    for kind, seq in seqs.items():
        page = otto.text(f"/ledger/{seq}")
        assert "✓ signature checked" in page, kind
        entry: Any = served.hub.store.line(seq).record.entry
        assert otto.get(f"/ledger/{seq}/statement.json").content == served.hub.store.envelope(entry.envelope)
    without = next(seq for seq, r in enumerate(entries(served)) if kind_of(r.entry) == "opened")
    assert "signed statement behind it" not in otto.text(f"/ledger/{without}")
    assert otto.get(f"/ledger/{without}/statement.json").status_code == 404


@pytest.mark.parametrize(
    "path", ["/ledger/9999", "/ledger/-1", "/ledger/99999999999999999999999", "/ledger/x", "/budgets/x"]
)
def test_what_is_not_there_is_said(otto: Caller, path: str) -> None:
    assert otto.get(path).status_code == 404
    assert otto.get(f"{path}/proof.json").status_code == 404


def test_a_refusal_is_told_in_words_with_what_to_do(served: Served, otto: Caller) -> None:
    seq = next(seq for seq, r in enumerate(entries(served)) if isinstance(r.entry, Refused))
    words = plain(otto.text(f"/ledger/{seq}"))
    assert "Too few patients would be behind each image." in words
    assert "Choose larger groups" in words
    page = plain(otto.text("/refusals"))
    assert re.search(r"Too few patients would be behind each image\. min_k .* 60 north 60", page)
    assert "Nothing was refused" in otto.text("/refusals", site="south")
    assert otto.get("/refusals", days="8").status_code == 400


@agents
def test_the_overview_says_who_is_there_what_waits_and_what_is_left(served: Served, otto: Caller) -> None:
    hub = served.hub
    hub.sessions._seen["north"] = Presence(True, time.time())
    words = plain(otto.text("/"))
    assert "1 of 3 hospitals online" in words
    assert "1 proposal waiting for approval" in words
    assert "the lifetime budget of north becomes epsilon 9.0" in words
    assert "compliance and hospital" in words, "who is missing"
    assert "The hospital's signature is missing or wrong." in words
    assert "67 refusals in 7 days" in words
    for part in (
        "at delta 4e-06 per patient",
        "neighbours differ by one patient added or removed",
        "% left; epsilon",
    ):
        assert part in words
    assert "epsilon 0" not in words


def test_a_hospital_that_saw_the_newest_head_is_level_and_a_forged_word_counts_nothing(
    served: Served, otto: Caller
) -> None:
    hub, kept = served.hub, Witnesses(served.hub.home.witnesses)
    note = hub.store.checkpoint()
    forged = note + cosign(note, "south", hub.hospitals["north"].key, 5)
    kept.keep("south", forged)
    kept.keep("north", note + cosign(note, "north", hub.hospitals["north"].key, 5))
    rows = re.findall(r"<tr><th scope=\"row\"><a href=\"/budgets/(\w+)\">.*?</tr>", otto.text("/"), re.DOTALL)
    assert rows == ["north", "south", "west"]
    page = otto.text("/")
    north, south = (
        re.search(rf'<a href="/budgets/{site}">{site}</a></th>(.*?)</tr>', page, re.DOTALL)
        for site in ("north", "south")
    )
    assert north is not None
    assert south is not None
    assert "the newest entry" in north[1]
    assert "nothing yet" in south[1]


@agents
def test_a_budgets_page_has_its_projects_and_its_days(otto: Caller) -> None:
    words = plain(otto.text("/budgets/north", days="30"))
    assert "run-1" in words
    assert "ksame" in words
    assert "across all projects" in words
    assert otto.get("/budgets/north", days="31").status_code == 400


def test_the_overview_is_its_own_newest_word_after_something_was_done(served: Served, otto: Caller) -> None:
    north = served.hub.hospitals["north"]
    thin = north.reservation("thin-late", THIN)
    served.hub.intake.register.reserve("late", thin, north.seal(thin))
    seq = served.hub.store.state.size - 1
    assert numbers(otto.text("/ledger", text="thin-late")) == [seq], "found at once"


def test_an_index_that_is_broken_is_said_and_made_again(served: Served, otto: Caller) -> None:
    served.context.index._db.execute("DROP TABLE refusal")
    answer = otto.get("/refusals")
    assert answer.status_code == 503
    assert "rebuilt" in words_of(answer)
    assert otto.get("/refusals").status_code == 200


def test_a_ledger_that_was_changed_behind_the_coordinators_back_is_shown_as_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, (overview.add, ledger.add, rounds.add)) as made, made.as_("otto") as otto:
        assert "✓ proof checked" in otto.text("/ledger/4")
        with apsw.Connection(str(made.hub.home.ledger)) as db:
            db.execute("DROP TRIGGER entry_is_fixed")
            db.execute("UPDATE entry SET body = (SELECT body FROM entry WHERE seq = 5) WHERE seq = 4")
        page = otto.text("/ledger/4")
        assert "✕ proof does not hold" in page
        assert "✓ proof checked" not in page
        assert "Stop the coordinator" in page
        assert "✓ proof checked" in otto.text("/ledger/5")


def test_a_day_is_the_whole_day_in_utc(served: Served, otto: Caller) -> None:
    today = dt.datetime.fromtimestamp(entries(served)[3].at, dt.UTC).date().isoformat()
    assert 3 in numbers(otto.text("/ledger", since=today, until=today, kind="enrolled"))


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_number_that_no_database_has_is_a_sentence(otto: Caller, place: str) -> None:
    for number in ("9" * 25, "-" + "9" * 25):
        assert "No entry has that number" in words_of(otto.get("/ledger", **{place: number}))


def test_a_researcher_is_told_of_no_refusal_and_everybody_else_of_all(served: Served) -> None:
    """The table of roles in ``deploy/docs/consoles.md``: the auditor sees refusals, a researcher releases."""
    store = served.hub.store
    refused = [n for n in range(store.state.size) if kind_of(store.line(n).record.entry) == "refused"]
    paths = ["/refusals", "/ledger?kind=refused", f"/ledger/{refused[0]}"]
    paths += [f"/ledger/{refused[0]}/{what}" for what in ("proof.json", "statement.json", "checkpoint")]
    for name, role in ROLES.items():
        with served.as_(name) as caller:
            answers = [caller.client.get(path) for path in paths]
            shown = set(numbers(caller.text("/ledger"))) & set(refused)
            found = set(numbers(caller.text("/ledger", text="min_k")))
            first = caller.text("/")
            if role == "researcher":
                none = [caller.client.get(path.replace(f"/{refused[0]}", "/9999")) for path in paths[2:]]
                assert [answer.status_code for answer in answers] == [403] * 2 + [404] * len(none)
                for answer, other in zip(answers[2:], none, strict=True):
                    assert words_of(answer) == words_of(other), "a refusal answers as an entry that does not exist"
                assert "The entry of that number" not in caller.text("/ledger", text=f"#{refused[0]}")
                assert all("min_k" not in answer.text for answer in answers)
                assert not shown
                assert not found
                assert "/refusals" not in first
                assert "min_k" not in first
                assert 'value="refused"' not in caller.text("/ledger")
            else:
                assert [answer.status_code for answer in answers] == [200] * len(paths)
                assert shown
                assert found <= set(refused)
                assert found
                assert "/refusals" in first
            assert caller.get("/ledger/0/proof.json").status_code == 200


def test_a_researcher_reaches_every_other_entry(served: Served) -> None:
    with served.as_("rita") as rita:
        page, seen = rita.text("/ledger"), list[int]()
        while True:
            seen += numbers(page)
            older = re.search(r'href="([^"]+)" rel="next"', page)
            if older is None:
                break
            page = rita.text(html.unescape(older[1]))
    records = entries(served)
    assert seen == [n for n in reversed(range(len(records))) if kind_of(records[n].entry) != "refused"]
