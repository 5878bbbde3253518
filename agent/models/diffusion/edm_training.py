"""Training a denoiser on public images: EDM's loss, Adam, dropped labels, a moving average of the weights.

Karras et al. 2022 (EDM, arXiv 2206.00364): Eq. 2 and 8, Table 1. The loss is also the one that DP-SGD takes, row by
row, in ``agent.mechanisms.privimage.diffusion``.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.models.diffusion.edm import Denoiser, DiffusionArchitecture, loss_weight
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, device_generator, seeded, train


@dataclass(frozen=True, slots=True)
class DiffusionTraining:
    """The public configuration of a training."""

    architecture: DiffusionArchitecture
    seed: int
    batch: int = 128
    lr: float = 3e-4
    p_mean: float = -1.2  # of ln sigma
    p_std: float = 1.2
    label_drop: float = 0.1  # share of images that are shown without their label
    ema: float = 0.999  # what the average keeps in one step, later on
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    checkpoint_every: int = 500
    say_every: int = 50

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, all of it at once."""
        good = {
            "seed": 0 <= self.seed < 2**63,
            "batch": self.batch >= 1,
            "lr": 0.0 < self.lr < 1.0,
            "p_mean": -10.0 < self.p_mean < 10.0,
            "p_std": 0.0 < self.p_std < 10.0,
            "label_drop": 0.0 <= self.label_drop <= 1.0,
            "ema": 0.0 <= self.ema < 1.0,
            "precision": self.precision in ("float32", "bfloat16"),
            "checkpoint_every": self.checkpoint_every >= 1,
            "say_every": self.say_every >= 1,
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for a training: {', '.join(wrong)}")

    def run(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> str:
        """What the checkpoints are of: SHA-256 of configuration, images and labels. The length may change."""
        told = asdict(self)
        for free in ("checkpoint_every", "say_every"):
            del told[free]
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        digest.update(str(images.shape).encode())
        digest.update(np.ascontiguousarray(images).tobytes())
        digest.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
        return digest.hexdigest()


def planes(images: Tensor, architecture: DiffusionArchitecture) -> Tensor:
    """(n, s, s) or (n, s, s, 3) uint8 as (n, c, s, s) float32 in [-1, 1].

    Raises:
        ValueError: images of another type, size or number of channels.
    """
    if images.dtype != torch.uint8:
        raise ValueError("images to learn are uint8: convert them first, and decide what a NaN is")
    if tuple(images.shape[1:]) != architecture.shape:
        raise ValueError(f"the architecture draws images of {architecture.shape}, these are of another shape")
    stacked = images[:, None] if architecture.channels == 1 else images.permute(0, 3, 1, 2)
    return stacked.float() / 127.5 - 1.0


def conditions(labels: Tensor, architecture: DiffusionArchitecture) -> Tensor:
    """(n,) int64 with -1 for "no condition" as (n,) int64 with ``classes`` for it.

    Raises:
        ValueError: a label that is no condition of this network.
    """
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise ValueError("labels are whole numbers, one for each image")
    if not bool(((labels >= -1) & (labels < architecture.classes)).all()):
        raise ValueError(f"labels lie in 0 to {architecture.classes - 1}, or are -1 for none")
    return torch.where(labels < 0, architecture.classes, labels)


def row_losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """EDM's loss of each row, of that row alone: lambda(sigma) |D(x + n; sigma, y) - x|^2, the mean over its numbers.

    Args:
        model: a ``Denoiser``, or what behaves like one.
        rows: noisy images (n, c, s, s), sigma (n,), clean images (n, c, s, s), labels (n,).
    Returns:
        (n,) float32; about 1 for a network that has learned nothing.
    """
    noisy, sigma, clean, labels = rows
    error: Tensor = model(noisy, sigma, labels) - clean
    return loss_weight(sigma) * error.square().flatten(1).mean(dim=1)


RowLosses = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


class Denoising(Protocol):
    """The settings of every training of a denoiser."""

    @property
    def lr(self) -> float:
        """Of Adam."""

    @property
    def ema(self) -> float:
        """What the average keeps in one step, later on."""

    @property
    def precision(self) -> str:
        """float32, or bfloat16 in the network."""

    @property
    def device(self) -> str:
        """Where the network is."""


class Average:
    """A moving average of the weights that are trained.

    What it keeps in step t is min(ema, (1 + t) / (10 + t)), the usual warm-up: at 0.999 alone, a fine-tuning of 152
    steps (PrivImage, Table 5) would end at 86 % of the weights it began with. It reads noisy weights only,
    hence costs no privacy.
    """

    def __init__(self, model: nn.Module, ema: float) -> None:
        self.ema = ema
        self._followed = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {name: p.detach().clone() for name, p in self._followed.items()}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Follow the model after its ``step``, counted from 1."""
        keep = min(self.ema, (1.0 + step) / (10.0 + step))
        for name, parameter in self._followed.items():
            self.weights[name].lerp_(parameter.detach(), 1.0 - keep)

    def state(self) -> dict[str, Tensor]:
        """The averages."""
        return {f"average.{name}": tensor for name, tensor in self.weights.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`; other names in it are somebody else's.

        Raises:
            KeyError, RuntimeError: it is of another model.
        """
        for name, tensor in self.weights.items():
            tensor.copy_(state[f"average.{name}"])

    @torch.no_grad()
    def give(self, model: nn.Module) -> None:
        """Put the averages in the place of the weights of a model of the same make."""
        named = dict(model.named_parameters())
        for name, tensor in self.weights.items():
            named[name].copy_(tensor)


class DenoiserTrainer(LossTrainer):
    """A denoiser, Adam and an average; a subclass draws the rows of a batch."""

    counter = "count"
    average: Average

    def __init__(self, denoiser: nn.Module, losses: RowLosses, how: Denoising) -> None:
        """Train ``denoiser``, which has been moved to its device, down the mean of the rows' ``losses``."""
        adam = torch.optim.Adam(denoiser.parameters(), lr=how.lr)
        super().__init__({"denoiser": denoiser}, {"optimizer": adam}, Average(denoiser, how.ema))
        self._losses, self._how = losses, how

    @abstractmethod
    def rows(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """A batch drawn with replacement, as ``losses`` takes it."""

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """The mean of the batch; about 1 at the start."""
        rows, kind = self.rows(generator), torch.device(self._how.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self._how.precision == "bfloat16"):
            loss = self._losses(self.networks["denoiser"], rows).mean()
        return loss, {"loss": loss.item()}


class DiffusionTrainer(DenoiserTrainer):
    """Images and labels, on the training's device."""

    def __init__(self, training: DiffusionTraining, images: Tensor, labels: Tensor) -> None:
        """Draw the initial weights from ``training.seed``.

        Args:
            training: its architecture fits the images.
            images: (n, s, s) or (n, s, s, 3) uint8, n >= 1.
            labels: (n,) int64, -1 for none.
        Raises:
            ValueError: images or labels of another kind.
        """
        if not 1 <= len(images) == len(labels):
            raise ValueError("a training needs images, with a label for each (-1: none)")
        planes(images[:1], training.architecture)  # refuses images of another kind
        self.training = training
        self.images = images.to(training.device)
        self.labels = conditions(labels, training.architecture).to(training.device)
        with seeded(training.seed):
            denoiser = Denoiser(training.architecture)
        self.denoiser = denoiser.to(training.device)
        super().__init__(self.denoiser, row_losses, training)

    def rows(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noisy images, sigma, clean images, labels."""
        own, draw = self.training, device_generator(generator, self.training.device)
        chosen = torch.randint(len(self.images), (own.batch,), generator=draw, device=draw.device)
        clean = planes(self.images[chosen], own.architecture)
        sigma = (own.p_mean + own.p_std * torch.randn(own.batch, generator=draw, device=draw.device)).exp()
        labels = dropped(self.labels[chosen], own.label_drop, own.architecture, draw)
        return noised(clean, sigma, draw), sigma, clean, labels


def noised(clean: Tensor, sigma: Tensor, draw: torch.Generator) -> Tensor:
    """x + sigma n with n standard normal."""
    noise = torch.randn(clean.shape, generator=draw, device=clean.device)
    return clean + sigma.reshape(-1, 1, 1, 1) * noise


def dropped(labels: Tensor, share: float, architecture: DiffusionArchitecture, draw: torch.Generator) -> Tensor:
    """The labels, a random share of them as "no condition": what guidance needs (Ho & Salimans 2022)."""
    lost = torch.rand(len(labels), generator=draw, device=labels.device) < share
    return torch.where(lost, architecture.classes, labels)


def train_denoiser(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    training: DiffusionTraining,
    steps: int,
    place: CheckpointStore,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> Denoiser:
    """Train on public images, with checkpoints at ``place``.

    Args:
        images: (n, s, s) or (n, s, s, 3) uint8, of the architecture's shape. They must be public (P6).
        labels: (n,) int64, -1 for an image without a condition.
        training: of the run.
        steps: of Adam.
        place: of this run alone; one that was interrupted goes on.
        say: told of the progress.
    Returns:
        The denoiser with its average weights, on the configured device. A class that no image had begins as
        "no condition".
    Raises:
        ValueError: images or labels that do not fit.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    trainer = DiffusionTrainer(training, torch.from_numpy(images), torch.from_numpy(labels))
    plan = TrainingPlan(
        steps, training.run(images, labels), training.seed, training.checkpoint_every, training.say_every
    )
    train(trainer, plan, place, say)
    trainer.average.give(trainer.denoiser)
    trainer.denoiser.adopt(sorted(set(range(training.architecture.classes)) - {int(y) for y in np.unique(labels)}))
    return trainer.denoiser
