"""A file of public weights is the one that the task names, of this network, in its one form; or it is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from agent.models.networks.public_weights import read_weights
from agent.models.weights import WeightsError
from protos.artifacts.strict_safetensors import pack_weights

SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (3, 2), "a.bias": (3,), "head.weight": (2, 3)}
HEAD = frozenset({"head.weight"})


def _arrays(**changed: tuple[int, ...]) -> dict[str, np.ndarray]:
    shapes = {**SHAPES, **changed}
    return {name: np.arange(np.prod(s), dtype=np.float32).reshape(s) for name, s in shapes.items() if s}


def _read(raw: bytes, outputs: frozenset[str] = frozenset(), digest: str = "") -> dict[str, torch.Tensor]:
    return read_weights(digest or hashlib.sha256(raw).hexdigest(), lambda _: raw, SHAPES, outputs)


def test_a_file_is_read_from_its_bytes_and_from_its_path(tmp_path: Path) -> None:
    raw = pack_weights(_arrays())
    (tmp_path / "net").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    for found in (_read(raw), read_weights(digest, lambda _: tmp_path / "net", SHAPES, frozenset())):
        assert {name: tuple(t.shape) for name, t in found.items()} == SHAPES
        assert torch.equal(found["a.weight"], torch.arange(6.0).view(3, 2))


def test_a_head_that_is_not_taken_may_have_another_shape_or_be_missing() -> None:
    for head in ((7, 3), ()):
        raw = pack_weights(_arrays(**{"head.weight": head}))
        assert _read(raw, HEAD).keys() == {"a.weight", "a.bias"}
        with pytest.raises(WeightsError, match="of another network"):
            _read(raw)


def _infinite() -> bytes:
    raw = bytearray(pack_weights(_arrays()))
    raw[-4:] = np.float32(np.inf).tobytes()
    return bytes(raw)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: pack_weights(_arrays(**{"a.weight": (2, 3)})), r"a.weight has the shape \[2, 3\] of F32, and must"),
        (lambda: pack_weights(_arrays(**{"b": (2,)})), "1 unknown; b is not in the network"),
        (lambda: pack_weights(_arrays(**{"a.bias": ()})), "1 tensors are missing, 0 unknown; a.bias is missing"),
        (lambda: pack_weights({n: a.astype(np.float64) for n, a in _arrays().items()}), "of F64, and must"),
        (lambda: pack_weights(_arrays()) + b"x", "bytes follow the last tensor"),
        (lambda: pack_weights(_arrays())[:-1], "the file ends early"),
        (_infinite, "a value is not finite"),
        (lambda: b"", "the file ends early"),
        (lambda: b"PK\x03\x04" + bytes(100), "the header's length is out of bounds"),
        (lambda: safetensors.torch.save({"a": torch.ones(1)}, {"format": "pt"}), "of metadata the header may carry"),
    ],
)
def test_another_file_is_refused_with_its_reason(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        _read(make())


def test_the_right_tensors_under_another_digest_are_refused() -> None:
    with pytest.raises(WeightsError, match="does not have the SHA-256 0000"):
        _read(pack_weights(_arrays()), digest="0" * 64)


def test_a_file_of_another_network_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte that a header announces: nothing of it comes into memory."""
    header = pack_weights(_arrays())[8:].split(b"}}")[0] + b"}}"
    told = header.replace(b'"shape":[3,2],"data_offsets":[', b'"shape":[300000000000,2],"data_offsets":[')
    assert told != header
    with (path := tmp_path / "net").open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.truncate(1 << 40)
    with pytest.raises(WeightsError):
        read_weights("0" * 64, lambda _: path, SHAPES, frozenset())


def test_a_file_that_is_not_there_is_told_without_its_place(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file") as refused:
        read_weights("0" * 64, lambda _: tmp_path / "secret-name", SHAPES, frozenset())
    assert "secret-name" not in str(refused.value)
