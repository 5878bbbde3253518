"""Adaptive discriminator augmentation: differentiable augmentations that do not leak, and their controller.

Karras et al. 2020b (arXiv 2006.06676): the 'bgc' set of section 3 and appendix B (x-flips, 90-degree rotations,
integer translation; isotropic and anisotropic scale, rotation, fractional translation; brightness, contrast, luma
flip, hue, saturation), each applied to each image with probability p. The generator sees them through the
discriminator only.

Unlike the published code, images are sampled bilinearly, without a wavelet filter, and mirrored at the edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from agent.models.stylegan.resampling import in_float

# Appendix B: standard deviations and limits
SHIFT: Final = 0.125  # integer translation, uniform, as a share of the width
SCALE: Final = 0.2  # log-normal, in octaves, isotropic and anisotropic
FRACTION: Final = 0.125  # fractional translation, normal
BRIGHTNESS: Final = 0.2
CONTRAST: Final = 0.5  # octaves
SATURATION: Final = 1.0  # octaves
BILINEAR, REFLECTED = 0, 2  # the numbers of these modes in torch's own operators


@dataclass(frozen=True, slots=True)
class AugmentationControl:
    """How p follows the discriminator (2020b, section 3, Eq. 1: r_t = E[sign D(real)])."""

    target: float = 0.6  # of r_t
    kimg: float = 500.0  # thousands of images in which p can go from 0 to 1
    every: int = 4  # minibatches between two adjustments
    most: float = 0.8  # section 2.2: above, augmentations begin to leak into the images

    def __post_init__(self) -> None:
        """Refuse what controls nothing."""
        if not (-1.0 < self.target < 1.0 and self.kimg > 0.0 and self.every >= 1 and 0.0 <= self.most <= 1.0):
            raise ValueError("the target is a mean sign, the speed positive, and p at most 1")

    def moved(self, p: float, signs: float, images: int) -> float:
        """The next p, from the mean sign of the logits of ``images`` real images.

        Raises:
            ValueError: a mean sign that is none.
        """
        if not -1.0 <= signs <= 1.0:
            raise ValueError("a mean sign is between -1 and 1")
        direction = (signs > self.target) - (signs < self.target)
        return min(max(p + direction * images / (self.kimg * 1000.0), 0.0), self.most)


def augmented(images: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Augment each image by itself.

    Args:
        images: (n, 1 | 3, r, r) in [-1, 1].
        p: probability of each augmentation; 0 gives the images themselves.
        generator: on its device or the CPU.
    Returns:
        The same shape; twice differentiable with respect to ``images``.
    Raises:
        ValueError: another shape or no probability.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.shape[2] != images.shape[3]:
        raise ValueError("images are (n, 1 | 3, r, r)")
    if not 0.0 <= p <= 1.0:
        raise ValueError("p is a probability")
    if p == 0.0:
        return images
    n, channels, size, _ = images.shape
    with in_float(images):  # images keep their 8 bits
        theta = geometry(n, size, p, generator).to(images.device)
        grid = affine_grid(theta[:, :2], [n, channels, size, size], align_corners=False)
        matrices = colours(n, p, generator, grey=channels == 1).to(images.device)
        return _coloured(sampled(images.float(), grid), matrices)


class _Draw:
    """One random number an image, replaced by what does nothing where an augmentation is not applied."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.generator = generator

    def uniform(self) -> Tensor:
        return torch.rand(self.count, generator=self.generator, device=self.generator.device)

    def normal(self) -> Tensor:
        return torch.randn(self.count, generator=self.generator, device=self.generator.device)

    def where(self, p: float, values: Tensor, nothing: float) -> Tensor:
        return torch.where(self.uniform() < p, values, torch.full_like(values, nothing))


def geometry(count: int, size: int, p: float, generator: torch.Generator) -> Tensor:
    """Where each sample of an output is taken: (count, 3, 3), homogeneous coordinates in [-1, 1] x [-1, 1]."""
    draw = _Draw(count, generator)
    flip = draw.where(p, 1.0 - 2.0 * torch.floor(draw.uniform() * 2.0), 1.0)
    out = _scaling(flip, torch.ones_like(flip))
    out = out @ _rotation(draw.where(p, torch.floor(draw.uniform() * 4.0), 0.0) * (math.pi / 2.0))
    whole = [
        draw.where(p, torch.round((draw.uniform() * 2.0 - 1.0) * (SHIFT * size)) * 2.0 / size, 0.0) for _ in "xy"
    ]
    out = out @ _translation(whole[0], whole[1])
    scale = draw.where(p, torch.exp2(draw.normal() * SCALE), 1.0)
    out = out @ _scaling(1.0 / scale, 1.0 / scale)
    # two rotations, so that together they are applied with probability p (appendix B)
    turned = 1.0 - math.sqrt(1.0 - p)
    out = out @ _rotation(draw.where(turned, (draw.uniform() * 2.0 - 1.0) * math.pi, 0.0))
    scale = draw.where(p, torch.exp2(draw.normal() * SCALE), 1.0)
    out = out @ _scaling(1.0 / scale, scale)
    out = out @ _rotation(draw.where(turned, (draw.uniform() * 2.0 - 1.0) * math.pi, 0.0))
    parts = [draw.where(p, draw.normal() * (FRACTION * 2.0), 0.0) for _ in "xy"]
    return out @ _translation(parts[0], parts[1])


def colours(count: int, p: float, generator: torch.Generator, grey: bool = False) -> Tensor:
    """(count, 4, 4): what is done to (r, g, b, 1). Of grey images only brightness, contrast and luma flip."""
    draw = _Draw(count, generator)
    eye = torch.eye(4, device=generator.device)
    luma = torch.tensor([1.0, 1.0, 1.0, 0.0], device=generator.device) / math.sqrt(3.0)
    onto = torch.outer(luma, luma)
    across = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0], device=generator.device)) - onto
    offset = draw.where(p, draw.normal() * BRIGHTNESS, 0.0)
    out = eye.repeat(count, 1, 1)
    out[:, :3, 3] = offset[:, None]
    contrast = draw.where(p, torch.exp2(draw.normal() * CONTRAST), 1.0)
    out = torch.diag_embed(torch.stack([contrast, contrast, contrast, torch.ones_like(contrast)], dim=1)) @ out
    flip = draw.where(p, torch.floor(draw.uniform() * 2.0), 0.0)
    out = (eye - 2.0 * onto * flip[:, None, None]) @ out
    if grey:
        return out
    out = _hue(draw.where(p, (draw.uniform() * 2.0 - 1.0) * math.pi, 0.0)) @ out
    saturation = draw.where(p, torch.exp2(draw.normal() * SATURATION), 1.0)
    return (eye + across * (saturation - 1.0)[:, None, None]) @ out


def _coloured(images: Tensor, matrices: Tensor) -> Tensor:
    if images.shape[1] == 1:
        row = matrices[:, :3].mean(dim=1)  # a grey image is r = g = b, and stays grey
        return images * row[:, :3].sum(dim=1)[:, None, None, None] + row[:, 3][:, None, None, None]
    flat = images.flatten(2)
    return (matrices[:, :3, :3] @ flat + matrices[:, :3, 3:]).view_as(images)


def _matrix(rows: list[list[Tensor | float]], like: Tensor) -> Tensor:
    cells = [torch.stack([torch.as_tensor(c).to(like).expand_as(like) for c in row], dim=-1) for row in rows]
    return torch.stack(cells, dim=-2)


def _scaling(x: Tensor, y: Tensor) -> Tensor:
    return _matrix([[x, 0.0, 0.0], [0.0, y, 0.0], [0.0, 0.0, 1.0]], x)


def _translation(x: Tensor, y: Tensor) -> Tensor:
    return _matrix([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]], x)


def _rotation(angle: Tensor) -> Tensor:
    c, s = torch.cos(angle), torch.sin(angle)
    return _matrix([[c, s, 0.0], [-s, c, 0.0], [0.0, 0.0, 1.0]], angle)


def _hue(angle: Tensor) -> Tensor:
    """Rotations of (r, g, b) about the grey axis (Rodrigues)."""
    c, s = torch.cos(angle), torch.sin(angle) / math.sqrt(3.0)
    k = (1.0 - c) / 3.0
    return _matrix(
        [
            [c + k, k - s, k + s, 0.0],
            [k + s, c + k, k - s, 0.0],
            [k - s, k + s, c + k, 0.0],
            [0.0, 0.0, 0.0, 1.0],
        ],
        angle,
    )


def sampled(images: Tensor, grid: Tensor) -> Tensor:
    """Bilinear ``grid_sample``, mirrored at the edges, twice differentiable with respect to the images.

    torch's own has no second derivative, which R1 through an augmentation needs. Sampling is linear in the images:
    the derivative of its adjoint is the sampling itself.
    """
    out: Tensor = _Sampled.apply(images, grid)  # type: ignore[no-untyped-call]  # torch does not type it
    return out


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, grid: Tensor) -> Tensor:
        ctx.save_for_backward(grid)
        ctx.shape = images.shape
        return grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grid,) = ctx.saved_tensors
        return _Adjoint.apply(grads[0], grid, ctx.shape), None  # type: ignore[no-untyped-call]  # as above


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, grid: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(grid)
        unused = grad.new_zeros(shape)  # the images: only their shape matters to this half of the operator
        out: Tensor = torch.ops.aten.grid_sampler_2d_backward(
            grad.contiguous(), unused, grid, BILINEAR, REFLECTED, False, [True, False]
        )[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grid,) = ctx.saved_tensors
        return sampled(grads[0], grid), None, None
