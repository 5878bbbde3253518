"""Training a latent diffusion model: images are encoded once, then epsilon or v of noisy latents is learned.

Privacy Distillation, Eq. 1 (Ho, Jain & Abbeel 2020, DDPM, Eq. 14, on latents: Rombach et al. 2022, Eq. 3), with a
prompt that is dropped now and then; v-prediction: Salimans & Ho 2022 (arXiv 2202.00512), section 4. Whether the
images are public or patients' is the caller's to know. The loss is also the one that DP-SGD takes, row by row, in
``agent.mechanisms.distillation.latent_model``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.models.diffusion.autoencoder import Autoencoder
from agent.models.diffusion.edm_training import DenoiserTrainer
from agent.models.diffusion.latent import LatentArchitecture, LatentDenoiser, planes
from agent.models.diffusion.noise_schedule import TIMES, Noising, Prediction
from agent.models.diffusion.prompts import Conditions
from agent.models.training_loop import TrainingPlan, TrainingProgress, device_generator, seeded, train

AT_ONCE: Final = 64  # images that are encoded together


@dataclass(frozen=True, slots=True)
class LatentTraining:
    """The public configuration of a training."""

    architecture: LatentArchitecture
    seed: int
    prediction: Prediction = "v"
    batch: int = 32
    lr: float = 2e-3
    label_drop: float = 0.1  # share of images that are shown without their prompt
    ema: float = 0.995  # what the average keeps in one step, later on
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    checkpoint_every: int = 500
    say_every: int = 50

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, all of it at once."""
        good = {
            "seed": 0 <= self.seed < 2**63,
            "prediction": self.prediction in ("v", "epsilon"),
            "batch": self.batch >= 1,
            "lr": 0.0 < self.lr < 1.0,
            "label_drop": 0.0 <= self.label_drop <= 1.0,
            "ema": 0.0 <= self.ema < 1.0,
            "precision": self.precision in ("float32", "bfloat16"),
            "checkpoint_every": self.checkpoint_every >= 1,
            "say_every": self.say_every >= 1,
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for a training: {', '.join(wrong)}")

    def run(self, data: str) -> str:
        """What the checkpoints are of: SHA-256 of configuration and data. The length may change."""
        told = asdict(self)
        for free in ("checkpoint_every", "say_every"):
            del told[free]
        return hashlib.sha256(json.dumps([told, data], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSet:
    """What is learned: latents and their conditions. As private as the images behind them."""

    latents: Tensor  # (n, c, h, w) float32
    labels: Tensor  # (n,) int64 on the CPU, -1 for none
    conditions: Conditions
    sha256: str  # of images, labels, autoencoder and conditions


def encoded(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    autoencoder: Autoencoder,
    conditions: Conditions,
    device: str = "cpu",
) -> EncodedSet:
    """The latents of a training set, once for the whole training.

    Args:
        images: (n, s, s) or (n, s, s, 3), n >= 1, of the autoencoder's shape.
        labels: (n,) places of the conditions' names, -1 for none.
        autoencoder: trained.
        conditions: public.
        device: where the latents are to lie.
    Raises:
        ValueError: images or labels that do not fit, or latents that are no numbers.
    """
    if not 1 <= len(images) == len(labels):
        raise ValueError("a training needs images, with a label for each (-1: none)")
    told = torch.from_numpy(labels)
    conditions.tokens(told)  # refuses labels of no condition
    with torch.no_grad():
        parts = torch.split(torch.from_numpy(images), AT_ONCE)
        latents = torch.cat([autoencoder.encode(planes(part.to(device), autoencoder)) for part in parts])
    if not bool(torch.isfinite(latents).all()):
        raise ValueError("the autoencoder gives latents that are no numbers")
    digest = hashlib.sha256(f"{images.shape} {autoencoder.origin.sha256} {conditions.digest}".encode())
    digest.update(np.ascontiguousarray(images).tobytes())
    digest.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
    return EncodedSet(latents, told, conditions, digest.hexdigest())


def row_losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """The squared error of each row, of that row alone, the mean over its numbers (Eq. 1).

    Args:
        model: a ``LatentDenoiser``, or what behaves like one.
        rows: noisy latents (n, c, h, w), times (n,), targets (n, c, h, w), tokens (n, length).
    Returns:
        (n,) float32; about 1 for a network that has learned nothing, be it of epsilon or v.
    """
    noisy, t, target, tokens = rows
    error: Tensor = model(noisy, t, tokens) - target
    return error.square().flatten(1).mean(dim=1)


def dropped(labels: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """(n,) int64 labels, a random share of them as -1: what guidance needs (Ho & Salimans 2022)."""
    lost = torch.rand(len(labels), generator=draw, device=labels.device) < share
    return torch.where(lost, -1, labels)


class LatentTrainer(DenoiserTrainer):
    """Encoded images and prompts."""

    def __init__(self, training: LatentTraining, data: EncodedSet) -> None:
        """Draw the initial weights from ``training.seed``.

        Args:
            training: its architecture fits the latents and the prompts.
            data: on the training's device.
        """
        self.training = training
        self.data = data
        self.noising = Noising(training.prediction)
        with seeded(training.seed):
            denoiser = LatentDenoiser(training.architecture)
        self.denoiser = denoiser.to(training.device)
        super().__init__(self.denoiser, row_losses, training)

    def rows(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noisy latents, times, targets, tokens."""
        own, data = self.training, self.data
        chosen = torch.randint(len(data.latents), (own.batch,), generator=generator)
        labels = dropped(data.labels[chosen], own.label_drop, generator)
        tokens = data.conditions.tokens(labels, generator).to(own.device)
        draw = device_generator(generator, own.device)
        clean = data.latents[chosen.to(own.device)]
        t = torch.randint(TIMES, (own.batch,), generator=draw, device=own.device)
        noise = torch.randn(clean.shape, generator=draw, device=own.device)
        return self.noising.noised(clean, t, noise), t, self.noising.target(clean, t, noise), tokens


def train_latent_denoiser(
    data: EncodedSet,
    training: LatentTraining,
    steps: int,
    place: CheckpointStore,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> LatentDenoiser:
    """Train on encoded images, with checkpoints at ``place``.

    Args:
        data: of :func:`encoded`, on the training's device.
        training: of the run.
        steps: of Adam.
        place: of this run alone; one that was interrupted goes on. Sealed, where the images are patients'.
        say: told of the progress.
    Returns:
        The denoiser with its average weights, on the configured device. Words of conditions that no image had begin
        as "nothing".
    Raises:
        ValueError: latents or prompts of another shape than the architecture's.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    own, words = training.architecture, data.conditions.vocabulary
    fits = (tuple(data.latents.shape[1:]), words.size, data.conditions.length)
    if fits != (own.latent, own.words, own.length):
        raise ValueError("the architecture is for other latents or other prompts: fit it to both")
    trainer = LatentTrainer(training, data)
    plan = TrainingPlan(
        steps, training.run(data.sha256), training.seed, training.checkpoint_every, training.say_every
    )
    train(trainer, plan, place, say)
    trainer.average.give(trainer.denoiser)
    trainer.denoiser.adopt(sorted(set(range(words.size)) - _said(data)))
    return trainer.denoiser


def _said(data: EncodedSet) -> set[int]:
    """The tokens that some image's prompts may hold, and "nothing"."""
    names = [data.conditions.names[label] for label in np.unique(data.labels.numpy()) if label >= 0]
    prompts = [prompt for name in names for prompt in data.conditions.prompts(name)]
    return {0, *data.conditions.vocabulary.tokens(prompts, data.conditions.length).flatten().tolist()}
