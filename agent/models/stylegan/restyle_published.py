"""The encoders of ReStyle's published files (Alaluf et al. 2021), for inference only, named as there.

k-SALSA inverts with ReStyle over a ResNet-34 (section 3.3); the face models have an IR-SE-50. Both end in a map of
16 x 16, from which one head for every layer of the generator reads a style. BatchNorm is frozen, so a code does not
depend on the images beside it. An encoder that is trained here is :mod:`agent.models.stylegan.restyle`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from agent.models.features.resnet import FrozenNorm, stages
from agent.models.image_tensors import resized

SEEN: Final = 256  # pixels a side
WIDE: Final = 512  # channels of the last map, and of a style
_UNITS: Final = ((64, 64, 3), (64, 128, 4), (128, 256, 14), (256, 512, 3))


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """What an encoder must share with its generator."""

    resolution: int
    num_ws: int
    channels: int = 3
    w_dim: int = WIDE


class Squeeze(nn.Module):
    """Squeeze and excitation (Hu et al. 2018)."""

    def __init__(self, channels: int) -> None:
        """Make the layers."""
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // 16, 1, bias=False)
        self.fc2 = nn.Conv2d(channels // 16, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) -> (n, c, h, w)."""
        return x * torch.sigmoid(self.fc2(relu(self.fc1(x.mean(dim=(2, 3), keepdim=True)))))


class ResidualUnit(nn.Module):
    """A residual unit of IR-SE-50 (ArcFace's trunk)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Make the layers."""
        super().__init__()
        self.stride = stride
        self.shortcut_layer = (
            None
            if inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), FrozenNorm(outputs))
        )
        self.res_layer = nn.Sequential(
            FrozenNorm(inputs),
            nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False),
            nn.PReLU(outputs),
            nn.Conv2d(outputs, outputs, 3, stride, 1, bias=False),
            FrozenNorm(outputs),
            Squeeze(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        # a pooling of one pixel, as published, is every stride-th pixel
        same = x[:, :, :: self.stride, :: self.stride] if self.shortcut_layer is None else self.shortcut_layer(x)
        out: Tensor = self.res_layer(x) + same
        return out


class Linear(nn.Module):
    """A full layer with equalised learning rate."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDE, WIDE))
        self.bias = nn.Parameter(torch.zeros(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 512) -> (n, 512)."""
        return linear(x, self.weight / math.sqrt(WIDE), self.bias)


class StyleHead(nn.Module):
    """16 x 16 to one style."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        steps: list[nn.Module] = []
        for _ in range(4):
            steps += [nn.Conv2d(WIDE, WIDE, 3, 2, 1), nn.LeakyReLU(0.01)]
        self.convs = nn.Sequential(*steps)
        self.linear = Linear()

    def forward(self, x: Tensor) -> Tensor:
        """(n, 512, 16, 16) -> (n, 512)."""
        out: Tensor = self.linear(self.convs(x).flatten(1))
        return out


class RestyleEncoder(nn.Module):
    """E of x || y, as :class:`agent.models.stylegan.restyle.Encoder` is called."""

    def __init__(self, fit: EncoderShape) -> None:
        """Make the heads; the subclass makes the trunk before."""
        super().__init__()
        self.architecture = fit
        self.styles = nn.ModuleList([StyleHead() for _ in range(fit.num_ws)])

    def forward(self, images: Tensor, reconstructions: Tensor) -> Tensor:
        """The update of the code.

        Args:
            images: (n, 3, h, w) in [-1, 1].
            reconstructions: of the same shape.
        Returns:
            (n, num_ws, 512) float32.
        """
        x = self.trunk(torch.cat([resized(images, SEEN), resized(reconstructions, SEEN)], dim=1))
        return torch.stack([head(x) for head in self.styles], dim=1).float()

    def trunk(self, x: Tensor) -> Tensor:
        """(n, 6, 256, 256) -> (n, 512, 16, 16)."""
        raise NotImplementedError  # abstract: the two published encoders differ in it


class ResNetEncoder(RestyleEncoder):
    """Over ResNet-34 without its pooling: "ResNetBackboneEncoder"."""

    def __init__(self, fit: EncoderShape) -> None:
        """Make the layers."""
        super().__init__(fit)
        self.conv1 = nn.Conv2d(6, 64, 7, 2, 3, bias=False)
        self.bn1 = FrozenNorm(64)
        self.relu = nn.PReLU(64)
        self.body = nn.Sequential(*[block for stage in stages("resnet34") for block in stage])

    def trunk(self, x: Tensor) -> Tensor:
        """(n, 6, 256, 256) -> (n, 512, 16, 16)."""
        out: Tensor = self.body(self.relu(self.bn1(self.conv1(x))))
        return out


class FaceEncoder(RestyleEncoder):
    """Over IR-SE-50: "BackboneEncoder"."""

    def __init__(self, fit: EncoderShape) -> None:
        """Make the layers."""
        super().__init__(fit)
        self.input_layer = nn.Sequential(nn.Conv2d(6, 64, 3, 1, 1, bias=False), FrozenNorm(64), nn.PReLU(64))
        units = [
            ResidualUnit(outputs if index else inputs, outputs, 1 if index else 2)
            for inputs, outputs, count in _UNITS
            for index in range(count)
        ]
        self.body = nn.Sequential(*units)

    def trunk(self, x: Tensor) -> Tensor:
        """(n, 6, 256, 256) -> (n, 512, 16, 16)."""
        out: Tensor = self.body(self.input_layer(x))
        return out
