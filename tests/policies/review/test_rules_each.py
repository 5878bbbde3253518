"""Every rule of the review at its boundary: what is just good enough is admitted, the least bit less is not.

``python -m tests.mutation`` changes ``policies/review/rules.py`` in every small way, and one of these tests must
notice.
"""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.accounting.claims import (
    Claim,
    Composed,
    DistributedGaussian,
    Evaluated,
    Gaussian,
    GaussianQuery,
    KAnonymous,
    NoClaim,
    SubsampledGaussian,
    UnsupportedClaimError,
)
from policies.accounting.rdp import allowance, cost, epsilon_nano
from policies.accounting.rounding import epsilon_text
from policies.ledger.entries import LimitSet, Opened, Recovered, Reserved
from policies.ledger.state import Account, Grant
from policies.review.mechanism_terms import EVALUATIONS
from policies.review.policy import Policy, parse
from policies.review.rules import (
    ARTIFACT_TYPES,
    TERMS,
    AccountContext,
    Finding,
    Terms,
    Verdict,
    account_name,
    level_of,
    price,
    remaining,
    review,
    review_reservation,
    review_together,
)
from policies.statements import Release, Reservation, claim_json, release_id
from protos.common.canonical_json import canonical
from tests.support.ledger_world import BOTH, COMPONENTS, policy

POLICY: Policy = parse(policy(), "p")
ORDER, DELTA = 4, "4e-06"
K5 = KAnonymous(5, 2, 1)
WHOLE = SubsampledGaussian(0.25, 1.8, 60)
ROUND = SubsampledGaussian(0.25, 1.8, 15)
QUERY = GaussianQuery(40.0, 2, 4)
EPSILON = epsilon_nano(ROUND, 4e-6, ORDER)
K_PARTS = {"encoder": "public", "generator": "public"}
DP_PARTS = {"initial": "public", "centre": "public"}
NAN = float("nan")


def purse(limit: int = allowance(8.0, 4e-6, ORDER), order: int = ORDER, delta: str = DELTA, **now: Any) -> Account:
    return Account(Opened("site-m/rdp", limit, order, "8.0", delta), **now)


def shelf(limit: int = 1, **now: Any) -> Account:
    return Account(Opened("site-m/k", limit, 0, "", ""), **now)


def held(mechanism: str = "ksame", claim: bytes | Claim = K5, amount: int = 1, run: str = "", **now: Any) -> Grant:
    raw = claim if isinstance(claim, bytes) else canonical(claim_json(claim))
    return Grant(Reserved("g", "site-m", run, mechanism, f"site-m/{TERMS[mechanism].kind}", amount, raw, b"e"), **now)


def trained(claim: bytes | Claim = WHOLE, amount: int = cost(WHOLE, ORDER), **now: Any) -> Grant:
    return held("federated", claim, amount, "run-m", **now)


ASKED = Reservation("g", "site-m", "", "ksame", K5, K_PARTS, "OT")
ASKED_DP = Reservation("g", "site-m", "run-m", "federated", WHOLE, DP_PARTS, "OT")
MADE = Release(
    release_id("site-m", "g", 0), "g", "site-m", "", 0, "ksame", "image-set", "ab" * 32, 100, K5, None, None,
    K_PARTS, "OT", "nothing", None, {}, "",
)  # fmt: skip
MADE_DP = replace(
    MADE, release=release_id("site-m", "g", 1), run="run-m", round=1, mechanism="federated", artifact_type="update",
    claim=ROUND, epsilon_nano=EPSILON, delta=DELTA, components=DP_PARTS,
)  # fmt: skip
STANDING, STANDING_DP = AccountContext(shelf(), held()), AccountContext(purse(), trained())
SHARED = DistributedGaussian(0.25, 1.8, 60, sites=4, honest=3)
STARRED: Policy = replace(POLICY, levels=frozenset({"A", "A*", "B"}))
ASKED_SUM = replace(ASKED_DP, mechanism="federated-masked", claim=SHARED)
MADE_SUM = replace(
    MADE_DP, release=release_id("site-m", "g", 15), round=15, mechanism="federated-masked",
    artifact_type="masked-update", claim=replace(SHARED, steps=15),
)  # fmt: skip
STANDING_SUM = AccountContext(purse(), held("federated-masked", SHARED, cost(SHARED, ORDER), "run-m"))
ASKED_BOTH = replace(ASKED, mechanism="privimage", claim=BOTH, components=COMPONENTS["privimage"])
MADE_BOTH = replace(
    MADE, mechanism="privimage", claim=BOTH, epsilon_nano=epsilon_nano(BOTH, 4e-6, ORDER), delta=DELTA,
    components=COMPONENTS["privimage"],
)  # fmt: skip
PRICE_BOTH = cost(BOTH, ORDER)
STANDING_BOTH = AccountContext(purse(), held("privimage", BOTH, PRICE_BOTH))


def of(verdict: Verdict) -> list[str]:
    """The rules that were broken, each as often as it was."""
    return [f.rule for f in verdict.findings]


def judged(
    made: Release = MADE, /, standing: AccountContext = STANDING, policy: Policy = POLICY, **changes: Any
) -> list[str]:
    return of(review(replace(made, **changes), standing, policy))


def judged_dp(standing: AccountContext = STANDING_DP, policy: Policy = POLICY, **changes: Any) -> list[str]:
    return judged(MADE_DP, standing, policy, **changes)


def asked(
    reservation: Reservation = ASKED, account: Account | None = None, policy: Policy = POLICY, **changes: Any
) -> list[str]:
    standing = AccountContext(account or (shelf() if reservation.mechanism == "ksame" else purse()))
    return of(review_reservation(replace(reservation, **changes), standing, policy))


# --- values


def test_a_verdict_admits_only_without_a_finding_and_says_nothing_unasked() -> None:
    assert Verdict(()) == Verdict((), "", 0)
    assert Verdict(()).admitted
    assert not Verdict((Finding("x", "y"),)).admitted
    assert AccountContext(None) == AccountContext(None, None, False, False, False, False)
    for value, name in ((Finding("x", "y"), "rule"), (Verdict(()), "findings"), (AccountContext(None), "frozen")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, ())


def test_the_terms_of_the_mechanisms_are_these() -> None:
    """Design section 4: what a mechanism must claim, may release and has to declare."""
    images, either, whole = ("image-set",), ("image-set", "model"), {"rounds": False}
    parts = frozenset({"encoder", "generator"})
    judges = frozenset({"autoencoder", "verifier", "aligner"})
    kept = frozenset({"teacher", "verifier", "aligner"})
    ends = frozenset({"centre", "initial"})
    assert dict(TERMS) == {
        "ksame": Terms(KAnonymous, images, parts, **whole),
        "ksalsa": Terms(KAnonymous, images, parts | {"style", "content"}, **whole),
        "anonfaces": Terms(KAnonymous, images, parts | {"recogniser"}, **whole),
        "federated": Terms(SubsampledGaussian, ("update", "evaluation"), ends, rounds=True),
        "federated-masked": Terms(DistributedGaussian, ("masked-update", "masked-evaluation"), ends, rounds=True),
        "model": Terms(SubsampledGaussian, ("model",), frozenset({"initial"}), looked=True, **whole),
        "privimage": Terms(Composed, images, frozenset({"semantics", "pretraining"}), **whole),
        "centroids": Terms(Composed, images, parts | {"codebook"}, **whole),
        "distill": Terms(NoClaim, either, judges | {"teacher"}, vetted="private", stays=kept, **whole),
        "remodel": Terms(NoClaim, ("volume-set",), frozenset({"generator", "atlas"}), vetted="private", **whole),
        "distill-dp": Terms(SubsampledGaussian, either, judges | {"pretraining"}, vetted="public", **whole),
    }
    kinds = dict.fromkeys(("ksame", "ksalsa", "anonfaces", "distill", "remodel"), "k")
    kinds |= dict.fromkeys(("federated", "federated-masked", "model", "privimage", "centroids", "distill-dp"), "rdp")
    assert {name: terms.kind for name, terms in TERMS.items()} == kinds
    assert {"image-set", "volume-set", "update", "masked-update", "model", "evaluation"} == (
        ARTIFACT_TYPES - {"masked-evaluation"}
    )
    assert ARTIFACT_TYPES > EVALUATIONS
    assert [account_name("m", name) for name in ("ksame", "federated-masked", "magic")] == ["m/k", "m/rdp", ""]
    assert Terms(GaussianQuery, ("update",), frozenset(), rounds=False).kind == "rdp"
    assert {name for name, terms in TERMS.items() if not {*terms.artifact_types} <= ARTIFACT_TYPES} == set()
    assert TERMS["distill"].artifact_type == "image-set", "the usual one is named first"
    with pytest.raises(FrozenInstanceError):
        TERMS["ksame"].rounds = True  # type: ignore[misc]


def test_a_claim_is_priced_only_in_an_account_of_its_kind() -> None:
    assert price(K5, shelf()) == 1
    assert price(ROUND, purse()) == cost(ROUND, ORDER)
    assert price(QUERY, purse(order=7)) == cost(QUERY, 7)
    assert price(NoClaim(), shelf()) == 1
    for claim, account in ((K5, purse()), (K5, purse(order=-1)), (NoClaim(), purse()), (NoClaim(), purse(order=-1))):
        with pytest.raises(UnsupportedClaimError):
            price(claim, account)
    for claim in (ROUND, QUERY):
        with pytest.raises(ValueError, match="order"):
            price(claim, shelf())


# --- reservations


def test_a_reservation_is_priced_from_its_claim_and_has_no_level() -> None:
    assert review_reservation(ASKED, AccountContext(shelf()), POLICY) == Verdict((), "", 1)
    assert review_reservation(ASKED_DP, AccountContext(purse()), POLICY) == Verdict((), "", cost(WHOLE, ORDER))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("run", {"run": "run-m"}),
        ("modality", {"modality": "AA"}),
        ("modality", {"modality": "ZZ"}),
        ("unit", {"claim": replace(K5, unit="image")}),
        ("claim_kind", {"claim": WHOLE}),
        ("min_k", {"claim": replace(K5, k=4)}),
        ("l_diversity", {"claim": replace(K5, l_diversity=1)}),
        ("releases_per_patient", {"claim": replace(K5, releases_per_patient=2)}),
        ("provenance", {"components": {**K_PARTS, "encoder": "private"}}),
        ("components", {"components": {"encoder": "public"}}),
        ("components", {"components": {**K_PARTS, "more": "public"}}),
        ("components", {"components": {"encoder": "public", "more": "public"}}),
        ("components", {"components": {}}),
    ],
)
def test_a_reservation_with_one_fault_has_that_finding_alone(rule: str, changes: dict[str, Any]) -> None:
    assert asked(**changes) == [rule]


def test_a_reservation_of_rounds_names_its_run() -> None:
    assert asked(ASKED_DP) == []
    assert asked(ASKED_DP, run="") == ["run"]


def test_what_the_books_say_against_a_reservation() -> None:
    def rules(standing: AccountContext) -> list[str]:
        verdict = review_reservation(ASKED, standing, POLICY)
        assert (verdict.amount, verdict.level) == (0, "")
        return of(verdict)

    assert rules(AccountContext(shelf(), held())) == ["grant_exists"]
    assert rules(AccountContext(shelf(), frozen=True)) == ["frozen"]
    assert rules(AccountContext(shelf(), revoked=True)) == ["revoked"]
    assert rules(AccountContext(None)) == ["no_account"]
    assert rules(AccountContext(purse())) == ["account_kind"]


def test_a_refused_reservation_names_every_reason_at_once() -> None:
    bad = replace(ASKED, claim=replace(K5, k=4, l_diversity=1), modality="ZZ", run="run-m", components={})
    verdict = review_reservation(bad, AccountContext(None, held(), frozen=True), POLICY)
    assert of(verdict) == [
        "min_k", "l_diversity", "modality", "components", "run", "grant_exists", "frozen", "no_account",
    ]  # fmt: skip


PRICE = cost(WHOLE, ORDER)


@pytest.mark.parametrize(
    ("limit", "gone", "fits"),
    [(PRICE, {}, True), (PRICE - 1, {}, False), (PRICE + 9, {"held": 9}, True), (PRICE + 9, {"held": 10}, False),
     (PRICE + 9, {"spent": 9}, True), (PRICE + 9, {"spent": 10}, False), (PRICE + 9, {"held": 4, "spent": 5}, True),
     (PRICE + 9, {"held": 5, "spent": 5}, False), (0, {}, False)],
)  # fmt: skip
def test_a_price_that_fits_exactly_is_granted_and_one_nano_more_is_not(
    limit: int, gone: dict[str, int], fits: bool
) -> None:
    verdict = review_reservation(ASKED_DP, AccountContext(purse(limit, **gone)), POLICY)
    assert (of(verdict), verdict.amount) == (([], PRICE) if fits else (["budget"], PRICE))


def test_the_last_release_per_patient_is_granted_and_the_next_is_not() -> None:
    loose = replace(POLICY, max_releases_per_patient=3)
    assert asked(account=shelf(3, spent=1, held=1), policy=loose) == []
    assert asked(account=shelf(3, spent=1, held=2), policy=loose) == ["budget"]
    assert asked(account=shelf(3, spent=2, held=1), policy=loose) == ["budget"]


def test_a_policy_that_was_tightened_since_binds_an_account_of_before() -> None:
    """P12: the smaller of the account's limit and what the policy of today allows."""
    exact = next(e / 1000 for e in range(1, 8001) if allowance(e / 1000, 4e-6, ORDER) >= PRICE)
    assert asked(ASKED_DP, policy=replace(POLICY, epsilon=exact)) == []
    assert asked(ASKED_DP, policy=replace(POLICY, epsilon=exact - 0.001)) == ["budget"]
    assert asked(ASKED_DP, policy=replace(POLICY, epsilon=NAN)) == ["budget"]
    assert asked(ASKED_DP, account=purse(PRICE - 1), policy=replace(POLICY, epsilon=100.0)) == ["budget"]
    assert asked(account=shelf(3, spent=1), policy=replace(POLICY, max_releases_per_patient=2)) == []
    assert asked(account=shelf(3, spent=1)) == ["budget"]
    assert asked(account=shelf(1, spent=1), policy=replace(POLICY, max_releases_per_patient=9)) == ["budget"]


def text(reservation: Reservation, account: Account, policy: Policy = POLICY) -> str:
    (finding,) = review_reservation(reservation, AccountContext(account), policy).findings
    assert finding.rule == "budget"
    return finding.detail


def test_a_shortage_is_told_in_epsilon_and_in_what_is_left() -> None:
    dear = replace(ASKED_DP, claim=SubsampledGaussian(0.25, 1.8, 600))
    nano = epsilon_nano(dear.claim, 4e-6, ORDER)
    assert nano % 10**7 < 10**7 // 2, "the nearest lies below it"
    wanted = f"{(nano // 10**7 + 1) / 100:.2f}"
    start = f"the claim alone is epsilon {wanted} at delta 4e-06 (order 4); the budget is epsilon 8 per patient, "
    assert text(dear, purse(1000)) == start + "100 % of it left"
    assert text(dear, purse(1000, held=300, spent=100)) == start + "60 % of it left"
    assert text(dear, purse(1000, spent=1001)) == start + "0 % of it left"
    assert text(dear, purse(1000, spent=995)) == start + "0 % of it left"  # a half rounds to even
    assert text(dear, purse(1000, spent=994)) == start + "1 % of it left"
    assert text(dear, purse(0)) == start + "0 % of it left"
    assert text(dear, purse(1)) == start + "100 % of it left"
    lowered = purse(1000, changed=LimitSet("site-m/rdp", 500, "4.0", "s"), spent=250)
    assert text(dear, lowered) == start.replace("epsilon 8 ", "epsilon 4 ") + "50 % of it left"
    loud = replace(dear, claim=SubsampledGaussian(1.0, 0.0011, 1000))  # of more than six digits
    exact = f"{epsilon_nano(loud.claim, 4e-6, ORDER)}e-9"
    assert text(loud, purse(1)).startswith(f"the claim alone is epsilon {epsilon_text(exact)} at delta")
    assert text(ASKED, shelf(3, spent=3)) == "every patient may be in 3 release(s), and that is used up"


# --- accounts


@pytest.mark.parametrize(
    ("order", "delta", "fits"),
    [(2, DELTA, True), (1024, DELTA, True), (1, DELTA, False), (1025, DELTA, False), (-1, DELTA, False),
     (0, DELTA, False), (4, "0.0", False), (4, "1e-300", True), (4, "0.9999999", True), (4, "1.0", False),
     (4, "2.0", False), (4, "-0.5", False), (4, "nan", False), (4, "", False), (4, "inf", False)],
)  # fmt: skip
def test_an_account_with_an_order_or_delta_that_makes_no_sense_pays_for_nothing(
    order: int, delta: str, fits: bool
) -> None:
    cheap = replace(ASKED_DP, claim=SubsampledGaussian(0.001, 100.0, 1))
    account = purse(10**15, order, delta)
    found = asked(cheap, account, replace(POLICY, epsilon=1e6))
    assert found == ([] if fits else ["account_kind"])


def test_kinds_never_add() -> None:
    """P4: neither account pays for the other's claims."""
    assert asked(ASKED, purse()) == ["account_kind"]
    assert asked(ASKED_DP, shelf()) == ["account_kind"]
    assert asked(ASKED_DP, shelf(), mechanism="magic", run="") == ["unknown_mechanism", "account_kind"]
    assert judged(standing=AccountContext(purse(), held())) == ["account_kind"]
    assert judged_dp(AccountContext(shelf(), trained())) == ["account_kind"]


# --- statements that no parser would have let in


BUILT = [
    ({"site": 3}, "site: must be a text without control characters"),
    ({"site": None}, "site: must be a text without control characters"),
    ({"grant": "Not An Id"}, "grant: must be a short lower-case identifier"),
    ({"modality": "ot"}, "modality: must be a DICOM code, such as MR"),
    ({"components": ["encoder"]}, "components: must map short lower-case identifiers to such"),
    ({"components": {"encoder": 1}}, "components: must map short lower-case identifiers to such"),
    ({"claim": None}, "claim: of no known kind"),
    ({"claim": {"kind": "k-anonymous"}}, "claim: of no known kind"),
]
BUILT_RELEASE = [
    *BUILT,
    ({"artifact_bytes": -1}, "artifact_bytes: must be a whole number"),
    ({"artifact_bytes": True}, "artifact_bytes: must be a whole number"),
    ({"artifact_bytes": NAN}, "artifact_bytes: must be a whole number"),
    ({"artifact_bytes": None}, "artifact_bytes: must be a whole number"),
    ({"round": -1}, "round: must be a whole number"),
    ({"round": False}, "round: must be a whole number"),
    ({"epsilon_nano": NAN}, "epsilon_nano: must be a whole number"),
    ({"epsilon_nano": float("inf")}, "epsilon_nano: must be a whole number"),
    ({"delta": 4e-6}, "delta: must be a text without control characters"),
    ({"reid_rate": 0.05}, "reid_rate: must be a text without control characters"),
    ({"approvals": {1: "x"}}, "approvals: must map short lower-case identifiers to such"),
    ({"reader": None}, "reader: must be a text without control characters"),
    *(
        ({"reader": odd}, "reader: must be 64 hexadecimal digits, or nothing")
        for odd in (" ", "ab", "ab" * 31, "ab" * 33, "AB" * 32, "zz" * 32)
    ),
]


@pytest.mark.parametrize(("changes", "words"), BUILT)
def test_a_reservation_of_a_form_that_cannot_be_signed_is_a_finding_and_no_crash(
    changes: dict[str, Any], words: str
) -> None:
    verdict = review_reservation(replace(ASKED, **changes), AccountContext(shelf()), POLICY)
    assert verdict == Verdict((Finding("malformed", words),))


@pytest.mark.parametrize(("changes", "words"), BUILT_RELEASE)
def test_a_release_of_a_form_that_cannot_be_signed_is_a_finding_and_no_crash(
    changes: dict[str, Any], words: str
) -> None:
    assert review(replace(MADE, **changes), STANDING, POLICY) == Verdict((Finding("malformed", words),))


# --- releases: what they are


def test_an_honest_release_has_its_level_and_its_price() -> None:
    assert review(MADE, STANDING, POLICY) == Verdict((), "B", 1)
    assert review(MADE_DP, STANDING_DP, POLICY) == Verdict((), "A", cost(ROUND, ORDER))


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (replace(POLICY, k_min=5, l_diversity=2, max_releases_per_patient=1), []),
        (replace(POLICY, k_min=6), ["min_k"]),
        (replace(POLICY, k_min=4, l_diversity=1, max_releases_per_patient=2), []),
        (replace(POLICY, l_diversity=3), ["l_diversity"]),
        (replace(POLICY, max_releases_per_patient=0), ["releases_per_patient"]),
        (replace(POLICY, k_min=NAN), ["min_k"]),  # type: ignore[arg-type]
        (replace(POLICY, l_diversity=NAN), ["l_diversity"]),  # type: ignore[arg-type]
        (replace(POLICY, max_releases_per_patient=NAN), ["releases_per_patient"]),  # type: ignore[arg-type]
        (replace(POLICY, max_artifact_bytes=100), []),
        (replace(POLICY, max_artifact_bytes=99), ["artifact_size"]),
        (replace(POLICY, max_artifact_bytes=NAN), ["artifact_size"]),  # type: ignore[arg-type]
        (replace(POLICY, mechanisms=frozenset({"federated"})), ["mechanism_not_allowed"]),
        (replace(POLICY, modalities=frozenset({"MR"})), ["modality"]),
        (replace(POLICY, modalities=frozenset()), ["modality"]),
        (replace(POLICY, artifact_types=frozenset({"update"})), ["artifact_type_not_allowed"]),
        (replace(POLICY, components=frozenset()), ["provenance", "provenance"]),
        (replace(POLICY, levels=frozenset({"A", "C"})), ["level"]),
        (replace(POLICY, levels=frozenset()), ["level"]),
        (replace(POLICY, approvals=frozenset({"compliance"})), ["approval"]),
        (replace(POLICY, approvals=frozenset({"compliance", "hospital"})), ["approval"]),
    ],
)
def test_a_synthetic_set_under_another_policy(policy: Policy, found: list[str]) -> None:
    assert judged(policy=policy) == found


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        ([], {"artifact_bytes": 1}),
        ([], {"artifact_bytes": POLICY.max_artifact_bytes}),
        (["artifact_size"], {"artifact_bytes": 0}),
        (["artifact_size"], {"artifact_bytes": POLICY.max_artifact_bytes + 1}),
        (["artifact_type"], {"artifact_type": "update"}),
        (["artifact_type", "artifact_type_not_allowed"], {"artifact_type": "a"}),
        (["artifact_type", "artifact_type_not_allowed"], {"artifact_type": "zz"}),
        (["vetting"], {"vetted_against": "abc"}),
        (["vetting"], {"vetted_against": ""}),
        (["vetting"], {"vetted_against": "nothing~"}),
        ([], {"vetted_against": "public"}),
        ([], {"vetted_against": "private"}),
        (["release_id"], {"release": "a"}),
        (["release_id"], {"release": "zz"}),
        (["round", "release_id"], {"round": 1}),
        (["round"], {"round": 1, "release": release_id("site-m", "g", 1)}),
        (["run"], {"run": "run-m"}),
        (["epsilon_of_k"], {"epsilon_nano": 0}),
        (["epsilon_of_k"], {"delta": DELTA}),
        (["epsilon_of_k"], {"epsilon_nano": 7, "delta": DELTA}),
        (["claim_kind", "reid_rate", "vetting_power", "level"], {"claim": NoClaim()}),
        (["unit"], {"claim": replace(K5, unit="image")}),
        (["claim_not_granted"], {"claim": replace(K5, k=6)}),
        (["claim_not_granted"], {"claim": replace(K5, k=10)}),
        (["components"], {"components": {"encoder": "public"}}),
        (["components"], {"components": {**K_PARTS, "more": "public"}}),
        (["components", "provenance", "reid_rate", "vetting_power", "level"], {"components": {"decoder": "dp"}}),
        (["unknown_mechanism", "account_kind"], {"mechanism": "magic"}),
        (["unknown_mechanism", "run", "account_kind"], {"mechanism": "magic", "run": "run-m"}),
    ],
)
def test_a_synthetic_set_with_one_change_has_these_findings_and_no_others(
    found: list[str], changes: dict[str, Any]
) -> None:
    assert judged(**changes) == found


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (["epsilon"], {"epsilon_nano": EPSILON - 1}),
        (["epsilon"], {"epsilon_nano": EPSILON + 1}),
        (["epsilon"], {"epsilon_nano": 0}),
        (["epsilon"], {"epsilon_nano": None}),
        (["delta"], {"delta": "4e-07"}),
        (["delta"], {"delta": "0.000004"}),
        (["delta"], {"delta": "5e-06"}),
        (["delta"], {"delta": None, "epsilon_nano": None}),
        (["round"], {"round": 0, "release": release_id("site-m", "g", 0)}),
        ([], {"round": 2, "release": release_id("site-m", "g", 2)}),
        (["run"], {"run": ""}),
        (["reid_rate", "vetting_power", "level"], {"vetted_against": "private"}),
        ([], {"vetted_against": "public"}),
        (["claim_kind", "unit"], {"claim": replace(QUERY, unit="image")}),
        (["claim_kind"], {"claim": QUERY}),
        (["unit"], {"claim": replace(ROUND, unit="image")}),
    ],
)
def test_an_update_with_one_change_has_these_findings_and_no_others(
    found: list[str], changes: dict[str, Any]
) -> None:
    assert judged_dp(**changes) == found


def test_a_relation_of_another_kind_is_refused_beside_the_right_unit() -> None:
    odd = replace(K5)
    object.__setattr__(odd, "relation", "replace-one")  # no claim of ours can be built with it
    assert asked(claim=odd) == ["unit"]
    object.__setattr__(odd, "relation", "a")
    assert asked(claim=odd) == ["unit"]
    object.__setattr__(odd, "relation", K5.relation)
    for unit in ("a", "zz"):
        object.__setattr__(odd, "unit", unit)
        assert asked(claim=odd) == ["unit"]


def test_approvals_that_are_there_are_not_asked_for_again() -> None:
    both = replace(POLICY, approvals=frozenset({"compliance", "hospital"}))
    assert judged(policy=both, approvals={"compliance": "1", "hospital": "2"}) == []
    assert judged(policy=both, approvals={"compliance": "1", "hospital": "2", "operator": "3"}) == []
    (finding,) = review(replace(MADE, approvals={"hospital": "2"}), STANDING, both).findings
    assert finding == Finding("approval", "it must be approved by: compliance")
    (finding,) = review(MADE, STANDING, both).findings
    assert finding.detail == "it must be approved by: compliance, hospital"


def details(verdict: Verdict) -> dict[str, str]:
    return {f.rule: f.detail for f in verdict.findings}


def test_a_finding_says_what_is_asked_and_what_was_found() -> None:
    made = replace(
        MADE, claim=KAnonymous(4, 1, 1), artifact_type="weights", artifact_bytes=0, modality="ZZ",
        components={"encoder": "private"},
    )  # fmt: skip
    assert details(review(made, STANDING, POLICY)) == {
        "min_k": "k = 4 is below the policy's 5",
        "l_diversity": "1 labels are below the policy's 2",
        "modality": "the policy internal does not admit ZZ",
        "artifact_type": "ksame releases image-set",
        "artifact_type_not_allowed": "the policy does not admit weights",
        "artifact_size": "the artifact must have 1 to 268435456 bytes",
        "components": "the components to declare are encoder, generator",
        "provenance": "the encoder is private; the policy does not admit that",
        "reid_rate": "a release of level C rests on a measured re-identification rate",
        "vetting_power": "a release of level C states how many of planted copies its vetting caught",
        "level": "the policy internal does not admit releases of level C",
    }
    none = replace(POLICY, mechanisms=frozenset())
    assert details(review(replace(MADE, claim=ROUND), STANDING, none)) == {
        "mechanism_not_allowed": "the policy internal does not admit ksame",
        "claim_kind": "ksame must claim KAnonymous, not SubsampledGaussian",
    }
    assert details(review(replace(MADE, mechanism="magic"), STANDING, POLICY))["unknown_mechanism"] == (
        "no mechanism is named magic"
    )
    assert details(review(MADE, AccountContext(shelf(), held(state="freed")), POLICY)) == {
        "grant_closed": "the grant is freed"
    }
    assert details(review(replace(MADE_DP, delta="1"), STANDING_DP, POLICY)) == {
        "delta": "delta must be the account's 4e-06"
    }
    truth = f"{EPSILON // 10**9}.{EPSILON % 10**9:09}"
    wrong = f"{(EPSILON + 1) // 10**9}.{(EPSILON + 1) % 10**9:09}"
    for declared, said in ((None, "nothing"), (EPSILON + 1, wrong)):
        release = replace(MADE_DP, epsilon_nano=declared)
        assert details(review(release, STANDING_DP, POLICY)) == {"epsilon": f"declared {said}, recomputed {truth}"}


# --- releases: delta, vetting, levels


def test_delta_may_be_the_policys_and_no_more() -> None:
    assert judged_dp(policy=replace(POLICY, delta=4e-6)) == []
    assert judged_dp(policy=replace(POLICY, delta=5e-6)) == []
    assert judged_dp(policy=replace(POLICY, delta=3.999e-6)) == ["delta"]
    assert judged_dp(policy=replace(POLICY, delta=NAN)) == ["delta"]


@pytest.mark.parametrize("against", ["public", "private"])
@pytest.mark.parametrize(
    ("rate", "fits"),
    [("0.0", True), ("0.1", True), ("0.05", True), ("0.10000000000000002", False), ("-1e-300", False), ("1.0", False),
     ("nan", False), ("inf", False), ("0.10", False), ("", False), ("some", False), ("-0.1", False)],
)  # fmt: skip
def test_a_measured_rate_is_at_most_the_policys(rate: str, fits: bool, against: str) -> None:
    verdict = review(replace(MADE, vetted_against=against, reid_rate=rate), STANDING, POLICY)
    assert details(verdict) == ({} if fits else {"reid_rate": "the rate must be measured, and at most 0.1"})


def test_a_rate_bound_of_nan_admits_no_rate() -> None:
    bound = replace(POLICY, max_reid_rate=NAN)
    assert judged(policy=bound, vetted_against="private", reid_rate="0.0") == ["reid_rate"]


def test_a_rate_that_was_measured_against_nothing_was_not_measured() -> None:
    assert judged(reid_rate="0.01") == ["reid_rate"]
    assert judged(vetted_against="abc", reid_rate="0.01") == ["vetting"]
    assert judged(vetted_against="private", reid_rate=None) == []


C_TOO = replace(POLICY, levels=frozenset("ABC"), components=frozenset({"public", "private"}))
C_PARTS = {"encoder": "private", "generator": "public"}


def test_level_c_must_have_been_measured() -> None:
    assert judged(policy=C_TOO, components=C_PARTS) == ["reid_rate", "vetting_power"]
    seen = {"components": C_PARTS, "vetted_against": "private"}
    assert judged(policy=C_TOO, reid_rate="0.1", **seen) == ["vetting_power"]
    assert judged(policy=C_TOO, vetting_power="0.9", **seen) == ["reid_rate"]
    made = replace(MADE, reid_rate="0.1", vetting_power="0.9", **seen)
    assert review(made, STANDING, C_TOO) == Verdict((), "C", 1)
    assert judged(policy=C_TOO) == []  # level B promises k patients instead


PARTS = {
    "public": True, "dp": False, "private": False, "": False, "publicly": False, "secret": False, "zz": False,
}  # fmt: skip


@pytest.mark.parametrize("vetted", ["nothing", "public", "private", "other"])
@pytest.mark.parametrize(
    "claim",
    [K5, replace(K5, releases_per_patient=2), ROUND, QUERY, NoClaim(), SHARED, replace(SHARED, honest=1), BOTH],
)
@pytest.mark.parametrize("parts", [(), *itertools.combinations_with_replacement(PARTS, 2)])
def test_the_level_is_what_claim_provenance_and_vetting_allow(
    claim: Claim, vetted: str, parts: tuple[str, ...]
) -> None:
    """Design section 5: A is Gaussian, not vetted on private images (P7); B is once (P5); both are public (P6)."""
    public = bool(parts) and all(PARTS[p] for p in parts)
    if public and isinstance(claim, Gaussian) and vetted != "private":
        level = "A*" if getattr(claim, "honest", 1) > 1 else "A"
    else:
        level = "B" if public and isinstance(claim, KAnonymous) and claim.releases_per_patient < 2 else "C"
    made = replace(MADE, claim=claim, vetted_against=vetted, components=dict(zip("xy", parts, strict=False)))
    assert level_of(made) == level


def test_a_k_anonymous_claim_of_no_release_at_all_is_no_level_b() -> None:
    odd = replace(K5)
    object.__setattr__(odd, "releases_per_patient", 0)  # no claim of ours can be built with it
    assert level_of(replace(MADE, claim=odd)) == "C"


# --- releases: what was granted


def test_without_a_grant_or_an_account_nothing_is_released() -> None:
    for standing in (AccountContext(None), AccountContext(shelf()), AccountContext(None, held())):
        verdict = review(MADE, standing, POLICY)
        assert (of(verdict), verdict.level, verdict.amount) == (["no_grant"], "B", 0)


def test_a_release_that_was_reviewed_before_is_refused() -> None:
    verdict = review(MADE, replace(STANDING, reviewed_before=True), POLICY)
    assert (of(verdict), verdict.level, verdict.amount) == (["replay"], "B", 0)
    assert judged(standing=replace(STANDING, frozen=True)) == []  # what was granted before a restore may be released


def test_a_release_of_a_site_that_was_revoked_is_refused_whatever_it_was_granted() -> None:
    for made, standing in ((MADE, STANDING), (MADE_DP, STANDING_DP)):
        assert judged(made, replace(standing, revoked=True)) == ["revoked"]
    said = review(MADE, replace(STANDING, revoked=True), POLICY).findings[0].detail
    assert said == "the site was revoked; it must be enrolled again first"


# --- readers


def test_a_release_is_encrypted_to_nobody_or_to_a_reader_that_the_policy_names() -> None:
    one, two = "1f" * 32, "2e" * 32
    named = replace(POLICY, readers=frozenset({one}))
    assert judged(reader=one) == judged(reader=two, policy=named) == ["reader"]
    assert judged(reader=one, policy=named) == judged(policy=named) == judged() == []
    assert review(replace(MADE, reader=one), STANDING, named) == review(MADE, STANDING, POLICY)
    said = details(review(replace(MADE, reader=one), STANDING, POLICY))
    assert said == {"reader": "the policy does not name the reader that the artifact is encrypted to"}


def test_a_type_of_file_that_review_does_not_know_is_refused_though_a_policy_names_it() -> None:
    lax = replace(POLICY, artifact_types=frozenset({"image-set", "weights"}))
    assert judged(artifact_type="weights", policy=lax) == ["artifact_type", "artifact_type_not_allowed"]


# --- sums whose noise the sites share


def test_noise_that_sites_share_is_level_a_with_a_star_and_only_where_the_policy_says_so() -> None:
    assert of(review_reservation(ASKED_SUM, AccountContext(purse()), POLICY)) == ["level"]
    (finding,) = review_reservation(ASKED_SUM, AccountContext(purse()), POLICY).findings
    assert finding.detail == "the policy internal does not admit releases of level A*"
    assert review_reservation(ASKED_SUM, AccountContext(purse()), STARRED) == Verdict((), "", cost(WHOLE, ORDER))
    assert judged(MADE_SUM, STANDING_SUM) == ["level"]
    assert review(MADE_SUM, STANDING_SUM, STARRED) == Verdict((), "A*", cost(ROUND, ORDER))


def test_a_sum_in_which_every_site_adds_the_whole_noise_is_plain_level_a() -> None:
    alone = replace(SHARED, honest=1)
    assert review_reservation(replace(ASKED_SUM, claim=alone), AccountContext(purse()), POLICY).admitted
    standing = AccountContext(purse(), held("federated-masked", alone, cost(alone, ORDER), "run-m"))
    made = replace(MADE_SUM, claim=replace(alone, steps=15))
    assert review(made, standing, POLICY) == Verdict((), "A", cost(ROUND, ORDER))
    several = replace(made, round=1, release=release_id("site-m", "g", 1))
    assert judged(several, standing) == []  # its own part bears the noise of every step


@pytest.mark.parametrize(("steps", "found"), [(14, []), (15, []), (16, ["one_step"]), (60, ["one_step"])])
def test_where_noise_is_shared_no_round_has_more_than_one_step(steps: int, found: list[str]) -> None:
    claim = replace(SHARED, steps=steps)
    epsilon = epsilon_nano(claim, 4e-6, ORDER)
    assert judged(MADE_SUM, STANDING_SUM, STARRED, claim=claim, epsilon_nano=epsilon) == found


@pytest.mark.parametrize(
    "granted", [replace(SHARED, sites=5), replace(SHARED, honest=2), replace(SHARED, honest=4), WHOLE,
                replace(SHARED, steps=14), replace(SHARED, sampling_rate=0.2), replace(SHARED, noise_multiplier=2.0)]
)  # fmt: skip
def test_a_masked_update_is_covered_by_a_grant_of_the_same_sites_and_noise(granted: Claim) -> None:
    standing = AccountContext(purse(), held("federated-masked", granted, cost(SHARED, ORDER), "run-m"))
    assert judged(MADE_SUM, standing, STARRED) == ["claim_not_granted"]
    assert judged_dp(AccountContext(purse(), trained(SHARED))) == ["claim_not_granted"]


def test_the_two_ways_of_training_are_not_taken_for_each_other() -> None:
    assert judged(MADE_SUM, STANDING_SUM, STARRED, claim=ROUND) == ["claim_kind"]
    assert judged(MADE_SUM, STANDING_SUM, STARRED, artifact_type="update") == ["artifact_type"]
    assert judged_dp(claim=replace(SHARED, steps=15, honest=1)) == ["claim_kind"]
    assert asked(ASKED_SUM, policy=STARRED, run="") == ["run"]
    assert asked(ASKED_SUM, policy=replace(STARRED, mechanisms=frozenset({"federated"}))) == ["mechanism_not_allowed"]


# --- looks at a training

ONE = GaussianQuery(40.0, 1, 1)
LOOKED = Evaluated(WHOLE, ONE, 3)
SUM_LOOKED = Evaluated(SHARED, ONE, 3)


def look(steps: int, looks: int, of_it: Evaluated = LOOKED, **changes: Any) -> dict[str, Any]:
    """A look whose statement covers so much."""
    claim: Claim = replace(of_it, training=replace(of_it.training, steps=steps), looks=looks)
    claim = changes.pop("claim", claim)
    return {
        "artifact_type": "evaluation",
        "claim": claim,
        "epsilon_nano": epsilon_nano(claim, 4e-6, ORDER),
        **changes,
    }


def looked(amount: int = cost(LOOKED, ORDER), last: Claim | None = None, **now: Any) -> AccountContext:
    grant = trained(LOOKED, amount, **now)
    grant.claim = b"" if last is None else canonical(claim_json(last))
    return AccountContext(purse(), grant)


def test_looks_are_priced_with_their_training_and_a_policy_must_name_what_they_release() -> None:
    wanted = replace(ASKED_DP, claim=LOOKED)
    whole = cost(LOOKED, ORDER)
    assert whole > cost(WHOLE, ORDER)
    assert review_reservation(wanted, AccountContext(purse()), POLICY) == Verdict((), "", whole)
    assert asked(wanted, purse(whole - 1)) == ["budget"]
    before = replace(POLICY, artifact_types=POLICY.artifact_types - {"evaluation"})
    assert asked(wanted, policy=before) == ["artifact_type_not_allowed"]
    assert asked(ASKED_DP, policy=before) == []
    shared = replace(ASKED_SUM, claim=SUM_LOOKED)
    assert asked(shared, policy=STARRED) == []
    assert asked(shared, policy=replace(STARRED, artifact_types=POLICY.artifact_types - {"evaluation"})) == []
    assert asked(shared, policy=replace(STARRED, artifact_types=POLICY.artifact_types - {"masked-evaluation"})) == [
        "artifact_type_not_allowed"
    ]
    assert asked(shared, policy=POLICY) == ["level"], "it stands on the assumption of its training"


def test_only_a_training_in_rounds_is_looked_at() -> None:
    assert TERMS["federated"].admits(LOOKED)
    assert TERMS["federated"].admits(WHOLE)
    assert not TERMS["federated"].admits(SUM_LOOKED)
    assert not TERMS["federated"].admits(ONE)
    assert TERMS["federated-masked"].admits(SUM_LOOKED)
    assert TERMS["distill-dp"].admits(WHOLE)
    assert TERMS["model"].admits(LOOKED), "made at once, and looked at when it is made"
    assert not TERMS["model"].admits(SUM_LOOKED)
    assert not TERMS["distill-dp"].admits(LOOKED), "made at once: there is no round to look after"
    assert asked(replace(ASKED_DP, claim=SUM_LOOKED), policy=STARRED) == ["claim_kind"]


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        ([], look(15, 1)),
        ([], look(60, 3)),
        ([], {}),  # an update before the first look
        ([], look(15, 2, artifact_type="update")),  # an update after it
        (["artifact_type"], {"artifact_type": "evaluation"}),  # no look is counted
        (["artifact_type"], look(15, 1, artifact_type="masked-evaluation")),
        (["claim_not_granted"], look(15, 4)),
        (["claim_not_granted"], look(61, 1)),
        (["claim_not_granted"], look(15, 1, replace(LOOKED, query=replace(ONE, noise=41.0)))),
        (["claim_not_granted"], look(15, 1, replace(LOOKED, training=replace(WHOLE, noise_multiplier=1.9)))),
        (["epsilon"], look(15, 1, epsilon_nano=EPSILON)),
        (["unit"], look(15, 1, claim=Evaluated(replace(ROUND, unit="image"), replace(ONE, unit="image"), 1))),
        (["claim_kind", "artifact_type"], look(15, 1, claim=ONE)),
    ],
)
def test_a_look_with_one_change_has_these_findings_and_no_others(found: list[str], changes: dict[str, Any]) -> None:
    assert judged_dp(looked(), **changes) == found


def test_what_is_released_under_a_grant_never_leaves_out_what_was_before() -> None:
    before = Evaluated(ROUND, ONE, 1)
    price_before = cost(before, ORDER)
    for steps, looks, found in ((15, 2, []), (16, 1, []), (60, 3, []), (15, 1, ["round_repeated"]),
                                (14, 3, ["round_repeated"])):  # fmt: skip
        assert judged_dp(looked(used=price_before, last=before), **look(steps, looks)) == found
    assert cost(look(14, 3)["claim"], ORDER) > 0
    more = looked(last=before)  # of the last claim alone, whatever was charged for it
    assert judged_dp(more, **look(14, 3)) == ["round_repeated"]
    assert judged_dp(more) == ["round_repeated"], "the look is gone from it"
    assert judged_dp(looked(last=ROUND), **look(15, 1)) == []
    assert judged_dp(looked(last=replace(ROUND, steps=16)), **look(15, 1)) == ["round_repeated"]


def test_a_look_is_not_covered_by_a_grant_without_any_or_of_another_noise() -> None:
    assert judged_dp(AccountContext(purse(), trained(WHOLE, cost(LOOKED, ORDER))), **look(15, 1)) == [
        "claim_not_granted"
    ]
    assert judged_dp(looked(amount=cost(Evaluated(ROUND, ONE, 1), ORDER) - 1), **look(15, 1)) == ["claim_not_granted"]
    for granted in (ONE, K5, BOTH, b"", b"{}"):
        standing = AccountContext(purse(), trained(granted, cost(LOOKED, ORDER)))
        assert judged_dp(standing, **look(15, 1)) == ["claim_not_granted"]
        assert judged_dp(standing) == ["claim_not_granted"]


@pytest.mark.parametrize(("steps", "looks", "found"), [(13, 1, []), (14, 1, []), (15, 1, ["one_step"]),
                                                      (13, 2, []), (14, 2, ["one_step"])])  # fmt: skip
def test_where_noise_is_shared_steps_and_looks_are_no_more_than_the_turns(
    steps: int, looks: int, found: list[str]
) -> None:
    standing = AccountContext(purse(), held("federated-masked", SUM_LOOKED, cost(SUM_LOOKED, ORDER), "run-m"))
    changes = look(steps, looks, SUM_LOOKED, artifact_type="masked-evaluation")
    assert judged(MADE_SUM, standing, STARRED, **changes) == found
    alone = replace(SUM_LOOKED, training=replace(SHARED, honest=1))
    standing = AccountContext(purse(), held("federated-masked", alone, cost(alone, ORDER), "run-m"))
    changes = look(60, 3, alone, artifact_type="masked-evaluation")
    assert judged(MADE_SUM, standing, STARRED, **changes) == [], "its own part bears all the noise"


# --- several claims of one release


def test_several_claims_of_one_release_are_priced_and_admitted_as_one() -> None:
    assert review_reservation(ASKED_BOTH, AccountContext(purse()), POLICY) == Verdict((), "", PRICE_BOTH)
    assert review_reservation(ASKED_BOTH, AccountContext(purse(PRICE_BOTH)), POLICY).admitted
    assert asked(ASKED_BOTH, purse(PRICE_BOTH - 1)) == ["budget"]
    assert review(MADE_BOTH, STANDING_BOTH, POLICY) == Verdict((), "A", PRICE_BOTH)
    centroids = {"mechanism": "centroids", "components": COMPONENTS["centroids"]}
    standing = AccountContext(purse(), held("centroids", BOTH, PRICE_BOTH))
    assert review(replace(MADE_BOTH, **centroids), standing, POLICY) == Verdict((), "A", PRICE_BOTH)


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (["epsilon"], {"epsilon_nano": MADE_BOTH.epsilon_nano - 1}),  # type: ignore[operator]
        (["epsilon"], {"epsilon_nano": epsilon_nano(BOTH.parts[0], 4e-6, ORDER)}),
        (["epsilon"], {"epsilon_nano": epsilon_nano(BOTH.parts[1], 4e-6, ORDER)}),
        (["epsilon"], {"epsilon_nano": None}),
        (["delta"], {"delta": None}),
        # P7: compared with patients it is no level A
        (["reid_rate", "vetting_power", "level"], {"vetted_against": "private"}),
        (["level"], {"vetted_against": "private", "reid_rate": "0.01", "vetting_power": "0.9"}),
        ([], {"vetted_against": "public"}),
        (
            ["provenance", "reid_rate", "vetting_power", "level"],
            {"components": {"semantics": "public", "pretraining": "dp"}},
        ),
        (["components"], {"components": {"semantics": "public"}}),
        (["components", "reid_rate", "vetting_power", "level"], {"components": {}}),
        (["artifact_type"], {"artifact_type": "update"}),
        (["run"], {"run": "run-m"}),
        (["round", "release_id"], {"round": 1}),
        (["menu"], {"menu": "5,8"}),
        (["claim_kind"], {"claim": BOTH.parts[0]}),
        (["claim_kind"], {"claim": BOTH.parts[1]}),
        (["unit"], {"claim": Composed((replace(QUERY, unit="image"), replace(ROUND, unit="image")))}),
    ],
)
def test_a_release_of_several_claims_with_one_change_has_these_findings_and_no_others(
    found: list[str], changes: dict[str, Any]
) -> None:
    assert judged(MADE_BOTH, STANDING_BOTH, **changes) == found


LESS = replace(BOTH.parts[1], steps=49)  # type: ignore[type-var]


@pytest.mark.parametrize(
    "claim",
    [Composed((BOTH.parts[0], LESS)), Composed(BOTH.parts[::-1]), Composed((*BOTH.parts, LESS)),
     Composed((BOTH.parts[0], BOTH.parts[0])), Composed((replace(BOTH.parts[0], noise=61.0), BOTH.parts[1]))],
)  # fmt: skip
def test_of_several_claims_that_were_granted_together_none_is_spent_alone_or_changed(claim: Composed) -> None:
    """Not fewer steps either, which would do in the rounds of a run: it is granted as one and used as one."""
    changes = {"claim": claim, "epsilon_nano": epsilon_nano(claim, 4e-6, ORDER)}
    assert judged(MADE_BOTH, STANDING_BOTH, **changes) == ["claim_not_granted"]
    assert judged(MADE_BOTH, AccountContext(purse(), held("privimage", claim, PRICE_BOTH))) == ["claim_not_granted"]


def test_several_claims_are_used_once_and_cost_no_more_than_was_granted() -> None:
    assert judged(MADE_BOTH, AccountContext(purse(), held("privimage", BOTH, PRICE_BOTH + 1))) == []
    assert judged(MADE_BOTH, AccountContext(purse(), held("privimage", BOTH, PRICE_BOTH - 1))) == [
        "claim_not_granted"
    ]
    assert judged(MADE_BOTH, AccountContext(purse(), held("privimage", BOTH, PRICE_BOTH, used=1))) == ["grant_used"]
    for granted in (*BOTH.parts, K5, b"", b'{"kind":"composed","parts":[]}'):
        standing = AccountContext(purse(), held("privimage", granted, PRICE_BOTH))
        assert judged(MADE_BOTH, standing) == ["claim_not_granted"]
    assert judged(MADE_BOTH, AccountContext(purse(), held("centroids", BOTH, PRICE_BOTH))) == ["grant_of_another"]


# --- several reservations at once


def together(left: int, *amounts: int, least: int | None = None, names: str = "abcdef", sites: str = "") -> list[str]:
    """ "+" for each that is granted, otherwise the rules, of reservations that cost so much of one purse each."""
    asked = [
        replace(ASKED_DP, grant=name, site=site, run=f"run-{name}")
        for name, site, _ in zip(names, sites or "m" * len(amounts), amounts, strict=False)
    ]
    alone = [Verdict((), "", n) if n else Verdict((Finding("min_k", "x"),)) for n in amounts]
    found = review_together(asked, alone, {"m/rdp": left, "n/rdp": left}, least)
    assert all(v.amount == n for v, n in zip(found, amounts, strict=True) if v.admitted)
    return ["+" if v.admitted else ",".join(of(v)) for v in found]


def test_several_reservations_are_all_granted_or_none() -> None:
    assert together(10, 4, 6) == ["+", "+"]
    assert together(10, 4, 7) == ["budget", "budget"]
    assert together(10, 4, 0) == ["together", "min_k"]
    assert together(10, 0, 4) == ["min_k", "together"]
    assert together(10, 4, 6, 8, sites="mnn") == ["together", "budget", "budget"]
    assert together(10, 10, 10, sites="mn") == ["+", "+"]
    assert together(10) == together(10, least=0) == []
    for least in (None, 0):
        with pytest.raises(ValueError, match="zip"):
            review_together([ASKED_DP], [], {"m/rdp": 10}, least)


def test_several_reservations_are_granted_without_those_that_are_refused() -> None:
    assert together(10, 4, 6, least=0) == ["+", "+"]
    assert together(10, 4, 7, least=0) == ["+", "budget"]
    assert together(10, 7, 4, 3, least=0) == ["+", "budget", "+"], "what is refused takes no room"
    assert together(10, 4, 0, 6, least=0) == ["+", "min_k", "+"]
    assert together(10, 4, 6, 8, least=0, sites="mnn") == ["+", "+", "budget"]
    assert together(10, 0, 0, least=0) == ["min_k", "min_k"]


def test_fewer_than_the_least_are_none_at_all() -> None:
    for least, found in (
        (1, ["+", "budget", "+"]),
        (2, ["+", "budget", "+"]),
        (3, ["together", "budget", "together"]),
    ):
        assert together(10, 7, 4, 3, least=least) == found, least
    assert together(10, 0, 0, least=1) == ["min_k", "min_k"]
    assert together(10, 4, 6, least=3) == ["together", "together"]


def test_a_request_names_each_grant_once() -> None:
    assert together(10, 1, 2, least=0, names="aa") == ["+", "grant_exists"]
    assert together(10, 1, 2, names="aa") == ["together", "grant_exists"]
    assert together(10, 0, 2, least=0, names="aa") == ["min_k", "grant_exists"]
    asked = [ASKED_DP, replace(ASKED_DP, grant="h", run="run-h")]
    alone = [Verdict((), "", 6), Verdict((), "", 6)]
    told = [details(v) for v in review_together(asked, alone, {"site-m/rdp": 10})]
    assert told == [{"budget": "together they cost more than the account holds"}] * 2
    told = [details(v) for v in review_together([ASKED_DP] * 2, alone, {"site-m/rdp": 99})]
    assert told == [{"together": "another part of the same request was refused"},
                    {"grant_exists": "the same request names that grant twice"}]  # fmt: skip


def test_a_request_asks_for_a_sites_part_in_a_run_once() -> None:
    one, same, other = ASKED_DP, replace(ASKED_DP, grant="h"), replace(ASKED_DP, grant="i", run="run-i")
    elsewhere, alone = replace(ASKED_DP, grant="j", site="n"), Verdict((), "", 1)
    left = {"site-m/rdp": 9, "n/rdp": 9, "site-m/k": 9}

    def found(*asked: Reservation, first: Verdict = alone) -> list[str]:
        verdicts = [first, *[alone] * (len(asked) - 1)]
        return ["+" if v.admitted else ",".join(of(v)) for v in review_together(asked, verdicts, left, 0)]

    assert found(one, same, other, elsewhere) == ["+", "run_spent", "+", "+"]
    assert found(one, same, first=Verdict((Finding("min_k", "x"),))) == ["min_k", "+"]
    assert found(ASKED, replace(ASKED, grant="h")) == ["+", "+"], "what is no run may be asked for again"
    assert [of(v) for v in review_together([one, same], [alone] * 2, left)] == [["together"], ["run_spent"]]


def test_a_sites_part_in_a_run_is_granted_once() -> None:
    verdict = review_reservation(ASKED_DP, AccountContext(purse(), run_spent=True), POLICY)
    assert details(verdict) == {
        "run_spent": "the site was granted its part in that run before: a new run has a new name"
    }
    assert review_reservation(ASKED, AccountContext(shelf(), run_spent=True), POLICY).admitted, "it is no run"


def test_room_is_what_the_account_and_the_policy_of_today_leave() -> None:
    assert remaining(purse(1000, held=300, spent=100), POLICY) == 600
    assert (
        remaining(purse(1000, held=300, spent=100), replace(POLICY, epsilon=1.0)) == -400
    )  # nothing fits at this delta
    assert remaining(shelf(3, held=1), replace(POLICY, max_releases_per_patient=2)) == 1
    assert remaining(shelf(3, spent=1), replace(POLICY, max_releases_per_patient=9)) == 2


def test_findings_of_the_release_itself_come_before_the_grant_is_looked_at() -> None:
    verdict = review(replace(MADE, modality="ZZ"), AccountContext(shelf(), held(state="spent")), POLICY)
    assert (of(verdict), verdict.level, verdict.amount) == (["modality"], "B", 0)


@pytest.mark.parametrize("state", ["spent", "freed"])
def test_a_closed_grant_covers_nothing(state: str) -> None:
    verdict = review(MADE, AccountContext(shelf(), held(state=state)), POLICY)
    assert (of(verdict), verdict.level, verdict.amount) == (["grant_closed"], "B", 0)


@pytest.mark.parametrize("other", ["a", "zz"])
def test_a_grant_of_another_site_mechanism_or_run_covers_nothing(other: str) -> None:
    for key in ("site", "mechanism", "run"):
        for made, grant, account in ((MADE, held(), shelf()), (MADE_DP, trained(), purse())):
            foreign = Grant(replace(grant.reserved, **{key: other}), "held", grant.used)
            assert judged(made, AccountContext(account, foreign)) == ["grant_of_another"], key


def test_of_a_grant_of_another_nothing_more_is_said() -> None:
    reserved = replace(held().reserved, site="site-z", claim=b"{}")
    assert judged(standing=AccountContext(shelf(), Grant(reserved, used=1))) == ["grant_of_another"]
    reserved = replace(trained().reserved, run="run-z", claim=b"{}")
    assert judged_dp(AccountContext(purse(), Grant(reserved))) == ["grant_of_another"]


def test_a_grant_that_was_recovered_is_spent_and_covers_nothing() -> None:
    r = held().reserved
    lost = Recovered(r.grant, r.site, r.run, r.mechanism, r.account, r.amount, r.claim, r.envelope)
    assert judged(standing=AccountContext(shelf(), Grant(lost, "spent", 1))) == ["grant_closed", "grant_used"]


def test_a_synthetic_set_is_made_once_under_its_grant() -> None:
    assert judged(standing=AccountContext(shelf(), held(used=1))) == ["grant_used"]
    assert judged(standing=AccountContext(shelf(), held(last_round=3))) == []


@pytest.mark.parametrize(
    "granted", [WHOLE, NoClaim(), replace(K5, k=4), replace(K5, k=6), b"", b"{}", b"\xff", b"zz", b'{"kind":"magic"}']
)
def test_a_synthetic_set_of_another_claim_than_granted_is_refused(granted: bytes | Claim) -> None:
    assert judged(standing=AccountContext(shelf(), held(claim=granted))) == ["claim_not_granted"]


@pytest.mark.parametrize(
    ("granted", "fits"),
    [(WHOLE, True), (ROUND, True), (replace(ROUND, steps=14), False), (replace(ROUND, steps=16), True),
     (replace(WHOLE, sampling_rate=0.26), False), (replace(WHOLE, sampling_rate=0.24), False),
     (replace(WHOLE, noise_multiplier=1.7), False), (replace(WHOLE, noise_multiplier=1.9), False),
     (QUERY, False), (K5, False), (b"", False), (b"{}", False), (b"\xff", False), (b"zz", False)],
)  # fmt: skip
def test_an_update_is_covered_by_a_grant_of_the_same_noise_and_at_least_its_steps(
    granted: bytes | Claim, fits: bool
) -> None:
    assert judged_dp(AccountContext(purse(), trained(granted))) == ([] if fits else ["claim_not_granted"])


SO_FAR = cost(ROUND, ORDER)


@pytest.mark.parametrize(
    ("amount", "used", "last_round", "found"),
    [(SO_FAR, 0, 0, []), (SO_FAR - 1, 0, 0, ["claim_not_granted"]), (SO_FAR + 1, 0, 0, []),
     (PRICE, SO_FAR - 1, 0, []), (PRICE, SO_FAR, 0, ["round_repeated"]), (PRICE, SO_FAR + 1, 0, ["round_repeated"]),
     (PRICE, 0, 1, ["round_repeated"]), (PRICE, 0, 2, ["round_repeated"]), (PRICE, SO_FAR, 1, ["round_repeated"])],
)  # fmt: skip
def test_an_update_costs_more_than_the_rounds_before_it_and_no_more_than_was_granted(
    amount: int, used: int, last_round: int, found: list[str]
) -> None:
    standing = AccountContext(purse(), trained(WHOLE, amount, used=used, last_round=last_round))
    verdict = review(MADE_DP, standing, POLICY)
    assert (of(verdict), verdict.amount) == (found, 0 if found else SO_FAR)


def test_a_wrong_epsilon_beside_a_closed_grant_are_two_findings() -> None:
    standing = AccountContext(purse(), trained(state="spent"))
    assert judged_dp(standing, epsilon_nano=1) == ["grant_closed", "epsilon"]


# --- everything at once


ODD = st.sampled_from([-1, 0, 1, 99, 1 << 60])
WORD = st.sampled_from(
    ["", "nothing", "public", "private", "ksame", "federated", "privimage", "update", "image-set", "nan", "0.05"]
)


@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "artifact_bytes": ODD, "round": ODD, "epsilon_nano": st.none() | ODD, "delta": st.none() | WORD,
            "reid_rate": st.none() | WORD, "vetted_against": WORD, "mechanism": WORD, "artifact_type": WORD,
            "run": WORD, "modality": WORD, "components": st.dictionaries(WORD, WORD, max_size=3),
            "claim": st.sampled_from([K5, ROUND, QUERY, NoClaim(), replace(K5, unit="image"), SHARED, BOTH]),
            "reader": st.sampled_from(["", "ab" * 32, "x"]),
        },
    ),
    base=st.sampled_from(
        [(MADE, STANDING), (MADE_DP, STANDING_DP), (MADE_SUM, STANDING_SUM), (MADE_BOTH, STANDING_BOTH)]
    ),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_review_is_total_and_admits_only_what_is_priced_below_its_grant(
    changes: dict[str, Any], base: tuple[Release, AccountContext]
) -> None:
    release, standing = replace(base[0], **changes), base[1]
    verdict = review(release, standing, POLICY)
    if of(verdict) == ["malformed"]:
        assert (verdict.level, verdict.amount) == ("", 0)
        return
    assert verdict.level == level_of(release)
    if verdict.admitted:
        assert standing.grant is not None
        assert 0 < verdict.amount <= standing.grant.reserved.amount
        assert verdict.level in POLICY.levels
    else:
        assert verdict.amount == 0
    with_more = review(release, replace(standing, reviewed_before=True), POLICY)
    assert "replay" in of(with_more)
