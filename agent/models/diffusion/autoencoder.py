"""The autoencoder of a latent diffusion model: images as small latents of standard deviation about 1, and back.

Rombach, Blattmann, Lorenz, Esser & Ommer 2022, "High-resolution image synthesis with latent diffusion models" (arXiv
2112.10752), section 3.1 and appendix G; Privacy Distillation, section 2.1. MONAI's network, without attention: a
latent is a place of the image, and any size costs its pixels. Only groups of one image's channels are normalised,
never a batch.

It is trained on public or synthetic images (:mod:`agent.models.diffusion.autoencoder_training`) and never on the
cohort: a decoder that saw patients is a private component of all that it decodes (P6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from agent.models.features.feature_net import FrozenNetwork
from agent.models.image_tensors import Shape
from agent.models.weights import Origin, Provenance, WeightsError, built, pack, unpack

KIND: Final = "autoencoder"
MOST: Final = 4096  # of any number of an architecture
_PIXELS: Final = 1 << 22  # at once, at most, when there is nothing to differentiate: a bound on memory


@dataclass(frozen=True, slots=True)
class AutoencoderArchitecture:
    """The public shape of an autoencoder; every level but the first halves the image."""

    side: int  # px, a multiple of 2^(levels - 1)
    channels: int  # of the image: 1 or 3
    latent: int  # channels of the latents
    widths: tuple[int, ...]  # feature channels of each level, the finest first
    blocks: int  # residual blocks of each level
    groups: int  # of each group normalisation

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        numbers = (self.side, self.channels, self.latent, self.blocks, self.groups, *self.widths)
        if not all(type(number) is int and 1 <= number <= MOST for number in numbers):
            raise ValueError(f"an architecture is whole numbers of 1 to {MOST}")
        if type(self.widths) is not tuple or not 1 <= len(self.widths) <= 8:
            raise ValueError("an autoencoder has one to eight levels")
        if self.channels not in (1, 3):
            raise ValueError("images have 1 or 3 channels")
        if self.side % self.factor:
            raise ValueError(f"{len(self.widths)} levels need a side that is a multiple of {self.factor}")
        if any(width % self.groups for width in self.widths):
            raise ValueError("every width is a multiple of the groups")

    @property
    def factor(self) -> int:
        """Pixels a side of one place of the latents: the paper's f."""
        return 1 << (len(self.widths) - 1)

    @property
    def shape(self) -> Shape:
        """Of an image: (side, side) grey or (side, side, 3) RGB."""
        return (self.side, self.side) if self.channels == 1 else (self.side, self.side, 3)

    @property
    def latents(self) -> tuple[int, int, int]:
        """Of an image's latents: (c, h, w)."""
        return (self.latent, self.side // self.factor, self.side // self.factor)

    def fitted(self, channels: int) -> AutoencoderArchitecture:
        """The same network for grey (1) or colour (3) images."""
        return replace(self, channels=channels)


PRESETS: Final[Mapping[str, AutoencoderArchitecture]] = {
    "tiny16": AutoencoderArchitecture(16, 1, 2, (16, 32), 1, 8),
    "tiny32": AutoencoderArchitecture(32, 1, 2, (16, 32), 1, 8),
    "coarse32": AutoencoderArchitecture(32, 1, 4, (16, 32, 64), 1, 8),  # a quarter of the places to diffuse over
    "small64": AutoencoderArchitecture(64, 1, 4, (32, 64, 64), 1, 8),
    # the chest radiographs' autoencoder of MONAI's model zoo: 512 px, 64-128-128-128, 3 channels of latents
    "base256": AutoencoderArchitecture(256, 1, 4, (64, 128, 128, 128), 2, 32),
    "base512": AutoencoderArchitecture(512, 1, 3, (64, 128, 128, 128), 2, 32),
}


class AutoencoderNet(nn.Module):
    """What is trained: q(z | x), a Gaussian for every place, and the image behind z. Latents are not yet scaled."""

    def __init__(self, architecture: AutoencoderArchitecture) -> None:
        """Make the layers; call inside ``seeded``."""
        # MONAI takes two seconds to import, and every process of an agent would pay them
        from monai.networks.nets.autoencoderkl import AutoencoderKL  # noqa: PLC0415

        super().__init__()
        self.architecture = architecture
        self.kl: Any = AutoencoderKL(
            spatial_dims=2,
            in_channels=architecture.channels,
            out_channels=architecture.channels,
            num_res_blocks=(architecture.blocks,) * len(architecture.widths),
            channels=architecture.widths,
            attention_levels=(False,) * len(architecture.widths),
            latent_channels=architecture.latent,
            norm_num_groups=architecture.groups,
            with_encoder_nonlocal_attn=False,
            with_decoder_nonlocal_attn=False,
        )

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images (n, c, s, s) in [-1, 1] -> mean and standard deviation of their latents, (n, *latents) each."""
        mean, deviation = self.kl.encode(x)
        return mean, deviation

    def decode(self, z: Tensor) -> Tensor:
        """Latents (n, *latents) -> (n, c, s, s), about within [-1, 1]."""
        out: Tensor = self.kl.decode(z)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """The image behind the mean of the latents."""
        return self.decode(self.encode(x)[0])

    @property
    def last(self) -> nn.Parameter:
        """The weight of the decoder's last layer: adversarial training weighs its losses there."""
        weight: nn.Parameter = self.kl.decoder.blocks[-1].conv.weight
        return weight

    @torch.no_grad()
    def centre(self, mean: Tensor) -> None:
        """Move the origin of the latents to ``mean`` (c,), without a change to any image.

        Diffusion ends in noise of mean 0, so latents should have it too. The 1x1 convolutions before and behind the
        latents take the shift up: what the first subtracts, the second adds.
        """
        before, behind = self.kl.quant_conv_mu.conv, self.kl.post_quant_conv.conv
        before.bias -= mean
        behind.bias += behind.weight[:, :, 0, 0] @ mean


class Autoencoder(FrozenNetwork):
    """A trained autoencoder, frozen, with the scale of its latents."""

    def __init__(self, net: AutoencoderNet, scale: float, origin: Origin) -> None:
        """Freeze the network.

        Args:
            net: trained.
            scale: 1 / the standard deviation of the latents of the images that it was trained on.
            origin: of the file.
        Raises:
            ValueError: a scale that is not positive and finite.
        """
        super().__init__(KIND, origin, net.architecture.channels)
        self.net = net
        self.scale = _scale(scale)
        self.freeze()

    @property
    def architecture(self) -> AutoencoderArchitecture:
        """The public shape of the network."""
        return self.net.architecture

    @property
    def shape(self) -> Shape:
        """Of an image: (s, s) or (s, s, 3)."""
        return self.architecture.shape

    @property
    def latent(self) -> tuple[int, int, int]:
        """Of an image's latents: (c, h, w)."""
        return self.architecture.latents

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The scaled latents of images. Each image's are its own: they depend on no other image.

        Args:
            x: (n, c, s, s) in [-1, 1], of exactly the architecture's size and channels. Differentiable.
            generator: None for the mean of q(z | x); else of a draw from it, whose numbers come from this generator.
        Returns:
            (n, *latent) float32, of standard deviation about 1 over images like those of the training.
        Raises:
            ValueError: another shape.
        """
        side = self.architecture.side
        self._fit(x, (self.channels, side, side), "images")
        parts = [self.net.encode(part) for part in self._parts(x)]
        mean = torch.cat([part[0] for part in parts]).float()
        if generator is not None:
            deviation = torch.cat([part[1] for part in parts]).float()
            noise = torch.randn(mean.shape, generator=generator, device=generator.device)
            mean = mean + deviation * noise.to(mean.device)
        return mean * self.scale

    def decode(self, z: Tensor) -> Tensor:
        """The images behind scaled latents.

        Args:
            z: (n, *latent), as :meth:`encode` gives them. Differentiable.
        Returns:
            (n, c, s, s) float32, clipped to [-1, 1].
        Raises:
            ValueError: another shape.
        """
        self._fit(z, self.latent, "latents")
        drawn = torch.cat([self.net.decode(part / self.scale) for part in self._parts(z)])
        return drawn.float().clamp(-1.0, 1.0)

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The scaled latents of images (n, 1 | 3, h, w) of any size: the one map that there is."""
        del depth
        return [self.encode(self.prepared(images, exactly=self.architecture.side))]

    def _fit(self, given: Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(given.shape[1:]) != shape:
            raise ValueError(f"this autoencoder's {what} are (n, {', '.join(map(str, shape))})")
        if self.net.last.device != given.device:
            self.to(given.device)

    def _parts(self, given: Tensor) -> tuple[Tensor, ...]:
        most = max(1, _PIXELS // self.architecture.side**2)
        return torch.split(given, most) if len(given) else (given,)


def _scale(told: Any) -> float:
    if type(told) is not float or not (math.isfinite(told) and told > 0.0):
        raise ValueError("the scale of latents is positive and finite")
    return told


def autoencoder_bytes(net: AutoencoderNet, scale: float, notes: Mapping[str, Any]) -> bytes:
    """An autoencoder as one file; ``notes`` say how it was trained.

    Raises:
        ValueError: a scale that is not positive and finite.
    """
    config = {"architecture": asdict(net.architecture), "scale": _scale(scale)}
    return pack(KIND, config, notes, net.state_dict())


def autoencoder_from(raw: bytes, provenance: Provenance = "file") -> Autoencoder:
    """Read an autoencoder.

    Args:
        raw: what :func:`autoencoder_bytes` wrote.
        provenance: ``public`` only where the site's configuration vouches for the file's digest.
    Raises:
        WeightsError: not such a file, or its configuration describes no autoencoder.
    """
    packed = unpack(raw, KIND)
    try:
        if packed.config.keys() != {"architecture", "scale"}:
            raise ValueError("an autoencoder has an architecture and a scale")
        told = dict(packed.config["architecture"])
        if told.keys() != {f.name for f in fields(AutoencoderArchitecture)}:
            raise ValueError("unknown or missing keys of an architecture")
        architecture = AutoencoderArchitecture(**{**told, "widths": tuple(told["widths"])})
        scale = _scale(packed.config["scale"])
    except (TypeError, ValueError) as fault:
        raise WeightsError("the file's configuration describes no autoencoder") from fault
    net = built(lambda: AutoencoderNet(architecture), packed.state)
    return Autoencoder(net, scale, Origin(provenance, packed.sha256))
