"""A training and a fixed number of looks at it: one price before the first step, spent turn by turn, none over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dp
import mpmath
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import statements
from policies.accounting import accountant
from policies.accounting.accountant import AccountantsDisagreeError, calibrate, confirm, epsilon, tight_epsilon
from policies.accounting.claims import (
    KINDS,
    MAX_LOOKS,
    DistributedGaussian,
    Evaluated,
    GaussianQuery,
    KAnonymous,
    NoClaim,
    SubsampledGaussian,
    UnsupportedClaimError,
    assumption,
    looks_of,
    training_of,
)
from policies.accounting.rdp import cost, epsilon_nano, integer_rdp
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Admitted, Reserved
from policies.ledger.export import ExportError
from policies.ledger.store import AppendRequest
from policies.ledger_service import ArtifactFindings, LedgerService, digest
from policies.review.policy import parse as parse_policy
from policies.statements import Release, StatementError, claim_from, claim_json, encode, parse
from protos.common.canonical_json import canonical
from tests.support.ledger_world import BOTH, DP, HISTOGRAM, K5, LOOKED, Hospital, open_register, policy

DELTA = 1e-5
QUERY = LOOKED.query
SHARED = DistributedGaussian(0.25, 1.8, 6, sites=4, honest=3)
MASKED = Evaluated(SHARED, QUERY, 2)
CLAIMS = st.builds(
    Evaluated,
    training=st.one_of(
        st.builds(SubsampledGaussian, st.floats(0.001, 1.0), st.floats(0.4, 20.0), st.integers(1, 500)),
        st.builds(
            DistributedGaussian, st.floats(0.001, 1.0), st.floats(0.4, 20.0), st.integers(1, 500), st.just(9),
            st.integers(1, 9),
        ),
    ),
    query=st.builds(GaussianQuery, st.floats(20.0, 1e4), st.integers(1, 3), st.integers(1, 3)),
    looks=st.integers(1, 40),
)  # fmt: skip


# --- what can be built


@pytest.mark.parametrize(
    "changes",
    [
        {"looks": 0}, {"looks": -1}, {"looks": MAX_LOOKS + 1}, {"looks": 1.0}, {"looks": True}, {"looks": None},
        {"query": DP}, {"query": replace(DP, sampling_rate=1.0)}, {"query": None}, {"query": BOTH},
        {"query": replace(QUERY, unit="image")}, {"training": replace(DP, unit="image")},
        {"training": HISTOGRAM}, {"training": BOTH}, {"training": LOOKED}, {"training": K5},
        {"training": NoClaim()}, {"training": None},
    ],
)  # fmt: skip
def test_what_is_no_training_with_a_counted_number_of_looks_cannot_be_built(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedClaimError):
        replace(LOOKED, **changes)


def test_an_evaluated_claim_has_its_trainings_unit_and_takes_for_granted_what_that_does() -> None:
    assert (LOOKED.unit, LOOKED.relation) == ("patient", "add-or-remove-one")
    images = Evaluated(replace(DP, unit="image"), replace(QUERY, unit="image"), 1)
    assert images.unit == "image"
    assert (assumption(LOOKED), assumption(MASKED)) == ("", assumption(SHARED))
    assert [training_of(c) for c in (LOOKED, DP, K5)] == [DP, DP, K5]
    assert [looks_of(c) for c in (LOOKED, MASKED, DP, K5)] == [3, 2, 0, 0]


def test_where_sites_share_the_noise_of_a_look_the_honest_ones_add_up_to_it() -> None:
    assert LOOKED.share == QUERY.noise
    assert MASKED.share**2 * SHARED.honest == pytest.approx(QUERY.noise**2)


# --- its one form


@given(CLAIMS)
def test_an_evaluated_claim_reads_back(claim: Evaluated) -> None:
    raw = canonical(claim_json(claim))
    assert claim_from(json.loads(raw)) == claim
    assert canonical(claim_json(claim_from(json.loads(raw)))) == raw


FORM: Any = claim_json(LOOKED)


@pytest.mark.parametrize(
    "form",
    [
        {"kind": "evaluated"}, {**FORM, "unit": "patient"}, {**FORM, "looks": "3"}, {**FORM, "looks": 0},
        {**FORM, "looks": True}, {**FORM, "looks": None}, {k: v for k, v in FORM.items() if k != "looks"},
        {**FORM, "query": FORM["training"]}, {**FORM, "training": FORM["query"]}, {**FORM, "query": None},
        {**FORM, "query": {**FORM["query"], "noise": "30"}}, {**FORM, "training": [FORM["training"]]},
        {**FORM, "training": FORM}, {**FORM, "query": claim_json(BOTH)}, {**FORM, "training": claim_json(BOTH)},
        {**FORM, "training": claim_json(K5)}, {**FORM, "training": {"kind": "no-claim"}},
        {**FORM, "sensitivity": "1.0"},
        {**claim_json(BOTH), "parts": [FORM, claim_json(DP)]},
    ],
)  # fmt: skip
def test_another_form_of_an_evaluated_claim_is_refused(form: Any) -> None:
    assert claim_from(FORM) == LOOKED
    with pytest.raises(UnsupportedClaimError):
        claim_from(form)


def test_claims_in_claims_are_refused_however_deep_they_go() -> None:
    form: Any = FORM
    for _ in range(100_000):
        form = {**FORM, "training": form}
    with pytest.raises(UnsupportedClaimError, match="neither made of others"):
        claim_from(form)


def test_a_number_that_was_tampered_with_in_a_statement_is_found() -> None:
    raw = encode(Hospital("site-a").reservation("g", LOOKED, "federated", "run-1"))
    for old, new in (
        (b'"looks":3', b'"looks":9'),
        (b'"noise":"30.0"', b'"noise":"90.0"'),
        (b'"steps":60', b'"steps":6'),
    ):
        assert raw.count(old) == 1
        with pytest.raises(StatementError, match="canonical form"):
            parse(raw.replace(old, new))


# --- its price


@settings(max_examples=60, deadline=None)
@given(CLAIMS, st.integers(2, 16))
def test_the_price_is_that_of_the_training_and_of_every_look(claim: Evaluated, order: int) -> None:
    apart = cost(claim.training, order) + claim.looks * cost(claim.query, order)
    assert apart - 1 - claim.looks <= cost(claim, order) <= apart
    assert cost(claim, order) >= cost(claim.training, order)
    if claim.looks > 1:
        assert cost(claim, order) > cost(replace(claim, looks=claim.looks - 1), order)


@pytest.mark.parametrize("order", [2, 4, 7, 32])
def test_the_price_is_the_exact_divergence_rounded_up(order: int) -> None:
    """Sections 3.3 of Mironov, Talwar & Zhang 2019 and corollary 3 of Mironov 2017, word for word."""
    with mpmath.workdps(60):
        q, sigma = mpmath.mpf(0.25), mpmath.mpf(1.8)
        step = mpmath.fsum(
            mpmath.binomial(order, i) * (1 - q) ** (order - i) * q**i * mpmath.exp((i * i - i) / (2 * sigma**2))
            for i in range(order + 1)
        )
        look = mpmath.mpf(order) / (2 * mpmath.mpf(30) ** 2)
        assert cost(LOOKED, order) == mpmath.ceil((60 * mpmath.log(step) / (order - 1) + 3 * look) * 10**9)


@settings(max_examples=25, deadline=None)
@given(CLAIMS, st.integers(2, 12))
def test_the_figures_are_those_of_the_training_and_the_looks_composed(claim: Evaluated, order: int) -> None:
    apart = [claim.training, *[claim.query] * claim.looks]
    assert epsilon([claim], DELTA, order) == pytest.approx(epsilon(apart, DELTA, order), rel=1e-9)
    confirm(claim, order)


def test_the_tight_figure_is_that_of_the_parts_and_below_the_filters() -> None:
    apart = [DP, *[QUERY] * 3]
    assert tight_epsilon([LOOKED], DELTA) == tight_epsilon(apart, DELTA)
    assert tight_epsilon([DP], DELTA) < tight_epsilon([LOOKED], DELTA) < epsilon([LOOKED], DELTA)


def test_googles_accountant_composes_the_same_events_to_the_same_epsilon() -> None:
    event = dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.25, dp.GaussianDpEvent(1.8)), 60),
            dp.SelfComposedDpEvent(dp.GaussianDpEvent(30.0), 3),
        ]
    )
    google = RdpAccountant(orders=accountant.ORDERS, neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    google.compose(event)
    assert epsilon([LOOKED], DELTA) == pytest.approx(float(google.get_epsilon(DELTA)), rel=1e-6)


@pytest.mark.parametrize("wrong", [DP, QUERY, LOOKED])
def test_a_part_on_whose_price_the_accountants_disagree_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    confirm(LOOKED, 5)
    monkeypatch.setattr(accountant, "integer_rdp", lambda c, a: integer_rdp(c, a) * (1.01 if c == wrong else 1.0))
    accountant.rdp.cache_clear()
    with pytest.raises(AccountantsDisagreeError):
        confirm(LOOKED, 5)
    accountant.rdp.cache_clear()


def test_noise_that_is_calibrated_with_its_looks_keeps_the_whole_under_the_target() -> None:
    job = calibrate(0.5, DELTA, 0.1, 60, also=(QUERY,) * 3)
    assert tight_epsilon([Evaluated(job, QUERY, 3)], DELTA) <= 0.5 < tight_epsilon([Evaluated(job, QUERY, 6)], DELTA)


# --- the books: granted before the first step, spent turn by turn


A = Hospital("site-a")


def made(turn: int, steps: int, looks: int, **changes: Any) -> Release:
    """What leaves in a turn of a run: it covers all before it, too."""
    training = replace(DP, steps=steps)
    claim = changes.pop("claim", replace(LOOKED, training=training, looks=looks) if looks else training)
    values = {
        "run": "run-1", "round": turn, "mechanism": "federated", "artifact_type": "update", "claim": claim,
        "epsilon_nano": epsilon_nano(claim, 4e-6, 4), "delta": "4e-06",
        "components": {"initial": "public", "centre": "public"},
    }  # fmt: skip
    return A.release("g", **{**values, **changes})


LOOK = {"artifact_type": "evaluation"}


def granted(path: Path, claim: Any = LOOKED, key: Ed25519PrivateKey | None = None) -> LedgerService:
    register = open_register(path, A, key=key)
    asked = A.reservation("g", claim, "federated", "run-1")
    assert register.reserve("r", asked, A.seal(asked)).amount == cost(claim, 4)
    return register


def rules(register: LedgerService, release: Release) -> list[str]:
    verdict = register.admit(f"s-{release.round}", release, A.seal(release), ArtifactFindings())
    return [finding.rule for finding in verdict.findings]


def test_a_run_with_looks_is_granted_spent_turn_by_turn_and_verified(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    register = granted(tmp_path / "l.db", key=key)
    turns = [made(1, 15, 0), made(2, 30, 0), made(3, 30, 1, **LOOK), made(4, 45, 1), made(5, 60, 1),
             made(6, 60, 2, **LOOK), made(7, 60, 3, **LOOK)]  # fmt: skip
    for release in turns:
        assert rules(register, release) == []
    assert (
        register.store.state.grants["g"].used == cost(LOOKED, 4) == register.store.state.grants["g"].reserved.amount
    )
    assert rules(register, made(8, 60, 4, **LOOK)) == ["claim_not_granted"], "no look more than was priced"
    register.store.close()
    read = verify(export_file(tmp_path / "l.db", "lazaret/test", key))
    assert (read.releases, read.refusals, read.accounts["site-a/rdp"]["held"]) == (7, 1, cost(LOOKED, 4))


@pytest.mark.parametrize(
    ("release", "found"),
    [
        (made(3, 30, 1, **LOOK), []),
        (made(3, 30, 4, **LOOK), ["claim_not_granted"]),
        (made(3, 75, 1, **LOOK), ["claim_not_granted"]),
        (made(3, 30, 1, claim=replace(LOOKED, looks=1, query=replace(QUERY, noise=29.0)), **LOOK),
         ["claim_not_granted"]),
        (made(3, 30, 1, claim=replace(LOOKED, looks=1, training=replace(DP, noise_multiplier=2.0)), **LOOK),
         ["claim_not_granted"]),
        (made(3, 15, 3, **LOOK), ["round_repeated"]),  # it costs more, and leaves out steps of before
        (made(3, 45, 0, **LOOK), ["artifact_type"]),  # an evaluation whose claim counts no look
        (made(3, 30, 1, claim=QUERY, **LOOK), ["claim_kind", "artifact_type"]),
        (made(2, 30, 1, **LOOK), ["replay"]),
        (made(3, 30, 1, epsilon_nano=epsilon_nano(replace(DP, steps=30), 4e-6, 4), **LOOK), ["epsilon"]),
    ],
)  # fmt: skip
def test_a_look_is_covered_by_the_grant_or_refused_with_the_reason(
    tmp_path: Path, release: Release, found: list[str]
) -> None:
    register = granted(tmp_path / "l.db")
    assert rules(register, made(1, 15, 0)) == rules(register, made(2, 30, 0)) == []
    verdict = register.admit("s", release, A.seal(release), ArtifactFindings())
    assert [f.rule for f in verdict.findings] == found


def test_after_a_look_no_claim_leaves_it_out_again(tmp_path: Path) -> None:
    register = granted(tmp_path / "l.db")
    assert rules(register, made(1, 15, 1, **LOOK)) == []
    assert rules(register, made(2, 30, 0)) == ["round_repeated"]


def test_a_training_that_was_granted_without_looks_has_none(tmp_path: Path) -> None:
    register = granted(tmp_path / "l.db", DP)
    assert rules(register, made(1, 15, 1, **LOOK)) == ["claim_not_granted"]
    assert rules(register, made(2, 15, 0)) == []


def test_a_policy_that_does_not_name_evaluations_refuses_them_before_anything_is_read(tmp_path: Path) -> None:
    old = Hospital("site-a", policy(artifact_types='["image-set", "model", "update", "masked-update"]'))
    register = open_register(tmp_path / "l.db", old)
    asked = old.reservation("g", LOOKED, "federated", "run-1")
    verdict = register.reserve("r", asked, old.seal(asked))
    assert [f.rule for f in verdict.findings] == ["artifact_type_not_allowed"]
    plain = old.reservation("h", DP, "federated", "run-2")
    assert register.reserve("s", plain, old.seal(plain)).admitted


def test_a_look_more_than_was_priced_is_found_by_an_auditor(tmp_path: Path) -> None:
    """Statement, epsilon and signature are in order, and the account could pay: only the law refuses it."""
    key = Ed25519PrivateKey.generate()
    register = granted(tmp_path / "l.db", replace(LOOKED, looks=1), key)
    less = made(1, 15, 2, **LOOK)
    envelope = A.seal(less)
    entry = Admitted(
        less.release, "g", "site-a", "run-1", 1, "federated", "A", cost(less.claim, 4),
        canonical(claim_json(less.claim)), bytes.fromhex(less.artifact_sha256), digest(envelope), "",
    )  # fmt: skip
    register.store.append("sneaked", AppendRequest((entry,), (envelope,)))
    register.store.close()
    with pytest.raises(ExportError, match="claim_not_granted"):
        verify(export_file(tmp_path / "l.db", "lazaret/test", key))


def test_looks_that_were_not_paid_for_are_found_by_an_auditor(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    envelope = A.seal(A.reservation("g", LOOKED, "federated", "run-1"))
    entry = Reserved(
        "g",
        "site-a",
        "run-1",
        "federated",
        "site-a/rdp",
        cost(DP, 4),
        canonical(claim_json(LOOKED)),
        digest(envelope),
    )
    register = open_register(tmp_path / "l.db", A, key=key)
    register.store.append("sneaked", AppendRequest((entry,), (envelope,)))
    register.store.close()
    with pytest.raises(ExportError, match="another price"):
        verify(export_file(tmp_path / "l.db", "lazaret/test", key))


def test_a_verifier_of_before_refuses_a_ledger_with_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the kinds of its time, and refuses every claim that it does not know."""
    key = Ed25519PrivateKey.generate()
    register = granted(tmp_path / "l.db", key=key)
    register.store.close()
    export = export_file(tmp_path / "l.db", "lazaret/test", key)
    assert verify(export).grants == 1
    assert json.loads(canonical(claim_json(LOOKED)))["kind"] == "evaluated"
    monkeypatch.setattr(statements, "KINDS", {name: cls for name, cls in KINDS.items() if cls is not Evaluated})
    with pytest.raises(ExportError, match="unknown kind of claim"):
        verify(export)


# --- shared noise


def test_where_noise_is_shared_steps_and_looks_together_are_no_more_than_the_turns(tmp_path: Path) -> None:
    site = Hospital("site-a", policy(levels='["A", "A*", "B"]'))
    register = open_register(tmp_path / "l.db", site)
    register = replace(register, policy_of=lambda _: parse_policy(site.policy_text, "site-a"))
    asked = site.reservation("g", MASKED, "federated-masked", "run-1")
    assert register.reserve("r", asked, site.seal(asked)).admitted
    values = {
        "run": "run-1", "mechanism": "federated-masked", "artifact_type": "masked-update", "delta": "4e-06",
        "components": dict(asked.components),
    }  # fmt: skip
    for turn, claim, found in (
        (1, replace(MASKED, training=replace(SHARED, steps=1), looks=1), ["one_step"]),
        (2, replace(MASKED, training=replace(SHARED, steps=1), looks=1), []),
        (3, replace(MASKED, training=replace(SHARED, steps=3), looks=1), ["one_step"]),
        (4, replace(MASKED, training=replace(SHARED, steps=3), looks=1), []),
    ):
        release = site.release("g", round=turn, claim=claim, epsilon_nano=epsilon_nano(claim, 4e-6, 4), **values)
        verdict = register.admit(f"s-{turn}-{claim.looks}", release, site.seal(release), ArtifactFindings())
        assert [f.rule for f in verdict.findings] == found
        assert verdict.level == "A*"


def test_a_crowd_is_no_training_to_look_at() -> None:
    with pytest.raises(UnsupportedClaimError, match="must be a subsampled or a distributed"):
        Evaluated(KAnonymous(5, 2, 1), QUERY, 1)  # type: ignore[arg-type]
