"""The networks that a task may name, at their smallest width, with a loss and patients for each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.dp.clipping import PrivacyUnit
from agent.models.networks import TrainableNetwork, build
from policies.tasks.networks import NetworkSpec
from protos.artifacts.strict_safetensors import pack_weights

_UNET = NetworkSpec("unet", {"width": 4, "levels": 3, "units": 1})
_SEGRESNET = NetworkSpec("segresnet", {"width": 8, "levels": 2})
_DENSENET = NetworkSpec("densenet121", {"growth": 8})
_CNN = NetworkSpec("small-cnn", {"width": 8, "convolutions": 3, "pooled": 1})

NETWORKS: Mapping[str, tuple[NetworkSpec, tuple[int, ...]]] = {  # and the size of its pictures
    "linear": (NetworkSpec("linear", {"pooled": 4}), (16, 16)),
    "small-cnn": (_CNN, (16, 16)),
    "resnet18": (NetworkSpec("resnet18", {"width": 4}), (16, 16)),
    "resnet50": (NetworkSpec("resnet50", {"width": 4}), (16, 16)),
    "densenet121": (_DENSENET, (32, 32)),
    "vit-s16": (NetworkSpec("vit-s16", {"width": 32, "layers": 2, "heads": 4, "patch": 4}), (16, 16)),
    "unet": (_UNET, (16, 16)),
    "segresnet": (_SEGRESNET, (16, 16)),
    "small-cnn of volumes": (_CNN, (8, 8, 8)),
    "densenet121 of volumes": (_DENSENET, (32, 32, 32)),
    "unet of volumes": (_UNET, (16, 16, 16)),
    "segresnet of volumes": (_SEGRESNET, (8, 8, 8)),
}
QUICK = tuple(name for name in NETWORKS if not name.startswith(("densenet", "resnet50")))  # the others take longer


def no_files(digest: str) -> bytes:
    """A site that has no public file."""
    raise AssertionError(digest)


def small(name: str, **part: object) -> NetworkSpec:
    """One of them, with ``trained`` and what belongs to it."""
    spec = NETWORKS[name][0]
    return NetworkSpec(spec.name, spec.options, **part)  # type: ignore[arg-type]


def built(name: str, **part: object) -> TrainableNetwork:
    """One of them, with random weights."""
    return build(small(name, **part), 1, NETWORKS[name][1], 2, 0, no_files)


def network(name: str) -> nn.Module:
    """All of one of them is trained."""
    return built(name).module


def stirred(net: TrainableNetwork, seed: int = 1) -> TrainableNetwork:
    """The same after a step of noise: what begins at zeros hides the gradients of what is before it."""
    net.load((0.05 * np.random.default_rng(seed).standard_normal(net.parameters)).astype(np.float32))
    return net


def weights_file(spec: NetworkSpec, size: tuple[int, ...], outputs: int = 2, seed: int = 7) -> tuple[str, bytes]:
    """Somebody's public file of such a network with other weights: its digest, and its bytes."""
    net = stirred(build(NetworkSpec(spec.name, {**spec.options, "head": 0}), 1, size, outputs, seed, no_files))
    raw = pack_weights({name: tensor.numpy() for name, tensor in net.module.net.state_dict().items()})
    return hashlib.sha256(raw).hexdigest(), raw


def frozen_features(outputs: int = 2, head: int = 0) -> tuple[NetworkSpec, dict[str, bytes | Path]]:
    """One layer on two public networks of 16 pixels a side, and their files."""
    specs = [NETWORKS[name][0] for name in ("small-cnn", "resnet18")]
    made = [weights_file(spec, (16, 16), outputs) for spec in specs]
    parts = [NetworkSpec(spec.name, spec.options, weights=told[0]) for spec, told in zip(specs, made, strict=True)]
    return NetworkSpec("frozen-features", {"head": head}, parts=tuple(parts)), dict(made)


def units_for(name: str, counts: tuple[int, ...], seed: int = 0) -> list[PrivacyUnit]:
    """Patients with so many pictures (or volumes) each, and a class for each."""
    draw = torch.Generator().manual_seed(seed)
    size = NETWORKS[name][1]
    return [
        PrivacyUnit((torch.randn(n, 1, *size, generator=draw), torch.randint(0, 2, (n,), generator=draw)))
        for n in counts
    ]


def row_losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of each row; of a mask, which pixels are bright."""
    out = model(rows[0])
    if out.ndim == 2:
        return cross_entropy(out, rows[1], reduction="none")
    return cross_entropy(out, (rows[0][:, 0] > 0.5).long(), reduction="none").flatten(1).mean(dim=1)
