"""The networks that a task may name, built: MONAI's classes and two of our own, with group norm for batch norm.

MONAI's ResNet takes ``norm="group"`` and keeps 19 of its 20 batch norms, so that every one is swapped here, those of
subclasses too; where a public file brings their statistics, a fixed scale and shift stands for one. MONAI's vision
transformer ends in a tanh, returns a tuple and holds norms that are never called: none of that is left. Nothing is
downloaded. A network's file has the names of MONAI's own ``state_dict``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

EPSILON: Final = 1e-5  # beside a batch norm's variance, in MONAI and torchvision
MOST_GROUPS: Final = 16  # of a group norm that stands for a batch norm
Options = Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of a network; what one gives, the next takes."""

    run: Callable[[Tensor], Tensor]  # rows -> rows
    modules: tuple[nn.Module, ...]  # that it calls


class StagedNetwork(nn.Module, ABC):
    """A network as stages in a row, and a head behind them."""

    net: nn.Module  # whose ``state_dict`` is the network's file

    @property
    @abstractmethod
    def stages(self) -> Sequence[Stage]:
        """All but the head."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The last layer, with a number for each class, finding or quantity."""

    @property
    def blocks(self) -> Sequence[tuple[nn.Module, ...]]:
        """What "the last blocks" counts, from the input to the head: every parameter but the head's is in one."""
        return [stage.modules for stage in self.stages]

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, *size) -> (n, outputs), or (n, outputs, *size) of a network that gives masks."""
        for stage in self.stages:
            x = stage.run(x)
        scores: Tensor = self.head(x)
        return scores


@dataclass(frozen=True, slots=True)
class Shape:
    """What goes in and what comes out."""

    channels: int
    size: tuple[int, ...]
    outputs: int

    @property
    def dimensions(self) -> int:
        """2 or 3."""
        return len(self.size)


class Linear(StagedNetwork):
    """One linear layer of the averages over a grid; it begins at zeros."""

    net: nn.Sequential

    def __init__(self, options: Options, shape: Shape) -> None:
        """So many averages a side."""
        super().__init__()
        self.net = nn.Sequential(
            _pool(shape, options["pooled"]),
            nn.Flatten(1),
            nn.Linear(shape.channels * options["pooled"] ** shape.dimensions, shape.outputs),
        )
        to_zeros(self.net[2])

    @property
    def stages(self) -> Sequence[Stage]:
        """The averages, which no parameter is in."""
        return [Stage(self.net[:2], (self.net[0],))]

    @property
    def head(self) -> nn.Module:
        """All that there is to train."""
        return self.net[2]


class SmallCnn(StagedNetwork):
    """Convolutions with group norm, each on half as many pixels a side; our own."""

    net: nn.Sequential

    def __init__(self, options: Options, shape: Shape) -> None:
        """Channels are doubled twice."""
        super().__init__()
        kinds = (nn.Conv2d, nn.MaxPool2d) if shape.dimensions == 2 else (nn.Conv3d, nn.MaxPool3d)
        widths = [shape.channels, *(options["width"] << min(i, 2) for i in range(options["convolutions"]))]
        steps = []
        for before, width in pairwise(widths):
            norm = nn.GroupNorm(gcd(MOST_GROUPS // 2, width), width)
            steps.append(nn.Sequential(kinds[0](before, width, 3, padding=1), norm, nn.ReLU(), kinds[1](2)))
        features = widths[-1] * options["pooled"] ** shape.dimensions
        self.net = nn.Sequential(
            *steps, _pool(shape, options["pooled"]), nn.Flatten(1), nn.Linear(features, shape.outputs)
        )

    @property
    def stages(self) -> Sequence[Stage]:
        """A convolution each."""
        *first, last, pool, flatten, _ = self.net
        ended = Stage(lambda x: flatten(pool(last(x))), (last,))
        return [*(Stage(step, (step,)) for step in first), ended]

    @property
    def head(self) -> nn.Module:
        """Of the averages over a coarse grid."""
        return self.net[-1]


class ResidualNetwork(StagedNetwork):
    """He et al. 2016."""

    net: Any  # ResNet

    def __init__(self, options: Options, shape: Shape, block: str, layers: tuple[int, ...]) -> None:
        """MONAI's, of 2-D pictures."""
        super().__init__()
        from monai.networks.nets.resnet import ResNet  # noqa: PLC0415 - it costs seconds

        self.net = ResNet(
            block,
            list(layers),
            [options["width"] << stage for stage in range(4)],
            spatial_dims=shape.dimensions,
            n_input_channels=shape.channels,
            conv1_t_stride=options["stride"],
            num_classes=shape.outputs,
        )

    @property
    def stages(self) -> Sequence[Stage]:
        """The stem, and the four stages of the paper."""
        net = self.net
        stem = Stage(lambda x: net.maxpool(net.act(net.bn1(net.conv1(x)))), (net.conv1, net.bn1))
        ended = Stage(lambda x: net.avgpool(net.layer4(x)).flatten(1), (net.layer4,))
        return [stem, *(Stage(layer, (layer,)) for layer in (net.layer1, net.layer2, net.layer3)), ended]

    @property
    def head(self) -> nn.Module:
        """Of the average over all pixels."""
        fc: nn.Module = self.net.fc
        return fc


class DenselyConnected(StagedNetwork):
    """Huang et al. 2017."""

    net: Any  # DenseNet

    def __init__(self, options: Options, shape: Shape) -> None:
        """MONAI's DenseNet-121, of pictures or volumes."""
        super().__init__()
        sizes = {"init_features": 2 * options["growth"], "growth_rate": options["growth"]}
        from monai.networks.nets.densenet import DenseNet  # noqa: PLC0415 - it costs seconds

        self.net = DenseNet(shape.dimensions, shape.channels, shape.outputs, **sizes)  # type: ignore[arg-type]

    @property
    def stages(self) -> Sequence[Stage]:
        """The stem, and each dense block with what follows it."""
        steps = list(self.net.features)
        relu, pool, flatten, _ = self.net.class_layers
        parts = [nn.Sequential(*steps[:4]), *(nn.Sequential(*steps[at : at + 2]) for at in range(4, len(steps), 2))]
        *first, last = parts
        ended = Stage(lambda x: flatten(pool(relu(last(x)))), (last,))
        return [*(Stage(part, (part,)) for part in first), ended]

    @property
    def head(self) -> nn.Module:
        """Of the average over all pixels."""
        out: nn.Module = self.net.class_layers.out
        return out


class VisionTransformer(StagedNetwork):
    """Dosovitskiy et al. 2021: S/16 unless the options say otherwise."""

    net: Any  # ViT

    def __init__(self, options: Options, shape: Shape) -> None:
        """MONAI's, without its tanh and without the norms that it never calls."""
        super().__init__()
        width = options["width"]
        from monai.networks.nets.vit import ViT  # noqa: PLC0415 - it costs seconds

        self.net = ViT(
            shape.channels,
            shape.size,
            (options["patch"],) * shape.dimensions,
            hidden_size=width,
            mlp_dim=4 * width,
            num_layers=options["layers"],
            num_heads=options["heads"],
            classification=True,
            num_classes=shape.outputs,
            spatial_dims=shape.dimensions,
            post_activation="",
            qkv_bias=True,
        )
        for block in self.net.blocks:
            block.add_module("norm_cross_attn", nn.Identity())  # it would get noise, and never a gradient

    @property
    def stages(self) -> Sequence[Stage]:
        """The patches with the class token, and each block; the last one with the norm behind it."""
        net, (*first, last) = self.net, self.net.blocks

        def patches(x: Tensor) -> Tensor:
            x = net.patch_embedding(x)
            return torch.cat((net.cls_token.expand(len(x), -1, -1), x), dim=1)

        ended = Stage(lambda x: net.norm(last(x))[:, 0], (last, net.norm))
        token = _Token(net.cls_token)
        return [Stage(patches, (net.patch_embedding, token)), *(Stage(one, (one,)) for one in first), ended]

    @property
    def head(self) -> nn.Module:
        """Of the class token."""
        head: nn.Module = self.net.classification_head
        return head


class _Token(nn.Module):
    """A parameter that stands beside modules, as one."""

    def __init__(self, token: nn.Parameter) -> None:
        super().__init__()
        self.token = token


class UShaped(StagedNetwork):
    """Ronneberger et al. 2015, with residual units (Kerfoot et al. 2018)."""

    net: Any  # UNet

    def __init__(self, options: Options, shape: Shape) -> None:
        """MONAI's; its instance norms keep no statistics."""
        super().__init__()
        levels = options["levels"]
        from monai.networks.nets.unet import UNet  # noqa: PLC0415 - it costs seconds

        self.net = UNet(
            shape.dimensions,
            shape.channels,
            shape.outputs,
            channels=[options["width"] << level for level in range(levels)],
            strides=[2] * (levels - 1),
            num_res_units=options["units"],
        )

    @property
    def stages(self) -> Sequence[Stage]:
        """All but the last step up: what goes down is needed on the way up."""
        down, within, _ = self.net.model
        return [Stage(lambda x: within(down(x)), (down, within))]

    @property
    def blocks(self) -> Sequence[tuple[nn.Module, ...]]:
        """Each step down, the bottom, and each step up but the last."""
        downs, ups, level = [], [], self.net.model
        while isinstance(level, nn.Sequential) and len(level) == 3:
            down, within, up = level
            downs.append((down,))
            ups.append((up,))
            level = within.submodule
        return [*downs, (level,), *reversed(ups[1:])]

    @property
    def head(self) -> nn.Module:
        """The last step up, which gives the mask."""
        up: nn.Module = self.net.model[2]
        return up


class ResidualSegmenter(StagedNetwork):
    """Myronenko 2018, without its autoencoder."""

    net: Any  # SegResNet

    def __init__(self, options: Options, shape: Shape) -> None:
        """MONAI's, which has group norm by itself."""
        super().__init__()
        levels = options["levels"]
        from monai.networks.nets.segresnet import SegResNet  # noqa: PLC0415 - it costs seconds

        self.net = SegResNet(
            shape.dimensions,
            options["width"],
            shape.channels,
            shape.outputs,
            blocks_down=(1, *[2] * (levels - 2), 4) if levels > 2 else (1, 2),
            blocks_up=(1,) * (levels - 1),
        )

    @property
    def stages(self) -> Sequence[Stage]:
        """All but the last convolution: what goes down is needed on the way up."""
        net = self.net

        def trunk(x: Tensor) -> Tensor:
            x, down = net.encode(x)
            for step, (sample, layer) in enumerate(zip(net.up_samples, net.up_layers, strict=True)):
                x = layer(sample(x) + down[-2 - step])
            return x

        return [Stage(trunk, (net.convInit, net.down_layers, net.up_samples, net.up_layers))]

    @property
    def blocks(self) -> Sequence[tuple[nn.Module, ...]]:
        """Each level down, and each level up."""
        first, *downs = self.net.down_layers
        ups = zip(self.net.up_samples, self.net.up_layers, strict=True)
        return [(self.net.convInit, first), *((down,) for down in downs), *ups]

    @property
    def head(self) -> nn.Module:
        """Norm, activation and the convolution that gives the mask."""
        last: nn.Module = self.net.conv_final
        return last


ARCHITECTURES: Final[Mapping[str, Callable[[Options, Shape], StagedNetwork]]] = {
    "linear": Linear,
    "small-cnn": SmallCnn,
    "resnet18": lambda options, shape: ResidualNetwork(options, shape, "basic", (2, 2, 2, 2)),
    "resnet50": lambda options, shape: ResidualNetwork(options, shape, "bottleneck", (3, 4, 6, 3)),
    "densenet121": DenselyConnected,
    "vit-s16": VisionTransformer,
    "unet": UShaped,
    "segresnet": ResidualSegmenter,
}


def architecture(name: str, options: Options, shape: Shape) -> StagedNetwork:
    """A network with its first weights, drawn by torch's own generator; in evaluation: nothing in it draws."""
    network = ARCHITECTURES[name](options, shape)
    swap_batch_norms(network, fixed=bool(options.get("fixed_norms")))
    return network.eval()


class FixedAffine(nn.Module):
    """A batch norm in evaluation with public statistics: a scale and a shift of each channel, which nobody trains.

    Both are of the public file. No picture changes them, and no picture's gradient is of them.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int) -> None:
        """The identity, until a file says otherwise."""
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, *size)."""
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


def swap_batch_norms(model: nn.Module, *, fixed: bool = False) -> None:
    """Put a group norm in the place of every batch norm, of subclasses too; it takes over scale, shift and type.

    Or, where they are ``fixed``, a scale and a shift.
    """
    for name, child in model.named_children():
        if not isinstance(child, _BatchNorm):
            swap_batch_norms(child, fixed=fixed)
            continue
        if fixed:
            setattr(model, name, FixedAffine(child.num_features))
            continue
        channels = child.num_features
        norm = nn.GroupNorm(gcd(MOST_GROUPS, channels), channels, child.eps, affine=child.affine)
        if child.affine:
            norm = norm.to(child.weight)
            norm.weight, norm.bias = child.weight, child.bias
        setattr(model, name, norm)


def to_zeros(layer: nn.Module) -> None:
    """A linear layer that says nothing yet."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()


def _pool(shape: Shape, side: int) -> nn.Module:
    """Averages over a grid of so many a side."""
    return nn.AdaptiveAvgPool2d(side) if shape.dimensions == 2 else nn.AdaptiveAvgPool3d(side)
