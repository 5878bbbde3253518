"""What a site says and signs: lies about the price, the patients, the rounds, and words that are another's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from policies.accounting.claims import KAnonymous, SubsampledGaussian
from policies.statements import PAYLOAD_TYPE, Approval, Settlement, encode, release_id
from protos.common.dsse import seal
from tests.attacks.ground import Ground
from tests.support.federation_world import Federation, Site, pictures, vector
from tests.support.ledger_world import DP, K5

_COUNT = itertools.count()
SET, UPDATE = pictures(), vector()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One federation for all of them; each lie is a site's of its own."""
    with Federation(tmp_path_factory.mktemp("federation")) as made:
        attacked = Ground(made)
        yield attacked
        attacked.audit()


@pytest.fixture
def site(ground: Ground) -> Site:
    return ground.federation.join(f"site-{next(_COUNT)}")


@pytest.fixture
def other(ground: Ground) -> Site:
    return ground.federation.join(f"site-{next(_COUNT)}")


def granted(site: Site) -> str:
    """A grant for an image set, k = 5."""
    site.reserved(f"set-{site.hospital.name}")
    return f"set-{site.hospital.name}"


def granted_run(site: Site) -> str:
    """A grant for a run of 60 steps."""
    site.reserved(f"run-{site.hospital.name}", DP, "federated", "run-1")
    return f"run-{site.hospital.name}"


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "k larger": ({"claim": KAnonymous(50, 2, 1)}, "claim_not_granted"),
    "k smaller": ({"claim": KAnonymous(3, 2, 1)}, "min_k"),
    "l smaller": ({"claim": KAnonymous(5, 1, 1)}, "l_diversity"),
    "patients released more often": ({"claim": KAnonymous(5, 2, 9)}, "releases_per_patient"),
    "another unit": ({"claim": KAnonymous(5, 2, 1, unit="image")}, "unit"),
    "dp for k": ({"claim": DP}, "claim_kind"),
    "an epsilon for k": ({"epsilon_nano": 0, "delta": "4e-06"}, "epsilon_of_k"),
    "private component": ({"components": {"encoder": "private", "generator": "public"}}, "provenance"),
    "component left out": ({"components": {"encoder": "public"}}, "components"),
    "component made up": ({"components": {"encoder": "public", "generator": "public", "x": "public"}}, "components"),
    "modality": ({"modality": "SC"}, "modality"),
    "vetted against the moon": ({"vetted_against": "moon"}, "vetting"),
    "a rate that nobody measured": ({"reid_rate": "0.01"}, "reid_rate"),
    "a rate above the bound": ({"reid_rate": "0.5", "vetted_against": "public"}, "reid_rate"),
    "a reader that no policy names": ({"reader": "ab" * 32}, "reader"),
    "a round without a run": ({"round": 1}, "round"),
    "a run without rounds": ({"run": "run-1"}, "run"),
    "a name of its own choice": ({"release": "release-" + "0" * 32}, "release_id"),
    "another mechanism": ({"mechanism": "magic"}, "unknown_mechanism"),
    "more than the policy takes": ({"artifact_bytes": (256 << 20) + 1}, "artifact_size"),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_lie_about_a_set_is_refused_by_its_own_rule(ground: Ground, site: Site, lie: str) -> None:
    changes, rule = LIES[lie]
    grant, before = granted(site), len(ground.federation.findings())
    release = site.release(grant, SET, **changes)
    verdict = site.gateway().submit("k", site.seal(release), SET)
    assert not verdict.admitted
    assert rule in [finding.rule for finding in verdict.findings]
    (written,) = ground.federation.findings()[before:]
    assert rule in written
    assert ground.federation.store.state.grants[grant].state == "spent", "what was refused was made from patients"


UPDATE_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "more noise than granted": ({"claim": SubsampledGaussian(0.25, 3.6, 15)}, "claim_not_granted"),
    "a smaller sampling rate": ({"claim": SubsampledGaussian(0.1, 1.8, 15)}, "claim_not_granted"),
    "more steps than granted": ({"claim": SubsampledGaussian(0.25, 1.8, 61)}, "claim_not_granted"),
    "an epsilon a billionth too small": ({"epsilon_nano": -1}, "epsilon"),
    "half the epsilon": ({"epsilon_nano": -2}, "epsilon"),
    "no epsilon": ({"epsilon_nano": None}, "epsilon"),
    "a delta for fewer patients": ({"delta": "1e-03"}, "delta"),
    "a delta for more patients": ({"delta": "4e-09"}, "delta"),
    "no delta": ({"delta": None}, "delta"),
    "another run": ({"run": "run-2"}, "grant_of_another"),
    "no run": ({"run": ""}, "run"),
    "no round": ({"round": 0}, "round"),
    "a private centre": ({"components": {"initial": "public", "centre": "private"}}, "provenance"),
    "masked without a mask": ({"mechanism": "federated-masked"}, "claim_kind"),
}


@pytest.mark.parametrize("lie", sorted(UPDATE_LIES))
def test_a_lie_about_an_update_is_refused_by_its_own_rule(ground: Ground, site: Site, lie: str) -> None:
    changes, rule = UPDATE_LIES[lie]
    grant, before = granted_run(site), len(ground.federation.findings())
    release = site.update(grant, UPDATE, 15, **{"run": "run-1", "round": 1, **changes})
    if "epsilon_nano" in changes and changes["epsilon_nano"] is not None:
        true = site.update(grant, UPDATE, 15, run="run-1", round=1).epsilon_nano
        assert true is not None
        release = replace(release, epsilon_nano=true - 1 if changes["epsilon_nano"] == -1 else true // 2)
    verdict = site.gateway().submit("k", site.seal(release), UPDATE)
    assert rule in [finding.rule for finding in verdict.findings]
    (written,) = ground.federation.findings()[before:]
    assert rule in written
    held = ground.federation.store.state.accounts[f"{site.hospital.name}/rdp"]
    assert (held.held > 0, held.spent) == (True, 0), "a run's grant goes on covering what is honest"


def test_rounds_beyond_the_grant_and_rounds_told_twice_are_refused(ground: Ground, site: Site) -> None:
    grant = granted_run(site)
    first = site.update(grant, UPDATE, 30, run="run-1", round=1)
    assert site.gateway().submit("k1", site.seal(first), UPDATE).admitted
    ground.updates.add(first.release)
    for key, (steps, number, rule) in {
        "again": (30, 2, "round_repeated"),
        "fewer": (15, 2, "round_repeated"),
        "back": (45, 1, "replay"),
        "beyond": (75, 3, "claim_not_granted"),
    }.items():
        release = site.update(grant, vector(number), steps, run="run-1", round=number)
        before = len(ground.federation.findings())
        assert not site.gateway().submit(key, site.seal(release), vector(number)).admitted
        assert rule in ground.federation.findings()[before], key


def test_a_second_release_under_one_grant_and_a_grant_that_is_settled_cover_nothing(
    ground: Ground, site: Site, other: Site
) -> None:
    grant = granted(site)
    release = site.release(grant, SET)
    assert site.gateway().submit("k1", site.seal(release), SET).admitted
    ground.honest.add(release.release)
    again = site.release(grant, pictures(1), release=release_id(site.hospital.name, grant, 0))
    with ground.refused("replay"):
        assert not site.gateway().submit("k2", site.seal(again), pictures(1)).admitted
    settled = granted(other)
    word = Settlement(settled, other.hospital.name, "", "ksame", "expired", "restart", 0)
    other.gateway().settle("s", other.seal(word))
    with ground.refused("grant_closed"):
        assert not other.gateway().submit("k", other.seal(other.release(settled, SET)), SET).admitted


def test_a_replayed_envelope_and_a_reused_key_are_refused_from_either_site(
    ground: Ground, site: Site, other: Site
) -> None:
    grant = granted(site)
    envelope = site.seal(site.release(grant, SET))
    ground.honest.add(site.release(grant, SET).release)
    assert site.gateway().submit("k1", envelope, SET).admitted
    size = ground.federation.store.state.size
    assert site.gateway().submit("k1", envelope, SET).admitted, "the same answer"
    assert ground.federation.store.state.size == size
    with ground.refused("replay"):
        assert not site.gateway().submit("k2", envelope, SET).admitted
    with ground.refused("key_reused"):
        assert not site.gateway().reserve(f"reserve-{grant}", site.seal(site.hospital.reservation("other"))).admitted
    with ground.refused("bad_envelope", "bad_envelope"):  # captured, and sent by another
        assert not other.gateway().submit("k1", envelope, SET).admitted
        assert not other.gateway().reserve("k9", site.seal(site.hospital.reservation("other"))).admitted
    assert other.gateway().outcome("submit-k1", bytes(32)) is None, "keys are each site's own"


def test_nobody_speaks_for_another_site_nor_uses_its_grant(ground: Ground, site: Site, other: Site) -> None:
    grant = granted(site)
    with ground.refused("another_site", "another_site", "another_site"):
        gateway = other.gateway()
        assert not gateway.reserve("k1", other.seal(site.hospital.reservation("mine"))).admitted
        assert not gateway.submit("k2", other.seal(site.release(grant, SET)), SET).admitted
        word = Settlement(grant, site.hospital.name, "", "ksame", "expired", "restart", 0)
        assert not gateway.settle("k3", other.seal(word)).admitted
    with ground.refused("grant_of_another"):
        assert not other.gateway().submit("k4", other.seal(other.release(grant, SET)), SET).admitted


def test_a_claim_beyond_the_budget_is_not_granted(ground: Ground, site: Site) -> None:
    dear = site.hospital.reservation("dear", SubsampledGaussian(0.9, 0.6, 4000), "federated", "run-9")
    with ground.refused("budget"):
        assert not site.gateway().reserve("k1", site.seal(dear)).admitted


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda raw: raw.replace(b'"k":5', b'"k":5.0'), "bad_statement"),
        (lambda raw: raw.replace(b'"k":5', b'"k":5,"k":50'), "bad_statement"),
        (lambda raw: raw.replace(b'"k":5', b'"k":1e999'), "bad_statement"),
        (lambda raw: raw.replace(b'"k":5', b'"level":"A","k":5'), "bad_statement"),
        (lambda raw: raw + b" ", "bad_statement"),
        (lambda raw: b"[" * 100_000, "bad_statement"),
        (lambda raw: b"\xff\xfe", "bad_statement"),
        (lambda raw: b"", "bad_statement"),
    ],
)
def test_a_statement_in_any_but_the_one_form_is_refused(ground: Ground, site: Site, change: Any, rule: str) -> None:
    """An extra field, such as a level of one's own, too: what is not in the law's form is no statement."""
    raw = encode(site.hospital.reservation("grant-x", K5))
    with ground.refused(rule):
        gateway = site.gateway()
        assert not gateway.reserve("k", seal(change(raw), PAYLOAD_TYPE, site.home.sign_key())).admitted


def test_an_envelope_of_another_key_type_or_kind_is_refused(ground: Ground, site: Site) -> None:
    good = site.seal(site.hospital.reservation("grant-x", K5))
    approval = Approval(site.hospital.name, "lazaret/coordinator", "s", "enrol", "x", "y")
    with ground.refused("bad_envelope", "bad_envelope", "bad_envelope", "another_site", "bad_statement"):
        gateway = site.gateway()
        assert not gateway.reserve("k1", good.replace(b'"sig":"', b'"sig":"A')).admitted
        assert not gateway.reserve("k2", seal(b"{}", "text/plain", site.home.sign_key())).admitted
        assert not gateway.reserve("k3", b'{"payload": null}').admitted
        assert not gateway.reserve("k4", site.seal(approval)).admitted  # type: ignore[arg-type]
        assert not gateway.settle("k5", good).admitted


@pytest.mark.parametrize("key", ["", "A", "../x", "a b", "k" * 201, "ключ", "a\nb"])
def test_a_key_of_another_form_is_refused(ground: Ground, site: Site, key: str) -> None:
    with ground.refused("bad_key"):
        assert not site.gateway().reserve(key, site.seal(site.hospital.reservation("grant-x"))).admitted
