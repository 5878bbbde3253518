"""The entry point of the artifact parsers: from a type, the expectations, and a file, to plain facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from protos.artifacts.byte_source import ArtifactFormatError, ByteSource
from protos.artifacts.shards import Contents, check_earlier_shard, check_shard
from protos.artifacts.strict_safetensors import Architecture, check_numbers, check_ring, check_vector, check_weights

MAX_KINDS: Final = 256  # of labels in a set: more would be room for a text beside every image


def check(source: ByteSource, artifact_type: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a file that is not an artifact of its type, in its one form; returns what it holds.

    ======== =============== ===================================== ==========================================
    type                     expected                              facts
    ======================== ===================================== ==========================================
    ``image-set``            ``earlier``: true, or nothing         form, count, shape, labels: {label: count}
    ``volume-set``           nothing                               the same
    ``update``               ``size``: int, or nothing             size
    ``masked-update``        ``size``, ``dtype``, or nothing       size, dtype
    ``evaluation``           ``size``: int, or nothing             size
    ``masked-evaluation``    ``size``, ``dtype``, or nothing       size, dtype
    ``model``                ``architecture``: canonical JSON      digest, size (bytes of values)
    ======================== ===================================== ==========================================

    ``earlier``: the set is of a site that speaks a protocol of before images were compressed, and none of it is.

    Raises:
        ArtifactFormatError: with the first reason found; also for an unknown type, or an expectation that is not one.
    """
    if artifact_type not in _READERS:
        raise ArtifactFormatError("no such type of artifact")
    read, keys = _READERS[artifact_type]
    if not set(expected) <= keys:
        raise ArtifactFormatError(f"of a {artifact_type} can be expected: {', '.join(sorted(keys)) or 'nothing'}")
    return read(source, expected)


def _images(source: ByteSource, expected: Mapping[str, Any]) -> dict[str, Any]:
    contents = check_earlier_shard(source) if expected.get("earlier") is True else check_shard(source)
    if len(contents.shape) - (contents.form == "png-rgb") != 2:
        raise ArtifactFormatError("an image set holds images, not volumes")
    return _facts(contents)


def _volumes(source: ByteSource, expected: Mapping[str, Any]) -> dict[str, Any]:
    contents = check_shard(source)
    if contents.form == "png-rgb" or len(contents.shape) != 3:
        raise ArtifactFormatError("a volume set holds volumes, not images")
    return _facts(contents)


def _facts(contents: Contents) -> dict[str, Any]:
    labels = Counter(contents.labels)
    if len(labels) > MAX_KINDS:
        raise ArtifactFormatError(f"a set has at most {MAX_KINDS} different labels")
    return {"form": contents.form, "count": contents.count, "shape": list(contents.shape), "labels": dict(labels)}


def _masked(source: ByteSource, expected: Mapping[str, Any]) -> dict[str, Any]:
    dtype, size = check_ring(source, expected.get("size"))
    if expected.get("dtype", dtype) != dtype:
        raise ArtifactFormatError(f"the ring must be {expected['dtype']}, not {dtype}")
    return {"size": size, "dtype": dtype}


def _model(source: ByteSource, expected: Mapping[str, Any]) -> dict[str, Any]:
    if type(expected.get("architecture")) is not str:
        raise ArtifactFormatError("no architecture was approved for this model")
    architecture = Architecture.parse(expected["architecture"])
    check_weights(source, architecture)
    return {"digest": architecture.digest(), "size": architecture.nbytes}


_READERS: Final[dict[str, tuple[Callable[[ByteSource, Mapping[str, Any]], dict[str, Any]], frozenset[str]]]] = {
    "image-set": (_images, frozenset({"earlier"})),
    "volume-set": (_volumes, frozenset()),
    "update": (lambda source, told: {"size": check_numbers(source, told.get("size"))[1]}, frozenset({"size"})),
    "masked-update": (_masked, frozenset({"size", "dtype"})),
    "masked-evaluation": (_masked, frozenset({"size", "dtype"})),
    "evaluation": (lambda source, told: {"size": check_vector(source, told.get("size"))}, frozenset({"size"})),
    "model": (_model, frozenset({"architecture"})),
}
