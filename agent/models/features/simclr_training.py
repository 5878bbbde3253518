"""Train feature networks on public images without labels: SimCLR (Chen et al. 2020).

Two random views of every image of a batch; the projection of one must find that of the other among all the rest
(NT-Xent, Eq. 1). The projection is thrown away: what stays is the trunk, whose mean map is the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from agent.models.augmentations import SELF_SUPERVISED, Pool, Views, eased, run_digest, view
from agent.models.features.extractors import features_bytes
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, seeded, train
from protos.common.errors import TrainingError

LEAST_APART: Final = 1e-4  # mean 1 - cosine of two images; below, the network tells none apart
LOOKED_AT: Final = 256  # images, at most, to see whether it does


class FeaturesCollapsedError(TrainingError, ValueError):
    """The network gives every image the same embedding, and would be blind wherever it is used."""

    def __init__(self) -> None:
        """Say what may help."""
        super().__init__("the network does not distinguish images: try more steps, a lower rate or other views")


@dataclass(frozen=True, slots=True)
class RepresentationConfig:
    """How one feature network is trained."""

    name: str
    architecture: TrunkArchitecture
    steps: int = 2_000
    batch: int = 64  # images; twice as many views
    projection: int = 64  # numbers that are compared
    temperature: float = 0.2
    learning_rate: float = 3e-4  # at 1e-3 short runs collapse: every image gets one and the same embedding
    weight_decay: float = 1e-4
    seed: int = 0
    views: Views = SELF_SUPERVISED
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        counts = (self.steps, self.batch, self.projection, self.checkpoint_every)
        if not all(type(c) is int and c >= 1 for c in counts) or self.batch < 2:
            raise ValueError("steps and sizes are whole numbers, and a batch has two images at least")
        if not (0 < self.learning_rate < 1 and 0 <= self.weight_decay < 1 and 0.01 <= self.temperature <= 10):
            raise ValueError("rates lie between 0 and 1, a temperature between 0.01 and 10")


def train_features(
    images: NDArray[np.uint8],
    config: RepresentationConfig,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a constant
) -> bytes:
    """Train a feature network on public images.

    Args:
        images: (n, h, w) or (n, h, w, 3): public or made, never the cohort (P6).
        config: of the run.
        folder: of its checkpoint; a run that was killed goes on from there.
        say: told of the progress.
        device: where the network is trained.
    Returns:
        The file that :func:`agent.models.features.extractors.features_from` reads.
    Raises:
        ValueError: images of another shape or type, that do not differ, or fewer than a batch.
        FeaturesCollapsedError: the network tells no image from another; the checkpoint stays.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    if not len(images) >= config.batch:
        raise ValueError("fewer images than one batch needs")
    pool = Pool(images, config.architecture.side, config.architecture.channels, device)
    trainer = _Trainer(pool, len(images), config)
    digest = run_digest(asdict(config), images)
    train(trainer, TrainingPlan(config.steps, digest, config.seed, config.checkpoint_every), folder, say)
    if not _apart(trainer.trunk, pool, len(images)) > LEAST_APART:
        raise FeaturesCollapsedError
    return features_bytes(config.name, trainer.trunk, {"run": digest, "seed": config.seed, "steps": config.steps})


def _apart(trunk: Trunk, pool: Pool, count: int) -> float:
    """The mean of 1 - cosine over pairs of images, as the trained network sees them."""
    with torch.no_grad():
        seen = pool.take(torch.arange(min(count, LOOKED_AT)))
        embedded = normalize(trunk(seen)[-1].float().mean(dim=(2, 3)), dim=1)
    n = len(embedded)
    return float(1.0 - (embedded @ embedded.T).fill_diagonal_(0.0).sum() / (n * (n - 1)))


def contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """NT-Xent (Chen et al. 2020, Eq. 1) of two views' projections (n, d): a number, mean over all 2n views."""
    both = normalize(torch.cat([first, second]).float(), dim=1)
    alike = both @ both.T / temperature
    alike = alike.masked_fill(torch.eye(len(both), dtype=torch.bool, device=both.device), float("-inf"))
    partner = torch.arange(len(both), device=both.device).roll(len(first))
    return cross_entropy(alike, partner)


class _Trainer(LossTrainer):
    """One SimCLR step at a time."""

    def __init__(self, pool: Pool, count: int, config: RepresentationConfig) -> None:
        self.pool, self.count, self.config = pool, count, config
        wide = config.architecture.widths[-1]
        with seeded(config.seed):
            trunk = Trunk(config.architecture)
            head = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, config.projection))
        self.trunk, self.head = trunk.to(pool.device), head.to(pool.device)
        both = [*self.trunk.parameters(), *self.head.parameters()]
        adam = torch.optim.AdamW(both, config.learning_rate, weight_decay=config.weight_decay)
        super().__init__({"trunk": self.trunk, "head": self.head}, {"optimizer": adam})

    def rate(self) -> float:
        return self.config.learning_rate * eased(self.done, self.config.steps)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        chosen = self.pool.take(torch.randperm(self.count, generator=generator)[: self.config.batch])
        views = torch.cat([view(chosen, self.config.views, generator) for _ in range(2)])
        first, second = self.head(self.trunk(views)[-1].mean(dim=(2, 3))).chunk(2)
        loss = contrast(first, second, self.config.temperature)
        return loss, {"nt_xent": float(loss.detach())}
