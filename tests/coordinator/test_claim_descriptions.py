"""Every claim has its sentence, and what cannot be read promises nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.claim_descriptions import BRAIN, NOTHING, UNKNOWN, UNTESTED, describe_claim, evidence
from coordinator.explanations import MECHANISMS
from policies.accounting.claims import (
    KINDS,
    Composed,
    DistributedGaussian,
    Evaluated,
    KAnonymous,
    NoClaim,
    SubsampledGaussian,
)
from policies.review.rules import TERMS
from policies.statements import claim_json
from tests.support.ledger_world import BOTH, HISTOGRAM, LOOKED

TRAINING = BOTH.parts[1]
SHARED = DistributedGaussian(0.25, 1.8, 10, sites=3, honest=2)


def test_every_kind_of_claim_but_none_at_all_has_a_sentence_of_its_own() -> None:
    claims = [KAnonymous(11, 2, 1), TRAINING, SHARED, HISTOGRAM, BOTH, LOOKED]
    assert {type(claim) for claim in claims} == set(KINDS.values()) - {NoClaim}
    told = [describe_claim(claim_json(claim)) for claim in claims]
    assert len({*told, UNKNOWN}) == len(claims) + 1
    assert describe_claim(claim_json(NoClaim())) == NOTHING
    assert describe_claim({"kind": "no-claim", "more": 1}) == UNKNOWN


def test_every_mechanism_of_the_law_has_its_words() -> None:
    assert set(MECHANISMS) == set(TERMS)


def test_a_remodelled_head_is_never_told_without_its_brain() -> None:
    """P14 of the design's faces: the face is gone, and whoever has the brain still knows whose it is."""
    told = evidence("0.0561", "0.947", "remodel")
    assert told.startswith(f"{BRAIN}. Empirical only: at most 5.7 %")
    assert "94.7 % or more" in told
    assert BRAIN == "face removed; the brain itself remains linkable"
    assert BRAIN in MECHANISMS["remodel"]
    assert BRAIN not in evidence("0.0561", "0.947", "distill")
    for wrong in (("nan", "0.9"), ("0.1", None), ("2", "0.9"), ("-0.1", "0.9")):
        assert evidence(*wrong, "remodel") == UNTESTED


def test_an_officer_is_told_every_part_of_a_composed_claim_and_that_they_are_paid_for_together() -> None:
    told = describe_claim(claim_json(BOTH))
    assert told == (
        "2 uses of the same patients, paid for together: "
        "(1) one set of counts, each with Gaussian noise of 60.0 votes; a patient counts as at most 1 image(s), and "
        "an image has at most 4 vote(s); "
        "(2) 50 steps, each with Gaussian noise of 3.0 times the bound on one patient's part; a patient is in a step "
        "with probability 0.1"
    )
    assert all(describe_claim(claim_json(part)) in told for part in BOTH.parts)
    sums = describe_claim(claim_json(Composed((HISTOGRAM, SubsampledGaussian(1.0, 2.0, 1)))))
    assert "(2) 1 step, each" in sums


def test_a_sum_says_on_whose_noise_it_stands() -> None:
    assert "at least 2 of the 3 sites" in describe_claim(claim_json(SHARED))
    assert "every site adds the whole noise" in describe_claim(claim_json(replace(SHARED, honest=1)))


def test_looks_at_a_training_are_told_with_their_number_their_noise_and_what_one_patient_moves() -> None:
    told = describe_claim(claim_json(LOOKED))
    assert "a training, and 3 looks at how good it is, paid for together: 60 steps" in told
    assert "Gaussian noise of 30.0 on each, where one patient moves all sums together by at most 1" in told
    shared = describe_claim(claim_json(Evaluated(SHARED, LOOKED.query, 1)))
    assert "1 look at" in shared
    assert "at least 2 of the 3 sites" in shared
    assert describe_claim({**claim_json(LOOKED), "looks": 0}) == UNKNOWN


FORM: Any = claim_json(BOTH)


@pytest.mark.parametrize(
    "claim",
    [
        None, 7, "composed", [], {}, {"kind": "perfect"}, {"kind": "composed"}, {"kind": "composed", "parts": 3},
        {"kind": ["composed"]}, {**FORM, "parts": FORM["parts"][:1]}, {**FORM, "parts": [FORM, FORM]},
        {**FORM, "parts": [FORM["parts"][0], {"kind": "perfect"}]}, {**FORM, "more": 1},
        {**FORM, "parts": [FORM["parts"][0], {**FORM["parts"][1], "steps": "fifty"}]},
        {"kind": "distributed-gaussian"},
    ],
)  # fmt: skip
def test_what_cannot_be_read_promises_nothing(claim: object) -> None:
    assert UNKNOWN in describe_claim(claim)
