"""Ledger entries have one encoding: ours agrees with cbor2's canonical one, and nothing else is accepted."""

from __future__ import annotations

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ledger.cbor import EntryEncodingError, decode, encode

LEAVES = st.integers(0, (1 << 63) - 1) | st.binary(max_size=300) | st.text(max_size=300)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_decoding_gives_back_what_was_encoded(value: object) -> None:
    assert decode(encode(value)) == value  # type: ignore[arg-type]


@given(VALUES)
def test_the_encoding_is_cbor2s_canonical_one(value: object) -> None:
    assert cbor2.loads(encode(value)) == value  # type: ignore[arg-type]
    if not isinstance(value, dict):
        return
    assert len(encode(value)) == len(cbor2.dumps(value, canonical=True))


@given(st.binary(max_size=60))
def test_any_accepted_bytes_encode_back_to_themselves(raw: bytes) -> None:
    try:
        value = decode(raw)
    except EntryEncodingError:
        return
    assert encode(value) == raw


@pytest.mark.parametrize(
    "raw",
    [
     b"\x18\x17", b"\x19\x00\xff", b"\x9f\xff", b"\xa2\x61b\x01\x61a\x01", b"\xa2\x61a\x01\x61a\x02",
     b"\xf5", b"\xf6",
     b"\x20", b"\xfb\x3f\xf0\0\0\0\0\0\0", b"\x01\x01", b"", b"\x62\xff\xfe", b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff",
     b"\x81" * 50 + b"\x01", b"\xa1\x01\x01", b"\x1b\x80\0\0\0\0\0\0\0"],
)  # fmt: skip
def test_other_encodings_are_refused(raw: bytes) -> None:
    with pytest.raises(EntryEncodingError):
        decode(raw)


@pytest.mark.parametrize("value", [-1, 1 << 63, True, None, 1.0, {1: 2}, [None]])
def test_values_without_a_place_are_refused(value: object) -> None:
    with pytest.raises(EntryEncodingError):
        encode(value)  # type: ignore[arg-type]
