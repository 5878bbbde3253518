"""NIfTI masks: whole numbers on the grid of a NIfTI volume, named by the site's list of segments, and no words.

A NIfTI file does not say what its numbers mean, nor what it is a mask of. The first is said by ``nifti_values`` of
``[[segment]]`` in ``ingest.toml``, the second by the lists of its folder (:mod:`agent.ingest.nifti_pairs`). What is
kept has a number for each segment and a comment with the site's own names of them.
"""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its header classes
from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.deidentify import nifti
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.segment_list import MOST_VALUE, Segment

NEAR: Final = 0.02  # mm, between a corner's place in a mask and in its volume
_ROUNDED: Final = 1e-5  # that a scaled number may differ from a whole one: slopes are float32


def clean_mask(data: bytes, volume: bytes, segments: Sequence[Segment], only: str, max_pixels: int) -> bytes:
    """A new NIfTI file with the numbers 1 to n of the segments that a mask may have, and their names.

    Args:
        data: the mask, not gzipped.
        volume: the volume that it is of, as :func:`agent.deidentify.nifti.clean` made it.
        segments: the site's list.
        only: the name of the one segment that the mask is of, as 1; "" where ``nifti_values`` say it.
        max_pixels: of either.
    Returns:
        The file; :func:`named_segments` reads it.
    Raises:
        FileRejectedError: ``mask_of_other_shape``, ``mask_of_other_place``, ``mask_of_probabilities`` (a number that
            is not whole), ``segment_not_listed`` (a number that no segment has), or see
            :func:`agent.deidentify.nifti.checked`.
    """
    mask, grid = nifti.checked(data, max_pixels), nifti.checked(volume, max_pixels)
    if mask.stored.ndim != 3 or mask.stored.shape != grid.stored.shape:
        raise FileRejectedError("mask_of_other_shape")
    if not apart(mask.affine, grid.affine, mask.stored.shape) <= NEAR:
        raise FileRejectedError("mask_of_other_place")
    named = {1: only} if only else {value: one.name for one in segments for value in one.nifti_values}
    names = [one.name for one in segments if one.name in named.values()]
    if not names:
        raise FileRejectedError("segment_not_listed")
    values = _whole(mask)
    drawn = np.zeros(values.shape, np.uint8 if len(names) < 256 else np.uint16)
    for value in map(int, np.unique(values)):
        if value not in named and value:
            raise FileRejectedError("segment_not_listed")
        drawn[values == value] = names.index(named[value]) + 1 if value else 0
    words = json.dumps(dict(enumerate(names, 1)), separators=(",", ":")).encode()
    return nifti.written(mask, drawn, (1.0, 0.0), words)


def _whole(mask: nifti.CheckedNifti) -> NDArray[np.uint16]:
    """The numbers that the file means, all of which are whole."""
    slope, intercept = mask.scale
    values = mask.stored if (slope, intercept) == (1.0, 0.0) else mask.stored * slope + intercept
    if values.dtype.kind == "f":
        whole = np.rint(values)
        if not float(np.abs(values - whole).max()) <= _ROUNDED:
            raise FileRejectedError("mask_of_probabilities")
        values = whole
    if not 0 <= values.min() <= values.max() <= MOST_VALUE:
        raise FileRejectedError("segment_not_listed")
    return values.astype(np.uint16)


def named_segments(payload: bytes) -> dict[int, str]:
    """The names of a mask's segments by their numbers.

    Raises:
        ValueError: the file is not one of :func:`clean_mask`.
    """
    kind = nifti.checked(payload, len(payload)).kind
    extensions = kind.header_class.from_fileobj(io.BytesIO(payload)).extensions
    if len(extensions) != 1:
        raise ValueError("a mask has one comment, with the names of its segments")
    return {int(number): str(name) for number, name in json.loads(extensions[0].get_content()).items()}


def apart(one: NDArray[np.float64], other: NDArray[np.float64], shape: Sequence[int]) -> float:
    """How far two grids of one shape lie apart at most, in mm: at a corner, since both are affine."""
    corners = np.array([(*corner, 1.0) for corner in itertools.product(*((0, side - 1) for side in shape))])
    return float(np.linalg.norm(((one - other) @ corners.T)[:3], axis=0).max())
