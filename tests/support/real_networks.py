"""The networks of the field at their smallest width: MONAI's classes, with group norm for batch norm."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from monai.networks.nets.densenet import DenseNet
from monai.networks.nets.resnet import ResNet
from monai.networks.nets.segresnet import SegResNet
from monai.networks.nets.unet import UNet
from monai.networks.nets.vit import ViT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from agent.dp.clipping import PrivacyUnit
from agent.models.training_loop import seeded


def resnet18() -> nn.Module:
    """Two basic blocks in each of four stages."""
    return grouped(ResNet("basic", [2, 2, 2, 2], [8, 8, 16, 16], spatial_dims=2, n_input_channels=1, num_classes=2))


def resnet50() -> nn.Module:
    """Bottlenecks."""
    widths = {"layers": [1, 1, 1, 1], "block_inplanes": [4, 4, 4, 8]}
    return grouped(ResNet("bottleneck", spatial_dims=2, n_input_channels=1, num_classes=2, **widths))


def densenet(dims: int = 2) -> nn.Module:
    """Dense blocks, of two layers each."""
    return grouped(DenseNet(dims, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2, 2)))


def segresnet(dims: int = 2) -> nn.Module:
    """In-place additions."""
    return SegResNet(dims, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 2), blocks_up=(1,))


def unet(dims: int = 2) -> nn.Module:
    """Transposed convolutions and PReLU."""
    return UNet(dims, in_channels=1, out_channels=2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1)


def vit() -> nn.Module:
    """A class token and positions as bare parameters; the first of a tuple, and without what it never uses."""
    size = {"hidden_size": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 4}
    model = ViT(1, (16, 16), (4, 4), classification=True, num_classes=2, spatial_dims=2, **size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("cross_attn" not in name)
    return First(model)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "densenet": densenet,
    "segresnet": segresnet,
    "unet": unet,
    "vit": vit,
    "densenet of volumes": lambda: densenet(3),
    "segresnet of volumes": lambda: segresnet(3),
    "unet of volumes": lambda: unet(3),
}


def network(name: str) -> nn.Module:
    """One of them, with random weights."""
    with seeded(0):
        return NETWORKS[name]()


def units_for(name: str, counts: tuple[int, ...], seed: int = 0) -> list[PrivacyUnit]:
    """Patients with so many pictures (or volumes) of 16 pixels a side each, and a class for each."""
    draw = torch.Generator().manual_seed(seed)
    sides = [16] * (3 if name.endswith("volumes") else 2)
    return [
        PrivacyUnit((torch.randn(n, 1, *sides, generator=draw), torch.randint(0, 2, (n,), generator=draw)))
        for n in counts
    ]


def row_losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of each row; of a mask, which pixels are bright."""
    out = model(rows[0])
    if out.ndim == 2:
        return cross_entropy(out, rows[1], reduction="none")
    return cross_entropy(out, (rows[0][:, 0] > 0.5).long(), reduction="none").flatten(1).mean(dim=1)


class First(nn.Module):
    """The first of what a network returns."""

    def __init__(self, model: nn.Module) -> None:
        """Around ``model``."""
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """(n, ...) -> (n, ...)."""
        return self.model(x)[0]


def grouped(model: nn.Module, most: int = 4) -> nn.Module:
    """The same network with group norm for every batch norm, of so many groups at most."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            setattr(model, name, nn.GroupNorm(gcd(most, child.num_features), child.num_features))
        else:
            grouped(child, most)
    return model
