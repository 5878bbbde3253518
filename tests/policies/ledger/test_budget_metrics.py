"""The books as gauges: epsilon adds up to the limit, k-anonymity has none, refusals are counted as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.governance import decisions
from policies.governance.decisions import approve
from policies.ledger.budget_metrics import RefusalCounts, proposals_open, spending
from tests.support.ledger_world import DP, K5, Hospital, Person, open_register, policy


def test_spent_held_and_left_add_up_to_the_limit_and_a_fresh_account_has_spent_nothing(tmp_path: Path) -> None:
    hospital = Hospital("site-a", policy(epsilon="8.0"))
    register = open_register(tmp_path / "l.db", hospital)
    with register.store:
        fresh = {one.kind: one for one in spending(register.store.state)}
        assert (fresh["rdp"].spent, fresh["rdp"].held) == (0, 0)
        assert fresh["rdp"].left == fresh["rdp"].limit == float(register.policy_of("site-a").epsilon)
        asked = hospital.reservation("grant-1", DP, "federated", "run-1")
        assert register.reserve("reserve-1", asked, hospital.seal(asked)).admitted
        held = next(one for one in spending(register.store.state) if one.kind == "rdp")
        assert held.spent == 0
        assert 0 < held.held < held.limit
        register.close("grant-1", "lost")
        gone = next(one for one in spending(register.store.state) if one.kind == "rdp")
        assert gone.held == 0
        assert gone.spent == pytest.approx(held.held)
        for one in (held, gone):
            assert one.spent + one.held + one.left == pytest.approx(one.limit)
            assert (one.unit, one.relation) == ("patient", "add-or-remove-one")
            assert float(one.delta) > 0


def test_an_account_of_k_anonymity_counts_releases_and_has_no_epsilon_at_all(tmp_path: Path) -> None:
    hospital = Hospital("site-a")
    register = open_register(tmp_path / "l.db", hospital)
    with register.store:
        asked = hospital.reservation("grant-1", K5)
        assert register.reserve("reserve-1", asked, hospital.seal(asked)).admitted
        crowd = next(one for one in spending(register.store.state) if one.kind == "k")
        assert (crowd.delta, crowd.order, crowd.held) == ("", 0, 1)
        assert crowd.limit == register.policy_of("site-a").max_releases_per_patient


def test_refusals_are_counted_by_rule_from_the_moment_on_that_somebody_looks(tmp_path: Path) -> None:
    hospital = Hospital("site-a")
    register = open_register(tmp_path / "l.db", hospital)
    with register.store:
        bad = hospital.reservation("grant-0", K5, "no-such-mechanism")
        assert not register.reserve("reserve-0", bad, hospital.seal(bad)).admitted
        refusals = RefusalCounts(register.store, most=1)
        assert refusals.counts() == {}
        for number in (1, 2):
            bad = hospital.reservation(f"grant-{number}", K5, "no-such-mechanism")
            assert not register.reserve(f"reserve-{number}", bad, hospital.seal(bad)).admitted
        once = refusals.counts()
        assert set(once.values()) == {1}, "only so many entries at one asking"
        twice = refusals.counts()
        assert {stage for stage, _ in twice} == {"reservation"}
        assert set(twice.values()) == {2}
        assert refusals.counts() == twice, "nothing is counted twice"


def test_what_waits_for_persons_is_open_until_it_is_in_force(tmp_path: Path) -> None:
    register = open_register(tmp_path / "l.db", Hospital("site-a"))
    store = register.store
    with store:
        assert proposals_open(store.state) == 0
        anna = Person("anna", "compliance")

        decisions.appoint(store, anna.name, anna.role, anna.public)
        approve(store, anna.approval("s-1", "limit", "site-a/rdp", "9.0"))
        assert proposals_open(store.state) == 1
