"""One flat array in numpy's file form, which is how Flower carries it, made and read with one copy of its numbers.

numpy's own writer and reader take two to three: of a model of 100 million parameters each is 400 MB. No Flower here.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def header(size: int, dtype: np.dtype[Any]) -> bytes:
    """What stands before the numbers of a (size,) array, as numpy 1.14 and later write it (version 1.0)."""
    out = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(out, described)
    return out.getvalue()


def packed(array: NDArray[Any]) -> bytes:
    """The file of a (size,) array: the very bytes of numpy.save."""
    flat = np.ascontiguousarray(array)
    return b"".join([header(flat.size, flat.dtype), flat.data.cast("B") if flat.size else b""])


def view(data: bytes | memoryview, size: int, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """The numbers in a file of :func:`packed`, read-only and not copied; None where it is not exactly one."""
    front = header(size, dtype)
    if len(data) != len(front) + size * dtype.itemsize or data[: len(front)] != front:
        return None
    return np.frombuffer(data, dtype, size, len(front))
