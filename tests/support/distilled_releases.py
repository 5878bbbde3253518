"""A release of each of the two distillations, at level C and at level A, as their sites would state it."""

from __future__ import annotations

from dataclasses import replace

from policies.accounting.claims import NoClaim, SubsampledGaussian
from policies.accounting.rdp import cost, epsilon_nano
from policies.review.rules import Verdict
from policies.statements import Release, release_id
from tests.support.ledger_world import COMPONENTS

ORDER, DELTA = 4, "4e-06"
STEPS = SubsampledGaussian(0.05, 2.0, 400)
MODEL = Release(
    release_id("site-m", "g", 0), "g", "site-m", "", 0, "distill", "model", "ab" * 32, 100, NoClaim(), None, None,
    COMPONENTS["distill"], "OT", "private", "0.03", {}, "", vetting_power="0.95",
)  # fmt: skip
MODEL_DP = replace(
    MODEL, mechanism="distill-dp", claim=STEPS, epsilon_nano=epsilon_nano(STEPS, 4e-6, ORDER), delta=DELTA,
    components=COMPONENTS["distill-dp"], vetted_against="public", reid_rate=None, vetting_power=None,
)  # fmt: skip
PRICE = cost(STEPS, ORDER)


def of(verdict: Verdict) -> list[str]:
    return [finding.rule for finding in verdict.findings]
