"""When an alert is shown and when it is not, and that a figure that cannot be read is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.console import alerts
from coordinator.console.alerts import DAY, GRAVE, MILD, CosignedHead
from coordinator.console.budgets import AccountBudget, budget_of
from coordinator.console.keys import Key
from coordinator.operations.attendance import newest_certificates
from policies.index.search import RuleRefusals
from policies.ledger.entries import Appointed, Enrolled, Issued, Opened
from policies.ledger.state import Account, State
from tests.support.ledger_world import Hospital, open_register

NOW = 1_800_000_000.0


def kinds(found: object) -> list[str]:
    return [alarm.kind for alarm in found]  # type: ignore[attr-defined]


def test_a_ledger_that_cannot_be_written_or_waits_for_receipts_is_grave() -> None:
    state = State()
    state.persons["dora"] = Appointed("dora", "compliance", b"\x01" * 32, "")
    assert list(alerts.of_ledger(state, stopped=False)) == []
    assert kinds(alerts.of_ledger(state, stopped=True)) == [GRAVE]
    state.sites_awaited.add("north")
    (alarm,) = alerts.of_ledger(state, stopped=False)
    assert alarm.kind == GRAVE
    assert "north" in alarm.what
    assert kinds(alerts.of_ledger(State(), stopped=False)) == [MILD], "nobody is in office"


def test_only_refusals_that_an_attack_or_a_fault_explains_are_alarms() -> None:
    law = [RuleRefusals("min_k", "north", 40), RuleRefusals("budget", "south", 3)]
    assert list(alerts.of_refusals(law, "2026-01-01")) == []
    odd = [
        *law,
        RuleRefusals("bad_envelope", "north", 2),
        RuleRefusals("bad_envelope", "west", 1),
        RuleRefusals("new", "", 1),
    ]
    first, second = alerts.of_refusals(odd, "2026-01-01")
    assert first.kind == second.kind == GRAVE
    assert "(3 times, north, west)" in first.what
    assert "a caller without a name" in second.what, "a rule that nobody knows is not passed over"


def budget(spent: int, held: int = 0, limit: int = 1000) -> AccountBudget:
    opened = Opened("north/rdp", limit, 4, "8.0", "4e-06")
    return budget_of("north/rdp", Account(opened, held, spent))


@pytest.mark.parametrize(
    ("spent", "held", "sounds"), [(0, 0, False), (900, 0, False), (901, 0, True), (500, 401, True), (1500, 0, True)]
)
def test_a_budget_that_is_nearly_gone_is_said(spent: int, held: int, sounds: bool) -> None:
    assert bool(list(alerts.of_budgets([budget(spent, held)]))) is sounds


def test_a_budget_of_nothing_is_nearly_gone_and_never_looks_full() -> None:
    nothing = budget(0, limit=0)
    assert nothing.share_left == 0
    assert kinds(alerts.of_budgets([nothing])) == [MILD]


def test_what_is_left_is_rounded_down_and_what_is_gone_up() -> None:
    small = budget(1, limit=10**9)
    assert small.share_left == 99.9
    assert small.words == (
        "99.9 % left; epsilon 3.4 spent, of 8 at delta 4e-06 per patient, neighbours differ by one patient added or "
        "removed"
    )
    assert "one patient added or removed" in small.says
    k = budget_of("north/k", Account(Opened("north/k", 2, 0, "", ""), 0, 1))
    assert k.words == "1 of 2 releases per patient left; 1 spent, 0 held"
    assert "epsilon 0" not in k.words + k.says


@pytest.mark.parametrize(("unseen", "sounds"), [(None, False), (NOW - DAY, False), (NOW - 3 * DAY, True)])
def test_a_site_that_has_not_seen_the_head_for_long_is_said(unseen: float | None, sounds: bool) -> None:
    head = CosignedHead("north", 10, unseen)  # type: ignore[arg-type]
    found = list(alerts.of_witnesses([head], 20, NOW))
    assert bool(found) is sounds
    assert not sounds or "10 entries behind" in found[0].what


@pytest.mark.parametrize(
    ("name", "days", "kind"),
    [
        ("Intermediate authority", 40, None),
        ("Intermediate authority", 29, MILD),
        ("Intermediate authority", 6, GRAVE),
        ("Intermediate authority", -1, GRAVE),
        ("Root of the federation", 400, None),
        ("Root of the federation", 300, MILD),
        ("Root of the federation", 80, GRAVE),
        ("This service", 0.2, None),
        ("This service", -0.1, GRAVE),
    ],
)
def test_a_certificate_that_ends_soon_is_said_in_time(name: str, days: float, kind: str | None) -> None:
    key = Key(name, "ab", int(NOW + days * DAY), "")
    assert kinds(alerts.of_certificates([key], {}, (), NOW)) == ([kind] if kind else [])


def test_a_sites_ended_certificate_is_said_and_a_revoked_sites_is_not() -> None:
    ends = {"north": int(NOW) - 1, "south": int(NOW) + 1, "west": int(NOW) - 1, "east": None}
    (alarm,) = alerts.of_certificates([], ends, {"west"}, NOW)
    assert "north" in alarm.what
    state = State()
    state.sites = {site: Enrolled(site, b"", b"", b"", "") for site in ("north", "south")}
    state.issued = {n: Issued("north", n, b"", at) for n, at in (("a", 5), ("b", 9), ("c", 99))}
    state.revoked = {"c"}
    assert newest_certificates(state) == {"north": 9, "south": None}


@pytest.mark.parametrize(
    ("total", "free", "kind"),
    [
        (1 << 40, 1 << 39, None),
        (1 << 40, (1 << 40) // 20, MILD),
        (1 << 40, (1 << 40) // 50, GRAVE),
        (8 << 30, 4 << 30, MILD),
        (0, 0, GRAVE),
        (10, -1, GRAVE),
    ],
)
def test_a_disk_that_fills_is_said_before_it_is_full(total: int, free: int, kind: str | None) -> None:
    assert kinds(alerts.of_disk(total, free)) == ([kind] if kind else [])


def test_the_grave_ones_come_first() -> None:
    mild, grave = alerts.Alarm(MILD, "a", ""), alerts.Alarm(GRAVE, "b", "")
    assert alerts.in_order([mild, grave, mild]) == [grave, mild, mild]


def test_a_budget_page_speaks_of_a_real_account(tmp_path: Path) -> None:
    with open_register(tmp_path / "l.db", Hospital("north")).store as store:
        account = store.state.accounts["north/rdp"]
        assert budget_of("north/rdp", account).share_left == 100.0
