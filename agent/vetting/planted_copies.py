"""Near-duplicates of images, as a generator that remembers a patient would make them: what a vetting must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

TURN: Final = torch.pi * 5 / 180  # rad
CROP: Final = 0.1  # of the side is cut off
LIGHT: Final = (0.15, 0.3)  # brightness in units of [-1, 1], and contrast as a factor 1 ± so much
NOISE: Final = 0.1  # standard deviation in [-1, 1]: 13 levels of 256


def exact(images: Tensor, _: torch.Generator) -> Tensor:
    """The images (n, c, h, w) in [-1, 1] themselves."""
    return images


def contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Darker or brighter, flatter or harder."""
    light, factor = (_uniform(images, most, generator) for most in LIGHT)
    return (images * (1.0 + factor) + light).clamp(-1.0, 1.0)


def rotated(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turned by ``TURN`` about the middle, one way or the other."""
    return _seen_through(
        images, _sign(images, generator) * TURN, torch.ones(len(images)), torch.zeros(len(images), 2)
    )


def cropped(images: Tensor, generator: torch.Generator) -> Tensor:
    """A window that lacks ``CROP`` of either side, anywhere, at the old size."""
    where = (torch.rand(len(images), 2, generator=generator) * 2.0 - 1.0) * CROP
    return _seen_through(images, torch.zeros(len(images)), torch.full((len(images),), 1.0 - CROP), where)


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    """With Gaussian noise."""
    return (images + NOISE * torch.randn(images.shape, generator=generator)).clamp(-1.0, 1.0)


def flipped(images: Tensor, _: torch.Generator) -> Tensor:
    """Left and right exchanged."""
    return images.flip(3)


def combined(images: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast, rotation, crop and noise, one on the other, and every other one flipped."""
    for change in (rotated, cropped, contrast, noisy):
        images = change(images, generator)
    return torch.where(_sign(images, generator)[:, None, None, None] > 0, images, images.flip(3))


KINDS: Final[Mapping[str, Callable[[Tensor, torch.Generator], Tensor]]] = MappingProxyType(
    {
        "exact": exact,
        "contrast": contrast,
        "rotation": rotated,
        "crop": cropped,
        "noise": noisy,
        "flip": flipped,
        "combined": combined,
    }
)


SINGLE: Final = tuple(kind for kind in KINDS if kind != "combined")  # one change each


def _uniform(images: Tensor, most: float, generator: torch.Generator) -> Tensor:
    return ((torch.rand(len(images), generator=generator) * 2.0 - 1.0) * most)[:, None, None, None]


def _sign(images: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (len(images),), generator=generator) * 2.0 - 1.0


def _seen_through(images: Tensor, angles: Tensor, zooms: Tensor, shifts: Tensor) -> Tensor:
    """Resampled: angles (n,) in rad, sides that are seen (n,), their middles (n, 2) in half sides; edges go on."""
    cos, sin = zooms * angles.cos(), zooms * angles.sin()
    theta = torch.stack([torch.stack([cos, -sin, shifts[:, 0]], 1), torch.stack([sin, cos, shifts[:, 1]], 1)], 1)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)
