"""Each rule of the review, broken on purpose, gives its own finding; the honest release gives none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.accounting.accountant import cost, epsilon_nano
from policies.accounting.claims import KAnonymous, NoClaim, SubsampledGaussian
from policies.accounting.rdp import allowance
from policies.ledger.entries import Opened, Reserved
from policies.ledger.state import Account, Grant
from policies.review.policy import Policy, parse
from policies.review.rules import AccountContext, level_of, review, review_reservation
from policies.statements import claim_json, release_id
from protos.common.canonical_json import canonical
from tests.support.ledger_world import DP, K5, Hospital, policy

SITE = Hospital("site-a")
POLICY: Policy = parse(policy(), "p")
RDP = Account(Opened("site-a/rdp", allowance(8.0, 4e-6, 4), 4, "8.0", "4e-06"))
KACC = Account(Opened("site-a/k", 1, 0, "", ""))


def grant(mechanism: str = "ksame", claim: object = K5, run: str = "", amount: int = 1, **changes: object) -> Grant:
    account = "site-a/k" if mechanism == "ksame" else "site-a/rdp"
    claim_bytes = canonical(claim_json(claim))  # type: ignore[arg-type]
    reserved = Reserved("grant-1", "site-a", run, mechanism, account, amount, claim_bytes, b"e" * 32)
    made = Grant(reserved)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


K_STANDING = AccountContext(KACC, grant())
HONEST = SITE.release("grant-1")
ROUND = SubsampledGaussian(0.25, 1.8, 15)
DP_STANDING = AccountContext(RDP, grant("federated", DP, "run-1", cost(DP, 4)))
HONEST_DP = SITE.release("grant-1", run="run-1", round=1, mechanism="federated", artifact_type="update", claim=ROUND,
    epsilon_nano=epsilon_nano(ROUND, 4e-6, 4), delta="4e-06", components={"initial": "public", "centre": "public"},
)  # fmt: skip


def rules(release: object, standing: AccountContext, policy: Policy = POLICY) -> set[str]:
    return {f.rule for f in review(release, standing, policy).findings}  # type: ignore[arg-type]


def test_the_honest_releases_are_admitted() -> None:
    assert review(HONEST, K_STANDING, POLICY).admitted
    verdict = review(HONEST_DP, DP_STANDING, POLICY)
    assert verdict.admitted
    assert (verdict.level, verdict.amount) == ("A", cost(ROUND, 4))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("unknown_mechanism", {"mechanism": "magic"}),
        ("claim_kind", {"claim": NoClaim()}),
        ("claim_kind", {"claim": DP}),
        ("min_k", {"claim": KAnonymous(4, 2, 1)}),
        ("l_diversity", {"claim": KAnonymous(5, 1, 1)}),
        ("releases_per_patient", {"claim": KAnonymous(5, 2, 2)}),
        ("claim_not_granted", {"claim": KAnonymous(6, 2, 1)}),
        ("epsilon_of_k", {"epsilon_nano": 0}),
        ("epsilon_of_k", {"delta": "4e-06"}),
        ("artifact_type", {"artifact_type": "update"}),
        ("artifact_type_not_allowed", {"artifact_type": "weights"}),
        ("artifact_size", {"artifact_bytes": 0}),
        ("artifact_size", {"artifact_bytes": 1 << 40}),
        ("components", {"components": {"encoder": "public"}}),
        ("provenance", {"components": {"encoder": "public", "generator": "private"}}),
        ("level", {"components": {"encoder": "public", "generator": "private"}}),
        ("vetting", {"vetted_against": "somebody"}),
        ("menu", {"menu": "6,8"}),
        ("malformed", {"menu": "8,5"}),
        ("unit", {"claim": KAnonymous(5, 2, 1, unit="image")}),
        ("modality", {"modality": "SC"}),
        ("reid_rate", {"vetted_against": "private", "reid_rate": "0.2"}),
        ("vetting_power", {"vetted_against": "private", "vetting_power": "nan"}),
        ("reid_rate", {"vetted_against": "private", "reid_rate": "nan"}),
        ("reid_rate", {"vetted_against": "private", "reid_rate": "-0.1"}),
        ("reid_rate", {"vetted_against": "nothing", "reid_rate": "0.01"}),
        ("grant_of_another", {"site": "site-b", "release": release_id("site-b", "grant-1", 0)}),
        ("run", {"run": "run-9"}),
        ("round", {"round": 1, "release": release_id("site-a", "grant-1", 1)}),
        ("release_id", {"release": "release-of-my-choice"}),
    ],
)
def test_each_broken_rule_of_a_synthetic_set_has_its_own_finding(rule: str, changes: dict[str, object]) -> None:
    assert rule in rules(replace(HONEST, **changes), K_STANDING)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("epsilon", {"epsilon_nano": epsilon_nano(ROUND, 4e-6, 4) - 1}),
        ("epsilon", {"epsilon_nano": epsilon_nano(ROUND, 4e-6, 4) + 1}),
        ("epsilon", {"epsilon_nano": None}),
        ("delta", {"delta": "0.001"}),
        ("delta", {"delta": None}),
        ("claim_not_granted", {"claim": SubsampledGaussian(0.25, 1.9, 15)}),
        ("claim_not_granted", {"claim": SubsampledGaussian(0.2, 1.8, 15)}),
        ("claim_not_granted", {"claim": SubsampledGaussian(0.25, 1.8, 61)}),
        ("level", {"vetted_against": "private"}),
        ("claim_kind", {"claim": K5}),
        ("grant_of_another", {"run": "run-9"}),
        ("run", {"run": ""}),
        ("round", {"round": 0, "release": release_id("site-a", "grant-1", 0)}),
    ],
)
def test_each_broken_rule_of_an_update_has_its_own_finding(rule: str, changes: dict[str, object]) -> None:
    assert rule in rules(replace(HONEST_DP, **changes), DP_STANDING)  # type: ignore[arg-type]


def test_a_round_cannot_be_released_twice_or_out_of_order() -> None:
    used = AccountContext(RDP, grant("federated", DP, "run-1", cost(DP, 4), used=cost(ROUND, 4), last_round=1))
    assert rules(HONEST_DP, used) == {"round_repeated"}
    assert rules(replace(HONEST_DP, round=2, release=release_id("site-a", "grant-1", 2)), used) == {"round_repeated"}


def test_no_grant_a_closed_grant_and_a_replay_are_refused() -> None:
    assert rules(HONEST, AccountContext(KACC, None)) == {"no_grant"}
    assert rules(HONEST, AccountContext(KACC, grant(state="spent"))) == {"grant_closed"}
    assert rules(HONEST, AccountContext(KACC, grant(used=1))) == {"grant_used"}
    assert rules(HONEST, AccountContext(KACC, grant(), reviewed_before=True)) == {"replay"}


def test_vetting_against_private_patients_voids_the_dp_level() -> None:
    """P7: it reads private data, so what is released after it is empirical at best."""
    assert level_of(HONEST_DP) == "A"
    assert level_of(replace(HONEST_DP, vetted_against="private")) == "C"
    assert level_of(replace(HONEST, vetted_against="private")) == "B"
    assert level_of(replace(HONEST, components={"encoder": "public", "generator": "private"})) == "C"


def test_a_smaller_budget_refuses_the_price_with_a_reason_for_people() -> None:
    small = Account(Opened("site-a/rdp", allowance(2.0, 4e-6, 9), 9, "2.0", "4e-06"))
    verdict = review_reservation(SITE.reservation("g", DP, "federated", "run-1"), AccountContext(small), POLICY)
    assert [f.rule for f in verdict.findings] == ["budget"]
    assert "the budget is epsilon 2 per" in verdict.findings[0].detail


def test_the_k_account_counts_releases_and_is_then_used_up() -> None:
    assert review_reservation(SITE.reservation("g"), AccountContext(KACC), POLICY).amount == 1
    used = Account(KACC.opened, spent=1)
    assert {f.rule for f in review_reservation(SITE.reservation("g"), AccountContext(used), POLICY).findings} == {
        "budget"
    }


def test_a_mechanism_that_the_policy_does_not_list_is_refused() -> None:
    tight = parse(policy(mechanisms='["federated"]'), "p")
    assert "mechanism_not_allowed" in rules(HONEST, K_STANDING, tight)


def test_the_review_reads_nothing_but_its_arguments(tmp_path: Path) -> None:
    assert review(HONEST, K_STANDING, POLICY) == review(HONEST, K_STANDING, POLICY)
    assert list(tmp_path.iterdir()) == []
