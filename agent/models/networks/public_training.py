"""Train a network that a task may name on public pictures, without privacy: the start that hospitals go on from.

What comes out is a file of public weights (:mod:`agent.models.networks.public_weights`) under the names that a task's
network has, so that a task takes it whole, without its head, or as one of several frozen networks side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from agent.models.augmentations import eased, run_digest
from agent.models.networks.architectures import StagedNetwork
from agent.models.networks.public_weights import COVARIANCE, MEANS
from agent.models.networks.trainable import TrainableNetwork, build
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, train
from agent.models.transforms import Augmentation, InputPipeline, view_seed
from policies.tasks.bounds import TaskError, Whole, as_table, read_values, refuse
from policies.tasks.networks import NETWORKS, NetworkSpec
from policies.tasks.transforms import TransformSpec, read_transforms
from protos.artifacts.strict_safetensors import pack_weights
from protos.common.errors import TrainingError

BATCH: Final = 64  # pictures of one step, at most
_RATE: Final = 1e-3  # of AdamW
_DECAY: Final = 1e-2
_SEEN: Final = 4096  # pictures, of which the features' means and covariance are taken
_INPUT: Final = {"channels": Whole(1, 3, 1)}
_SIDE: Final = Whole(8, 4096)


class UnlabelledPicturesError(TrainingError, ValueError):
    """The public pictures have nothing to tell apart."""


@dataclass(frozen=True, slots=True)
class PublicTask:
    """What of a task's file a public training takes: the network, its input, and how pictures are varied."""

    network: NetworkSpec
    side: int  # pixels; public pictures are squares
    channels: int
    transforms: tuple[TransformSpec, ...]
    augmentation: tuple[TransformSpec, ...]

    @classmethod
    def read(cls, tables: Mapping[str, Any]) -> PublicTask:
        """From ``[network]``, ``[input]`` and ``[training]``; what else a task says is of no use here.

        Raises:
            TaskError: with every problem, by its key.
        """
        problems: list[str] = []
        given, drawn = (as_table(tables.get(name, {}), name, problems) for name in ("input", "training"))
        values = read_values({k: v for k, v in given.items() if k in _INPUT}, _INPUT, "input.", problems)
        size = given.get("size")
        if values.get("channels") == 2:
            problems.append("input.channels: must be 1 for grey or 3 for colour")
        square = isinstance(size, list) and len(size) == 2 and size[0] == size[1] and not _SIDE.problem(size[0])
        if not square:
            problems.append("input.size: must be two equal numbers in [8, 4096]: public pictures are squares")
        found: list[Any] = []
        for read in (
            lambda: NetworkSpec.from_table(tables.get("network", {})),
            lambda: read_transforms(given.get("transforms", ()), "input.transforms", 2, random=False),
            lambda: read_transforms(drawn.get("augmentation", ()), "training.augmentation", 2, random=True),
        ):
            try:
                found.append(read())
            except TaskError as error:
                problems += error.problems
        refuse(problems)
        task = cls(found[0], size[0], values["channels"], found[1], found[2])  # type: ignore[index]
        refuse(task._misfits())
        return task

    def _misfits(self) -> list[str]:
        problems = [f"network.{one}" for one in self.network.misfits((self.side,) * 2, masks=False)]
        if self.network.trained != "all" or self.network.weights or self.network.parts:
            problems.append("network: a public training begins from a seed and trains all: leave out what names more")
        if NETWORKS[self.network.name].masks:
            problems.append("network.name: a public training learns labels of pictures, and no masks")
        return problems


@dataclass(frozen=True, slots=True, eq=False)
class PublicTraining:
    """One training: public pictures, and what each of them shows."""

    task: PublicTask
    images: NDArray[np.uint8]  # (n, side, side) or (n, side, side, 3)
    targets: NDArray[np.int64] | NDArray[np.float32]  # (n,) classes, or (n, findings) in {0, 1}
    outputs: int
    seed: int

    def run(self, steps: int, place: Path, device: str, say: Callable[[TrainingProgress], None], every: int) -> bytes:
        """Train, or go on from the checkpoint in ``place``; the file of public weights.

        Raises:
            TransformError: a transform cannot take a picture.
            OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
        """
        task = self.task
        size = (task.side, task.side)
        net = build(task.network, task.channels, size, self.outputs, self.seed, _no_files)
        told = {"network": task.network.to_table(), "channels": task.channels, "seed": self.seed, "steps": steps}
        transforms = [spec.to_table() for spec in (*task.transforms, *task.augmentation)]
        run = run_digest({**told, "transforms": transforms}, self.images, self.targets)
        pictures = self._inputs(size), torch.from_numpy(self.targets)
        trainer = _Trainer(net, *pictures, (task, steps, device), run.encode())
        train(trainer, TrainingPlan(steps, run, self.seed, every), place, say)
        state = {**net.module.net.state_dict(), **_moments(net.module, pictures[0])}
        return pack_weights({name: tensor.cpu().numpy() for name, tensor in state.items()})

    def _inputs(self, size: tuple[int, int]) -> NDArray[np.float32]:
        """As the network sees them, (n, channels, side, side): in [0, 1], then through the fixed transforms."""
        planes = self.images[:, None] if self.images.ndim == 3 else self.images.transpose(0, 3, 1, 2)
        pipeline = InputPipeline(self.task.transforms, size)
        return np.stack([pipeline(plane.astype(np.float32) / np.float32(255))[0] for plane in planes])


def _moments(network: StagedNetwork, inputs: NDArray[np.float32]) -> dict[str, Tensor]:
    """Of what the head sees, over the first pictures: a task may even it out (``options.evened``)."""
    device = next(network.parameters()).device
    with torch.no_grad():
        parts = torch.split(torch.from_numpy(inputs[:_SEEN]).to(device), BATCH)
        found = [reduce(lambda x, stage: stage.run(x), network.stages, part) for part in parts]
    rows = torch.cat(found).double()
    return {MEANS: rows.mean(dim=0).float(), COVARIANCE: torch.cov(rows.T, correction=0).float()}


class _Trainer(LossTrainer):
    """AdamW down the cross entropy of classes, or of each finding."""

    def __init__(
        self,
        net: TrainableNetwork,
        inputs: NDArray[np.float32],
        targets: Tensor,
        how: tuple[PublicTask, int, str],
        run: bytes,
    ) -> None:
        task, self._steps, self._device = how
        self._module = net.module.to(self._device)
        optimizer = torch.optim.AdamW(self._module.parameters(), lr=_RATE, weight_decay=_DECAY)
        super().__init__({"net": self._module}, {"optimizer": optimizer})
        self._inputs, self._targets, self._run = inputs, targets, run
        self._vary = Augmentation(task.augmentation, (task.side, task.side)) if task.augmentation else None

    def rate(self) -> float:
        """Up, then a cosine down."""
        return _RATE * eased(self.done, self._steps)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Of pictures that are drawn with replacement."""
        index = torch.randint(len(self._inputs), (min(BATCH, len(self._inputs)),), generator=generator)
        rows = self._inputs[index.numpy()]
        if self._vary is not None:
            # by the place in the batch: a picture that is drawn twice in a step is seen in two ways
            seeds = (view_seed(self._run, str(int(i)), self.done, place) for place, i in enumerate(index))
            rows = np.stack([self._vary(row, None, seed)[0] for row, seed in zip(rows, seeds, strict=True)])
        wanted = self._targets[index].to(self._device)
        outputs = self._module(torch.from_numpy(rows).to(self._device))
        of = cross_entropy if wanted.ndim == 1 else binary_cross_entropy_with_logits
        loss = of(outputs, wanted)
        return loss, {"loss": float(loss.detach())}


def named_targets(
    labels: tuple[str, ...], *, several: bool
) -> tuple[NDArray[np.int64] | NDArray[np.float32], tuple[str, ...]]:
    """What each picture shows, as numbers, and the names in the order of the outputs.

    Args:
        labels: (n,) one for each picture; with ``several``, its findings joined by ``+``, or ``none``.
        several: whether a picture may show several findings, each of them an output.
    Returns:
        (n,) classes or (n, findings), and the names.
    Raises:
        UnlabelledPicturesError: fewer than two classes, or no finding.
    """
    if not several:
        names = tuple(sorted(set(labels)))
        if len(names) < 2:
            raise UnlabelledPicturesError("the pictures have one label: there is nothing to tell apart")
        return np.array([names.index(label) for label in labels], np.int64), names
    shown = [set(label.split("+")) - {"none", ""} for label in labels]
    names = tuple(sorted(set().union(*shown)))
    if not names:
        raise UnlabelledPicturesError("no picture shows a finding: there is nothing to learn")
    return np.array([[name in found for name in names] for found in shown], np.float32), names


def _no_files(_: str) -> bytes:
    raise AssertionError("a public training names no file")
