"""A model card says where its figures stand, and that there are none where nobody paid for them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.claim_descriptions import looks_in
from coordinator.reports.model_cards import _metrics
from coordinator.reports.report_inputs import Item
from policies.statements import claim_json
from tests.support.ledger_world import BOTH, DP, K5, LOOKED


def test_a_card_names_the_certificate_where_a_look_was_paid_for_and_says_so_where_none_was() -> None:
    def told(*claims: Any) -> str:
        return _metrics(Item("run-1", {"parts": [{"claim": claim_json(claim)} for claim in claims]}))

    assert "in the certificate beside the model" in told(DP, LOOKED)
    assert "nobody paid for one" in told(DP, DP)


@pytest.mark.parametrize(
    "claim", [None, 3, {}, {"kind": "evaluated"}, claim_json(BOTH), claim_json(K5), claim_json(DP)]
)
def test_what_is_no_claim_with_looks_counts_none(claim: object) -> None:
    assert looks_in(claim) == 0
    assert looks_in(claim_json(LOOKED)) == 3
