"""What a private release needs of a generative model, whatever it is inside: a diffusion model, a GAN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.stages.finetune import Task
from agent.training.loop import Place, Progress


class GenerativeModel(Protocol):
    """Pre-trained on public pictures, fine-tuned on patients by DP-SGD, then asked for pictures of a class."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its pictures: (s, s) grey or (s, s, 3) RGB."""

    @property
    def classes(self) -> int:
        """Conditions 0 .. classes - 1; a label of -1 is no condition."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public configuration: of all that decides what it becomes, but the pictures."""

    def pretrain(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        steps: int,
        place: Place,
        say: Callable[[Progress], None] = ...,
    ) -> None:
        """Train on public pictures, and go on where ``place`` has a checkpoint of this run.

        Args:
            images: (n, s, s) or (n, s, s, 3).
            labels: (n,), -1 for a picture without a condition.
            steps: of the optimiser.
            place: of the checkpoint.
            say: told of the progress.
        Raises:
            ValueError: pictures or labels that do not fit.
        """

    def task(self) -> Task:
        """What DP-SGD trains, after the pre-training; the same model and follower whenever it is asked.

        Its ``expand`` takes units of two tensors, a row for each picture: images (n, s, s[, 3]) uint8 and labels (n,)
        int64, -1 for none.
        """

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """A picture for each label.

        Args:
            labels: (n,).
            generator: on the CPU; the only source of randomness.
        Returns:
            (n, s, s) or (n, s, s, 3).
        """

    def state(self) -> dict[str, Tensor]:
        """The weights that draw, on the CPU: what a release holds."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state` in the place of a pre-training; it can then draw, or be fine-tuned.

        Raises:
            BadWeights: it is of another configuration.
        """
