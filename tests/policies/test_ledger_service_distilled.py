"""The books of what was distilled: which account pays, what a refusal spends, and that an auditor says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.claims import NoClaim
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger_service import ArtifactFindings
from policies.review.policy import parse
from policies.statements import release_id
from tests.support.distilled_releases import MODEL, MODEL_DP, PRICE, STEPS, of
from tests.support.ledger_world import BOTH, K5, Hospital, open_register, policy


def test_the_books_pay_for_both_from_the_right_account_and_an_auditor_agrees(tmp_path: Path) -> None:
    text = policy(components='["public", "private"]', levels='["A", "B", "C"]')
    key, site = Ed25519PrivateKey.generate(), Hospital("site-m", text)
    lax = parse(text, "lax")
    register = replace(open_register(tmp_path / "ledger.db", site, key=key), policy_of=lambda _site: lax)
    assert [register.account("site-m", claim).opened.order for claim in (NoClaim(), K5, STEPS, BOTH)] == [0, 0, 4, 4]
    for mechanism, made in (("distill", MODEL), ("distill-dp", MODEL_DP)):
        asked = site.reservation(mechanism, made.claim, mechanism)
        assert register.reserve(f"r-{mechanism}", asked, site.seal(asked)).admitted
        release = replace(made, grant=mechanism, release=release_id("site-m", mechanism, 0))
        sealed = site.seal(release)
        verdict = register.admit(f"s-{mechanism}", release, sealed, ArtifactFindings())
        assert verdict.admitted, verdict
        assert register.admit(f"s-{mechanism}", release, sealed, ArtifactFindings()) == verdict
    state = register.store.state
    assert (state.accounts["site-m/k"].spent, state.accounts["site-m/rdp"].spent) == (1, PRICE)
    assert [entry.level for entry in state.releases.values()] == ["C", "A"]
    again = site.reservation("again")
    assert of(register.reserve("r-again", again, site.seal(again))) == ["budget"], "a k-anonymous one, afterwards"
    register.store.close()
    found = verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))
    assert (found.grants, found.releases, found.refusals) == (2, 2, 1)


def test_a_refused_release_of_its_kind_spends_its_grant(tmp_path: Path) -> None:
    text = policy(components='["public", "private"]', levels='["A", "B", "C"]')
    site, lax = Hospital("site-m", text), parse(text, "lax")
    register = replace(open_register(tmp_path / "ledger.db", site), policy_of=lambda _site: lax)
    asked = site.reservation("g", NoClaim(), "distill")
    assert register.reserve("r", asked, site.seal(asked)).admitted
    poor = replace(MODEL, vetting_power="0.4")
    assert of(register.admit("s", poor, site.seal(poor), ArtifactFindings())) == ["vetting_power"]
    assert register.store.state.grants["g"].state == "spent"
    assert of(register.admit("t", MODEL, site.seal(MODEL), ArtifactFindings())) == ["grant_closed"]
    register.store.close()
