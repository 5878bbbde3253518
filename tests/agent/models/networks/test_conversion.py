"""Torch files of every kind: what a network could take is kept; code, bombs and nonsense are refused."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import zipfile
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from monai.networks.nets.densenet import DenseNet
from monai.networks.nets.resnet import ResNet
from torch import nn

from agent.models.networks import build
from agent.models.networks.architectures import FixedAffine
from agent.models.networks.conversion import Converted, WeightsConversion
from policies.tasks.networks import NetworkSpec
from protos.artifacts.byte_source import BytesSource
from protos.artifacts.strict_safetensors import Architecture, unpack_weights


def _saved(value: Any, **how: Any) -> bytes:
    torch.save(value, told := io.BytesIO(), **how)
    return told.getvalue()


def _converted(raw: bytes, prefix: str = "") -> Converted:
    return WeightsConversion(prefix, 1 << 30).convert(raw)


def _arrays(made: Converted) -> dict[str, np.ndarray]:
    return unpack_weights(made.file, Architecture.shown_by(BytesSource(made.file)))


STATE = OrderedDict(w=torch.arange(6.0).view(2, 3), b=torch.ones(3, dtype=torch.float16))


@pytest.mark.parametrize("raw", [
    _saved(STATE),
    _saved(STATE, _use_new_zipfile_serialization=False),
    _saved({"state_dict": STATE, "optimizer": {"m": torch.ones(2)}, "epoch": 3, "best": 0.5}),
    _saved({"state_dict": {f"module.{name}": tensor for name, tensor in STATE.items()}}),
    _saved({name: nn.Parameter(tensor) for name, tensor in STATE.items()}),
    _saved({"w": STATE["w"].t().contiguous().t(), "b": STATE["b"]}),
    safetensors.torch.save(dict(STATE), {"format": "pt"}),
])  # fmt: skip
def test_tensors_become_float32_under_the_networks_own_names(raw: bytes) -> None:
    made = _converted(raw)
    assert made.refusal == ""
    found = _arrays(made)
    assert found.keys() == {"w", "b"}
    assert all(array.dtype == np.float32 for array in found.values())
    assert np.array_equal(found["w"], STATE["w"].numpy())
    assert made.kept == 2


class _Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/it-ran",)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (_Code(), "system"),
        ({"w": torch.ones(2), "args": argparse.Namespace(a=1)}, "argparse.Namespace"),
        ({"w": torch.ones(2), "loss": np.float64(0.5)}, "numpy"),
        (defaultdict(list), "defaultdict"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_code_is_refused_by_its_name_and_does_not_run(value: Any, name: str) -> None:
    made = _converted(_saved(value))
    assert made.refusal == "code"
    assert any(name in one for one in made.names)
    assert not os.path.exists("/tmp/it-ran")
    assert made.file == b""


def test_a_small_file_of_a_huge_tensor_is_refused_before_it_takes_memory() -> None:
    bomb = _saved({"w": torch.ones(1).expand(10**11)})
    assert len(bomb) < 2000
    assert _converted(bomb).refusal == "inflated"
    many = torch.ones(1000)
    assert _converted(_saved({f"w{i}": many[:] for i in range(100)})).refusal == "inflated"


@pytest.mark.parametrize(
    ("raw", "refusal"),
    [
        (b"", "damaged"),
        (b"PK\x03\x04" + bytes(200), "damaged"),
        (_saved(STATE)[:-50], "damaged"),
        (_saved({"epoch": 3}), "empty"),
        (_saved({"n": torch.ones(3, dtype=torch.int64)}), "empty"),
        (_saved({"w": torch.tensor([1.0, float("nan")])}), "not-finite"),
        (_saved({"w x": torch.ones(2)}), "names"),
        (_saved([torch.ones(2)]), "empty"),
    ],
)
def test_what_no_network_could_take_is_refused(raw: bytes, refusal: str) -> None:
    assert _converted(raw).refusal == refusal


def test_torchscript_is_refused() -> None:
    with zipfile.ZipFile(told := io.BytesIO(), "w") as file:
        file.writestr("net/constants.pkl", b"\x80\x02)."), file.writestr("net/code/x.py", "print(1)")
        file.writestr("net/data.pkl", b"\x80\x02}."), file.writestr("net/version", "3\n")
    assert _converted(told.getvalue()).refusal in ("damaged", "code", "empty")


def test_a_name_from_the_file_steers_no_terminal() -> None:
    made = _converted(_saved({"\x1b[2J" + "x" * 999: torch.tensor([float("inf")])}))
    assert made.names == ("?[2J" + "x" * 196,)


PUBLISHED = [
    (
        lambda: ResNet("basic", [2, 2, 2, 2], [8, 16, 32, 64], 2, 1, num_classes=2),
        NetworkSpec("resnet18", {"width": 8}),
    ),
    (
        lambda: DenseNet(2, 1, 2, init_features=16, growth_rate=8, block_config=(6, 12, 24, 16)),
        NetworkSpec("densenet121", {"growth": 8}),
    ),
]


@pytest.mark.parametrize(("theirs", "spec"), PUBLISHED)
def test_a_published_network_with_batch_norms_begins_ours(theirs: Any, spec: NetworkSpec) -> None:
    """Scale and shift are taken over, the statistics are left out; torchvision's names of a DenseNet are known."""
    net = theirs()
    state = {
        n.replace(".layers.", ".").replace("class_layers.out", "classifier"): t for n, t in net.state_dict().items()
    }
    made = _converted(_saved({"state_dict": state}))
    assert made.left_out == 3 * sum(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    digest = hashlib.sha256(made.file).hexdigest()
    begun = NetworkSpec(spec.name, {**spec.options, "head": 1}, weights=digest)
    ours = build(begun, 1, (32, 32), 2, 0, lambda _: made.file).module.net.state_dict()
    assert all(torch.equal(tensor, net.state_dict()[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(("theirs", "spec"), PUBLISHED)
def test_with_its_statistics_a_published_network_computes_what_it_computed(theirs: Any, spec: NetworkSpec) -> None:
    net = theirs()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.2), module.running_var.uniform_(0.5, 2.0)
            module.weight.data.normal_(1.0, 0.2), module.bias.data.normal_(0.0, 0.2)
    made = WeightsConversion("", 1 << 30, statistics=True).convert(_saved({"state_dict": net.state_dict()}))
    options = {**spec.options, "head": 1, "fixed_norms": 1}
    begun = NetworkSpec(spec.name, options, weights=hashlib.sha256(made.file).hexdigest())
    ours = build(begun, 1, (32, 32), 2, 0, lambda _: made.file)
    pictures = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.allclose(ours.module(pictures), net.eval()(pictures), rtol=1e-3, atol=1e-4)
    kinds = [type(module) for module in ours.module.modules()]
    assert nn.GroupNorm not in kinds
    assert kinds.count(FixedAffine) == sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    assert not any("bn1" in name or "norm" in name for name, _ in ours.module.named_parameters())


def test_a_prefix_takes_one_network_of_several() -> None:
    raw = _saved({"encoder": {"w": torch.ones(2)}, "head": {"w": torch.zeros(3)}})
    assert _arrays(_converted(raw, "encoder.")).keys() == {"w"}
    assert _arrays(_converted(raw)).keys() == {"encoder.w", "head.w"}
    assert _converted(raw, "decoder.").refusal == "empty"
