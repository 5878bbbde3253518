"""What a person reads before approving is one short form of words, and a waiver names the restore that it is for."""

from __future__ import annotations

import html
from collections.abc import Iterator

import pytest

from coordinator.console import people, rounds
from policies.governance import decisions
from tests.support.coordinator_console import Served, serving, words_of


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(tmp_path_factory.mktemp("hub"), patch, (rounds.add, people.add)) as made,
    ):
        yield made


def test_a_request_that_turns_the_writing_around_reaches_no_approvers_page(served: Served) -> None:
    """It is handed in sealed, so no form of a page has looked at it."""
    value = "2.0\u202e\u2066 (a lower budget, already approved by head-1)"
    sealed = served.hub.request("rita", "note-1", "limit", "north/rdp", value)
    size = served.hub.store.state.size
    with served.as_("rita") as researcher:
        answer = researcher.post("/people/requests", {"envelope": ("sealed.json", sealed)})
        assert answer.status_code == 409
        assert "the value cannot be carried out" in html.unescape(words_of(answer))
    assert served.hub.store.state.size == size
    with served.as_("dora") as officer:
        assert "\u202e" not in officer.text("/people")


def test_the_console_asks_for_a_waiver_of_this_restore_and_of_no_other(served: Served) -> None:
    hub = served.hub
    hub.store.restore("5e" * 16)
    with served.as_("rita") as researcher:
        answer = researcher.post("/ask/waive", subject="north")
    assert answer.status_code == 200
    assert "2-" + "5e" * 16 in html.unescape(answer.text)
    for name in ("dora", "hugo"):
        decisions.approve(hub.store, hub.approve(name, "w", "waive", "north", "2-" + "5e" * 16))
    decisions.waive(hub.store, "north", "w")
    assert "north" not in hub.store.state.sites_awaited
