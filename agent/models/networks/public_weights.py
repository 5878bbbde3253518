"""Files of public weights: named by their SHA-256, read strictly, and checked before memory is taken for them.

A file is safetensors in its one form (``protos/artifacts/strict_safetensors.py``): float32 tensors under the names of
the network that it is for, and nothing beside them. Whether it is public is said by the site and the policy, which
vouch for its digest, and never by the file.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from agent.models.weights import WeightsError
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource, FileSource
from protos.artifacts.strict_safetensors import Architecture, unpack_weights

# of what a linear head sees, over the public pictures of the training:
MEANS: Final = "features.mean"  # (f,)
COVARIANCE: Final = "features.covariance"  # (f, f)
Shapes = Mapping[str, tuple[int, ...]]
NONE_SPARE: Final[Shapes] = {}
WeightFiles = Callable[[str], bytes | Path]
"""The file of a digest: its bytes, or where it lies. Only of files for which the site and the policy vouch."""


def read_weights(
    digest: str, files: WeightFiles, shapes: Shapes, outputs: frozenset[str], spare: Shapes = NONE_SPARE
) -> dict[str, Tensor]:
    """The tensors of a public file, (name -> float32), all but ``outputs``.

    The header is compared with ``shapes`` first: a file for another network takes no memory.

    Args:
        digest: SHA-256 that the task names.
        files: gives the file of a digest.
        shapes: of every tensor of the network.
        outputs: of them, those of a head that is not taken; they may have other shapes, or be left out.
        spare: of tensors beside the network's, which a file may bring.
    Raises:
        WeightsError: another digest, other tensors, another form, or a value that is not finite.
    """
    found = files(digest)
    try:
        raw, shown = _fitting(found, (shapes, spare), outputs)
        if not hmac.compare_digest(hashlib.sha256(raw).hexdigest(), digest):
            raise WeightsError(f"the file of public weights does not have the SHA-256 {digest[:12]}… of the task")
        arrays = unpack_weights(raw, shown)
        return {name: torch.from_numpy(arrays[name].copy()) for name in arrays.keys() - outputs}
    except ArtifactFormatError as error:
        raise WeightsError(f"the file of public weights {digest[:12]}…: {error}") from None
    except OSError as fault:
        raise WeightsError(f"the file of public weights {digest[:12]}…: {fault.strerror}") from None


def _fitting(
    found: bytes | Path, shapes: tuple[Shapes, Shapes], outputs: frozenset[str]
) -> tuple[bytes, Architecture]:
    """The bytes of a file that shows the right tensors, and no more bytes than those."""
    if isinstance(found, bytes):
        shown = Architecture.shown_by(BytesSource(found))
        _compare(shown, shapes, outputs)
        return found, shown
    with found.open("rb") as file:
        shown = Architecture.shown_by(source := FileSource.of(file.fileno()))
        _compare(shown, shapes, outputs)
        size = len(shown.header()) + shown.nbytes
        if source.size != size:
            raise ArtifactFormatError("bytes follow the last tensor, or the file ends early")
        return file.read(size), shown


def _compare(shown: Architecture, wanted: tuple[Shapes, Shapes], outputs: frozenset[str]) -> None:
    listed = {tensor.name: tensor for tensor in shown.tensors}
    shapes = {**wanted[1], **wanted[0]}
    missing = sorted(wanted[0].keys() - listed.keys() - outputs)
    unknown = sorted(listed.keys() - shapes.keys())
    if missing or unknown:
        first = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not in the network"
        raise WeightsError(
            f"the file of public weights is of another network: {len(missing)} tensors are missing, {len(unknown)} "
            f"unknown; {first}"
        )
    for name, tensor in listed.items():
        if tensor.dtype != "F32" or not (name in outputs or tensor.shape == shapes[name]):
            raise WeightsError(
                f"the file of public weights is of another network: {name} has the shape {list(tensor.shape)} of "
                f"{tensor.dtype}, and must have {list(shapes[name])} of F32"
            )
