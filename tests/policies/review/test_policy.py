"""Policies: every key required, all problems at once, and the strictest of two admits what both admit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.review.policy import Policy, PolicyError, named, parse, preset, strictest
from tests.support.ledger_world import policy

NAMES = st.frozensets(st.sampled_from(["ksame", "federated", "other"]))
POLICIES = st.builds(
    Policy,
    name=st.sampled_from(["a", "b", "c"]),
    epsilon=st.floats(0.1, 50),
    delta=st.floats(1e-9, 1e-3),
    k_min=st.integers(2, 50),
    l_diversity=st.integers(1, 5),
    max_releases_per_patient=st.integers(1, 5),
    max_artifact_bytes=st.integers(1, 1 << 30),
    max_reid_rate=st.floats(0.001, 1.0),
    mechanisms=NAMES,
    modalities=st.frozensets(st.sampled_from(["MR", "CT", "OP"])),
    artifact_types=st.frozensets(st.sampled_from(["image-set", "update"])),
    components=st.frozensets(st.sampled_from(["public", "dp", "private"])),
    levels=st.frozensets(st.sampled_from(["A", "A*", "B", "C"])),
    approvals=st.frozensets(st.sampled_from(["compliance", "hospital"])),
    readers=st.frozensets(st.sampled_from(["1f" * 32, "2e" * 32, "3d" * 32])),
)


@pytest.mark.parametrize("name", ["internal", "controlled", "public"])
def test_presets_parse_and_grow_stricter(name: str) -> None:
    parsed = parse(preset(name), name)
    assert parsed.name == name
    assert parsed.k_min >= {"internal": 5, "controlled": 11, "public": 20}[name]


def test_all_problems_are_reported_at_once_with_file_and_key() -> None:
    text = policy(delta='"tiny"', k_min=1).replace('name = "internal"', 'nam = "x"')
    with pytest.raises(PolicyError) as caught:
        parse(text, "site.toml")
    for part in ("site.toml", "name: missing", "nam: unknown key", "delta: must be", "k_min: must be"):
        assert part in str(caught.value)


@pytest.mark.parametrize("bad", ["nan", "inf", "-1.0", "0.0", "true", '"8"', "1000.0"])
def test_an_epsilon_that_is_no_budget_is_refused(bad: str) -> None:
    with pytest.raises(PolicyError, match="epsilon"):
        parse(policy(epsilon=bad), "p")


def test_presets_name_no_reader_and_admit_no_noise_that_others_share() -> None:
    for name in ("internal", "controlled", "public"):
        parsed = parse(preset(name), name)
        assert parsed.readers == frozenset()
        assert parsed.levels == {"A", "B"}


def test_readers_are_fingerprints_and_what_both_policies_name() -> None:
    one, two = "1f" * 32, "2e" * 32
    both = parse(policy(readers=f'["{one}", "{two}"]'), "p")
    assert strictest(both, parse(policy(readers=f'["{two}"]'), "q")).readers == {two}
    for bad in ("1f", one.upper(), one + "0", "g" * 64):
        with pytest.raises(PolicyError, match="readers: must hold SHA-256 fingerprints"):
            parse(policy(readers=f'["{bad}"]'), "p")
    with pytest.raises(PolicyError, match="readers: missing"):
        parse("\n".join(line for line in policy().splitlines() if not line.startswith("readers")), "p")
    assert parse(policy(levels='["A", "A*"]'), "p").levels == {"A", "A*"}
    with pytest.raises(PolicyError, match="levels: may hold only"):
        parse(policy(levels='["A**"]'), "p")


def test_a_boolean_is_not_a_k() -> None:
    with pytest.raises(PolicyError, match="k_min"):
        parse(policy(k_min="true"), "p")


@given(POLICIES, POLICIES)
def test_strictest_commutes_and_is_idempotent(a: Policy, b: Policy) -> None:
    assert strictest(a, b) == strictest(b, a)
    assert strictest(a, a) == a


@given(POLICIES, POLICIES, st.integers(2, 60), st.floats(0.01, 60), st.sampled_from(["ksame", "federated", "other"]))
def test_strictest_admits_exactly_what_both_admit(a: Policy, b: Policy, k: int, eps: float, mechanism: str) -> None:
    def admits(p: Policy) -> bool:
        return k >= p.k_min and eps <= p.epsilon and mechanism in p.mechanisms

    assert admits(strictest(a, b)) == (admits(a) and admits(b))


def test_a_policy_is_named_by_its_preset_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(policy(k_min=7))
    assert (named("public"), named(str(file))) == (preset("public"), policy(k_min=7))
    file.write_text(policy(k_min=1))
    with pytest.raises(PolicyError, match=r"own.toml.*k_min"):
        named(str(file))
    file.write_bytes(b"\xff")
    for name in (str(file), str(tmp_path / "none.toml")):
        with pytest.raises(PolicyError, match=r"\A(own|none).toml cannot be read"):
            named(name)
