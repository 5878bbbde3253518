"""The file format of a network: safetensors, with its kind and origin as canonical JSON in the header.

Nothing is unpickled, and nothing in a file names code (P13): ``kind`` is looked up in the reader's dictionary. A
file's own statement of its origin is an unverified claim. A release trusts only the site's configuration, which
vouches for digests (``public_components``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from protos.common.errors import ArtifactError

M = TypeVar("M", bound=torch.nn.Module)
Provenance = Literal["public", "random", "file", "private"]
HEADER: Final = "lazaret"
MOST_HEADER: Final = 65_536  # characters of JSON


class WeightsError(ArtifactError, ValueError):
    """The bytes are no network of the kind that was asked for. The text names keys and shapes, never values."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a network comes from.

    ``public``: trained on public or synthetic images here, or vouched for by the site. ``random``: drawn from a fixed
    seed, and a function of nothing else. ``file``: somebody's file for which nobody vouches yet. ``private``: trained
    on patients.
    """

    provenance: Provenance
    sha256: str  # of the file; of a random network: of its name and parameters

    def __post_init__(self) -> None:
        """Refuse what is no origin."""
        if self.provenance not in get_args(Provenance) or len(self.sha256) != 64:
            raise ValueError("an origin has a provenance and a SHA-256")

    @property
    def component(self) -> str:
        """The origin as a statement names it (P6): random weights depend on nobody, an unknown file maybe on all."""
        return "public" if self.provenance in ("public", "random") else "private"


@dataclass(frozen=True, slots=True, eq=False)
class NetworkFile:
    """A network file, read."""

    kind: str  # "generator", "encoder", "recogniser", "features", ...
    config: Mapping[str, Any]  # of the architecture: what its dataclass takes
    notes: Mapping[str, Any]  # how it was trained: for people and for the record
    state: Mapping[str, Tensor] = field(repr=False)
    sha256: str


def pack(kind: str, config: Mapping[str, Any], notes: Mapping[str, Any], state: Mapping[str, Tensor]) -> bytes:
    """A network as bytes; the same network gives the same bytes."""
    header = json.dumps(
        {"kind": kind, "config": dict(config), "notes": dict(notes)},
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
    return safetensors.torch.save(tensors, {HEADER: header})


def unpack(raw: bytes, kind: str) -> NetworkFile:
    """Read what :func:`pack` wrote.

    Raises:
        WeightsError: not safetensors, no header of ours, another kind, or a value that is not finite.
    """
    try:
        state = safetensors.torch.load(raw)
        size = int.from_bytes(raw[:8], "little")
        header = (json.loads(raw[8 : 8 + size]).get("__metadata__") or {}).get(HEADER, "")
        told = json.loads(header) if 0 < len(header) <= MOST_HEADER else None
    except (safetensors.SafetensorError, KeyError, ValueError, RecursionError) as fault:
        raise WeightsError("the file is not safetensors of known types") from fault
    if not isinstance(told, dict) or told.keys() != {"kind", "config", "notes"}:
        raise WeightsError("the file is not a network that this product wrote")
    if not (told["kind"] == kind and isinstance(told["config"], dict) and isinstance(told["notes"], dict)):
        raise WeightsError(f"the file holds no {kind}")
    if not all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point()):
        raise WeightsError("a weight is not finite")
    return NetworkFile(kind, told["config"], told["notes"], state, hashlib.sha256(raw).hexdigest())


def built(make: Callable[[], M], state: Mapping[str, Tensor]) -> M:
    """A module with the weights of a file, which cannot ask for more memory than it brings.

    Args:
        make: builds the module; it runs on torch's meta device, where nothing is drawn and nothing takes room.
        state: of the file; every tensor and buffer of the module is among it, or the file is refused.
    Returns:
        The module on the CPU, in evaluation, without gradients.
    Raises:
        WeightsError: sizes of no module, or tensors missing, unknown, or of another shape or type.
    """
    try:
        with torch.device("meta"):
            module = make()
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as fault:
        raise WeightsError("the file's sizes fit no known network") from fault
    _compare(module, state)
    module = module.to_empty(device="cpu")
    module.load_state_dict(dict(state))
    return module.eval().requires_grad_(requires_grad=False)


def fill(module: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a whole state into a module, names and shapes exactly.

    Raises:
        WeightsError: a tensor is missing, unknown or of another shape or type.
    """
    _compare(module, state)
    module.load_state_dict(dict(state))


def _compare(module: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    own = module.state_dict()
    wrong = sorted(own.keys() ^ state.keys())
    wrong += [n for n in own if n in state and (own[n].shape, own[n].dtype) != (state[n].shape, state[n].dtype)]
    if wrong:
        raise WeightsError(f"{len(wrong)} tensor(s) missing, unknown or of another shape: {', '.join(wrong[:5])}")
