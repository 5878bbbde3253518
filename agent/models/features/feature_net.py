"""What a feature network is to everything that uses one: named maps and an embedding, frozen and differentiable."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from agent.models.image_tensors import resized, with_channels
from agent.models.weights import Origin


class FeatureNet(Protocol):
    """A frozen network that computes features. Every figure made with it names the network and its digest.

    Images are (n, 1 | 3, h, w) in [-1, 1], as :func:`agent.models.image_tensors.to_tensor` gives them; resizing,
    channels and normalisation are the network's own affair. Gradients flow to the images, never to the parameters.
    """

    @property
    def name(self) -> str:
        """Of the network and what it was trained on: numbers across names do not compare."""

    @property
    def origin(self) -> Origin:
        """Where its weights come from (P6)."""

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """Feature maps (n, c_i, h_i, w_i), shallow first; no more than ``depth`` of them are computed."""

    def embed(self, images: Tensor) -> Tensor:
        """(n, d) float32."""


class FrozenNetwork(torch.nn.Module):
    """What the feature networks here have in common: always in evaluation, no gradient for a weight.

    The parameters follow the images to their device.
    """

    def __init__(self, name: str, origin: Origin, channels: int = 3) -> None:
        """Give it its name; the subclass makes its layers and calls :meth:`freeze`."""
        super().__init__()
        self.name = name
        self.origin = origin
        self.channels = channels

    def freeze(self) -> Self:
        """No parameter learns and no statistic moves from here on."""
        self.requires_grad_(requires_grad=False)
        return self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: ``train()`` on a model that contains this network must not change it."""
        del mode
        return super().train(False)

    def prepared(self, images: Tensor, most: int | None = None, exactly: int | None = None) -> Tensor:
        """Images with this network's channels, at most ``most`` or ``exactly`` so many pixels a side.

        Raises:
            ValueError: not (n, 1 | 3, h, w).
        """
        if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape:
            raise ValueError("images are (n, 1, h, w) or (n, 3, h, w)")
        first = next(self.parameters(), None)
        if first is not None and first.device != images.device:
            self.to(images.device)
        images = with_channels(images, self.channels)
        if exactly is not None:
            return resized(images, exactly)
        return images if most is None or max(images.shape[-2:]) <= most else resized(images, most)

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """Feature maps, shallow first."""
        raise NotImplementedError  # abstract: what every network here has of its own

    def embed(self, images: Tensor) -> Tensor:
        """Mean and standard deviation of every channel of every map, side by side: (n, 2 Σ c_i)."""
        return torch.cat([moments(m) for m in self.maps(images)], dim=1)


def moments(maps: Tensor) -> Tensor:
    """(n, c, h, w) -> (n, 2c): spatial mean and standard deviation, in float32 whatever the maps are."""
    flat = maps.float().flatten(2)
    # the small constant keeps the root's slope finite where a map is constant
    return torch.cat([flat.mean(dim=2), (flat.var(dim=2, unbiased=False) + 1e-8).sqrt()], dim=1)


def depth_of(depth: int | None, most: int) -> int:
    """How many maps to compute.

    Raises:
        ValueError: none, or more than there are.
    """
    if depth is None:
        return most
    if not 1 <= depth <= most:
        raise ValueError(f"a depth is between 1 and {most}")
    return depth
