"""bfloat16: rounded as IEEE 754 says, by each number alone; a second implementation is the oracle."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protos.artifacts.bfloat16 import rounded, widened
from protos.artifacts.byte_source import ArtifactFormatError

LARGEST = float(torch.finfo(torch.bfloat16).max)
FLOATS = st.floats(-LARGEST, LARGEST, width=32)
VECTORS = arrays.arrays(np.float32, st.integers(1, 40), elements=FLOATS)


@given(VECTORS)
def test_it_rounds_as_torch_does_and_what_is_rounded_stays(vector: np.ndarray) -> None:
    found = widened(rounded(vector))
    np.testing.assert_array_equal(found, torch.from_numpy(vector).to(torch.bfloat16).to(torch.float32).numpy())
    np.testing.assert_array_equal(widened(rounded(found)), found)


@given(VECTORS)
def test_no_number_moves_by_more_than_its_256th_part(vector: np.ndarray) -> None:
    exact = vector.astype(np.float64)
    assert (np.abs(widened(rounded(vector)) - exact) <= np.maximum(2.0**-8 * np.abs(exact), 2.0**-134)).all()


@given(VECTORS, st.data())
def test_each_number_is_rounded_by_itself(vector: np.ndarray, data: st.DataObject) -> None:
    """No number depends on another one, on their order or on their count, so that nothing is added to any."""
    order = data.draw(st.permutations(range(len(vector))))
    np.testing.assert_array_equal(rounded(vector[order]), rounded(vector)[order])
    at = data.draw(st.integers(0, len(vector) - 1))
    assert rounded(vector[at : at + 1])[0] == rounded(vector)[at]


def test_a_vector_longer_than_one_part_is_rounded_to_its_end() -> None:
    vector = np.random.default_rng(1).standard_normal((1 << 18) + 7).astype(np.float32)
    np.testing.assert_array_equal(
        widened(rounded(vector)), torch.from_numpy(vector).to(torch.bfloat16).to(torch.float32).numpy()
    )


def test_rounding_is_given_the_noised_numbers_and_nothing_else() -> None:
    assert list(inspect.signature(rounded).parameters) == ["vector"]


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF, 0xFF7F8000])
def test_what_is_not_finite_or_would_not_be_is_refused(bits: int) -> None:
    with pytest.raises(ArtifactFormatError, match=r"not finite|too large"):
        rounded(np.array([0x3F800000, bits], np.uint32).view(np.float32))


def test_float32_is_passed_on_as_it_is() -> None:
    vector = np.arange(3, dtype=np.float32)
    assert widened(vector) is vector
