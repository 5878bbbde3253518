"""The interface of a generative model for a private release: a diffusion model or a GAN."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.dp.dpsgd import Task
from agent.dp.noise import Entropy, SystemEntropy
from agent.models.diffusion.edm_training import Average
from agent.models.training_loop import Progress
from agent.models.weights import fill

Network = TypeVar("Network", bound=nn.Module)


class GenerativeModel(Protocol):
    """Pre-trained on public images, fine-tuned on patients by DP-SGD, then asked for images of a class."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its images: (s, s) grey or (s, s, 3) RGB."""

    @property
    def classes(self) -> int:
        """Conditions 0 .. classes - 1; a label of -1 is no condition."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public configuration: of all that decides what it becomes, but the images."""

    def pretrain(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        steps: int,
        place: CheckpointStore,
        say: Callable[[Progress], None] = ...,
    ) -> None:
        """Train on public images, and go on where ``place`` has a checkpoint of this run.

        Args:
            images: (n, s, s) or (n, s, s, 3).
            labels: (n,), -1 for an image without a condition.
            steps: of the optimiser.
            place: of the checkpoint.
            say: told of the progress.
        Raises:
            ValueError: images or labels that do not fit.
        """

    def task(self) -> Task:
        """What DP-SGD trains, after the pre-training; the same model and follower whenever it is asked.

        Its ``expand`` takes units of two tensors, a row for each image: images (n, s, s[, 3]) uint8 and labels (n,)
        int64, -1 for none.
        """

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """An image for each label.

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
            WeightsError: it is of another configuration.
        """


class DenoisingModel(Generic[Network]):
    """What every ``GenerativeModel`` with a denoiser shares: its weights, and an average while it is fine-tuned."""

    def __init__(self, denoiser: Network, entropy: Entropy | None) -> None:
        """Keep ``denoiser`` with its initial weights; ``entropy`` is the operating system's unless it is given."""
        self._denoiser = denoiser
        self._entropy = SystemEntropy() if entropy is None else entropy
        self._average: Average | None = None  # of the fine-tuning

    def state(self) -> dict[str, Tensor]:
        """The weights that draw, on the CPU."""
        return {name: tensor.detach().cpu() for name, tensor in self._drawing().state_dict().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state` in the place of a pre-training.

        Raises:
            WeightsError: it is of another configuration.
        """
        self._refuse_begun()
        fill(self._denoiser, state)

    def _refuse_begun(self) -> None:
        if self._average is not None:
            raise ValueError("the fine-tuning has begun: build the model anew")

    def _drawing(self) -> Network:
        """What draws: a copy with the average weights."""
        out = copy.deepcopy(self._denoiser)
        if self._average is not None:
            self._average.give(out)
        return out.train(mode=False)

    def _unit_seed(self) -> int:
        """Of one unit's draws, from fresh entropy.

        One stream for all units would shift when a patient is added: the others would get other draws, and the sum
        would move by more than one clip.
        """
        return int.from_bytes(self._entropy.take(8), "little") >> 1


def stratified(count: int, draws: int, draw: torch.Generator) -> Tensor:
    """(count x draws,) float64 in [0, 1): K for each image, u_k = (u + k / K) mod 1 of one uniform u.

    Every number is uniform; the mean of an image's K varies less than that of K independent ones.
    """
    start = torch.rand(count, 1, generator=draw, device=draw.device, dtype=torch.float64)
    return (start + torch.arange(draws, device=draw.device) / draws).remainder(1.0).flatten()
