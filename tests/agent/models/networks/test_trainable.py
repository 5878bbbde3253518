"""A network from its start, its trained part as a vector, and its frozen stages apart from it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from agent.models.networks import build
from agent.models.networks.architectures import architecture
from agent.models.networks.low_rank import LowRank
from agent.models.networks.suitability import UnsuitableNetworkError
from agent.models.networks.trainable import build_trained
from agent.models.weights import WeightsError
from policies.tasks.bounds import TaskError
from policies.tasks.networks import NetworkSpec
from tests.support.real_networks import (
    NETWORKS,
    QUICK,
    built,
    frozen_features,
    no_files,
    small,
    stirred,
    weights_file,
)

PARTS: dict[str, dict[str, Any]] = {
    "all": {"trained": "all"},
    "head": {"trained": "head"},
    "last-blocks": {"trained": "last-blocks", "blocks": 1},
    "bias-and-norms": {"trained": "bias-and-norms"},
    "lora": {"trained": "lora", "rank": 4},
}
CASES = [(name, part) for name in QUICK for part in PARTS if name != "linear" or part == "all"]


def _pictures(name: str, n: int = 3) -> torch.Tensor:
    return torch.randn(n, 1, *NETWORKS[name][1], generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "part"), CASES)
def test_the_trained_part_is_a_vector_of_zeros_at_first_and_is_loaded_from_one(name: str, part: str) -> None:
    net = built(name, **PARTS[part])
    assert net.vector().dtype == np.float32
    assert np.array_equal(net.vector(), np.zeros(net.parameters, np.float32))
    pictures = _pictures(name)
    with torch.no_grad():
        before = net.module(pictures)
        moved = np.random.default_rng(0).normal(0.0, 0.1, net.parameters).astype(np.float32)
        net.load(moved)
        assert np.allclose(net.vector(), moved, atol=1e-6)
        assert not torch.allclose(net.module(pictures), before, atol=1e-4)
        net.load(np.zeros(net.parameters, np.float32))
        assert torch.equal(net.module(pictures), before)
    assert np.array_equal(net.vector(), np.zeros(net.parameters, np.float32))


@pytest.mark.parametrize(("name", "part"), CASES)
def test_frozen_stages_and_the_trained_part_make_the_network(name: str, part: str) -> None:
    net = stirred(built(name, **PARTS[part]))
    pictures = _pictures(name)
    rows = net.prepare(pictures)
    assert not rows.requires_grad
    with torch.no_grad():
        assert torch.allclose(net.trained(rows), net.module(pictures), atol=1e-5)
    trained = [p for p in net.trained.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == net.parameters
    assert [id(p) for p in trained] == [id(p) for p in net.module.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", QUICK)
def test_what_the_frozen_stages_make_of_a_picture_hangs_on_no_other_picture(name: str) -> None:
    net = built(name, trained="head") if name != "linear" else built(name)
    pictures = _pictures(name, 5)
    alone = torch.cat([net.prepare(picture[None]) for picture in pictures])
    assert torch.equal(net.prepare(pictures), alone)
    assert torch.equal(net.prepare(pictures.flip(0)).flip(0), alone)


def test_what_the_frozen_stages_make_of_a_volume_hangs_on_no_other_volume() -> None:
    spec = NetworkSpec("segresnet", {"width": 8, "levels": 2}, trained="head")
    net = build(spec, 1, (8, 8, 8), 2, 0, no_files)
    volumes = torch.randn(3, 1, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = net.prepare(volumes)
    assert rows.shape == (3, 8, 8, 8, 8)
    assert torch.equal(rows, torch.cat([net.prepare(volume[None]) for volume in volumes]))
    with torch.no_grad():
        torch.testing.assert_close(net.trained(rows), net.module(volumes), rtol=1e-4, atol=1e-5)


def test_only_the_part_that_is_named_is_trained() -> None:
    whole = built("resnet18").parameters
    sizes = {part: built("resnet18", **how).parameters for part, how in PARTS.items()}
    assert sizes["all"] == whole
    assert sizes["head"] == 4 * 8 * 2 + 2 < sizes["bias-and-norms"] < sizes["lora"] < sizes["last-blocks"] < whole
    net = built("resnet18", trained="last-blocks", blocks=2)
    names = {name.split(".")[1] for name, p in net.module.named_parameters() if p.requires_grad}
    assert names == {"layer3", "layer4", "fc"}
    norms = built("vit-s16", trained="bias-and-norms").module
    assert all(
        name.endswith("bias") or ".norm" in name or "head" in name
        for name, p in norms.named_parameters()
        if p.requires_grad
    )


def test_a_head_on_frozen_stages_runs_them_once_for_each_picture() -> None:
    net = built("small-cnn", trained="head")
    assert net.prepare(_pictures("small-cnn")).shape == (3, 32)
    last = built("small-cnn", trained="last-blocks", blocks=1)
    assert last.prepare(_pictures("small-cnn")).shape == (3, 16, 4, 4)
    assert torch.equal(built("small-cnn").prepare(_pictures("small-cnn")), _pictures("small-cnn"))
    assert built("unet", trained="head").prepare(_pictures("unet")).shape[2:] == (8, 8)


def test_lora_stands_beside_frozen_layers_and_says_nothing_at_first() -> None:
    plain, narrow = built("vit-s16"), built("vit-s16", trained="lora", rank=4, blocks=1)
    pictures = _pictures("vit-s16")
    with torch.no_grad():
        assert torch.equal(plain.module(pictures), narrow.module(pictures))
    found = [name for name, module in narrow.module.named_modules() if isinstance(module, LowRank)]
    assert found
    assert all(name.startswith("net.blocks.1.") for name in found)


def _starts() -> str:
    """A digest of each network with its narrow layers."""
    lines = []
    for name in QUICK:
        digest = hashlib.sha256()
        state = built(name, **(PARTS["lora"] if name != "linear" else {})).module.state_dict()
        for key, tensor in state.items():
            digest.update(key.encode() + tensor.numpy().tobytes())
        lines.append(f"{name} {digest.hexdigest()}")
    return "\n".join(lines)


def test_two_sites_have_the_same_start_bit_for_bit() -> None:
    """A process of its own, which has drawn numbers before, and this one."""
    words = "import torch; torch.manual_seed(5); torch.rand(7); torch.set_num_threads(1)\n"
    words += f"from {__name__} import _starts; print(_starts())"
    there = subprocess.run([sys.executable, "-c", words], capture_output=True, check=True, text=True).stdout
    assert there.strip() == _starts()


def test_the_network_of_a_finished_model_is_the_one_that_was_trained() -> None:
    trained, used = (make(small("small-cnn"), 1, (16, 16), 2, 0, no_files) for make in (build, build_trained))
    moved = np.random.default_rng(0).normal(0.0, 0.1, trained.parameters).astype(np.float32)
    for one in (trained, used):
        one.load(moved)
    other = used.module.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in trained.module.state_dict().items())


def test_a_network_that_mixes_patients_is_refused_before_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """On purpose: only a finished model, of which no gradient is taken, is built without the walk."""

    def mixing(*words: Any) -> Any:
        found: Any = architecture(*words)
        found.net.add_module("mixing", torch.nn.BatchNorm2d(1))
        return found

    monkeypatch.setattr("agent.models.networks.trainable.architecture", mixing)
    with pytest.raises(UnsuitableNetworkError):
        built("small-cnn")
    build_trained(small("small-cnn"), 1, (16, 16), 2, 0, no_files)


def test_building_moves_nobodys_generator_and_another_seed_is_another_start() -> None:
    before = torch.get_rng_state()
    one = built("small-cnn").module.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    other = build(small("small-cnn"), 1, (16, 16), 2, 1, no_files).module.state_dict()
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["small-cnn", "resnet18", "vit-s16", "unet", "segresnet", "unet of volumes"])
@pytest.mark.parametrize("head", [0, 1])
def test_a_public_start_is_the_file_and_its_head_where_the_task_says_so(name: str, head: int) -> None:
    spec, size = NETWORKS[name]
    digest, raw = weights_file(spec, size)
    begun = NetworkSpec(spec.name, {**spec.options, "head": head}, weights=digest)
    net = build(begun, 1, size, 2, 0, lambda _: raw).module
    theirs = stirred(build(spec, 1, size, 2, 7, no_files)).module
    own = set(net.head.parameters())
    of_head = {name for name, parameter in net.named_parameters() if parameter in own}
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[key]) is (head == 1 or key not in of_head)
    if isinstance(net.head, nn.Linear) and not head:
        assert not net.head.weight.any()


def test_a_start_of_other_outputs_gives_its_stages_and_not_its_head() -> None:
    spec, size = NETWORKS["resnet18"]
    digest, raw = weights_file(spec, size, outputs=5)
    net = build(NetworkSpec(spec.name, spec.options, "head", weights=digest), 1, size, 3, 0, lambda _: raw)
    assert net.parameters == 32 * 3 + 3
    with pytest.raises(WeightsError, match=r"fc\.\w+ has the shape \[5.*must have \[3"):
        build(NetworkSpec(spec.name, {**spec.options, "head": 1}, weights=digest), 1, size, 3, 0, lambda _: raw)


def test_one_layer_on_several_frozen_networks() -> None:
    spec, files = frozen_features()
    net = build(spec, 1, (16, 16), 2, 0, files.__getitem__)
    pictures = _pictures("small-cnn")
    rows = net.prepare(pictures)
    assert rows.shape == (3, 32 + 32)
    assert net.parameters == 64 * 2 + 2
    with torch.no_grad():
        assert not net.module(pictures).any()
        parts = [
            stirred(build(NETWORKS[name][0], 1, (16, 16), 2, 7, no_files)).module
            for name in ("small-cnn", "resnet18")
        ]
        begun = build(*_with_heads(), 0, files.__getitem__)
        assert torch.allclose(begun.module(pictures), (parts[0](pictures) + parts[1](pictures)) / 2, atol=1e-5)


def _with_heads() -> tuple[NetworkSpec, int, tuple[int, int], int]:
    return frozen_features(head=1)[0], 1, (16, 16), 2


def test_a_network_that_does_not_fit_the_pictures_is_refused_by_its_key() -> None:
    with pytest.raises(TaskError, match="name: densenet121 needs 32 pixels a side"):
        build(small("densenet121"), 1, (16, 16), 2, 0, no_files)


def test_a_vector_of_another_length_or_without_a_number_is_refused() -> None:
    net = built("linear")
    for wrong in (np.zeros(3, np.float32), np.full(net.parameters, np.nan, np.float32)):
        with pytest.raises(ValueError, match="finite numbers"):
            net.load(wrong)


def test_the_same_file_gives_the_same_digest() -> None:
    spec, size = NETWORKS["small-cnn"]
    first, second = weights_file(spec, size), weights_file(spec, size)
    assert first == second
    assert hashlib.sha256(first[1]).hexdigest() == first[0]
