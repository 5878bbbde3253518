"""A diffusion model: MONAI's UNet inside EDM's preconditioning, its two samplers, and low-rank adapters.

Karras, Aittala, Aila & Laine 2022, "Elucidating the design space of diffusion-based generative models" (EDM, arXiv
2206.00364): Table 1 (last column), Eq. 5, Algorithms 1 and 2. Song, Meng & Ermon 2020 (DDIM, arXiv 2010.02502). Ho &
Salimans 2022 (guidance, arXiv 2207.12598). Hu et al. 2021 (LoRA, arXiv 2106.09685).

Every parameter is in a Linear, Conv2d, GroupNorm or Embedding of exactly that type, adapters too: the engines for
gradients per patient support these four, and nothing normalises over a batch. Importing this module imports MONAI,
which takes seconds, so modules that only parse a command line must not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

import torch
from torch import Tensor, nn

KIND: Final = "diffusion"
SIGMA_DATA: Final = 0.5  # EDM's standard deviation of images in [-1, 1]
SIGMA_MIN: Final = 0.002  # EDM, section 3: where sampling ends and begins
SIGMA_MAX: Final = 80.0
RHO: Final = 7.0
MOST: Final = 4096  # of any number of an architecture

Denoise = Callable[[Tensor, Tensor], Tensor]  # (x (n, ...), sigma ()) -> D(x; sigma), like x
Reach = Literal["linear", "all"]  # what an adapter goes beside: linear layers and 1x1 convolutions; or 3x3 ones too


@dataclass(frozen=True, slots=True)
class DiffusionArchitecture:
    """The public shape of a denoiser. Attention is always at the lowest level, between the two halves."""

    side: int  # px, a multiple of 2^(levels - 1)
    channels: int  # of the image: 1 or 3
    classes: int  # conditions 0 .. classes - 1; ``classes`` itself is "no condition"
    widths: tuple[int, ...]  # feature channels of each level, the finest first
    blocks: int  # residual blocks of each level
    attention: tuple[bool, ...]  # at which levels
    head_channels: int  # of one attention head
    groups: int  # of each group normalisation

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        numbers = (self.side, self.channels, self.classes, self.blocks, self.head_channels, self.groups, *self.widths)
        if not all(type(number) is int and 1 <= number <= MOST for number in numbers):
            raise ValueError(f"an architecture is whole numbers of 1 to {MOST}")
        if self.channels not in (1, 3):
            raise ValueError("images have 1 or 3 channels")
        if not (1 <= len(self.widths) == len(self.attention) <= 8 and all(type(a) is bool for a in self.attention)):
            raise ValueError("every level has a width, and says whether it has attention")
        if self.side % 2 ** (len(self.widths) - 1):
            raise ValueError(
                f"{len(self.widths)} levels need a side that is a multiple of {2 ** (len(self.widths) - 1)}"
            )
        if any(width % self.groups for width in self.widths):
            raise ValueError("every width is a multiple of the groups")
        attending = [w for w, attends in zip(self.widths, self.attention, strict=True) if attends]
        if any(width % self.head_channels for width in [*attending, self.widths[-1]]):
            raise ValueError("every width with attention, and the last, is a multiple of the head's channels")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image: (side, side) grey or (side, side, 3) RGB."""
        return (self.side, self.side) if self.channels == 1 else (self.side, self.side, 3)

    def fitted(self, channels: int, classes: int) -> DiffusionArchitecture:
        """The same network for grey (1) or colour (3) images of so many classes."""
        return replace(self, channels=channels, classes=classes)


def _preset(side: int, widths: tuple[int, ...], blocks: int, attention: str, groups: int) -> DiffusionArchitecture:
    head = 32 if widths[0] < 64 else 64
    return DiffusionArchitecture(side, 3, 10, widths, blocks, tuple(a == "a" for a in attention), head, groups)


# Parameters for RGB images of 10 classes, counted (PrivImage's in brackets, Tables 4 and 5): tiny8 178,131 · tiny16
# 281,459 · small32 1,709,571 (1.75 M) · base32 6,082,627 (6.1 M) · big32 80,521,155 (PDP-Diffusion: 80 M) · small64
# 2,247,171 (2.00 M) · big64 88,222,851. A grey net has fewer by some hundreds; a class costs 4 times the first width.
PRESETS: Final[Mapping[str, DiffusionArchitecture]] = {
    "tiny8": _preset(8, (16, 32), 1, ".a", 8),
    "tiny16": _preset(16, (16, 32, 32), 1, "..a", 8),
    "small32": _preset(32, (32, 64, 64), 2, ".aa", 8),
    "base32": _preset(32, (64, 128, 128, 128), 1, ".a..", 32),
    "big32": _preset(32, (192, 384, 384), 3, ".aa", 32),
    "small64": _preset(64, (32, 64, 64, 64), 2, "..a.", 8),
    "big64": _preset(64, (128, 256, 384, 512), 2, "..aa", 32),
}


class Denoiser(nn.Module):
    """D(x; sigma, y), the expected image behind a noisy one (EDM, Eq. 7 and Table 1, last column)."""

    def __init__(self, architecture: DiffusionArchitecture) -> None:
        # two seconds, and every process of an agent would pay them for a network that few of them build
        from monai.networks.nets.diffusion_model_unet import DiffusionModelUNet  # noqa: PLC0415

        super().__init__()
        self.architecture = architecture
        self.unet = DiffusionModelUNet(
            spatial_dims=2,
            in_channels=architecture.channels,
            out_channels=architecture.channels,
            num_res_blocks=architecture.blocks,
            channels=architecture.widths,
            attention_levels=architecture.attention,
            norm_num_groups=architecture.groups,
            num_head_channels=architecture.head_channels,
            num_class_embeds=architecture.classes + 1,
        )

    @property
    def null(self) -> int:
        """The label of no condition."""
        return self.architecture.classes

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Denoise.

        Args:
            x: (n, c, s, s) images in [-1, 1] plus noise of standard deviation ``sigma``.
            sigma: (n,) float32, positive.
            labels: (n,) int64, 0 .. classes.
        Returns:
            (n, c, s, s) float32.
        """
        s = sigma.reshape(-1, 1, 1, 1)
        total = s.square() + SIGMA_DATA**2
        c_skip = SIGMA_DATA**2 / total
        c_out = s * SIGMA_DATA * total.rsqrt()
        c_in = total.rsqrt()
        c_noise = sigma.log() / 4.0
        out: Tensor = self.unet(c_in * x, c_noise, class_labels=labels)
        return c_skip * x + c_out * out.float()

    @torch.no_grad()
    def adopt(self, classes: list[int]) -> None:
        """Let conditions that were never trained start as "no condition", not as random numbers."""
        table = self.unet.class_embedding.weight
        table[classes] = table[self.null].clone()


def loss_weight(sigma: Tensor) -> Tensor:
    """EDM, Table 1: lambda(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2; 1 / c_out^2."""
    return (sigma.square() + SIGMA_DATA**2) / (sigma * SIGMA_DATA).square()


def guided(denoiser: Denoiser, labels: Tensor, guidance: float) -> Denoise:
    """The denoiser for these (n,) labels, moved away from no condition: D_null + w (D_y - D_null).

    Ho & Salimans 2022, Eq. 6, with w = 1 for the plain conditional model (one evaluation, not two) and 0 for none.
    """
    nothing = torch.full_like(labels, denoiser.null)

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        levels = sigma.to(x.dtype).expand(len(x))
        if guidance == 1.0:
            plain: Tensor = denoiser(x, levels, labels)
            return plain
        both: Tensor = denoiser(x.repeat(2, 1, 1, 1), levels.repeat(2), torch.cat([labels, nothing]))
        of_label, of_nothing = both.chunk(2)
        return of_nothing + guidance * (of_label - of_nothing)

    return denoise


def noise_levels(steps: int, low: float = SIGMA_MIN, high: float = SIGMA_MAX, rho: float = RHO) -> Tensor:
    """(steps + 1,) float64, from ``high`` to ``low`` and then 0 (EDM, Eq. 5).

    Raises:
        ValueError: fewer than two steps, or levels that do not fall.
    """
    if not (steps >= 2 and 0.0 < low < high < math.inf and rho > 0.0):
        raise ValueError("a sampler takes at least two steps, from a high level of noise to a low one")
    part = torch.linspace(0.0, 1.0, steps, dtype=torch.float64)
    levels = (high ** (1.0 / rho) + part * (low ** (1.0 / rho) - high ** (1.0 / rho))) ** rho
    return torch.cat([levels, levels.new_zeros(1)])


@dataclass(frozen=True, slots=True)
class Churn:
    """Fresh noise in every step of Algorithm 2: EDM's S_churn, S_tmin, S_tmax, S_noise."""

    amount: float
    low: float = 0.0
    high: float = math.inf
    noise: float = 1.0
    generator: torch.Generator | None = None

    def moved(self, x: Tensor, sigma: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Lines 4 to 6: a little more noise, and the level that it makes."""
        gamma = min(self.amount / steps, math.sqrt(2.0) - 1.0) if self.low <= float(sigma) <= self.high else 0.0
        raised = sigma * (1.0 + gamma)
        fresh = torch.randn(x.shape, generator=self.generator, dtype=x.dtype, device=x.device)
        return x + (raised.square() - sigma.square()).sqrt() * self.noise * fresh, raised


@torch.no_grad()
def heun(denoise: Denoise, noise: Tensor, levels: Tensor, churn: Churn | None = None) -> Tensor:
    """EDM, Algorithm 1; Algorithm 2 where there is a ``churn``. Two evaluations a step, one in the last.

    Args:
        denoise: D(x; sigma).
        noise: (n, ...) standard normal.
        levels: of :func:`noise_levels`.
        churn: None for the deterministic sampler.
    Returns:
        (n, ...) samples.
    """
    x = noise * levels[0]
    for sigma, target in pairwise(levels):
        at = sigma
        if churn is not None:
            x, at = churn.moved(x, sigma, len(levels) - 1)
        slope = (x - denoise(x, at)) / at
        moved = x + (target - at) * slope
        if target > 0.0:
            second = (moved - denoise(moved, target)) / target
            moved = x + (target - at) * 0.5 * (slope + second)
        x = moved
    return x


@torch.no_grad()
def ddim(denoise: Denoise, noise: Tensor, levels: Tensor) -> Tensor:
    """Deterministic DDIM, one evaluation a step.

    Song et al. 2020, Eq. 13: with x scaled as here (alpha = 1), DDIM is Euler's method in sigma. Arguments and
    result as of :func:`heun`.
    """
    x = noise * levels[0]
    for sigma, target in pairwise(levels):
        clean = denoise(x, sigma)
        x = clean + (target / sigma) * (x - clean)
    return x


class LowRankLinear(nn.Module):
    """W x + B A x with W frozen (Hu et al. 2021, Eq. 3, at a scale of 1): A Gaussian, B zero at the start."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=base.in_features**-0.5)
        nn.init.zeros_(self.up.weight)
        self.to(base.weight.device)  # drawn on the host: a seed gives the same on every device

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One layer that does the same; the base is changed."""
        self.base.weight += self.up.weight @ self.down.weight
        return self.base


class LowRankConv(nn.Module):
    """The same beside a square, undilated convolution: A has its kernel and stride, B is 1x1."""

    def __init__(self, base: nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        kernel, stride, padding = base.kernel_size[0], base.stride[0], base.padding[0]
        self.down = nn.Conv2d(base.in_channels, rank, kernel, stride, padding, bias=False)
        self.up = nn.Conv2d(rank, base.out_channels, 1, bias=False)
        nn.init.normal_(self.down.weight, std=base.weight[0].numel() ** -0.5)
        nn.init.zeros_(self.up.weight)
        self.to(base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """(n, in, h, w) -> (n, out, h', w')."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out

    @torch.no_grad()
    def merged(self) -> nn.Conv2d:
        """One layer that does the same; the base is changed."""
        self.base.weight += torch.einsum("or,rihw->oihw", self.up.weight[:, :, 0, 0], self.down.weight)
        return self.base


def with_lora(denoiser: Denoiser, rank: int, reach: Reach = "linear") -> Denoiser:
    """A copy of which only low-rank factors and the table of classes are trained; it draws the same at first.

    The classes stay trainable as a whole: they are what the private images bring and the public ones may not have.
    Factors are drawn from the global generator: call it within ``seeded``.

    Raises:
        ValueError: a rank below 1, or adapters upon adapters.
    """
    if not rank >= 1:
        raise ValueError("an adapter has a rank of at least 1")
    if any(isinstance(module, LowRankLinear | LowRankConv) for module in denoiser.modules()):
        raise ValueError("the network has adapters already: merge them first")
    out = copy.deepcopy(denoiser).requires_grad_(False)
    for parent in list(out.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, LowRankLinear(child, rank))
            elif type(child) is nn.Conv2d and (reach == "all" or child.kernel_size == (1, 1)):
                setattr(parent, name, LowRankConv(child, rank))
    out.unet.class_embedding.requires_grad_(True)
    return out


def merged(denoiser: Denoiser) -> Denoiser:
    """A copy without adapters that draws the same."""
    out = copy.deepcopy(denoiser)
    for parent in list(out.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRankLinear | LowRankConv):
                setattr(parent, name, child.merged())
    return out
