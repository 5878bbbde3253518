"""A flat array is carried in the very bytes of numpy, and read where it lies."""

from __future__ import annotations

import io

import numpy as np
import pytest

from protos.federation.flat_arrays import packed, view


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("size", [0, 1, 7, 100_000])
def test_the_bytes_are_those_of_numpy_and_come_back_without_a_copy(size: int, dtype: type[np.generic]) -> None:
    array = np.arange(size).astype(dtype)
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    assert packed(array) == out.getvalue()
    read = view(packed(array), size, np.dtype(dtype))
    assert read is not None
    assert read.tolist() == array.tolist()
    assert not read.flags.writeable
    assert not read.flags.owndata


def test_what_is_not_exactly_that_is_not_read_so() -> None:
    data = packed(np.arange(4, dtype=np.float32))
    kind = np.dtype(np.float32)
    for wrong in (
        data[:-1],
        data + b"\0",
        b"\0" + data[1:],
        packed(np.arange(4.0)),
        packed(np.arange(5, dtype="f4")),
    ):
        assert view(wrong, 4, kind) is None
