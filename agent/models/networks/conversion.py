"""A published ``.pt`` file becomes a file of public weights, once, in a confined process.

``torch.load`` is asked for tensors and plain values alone, with an empty allow-list. Its restricted unpickler had a
flaw that corrupted memory (CVE-2026-24747), so that no process reads such a file that has anything else: the command
hands its bytes to :mod:`agent.release.maker_process`. A file of 1.5 KB can hold a tensor of 10^11 numbers, all of
them one (a stride of 0): whatever asks for more memory than the file has bytes is refused before it is copied.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.models.networks.architectures import EPSILON
from protos.artifacts.byte_source import ArtifactFormatError
from protos.artifacts.strict_safetensors import pack_weights

CODE, DAMAGED, INFLATED, EMPTY, NOT_FINITE, NAMES = "code", "damaged", "inflated", "empty", "not-finite", "names"
_WRAPPERS: Final = ("state_dict.module.", "state_dict.", "module.")  # what trainings put around a network
_DEEP: Final = 6  # dictionaries in one another
_LISTED: Final = 5  # names in a message
_LONGEST: Final = 200  # characters of one
# what our networks do not have: a batch norm's statistics, and the norms that MONAI's ViT never calls
_UNUSED: Final = re.compile(r"(?:.+\.)?(?:running_mean|running_var|num_batches_tracked|norm_cross_attn\.\w+)")
_DENSE: Final = re.compile(r"(.*denselayer\d+)\.((?:norm|relu|conv)[12]\..+)")  # as others name MONAI's layers
_RENAMED: Final = {"classifier.weight": "class_layers.out.weight", "classifier.bias": "class_layers.out.bias"}


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The file, or why there is none. A refusal is a value: the names in it come from the file, and are shown so."""

    refusal: str = ""  # one of the words above; "": none
    names: tuple[str, ...] = ()  # of a refusal: what the file asks for; else the first tensors that were left out
    file: bytes = b""  # strict safetensors
    kept: int = 0  # tensors in it
    left_out: int = 0  # that the file has and a network of ours has no use for


@dataclass(frozen=True, slots=True)
class WeightsConversion:
    """How a file is converted."""

    prefix: str  # of the names that are wanted, taken off; "": what trainings put around a network is found
    max_result_bytes: int  # of :mod:`agent.release.maker_process`
    statistics: bool = False  # batch norms become fixed scales and shifts: of a network with ``fixed_norms``

    def convert(self, raw: bytes) -> Converted:
        """Read the bytes of a torch file, or of anybody's safetensors; every float tensor becomes float32."""
        try:
            if wanted := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(raw)):
                return Converted(CODE, _listed(wanted))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001, S110 - a file of the form before 1.6 has no such list
            pass
        try:
            told = _read(raw)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - whatever a strange file makes the reader say, the file is refused
            return Converted(DAMAGED)
        held: dict[str, Tensor] = {}
        _flatten(told, "", _DEEP, held)
        if sum(tensor.numel() * tensor.element_size() for tensor in held.values()) > len(raw):
            return Converted(INFLATED)
        return self._packed(_folded(held) if self.statistics else held)

    def _packed(self, held: Mapping[str, Tensor]) -> Converted:
        prefix = self.prefix or next((w for w in _WRAPPERS if any(name.startswith(w) for name in held)), "")
        arrays: dict[str, NDArray[Any]] = {}
        left_out = []
        for name, tensor in held.items():
            if not name.startswith(prefix) or _UNUSED.fullmatch(name) or not tensor.is_floating_point():
                left_out.append(name)
                continue
            array = tensor.float().contiguous().numpy()
            if not bool(np.isfinite(array).all()):
                return Converted(NOT_FINITE, _listed([name]))
            arrays[_named(name.removeprefix(prefix))] = array
        if not arrays:
            return Converted(EMPTY, _listed(left_out))
        try:
            return Converted("", _listed(left_out), pack_weights(arrays), len(arrays), len(left_out))
        except ArtifactFormatError:
            return Converted(NAMES, _listed(arrays))


def _folded(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With each batch norm's statistics in its scale and shift (Ioffe & Szegedy 2015, algorithm 2, step 11).

    y = gamma / sqrt(var + epsilon) x + (beta - gamma mean / sqrt(var + epsilon)).
    """
    folded = dict(held)
    for name, mean in held.items():
        norm = name.removesuffix("running_mean")
        var = held.get(f"{norm}running_var")
        if norm == name or var is None or var.shape != mean.shape:
            continue
        scale = held.get(f"{norm}weight", torch.ones_like(mean)).double() / (var.double() + EPSILON).sqrt()
        shift = held.get(f"{norm}bias", torch.zeros_like(mean)).double() - scale * mean.double()
        folded[f"{norm}weight"], folded[f"{norm}bias"] = scale, shift
    return folded


def _read(raw: bytes) -> Any:
    """Tensors and plain values: of safetensors with any header, or of a torch file."""
    length = int.from_bytes(raw[:8], "little")
    if raw[8:9] == b"{" and length <= len(raw) - 8:
        return safetensors.torch.load(raw)
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)


def _named(name: str) -> str:
    """As MONAI names the layer."""
    found = _DENSE.fullmatch(name)
    return f"{found[1]}.layers.{found[2]}" if found else _RENAMED.get(name, name)


def _flatten(value: Any, name: str, depth: int, out: dict[str, Tensor]) -> None:
    """Every plain tensor; names of nested dictionaries are joined by dots."""
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        out[name] = value.detach()
    elif isinstance(value, Mapping) and depth:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), depth - 1, out)


def _listed(names: Any) -> tuple[str, ...]:
    shown = ("".join(c if c.isprintable() else "?" for c in str(name)[:_LONGEST]) for name in sorted(map(str, names)))
    return tuple(list(shown)[:_LISTED])
