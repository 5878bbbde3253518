"""A latent diffusion model: MONAI's UNet over an autoencoder's latents, told by cross-attention what to show.

Rombach, Blattmann, Lorenz, Esser & Ommer 2022, "High-resolution image synthesis with latent diffusion models" (arXiv
2112.10752), section 3.3; Privacy Distillation, section 2.1. Ho & Salimans 2022 (guidance, arXiv 2207.12598).

A prompt's tokens are looked up in a table, positions in another, and the UNet attends to their sums. Token 0,
"nothing", has a learned row like any word: prompts are padded with it, and a prompt of nothing else is "no
condition". Every parameter is in a Linear, Conv2d, GroupNorm, LayerNorm or Embedding of exactly that type: the
engines for gradients per patient support these five, and nothing normalises over a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.models.diffusion.autoencoder import KIND as AUTOENCODER
from agent.models.diffusion.autoencoder import Autoencoder, autoencoder_from
from agent.models.diffusion.noise_schedule import Drawing, Predict, denoised
from agent.models.diffusion.prompts import Conditions, conditions_from
from agent.models.image_tensors import to_bytes, to_unit
from agent.models.training_loop import device_generator
from agent.models.weights import Provenance, WeightsError, built, pack, unpack
from protos.common.errors import TrainingError

KIND: Final = "latent-diffusion"
MOST: Final = 8192  # of any number of an architecture


class LatentNotFiniteError(TrainingError, ValueError):
    """A network draws what is no number: its training has diverged. Nothing of it is shown."""


@dataclass(frozen=True, slots=True)
class LatentArchitecture:
    """The public shape of a denoiser. Between the halves, at the lowest level, it always attends to the prompt."""

    latent: tuple[int, int, int]  # (c, h, w); h and w are multiples of 2^(levels - 1)
    widths: tuple[int, ...]  # feature channels of each level, the finest first
    blocks: int  # residual blocks of each level
    attention: tuple[bool, ...]  # at which levels: to the latent's other places, and to the prompt
    head_channels: int  # of one attention head
    groups: int  # of each group normalisation
    words: int  # tokens that there are, with 0 for nothing
    length: int  # tokens of every prompt
    context: int  # numbers of a token

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        sizes = (self.blocks, self.head_channels, self.groups, self.words, self.length, self.context)
        if not all(type(number) is int and 1 <= number <= MOST for number in (*self.latent, *self.widths, *sizes)):
            raise ValueError(f"an architecture is whole numbers of 1 to {MOST}")
        if not (1 <= len(self.widths) == len(self.attention) <= 8 and all(type(a) is bool for a in self.attention)):
            raise ValueError("every level has a width, and says whether it has attention")
        least = 2 ** (len(self.widths) - 1)
        if len(self.latent) != 3 or self.latent[1] % least or self.latent[2] % least:
            raise ValueError(f"latents are (c, h, w), and {len(self.widths)} levels need multiples of {least}")
        if any(width % self.groups for width in self.widths):
            raise ValueError("every width is a multiple of the groups")
        attending = [w for w, attends in zip(self.widths, self.attention, strict=True) if attends]
        if any(width % self.head_channels for width in [*attending, self.widths[-1]]):
            raise ValueError("every width with attention, and the last, is a multiple of the head's channels")

    def fitted(self, autoencoder: Autoencoder, conditions: Conditions) -> LatentArchitecture:
        """The same network for these latents and these prompts."""
        words, length = conditions.vocabulary.size, conditions.length
        return replace(self, latent=autoencoder.latent, words=words, length=length)

    def demand(self, autoencoder: Autoencoder, conditions: Conditions) -> None:
        """Refuse an autoencoder or conditions that the network is not for.

        Raises:
            ValueError: either.
        """
        if self != self.fitted(autoencoder, conditions):
            raise ValueError("the architecture is for other latents or other prompts: fit it to both")


def _preset(
    latent: tuple[int, int, int], widths: tuple[int, ...], blocks: int, attention: str, context: int
) -> LatentArchitecture:
    head, groups = (16, 8) if widths[0] < 64 else (64, 32)
    return LatentArchitecture(
        latent, widths, blocks, tuple(a == "a" for a in attention), head, groups, 64, 16, context
    )


# Parameters with 64 words: tiny 255,924 · small 5,681,284 · base 64,158,980 · stable 263,718,915. Latents are those
# of the autoencoders tiny32, small64, base256 and base512. "stable" is MONAI's model of radiographs (256-512-768,
# attention on two levels, 1024 numbers of a token), with heads of 64 channels and words of its own.
PRESETS: Final[Mapping[str, LatentArchitecture]] = {
    "tiny": _preset((4, 8, 8), (16, 32), 1, ".a", 32),
    "small": _preset((4, 16, 16), (64, 128), 2, ".a", 64),
    "base": _preset((4, 32, 32), (128, 256, 384), 2, ".aa", 256),
    "stable": _preset((3, 64, 64), (256, 512, 768), 2, ".aa", 1024),
}


class LatentDenoiser(nn.Module):
    """epsilon or v of noisy latents, a time and a prompt."""

    def __init__(self, architecture: LatentArchitecture) -> None:
        """Make the layers; call inside ``seeded``."""
        # MONAI takes two seconds to import, and every process of an agent would pay them
        from monai.networks.nets.diffusion_model_unet import DiffusionModelUNet  # noqa: PLC0415

        super().__init__()
        self.architecture = architecture
        self.words = nn.Embedding(architecture.words, architecture.context)
        self.places = nn.Embedding(architecture.length, architecture.context)
        self.unet = DiffusionModelUNet(
            spatial_dims=2,
            in_channels=architecture.latent[0],
            out_channels=architecture.latent[0],
            num_res_blocks=architecture.blocks,
            channels=architecture.widths,
            attention_levels=architecture.attention,
            norm_num_groups=architecture.groups,
            num_head_channels=architecture.head_channels,
            with_conditioning=True,
            cross_attention_dim=architecture.context,
        )

    def forward(self, z: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        """Say what the noise is.

        Args:
            z: (n, c, h, w) latents of standard deviation about 1, with the noise of time ``t``.
            t: (n,) int64, 0 .. 999.
            tokens: (n, length) int64, 0 for nothing.
        Returns:
            (n, c, h, w) float32.
        """
        # a row for each prompt, though all are alike: the engines of DP-SGD want every layer's input by patient
        places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        out: Tensor = self.unet(z, t, context=self.words(tokens) + self.places(places))
        return out.float()

    @torch.no_grad()
    def adopt(self, tokens: Sequence[int]) -> None:
        """Let words that were never trained start as "nothing", not as random numbers."""
        self.words.weight[list(tokens)] = self.words.weight[0].clone()


def guided(denoiser: LatentDenoiser, tokens: Tensor, guidance: float) -> Predict:
    """What the denoiser says of these (n, length) prompts, moved away from no condition: e_0 + w (e_y - e_0).

    Ho & Salimans 2022, Eq. 6, with w = 1 for the plain conditional model (one evaluation, not two) and 0 for none.
    It is the same for v, which at one place and time is linear in epsilon.
    """
    nothing = torch.zeros_like(tokens)

    def predict(z: Tensor, t: int) -> Tensor:
        times = torch.full((len(z),), t, device=z.device)
        if guidance == 1.0:
            plain: Tensor = denoiser(z, times, tokens)
            return plain
        both: Tensor = denoiser(z.repeat(2, 1, 1, 1), times.repeat(2), torch.cat([tokens, nothing]))
        of_prompt, of_nothing = both.chunk(2)
        return of_nothing + guidance * (of_prompt - of_nothing)

    return predict


def planes(images: Tensor, autoencoder: Autoencoder) -> Tensor:
    """(n, s, s) or (n, s, s, 3) uint8 as (n, c, s, s) float32 in [-1, 1].

    Raises:
        ValueError: images of another type or shape than the autoencoder's.
    """
    if images.dtype != torch.uint8:
        raise ValueError("images are uint8: convert them first, and decide what a NaN is")
    if tuple(images.shape[1:]) != autoencoder.shape:
        raise ValueError(f"the autoencoder is for images of {autoencoder.shape}, these are of another shape")
    stacked = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return stacked.float() / 127.5 - 1.0


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """What decides how fast, and in last bits only what."""

    device: str = "cpu"
    batch: int = 256  # images at once
    bfloat16: bool = False  # of the denoiser's products


@dataclass(frozen=True, slots=True, eq=False)
class LatentSampler:
    """All parts needed to draw: the contents of a released model file."""

    denoiser: LatentDenoiser
    autoencoder: Autoencoder
    conditions: Conditions
    drawing: Drawing

    def sample(
        self, labels: NDArray[np.int64], generator: torch.Generator, where: ComputeSettings | None = None
    ) -> NDArray[np.uint8]:
        """An image for each label.

        Args:
            labels: (n,) places of the conditions' names, -1 for no condition.
            generator: on the CPU, the only source of randomness; it chooses templates and noise.
            where: to compute.
        Returns:
            (n, s, s) or (n, s, s, 3).
        Raises:
            ValueError: labels of no condition.
            LatentNotFiniteError: the network says no numbers.
        """
        where = where or ComputeSettings()
        tokens = self.conditions.tokens(torch.from_numpy(labels), generator)
        draw = device_generator(generator, where.device)
        drawn = [np.empty((0, *self.autoencoder.shape), np.uint8)]
        for part in torch.split(tokens, where.batch) if len(tokens) else ():
            noise = torch.randn((len(part), *self.autoencoder.latent), generator=draw, device=where.device)
            drawn.append(self._drawn(noise, part, where))
        return np.concatenate(drawn)

    @torch.no_grad()
    def _drawn(self, noise: Tensor, tokens: Tensor, where: ComputeSettings) -> NDArray[np.uint8]:
        """Images drawn from noise (n, c, h, w), on the host."""
        denoiser = self.denoiser.to(where.device)
        with torch.autocast(torch.device(where.device).type, torch.bfloat16, enabled=where.bfloat16):
            predict = guided(denoiser, tokens.to(where.device), self.drawing.guidance)
            z = denoised(predict, noise, self.drawing)
        made = self.autoencoder.decode(z)
        if not bool(torch.isfinite(z).all() and torch.isfinite(made).all()):
            raise LatentNotFiniteError("the model's output is not finite: train it with a smaller learning rate")
        return to_bytes(to_unit(made))


def latent_bytes(drawer: LatentSampler, notes: Mapping[str, Any]) -> bytes:
    """All that it takes to draw as one file; ``notes`` say how it was trained. The same model, the same bytes.

    Raises:
        ValueError: the parts do not fit together.
    """
    denoiser, autoencoder = drawer.denoiser, drawer.autoencoder
    denoiser.architecture.demand(autoencoder, drawer.conditions)
    config = {
        "denoiser": asdict(denoiser.architecture),
        "autoencoder": {"architecture": asdict(autoencoder.architecture), "scale": autoencoder.scale},
        "conditions": drawer.conditions.told(),
        "drawing": asdict(drawer.drawing),
    }
    state = {f"denoiser.{name}": tensor for name, tensor in denoiser.state_dict().items()}
    state |= {f"autoencoder.{name}": tensor for name, tensor in autoencoder.net.state_dict().items()}
    return pack(KIND, config, notes, state)


def latent_from(raw: bytes, provenance: Provenance = "file") -> LatentSampler:
    """Read a model.

    Args:
        raw: what :func:`latent_bytes` wrote.
        provenance: of the whole file, and so of the autoencoder in it.
    Returns:
        What draws, on the CPU.
    Raises:
        WeightsError: not such a file, or its parts are of no model that can be built or do not fit together.
    """
    packed = unpack(raw, KIND)
    parts: dict[str, dict[str, Tensor]] = {"denoiser": {}, "autoencoder": {}}
    for name, tensor in packed.state.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise WeightsError("the file holds a tensor of no part of a model")
        parts[part][rest] = tensor
    try:
        if packed.config.keys() != {"denoiser", "autoencoder", "conditions", "drawing"}:
            raise ValueError("a model is a denoiser, an autoencoder, conditions and a way of drawing")
        told = dict(packed.config["denoiser"])
        told |= {name: tuple(told[name]) for name in ("latent", "widths", "attention")}
        architecture = LatentArchitecture(**told)
        autoencoder = autoencoder_from(
            pack(AUTOENCODER, packed.config["autoencoder"], {}, parts["autoencoder"]), provenance
        )
        conditions = conditions_from(packed.config["conditions"])
        drawing = Drawing(**packed.config["drawing"])
        architecture.demand(autoencoder, conditions)
    except (TypeError, ValueError, KeyError) as fault:
        raise WeightsError("the file's configuration describes no latent diffusion model") from fault
    denoiser = built(lambda: LatentDenoiser(architecture), parts["denoiser"])
    return LatentSampler(denoiser, autoencoder, conditions, drawing)
