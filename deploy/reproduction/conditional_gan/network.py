"""A class-conditional generator and discriminator of which DP-SGD can train the discriminator.

The papers' GAN (PrivImage, Li et al. 2023, table 6) names sizes only. Here: residual blocks (He et al. 2016), latent
and class as a scale and a shift after every normalisation of the generator (Brock et al. 2018), a projection
discriminator (Miyato & Koyama 2018).

The leaves that hold weights are Linear, Conv2d, GroupNorm and Embedding and nothing else: every gradient engine has
an exact rule for them. No batch normalisation, which mixes patients. No spectral normalisation either, though GANs
like it: its power iteration keeps buffers that move along with the training and would leave without noise. GroupNorm
(Wu & He 2018) sees one image at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, silu

Norm = Literal["group", "none"]
KIND: Final = "adversarial"
SIDES: Final = (8, 16, 32, 64)
FIRST: Final = 4  # pixels a side, where the generator begins and the discriminator ends
_GROUPS: Final = 8


@dataclass(frozen=True, slots=True)
class AdversarialArchitecture:
    """The public shape of both networks."""

    side: int  # px
    channels: int  # of the image: 1 or 3
    classes: int  # conditions 0 .. classes - 1; one more, the null class, stands for "no condition"
    generator: tuple[int, ...]  # channels at 4, 8, .. side px
    discriminator: tuple[int, ...]  # channels at side, .. 8, 4 px
    latent: int = 64  # size of z, and of the class's embedding beside it
    norm: Norm = "group"  # of the discriminator

    def __post_init__(self) -> None:
        """Refuse what cannot be built, or would not fit a machine."""
        widths = (*self.generator, *self.discriminator)
        if not all(type(v) is int for v in (self.side, self.channels, self.classes, self.latent, *widths)):
            raise ValueError("an architecture is described by whole numbers")
        if self.side not in SIDES or self.channels not in (1, 3) or self.norm not in get_args(Norm):
            raise ValueError(f"images have {SIDES} px a side and 1 or 3 channels, a norm is one of {get_args(Norm)}")
        levels = int(math.log2(self.side // FIRST)) + 1
        if not len(self.generator) == len(self.discriminator) == levels:
            raise ValueError(f"images of {self.side} px need {levels} widths in each network")
        if not all(_GROUPS <= w <= 2048 and w % _GROUPS == 0 for w in widths):
            raise ValueError(f"widths are multiples of {_GROUPS}, to 2048")
        if not (1 <= self.classes <= 10_000 and 1 <= self.latent <= 4096):
            raise ValueError("there are 1 to 10000 classes, and latents of 1 to 4096 numbers")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image: (side, side) grey, (side, side, 3) RGB."""
        return (self.side, self.side) if self.channels == 1 else (self.side, self.side, 3)

    def suited(self, channels: int, classes: int) -> AdversarialArchitecture:
        """The same networks for other images and conditions."""
        return replace(self, channels=channels, classes=classes)


# The discriminators are small: the noise of DP-SGD grows with the root of their size (PrivImage, section 3.4).
# "paper32" and "paper64" have about the sizes of table 6: 9.4 M and 2.4 M, 11.3 M and 19.6 M.
PRESETS: Final[Mapping[str, AdversarialArchitecture]] = {
    "tiny8": AdversarialArchitecture(8, 1, 10, (64, 32), (24, 48), latent=32),
    "tiny16": AdversarialArchitecture(16, 1, 10, (64, 64, 32), (16, 32, 64), latent=32),
    "small32": AdversarialArchitecture(32, 3, 10, (128, 128, 64, 32), (32, 64, 96, 128), latent=64),
    "paper32": AdversarialArchitecture(32, 3, 10, (352, 352, 352, 304), (128, 192, 224, 224), latent=128),
    "small64": AdversarialArchitecture(64, 3, 10, (128, 128, 96, 64, 32), (16, 32, 64, 96, 128), latent=64),
    "paper64": AdversarialArchitecture(64, 3, 1, (416, 416, 352, 288, 128), (128, 256, 416, 576, 800), latent=128),
}


class _Modulated(nn.Module):
    """GroupNorm, then a scale and a shift that the condition decides, then SiLU."""

    def __init__(self, condition: int, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width, affine=False)
        self.affine = nn.Linear(condition, 2 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.affine(condition)[:, :, None, None].chunk(2, dim=1)
        return silu(self.norm(x) * (1.0 + scale) + shift)


class _Up(nn.Module):
    """A residual block that doubles the image."""

    def __init__(self, condition: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.before, self.between = _Modulated(condition, inputs), _Modulated(condition, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.conv1(interpolate(self.before(x, condition), scale_factor=2.0))
        out: Tensor = interpolate(self.skip(x), scale_factor=2.0) + self.conv2(self.between(y, condition))
        return out


class _Down(nn.Module):
    """A residual block that halves the image."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(inputs, norm), _norm(outputs, norm)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(silu(self.norm2(self.conv1(silu(self.norm1(x))))))
        # half of the variance from either side, so that the output's does not grow with the depth
        return avg_pool2d(self.skip(x) + y, 2) * math.sqrt(0.5)


def _norm(width: int, norm: Norm) -> nn.Module:
    return nn.GroupNorm(_GROUPS, width) if norm == "group" else nn.Identity()


def _null(labels: Tensor, classes: int) -> Tensor:
    """-1, no condition, as the class after the last."""
    return torch.where(labels < 0, classes, labels)


class AdversarialGenerator(nn.Module):
    """Latent and class to an image. It never sees one."""

    def __init__(self, architecture: AdversarialArchitecture) -> None:
        """Make the layers, with torch's own initial weights: call inside ``seeded``."""
        super().__init__()
        self.architecture = architecture
        widths, condition = architecture.generator, 2 * architecture.latent
        self.embedding = nn.Embedding(architecture.classes + 1, architecture.latent)
        self.first = nn.Linear(condition, widths[0] * FIRST * FIRST)
        self.blocks = nn.ModuleList(_Up(condition, a, b) for a, b in pairwise(widths))
        self.last = _Modulated(condition, widths[-1])
        self.colour = nn.Conv2d(widths[-1], architecture.channels, 3, padding=1)

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(n, latent) standard normal and (n,) int64, -1 for no condition -> (n, channels, side, side) in (-1, 1)."""
        known = self.embedding(_null(labels, self.architecture.classes))
        condition = torch.cat([z, known], dim=1)
        x = self.first(condition).view(len(z), -1, FIRST, FIRST)
        for block in self.blocks:
            x = block(x, condition)
        return torch.tanh(self.colour(self.last(x, condition)))


class AdversarialDiscriminator(nn.Module):
    """How real an image of a class looks. The only network that a patient's image ever enters."""

    def __init__(self, architecture: AdversarialArchitecture) -> None:
        """Make the layers, with torch's own initial weights: call inside ``seeded``."""
        super().__init__()
        self.architecture = architecture
        widths = architecture.discriminator
        self.stem = nn.Conv2d(architecture.channels, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(_Down(a, b, architecture.norm) for a, b in pairwise(widths))
        self.norm = _norm(widths[-1], architecture.norm)
        self.realness = nn.Linear(widths[-1], 1)
        self.embedding = nn.Embedding(architecture.classes + 1, widths[-1])
        nn.init.normal_(self.embedding.weight, std=widths[-1] ** -0.5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, side, side) in [-1, 1] and (n,) int64 -> (n,) logits, never (n, 1).

        A loss of (n, 1) against factors of (n,) broadcasts to (n, n), and one patient's clipping factor multiplies
        all the others' gradients (notes on DP-SGD engines: 46 times over the bound).
        """
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = silu(self.norm(x)).mean(dim=(2, 3))
        # Miyato & Koyama 2018, Eq. 3: psi(phi(x)) + y^T V phi(x)
        known = self.embedding(_null(labels, self.architecture.classes))
        out: Tensor = self.realness(x).squeeze(1) + (known * x).sum(dim=1)
        return out
