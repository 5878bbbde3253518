"""Our networks compute what MONAI's do, without a batch norm, and in stages that hold every parameter once."""

from __future__ import annotations

import pytest
import torch
from monai.networks.nets.densenet import DenseNet
from monai.networks.nets.resnet import ResNet
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet
from monai.networks.nets.vit import ViT
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from agent.models.networks.architectures import Shape, StagedNetwork, architecture, swap_batch_norms
from agent.models.training_loop import seeded
from policies.tasks.networks import NETWORKS as KINDS
from policies.tasks.networks import NetworkSpec
from tests.support.real_networks import NETWORKS


def _small(name: str) -> tuple[StagedNetwork, torch.Tensor]:
    spec, size = NETWORKS[name]
    with seeded(0):
        return architecture(spec.name, spec.options, Shape(1, size, 3)), torch.randn(2, 1, *size)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_stages_compute_what_the_network_itself_does(name: str) -> None:
    network, pictures = _small(name)
    with torch.no_grad():
        out, own = network(pictures), network.net(pictures)
    assert torch.equal(out, own[0] if isinstance(own, tuple) else own)
    assert out.shape == ((2, 3, *pictures.shape[2:]) if KINDS[NETWORKS[name][0].name].masks else (2, 3))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_is_in_one_block_or_the_head(name: str) -> None:
    network, _ = _small(name)
    held = [p for block in network.blocks for module in block for p in module.parameters()]
    held += network.head.parameters()
    assert len(held) == len(set(held))
    assert set(held) == set(network.parameters())
    staged = {p for stage in network.stages for module in stage.modules for p in module.parameters()}
    assert staged | set(network.head.parameters()) == set(held)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_task_counts_blocks_as_the_network_has_them(name: str) -> None:
    network, _ = _small(name)
    spec = NETWORKS[name][0]
    assert KINDS[spec.name].blocks(spec.options) == len(network.blocks) - 1


@pytest.mark.parametrize(("name", "options", "theirs"), [
    ("resnet18", {}, lambda: ResNet("basic", [2, 2, 2, 2], [64, 128, 256, 512], 2, 1, num_classes=2)),
    ("resnet50", {}, lambda: ResNet("bottleneck", [3, 4, 6, 3], [64, 128, 256, 512], 2, 1, num_classes=2)),
    ("densenet121", {}, lambda: DenseNet(2, 1, 2)),
    ("unet", {}, lambda: UNet(2, 1, 2, (16, 32, 64, 128, 256), (2, 2, 2, 2), num_res_units=2)),
    ("segresnet", {}, lambda: SegResNet(2, 16, 1, 2)),
])  # fmt: skip
def test_the_networks_have_their_papers_size_by_default(name: str, options: dict[str, int], theirs: type) -> None:
    spec = NetworkSpec(name, options)
    with torch.device("meta"):
        ours, other = architecture(name, spec.options, Shape(1, (64, 64), 2)), theirs()
        swap_batch_norms(other)
    shapes = [{n: t.shape for n, t in net.state_dict().items()} for net in (ours.net, other)]
    assert shapes[0] == shapes[1]


def test_the_transformer_is_vit_s16_with_a_bias_for_queries_and_without_what_is_never_used() -> None:
    with torch.device("meta"):
        ours = architecture("vit-s16", NetworkSpec("vit-s16").options, Shape(3, (224, 224), 1000))
        theirs = ViT(3, (224, 224), (16, 16), 384, 1536, 12, 6, classification=True, num_classes=1000, spatial_dims=2,
                     qkv_bias=True)  # fmt: skip
    unused = {name for name, _ in theirs.named_parameters() if "norm_cross_attn" in name}
    assert unused
    assert {n.replace("head.0.", "head.") for n, _ in theirs.named_parameters()} - unused == {
        n for n, _ in ours.net.named_parameters()
    }
    assert not any(isinstance(module, nn.Tanh) for module in ours.modules())


class _OwnBatchNorm(nn.BatchNorm2d):
    """As timm has one: a validator that looks at types does not see it."""


def test_no_batch_norm_is_left_where_monai_leaves_nineteen() -> None:
    with torch.device("meta"):
        named = ResNet("basic", [2, 2, 2, 2], [64, 128, 256, 512], 2, 1, norm=("group", {"num_groups": 8}))
    assert sum(isinstance(module, _BatchNorm) for module in named.modules()) == 19
    swap_batch_norms(named)
    assert not any(isinstance(module, _BatchNorm) for module in named.modules())


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm, _OwnBatchNorm])
def test_a_group_norm_takes_over_scale_shift_and_type_of_any_batch_norm(kind: type[nn.BatchNorm2d]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 24, 3), nn.Sequential(kind(24))).double()
    scale = model[1][0].weight
    swap_batch_norms(model)
    norm = model[1][0]
    assert type(norm) is nn.GroupNorm
    assert (norm.num_groups, norm.weight) == (8, scale)
    assert model(torch.randn(1, 1, 5, 5).double()).dtype == torch.float64
