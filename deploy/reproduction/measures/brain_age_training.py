"""Train a network of ages on public or made heads with the L2 loss, and judge it on people that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from agent.domain import CheckpointStore
from agent.models.augmentations import eased, run_digest
from agent.models.training_loop import (
    TrainingPlan,
    TrainingProgress,
    optimizer_state,
    restore_optimizer,
    seeded,
    train,
)
from deploy.reproduction.measures.brain_age_network import (
    AgeArchitecture,
    AgeNet,
    BrainAge,
    Scale,
    brain_age_bytes,
    predicted,
)

_FEWEST: Final = 4  # heads


@dataclass(frozen=True, slots=True)
class AgeConfig:
    """How one network is trained."""

    architecture: AgeArchitecture = field(default_factory=AgeArchitecture)
    steps: int = 1_000
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 1e-3
    shift: int = 1  # voxels, along each axis and either way
    light: float = 0.05  # brightness, as a factor 1 ± light
    seed: int = 0
    checkpoint_every: int = 500
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        counts = (self.steps, self.batch, self.checkpoint_every)
        if not all(type(c) is int and c >= 1 for c in counts) or self.batch < 2 or not 0 <= self.shift <= 8:
            raise ValueError("steps and sizes are whole numbers, and a batch has two heads at least")
        if not (0 < self.learning_rate < 1 and 0 <= self.weight_decay < 1 and 0 <= self.light < 1):
            raise ValueError("rates lie between 0 and 1")


@dataclass(frozen=True, slots=True, eq=False)
class Aged:
    """Public or made heads with the ages of their owners, never the cohort (P6)."""

    cubes: NDArray[np.float32]  # (n, s, s, s) of deploy.reproduction.measures.brain_age_network.head_cube
    years: NDArray[np.float64]  # (n,)

    def __post_init__(self) -> None:
        """An age for each head, and ages that differ."""
        if self.cubes.ndim != 4 or self.cubes.dtype != np.float32 or self.years.shape != (len(self.cubes),):
            raise ValueError("heads are (n, s, s, s) float32, each with an age in years")
        if len(self.cubes) < _FEWEST or not bool(np.isfinite(self.cubes).all()):
            raise ValueError("too few heads, or values that are not finite")
        if not bool(((self.years >= 0) & (self.years <= 130)).all()) or not self.years.std() > 0:
            raise ValueError("ages are years, and not all the same")

    @property
    def scale(self) -> Scale:
        """Of the ages."""
        return Scale(float(self.years.mean()), float(self.years.std()))


def train_brain_age(
    heads: Aged,
    config: AgeConfig,
    place: Path | CheckpointStore,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> bytes:
    """Train a network of ages.

    Args:
        heads: to learn from; who is to be judged must not be among them.
        config: of the run.
        place: of its checkpoint; a run that was killed goes on from there.
        say: told of the progress.
    Returns:
        The file that :func:`deploy.reproduction.measures.brain_age_network.brain_age_from` reads.
    Raises:
        ValueError: heads of another side.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    if heads.cubes.shape[1] != config.architecture.side:
        raise ValueError("the heads have another side than the network")
    trainer = _Trainer(heads, config)
    told = {**asdict(config), "device": ""}  # the same run on any device
    digest = run_digest(told, heads.cubes, heads.years)
    train(trainer, TrainingPlan(config.steps, digest, config.seed, config.checkpoint_every), place, say)
    notes = {"heads": len(heads.cubes), "run": digest, "seed": config.seed, "steps": config.steps}
    return brain_age_bytes(trainer.net, heads.scale, notes)


class _Trainer:
    """One L2 step over a batch of heads, each mirrored, moved and lit at random: none of that changes an age."""

    def __init__(self, heads: Aged, config: AgeConfig) -> None:
        self.config, self.device = config, torch.device(config.device)
        self.cubes = torch.from_numpy(heads.cubes)[:, None].to(self.device)
        told = (heads.years - heads.scale.mean) / heads.scale.deviation
        self.told = torch.from_numpy(told.astype(np.float32)).to(self.device)
        with seeded(config.seed):
            net = AgeNet(config.architecture)
        self.net = net.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), config.learning_rate, weight_decay=config.weight_decay
        )
        self.done = 0

    def state(self) -> dict[str, Tensor]:
        return {
            **{f"net.{name}": t for name, t in self.net.state_dict().items()},
            **optimizer_state(self.optimizer, "optimizer"),
            "done": torch.tensor(self.done),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = {n.removeprefix("net."): t for n, t in state.items() if n.startswith("net.")}
        self.net.load_state_dict(own)
        restore_optimizer(self.optimizer, "optimizer", state)
        self.done = int(state["done"])

    def step(self, generator: torch.Generator) -> dict[str, float]:
        chosen = torch.randperm(len(self.cubes), generator=generator)[: self.config.batch]
        seen = self._seen(self.cubes[chosen.to(self.device)], generator)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * eased(self.done, self.config.steps)
        self.net.train()
        loss = mse_loss(self.net(seen), self.told[chosen.to(self.device)])
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.optimizer.step()
        self.done += 1
        return {"squared": float(loss.detach())}

    def _seen(self, cubes: Tensor, generator: torch.Generator) -> Tensor:
        n, reach = len(cubes), self.config.shift
        mirror = torch.rand(n, generator=generator) < 0.5
        moves = torch.randint(-reach, reach + 1, (n, 3), generator=generator).tolist()
        lit = 1 + self.config.light * (2 * torch.rand(n, generator=generator) - 1)
        views = [
            # the first axis runs from left to right; what leaves on one side is air, and enters on the other
            torch.roll(cube.flip(1) if mirror[i] else cube, moves[i], (1, 2, 3))
            for i, cube in enumerate(cubes)
        ]
        return (torch.stack(views) * lit.to(cubes)[:, None, None, None, None]).clamp(0.0, 1.0)


def absolute_error(brain_age: BrainAge, heads: Aged) -> float:
    """Mean absolute error in years, on heads that were not learned from."""
    return float(np.abs(predicted(brain_age, heads.cubes) - heads.years).mean())
