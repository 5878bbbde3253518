"""Every kind of entry in words, no field left out, and a price never smaller than it is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from coordinator.console import entry_text
from coordinator.explanations import KINDS as TITLES
from policies.audit import display
from policies.ledger.entries import KINDS, Expired, Freed, Opened, Record, Refused, Reserved, Spent
from policies.ledger.state import Account, Grant, State

OPENED = Opened("north/rdp", 1000, 4, "8.0", "4e-06")
HELD = Reserved("g1", "north", "run-1", "federated", "north/rdp", 333, b'{"kind":"no-claim"}', b"\x01" * 32)
VALUES: dict[str, Any] = {"int": 7, "str": "north", "bytes": b"\x02" * 32, "list[str]": ["min_k", "budget", "level"]}


def ledger() -> State:
    state = State()
    state.accounts["north/rdp"] = Account(OPENED)
    state.accounts["north/k"] = Account(Opened("north/k", 2, 0, "", ""))
    state.grants["g1"] = Grant(HELD)
    return state


def sample(kind: str) -> Any:
    cls = KINDS[kind]
    own: dict[str, Any] = {
        "grant": "g1",
        "account": "north/rdp",
        "epsilon": "8.0",
        "delta": "4e-06",
        "claim": b'{"kind":"no-claim"}',
    }
    own |= {"stage": "reservation", "mechanism": "ksame", "level": "B", "not_after": 1_700_000_000}
    return cls(**{f.name: own.get(f.name, VALUES[str(f.type)]) for f in fields(cls)})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_entry_has_a_sentence_and_every_field_a_label(kind: str) -> None:
    entry = sample(kind)
    row = entry_text.row(3, Record(1_700_000_000, "key", entry), ledger())
    assert (row.title, row.kind) == (TITLES[kind], kind)
    assert row.words
    assert row.who
    assert [f.label for f in entry_text.facts(entry, ledger())] == [entry_text.LABELS[f.name] for f in fields(entry)]
    for fact, field in zip(entry_text.facts(entry, ledger()), fields(entry), strict=True):
        value = getattr(entry, field.name)
        shown = fact.digest or fact.text
        assert shown, field.name
        if isinstance(value, bytes) and field.name != "claim":
            assert fact.digest == value.hex(), "whole"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Spent("g1", 333, "released", b""), "federated: 33.3 % of the epsilon budget is spent, released"),
        (
            Spent("g1", 1, "finished", b"\x01"),
            "federated: 0.1 % of the epsilon budget is spent; 33.2 % of the epsilon budget came back, finished",
        ),
        (Expired("g1", "restart"), "federated: 33.3 % of the epsilon budget is spent, restart"),
        (
            Freed("g1", "unused", b"\x01"),
            "federated: nothing is spent; 33.3 % of the epsilon budget came back, unused",
        ),
    ],
)
def test_the_end_of_a_grant_says_what_is_gone_and_what_came_back(entry: Any, words: str) -> None:
    assert entry_text.sentence(Record(0, "k", entry), ledger()) == ("north", words)


def test_a_price_is_rounded_up_and_never_without_its_unit() -> None:
    assert display.price(1, "north/rdp", ledger()) == "0.1 % of the epsilon budget"
    assert display.price(1001, "north/rdp", ledger()) == "100.1 % of the epsilon budget"
    assert display.price(1, "north/k", ledger()) == "1 release per patient"
    assert "nothing" in display.price(5, "nobody/rdp", ledger())
    state = ledger()
    state.accounts["north/rdp"] = Account(Opened("north/rdp", 10**9, 4, "8.0", "4e-06"))
    assert display.price(1, "north/rdp", state) == "0.1 % of the epsilon budget", "a little is not nothing"


def test_a_refusal_says_when_and_why_and_counts_the_other_reasons() -> None:
    entry = Refused("x", "north", "ksame", "reservation", ["min_k", "l_diversity", "budget"], b"")
    _who, words = entry_text.sentence(Record(0, "k", entry), ledger())
    assert words.startswith("ksame, when asked for its price: Too few patients would be behind each image; Groups")
    assert words.endswith("; and 1 other reason")
    assert [rule for rule, _, _ in entry_text.reasons(entry)] == entry.findings
    unknown = Refused("x", "", "", "somewhere", ["made_up"], b"")
    assert "made_up" in entry_text.sentence(Record(0, "k", unknown), ledger())[1], "a reason is never dropped"
