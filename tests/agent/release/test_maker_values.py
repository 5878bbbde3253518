"""What a making answers: every result goes through unchanged, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.domain import Clusters, SyntheticSet
from agent.mechanisms.registry import MECHANISMS
from agent.release.maker_values import Result, pack

KNOWN = Result.of(MECHANISMS["ksame"].run)  # type: ignore[union-attr]
SET = SyntheticSet(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), ("a", "b"))
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
KEYS = st.text() | INTEGERS | st.booleans()
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda held: st.lists(held) | st.lists(held).map(tuple) | st.dictionaries(KEYS, held) | st.frozensets(st.text()),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = Result().unpack(*pack(value))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, frozenset | dict | list | tuple)


@pytest.mark.parametrize("kind", ["u1", "<i8", "<f4", "<f8", "?", "<U7", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_come_back_with_their_type_and_shape(kind: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, kind)[()]  # of no sides: a number
    back = Result().unpack(*pack((array, b"between", array)))
    assert [one.dtype for one in (back[0], back[2])] == [array.dtype] * 2
    assert np.shape(back[0]) == shape
    assert np.array_equal(back[0], array)
    assert np.array_equal(back[2], array)


def test_a_result_is_built_by_its_own_classes() -> None:
    made, clusters = KNOWN.unpack(*pack((SET, Clusters((("p", "q"),)))))
    assert isinstance(made, SyntheticSet)
    assert np.array_equal(made.images, SET.images)
    assert clusters == Clusters((("p", "q"),))


@pytest.mark.parametrize("name", [n for n, known in MECHANISMS.items() if hasattr(known, "run") and n != "remodel"])
def test_the_classes_of_every_mechanisms_result_are_known(name: str) -> None:
    found = Result.of(MECHANISMS[name].run).classes  # type: ignore[union-attr]
    assert ("TrainedModel" if name == "model" else "SyntheticSet") in found
    assert ("Review" in found) == name.startswith("distill")


@dataclass(frozen=True)
class Other:
    held: int


@pytest.mark.parametrize(
    ("tree", "data"),
    [
        (pack(Other(1))[0], b""),  # a class that this mechanism does not promise
        (json.dumps({"class": "SyntheticSet", "fields": {"images": 1, "labels": 2}}), b""),  # its own check
        (json.dumps({"class": "SyntheticSet", "fields": {"other": 1}}), b""),
        (json.dumps({"class": "Clusters", "fields": {"members": {"tuple": [{"tuple": ["p"]}] * 2}}}), b""),
        (json.dumps({"array": "|O", "shape": [1]}), bytes(8)),  # addresses of objects
        (json.dumps({"array": "V8", "shape": [1]}), bytes(8)),
        (json.dumps({"array": "i4,f4", "shape": [1]}), bytes(8)),
        (json.dumps({"array": "<f8", "shape": [2]}), bytes(8)),  # more than there is
        (json.dumps({"array": "<f8", "shape": [-1]}), bytes(8)),
        (json.dumps({"array": "<f8", "shape": [True]}), bytes(8)),
        (json.dumps({"array": "<f8", "shape": [10**30]}), bytes(8)),
        (json.dumps({"array": "nonsense", "shape": []}), b""),
        (json.dumps({"array": "( ,)f4", "shape": []}), b""),  # numpy evaluates it
        (json.dumps({"array": "<f4\n", "shape": [1]}), bytes(4)),
        (json.dumps({"array": "<f16", "shape": [1]}), bytes(16)),
        (json.dumps({"array": "<U1", "shape": []}), b"\xff\xff\xff\x7f"),  # no character
        (json.dumps({"array": ">U1", "shape": [1]}), b"\x7f\xff\xff\xff"),
        (json.dumps({"array": "<U1", "shape": [1]}), b"\x00\xd8\x00\x00"),
        (json.dumps("\ud800"), b""),
        (json.dumps(1 << 63), b""),
        (json.dumps({"bytes": -1}), bytes(8)),
        (json.dumps({"set": [1]}), b""),
        (json.dumps({"mapping": [[{"list": []}, 1]]}), b""),
        (json.dumps({"mapping": [1]}), b""),
        (json.dumps([1]), b""),
        (json.dumps({"tuple": 1}), b""),
        ("[" * 100_000, b""),
        ("nonsense", b""),
        (json.dumps(1), b"more than was told"),
    ],
)
def test_what_is_no_result_is_refused(tree: str | bytes, data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several layers
        Result(Any, KNOWN.classes).unpack(tree.encode() if isinstance(tree, str) else tree, data)


SHAPES = st.just([]) | st.lists(st.integers(-1, 4) | st.integers() | st.booleans(), max_size=3) | st.just([1] * 70)
NAMES = st.sampled_from(["<f4", "|u1", "<U1", ">U1", "|O", "( ,)f4", "", "U99999999999"]) | st.text(max_size=8)
ARRAYS = st.builds(lambda name, shape: {"array": name, "shape": shape}, NAMES, SHAPES)
KINDS = st.sampled_from(["tuple", "list", "mapping", "frozenset"])
TREES = ARRAYS | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda held: (
        st.lists(held)
        | st.builds(lambda kind, parts: {kind: parts}, KINDS, held)
        | st.builds(lambda count: {"bytes": count}, held)
        | st.builds(lambda a, b: {"class": "SyntheticSet", "fields": {"images": a, "labels": b}}, held | ARRAYS, held)
        | st.builds(lambda members: {"class": "Clusters", "fields": {"members": members}}, held)
    ),
    max_leaves=10,
)


@given(
    TREES.map(lambda tree: json.dumps(tree).encode()) | st.binary(), st.just(b"") | st.just(b"\xff" * 4) | st.binary()
)
def test_whatever_is_answered_is_a_value_or_refused(tree: bytes, data: bytes) -> None:
    for result in (KNOWN, Result(Any, KNOWN.classes)):
        try:
            back = result.unpack(tree, data)
        except ValueError:
            continue
        repr(back).encode()
        json.loads(pack(back)[0])


@dataclass(frozen=True)
class Held:
    number: int
    share: float = 0.5
    sure: bool = True
    name: str | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    pair: tuple[int, float] = (1, 2.0)
    names: tuple[str, ...] = ()
    some: frozenset[str] = frozenset()
    picture: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(2, np.uint8))
    any_array: NDArray[Any] = field(default_factory=lambda: np.zeros(2))
    way: Literal["a", "b"] = "a"


def held() -> Held:
    raise NotImplementedError


def test_every_field_and_the_result_are_of_the_type_that_is_annotated() -> None:
    result = Result.of(held)
    good = [Held(1), Held(np.int64(2), np.float32(1.0), np.bool_(1)), Held(3, 4, shares={"a": 1}, names=("x", "y"))]
    for one in good:
        assert result.unpack(*pack(one)) is not None
    bad = {
        "number": [1.0, True, "1", None],
        "share": ["0.5", False, None],
        "sure": [1, "true"],
        "name": [1, b"name", "two\nlines", "\x1b[2J"],
        "shares": [{"a": "<script>"}, {1: 1.0}, ()],
        "pair": [(1,), (1, "2"), (1, 2.0, 3)],
        "names": [("a", 1), ["a"]],
        "some": [frozenset({1}), ("a",)],
        "picture": [np.zeros(2), [0, 0], None],
        "any_array": [1.0],
        "way": ["c", 1],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match="not a result"):
                result.unpack(*pack(replace(good[0], **{name: value})))
    for other in (1, None, (good[0],)):
        with pytest.raises(ValueError, match="not a result"):
            result.unpack(*pack(other))


def test_what_cannot_be_told_is_not_told() -> None:
    for value in (object(), np.array([object()]), lambda: None):
        with pytest.raises(TypeError):
            pack(value)
