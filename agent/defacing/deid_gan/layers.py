"""The blocks of C-DeID-GAN: resampling that keeps a mask binary, and MobileNet-v2 convolutions in three dimensions.

"Adversarial privacy preservation in MRI scans of the brain", section 3.2; Sandler et al. 2018 (MobileNetV2, arXiv
1801.04381), section 3.3; Karras et al. 2018 (arXiv 1710.10196), section 4.2, for a norm that needs no batch: the
paper trains on two heads at once, and a statistic of two heads would carry one into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import avg_pool3d, conv3d, interpolate, leaky_relu, pad
from torch.utils.checkpoint import checkpoint

SLOPE: Final = 0.2  # of the leaky ReLU
EPS: Final = 1e-6
FAINT: Final = 0.1  # of the usual deviation of a scale's last weights, in the beginning
BINARY: Final = 2  # of gamma's channels, the first: hull and brain mask; the third holds intensities
CONDITION: Final = 3


def pooled(x: Tensor, side: int) -> Tensor:
    """Average pooling.

    Args:
        x: (n, c, S, S, S), S a multiple of ``side``.
        side: of the result.
    Returns:
        (n, c, side, side, side); ``x`` itself where it has that side already.
    Raises:
        ValueError: not a cube, or of another side.
    """
    if x.ndim != 5 or len(set(x.shape[2:])) != 1 or x.shape[2] % side:
        raise ValueError(f"a volume is (n, c, S, S, S), S a multiple of {side}")
    return x if x.shape[2] == side else avg_pool3d(x, x.shape[2] // side)


def probably_pooled(masks: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Probabilistic average pooling (section 3.2, "Resampling blocks"): the average is a probability, and is drawn.

    In expectation the share of ones is kept, in the whole and in every voxel, and what comes out is binary still.
    Drawn on the processor, so that a run is the same on any device.

    Args:
        masks: (n, c, S, S, S) of 0 and 1.
        side: of the result.
        generator: on the CPU.
    Returns:
        (n, c, side, side, side) of 0 and 1, of the same type and on the same device.
    """
    share = pooled(masks, side)
    if share is masks:
        return masks  # nothing to draw: a probability of 0 or 1
    return (torch.rand(share.shape, generator=generator).to(share.device) < share).to(share.dtype)


def pyramid(gamma: Tensor, sides: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """gamma_k for every scale: masks by probabilistic average pooling, intensities by average pooling.

    Args:
        gamma: (n, 3, S, S, S): hull and brain mask of 0 and 1, intensities of the brain.
        sides: of the scales; each is pooled from the whole, not from the one before, so that draws are independent.
        generator: on the CPU.
    Returns:
        (n, 3, s, s, s) for each of ``sides``.
    Raises:
        ValueError: another shape.
    """
    if gamma.ndim != 5 or gamma.shape[1] != CONDITION:
        raise ValueError("gamma is (n, 3, S, S, S)")
    return [
        torch.cat([probably_pooled(gamma[:, :BINARY], side, generator), pooled(gamma[:, BINARY:], side)], dim=1)
        for side in sides
    ]


def doubled(x: Tensor) -> Tensor:
    """Nearest-neighbour upsampling to twice the side."""
    return interpolate(x, scale_factor=2, mode="nearest")


class _Depthwise(torch.autograd.Function):
    """A depthwise 3x3x3 convolution whose gradients are made of fast ones: on a processor, a fifth of torch's time.

    The gradient of the input is the convolution of the output's with the mirrored kernel; that of the kernel, 27
    products of a shifted input with the output's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last_3d)
        ctx.save_for_backward(x, weight)
        return conv3d(x, weight, bias, padding=1, groups=x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last_3d)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = conv3d(grad, weight.flip(2, 3, 4), padding=1, groups=x.shape[1])
        if ctx.needs_input_grad[1]:
            last, (i, j, k) = grad.permute(0, 2, 3, 4, 1), x.shape[2:]  # channels last, so that memory is walked once
            wide = pad(x.permute(0, 2, 3, 4, 1), (0, 0, 1, 1, 1, 1, 1, 1))
            parts = [
                (wide[:, a : a + i, b : b + j, c : c + k] * last).flatten(0, 3).sum(0)
                for a in range(3)
                for b in range(3)
                for c in range(3)
            ]
            of_weight = torch.stack(parts, dim=1).reshape(weight.shape)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum((0, 2, 3, 4))
        return of_x, of_weight, of_bias


class Depthwise(nn.Conv3d):
    """A 3x3x3 filter for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, s, s, s) -> the same shape."""
        if x.device.type != "cpu" or self.bias is None or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        out: Tensor = _Depthwise.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch types none
        return out


class ChannelNorm(nn.Module):
    """Each voxel's channels scaled to a mean square of 1 (Karras et al. 2018, Eq. 4.2), then by learned gains.

    It looks at one voxel of one head: not at the batch, not at the rest of the volume.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, s, s, s) -> the same shape."""
        return x * (x.square().mean(dim=1, keepdim=True) + EPS).rsqrt() * self.gain[:, None, None, None]


class InvertedResidual(nn.Module):
    """MobileNetV2's block in three dimensions: expand by 1x1x1, filter each channel by 3x3x3, project by 1x1x1.

    The norm stands in front, where there are few channels: behind the expansion it would cost most of the memory.
    """

    def __init__(self, width: int, expand: int) -> None:
        super().__init__()
        inner = width * expand
        self.norm = ChannelNorm(width)
        self.expand = nn.Conv3d(width, inner, 1)
        self.filter = Depthwise(inner)
        self.project = nn.Conv3d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width, s, s, s) -> the same shape."""
        y = leaky_relu(self.expand(self.norm(x)), SLOPE)
        y = leaky_relu(self.filter(y), SLOPE)
        out: Tensor = x + self.project(y)  # linear: MobileNetV2, section 3.2
        return out


class Scale(nn.Module):
    """What generator and discriminator do at one scale: maps and gamma_k in, maps of a few channels out.

    ``passed`` channels come out, 1 in the paper: "bottlenecks between scales".
    """

    def __init__(self, inputs: int, width: int, passed: int, expand: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv3d(inputs + CONDITION, width, 3, padding=1)
        self.blocks = nn.ModuleList([InvertedResidual(width, expand) for _ in range(blocks)])
        self.norm = ChannelNorm(width)
        self.out = nn.Conv3d(width, passed, 1)
        with torch.no_grad():  # a scale begins by adding little to what it was given, and learns faster
            for name, parameter in self.out.named_parameters():
                parameter.mul_(FAINT if name == "weight" else 0.0)

    def forward(self, x: Tensor, gamma: Tensor) -> Tensor:
        """(n, inputs, s, s, s) and gamma_k (n, 3, s, s, s) -> (n, passed, s, s, s)."""
        both = torch.cat([x, gamma], dim=1).contiguous(memory_format=torch.channels_last_3d)
        y = leaky_relu(self.stem(both), SLOPE)
        for block in self.blocks:
            y = block(y)
        out: Tensor = self.out(leaky_relu(self.norm(y), SLOPE))
        return out


def checkpointed(block: Callable[[Tensor, Tensor], Tensor], x: Tensor, gamma: Tensor, sparing: bool) -> Tensor:
    """A scale's output; ``sparing`` forgets what lies between and computes it again for the gradient.

    Chen et al. 2016 (arXiv 1604.06174). The same numbers, bit for bit: nothing in a block is drawn.
    """
    if not (sparing and torch.is_grad_enabled()):
        return block(x, gamma)
    out: Tensor = checkpoint(block, x, gamma, use_reentrant=False, preserve_rng_state=False)
    return out
