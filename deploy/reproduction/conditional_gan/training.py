"""Training the conditional GAN on public images: PrivImage's Eq. 3 (Li et al. 2023), table 6.

The generator maximises log D(G(z)) in the place of minimising log(1 - D(G(z))), which saturates (Goodfellow et al.
2014, section 3). One step is one step of the discriminator, as it is for DP-SGD; the generator follows after every so
many of them. What both phases share is here: the losses of a row, and the generator's side.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from agent.models.augmentations import Pool
from agent.models.training_loop import NetworkTrainer
from deploy.reproduction.conditional_gan.network import (
    AdversarialArchitecture,
    AdversarialDiscriminator,
    AdversarialGenerator,
)


@dataclass(frozen=True, slots=True)
class Descent:
    """How the generator's side moves: public constants."""

    batch: int  # images of one step
    learning_rate: float
    average: float = 0.999  # of the weights that a moving average keeps in one step, once it has seen enough of them
    first_moment: float = 0.5  # Adam's beta 1: the other player moves, old gradients mislead

    def __post_init__(self) -> None:
        """Refuse what cannot move."""
        if not (type(self.batch) is int and self.batch >= 1 and 0 < self.learning_rate < 1):
            raise ValueError("a batch has an image at least, and a learning rate lies between 0 and 1")
        if not (0 <= self.average < 1 and 0 <= self.first_moment < 1):
            raise ValueError("what an average keeps lies in [0, 1)")


@dataclass(frozen=True, slots=True)
class Pretraining:
    """How both networks learn public images. The defaults are of short runs with small networks (8 px digits)."""

    generator: Descent = Descent(64, 1e-3, 0.995)
    batch: int = 64  # real images, and as many made ones
    learning_rate: float = 1e-3  # of the discriminator; 1e-4 in table 6
    update_ratio: int = 1  # steps of the discriminator for one of the generator; 5 in table 6
    r1: float = 0.3  # weight of Mescheder et al.'s penalty; 0: none, as in the paper
    r1_every: int = 2

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if not all(type(v) is int and v >= 1 for v in (self.batch, self.update_ratio, self.r1_every)):
            raise ValueError("batch, update_ratio and r1_every are whole numbers from 1")
        if not (0 < self.learning_rate < 1 and 0 <= self.r1 < float("inf")):
            raise ValueError("a learning rate lies between 0 and 1, and the penalty's weight is not negative")


def row_losses(discriminator: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Eq. 3 as the discriminator minimises it, for each row by itself.

    Args:
        discriminator: of (n, c, s, s) images and (n,) labels.
        rows: real images, their labels, synthetic images, their labels: n of each.
    Returns:
        (n,): -log D(x) - log(1 - D(G(z))), where D is the logistic function of the network's logit.
    """
    real, real_labels, fake, fake_labels = rows
    return softplus(-discriminator(real, real_labels)) + softplus(discriminator(fake, fake_labels))


class GeneratorSide(NetworkTrainer):
    """A generator, its optimiser and its moving average. It meets no real image: only a discriminator's gradient.

    Where the discriminator is private by DP-SGD, so is everything here, as post-processing.
    """

    counter = "g_count"

    def __init__(self, generator: AdversarialGenerator, average: AdversarialGenerator, how: Descent) -> None:
        """Move ``generator`` and ``average`` in place."""
        self.generator, self.averaged, self.how = generator, average, how
        self.parameters = list(generator.parameters())
        adam = _adam(self.parameters, how.learning_rate, how.first_moment)
        super().__init__({"generator": generator, "average": average}, {"g_optimizer": adam})

    def step(self, discriminator: nn.Module, labels: Tensor, draw: torch.Generator) -> float:
        """One step on images of these classes, (n,) int64; the loss, -log D(G(z)), averaged."""
        loss = softplus(
            -discriminator(self.generator(latents(self.generator, len(labels), draw), labels), labels)
        ).mean()
        # of the generator's weights alone: the discriminator's gradients are the engine's affair
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, self.parameters), strict=True):
            parameter.grad = gradient
        self.optimizers["g_optimizer"].step()
        self.optimizers["g_optimizer"].zero_grad()
        self.done += 1
        self._follow()
        return float(loss.detach())

    @torch.no_grad()
    def _follow(self) -> None:
        """The average; over its first steps a plain one, so that a short run forgets where it began."""
        kept = min(self.how.average, self.done / (self.done + 9.0))
        for mean, new in zip(self.averaged.parameters(), self.parameters, strict=True):
            mean.lerp_(new, 1.0 - kept)


class AdversarialTrainer(NetworkTrainer):
    """A :class:`agent.models.training_loop.Trainer` of both networks, on public images."""

    def __init__(
        self,
        networks: tuple[AdversarialGenerator, AdversarialDiscriminator],
        average: AdversarialGenerator,
        pictures: tuple[NDArray[np.uint8], NDArray[np.int64]],
        how: Pretraining,
    ) -> None:
        """Train in place.

        Args:
            networks: on one device.
            average: follows the generator.
            pictures: (n, s, s[, 3]) of the architecture's size, and (n,) labels, -1 for no condition. Public, or both
                networks are private components for ever (P6).
            how: of the run.
        Raises:
            ValueError: images or labels that do not fit, or images that do not differ.
        """
        generator, self.discriminator = networks
        architecture, (images, labels) = generator.architecture, pictures
        _refuse_unfit(images, labels, architecture)
        device = next(generator.parameters()).device
        self.how = how
        self.pool = Pool(images, architecture.side, architecture.channels, device)
        self.labels = torch.from_numpy(labels).to(device)
        self.side = GeneratorSide(generator, average, how.generator)
        adam = _adam(list(self.discriminator.parameters()), how.learning_rate, how.generator.first_moment)
        super().__init__({"discriminator": self.discriminator}, {"d_optimizer": adam})

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the random generator."""
        return self.side.state() | super().state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`."""
        self.side.restore(state)
        super().restore(state)

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One step of the discriminator, and where it is due one of the generator."""
        chosen = torch.randint(len(self.labels), (self.how.batch,), generator=generator)
        real, labels = self.pool.take(chosen), self.labels[chosen.to(self.labels.device)]
        fake = draw_images(self.side.generator, labels, generator)
        loss = row_losses(self.discriminator, (real, labels, fake, labels)).mean()
        told = {"loss_d": float(loss.detach())}
        if self.how.r1 > 0 and self.done % self.how.r1_every == 0:
            penalty = _r1(self.discriminator, real, labels)
            loss = loss + self.how.r1 / 2.0 * self.how.r1_every * penalty
            told["r1"] = float(penalty.detach())
        self.descend("d_optimizer", loss)
        self.optimizers["d_optimizer"].zero_grad()
        self.done += 1
        if self.done % self.how.update_ratio == 0:
            chosen = torch.randint(len(self.labels), (self.how.generator.batch,), generator=generator)
            asked = self.labels[chosen.to(self.labels.device)]
            told["loss_g"] = self.side.step(self.discriminator, asked, generator)
        return told


def fresh_networks(architecture: AdversarialArchitecture) -> tuple[AdversarialGenerator, AdversarialDiscriminator]:
    """Both networks with fresh weights: call inside ``seeded``."""
    return AdversarialGenerator(architecture), AdversarialDiscriminator(architecture)


def averaged(generator: AdversarialGenerator) -> AdversarialGenerator:
    """What a moving average begins as."""
    return copy.deepcopy(generator).eval().requires_grad_(requires_grad=False)


def latents(generator: AdversarialGenerator, count: int, draw: torch.Generator) -> Tensor:
    """(count, latent) standard normal, drawn on the processor, so that a run is the same on any device."""
    size = (count, generator.architecture.latent)
    return torch.randn(size, generator=draw).to(next(generator.parameters()).device)


@torch.no_grad()
def draw_images(generator: AdversarialGenerator, labels: Tensor, draw: torch.Generator) -> Tensor:
    """One image for each label (n,), (n, c, s, s) in (-1, 1), without a gradient."""
    out: Tensor = generator(latents(generator, len(labels), draw), labels)
    return out


def planes(images: Tensor) -> Tensor:
    """(n, s, s) or (n, s, s, 3) uint8 as (n, c, s, s) float32 in [-1, 1]."""
    axes = images.unsqueeze(1) if images.ndim == 3 else images.movedim(3, 1)
    return axes.float() / 127.5 - 1.0


def _r1(discriminator: nn.Module, real: Tensor, labels: Tensor) -> Tensor:
    """Mescheder et al. 2018: E|grad D(x)|^2 at real images. It needs a second derivative: pre-training only."""
    real = real.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(discriminator(real, labels).sum(), real, create_graph=True)
    return slope.square().sum(dim=(1, 2, 3)).mean()


def _adam(parameters: list[nn.Parameter], rate: float, first_moment: float) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, rate, betas=(first_moment, 0.999))


def _refuse_unfit(
    images: NDArray[np.uint8], labels: NDArray[np.int64], architecture: AdversarialArchitecture
) -> None:
    if images.shape[1:] != architecture.shape:
        raise ValueError(f"the networks draw images of shape {architecture.shape}, these are of another")
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        raise ValueError("there is one label for each image, int64")
    if not bool(((labels >= -1) & (labels < architecture.classes)).all()):
        raise ValueError(f"labels are 0 to {architecture.classes - 1}, or -1 for no condition")
