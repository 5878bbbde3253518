"""What training on images shares: the pool, the learning rate's course, and random views of images.

Shifts, turns, crops, flips, light, blur and noise, in plain torch.

Every number is drawn from the generator that is passed in, on the processor, so that a run is the same on any device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

from agent.models.image_tensors import resized, with_channels
from protos.common.canonical_json import canonical


@dataclass(frozen=True, slots=True)
class Views:
    """How far a view may be from its image. Zero leaves a thing alone."""

    shift: float = 0.06  # of the image's side, either way
    turn: float = 0.1  # rad, either way
    zoom: tuple[float, float] = (0.95, 1.05)  # of the side that is seen: below 1 is a crop
    flip: bool = False  # left and right: a mirrored eye is another eye
    light: float = 0.2  # brightness, in units of [-1, 1]; and contrast, as a factor 1 ± light
    tint: float = 0.0  # the same for every channel on its own
    blur: float = 0.0  # Gaussian standard deviation in pixels, at most; half of the images stay sharp
    noise: float = 0.02  # standard deviation

    def __post_init__(self) -> None:
        """Refuse views that cannot be."""
        amounts = (self.shift, self.turn, self.light, self.tint, self.blur, self.noise)
        if not all(0 <= a < float("inf") for a in amounts) or not 0 < self.zoom[0] <= self.zoom[1] <= 2:
            raise ValueError("views differ by finite amounts that are not negative, and a zoom lies in (0, 2]")


class Pool:
    """Images of a training set, as a network sees them; kept as bytes, so that a large set fits."""

    def __init__(self, images: NDArray[np.uint8], side: int, channels: int, device: torch.device) -> None:
        """Take images (n, h, w) or (n, h, w, 3).

        Raises:
            ValueError: another shape or type, nothing, or images that are all the same.
        """
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
            raise ValueError("images are (n, h, w) or (n, h, w, 3) uint8")
        if not images.size or bool((images == images[:1]).all()):
            raise ValueError("the images do not differ: there is nothing to learn")
        planes = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        self.images = torch.from_numpy(np.ascontiguousarray(planes)).to(device)
        self.side, self.channels, self.device = side, channels, device

    def take(self, index: Tensor) -> Tensor:
        """The images of these places: (m, channels, side, side) in [-1, 1]."""
        chosen = self.images[index.to(self.device)].float() / 127.5 - 1.0
        return resized(with_channels(chosen, self.channels), self.side)


def run_digest(config: Mapping[str, Any], *arrays: NDArray[Any]) -> str:
    """SHA-256 of a configuration and its data: what a run is called."""
    digest = hashlib.sha256(canonical(config))
    for array in arrays:
        digest.update(f"{array.shape}{array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def eased(done: int, steps: int) -> float:
    """The learning rate's factor: up over the first twentieth, then half a cosine down to 1 %."""
    warm = max(1, steps // 20)
    if done < warm:
        return (done + 1) / warm
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (done - warm) / max(1, steps - warm)))


IDENTITY = Views()  # what another visit changes: the person stays
SELF_SUPERVISED = Views(0.0, 0.2, (0.45, 1.0), flip=True, light=0.4, tint=0.2, blur=1.5, noise=0.02)  # SimCLR, app. A


def view(images: Tensor, how: Views, generator: torch.Generator) -> Tensor:
    """One random view of each image (n, c, h, w) in [-1, 1]; the same shape, clipped to [-1, 1]."""
    out = _lit(_placed(images, how, generator), how, generator)
    if how.blur > 0:
        out = _blurred(out, how.blur, generator)
    if how.noise > 0:
        out = out + how.noise * torch.randn(out.shape, generator=generator).to(out)
    return out.clamp(-1.0, 1.0)


def _between(n: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=generator)


def _placed(images: Tensor, how: Views, generator: torch.Generator) -> Tensor:
    n = len(images)
    zoom, turn = _between(n, *how.zoom, generator), _between(n, -how.turn, how.turn, generator)
    # a crop may lie anywhere inside the image; beyond that, by ``shift``
    room = (1 - zoom).clamp_min(0.0)[:, None] + 2 * how.shift
    move = room * (2 * torch.rand((n, 2), generator=generator) - 1)
    mirror = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0) if how.flip else torch.ones(n)
    cos, sin = zoom * torch.cos(turn), zoom * torch.sin(turn)
    theta = torch.stack([torch.stack([mirror * cos, -sin], 1), torch.stack([mirror * sin, cos], 1)], 1)
    grid = affine_grid(torch.cat([theta, move[:, :, None]], 2).to(images), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def _lit(images: Tensor, how: Views, generator: torch.Generator) -> Tensor:
    n, c = images.shape[:2]
    contrast, bright = (
        1 + _between(n, -how.light, how.light, generator),
        _between(n, -how.light, how.light, generator),
    )
    tints = how.tint * (2 * torch.rand((2, n, c), generator=generator) - 1)
    factor = contrast[:, None] * (1 + tints[0])
    term = bright[:, None] + tints[1]
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images - mean) * factor[:, :, None, None].to(images) + mean + term[:, :, None, None].to(images)


def _blurred(images: Tensor, most: float, generator: torch.Generator) -> Tensor:
    n, c, h, w = images.shape
    sigma = torch.where(torch.rand(n, generator=generator) < 0.5, 0.0, _between(n, 0.0, most, generator))
    reach = min(int(3 * most) + 1, h - 1, w - 1)
    away = torch.arange(-reach, reach + 1, dtype=torch.float32)
    bell = torch.exp(-0.5 * (away / sigma.clamp_min(1e-2)[:, None]) ** 2)
    bell = (bell / bell.sum(dim=1, keepdim=True)).repeat_interleave(c, dim=0).to(images)
    flat = images.reshape(1, n * c, h, w)
    flat = conv2d(pad(flat, (reach, reach, 0, 0), mode="replicate"), bell[:, None, None, :], groups=n * c)
    flat = conv2d(pad(flat, (0, 0, reach, reach), mode="replicate"), bell[:, None, :, None], groups=n * c)
    return flat.reshape(n, c, h, w)
