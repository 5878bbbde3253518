"""Near-duplicates as a latent model makes them: what a verifier is to recognise as the same image."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from agent.models.diffusion.autoencoder import Autoencoder
from agent.models.recognition.verifier_training import NearDuplicates

# noise on the latents, in units of their deviation, which the autoencoder's scale makes 1; 0: the round trip
NEAR: Final = (0.0, 0.1, 0.2, 0.35)


def near_duplicates(through: Autoencoder) -> NearDuplicates:
    """Images through the autoencoder, with noise on the latents: for each a level of ``NEAR``, by chance.

    What a latent model remembers comes back so: blurred where the decoder blurs, and a little beside the original.
    Two images of one person, from a hospital's machine both, do not show that.

    Args:
        through: of public images, on the device of the training.
    Returns:
        What makes of images (n, c, s, s) in [-1, 1] as many of that shape, by the generator alone.
    """

    def make(images: Tensor, generator: torch.Generator) -> Tensor:
        latents = through.encode(images)
        chosen = torch.randint(len(NEAR), (len(images),), generator=generator, device=generator.device)
        noise = torch.tensor(NEAR)[chosen.cpu()][:, None, None, None].to(latents.device)
        drawn = torch.randn(latents.shape, generator=generator, device=generator.device).to(latents.device)
        return through.decode(latents + noise * drawn).clamp(-1, 1)

    return make
