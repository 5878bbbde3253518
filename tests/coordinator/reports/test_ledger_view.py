"""What the reports work out of the entries is what a full fold of all of them says: the same bytes, whatever is left
undecoded. The ledger holds entries of every kind.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from coordinator.reports.catalog import REPORTS, _body, make, snapshot
from coordinator.reports.document import ReportError
from coordinator.reports.ledger_view import LedgerHistory, LedgerView, Moment, Placed
from coordinator.reports.report_inputs import ReportInputs
from coordinator.storage import directory as homes
from policies.audit.display import as_json
from policies.governance import decisions
from policies.ledger.entries import (
    KINDS,
    Amended,
    Enrolled,
    Expired,
    Freed,
    Issued,
    Presented,
    Recovered,
    Reserved,
    Revoked,
    Sent,
    Spent,
    Waived,
    kind_of,
)
from policies.ledger.state import State
from policies.ledger.store import AppendRequest, Store
from tests.support.ledger_world import Hospital, Person
from tests.support.report_world import LAX, NOW, Stage, stage

CAREFUL, LOCAL = Person("dpo-1", "compliance"), Person("head-1", "hospital")


def agree(store: Store, serial: str, action: str, subject: str, value: str, *people: Person) -> None:
    for person in people or (CAREFUL, LOCAL):
        decisions.approve(store, person.approval(serial, action, subject, value, homes.ORIGIN))


def add(store: Store, *entries: Any) -> None:
    for entry in entries:
        store.append(f"more-{store.state.size}", AppendRequest((entry,)))


def asked(grant: str, site: str, amount: int) -> Reserved:
    return Reserved(grant, site, "later", "federated", f"{site}/rdp", amount, b"{}", grant.encode().ljust(32, b"-"))


def everything_else(shown: Stage) -> None:
    """After a history worth a report: whatever else a ledger can hold."""
    store, word = shown.store, b"\7" * 32
    east = Hospital("east", LAX)
    shown.intake.enrol(east.enrolment()[1])
    add(store, asked("g-free", "south", 900), Freed("g-free", "unused", word))
    sent = Sent("rel-part", "g-part", "south", "later", 1, "federated", 300, word, word)
    add(store, asked("g-part", "south", 700), sent, Spent("g-part", 400, "finished", word))
    add(store, asked("g-lost", "south", 10**6), Expired("g-lost", "restart"), asked("g-open", "south", 10**7))
    add(store, Issued("north", "1a", word, 1 << 40), Revoked("north", "1a", "lost"), Amended("north", 1, word, word))
    for person in (CAREFUL, LOCAL):
        decisions.appoint(store, person.name, person.role, person.public)
    left = Person("dpo-2", "compliance")
    agree(store, "p", "appoint", left.name, f"{left.role} {left.public.hex()}")
    decisions.appoint(store, left.name, left.role, left.public, "p")
    agree(store, "d", "dismiss", left.name, left.role)
    decisions.dismiss(store, left.name, "d")
    decisions.request(store, CAREFUL.request("l", "limit", "north/k", "2", homes.ORIGIN))
    agree(store, "l", "limit", "north/k", "2", LOCAL)
    decisions.set_limit(store, "north/k", "2", "l")
    store.restore("ab" * 16)
    lost = asked("g-back", "north", 5_000)
    add(store, Recovered(**dataclasses.asdict(lost)), Presented("north", "ab" * 16, 1, word))
    agree(store, "w", "waive", "south", f"{store.state.epoch}-{store.state.nonce}")
    decisions.waive(store, "south", "w")


class Everywhere(dict[str, set[int]]):
    """Every entry may bear on everything."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._all = set(range(size))

    def __missing__(self, _name: str) -> set[int]:
        return self._all


class Whole(LedgerView):
    """The plain way: everything decoded and folded, and looked through from the first entry to the last."""

    @cached_property
    def ledger(self) -> dict[str, Any]:
        return as_json("x", self.records)

    @cached_property
    def accounts(self) -> list[dict[str, Any]]:
        return list(self.ledger["accounts"])

    @cached_property
    def refused(self) -> list[dict[str, Any]]:
        return [e for e in self.ledger["entries"] if e["type"] == "refused"]

    @cached_property
    def fold(self) -> LedgerHistory:
        """Every account is looked at after every entry."""
        state, history = State(), defaultdict[str, list[Moment]](list)
        for record in self.records:
            state.apply(record)
            for name, a in state.accounts.items():
                now = (a.spent, a.held, a.limit)
                if not history[name] or history[name][-1][1:] != now:
                    history[name].append((record.at, *now))
        return LedgerHistory(state, history, {})

    @cached_property
    def grants(self) -> Mapping[str, list[tuple[int, Any]]]:
        when = {r.entry.grant: r.at for r in self.records if isinstance(r.entry, Reserved | Recovered)}
        own = self.fold.state.grants
        return {
            a["account"]: [(when[n], g) for n, g in own.items() if g.reserved.account == a["account"]]
            for a in self.accounts
        }

    @cached_property
    def places(self) -> Mapping[str, set[int]]:
        return Everywhere(len(self.entries))

    def about(self, name: str) -> list[Placed]:
        return list(enumerate(self.records))

    def policies(self) -> dict[str, bytes]:
        return {r.entry.site: r.entry.envelope for r in self.records if isinstance(r.entry, Enrolled | Amended)}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        everything_else(shown)
        yield shown


@pytest.fixture(scope="module")
def found(full: Stage) -> tuple[bytes, ReportInputs]:
    return snapshot(full.home, NOW)


def test_the_ledger_of_this_test_holds_every_kind_of_entry(found: tuple[bytes, ReportInputs]) -> None:
    assert {kind_of(r.entry) for r in found[1].records} == set(KINDS)


def said(full: Stage, raw: bytes, inputs: ReportInputs, what: tuple[str, str, str]) -> bytes | str:
    """A report's bytes, or why there is none."""
    try:
        return _body(full.home, raw, inputs, what)
    except ReportError as refusal:
        return str(refusal)


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "bundle"])
def test_a_report_has_the_bytes_that_a_full_fold_gives(
    full: Stage, found: tuple[bytes, ReportInputs], name: str
) -> None:
    raw, inputs = found
    plain = dataclasses.replace(inputs, told=Whole(inputs.export.entries, inputs.export.envelopes))
    report, made = REPORTS[name], 0
    for form in set(report.forms) - {"pdf"} or report.forms:
        for subject in [*full.names.values(), full.run, full.shared] if report.about else [""]:
            expected = said(full, raw, plain, (name, form, subject))
            assert said(full, raw, inputs, (name, form, subject)) == expected, (form, subject)
            fresh = dataclasses.replace(inputs, told=LedgerView(inputs.export.entries, inputs.export.envelopes))
            assert said(full, raw, fresh, (name, form, subject)) == expected, "whatever was asked for before"
            made += isinstance(expected, bytes)
    assert made


def test_policies_refusals_and_accounts_are_those_of_a_full_reading(found: tuple[bytes, ReportInputs]) -> None:
    told = found[1].told
    plain = Whole(told.entries, found[1].export.envelopes)
    assert (told.accounts, told.refused, told.policies()) == (plain.accounts, plain.refused, plain.policies())
    assert any(isinstance(r.entry, Waived) for r in told.records)


def test_the_report_about_one_release_decodes_a_few_entries_only(
    full: Stage, found: tuple[bytes, ReportInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = dataclasses.replace(found[1], told=LedgerView(found[1].export.entries, found[1].export.envelopes))
    monkeypatch.setattr(LedgerView, "records", property(lambda _self: pytest.fail("everything was decoded")))
    for form in ("json", "pdf"):
        assert _body(full.home, b"", inputs, ("certificate", form, full.names["five"]))
    assert len(inputs.told.about(full.names["five"])) < len(inputs.told.entries) / 3


def test_whoever_waits_is_told_what_is_done_and_of_how_many_entries(full: Stage) -> None:
    steps: list[str] = []
    make(full.home, "denied", "json", "", NOW, step=steps.append)
    assert steps == ["reading the ledger", f"making denied of {full.store.state.size} entries"]


def test_the_foot_says_which_head_of_which_size_a_report_is_of(full: Stage, tmp_path: Path) -> None:
    root, size = full.store.prove(0).checkpoint.split("\n")[2], full.store.state.size
    inputs = snapshot(full.home, NOW)[1]
    assert (inputs.source.size, inputs.export.checkpoint.split("\n")[2]) == (size, root)
    for name, report in REPORTS.items():
        if "html" in report.forms and not report.about:
            text = make(full.home, name, "html", "", NOW).body.decode()
            assert inputs.source.root in text, name
            assert str(size) in text, name
