"""Networks that are trained once and kept in this repository: neither the demo nor the tests train for minutes.

Each file in ``deploy/demo/networks`` is named after its network, the digest of its recipe, and the recipe's number.
The recipe is everything that a person types: the command, and the public phantoms that it learns from. If a recipe
changes, there is no file of that name, and whoever asks for it is told what to run. Nobody gets a network of another
recipe. The number is for what the recipe does not say: the code that draws the phantoms, and the code that trains.
When that code makes another network, a slow test says so: then raise the number.

Weights are kept as bfloat16, compressed: a third of the size. The figures that a file says of itself (a threshold, a
share of people known again) were measured before the weights were rounded to 8 significant bits.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from protos.common.errors import ArtifactError

FOLDER: Final = Path(__file__).parent / "networks"
MAKE: Final = "python -m deploy.demo.train_networks"
# Rounding alone is 0.002, and AVX2 beside AVX-512 gave no more; other seeds are 1 apart and more: see `distance`.
TOLERANCE: Final = 0.1
_PRESET: Final = 9  # of LZMA


class KeptNetworkError(ArtifactError):
    """No network of this recipe is kept, or its file cannot be read. The text says what to type."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one network is made. What decides what it learns is in ``words``; nothing else is looked at."""

    name: str
    words: Mapping[str, Any]  # JSON: the command, the public images, the recipes that it builds on
    number: int = 1  # raise it when the same words make another network

    @property
    def file_name(self) -> str:
        """What its file is called: another recipe or number, another name."""
        text = json.dumps(dict(self.words), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}-{self.number}.safetensors.xz"


def kept(recipe: Recipe, folder: Path = FOLDER, make: str = MAKE) -> bytes:
    """The network's file, as the product writes and reads it.

    Args:
        recipe: of the network.
        folder: of the set.
        make: the command that trains what is missing.
    Raises:
        KeptNetworkError: there is none of this recipe and number, or the file is damaged.
    """
    path = folder / recipe.file_name
    try:
        raw = path.read_bytes()
    except OSError:
        told = f"no {recipe.name} of this recipe and number is kept: the recipe was changed. Train it with: {make}"
        raise KeptNetworkError(told) from None
    try:
        return _typed(lzma.decompress(raw), torch.bfloat16, torch.float32)
    except (lzma.LZMAError, safetensors.SafetensorError, ValueError):
        raise KeptNetworkError(f"{path.name} is damaged. Delete it, and train it anew with: {make}") from None


def keep(recipe: Recipe, raw: bytes, folder: Path = FOLDER) -> Path:
    """Write a trained network in the place of every other file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{recipe.name}-{'?' * 16}-*.safetensors.xz"):
        old.unlink()
    path = folder / recipe.file_name
    path.write_bytes(lzma.compress(rounded(raw), preset=_PRESET))
    return path


def rounded(raw: bytes) -> bytes:
    """A network's file with its 32-bit weights rounded to bfloat16; header and names stay."""
    return _typed(raw, torch.float32, torch.bfloat16)


def distance(trained: bytes, kept: bytes) -> float:
    """How far two networks of one architecture are apart: the norm of the difference of all weights by the kept norm.

    Each tensor counts alike, whatever its size: the root of the mean of the squared relative distances.

    Returns:
        0 for the same weights; about 1.4 for two that were drawn and trained apart; infinity if they have other
        tensors, or if one says that it was made of other images or settings. Public weights say nothing of it.
    """
    one, other = (safetensors.torch.load(raw) for raw in (trained, kept))
    said, kept_said = (json.loads(_metadata(raw).get("lazaret", "{}")) for raw in (trained, kept))
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in other.items()}:
        return math.inf
    if any(said.get(word) != kept_said.get(word) for word in ("kind", "notes")):
        return math.inf
    shares = [_apart(one[name].double(), other[name].double()) for name in one]
    return math.sqrt(sum(share**2 for share in shares) / len(shares))


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / size if size > 0 else float(torch.linalg.vector_norm(a) > 0)


def lay(recipes: Sequence[Recipe], folder: Path) -> dict[str, str]:
    """Write kept networks as ``NAME.safetensors``, as ``train`` would have; the SHA-256 of each, by name.

    Raises:
        KeptNetworkError: one is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for recipe in recipes:
        raw = kept(recipe)
        (folder / f"{recipe.name}.safetensors").write_bytes(raw)
        digests[recipe.name] = hashlib.sha256(raw).hexdigest()
    return digests


def missing(recipes: Sequence[Recipe], folder: Path = FOLDER) -> list[Recipe]:
    """Those whose file is not there."""
    return [recipe for recipe in recipes if not (folder / recipe.file_name).exists()]


def _metadata(raw: bytes) -> dict[str, str]:
    size = int.from_bytes(raw[:8], "little")
    return dict(json.loads(raw[8 : 8 + size]).get("__metadata__", {}))


def _typed(raw: bytes, old: torch.dtype, new: torch.dtype) -> bytes:
    state = safetensors.torch.load(raw)
    other = {name: t.to(new) if t.dtype == old else t for name, t in sorted(state.items())}
    return safetensors.torch.save(other, _metadata(raw) or None)  # none in a file of public weights
