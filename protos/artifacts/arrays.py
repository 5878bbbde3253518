"""The byte forms of the artifacts that are held in memory: a flat parameter vector, and a small image set.

A vector is a safetensors file with the one tensor ``flat``, float32 (``protos.artifacts.strict_safetensors``); an
image set is a shard of PNG (``protos.artifacts.shards``). Reading is strict: what does not encode back to the same
bytes is refused, so neither form has room for a second message. Files that may be large are read with
``protos.artifacts.inspection``, in a sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.shards import Png, pack_shard, read_images
from protos.artifacts.strict_safetensors import check_vector, pack_weights, unpack_weights, vector_architecture

__all__ = ["ArtifactFormatError", "pack_images", "pack_vector", "unpack_images", "unpack_vector"]


def pack_vector(vector: NDArray[np.float32]) -> bytes:
    """A (p,) float32 vector as safetensors.

    Raises:
        ArtifactFormatError: another shape, an empty vector, or a value that is not finite.
    """
    if vector.ndim != 1:
        raise ArtifactFormatError("a vector has one axis")
    return pack_weights({"flat": np.ascontiguousarray(vector, dtype=np.float32)})


def unpack_vector(raw: bytes) -> NDArray[np.float32]:
    """The (p,) float32 vector of :func:`pack_vector`, a read-only view of ``raw``.

    Raises:
        ArtifactFormatError: other tensors, types or shapes, metadata, non-finite values, or another encoding.
    """
    size = check_vector(BytesSource(raw))
    return unpack_weights(raw, vector_architecture(size))["flat"]


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
