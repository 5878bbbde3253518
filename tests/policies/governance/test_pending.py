"""Which serial people sign under, who is missing, and what a number stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.governance import decisions
from policies.governance.pending import Pending, choose, numbered, open_proposals, serial_for
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.entries import InvalidEntryError
from policies.ledger.store import Store
from tests.support.ledger_world import Person

ORIGIN = "lazaret/test"
PEOPLE = [Person("dpo-1", "compliance"), Person("head-1", "hospital"), Person("olga", "operator")]
WORDS = "enrol", "north", "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(open_sqlite(tmp_path / "ledger.db"), ORIGIN, PEOPLE[0].key, lambda: 0)
    for person in PEOPLE[:2]:
        decisions.appoint(made, person.name, person.role, person.public)
    value = f"operator {PEOPLE[2].public.hex()}"
    for person in PEOPLE[:2]:
        decisions.approve(made, person.approval("new", "appoint", "olga", value))
    decisions.appoint(made, "olga", "operator", PEOPLE[2].public, "new")
    return made


def test_a_free_serial_is_taken_and_one_that_others_hold_is_not(store: Store) -> None:
    assert serial_for(store.state, WORDS, "join-a") == "join-a"
    decisions.request(store, PEOPLE[2].request("join-a", "dismiss", "olga", "operator"))
    assert serial_for(store.state, WORDS, "join-a") == "join-a-1", "who may ask can block no serial for good"


def test_the_second_one_signs_under_the_serial_of_the_first(store: Store) -> None:
    decisions.approve(store, PEOPLE[0].approval("typed-by-hand", *WORDS))
    assert serial_for(store.state, WORDS, "join-a") == "typed-by-hand"
    assert serial_for(store.state, ("enrol", "north", "b" * 64), "join-b") == "join-b", "other words, another serial"


def test_a_serial_that_somebody_asked_under_is_the_one(store: Store) -> None:
    decisions.request(store, PEOPLE[2].request("asked", *WORDS))
    assert serial_for(store.state, WORDS, "join-a") == "asked"
    decisions.approve(store, PEOPLE[0].approval("other", *WORDS))
    assert serial_for(store.state, WORDS, "join-a") == "other", "with more approvals"


def test_what_is_open_is_listed_until_it_is_carried_out(store: Store) -> None:
    assert list(open_proposals(store, "lazaret-coordinator")) == []
    decisions.request(store, PEOPLE[2].request("bye", "dismiss", "olga", "operator"))
    (one,) = open_proposals(store, "lazaret-coordinator")
    assert (one.missing, one.serial) == (("compliance", "hospital"), "bye")
    assert one.command == "lazaret-coordinator ledger dismiss olga --serial bye"
    assert "asked for by olga" in one.details
    for person in PEOPLE[:2]:
        decisions.approve(store, person.approval("bye", "dismiss", "olga", "operator"))
    (one,) = open_proposals(store, "lazaret-coordinator")
    assert one.missing == ()
    decisions.dismiss(store, "olga", "bye")
    assert list(open_proposals(store, "lazaret-coordinator")) == []


def test_a_number_stands_for_one_thing_or_for_none() -> None:
    first = Pending("enrol", "north", "aa", "s", "request NUMBER, north", ("hospital",), "approve NUMBER")
    found = numbered([first], lambda names: {name: 7 for name in names})
    assert choose(found, "7", "lazaret-coordinator").subject == "north"
    assert choose(found, "07", "lazaret-coordinator", "enrol").next_step("p")[0] == "request 7, north"
    for word, action in (("1", ""), ("0", ""), ("", ""), ("7", "release")):
        with pytest.raises(InvalidEntryError, match="`lazaret-coordinator status` shows what waits"):
            choose(found, word, "lazaret-coordinator", action)
    unnumbered = numbered([first], lambda names: dict.fromkeys(names, 0))
    with pytest.raises(InvalidEntryError):
        choose(unnumbered, "0", "lazaret-coordinator")
