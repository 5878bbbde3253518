"""The policies: the federation's, a site's own, what binds, and what an amendment changed."""

from __future__ import annotations

import html
from collections.abc import Iterator

import pytest

from coordinator.console import policies, rounds
from policies.governance import decisions
from policies.review.policy import parse
from policies.statements import Amendment
from tests.support.coordinator_console import Served, serving
from tests.support.coordinator_runs import admitting
from tests.support.ledger_world import Hospital

EVIL = "</code><script>alert(1)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, tight = tmp_path_factory.mktemp("hub"), {"west": admitting(epsilon=2.0, k_min=20, max_reid_rate=0.5)}
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(folder, patch, (rounds.add, policies.add), policies=tight) as made,
    ):
        yield made


def amend(served: Served, site: str, number: int, text: str) -> None:
    hospital: Hospital = served.hub.hospitals[site]
    said = Amendment(site, number, text)
    decisions.amend(served.hub.store, f"{site}:amend-{number}", said, hospital.seal(said))


def test_the_stricter_of_both_is_shown_to_bind(served: Served) -> None:
    with served.as_("otto") as auditor:
        page = auditor.text("/policies")
        assert "Epsilon, lifetime, Smallest group" in page
        page = auditor.text("/policies/west")
        assert page.count("the hospital is stricter") == 2
        assert page.count("the federation is stricter") == 1
        assert "<b>2</b>" in page
        assert "<b>20</b>" in page
        assert auditor.get("/policies/nowhere").status_code == 404


def test_an_amendment_is_shown_with_what_it_tightened_and_loosened(served: Served) -> None:
    amend(served, "north", 1, admitting(epsilon=3.0, max_releases_per_patient=9))
    with served.as_("dora") as officer:
        page = officer.text("/policies/north")
        assert "Amendment 1" in page
        assert page.count("in force") == 1
        assert ">tighter<" in page
        assert ">looser<" in page
        assert "As enrolled" in page
        assert page.index("Amendment 1") < page.index("As enrolled"), "the newest first"
        assert "epsilon 3" in page
        assert "the policy: it was tightened since" in page


def test_a_sites_own_words_are_words_on_the_page(served: Served) -> None:
    evil = admitting().replace('name = "internal"', f'name = "{EVIL}"')
    assert EVIL in parse(evil, "evil").name
    amend(served, "south", 1, evil)
    with served.as_("rita") as researcher:
        page = researcher.text("/policies/south")
        assert "<script>alert" not in page
        assert html.escape(EVIL).replace("&quot;", "&#34;") in page


def test_a_policy_that_is_not_the_one_in_force_is_said_to_be_so(served: Served) -> None:
    path = served.hub.home.root / "policy.toml"
    before = path.read_text()
    with served.as_("olga") as operator:
        assert "applies until the next start" not in operator.text("/policies")
        for other in (admitting(epsilon=1.0), "not a policy"):
            path.write_text(other)
            assert "applies until the next start" in operator.text("/policies")
        path.write_text(before)


def test_a_statement_that_cannot_be_read_is_a_sentence_and_no_policy(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(served.hub.store), "envelope", lambda _store, _digest: b"{}")
    with served.as_("otto") as auditor:
        assert "cannot be read" in auditor.text("/policies")
        assert auditor.get("/policies/west").status_code == 409
