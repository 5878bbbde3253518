"""The price is right: accountants, closed forms and published figures agree; rounding never helps the spender."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

from policies import accounting
from policies.accounting import AccountantsDisagree, cost, epsilon, epsilon_nano, order_for, rdp, tight_epsilon
from policies.claims import KAnonymous, NoClaim, SubsampledGaussian, UnsupportedClaim
from policies.rdp import allowance, integer_rdp, log_term

CLAIMS = st.builds(
    SubsampledGaussian,
    sampling_rate=st.floats(0.001, 1.0),
    noise_multiplier=st.floats(0.4, 20.0),
    steps=st.integers(1, 500),
)


@settings(max_examples=60, deadline=None)
@given(CLAIMS, st.integers(2, 16))
def test_two_independent_accountants_agree_at_integer_orders(claim: SubsampledGaussian, order: int) -> None:
    assert integer_rdp(claim, order) == pytest.approx(rdp(claim, order), rel=1e-6, abs=1e-12)


def test_a_disagreement_of_the_accountants_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "integer_rdp", lambda claim, order: 0.5 * integer_rdp(claim, order))
    with pytest.raises(AccountantsDisagree):
        rdp(SubsampledGaussian(0.123, 1.1, 7), 5)


def test_opacus_gives_the_same_epsilon() -> None:
    oracle = RDPAccountant()
    oracle.history = [(1.1, 0.01, 1000)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = oracle.get_epsilon(1e-5, alphas=list(range(2, 65)))
    assert epsilon([SubsampledGaussian(0.01, 1.1, 1000)], 1e-5) == pytest.approx(theirs, rel=1e-6)


def test_the_plain_gaussian_has_its_closed_form() -> None:
    claim = SubsampledGaussian(1.0, 2.0, 3)
    assert rdp(claim, 8) == pytest.approx(3 * 8 / (2 * 2.0**2))


def test_the_measured_table_of_published_settings_is_reproduced() -> None:
    """q, sigma, T -> RDP and PLD epsilon at delta 1e-5, computed by opacus and Google beforehand."""
    for q, sigma, steps, by_rdp, by_pld in ((0.01, 1.0, 1000, 2.10, 1.83), (0.05, 2.0, 1000, 4.02, 3.70)):
        claim = SubsampledGaussian(q, sigma, steps)
        assert epsilon([claim], 1e-5) == pytest.approx(by_rdp, abs=0.01)
        assert tight_epsilon([claim], 1e-5) == pytest.approx(by_pld, abs=0.01)


@settings(max_examples=15, deadline=None)
@given(CLAIMS)
def test_the_filter_never_says_less_than_the_tight_figure(claim: SubsampledGaussian) -> None:
    bound = epsilon([claim], 1e-5)
    if bound < 8:
        assert tight_epsilon([claim], 1e-5) <= bound + 1e-6


@settings(max_examples=60, deadline=None)
@given(CLAIMS, st.integers(2, 12))
def test_rounding_never_favours_the_spender(claim: SubsampledGaussian, order: int) -> None:
    assert cost(claim, order) >= integer_rdp(claim, order) * 1e9 * (1 - 1e-15)
    assert epsilon_nano(claim, 1e-6, order) >= epsilon([claim], 1e-6, order) * 1e9 * (1 - 1e-12)
    assert allowance(8.0, 1e-6, order) <= max(0.0, (8.0 - log_term(order, 1e-6)) * 1e9)


@settings(max_examples=40, deadline=None)
@given(CLAIMS, st.integers(2, 12))
def test_the_price_grows_with_steps_and_falls_with_noise(claim: SubsampledGaussian, order: int) -> None:
    q, sigma, steps = claim.sampling_rate, claim.noise_multiplier, claim.steps
    assert cost(SubsampledGaussian(q, sigma, steps + 1), order) > cost(claim, order)
    assert cost(SubsampledGaussian(q, sigma * 1.5, steps), order) < cost(claim, order) + 1


def test_a_full_allowance_is_at_most_the_budget() -> None:
    for budget, delta in ((8.0, 4e-6), (3.0, 1e-5), (1.0, 1e-6)):
        order = order_for(budget, delta)
        assert allowance(budget, delta, order) / 1e9 + log_term(order, delta) <= budget


def test_the_filters_order_is_the_one_that_serves_the_budget() -> None:
    assert order_for(8.0, 1e-5) == 4
    assert order_for(3.0, 1e-5) == 7


def test_k_anonymity_has_no_epsilon_and_is_never_free() -> None:
    for claim in (KAnonymous(5, 2, 1), NoClaim()):
        with pytest.raises(UnsupportedClaim):
            epsilon([claim], 1e-5)
        with pytest.raises(UnsupportedClaim):
            cost(claim, 4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 0.0, 1.5, 1, True, "0.1", None])
def test_senseless_parameters_cannot_be_built(wrong: object) -> None:
    with pytest.raises(UnsupportedClaim):
        SubsampledGaussian(wrong, 1.0, 10)  # type: ignore[arg-type]
    if wrong != 1.5:
        with pytest.raises(UnsupportedClaim):
            SubsampledGaussian(0.1, wrong, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, 1, True, 5.0, "5", None])
def test_k_is_a_whole_number_of_at_least_two(wrong: object) -> None:
    with pytest.raises(UnsupportedClaim):
        KAnonymous(wrong, 1, 1)  # type: ignore[arg-type]
