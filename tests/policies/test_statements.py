"""Statements have one form: what parses encodes back to itself, and everything else is our own error."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.accounting.claims import (
    DistributedGaussian,
    KAnonymous,
    NoClaim,
    SubsampledGaussian,
    UnsupportedClaimError,
)
from policies.statements import (
    Settlement,
    StatementError,
    claim_from,
    claim_json,
    encode,
    malformed,
    menu_of,
    parse,
)
from protos.common.canonical_json import canonical
from tests.support.ledger_world import BOTH, DP, HISTOGRAM, K5, Hospital

SITE = Hospital("site-a")
STATEMENTS = [
    SITE.enrolment()[0],
    SITE.reservation("grant-1"),
    SITE.reservation("grant-2", DP, "federated", "run-1"),
    SITE.release("grant-1"),
    SITE.release("g", run="run-1", round=2, claim=DP, epsilon_nano=6_511_125_604, delta="4e-06"),
    SITE.release("g", reader="1f" * 32),
    SITE.release("g", menu="5,8,11"),
    SITE.release("g", mechanism="distill", claim=NoClaim(), reid_rate="0.02", vetting_power="0.95"),
    SITE.reservation("grant-3", DistributedGaussian(0.25, 1.8, 3, 4, 3), "federated-masked", "run-1"),
    SITE.reservation("grant-4", BOTH, "privimage"),
    SITE.release("g", mechanism="privimage", claim=BOTH, epsilon_nano=1, delta="4e-06"),
    Settlement("grant-1", "site-a", "", "ksame", "expired", "restart", 0),
]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: type(s).__name__)
def test_what_is_encoded_parses_to_itself(statement: object) -> None:
    assert parse(encode(statement)) == statement  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "claim",
    [DP, K5, NoClaim(), SubsampledGaussian(0.1, 2e-3, 1), DistributedGaussian(0.1, 2.0, 1, 9, 5), HISTOGRAM, BOTH],
)
def test_claims_survive_json(claim: object) -> None:
    assert claim_from(json.loads(canonical(claim_json(claim)))) == claim  # type: ignore[arg-type]


@settings(max_examples=300)
@given(st.sampled_from(STATEMENTS), st.data())
def test_any_changed_byte_is_found_or_says_something_else(statement: object, data: st.DataObject) -> None:
    raw = bytearray(encode(statement))  # type: ignore[arg-type]
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(StatementError, UnsupportedClaimError):
        assert parse(bytes(raw)) != statement


@given(st.binary(max_size=200))
def test_noise_gives_our_own_errors_only(raw: bytes) -> None:
    with pytest.raises((StatementError, UnsupportedClaimError)):
        parse(raw)


def _changed(**fields: object) -> bytes:
    document = json.loads(encode(STATEMENTS[3]))
    document["predicate"].update(fields)
    return canonical(document)


@pytest.mark.parametrize(
    "fields",
    [
        {"artifact_bytes": 1.5}, {"artifact_bytes": True}, {"artifact_bytes": -1}, {"artifact_bytes": 10**30},
        {"site": "../etc"}, {"site": ""}, {"release": "A B"}, {"epsilon_nano": "0"}, {"round": None},
        {"components": {"x": 1}}, {"components": []}, {"artifact_sha256": "zz"}, {"extra": 1}, {"vetted_against": 7},
        {"reader": None}, {"reader": "1f"}, {"reader": "1F" * 32}, {"reader": "1f" * 33},
        {"vetting_power": None}, {"vetting_power": 1}, {"vetting_power": ["0.9"]}, {"vetting_power": "0.9\x00"},
    ],
)  # fmt: skip
def test_ill_typed_fields_are_refused(fields: dict[str, object]) -> None:
    try:
        raw = _changed(**fields)
    except (ValueError, TypeError):
        return
    with pytest.raises(StatementError):
        parse(raw)


@pytest.mark.parametrize(
    "claim",
    [
        {"kind": "perfect"}, {"kind": "k-anonymous", "k": 5}, {"kind": ["k-anonymous"]}, "k", None, 7,
        {"kind": "subsampled-gaussian", "sampling_rate": "nan", "noise_multiplier": "1.0", "steps": 1},
        {"kind": "subsampled-gaussian", "sampling_rate": "0.10", "noise_multiplier": "1.0", "steps": 1},
        {"kind": "subsampled-gaussian", "sampling_rate": "0.1", "noise_multiplier": "1.0", "steps": 1, "more": 1},
        {"kind": "distributed-gaussian", "sampling_rate": "0.1", "noise_multiplier": "1.0", "steps": 1},
    ],
)  # fmt: skip
def test_an_unknown_claim_is_refused_and_never_guessed(claim: object) -> None:
    with pytest.raises((UnsupportedClaimError, TypeError)):
        claim_from(claim)


def test_a_duplicate_key_is_refused() -> None:
    raw = encode(STATEMENTS[1]).replace(b'{"_type"', b'{"_type":"x","_type"', 1)
    with pytest.raises(StatementError):
        parse(raw)


def test_k_is_not_a_float() -> None:
    value = claim_json(KAnonymous(5, 2, 1))
    assert claim_from(value) == KAnonymous(5, 2, 1)
    with pytest.raises(UnsupportedClaimError):
        claim_from({**value, "k": 5.0})


@pytest.mark.parametrize(
    "menu", ["5,", ",5", "05", "5,5", "8,5", "5 8", "-5", "5.0", "0", "k", "5,8\n", "9" * 7, "Dr Who"]
)
def test_a_menu_is_rising_whole_numbers_in_their_shortest_form_and_no_message(menu: str) -> None:
    assert malformed(SITE.release("g", menu=menu)).startswith("menu: ")
    with pytest.raises(StatementError, match="menu"):
        parse(encode(SITE.release("g", menu=menu)))


def test_a_menu_reads_back() -> None:
    assert menu_of("") == ()
    assert menu_of("5,8,11") == (5, 8, 11)


# the form of a release as it was before ``vetting_power``: written down, not encoded here
BEFORE = (
    b'{"_type":"https://in-toto.io/Statement/v1","predicate":{"approvals":{},"artifact_bytes":100,"artifact_sha256":"'
    + b"ab" * 32
    + b'","artifact_type":"image-set","claim":{"k":5,"kind":"k-anonymous","l_diversity":2,"relation":'
    b'"add-or-remove-one","releases_per_patient":1,"unit":"patient"},"components":{"encoder":"public","generator":'
    b'"public"},"delta":null,"epsilon_nano":null,"grant":"grant-1","mechanism":"ksame","menu":"","modality":"OT",'
    b'"reader":"","reid_rate":null,"release":"release-2e79d9e2","round":0,"run":"","site":"site-a",'
    b'"vetted_against":"nothing"},"predicateType":"https://lazaret.invalid/attestation/release/v1","subject":'
    b'[{"digest":{"sha256":"' + b"ab" * 32 + b'"},"name":"artifact"}]}'
)


def test_a_statement_of_before_a_field_was_added_keeps_its_bytes_and_its_meaning() -> None:
    """Signatures are over bytes: a ledger of yesterday must verify tomorrow."""
    said = parse(BEFORE)
    assert encode(said) == BEFORE
    assert said == replace(SITE.release("grant-1"), release="release-2e79d9e2")  # type: ignore[type-var]
    assert said.vetting_power is None  # type: ignore[union-attr]


def test_a_field_that_says_nothing_is_left_out_and_not_written_as_nothing() -> None:
    """Else one statement would have two forms."""
    written = BEFORE.replace(b'"vetted_against":"nothing"}', b'"vetted_against":"nothing","vetting_power":null}')
    assert written != BEFORE
    with pytest.raises(StatementError, match="canonical"):
        parse(written)
    with pytest.raises(StatementError, match="missing"):
        parse(BEFORE.replace(b'"reid_rate":null,', b""))
    with pytest.raises(StatementError, match="canonical"):
        parse(BEFORE.replace(b'"menu":""', b'"menu":null'))


def test_a_statement_of_before_there_were_menus_keeps_its_bytes_too() -> None:
    """Ledgers of ``tests/vectors/older`` hold such ones."""
    first = BEFORE.replace(b'"menu":"",', b"")
    said = parse(first)
    assert encode(said) == first
    assert said.menu is None  # type: ignore[union-attr]
    assert menu_of(said.menu) == ()  # type: ignore[union-attr]
