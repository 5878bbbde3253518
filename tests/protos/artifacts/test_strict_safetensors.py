"""The strict safetensors profile against the library's own writer, and against what the library lets through."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from protos.artifacts.byte_source import ArtifactFormatError, BytesSource, FileSource
from protos.artifacts.strict_safetensors import (
    WIDTHS,
    Architecture,
    check_ring,
    check_vector,
    check_weights,
    pack_ring,
    pack_weights,
    unpack_ring,
    unpack_weights,
)

LIBRARY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64", "I64": "int64",
    "U64": "uint64",
}  # fmt: skip
NAMES = st.text("abcXYZ019_.-:/", min_size=1, max_size=12)
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
ARCHITECTURES = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(WIDTHS)), SHAPES), min_size=1, max_size=12)
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "a.weight": np.ones((2, 3), np.float32),
    "b": np.zeros(3, np.float32),
    "steps": np.array(4, np.int64),
}
ARCHITECTURE = Architecture.of({"a.weight": ("F32", (2, 3)), "b": ("F32", (3,)), "steps": ("I64", ())})


def framed(header: dict[str, Any] | str | bytes, body: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + body


def parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def reason(raw: bytes, architecture: Architecture = ARCHITECTURE) -> str:
    with pytest.raises(ArtifactFormatError) as refusal:
        check_weights(BytesSource(raw), architecture)
    return str(refusal.value)


@settings(max_examples=300)
@given(ARCHITECTURES)
def test_the_header_is_the_one_that_the_librarys_writer_makes(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    architecture = Architecture.of(tensors)
    zeros = np.zeros(max(t.nbytes for t in architecture.tensors), np.uint8)
    entries = {
        t.name: safetensors.TensorSpec(
            dtype=LIBRARY[t.dtype], shape=t.shape, data_ptr=zeros.ctypes.data, data_len=t.nbytes
        )
        for t in architecture.tensors
    }
    raw = bytes(safetensors.serialize(entries, None))
    assert raw == architecture.header() + bytes(architecture.nbytes)
    check_weights(BytesSource(raw), architecture)
    assert Architecture.parse(architecture.encode()) == architecture


@given(
    st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from(["?", "u1", "i1", "i2", "u2", "f2", "i4", "u4", "f4", "f8", "i8", "u8"]), SHAPES),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32),
)
def test_arrays_are_packed_as_the_library_packs_them_and_read_back(
    drawn: dict[str, tuple[str, tuple[int, ...]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors = {name: np.asarray(rng.random(shape) * 100).astype(dtype) for name, (dtype, shape) in drawn.items()}
    raw = pack_weights(tensors)
    assert raw == save(tensors)
    dtypes = {np.dtype(c): n for n, c in zip(["BOOL", "F16"], ["?", "f2"], strict=True)}
    names = {n: dtypes.get(a.dtype, f"{a.dtype.kind.upper()}{a.dtype.itemsize * 8}") for n, a in tensors.items()}
    read = unpack_weights(raw, Architecture.of({n: (names[n], a.shape) for n, a in tensors.items()}))
    assert all(
        (read[n] == a).all() and read[n].dtype == a.dtype and read[n].shape == a.shape for n, a in tensors.items()
    )


def test_a_model_of_its_architecture_passes() -> None:
    check_weights(BytesSource(save(TENSORS)), ARCHITECTURE)


def test_duplicate_keys_which_the_library_accepts_are_refused() -> None:
    header, body = parts(save(TENSORS))
    text = json.dumps(header, separators=(",", ":"))
    twice = framed(
        text[:-1] + "," + json.dumps("b") + ":" + json.dumps(header["b"], separators=(",", ":")) + "}", body
    )
    assert set(load(twice)) == set(TENSORS)  # the differential that this refusal closes
    assert reason(twice) == "the header has a key twice"
    inner = text.replace('"dtype":"I64"', '"dtype":"I64","dtype":"I64"')
    assert reason(framed(inner, body)) == "the header has a key twice"


def test_metadata_is_refused_however_large() -> None:
    assert reason(save(TENSORS, metadata={"note": "x"})) == "the header carries metadata"
    assert reason(save(TENSORS, metadata={"note": "x" * 1_000_000})) == "the header carries metadata"


def test_renamed_missing_and_additional_tensors_are_refused_without_quoting_the_file() -> None:
    renamed = {**TENSORS, "Jane Doe": TENSORS["b"]}
    del renamed["b"]
    assert reason(save(renamed)) == "1 tensors are missing, b first; 1 have other names"
    assert reason(save({**TENSORS, "Jane Doe": np.zeros(1)})) == "1 tensors more than the architecture has"


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("b", np.zeros(3, np.float64), "b must have the type F32"),
        ("b", np.zeros(4, np.float32), "b must have the shape [3]"),
        ("b", np.zeros((1, 3), np.float32), "b must have the shape [3]"),
        ("steps", np.array([4], np.int64), "steps must have the shape []"),
    ],
)
def test_another_type_or_shape_is_refused(name: str, array: np.ndarray[Any, Any], why: str) -> None:
    assert reason(save({**TENSORS, name: array})) == why


def test_holes_overlaps_and_other_orders_are_refused() -> None:
    header, body = parts(save(TENSORS))
    moved = json.loads(json.dumps(header))
    moved["b"]["data_offsets"] = [n + 4 for n in moved["b"]["data_offsets"]]
    assert "out of place" in reason(framed(moved, body[:-12] + bytes(4) + body[-12:]))
    moved["b"]["data_offsets"] = moved["a.weight"]["data_offsets"][:1] * 2
    assert "out of place" in reason(framed(moved, body))
    assert reason(framed(dict(reversed(header.items())), body)) == "the header is not written in its one form"
    assert reason(framed(json.dumps(header), body)) == "the header is not written in its one form"


def test_bytes_before_behind_or_missing_are_refused() -> None:
    raw = save(TENSORS)
    assert reason(raw + b"\0") == "bytes follow the last tensor"
    assert reason(raw[:-1]) == "the file ends early"
    assert reason(b"") == "the file ends early"
    assert reason((1 << 40).to_bytes(8, "little") + raw[8:]) == "the header's length is out of bounds"
    assert reason(framed(b"\xff{", b"")) == "the header is not JSON"
    assert reason(framed(b"[" * 100_000, b"")) == "the header is not JSON"
    assert reason(framed(b"9" * 5_000, b"")) == "the header is not JSON"
    assert reason(framed("[1]", b"")) == "the header is not a JSON object"


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("F16", 0x7C01), ("F16", 0xFC00), ("BF16", 0x7F81), ("BF16", 0xFF80),
        ("F32", 0x7FC12345), ("F32", 0xFF800000),
        ("F64", 0x7FF8_4A61_6E65_2044), ("F64", 0xFFF0_0000_0000_0000),
    ],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_refused_in_every_type(dtype: str, bits: int) -> None:
    architecture = Architecture.of({"w": (dtype, (3,))})
    width = WIDTHS[dtype]
    for place in range(3):
        values = [bytes(width)] * 3
        values[place] = bits.to_bytes(width, "little")
        assert reason(architecture.header() + b"".join(values), architecture) == "a value is not finite"
    check_weights(BytesSource(architecture.header() + bytes(3 * width)), architecture)


def test_a_truth_value_has_one_bit() -> None:
    architecture = Architecture.of({"w": ("BOOL", (3,))})
    check_weights(BytesSource(architecture.header() + b"\0\1\0"), architecture)
    assert reason(architecture.header() + b"\0\2\0", architecture) == "a truth value is neither 0 nor 1"


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_of_a_header_is_found(data: st.DataObject) -> None:
    raw = bytearray(save(TENSORS))
    raw[data.draw(st.integers(0, len(ARCHITECTURE.header()) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ArtifactFormatError):
        check_weights(BytesSource(bytes(raw)), ARCHITECTURE)


@given(st.binary(max_size=300))
def test_noise_is_a_bad_artifact_and_nothing_else(noise: bytes) -> None:
    for raw in (noise, framed(noise, b"")):
        with pytest.raises(ArtifactFormatError):
            check_weights(BytesSource(raw), ARCHITECTURE)
        with pytest.raises(ArtifactFormatError):
            check_vector(BytesSource(raw))
        with pytest.raises(ArtifactFormatError):
            check_ring(BytesSource(raw))
        with pytest.raises(ArtifactFormatError):
            Architecture.parse(noise)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"__metadata__": ("F32", (1,))},
        {'quote"': ("F32", (1,))},
        {"": ("F32", (1,))},
        {"a": ("F8_E4M3", (1,))},
        {"a": ("F32", (0,))},
        {"a": ("F32", (-1,))},
        {"a": ("F32", (1.0,))},
        {"a": ("F32", (True,))},
        {"a": ("F32", (1 << 40, 1 << 40))},
        {"a": ("F32", (1,) * 9)},
    ],
)
def test_an_architecture_out_of_bounds_cannot_be_built(tensors: dict[str, Any]) -> None:
    with pytest.raises(ArtifactFormatError):
        Architecture.of(tensors)


def test_an_architecture_has_one_encoding() -> None:
    raw = ARCHITECTURE.encode()
    assert Architecture.parse(raw).digest() == ARCHITECTURE.digest()
    twice = raw.replace(b'"b":', b'"b":["F32",[3]],"b":')
    for other in (raw + b" ", twice, raw.replace(b"[3]", b"[03]"), b"{}", b"[]", b'{"tensors":{"a":["F32",[1.0]]}}'):
        with pytest.raises(ArtifactFormatError):
            Architecture.parse(other)


def test_a_vectors_length_is_read_and_compared() -> None:
    for size in (1, 9, 10, 99, 12_345):
        raw = save({"flat": np.ones(size, np.float32)})
        assert check_vector(BytesSource(raw)) == check_vector(BytesSource(raw), size) == size
        with pytest.raises(ArtifactFormatError, match=f"must have {size + 1} values"):
            check_vector(BytesSource(raw), size + 1)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_ring_vector_may_hold_every_value(dtype: Any) -> None:
    vector: Any = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, dtype, endpoint=True)
    vector[:2] = 0, np.iinfo(dtype).max
    raw = pack_ring(vector)
    assert raw == save({"ring": vector})
    assert (unpack_ring(raw) == vector).all()
    for wrong in (raw[:-1], raw + b"\0", save({"flat": vector}), save({"ring": vector.astype(np.int64)})):
        with pytest.raises(ArtifactFormatError):
            unpack_ring(wrong)
    with pytest.raises(ArtifactFormatError):
        pack_ring(vector.reshape(10, 100))


def test_a_large_file_is_read_with_a_few_blocks_of_memory(tmp_path: Path) -> None:
    """256 MiB, sparse on disk."""
    architecture = Architecture.of({"w": ("F32", (1 << 26,)), "v": ("BF16", (5,))})
    path = tmp_path / "model"
    with path.open("wb") as out:
        out.write(architecture.header())
        out.truncate(len(architecture.header()) + architecture.nbytes)
    with path.open("rb") as opened:
        tracemalloc.start()
        check_weights(FileSource.of(opened.fileno()), architecture)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 32 << 20
