"""One of several processes that train a small model together, for tests: what it ends with is a file."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.dp.clipping import ClippedSum, PrivacyUnit, loop_engine
from agent.dp.data_parallel import OutOfStepError, SharedCheckpointStore, SharedEntropy, abreast, join, leave
from agent.dp.dpsgd import PrivateSgd, TrainingTask, train_privately
from agent.dp.noise import Entropy
from agent.models.training_loop import FileCheckpointStore, seeded
from tests.support.entropy import UnsafeSeededEntropy

JOB = PrivateSgd(
    sampling_rate=0.6, noise_multiplier=1.5, steps=30, clip=0.7, images_per_patient=2, expected_batch=4.0
)
WORLD = 2


def _scores(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    out: Tensor = (model(rows[0]) - 1.0).square().mean(dim=1)
    return out


def trained(
    engine: ClippedSum, entropy: Entropy, place: CheckpointStore | None = None, odd: str = ""
) -> NDArray[np.float32]:
    """The weights after the job; ``odd`` makes this process's patients or weights others than the rest's."""
    draw = torch.Generator().manual_seed(3)
    units = [PrivacyUnit((torch.randn(n, 4, generator=draw),)) for n in (1, 3, 2, 1, 2, 1)]
    with seeded(1 if odd == "weights" else 0):
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    task = TrainingTask(model, _scores, partial(torch.optim.Adam, lr=0.05))
    train_privately(
        task, units[1:] if odd == "patients" else units, JOB, entropy, engine, place=place, run="x" if place else ""
    )
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def _dying(calls: int) -> ClippedSum:
    left = [calls]

    def engine(model, loss, units, clip):  # type: ignore[no-untyped-def]
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return loop_engine(model, loss, units, clip)

    return engine


FAULTS = ("none", "through", "patients", "weights", "dies")


def part(rank: int, folder: Path) -> None:
    """Train as process ``rank`` of two, once with each of the faults, which the second one has."""
    join(rank, WORLD, f"file://{folder}/meet", patience=60.0)
    for fault in FAULTS:
        at_fault = fault if rank == 1 else ""
        engine = abreast(_dying(12) if at_fault == "dies" else loop_engine)
        kept = "none" if fault == "through" else fault
        place = SharedCheckpointStore(FileCheckpointStore(folder / f"{kept}-{rank}.checkpoint"))
        try:
            weights = trained(engine, SharedEntropy(UnsafeSeededEntropy(5 + rank)), place, at_fault)
            np.save(folder / f"{fault}-{rank}.npy", weights)
        except OutOfStepError:
            (folder / f"{fault}-{rank}.outofstep").touch()
        except RuntimeError:
            (folder / f"{fault}-{rank}.stopped").touch()
            os._exit(0)  # nobody answers: nothing to leave
    leave()
