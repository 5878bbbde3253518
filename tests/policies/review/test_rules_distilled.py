"""What the law asks of a distillation: level C by measured figures alone, level A without a look at a patient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.accounting.claims import Claim, KAnonymous, NoClaim, SubsampledGaussian
from policies.accounting.rdp import allowance, cost, epsilon_nano
from policies.ledger.entries import Opened, Reserved
from policies.ledger.state import Account, Grant
from policies.review.policy import PRESETS, Policy, parse, preset
from policies.review.rules import LEAST_POWER, AccountContext, Finding, Verdict, level_of, review, review_reservation
from policies.statements import Reservation, claim_json, release_id
from protos.common.canonical_json import canonical
from tests.support.distilled_releases import DELTA, MODEL, MODEL_DP, ORDER, PRICE, STEPS, of
from tests.support.ledger_world import COMPONENTS, policy

INTERNAL: Policy = parse(policy(), "p")
LAX: Policy = parse(policy(components='["public", "private"]', levels='["A", "B", "C"]'), "lax")
TAUGHT, LEARNED = COMPONENTS["distill"], COMPONENTS["distill-dp"]
NAN = float("nan")
ASKED = Reservation("g", "site-m", "", "distill", NoClaim(), TAUGHT, "OT")
ASKED_DP = replace(ASKED, mechanism="distill-dp", claim=STEPS, components=LEARNED)


def shelf(limit: int = 1, **now: Any) -> Account:
    return Account(Opened("site-m/k", limit, 0, "", ""), **now)


def purse(limit: int = allowance(8.0, 4e-6, ORDER), **now: Any) -> Account:
    return Account(Opened("site-m/rdp", limit, ORDER, "8.0", DELTA), **now)


def held(mechanism: str, claim: Claim, amount: int, **now: Any) -> Grant:
    raw = canonical(claim_json(claim))
    return Grant(Reserved("g", "site-m", "", mechanism, "site-m/any", amount, raw, b"e"), **now)


GRANTED = AccountContext(shelf(), held("distill", NoClaim(), 1))
GRANTED_DP = AccountContext(purse(), held("distill-dp", STEPS, PRICE))


def judged(policy: Policy = LAX, standing: AccountContext = GRANTED, **changes: Any) -> list[str]:
    return of(review(replace(MODEL, **changes), standing, policy))


def judged_dp(standing: AccountContext = GRANTED_DP, policy: Policy = INTERNAL, **changes: Any) -> list[str]:
    return of(review(replace(MODEL_DP, **changes), standing, policy))


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_every_preset_refuses_what_rests_on_tests_alone_before_an_image_is_read(name: str) -> None:
    known = parse(preset(name), name)
    assert {"distill", "distill-dp"} <= known.mechanisms
    assert "model" in known.artifact_types
    assert known.components == {"public"}
    assert of(review_reservation(ASKED, AccountContext(shelf()), known)) == ["provenance", "level"]
    approved = {role: "a" for role in known.approvals}
    found = of(review(replace(MODEL, approvals=approved), GRANTED, known))
    assert [rule for rule in found if rule != "reid_rate"] == ["provenance", "level"]
    assert ("reid_rate" in found) is (name == "public"), "3 % are too many for what all may have"


def test_a_policy_may_admit_it_with_good_figures() -> None:
    assert review_reservation(ASKED, AccountContext(shelf()), LAX) == Verdict((), "", 1)
    assert review(MODEL, GRANTED, LAX) == Verdict((), "C", 1)
    assert judged(artifact_type="image-set") == []
    assert judged(reid_rate="0.1", vetting_power="0.9") == judged(reid_rate="0.0", vetting_power="1.0") == []


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (["reid_rate"], {"reid_rate": None}),
        (["reid_rate"], {"reid_rate": "nan"}),
        (["reid_rate"], {"reid_rate": "0.10000000000000002"}),
        (["reid_rate"], {"reid_rate": "-0.1"}),
        (["vetting_power"], {"vetting_power": None}),
        (["vetting_power"], {"vetting_power": "0.8999999999999999"}),
        (["vetting_power"], {"vetting_power": "1.0000000000000002"}),
        (["vetting_power"], {"vetting_power": "2.0"}),
        (["vetting_power"], {"vetting_power": "-1.0"}),
        *((["vetting_power"], {"vetting_power": odd}) for odd in ("nan", "inf", "0.90", "1", "", "most", "0,95")),
        (["reid_rate", "vetting_power"], {"reid_rate": None, "vetting_power": None}),
        (["vetting"], {"vetted_against": "public"}),
        (["vetting", "reid_rate", "vetting_power"], {"vetted_against": "nothing"}),
        (["vetting"], {"vetted_against": "both"}),
        (["components"], {"components": {part: TAUGHT[part] for part in ("teacher", "autoencoder", "aligner")}}),
        (["components"], {"components": {**TAUGHT, "pretraining": "public"}}),
        (["artifact_type", "artifact_type_not_allowed"], {"artifact_type": "volume-set"}),
        (["artifact_type"], {"artifact_type": "update"}),
        (["claim_kind"], {"claim": KAnonymous(5, 2, 1)}),
        (["claim_kind"], {"claim": STEPS}),
        (["epsilon_of_k"], {"epsilon_nano": 0}),
        (["epsilon_of_k"], {"delta": DELTA}),
        (["run"], {"run": "run-m"}),
        (["menu"], {"menu": "5,8"}),
        (["malformed"], {"vetting_power": 0.95}),
        (["malformed"], {"vetting_power": NAN}),
    ],
)
def test_each_figure_and_each_word_of_a_release_of_level_c_is_looked_at(
    found: list[str], changes: dict[str, Any]
) -> None:
    assert judged(**changes) == found


def test_a_finding_says_which_power_is_asked() -> None:
    words = [finding.detail for finding in review(replace(MODEL, vetting_power="0.5"), GRANTED, LAX).findings]
    assert words == ["the power of the vetting must be measured, and lie in [0.9, 1]"]
    words = [finding.detail for finding in review(replace(MODEL, vetting_power=None), GRANTED, LAX).findings]
    assert words == ["a release of level C states how many of planted copies its vetting caught"]
    assert LEAST_POWER == 0.9
    wrong = review(replace(MODEL, artifact_type="update", vetted_against="public"), GRANTED, LAX)
    assert [finding.detail for finding in wrong.findings] == [
        "distill releases image-set or model", "distill is vetted against private images (P7)",
    ]  # fmt: skip


def test_of_a_stronger_level_a_power_may_be_stated_and_is_bounded_and_no_more() -> None:
    assert judged_dp(vetting_power="0.1", reid_rate="0.1") == judged_dp(vetting_power="0.0") == []
    for odd in ("nan", "1.5", "-0.5", "words"):
        (finding,) = review(replace(MODEL_DP, vetting_power=odd), GRANTED_DP, INTERNAL).findings
        assert finding == Finding("vetting_power", "the power of the vetting must be measured, and lie in [0.0, 1]")
    k5 = KAnonymous(5, 2, 1)
    parts = {"encoder": "public", "generator": "public"}
    faces = {"mechanism": "ksame", "claim": k5, "components": parts, "artifact_type": "image-set", "reid_rate": None}
    standing = AccountContext(shelf(), held("ksame", k5, 1))
    assert judged(standing=standing, vetting_power="0.5", **faces) == []
    assert judged(standing=standing, vetted_against="nothing", **faces) == ["vetting_power"]


def test_no_claim_has_no_level_but_the_weakest_whatever_made_it() -> None:
    for components in (TAUGHT, dict.fromkeys(TAUGHT, "public")):
        for vetted in ("nothing", "public", "private"):
            assert level_of(replace(MODEL, components=components, vetted_against=vetted)) == "C"
    assert of(review_reservation(replace(ASKED, components=dict.fromkeys(TAUGHT, "public")), AccountContext(shelf()),
                                 INTERNAL)) == ["level"]  # fmt: skip


def test_releases_without_an_epsilon_are_capped_together() -> None:
    """P4, P5: one account counts them, so a patient in a k-anonymous release is in no unclaimed one beside it."""
    assert of(review_reservation(ASKED, AccountContext(shelf(spent=1)), LAX)) == ["budget"]
    twice = replace(LAX, max_releases_per_patient=2)
    assert review_reservation(ASKED, AccountContext(shelf(2, spent=1)), twice).admitted
    (finding,) = review_reservation(ASKED, AccountContext(shelf(2, held=1, spent=1)), twice).findings
    assert finding == Finding("budget", "every patient may be in 2 release(s), and that is used up")
    assert of(review_reservation(ASKED, AccountContext(purse()), LAX)) == ["account_kind"]
    assert of(review_reservation(ASKED_DP, AccountContext(shelf()), LAX)) == ["account_kind"]


# --- by noise


def test_a_teacher_that_learned_with_noise_gives_level_a_under_every_preset() -> None:
    cheap = SubsampledGaussian(0.001, 20.0, 10)
    for path in PRESETS.glob("*.toml"):
        known = parse(path.read_text(), path.stem)
        limit = allowance(known.epsilon, known.delta, 64)
        account = Account(Opened("site-m/rdp", limit, 64, repr(known.epsilon), repr(known.delta)))
        assert review_reservation(replace(ASKED_DP, claim=cheap), AccountContext(account), known).admitted
        standing = AccountContext(account, held("distill-dp", cheap, cost(cheap, 64)))
        told = {"claim": cheap, "epsilon_nano": epsilon_nano(cheap, known.delta, 64), "delta": repr(known.delta)}
        made = replace(MODEL_DP, approvals={role: "a" for role in known.approvals}, **told)
        assert review(made, standing, known) == Verdict((), "A", cost(cheap, 64)), path.stem


def test_it_is_priced_and_admitted_whole() -> None:
    assert review_reservation(ASKED_DP, AccountContext(purse(PRICE)), INTERNAL) == Verdict((), "", PRICE)
    assert of(review_reservation(ASKED_DP, AccountContext(purse(PRICE - 1)), INTERNAL)) == ["budget"]
    assert review(MODEL_DP, GRANTED_DP, INTERNAL) == Verdict((), "A", PRICE)
    assert judged_dp(artifact_type="image-set") == []


@pytest.mark.parametrize("steps", [1, 200, 399, 401])
def test_its_steps_are_granted_together_and_used_together(steps: int) -> None:
    """A training that stopped half-way is another claim: in the rounds of a run it would be a part of the same."""
    part = replace(STEPS, steps=steps)
    told = {"claim": part, "epsilon_nano": epsilon_nano(part, 4e-6, ORDER)}
    assert judged_dp(**told) == ["claim_not_granted"]
    assert judged_dp(AccountContext(purse(), held("distill-dp", part, PRICE))) == ["claim_not_granted"]


def test_it_is_released_once_under_its_grant() -> None:
    assert judged_dp(AccountContext(purse(), held("distill-dp", STEPS, PRICE, used=1))) == ["grant_used"]
    assert judged_dp(AccountContext(purse(), held("distill-dp", STEPS, PRICE, used=PRICE))) == ["grant_used"]
    assert judged_dp(AccountContext(purse(), held("distill-dp", STEPS, PRICE, last_round=3))) == []
    assert judged_dp(AccountContext(purse(), held("distill-dp", STEPS, PRICE - 1))) == ["claim_not_granted"]
    assert judged_dp(AccountContext(purse(), held("federated", STEPS, PRICE))) == ["grant_of_another"]
    assert judged(standing=AccountContext(shelf(), held("distill", NoClaim(), 1, used=1))) == ["grant_used"]
    assert judged(standing=AccountContext(shelf(), held("distill", KAnonymous(5, 2, 1), 1))) == ["claim_not_granted"]


@pytest.mark.parametrize("vetted", ["private", "nothing"])
@pytest.mark.parametrize("policy", [INTERNAL, LAX])
def test_vetted_against_anybody_but_the_public_it_is_refused_and_not_only_lowered(
    vetted: str, policy: Policy
) -> None:
    """P7: vetting is not post-processing. No figure makes up for it, and no policy."""
    told = {"reid_rate": "0.01", "vetting_power": "0.99"} if vetted == "private" else {}
    found = judged_dp(policy=policy, vetted_against=vetted, **told)
    lowered = vetted == "private" and policy is INTERNAL
    assert found == (["vetting", "level"] if lowered else ["vetting"])


@pytest.mark.parametrize("part", sorted(LEARNED))
def test_a_private_part_is_refused_before_anything_is_spent_whatever_the_policy_admits(part: str) -> None:
    """It would be level C, and figures of public pictures say nothing of patients."""
    parts = {**LEARNED, part: "private"}
    assert judged_dp(components=parts) == ["provenance", "reid_rate", "vetting_power", "level"]
    asked = replace(ASKED_DP, components=parts)
    assert of(review_reservation(asked, AccountContext(purse()), LAX)) == ["provenance"]
    measured = replace(MODEL_DP, components=parts, reid_rate="0.02", vetting_power="0.93")
    assert of(review(measured, GRANTED_DP, LAX)) == ["provenance"]


def test_a_policy_that_admits_a_teacher_admits_no_private_autoencoder() -> None:
    """P6: it is in the model's file, and decodes every picture; the teacher and what judges stay at the site."""
    assert judged(components={**TAUGHT, "autoencoder": "private"}) == ["provenance"]
    asked = replace(ASKED, components={**TAUGHT, "autoencoder": "private"})
    assert of(review_reservation(asked, AccountContext(shelf()), LAX)) == ["provenance"]
    for part in ("teacher", "verifier", "aligner"):
        assert judged(components={**TAUGHT, part: "private"}) == []


def test_a_rate_below_zero_is_no_rate() -> None:
    assert judged(reid_rate="-0.0") == ["reid_rate"]


def test_level_c_of_another_mechanism_rests_on_figures_of_patients_too() -> None:
    made = replace(
        MODEL, mechanism="ksame", artifact_type="image-set", claim=KAnonymous(5, 2, 1),
        components={"encoder": "private", "generator": "private"},
    )  # fmt: skip
    granted = AccountContext(shelf(), held("ksame", KAnonymous(5, 2, 1), 1))
    assert of(review(made, granted, LAX)) == []
    assert of(review(replace(made, vetted_against="public"), granted, LAX)) == ["vetting"]


def test_it_names_no_run_and_declares_its_epsilon() -> None:
    assert judged_dp(run="run-m") == ["run"]
    assert judged_dp(round=1, release=release_id("site-m", "g", 1)) == ["round"]
    assert judged_dp(epsilon_nano=None) == ["epsilon"]
    assert of(review_reservation(replace(ASKED_DP, run="run-m"), AccountContext(purse()), INTERNAL)) == ["run"]
