"""The byte forms of the artifacts that are held in memory: a flat parameter vector, and a small image set.

A vector is a safetensors file with the one tensor ``flat``, float32 (``protos.artifacts.strict_safetensors``), or in
an update, where the run says so, bfloat16 (``protos.artifacts.bfloat16``); an image set is a shard of PNG
(``protos.artifacts.shards``). Reading is strict: what does not encode back to the same bytes is refused, so no form
has room for a second message. Files that may be large are read with ``protos.artifacts.inspection``, in a sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.bfloat16 import TENSOR_TYPES, Numbers
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.shards import Png, pack_shard, read_images
from protos.artifacts.strict_safetensors import (
    check_numbers,
    check_vector,
    pack_numbers,
    parts_of_numbers,
    view_of_vector,
)

__all__ = [
    "ArtifactFormatError",
    "pack_images",
    "pack_update",
    "pack_vector",
    "unpack_images",
    "unpack_update",
    "unpack_vector",
    "vector_parts",
]


def pack_vector(vector: NDArray[np.float32]) -> bytes:
    """A (p,) float32 vector as safetensors.

    Raises:
        ArtifactFormatError: another shape, an empty vector, or a value that is not finite.
    """
    return pack_update(np.asarray(vector, np.float32))


def vector_parts(vector: NDArray[np.float32]) -> tuple[bytes, memoryview]:
    """The file of :func:`pack_vector` in two parts, of which the second are the numbers where they lie.

    Raises:
        ArtifactFormatError: see :func:`pack_vector`.
    """
    if vector.ndim != 1 or vector.dtype != np.float32:
        raise ArtifactFormatError("a vector has one axis, of float32")
    return parts_of_numbers(vector)


def unpack_vector(raw: bytes) -> NDArray[np.float32]:
    """The (p,) float32 vector of :func:`pack_vector`, a read-only view of ``raw``.

    Raises:
        ArtifactFormatError: other tensors, types or shapes, metadata, non-finite values, or another encoding.
    """
    return view_of_vector(raw, "F32", check_vector(BytesSource(raw)))


def pack_update(numbers: Numbers) -> bytes:
    """The (p,) numbers of an update as safetensors: float32, or the bits of bfloat16.

    Raises:
        ArtifactFormatError: another shape, an empty vector, or a value that is not finite.
    """
    if numbers.ndim != 1:
        raise ArtifactFormatError("a vector has one axis")
    return pack_numbers(numbers)


def unpack_update(raw: bytes, precision: str = "") -> Numbers:
    """The (p,) numbers of :func:`pack_update`, a read-only view of ``raw``; of any precision, or of this one.

    Raises:
        ArtifactFormatError: see :func:`unpack_vector`.
    """
    dtypes = (TENSOR_TYPES[precision],) if precision else tuple(TENSOR_TYPES.values())
    return view_of_vector(raw, *check_numbers(BytesSource(raw), None, dtypes))


def pack_images(images: NDArray[np.uint8], labels: Sequence[str]) -> bytes:
    """(m, h, w) grey or (m, h, w, 3) RGB uint8 images with one label each, as a shard.

    Raises:
        ArtifactFormatError: see :func:`protos.artifacts.shards.pack_shard`.
    """
    return pack_shard(list(images), labels, Png())


def unpack_images(raw: bytes) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The (m, h, w[, 3]) images and the labels of :func:`pack_images`.

    Raises:
        ArtifactFormatError: another member, type, size or encoding; an image too large; no image at all.
    """
    return read_images(BytesSource(raw))
