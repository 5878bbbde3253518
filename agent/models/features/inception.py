"""InceptionV3 (Szegedy et al. 2016) as the Fréchet Inception Distance uses it: ``inception-2015-12-05``.

Named as in pytorch-fid's file. It differs from the paper's network as that one does: averages at the border leave
the padding out, and the last block takes the maximum where the paper takes the mean. Without these, numbers do not
compare with published ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, max_pool2d, relu

from agent.models.features.feature_net import FrozenNetwork, depth_of
from agent.models.features.resnet import FrozenNorm
from agent.models.weights import Origin

SEEN: Final = 299  # pixels a side
Kernel = tuple[int, int]
Layer = tuple[str, int, int, Kernel, int, bool]  # name, inputs, outputs, kernel, stride, padded to keep the size

_ONE, _THREE, _FIVE, _WIDE, _TALL = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)


class ConvUnit(nn.Module):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int, padded: bool) -> None:
        """Make the layers."""
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if padded else 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = FrozenNorm(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h', w')."""
        return relu(self.bn(self.conv(x)))


def _average(x: Tensor) -> Tensor:
    return avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _same_maximum(x: Tensor) -> Tensor:
    return max_pool2d(x, 3, 1, 1)


def _halved(x: Tensor) -> Tensor:
    return max_pool2d(x, 3, 2)


class MixedBlock(nn.Module):
    """Branches side by side. A branch is a chain of units; a pair at its end is two units side by side."""

    def __init__(
        self, layers: tuple[Layer, ...], branches: tuple[tuple[str, ...], ...], pool: Callable[[Tensor], Tensor]
    ) -> None:
        """Make the units; ``a+b`` in a branch is such a pair, and ``pool`` comes first in the last branch."""
        super().__init__()
        for name, inputs, outputs, kernel, stride, padded in layers:
            self.add_module(name, ConvUnit(inputs, outputs, kernel, stride, padded))
        self.branches, self.pool = branches, pool

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, sum of the branches, h', w')."""
        out = []
        for branch in self.branches:
            y = x
            for step in branch:
                y = self.pool(y) if step == "pool" else torch.cat([self._unit(u)(y) for u in step.split("+")], dim=1)
            out.append(y)
        return torch.cat(out, dim=1)

    def _unit(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def _a(inputs: int, pooled: int) -> MixedBlock:
    layers: tuple[Layer, ...] = (
        ("branch1x1", inputs, 64, _ONE, 1, True),
        ("branch5x5_1", inputs, 48, _ONE, 1, True),
        ("branch5x5_2", 48, 64, _FIVE, 1, True),
        ("branch3x3dbl_1", inputs, 64, _ONE, 1, True),
        ("branch3x3dbl_2", 64, 96, _THREE, 1, True),
        ("branch3x3dbl_3", 96, 96, _THREE, 1, True),
        ("branch_pool", inputs, pooled, _ONE, 1, True),
    )
    double = ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3")
    branches = (("branch1x1",), ("branch5x5_1", "branch5x5_2"), double, ("pool", "branch_pool"))
    return MixedBlock(layers, branches, _average)


def _b(inputs: int) -> MixedBlock:
    layers: tuple[Layer, ...] = (
        ("branch3x3", inputs, 384, _THREE, 2, False),
        ("branch3x3dbl_1", inputs, 64, _ONE, 1, True),
        ("branch3x3dbl_2", 64, 96, _THREE, 1, True),
        ("branch3x3dbl_3", 96, 96, _THREE, 2, False),
    )
    return MixedBlock(
        layers, (("branch3x3",), ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"), ("pool",)), _halved
    )


def _c(inputs: int, width: int) -> MixedBlock:
    layers: tuple[Layer, ...] = (
        ("branch1x1", inputs, 192, _ONE, 1, True),
        ("branch7x7_1", inputs, width, _ONE, 1, True),
        ("branch7x7_2", width, width, _WIDE, 1, True),
        ("branch7x7_3", width, 192, _TALL, 1, True),
        ("branch7x7dbl_1", inputs, width, _ONE, 1, True),
        ("branch7x7dbl_2", width, width, _TALL, 1, True),
        ("branch7x7dbl_3", width, width, _WIDE, 1, True),
        ("branch7x7dbl_4", width, width, _TALL, 1, True),
        ("branch7x7dbl_5", width, 192, _WIDE, 1, True),
        ("branch_pool", inputs, 192, _ONE, 1, True),
    )
    single = tuple(f"branch7x7_{i}" for i in range(1, 4))
    double = tuple(f"branch7x7dbl_{i}" for i in range(1, 6))
    return MixedBlock(layers, (("branch1x1",), single, double, ("pool", "branch_pool")), _average)


def _d(inputs: int) -> MixedBlock:
    layers: tuple[Layer, ...] = (
        ("branch3x3_1", inputs, 192, _ONE, 1, True),
        ("branch3x3_2", 192, 320, _THREE, 2, False),
        ("branch7x7x3_1", inputs, 192, _ONE, 1, True),
        ("branch7x7x3_2", 192, 192, _WIDE, 1, True),
        ("branch7x7x3_3", 192, 192, _TALL, 1, True),
        ("branch7x7x3_4", 192, 192, _THREE, 2, False),
    )
    seven = tuple(f"branch7x7x3_{i}" for i in range(1, 5))
    return MixedBlock(layers, (("branch3x3_1", "branch3x3_2"), seven, ("pool",)), _halved)


def _e(inputs: int, pool: Callable[[Tensor], Tensor]) -> MixedBlock:
    layers: tuple[Layer, ...] = (
        ("branch1x1", inputs, 320, _ONE, 1, True),
        ("branch3x3_1", inputs, 384, _ONE, 1, True),
        ("branch3x3_2a", 384, 384, (1, 3), 1, True),
        ("branch3x3_2b", 384, 384, (3, 1), 1, True),
        ("branch3x3dbl_1", inputs, 448, _ONE, 1, True),
        ("branch3x3dbl_2", 448, 384, _THREE, 1, True),
        ("branch3x3dbl_3a", 384, 384, (1, 3), 1, True),
        ("branch3x3dbl_3b", 384, 384, (3, 1), 1, True),
        ("branch_pool", inputs, 192, _ONE, 1, True),
    )
    single = ("branch3x3_1", "branch3x3_2a+branch3x3_2b")
    double = ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3a+branch3x3dbl_3b")
    return MixedBlock(layers, (("branch1x1",), single, double, ("pool", "branch_pool")), pool)


class InceptionV3(FrozenNetwork):
    """Four maps (64, 192, 768 and 2048 channels); the embedding is the mean of the last: FID's "pool3"."""

    def __init__(self, origin: Origin) -> None:
        """Make the layers, without weights that mean anything: they come from a file."""
        super().__init__("inception-2015-12-05", origin)
        self.Conv2d_1a_3x3 = ConvUnit(3, 32, _THREE, 2, padded=False)
        self.Conv2d_2a_3x3 = ConvUnit(32, 32, _THREE, 1, padded=False)
        self.Conv2d_2b_3x3 = ConvUnit(32, 64, _THREE, 1, padded=True)
        self.Conv2d_3b_1x1 = ConvUnit(64, 80, _ONE, 1, padded=False)
        self.Conv2d_4a_3x3 = ConvUnit(80, 192, _THREE, 1, padded=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _a(192, 32), _a(256, 64), _a(288, 64)
        self.Mixed_6a = _b(288)
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = (
            _c(768, 128),
            _c(768, 160),
            _c(768, 160),
            _c(768, 192),
        )
        self.Mixed_7a = _d(768)
        self.Mixed_7b, self.Mixed_7c = _e(1280, _average), _e(2048, _same_maximum)
        self.freeze()

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """Maps of images at 299 pixels: 73, 35, 17 and 8 a side."""
        # bilinear without a low-pass, as published: smoother resizing gives other numbers
        x = interpolate(self.prepared(images), (SEEN, SEEN), mode="bilinear", align_corners=False)
        out = []
        for level in range(depth_of(depth, 4)):
            x = self._levels()[level](x)
            out.append(x)
        return out

    def embed(self, images: Tensor) -> Tensor:
        """(n, 2048)."""
        return self.maps(images)[-1].float().mean(dim=(2, 3))

    def _levels(self) -> tuple[Callable[[Tensor], Tensor], ...]:
        return (
            lambda x: _halved(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))),
            lambda x: _halved(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))),
            lambda x: self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self._five(x))))),
            lambda x: self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x))),
        )

    def _five(self, x: Tensor) -> Tensor:
        out: Tensor = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x))))
        return out
