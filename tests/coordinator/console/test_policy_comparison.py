"""Policies side by side: whose word binds, and which way an amendment went."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.console.policy_comparison import KEYS, changes, compare, shown, size_of
from policies.review.policy import Policy, parse, preset, strictest

INTERNAL, PUBLIC = (parse(preset(name), name) for name in ("internal", "public"))


def test_every_key_of_a_policy_is_shown_and_has_words() -> None:
    assert set(KEYS) == {f.name for f in fields(Policy)} - {"name"}
    assert "one patient" in KEYS["epsilon"][1]


@given(st.sampled_from([INTERNAL, PUBLIC]), st.floats(0.1, 50), st.integers(2, 99), st.booleans())
@settings(max_examples=50, deadline=None)
def test_what_binds_is_the_strictest_of_both(federation: Policy, epsilon: float, k: int, asks: bool) -> None:
    own = replace(INTERNAL, epsilon=epsilon, k_min=k, approvals=frozenset({"hospital"} if asks else ()))
    both = strictest(federation, own)
    for row in compare(federation, own):
        assert row.binding == shown(row.key, getattr(both, row.key))
        said = {"federation": row.federation, "site": row.own}.get(row.binds)
        assert said in (None, row.binding)


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({"epsilon": 1.0}, "tighter"),
        ({"epsilon": 50.0}, "looser"),
        ({"k_min": 50}, "tighter"),
        ({"max_reid_rate": 0.9}, "looser"),
        ({"approvals": frozenset({"hospital"})}, "tighter"),
        ({"levels": frozenset({"A", "C"})}, "other"),
        ({"levels": frozenset({"A"})}, "tighter"),
    ],
)
def test_an_amendment_goes_towards_less_or_towards_more(change: dict[str, object], way: str) -> None:
    assert [(c.key, c.way) for c in changes(INTERNAL, replace(INTERNAL, **change))] == [(next(iter(change)), way)]  # type: ignore[arg-type]


def test_a_policy_that_is_the_same_has_changed_nothing() -> None:
    assert changes(INTERNAL, replace(INTERNAL, name="another")) == ()


def test_sizes_are_said_in_units_that_people_read() -> None:
    assert [size_of(n) for n in (5, 2048, 16 << 20, 3 << 30)] == ["5 bytes", "2 KiB", "16 MiB", "3 GiB"]
