"""bfloat16: the upper 16 bits of a float32, which numpy has no type for. Its bits are held as uint16.

The numbers of an update are rounded once, where they leave a site. Rounding sees the noised numbers and nothing
else: no patient, no draw, no number beside the one it rounds. So it is post-processing (Dwork & Roth 2014,
proposition 2.1), and the update costs what it cost before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.byte_source import ArtifactFormatError

FLOAT32: Final = "float32"
BFLOAT16: Final = "bfloat16"
TENSOR_TYPES: Final = {BFLOAT16: "BF16", FLOAT32: "F32"}  # of safetensors
PRECISIONS: Final = tuple(TENSOR_TYPES)

Numbers = NDArray[np.float32] | NDArray[np.uint16]
"""(p,) numbers of an update as they travel: float32, or the bits of bfloat16."""

_EXPONENT: Final = 0x7F80  # all of its bits are set in what is infinite or not a number
_TOGETHER: Final = 1 << 18  # numbers at a time: what is computed in between stays small


def rounded(vector: NDArray[np.float32]) -> NDArray[np.uint16]:
    """(p,) finite float32 -> the bits of the nearest bfloat16, ties to even (IEEE 754-2019, 4.3.1).

    A number moves by at most 2^-8 of itself, and below the least normal number by at most 2^-134.

    Raises:
        ArtifactFormatError: a number is not finite, or is not any more: its neighbour would be infinite.
    """
    plain = np.ascontiguousarray(vector, np.float32)
    if not is_finite(plain):
        raise ArtifactFormatError("a value is not finite")
    words, bits = plain.view(np.uint32), np.empty(plain.shape, np.uint16)
    for at in range(0, words.size, _TOGETHER):
        part = words[at : at + _TOGETHER]
        bits[at : at + _TOGETHER] = (part + (0x7FFF + ((part >> 16) & 1))) >> 16
    if not is_finite(bits):
        raise ArtifactFormatError("a value is too large for bfloat16")
    return bits


def is_finite(numbers: Numbers) -> bool:
    """Whether (p,) numbers are all finite; a part at a time, so that no copy of them is made."""
    parts: Iterable[NDArray[Any]] = (numbers[at : at + _TOGETHER] for at in range(0, numbers.size, _TOGETHER))
    if numbers.dtype == np.uint16:
        return all(bool(np.all((part & _EXPONENT) != _EXPONENT)) for part in parts)
    return all(bool(np.isfinite(part).all()) for part in parts)


def widened(numbers: Numbers) -> NDArray[np.float32]:
    """(p,) float32: the same numbers, exactly; float32 as it is, not copied."""
    if numbers.dtype != np.uint16:
        return numbers  # type: ignore[return-value] # the other one of the two
    wide = numbers.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
