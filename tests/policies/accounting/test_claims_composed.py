"""Several claims of one release: one price, one grant, one form; what is no composition cannot be built or read."""

from __future__ import annotations

import itertools
import json
import math
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

from policies.accounting import accountant
from policies.accounting.accountant import (
    AccountantsDisagreeError,
    NoiseNotFoundError,
    calibrate,
    confirm,
    epsilon,
    tight_epsilon,
)
from policies.accounting.claims import (
    MAX_PARTS,
    Composed,
    DistributedGaussian,
    GaussianQuery,
    KAnonymous,
    NoClaim,
    Part,
    SubsampledGaussian,
    UnsupportedClaimError,
    assumption,
)
from policies.accounting.rdp import cost, epsilon_nano, integer_rdp
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Admitted, Reserved
from policies.ledger.export import ExportError
from policies.ledger.store import AppendRequest
from policies.ledger_service import ArtifactFindings, digest
from policies.statements import StatementError, claim_from, claim_json, encode, parse
from protos.common.canonical_json import canonical
from tests.support.ledger_world import BOTH, DP, HISTOGRAM, K5, Hospital, open_register

DELTA = 1e-5
TRAINING = BOTH.parts[1]
PARTS = st.one_of(
    st.builds(
        SubsampledGaussian,
        sampling_rate=st.floats(0.001, 1.0),
        noise_multiplier=st.floats(0.4, 20.0),
        steps=st.integers(1, 500),
    ),
    st.builds(GaussianQuery, noise=st.floats(100.0, 1e4), contribution=st.integers(1, 16), votes=st.integers(1, 10)),
)
SEVERAL = st.lists(PARTS, min_size=2, max_size=MAX_PARTS).map(tuple).map(Composed)


# --- what can be built


@pytest.mark.parametrize(
    "parts",
    [
        (), (TRAINING,), (TRAINING,) * (MAX_PARTS + 1), [TRAINING, HISTOGRAM], None, TRAINING,
        (BOTH, TRAINING), (TRAINING, DistributedGaussian(0.1, 1.0, 1, 3, 2)), (TRAINING, KAnonymous(5, 2, 1)),
        (TRAINING, NoClaim()), (TRAINING, None), (TRAINING, "gaussian-query"),
        (TRAINING, replace(HISTOGRAM, unit="image")),
    ],
)  # fmt: skip
def test_what_is_no_composition_of_known_parts_cannot_be_built(parts: Any) -> None:
    with pytest.raises(UnsupportedClaimError, match="composed claim"):
        Composed(parts)


def test_a_composition_has_its_parts_unit_and_takes_nothing_for_granted() -> None:
    images = Composed(tuple(replace(part, unit="image") for part in BOTH.parts))
    assert (BOTH.unit, images.unit, BOTH.relation) == ("patient", "image", "add-or-remove-one")
    assert assumption(BOTH) == ""
    assert Composed((TRAINING,) * MAX_PARTS).unit == "patient"
    with pytest.raises(UnsupportedClaimError, match="different units"):
        epsilon([BOTH, images], DELTA)


# --- its one form


@given(SEVERAL)
def test_a_composed_claim_reads_back_in_the_order_in_which_it_was_written(claim: Composed) -> None:
    read = claim_from(json.loads(canonical(claim_json(claim))))
    assert read == claim
    other = Composed(claim.parts[::-1])
    assert (canonical(claim_json(other)) == canonical(claim_json(claim))) is (other == claim)


FORM: Any = claim_json(BOTH)
ONE, TWO = FORM["parts"]


@pytest.mark.parametrize(
    "form",
    [
        {"kind": "composed"}, {**FORM, "unit": "patient"}, {**FORM, "parts": []}, {**FORM, "parts": [ONE]},
        {**FORM, "parts": [ONE] * (MAX_PARTS + 1)}, {**FORM, "parts": {"0": ONE, "1": TWO}}, {**FORM, "parts": None},
        {**FORM, "parts": [ONE, FORM]}, {**FORM, "parts": [[ONE, TWO]]}, {**FORM, "parts": [ONE, None]},
        {**FORM, "parts": [ONE, {**TWO, "steps": "50"}]}, {**FORM, "parts": [ONE, {**TWO, "more": 1}]},
        {**FORM, "parts": [ONE, {**TWO, "sampling_rate": "0.10"}]},
        {**FORM, "parts": [ONE, {**TWO, "unit": "image"}]},
        {**FORM, "parts": [ONE, claim_json(K5)]}, {**FORM, "parts": [ONE, {"kind": "no-claim"}]},
        {**FORM, "parts": [ONE, claim_json(DistributedGaussian(0.1, 2.0, 1, 3, 2))]},
        {**FORM, "parts": [ONE, {**TWO, "kind": "perfect"}]}, {**FORM, "parts": "ab"},
    ],
)  # fmt: skip
def test_another_form_of_a_composed_claim_is_refused(form: Any) -> None:
    assert claim_from(FORM) == BOTH
    with pytest.raises(UnsupportedClaimError):
        claim_from(form)


def test_claims_in_claims_are_refused_however_deep_they_go() -> None:
    form: Any = FORM
    for _ in range(100_000):
        form = {"kind": "composed", "parts": [form, ONE]}
    with pytest.raises(UnsupportedClaimError, match="none of them composed"):
        claim_from(form)


def test_a_part_that_was_tampered_with_in_a_statement_is_another_claim_or_none() -> None:
    raw = encode(Hospital("site-a").reservation("g", BOTH, "privimage"))
    for old, new in (
        (b'"noise":"60.0"', b'"noise":"90.0"'),
        (b'"steps":50', b'"steps":5'),
        (b'"votes":4', b'"votes":1'),
    ):
        assert raw.count(old) == 1
        with pytest.raises(StatementError, match="canonical form"):  # the subject is the predicate's digest
            parse(raw.replace(old, new))


# --- its price


@settings(max_examples=60, deadline=None)
@given(SEVERAL, st.integers(2, 16), st.floats(1e-9, 0.1))
def test_the_price_is_the_sum_of_the_parts_rounded_up_once(claim: Composed, order: int, delta: float) -> None:
    apart = sum(cost(part, order) for part in claim.parts)
    assert apart - len(claim.parts) < cost(claim, order) <= apart
    assert cost(claim, order) >= max(cost(part, order) for part in claim.parts)
    assert integer_rdp(claim, order) == pytest.approx(
        math.fsum(integer_rdp(p, order) for p in claim.parts), rel=1e-14
    )
    assert epsilon_nano(claim, delta, order) - cost(claim, order) == epsilon_nano(TRAINING, delta, order) - cost(
        TRAINING, order
    )


@pytest.mark.parametrize("order", [2, 4, 7, 32])
def test_the_price_of_a_job_is_its_exact_divergence_rounded_up(order: int) -> None:
    """Theorem 3.1 and section 3.3 of Mironov, Talwar & Zhang, word for word, with digits to spare."""
    with mpmath.workdps(60):
        query = mpmath.mpf(order) * 4 / (2 * mpmath.mpf(60) ** 2)
        q, sigma = mpmath.mpf(0.1), mpmath.mpf(3)
        step = mpmath.fsum(
            mpmath.binomial(order, i) * (1 - q) ** (order - i) * q**i * mpmath.exp((i * i - i) / (2 * sigma**2))
            for i in range(order + 1)
        )
        assert cost(BOTH, order) == mpmath.ceil((query + 50 * mpmath.log(step) / (order - 1)) * 10**9)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARTS, min_size=2, max_size=4), st.integers(2, 16))
def test_the_order_of_the_parts_is_in_the_bytes_and_not_in_the_price(parts: list[Part], order: int) -> None:
    assert len({cost(Composed(p), order) for p in itertools.permutations(parts)}) == 1


@settings(max_examples=25, deadline=None)
@given(SEVERAL, st.integers(2, 12))
def test_the_figures_of_a_composition_are_those_of_its_parts(claim: Composed, order: int) -> None:
    assert epsilon([claim], DELTA, order) == epsilon(claim.parts, DELTA, order)
    assert epsilon([claim, DP], DELTA, order) == epsilon([*claim.parts, DP], DELTA, order)
    confirm(claim, order)
    assert accountant.rdp(claim, order) == pytest.approx(math.fsum(accountant.rdp(p, order) for p in claim.parts))


def test_the_tight_figure_of_a_composition_is_that_of_its_parts() -> None:
    assert tight_epsilon([BOTH], DELTA) == tight_epsilon(BOTH.parts, DELTA)
    assert tight_epsilon([BOTH], DELTA) < epsilon([BOTH], DELTA) == epsilon(BOTH.parts, DELTA)
    assert tight_epsilon([BOTH], DELTA) > max(tight_epsilon([part], DELTA) for part in BOTH.parts)


def test_googles_and_opacus_accountants_compose_the_same_parts_to_the_same_epsilon() -> None:
    """The second oracles: ComposedDpEvent, written out by hand, and a history of opacus; both at orders 2 to 64."""
    event = dp.ComposedDpEvent(
        [
            dp.GaussianDpEvent(60.0 / 2.0),  # noise over m sqrt(k_1)
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(3.0)), 50),
        ]
    )
    google = RdpAccountant(orders=accountant.ORDERS, neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    google.compose(event)
    assert epsilon([BOTH], DELTA) == pytest.approx(float(google.get_epsilon(DELTA)), rel=1e-6)
    accountants = pytest.importorskip("opacus.accountants", reason="agent: opacus needs torch", exc_type=ImportError)
    opacus = accountants.RDPAccountant()
    opacus.history = [(30.0, 1.0, 1), (3.0, 0.1, 50)]
    assert epsilon([BOTH], DELTA) == pytest.approx(
        opacus.get_epsilon(DELTA, alphas=list(accountant.ORDERS)), rel=1e-6
    )


@pytest.mark.parametrize("wrong", [HISTOGRAM, TRAINING])
def test_a_part_on_whose_price_the_accountants_disagree_is_found_beside_a_loud_one(
    monkeypatch: pytest.MonkeyPatch, wrong: Part
) -> None:
    loud = Composed((wrong, SubsampledGaussian(1.0, 0.002, 10_000_000)))  # the error is far below a millionth of it
    confirm(loud, 5)

    def off(claim: Any, order: int) -> float:
        return integer_rdp(claim, order) * (1.01 if claim == wrong else 1.0)

    monkeypatch.setattr(accountant, "integer_rdp", off)
    accountant.rdp.cache_clear()
    with pytest.raises(AccountantsDisagreeError):
        confirm(loud, 5)


@pytest.mark.parametrize("factor", [0.99, 1.01, math.nan])
def test_a_sum_of_confirmed_parts_is_confirmed_itself(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def off(claim: Any, order: int) -> float:
        return integer_rdp(claim, order) * (factor if isinstance(claim, Composed) else 1.0)

    monkeypatch.setattr(accountant, "integer_rdp", off)
    accountant.rdp.cache_clear()
    with pytest.raises(AccountantsDisagreeError):
        confirm(BOTH, 5)


# --- the noise of a planned job


def test_a_calibrated_job_fits_together_with_its_query_and_is_granted_as_one() -> None:
    job = calibrate(0.5, DELTA, 0.1, 60, also=(HISTOGRAM,))
    assert tight_epsilon([Composed((HISTOGRAM, job))], DELTA) <= 0.5
    quieter = replace(job, noise_multiplier=round(job.noise_multiplier * 1000 - 1) / 1000)
    assert tight_epsilon([Composed((HISTOGRAM, quieter))], DELTA) > 0.5
    assert calibrate(0.5, DELTA, 0.1, 60, also=(Composed((HISTOGRAM, HISTOGRAM)),)) == calibrate(
        0.5, DELTA, 0.1, 60, also=(HISTOGRAM, HISTOGRAM)
    )
    with pytest.raises(NoiseNotFoundError, match="other claims alone"):
        calibrate(0.05, DELTA, 0.1, 60, also=(BOTH,))


# --- averaged votes


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.data())
def test_a_patient_whose_images_votes_are_averaged_counts_as_one_image_over_any_classes_and_bins(
    votes: int, images: int, classes: int, data: st.DataObject
) -> None:
    """The norm of a mean is at most the largest norm, whatever class each image is of and whatever it votes for."""
    bins = 5
    total = [0.0] * (classes * bins)
    for _ in range(images):
        label = data.draw(st.integers(0, classes - 1))
        for bin_ in data.draw(st.sets(st.integers(0, bins - 1), max_size=votes)):
            total[label * bins + bin_] += 1 / images
    assert math.hypot(*total) <= GaussianQuery(60.0, 1, votes).sensitivity * (1 + 1e-12)


# --- the books, and who reads them


def test_a_composed_claim_is_granted_released_and_verified(tmp_path: Path) -> None:
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    nano, price = epsilon_nano(BOTH, 4e-6, 4), cost(BOTH, 4)
    for declared, found in ((nano, []), (nano - 1, ["epsilon"]), (nano + 1, ["epsilon"])):
        path = tmp_path / f"{declared}.db"
        register = open_register(path, a, key=key)
        asked = a.reservation("g", BOTH, "privimage")
        assert register.reserve("r", asked, a.seal(asked)).amount == price
        made = a.release(
            "g", mechanism="privimage", claim=BOTH, epsilon_nano=declared, delta="4e-06",
            components=dict(asked.components),
        )  # fmt: skip
        verdict = register.admit("s", made, a.seal(made), ArtifactFindings())
        assert ([f.rule for f in verdict.findings], verdict.level) == (found, "A")
        register.store.close()
        read = verify(export_file(path, "lazaret/test", key))
        assert (read.grants, read.releases, read.refusals) == (1, not found, len(found))
        account = read.accounts["site-a/rdp"]
        assert (account["spent"], account["held"]) == (price, 0)  # images were read, whatever became of it


@pytest.mark.parametrize(
    ("claim", "amount", "why"),
    [
        (BOTH, cost(BOTH, 4) - 1, "another price"),
        (BOTH, cost(TRAINING, 4), "another price"),
        (Composed((replace(HISTOGRAM, noise=600.0), TRAINING)), cost(BOTH, 4), "something else"),
        (Composed((TRAINING, HISTOGRAM)), cost(BOTH, 4), "something else"),
        (TRAINING, cost(TRAINING, 4), "something else"),
    ],
)
def test_a_grant_with_another_price_or_another_part_is_found_by_an_auditor(
    tmp_path: Path, claim: Any, amount: int, why: str
) -> None:
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    envelope = a.seal(a.reservation("g", BOTH, "privimage"))
    entry = Reserved(
        "g", "site-a", "", "privimage", "site-a/rdp", amount, canonical(claim_json(claim)), digest(envelope)
    )
    register = open_register(tmp_path / "ledger.db", a, key=key)
    register.store.append("sneaked", AppendRequest((entry,), (envelope,)))
    register.store.close()
    with pytest.raises(ExportError, match=why):
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))


def test_an_admission_of_a_part_alone_is_found_by_an_auditor(tmp_path: Path) -> None:
    """The statement, the epsilon and the signature are all in order: only the law refuses it, again."""
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    asked = a.reservation("g", BOTH, "privimage")
    assert register.reserve("r", asked, a.seal(asked)).admitted
    less = Composed((HISTOGRAM, replace(TRAINING, steps=49)))
    made = a.release(
        "g", mechanism="privimage", claim=less, epsilon_nano=epsilon_nano(less, 4e-6, 4), delta="4e-06",
        components=dict(asked.components),
    )  # fmt: skip
    envelope = a.seal(made)
    refused = register.admit("s0", made, envelope, ArtifactFindings())
    assert [f.rule for f in refused.findings] == ["claim_not_granted"]
    entry = Admitted(
        made.release, "g", "site-a", "", 0, "privimage", "A", cost(less, 4), canonical(claim_json(less)),
        bytes.fromhex(made.artifact_sha256), digest(envelope), "",
    )  # fmt: skip
    register = open_register(tmp_path / "two.db", a, key=key)
    assert register.reserve("r", asked, a.seal(asked)).admitted
    register.store.append("sneaked", AppendRequest((entry,), (envelope,)))
    register.store.close()
    with pytest.raises(ExportError, match="claim_not_granted"):
        verify(export_file(tmp_path / "two.db", "lazaret/test", key))
