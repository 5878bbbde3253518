"""People and keys: who asked never approves, one person never decides, and the fold has the last word."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.storage import site_directory
from coordinator.console import people, rounds
from coordinator.console.proposals import proposals_of
from policies.governance import decisions
from policies.review.policy import preset
from protos.identity import certificates
from tests.support.coordinator_console import Caller, Hub, Served, serving, words_of
from tests.support.ledger_world import Person

LIMIT = ("limit", "north/rdp")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(tmp_path_factory.mktemp("hub"), patch, (rounds.add, people.add)) as made,
    ):
        yield made


def hand_in(person: Caller, path: str, envelope: bytes, name: str = "envelope") -> str:
    """What the page, or the person, says to it."""
    answer = person.post(path, {name: ("sealed.json", envelope)})
    if answer.status_code != 303:
        return html.unescape(words_of(answer))
    return html.unescape(person.text(answer.headers["location"]))


def ask(served: Served, name: str, serial: str, *words: str) -> None:
    with served.as_(name) as person:
        sealed = served.hub.request(name, serial, *words)
        assert "The request is in the ledger" in hand_in(person, "/people/requests", sealed)


def approve(served: Served, name: str, serial: str, *words: str) -> str:
    with served.as_(name) as person:
        return hand_in(person, f"/people/proposals/{serial}/approve", served.hub.approve(name, serial, *words))


def limit(hub: Hub) -> str:
    return hub.store.state.accounts["north/rdp"].epsilon


def test_a_budget_is_raised_when_one_asks_and_two_others_of_both_roles_approve(served: Served) -> None:
    words = (*LIMIT, "8.5")
    ask(served, "rita", "s-1", *words)
    with served.as_("olga") as operator:
        assert "your approval is needed" not in operator.text("/people")
        assert "2 role(s) must approve" in words_of(operator.post("/people/proposals/s-1/do"))
    assert "Your approval is in the ledger" in approve(served, "dora", "s-1", *words)
    with served.as_("olga") as operator:
        assert "1 did" in words_of(operator.post("/people/proposals/s-1/do"))
    assert limit(served.hub) == "8.0"
    approve(served, "hugo", "s-1", *words)
    with served.as_("olga") as operator:
        assert "It can be carried out" in operator.text("/people/proposals/s-1")
        assert "Done, and recorded" in operator.done("/people/proposals/s-1/do")
        assert limit(served.hub) == "8.5"
        assert "used once" in words_of(operator.post("/people/proposals/s-1/do"))


def test_who_asked_does_not_approve_nor_does_anybody_twice_or_for_another(served: Served) -> None:
    words = (*LIMIT, "9.5")
    ask(served, "dora", "s-2", *words)
    with served.as_("dora") as officer:
        page = officer.text("/people/proposals/s-2")
        assert "You requested it, so others decide." in page
        assert "Sign the approval" not in page
    assert "a requester does not approve their own request" in approve(served, "dora", "s-2", *words)
    approve(served, "hugo", "s-2", *words)
    size = served.hub.store.state.size
    approve(served, "hugo", "s-2", *words)  # the same word again is the same word
    assert served.hub.store.state.size == size
    assert served.hub.store.state.agreeing("s-2", *words) == ["hugo"]
    with served.as_("hugo") as person:  # logged in as himself, with another's word
        sealed = served.hub.approve("dora", "s-2", *words)
        assert "of another person" in hand_in(person, "/people/proposals/s-2/approve", sealed)
    with served.as_("olga") as operator:
        assert "1 did" in words_of(operator.post("/people/proposals/s-2/do"))
        sealed = served.hub.approve("dora", "s-2", *words)  # and the operator brings it in from outside
        assert "a requester" in hand_in(operator, "/people/approvals", sealed, "approval")
    assert limit(served.hub) != "9.5"


def test_an_approval_of_other_words_or_by_another_key_is_none(served: Served) -> None:
    words = (*LIMIT, "9.0")
    ask(served, "olga", "s-3", *words)
    assert "something else than what is approved" in approve(served, "dora", "s-3", *LIMIT, "99.0")
    assert "is for another proposal" in approve_under(served, "hugo", "s-3", "s-33", *words)
    forged = Person("hugo", "hospital").approval("s-3", *words, served.hub.store.origin)
    for brought in (forged, b"{}", b"", served.hub.approve("olga", "s-3", *words), b"\xff" * 100):
        with served.as_("olga") as operator:
            hand_in(operator, "/people/approvals", brought, "approval")
    assert served.hub.store.state.agreeing("s-3", *words) == []
    with served.as_("hugo") as person:
        assert "not signed by that person's key" in hand_in(person, "/people/proposals/s-3/approve", forged)


def approve_under(served: Served, name: str, page: str, serial: str, *words: str) -> str:
    with served.as_(name) as person:
        return hand_in(person, f"/people/proposals/{page}/approve", served.hub.approve(name, serial, *words))


@pytest.mark.parametrize("name", ["olga", "rita", "otto"])
def test_no_role_climbs_to_an_approvers_pages(served: Served, name: str) -> None:
    with served.as_(name) as person:
        words = (*LIMIT, "9.0")
        sealed = served.hub.approve(name, "s-3", *words)
        assert person.post("/people/proposals/s-3/approve", {"envelope": ("x", sealed)}).status_code == 403
        if name != "olga":
            for path in ("/people/approvals", "/people/first", "/hospitals/invite", "/hospitals/north/revoke"):
                assert person.post(path).status_code == 403, path
    with pytest.raises(ValueError, match="may approve"):
        decisions.approve(served.hub.store, sealed)


def test_an_auditor_asks_for_nothing(served: Served) -> None:
    with served.as_("otto") as auditor:
        assert "/ask/" not in auditor.text("/people")
        assert auditor.get("/ask/limit").status_code == 403
        sealed = served.hub.request("otto", "s-4", *LIMIT, "9.0")
        assert auditor.post("/people/requests", {"envelope": ("x", sealed)}).status_code == 403
    with pytest.raises(ValueError, match="may make requests"):
        decisions.request(served.hub.store, sealed)


def test_what_is_asked_for_is_shown_in_words_before_it_is_signed(served: Served) -> None:
    with served.as_("rita") as researcher:
        answer = researcher.post("/ask/limit", subject="north/rdp", budget="9.25")
        assert answer.status_code == 200
        assert "The lifetime budget of north becomes epsilon 9.25 per patient" in answer.text
        assert "delta 4e-06" in answer.text
        assert "Sign the request" in answer.text
        assert "<title>Change a budget · Lazaret, test</title>" in answer.text
        for bad in ("nan", "-1", "1e9", "<b>", ""):
            said = researcher.post("/ask/limit", subject="north/rdp", budget=bad)
            assert said.status_code == 422
            assert "<b></b>" not in said.text
        assert researcher.post("/ask/appoint", subject="<script>", role="operator", key="x").status_code == 422
        assert researcher.post("/ask/appoint", subject="eve", role="king", key="ab" * 32).status_code == 422
        assert researcher.post("/ask/dismiss", subject="nobody").status_code == 422
        assert researcher.post("/ask/enrol", subject="nowhere").status_code == 422
        assert researcher.post("/ask/waive", subject="north").status_code == 422
        assert researcher.get("/ask/teleport").status_code == 404


def test_a_person_comes_and_goes_by_the_word_of_both_roles(served: Served) -> None:
    emma = served.hub.persons["emma"] = Person("emma", "compliance")
    words = ("appoint", "emma", f"compliance {emma.public.hex()}")
    ask(served, "olga", "s-5", *words)
    for name in ("dora", "hugo"):
        approve(served, name, "s-5", *words)
    with served.as_("olga") as operator:
        operator.done("/people/proposals/s-5/do")
        assert "emma" in operator.text("/people")
    words = ("dismiss", "dora", "compliance")
    ask(served, "olga", "s-6", *words)
    for name in ("emma", "hugo"):
        approve(served, name, "s-6", *words)
    with served.as_("dora") as officer, served.as_("olga") as operator:
        assert officer.get("/people").status_code == 200
        operator.done("/people/proposals/s-6/do")
        gone = officer.get("/people")  # at once, in the middle of a login
        assert gone.status_code == 303
        assert "dismissed" in operator.text("/people")
        ask(served, "olga", "s-7", *LIMIT, "7.5")
        sealed = served.hub.approve("dora", "s-7", *LIMIT, "7.5")
        assert "may approve" in hand_in(operator, "/people/approvals", sealed, "approval")
        words = ("dismiss", "hugo", "hospital")
        ask(served, "olga", "s-8", *words)
        for name in ("emma", "hugo"):
            approve(served, name, "s-8", *words)
        assert "stays until a successor" in words_of(operator.post("/people/proposals/s-8/do"))


def test_a_limit_is_lowered_by_one_of_the_roles(served: Served) -> None:
    words = (*LIMIT, "7.0")
    ask(served, "rita", "s-9", *words)
    with served.as_("olga") as operator:
        assert "Missing: compliance or hospital" in operator.text("/people/proposals/s-9")
        assert "0 did" in words_of(operator.post("/people/proposals/s-9/do"))
        approve(served, "hugo", "s-9", *words)
        operator.done("/people/proposals/s-9/do")
    assert limit(served.hub) == "7.0"


def test_a_hospital_is_invited_waits_is_approved_by_both_roles_and_revoked(served: Served) -> None:
    site = 'site = "east"\ncoordinator = "127.0.0.1:1"\ninput = "in"\nmodalities = ["OT"]\n'
    site += "secondary_capture_modalities = []\npublic_components = []\n"
    made = site_directory.create(served.hub.folder / "east", site, preset("internal"))
    with served.as_("olga") as operator:
        page = operator.post("/hospitals/invite", site="east").text
        token = re.search(r"<code>([^<]+)</code>", page)
        assert token is not None
        body = operator.get("/hospitals/east/invitation").json()
        assert token[1] not in json.dumps(body), "the file holds no secret"
        assert token[1] not in operator.text("/people"), "the token is shown once"
        for bad in ("../x", "<b>", "coordinator", ""):
            assert operator.post("/hospitals/invite", site=bad).status_code == 409
            assert operator.get(f"/hospitals/{bad or '-'}/invitation").status_code == 404
        leaf = certificates.leaf_of(body["certificate"].encode())
        request = (made.root / "request.json").read_bytes()
        served.hub.authority.join("east", leaf, request)
        page = operator.text("/people")
        assert certificates.fingerprint(request) in page
        digest = next(e.digest for e in served.hub.authority.enrolments() if e.site == "east")
        words = ("enrol", "east", digest)
        ask(served, "olga", "s-10", *words)
        assert certificates.fingerprint(request) in operator.text("/people/proposals/s-10")
        approver = next(
            n
            for n, p in served.hub.persons.items()
            if p.role == "compliance" and served.hub.store.state.active_person(n)
        )
        approve(served, approver, "s-10", *words)
        assert operator.post("/people/proposals/s-10/do").status_code == 409
        assert "east" not in served.hub.store.state.sites
        approve(served, "hugo", "s-10", *words)
        operator.done("/people/proposals/s-10/do")
        assert "east" in served.hub.store.state.sites
        assert "east" in served.hub.host.registered, "its node is let in"
        assert "Type the hospital" in words_of(
            operator.post("/hospitals/east/revoke", certificate="", why="lost", again="north")
        )
        assert operator.post("/hospitals/east/revoke", certificate="", why="<b>", again="east").status_code == 400
        page = operator.done("/hospitals/east/revoke", certificate="", why="lost", again="east")
        assert "east is revoked" in page
        assert "east" in served.hub.store.state.revoked_sites
        assert operator.get("/hospitals/east/revoke").status_code == 404


def test_no_proposal_of_that_serial_is_a_sentence(served: Served) -> None:
    with served.as_("olga") as operator:
        for serial in ("nothing", "%3Cscript%3E", "..%2f..", "x" * 300):
            assert operator.get(f"/people/proposals/{serial}").status_code == 404
            assert operator.post(f"/people/proposals/{serial}/do").status_code == 404


def test_only_the_first_of_a_role_needs_nobody(served: Served) -> None:
    eve = Person("eve", "compliance")
    with served.as_("olga") as operator:
        value = f"compliance {eve.public.hex()}"
        assert operator.post("/people/first", subject="eve", value=value).status_code == 409
    assert "eve" not in served.hub.store.state.persons


def test_not_even_the_first_of_a_role_has_a_name_that_is_none(served: Served) -> None:
    with pytest.MonkeyPatch.context() as patch, served.as_("olga") as operator:
        patch.setattr(people, "_first", lambda *_: True)  # as where the office is empty
        value = f"compliance {Person('eve', 'compliance').public.hex()}"
        for name in ("<script>alert(1)</script>", "../eve", "", "a\nb"):
            assert "short and opaque" in words_of(operator.post("/people/first", subject=name, value=value))
    assert not [name for name in served.hub.store.state.persons if "eve" in name or "<" in name]


def test_of_very_many_requests_the_newest_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    """Whoever may ask can ask without an end, and nothing is withdrawn: a page shows so many and no more."""
    with pytest.MonkeyPatch.context() as patch, serving(tmp_path, patch, (rounds.add, people.add)) as made:
        hub, most = made.hub, people.MOST_OPEN
        for n in range(most + 3):
            decisions.request(hub.store, hub.request("rita", f"many-{n:03d}", *LIMIT, f"{9 + n / 1000:.3f}"))
        read = list[bytes]()

        def envelope(digest: bytes) -> bytes | None:
            read.append(digest)
            return hub.store.envelope(digest)

        with hub.store.exclusive() as state:
            listed = proposals_of(state, envelope, "dora", (most, 20))
        assert [p.serial for p in listed.waiting] == [f"many-{n:03d}" for n in reversed(range(3, most + 3))]
        assert (listed.more, listed.done) == (3, ())
        assert len(read) == most, "no statement of the others was opened"
        with made.as_("dora") as dora:
            page = dora.text("/people")
            assert "many-002" in dora.text("/people/proposals/many-002"), "by its serial each is there"
        assert page.count("your approval is needed") == most
        assert "3 older proposals wait too" in page
        assert "/people/proposals/many-002" not in page
