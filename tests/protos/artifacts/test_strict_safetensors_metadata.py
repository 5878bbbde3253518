"""What a network's file says of itself: known before it is read, so that nobody can say more in it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.strict_safetensors import KEY, MOST, Architecture, canonical, check_told, check_weights

TENSORS: dict[str, np.ndarray[Any, Any]] = {"a.weight": np.ones((2, 3), np.float32), "steps": np.array(4, np.int64)}
SHAPES = {"a.weight": ("F32", (2, 3)), "steps": ("I64", ())}
CONFIG: dict[str, Any] = {"width": 64, "scale": 0.18215, "words": ["none", "edema"]}
TOLD = {"kind": "latent-diffusion", "config": CONFIG, "notes": {}}
TEXT = canonical(TOLD)
ARCHITECTURE = Architecture.of(SHAPES, TEXT)


def file(metadata: dict[str, str] | None) -> BytesSource:
    """As the library writes it."""
    return BytesSource(save(TENSORS, metadata))


def reason(source: BytesSource, architecture: Architecture = ARCHITECTURE) -> str:
    with pytest.raises(ArtifactFormatError) as refusal:
        check_weights(source, architecture)
    return str(refusal.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_the_header_is_the_one_that_the_librarys_writer_makes(config: dict[str, Any]) -> None:
    text = canonical({"kind": "any", "config": config, "notes": {}})
    made = Architecture.of(SHAPES, text)
    source = file({KEY: text})
    check_weights(source, made)
    assert Architecture.shown_by(source) == made
    assert Architecture.parse(made.encode()) == made


def test_what_a_file_says_of_itself_is_what_was_approved_byte_for_byte() -> None:
    check_weights(file({KEY: TEXT}), ARCHITECTURE)
    other = canonical({**TOLD, "config": {**CONFIG, "words": ["none", "Jane Doe"]}})
    noted = canonical({**TOLD, "notes": {"loss": 0.125}})
    for text in (other, noted, TEXT + " ", TEXT.replace('"k', '"\\u006b'), ""):
        assert "something else than what was approved" in reason(file({KEY: text})), text
    assert "something else than what was approved" in reason(file({KEY: TEXT, "more": "x"}))
    assert "something else than what was approved" in reason(file({"other": TEXT}))
    assert "something else than what was approved" in reason(file(None))
    assert "Jane Doe" not in reason(file({KEY: other}))
    assert reason(file({KEY: TEXT}), Architecture.of(SHAPES)) == "the header carries metadata"


def test_a_text_written_in_another_way_is_refused_though_it_means_the_same() -> None:
    raw = save(TENSORS, {KEY: TEXT})
    length = int.from_bytes(raw[:8], "little")
    head = raw[8 : 8 + length].replace(b"diffusion", b"\\u0064iffusion").rstrip()
    head += b" " * (-len(head) % 8)
    same = len(head).to_bytes(8, "little") + head + raw[8 + length :]
    assert json.loads(head) == json.loads(raw[8 : 8 + length])
    assert reason(BytesSource(same)) == "the header is not written in its one form"


def test_the_architecture_is_another_one_when_the_file_says_something_else() -> None:
    other = Architecture.of(SHAPES, canonical({**TOLD, "kind": "autoencoder"}))
    assert len({ARCHITECTURE.digest(), other.digest(), Architecture.of(SHAPES).digest()}) == 3
    assert json.loads(ARCHITECTURE.encode())["told"] == TOLD
    assert b"told" not in Architecture.of(SHAPES).encode(), "what was approved before keeps its bytes"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({**TOLD, "notes": {"by": "somebody"}}, "no notes"),
        ({**TOLD, "notes": []}, "no notes"),
        ({**TOLD, "more": 1}, "kind, its config and empty notes"),
        ({"kind": "any", "config": {}}, "kind, its config and empty notes"),
        ([], "kind, its config and empty notes"),
        ("text", "kind, its config and empty notes"),
        ({**TOLD, "kind": "Jane Doe"}, "short word"),
        ({**TOLD, "kind": 7}, "short word"),
        ({**TOLD, "kind": "x" * 65}, "short word"),
        ({**TOLD, "config": []}, "an object"),
        ({**TOLD, "config": {"text": "x" * MOST}}, "at most 16384"),
    ],
)
def test_only_a_kind_and_a_configuration_are_told(told: Any, why: str) -> None:
    with pytest.raises(ArtifactFormatError, match=why):
        check_told(canonical(told))
    with pytest.raises(ArtifactFormatError, match=why):
        Architecture.of(SHAPES, canonical(told))
    with pytest.raises(ArtifactFormatError, match=why):
        Architecture.shown_by(file({KEY: canonical(told)}))
    with pytest.raises(ArtifactFormatError):
        Architecture.parse(canonical({"tensors": {"a": ["F32", [1]]}, "told": told}).encode())


@pytest.mark.parametrize(
    "text",
    ["{", "null", "nan", '{"a":1,"a":1}', json.dumps(TOLD), canonical(TOLD).replace("0.18215", "0.182150"),
     canonical(TOLD).replace("64", "NaN"), canonical(TOLD).replace("64", "1e999"), "[" * 9000, 7, None, b"{}"],
)  # fmt: skip
def test_a_text_in_another_form_is_refused(text: Any) -> None:
    with pytest.raises(ArtifactFormatError):
        check_told(text)


@pytest.mark.parametrize(
    "header",
    [b"[]", b"7", b"{", b'{"a":7}', b'{"a":{"dtype":"F32"}}', b'{"a":{"dtype":"F32","shape":7}}', b"{}",
     b'{"a":{"dtype":"F32","shape":[1.5]}}', b'{"a":{"dtype":"X","shape":[1]}}', b'{"__metadata__":7}',
     b'{"__metadata__":{},"a":{"dtype":"F32","shape":[1]}}',
     b'{"__metadata__":{"x":"y"},"a":{"dtype":"F32","shape":[1]}}',
     b'{"__metadata__":{"lazaret":""},"a":{"dtype":"F32","shape":[1]}}', b'{"__metadata__":{"lazaret":7}}',
     b'{"a":{"dtype":"F32","shape":[1]},"a":{"dtype":"F32","shape":[2]}}', b"[" * 9000],
)  # fmt: skip
def test_a_header_that_shows_no_architecture_is_refused(header: bytes) -> None:
    with pytest.raises(ArtifactFormatError):
        Architecture.shown_by(BytesSource(len(header).to_bytes(8, "little") + header + bytes(64)))


def test_a_number_that_is_none_has_no_text() -> None:
    for odd in (float("nan"), float("inf"), {1, 2}, b"x"):
        with pytest.raises(ArtifactFormatError, match="not JSON"):
            canonical(odd)
