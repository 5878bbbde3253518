"""Every family of models that DP-SGD trains here, small, with random weights: for tests of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from monai.networks.nets.diffusion_model_unet import DiffusionModelUNet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.dp.clipping import PrivacyUnit, RowLosses
from agent.models.diffusion.edm import PRESETS as DIFFUSION_PRESETS
from agent.models.diffusion.edm import Denoiser, loss_weight, with_lora
from agent.models.training_loop import seeded
from deploy.reproduction.conditional_gan import training as adversarial
from deploy.reproduction.conditional_gan.network import PRESETS, AdversarialDiscriminator


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A model, the loss of its rows, and rows to train it on."""

    model: nn.Module
    loss: RowLosses
    rows: Callable[[int, torch.Generator], tuple[Tensor, ...]]

    def units(self, counts: Sequence[int], seed: int = 0, scale: float = 1.0) -> list[PrivacyUnit]:
        """Patients with so many rows each; ``scale`` enlarges their first tensor."""
        draw = torch.Generator().manual_seed(seed)
        drawn = [self.rows(n, draw) for n in counts]
        return [PrivacyUnit((rows[0] * scale, *rows[1:])) for rows in drawn]


def classified(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of each row."""
    return cross_entropy(model(rows[0]), rows[1], reduction="none")


def convolutions(padding_mode: str = "reflect") -> Family:
    """A small classifier of 8 x 8 pictures."""
    with seeded(0):
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, padding_mode=padding_mode),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.Conv2d(6, 4, 3, stride=2, groups=2),
            nn.Flatten(),
            nn.LayerNorm(36),
            nn.Linear(36, 3),
        )
    return Family(model, classified, lambda n, g: (torch.randn(n, 1, 8, 8, generator=g), _classes(3, n, g)))


class LinearSoftmax(nn.Module):
    """Logits (n, c) of features (n, 64), by two bare parameters; zero at the start."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes, 64))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        """(n, 64) -> (n, c)."""
        return features @ self.weight.T + self.bias


def linear() -> Family:
    """A classifier of two bare parameters."""
    model = LinearSoftmax(4)
    with seeded(1):
        nn.init.normal_(model.weight)
    return Family(model, classified, lambda n, g: (torch.randn(n, 64, generator=g), _classes(4, n, g)))


def discriminator() -> Family:
    """A GAN's discriminator, which sees a real and a made picture in the loss of one row."""
    with seeded(2):
        model = AdversarialDiscriminator(PRESETS["tiny8"])
    _no_zeros(model)

    def rows(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        real, fake = (torch.randn(n, 1, 8, 8, generator=g) for _ in range(2))
        return real, _classes(10, n, g), fake, _classes(10, n, g)

    return Family(model, adversarial.row_losses, rows)


def monai_unet(side: int = 16) -> Family:
    """MONAI's UNet of 1.71 M parameters, with time and class embeddings and attention."""
    with seeded(3):
        model = DiffusionModelUNet(
            spatial_dims=2,
            in_channels=3,
            out_channels=3,
            channels=(32, 64, 64),
            attention_levels=(False, True, True),
            num_res_blocks=2,
            num_head_channels=32,
            norm_num_groups=8,
            num_class_embeds=11,
        )
    _no_zeros(model)

    def loss(unet: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        x, noise, sigma, labels = rows
        scale = sigma[:, None, None, None]
        out = unet((x + noise * scale) / (scale.square() + 0.25).sqrt(), sigma.log() / 4, class_labels=labels)
        return (out - x).square().flatten(1).mean(dim=1)

    return Family(model, loss, lambda n, g: _noised(n, g, 3, side, 11))


def denoiser(lora: bool = False) -> Family:
    """The product's diffusion model, whole or with low-rank adapters."""
    with seeded(4):
        model = Denoiser(DIFFUSION_PRESETS["tiny8"].fitted(1, 10))
        model = with_lora(model, 2, "all") if lora else model
    _no_zeros(model)

    def loss(net: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        x, noise, sigma, labels = rows
        out = net(x + noise * sigma[:, None, None, None], sigma, labels)
        return loss_weight(sigma) * (out - x).square().flatten(1).mean(dim=1)

    return Family(model, loss, lambda n, g: _noised(n, g, 1, 8, 11))


FAMILIES: dict[str, Callable[[], Family]] = {
    "convolutions": convolutions,
    "linear": linear,
    "discriminator": discriminator,
    "denoiser": denoiser,
    "adapters": lambda: denoiser(lora=True),
}


def _classes(classes: int, n: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, classes, (n,), generator=g)


def _noised(n: int, g: torch.Generator, channels: int, side: int, classes: int) -> tuple[Tensor, ...]:
    x, noise = (torch.randn(n, channels, side, side, generator=g) for _ in range(2))
    return x, noise, torch.rand(n, generator=g) + 0.1, _classes(classes, n, g)


@torch.no_grad()
def _no_zeros(model: nn.Module) -> None:
    """Layers that start at zero hide all gradients before them."""
    with seeded(9):
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
