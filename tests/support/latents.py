"""A tiny autoencoder with weights drawn from a seed, as a file: what a latent diffusion model needs, made at once."""

from __future__ import annotations

from functools import cache

import torch

from agent.models.diffusion.autoencoder import (
    PRESETS,
    Autoencoder,
    AutoencoderNet,
    autoencoder_bytes,
    autoencoder_from,
)
from agent.models.training_loop import seeded


@cache
def tiny_autoencoder_file(channels: int = 1, seed: int = 5) -> bytes:
    """Untrained, 16 px. Its latents have a mean of about 0 and a deviation of about 1, as a trained one's have.

    What it decodes is not the picture that it encoded: a test of quality trains its own.
    """
    with seeded(seed):
        net = AutoencoderNet(PRESETS["tiny16"].fitted(channels)).train(mode=False)
        with torch.no_grad():
            seen = net.encode(torch.rand(64, channels, 16, 16) * 2.0 - 1.0)[0]
            net.centre(seen.mean(dim=(0, 2, 3)))
            spread = float((seen - seen.mean(dim=(0, 2, 3), keepdim=True)).std())
    return autoencoder_bytes(net, 1.0 / spread, {})


@cache
def tiny_autoencoder(channels: int = 1, seed: int = 5) -> Autoencoder:
    """The same, read, and vouched for: 16 px grey (or RGB), latents (2, 8, 8)."""
    return autoencoder_from(tiny_autoencoder_file(channels, seed), "public")
