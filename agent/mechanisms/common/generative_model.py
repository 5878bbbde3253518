"""What diffusion models of private releases share, of images and latents; and the public images they learn first."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.dp.noise import Entropy, SystemEntropy
from agent.models.diffusion.edm_training import Average
from agent.models.weights import fill


@dataclass(frozen=True, slots=True, eq=False)
class PublicImages:
    """The public set D_p: nobody's patients."""

    images: NDArray[np.uint8]  # (n, s, s) or (n, s, s, 3)
    bins: NDArray[np.int64]  # (n,): the semantic of each, a bin of the query function
    vouched: frozenset[str] = frozenset()  # digests that the site says are nobody's patients
    sha256: str = ""  # of the images, as they are trained on; filled in

    def __post_init__(self) -> None:
        """A bin for each image."""
        if self.images.dtype != np.uint8 or not 0 < len(self.images) == len(self.bins):
            raise ValueError("public images are uint8, with a semantic bin for each")
        digest = hashlib.sha256(str(self.images.shape).encode())
        digest.update(np.ascontiguousarray(self.images).tobytes())
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def component(self) -> str:
        """What a statement says of the weights that were trained on them, without noise (P6)."""
        return "public" if self.sha256 in self.vouched else "private"


Network = TypeVar("Network", bound=nn.Module)


class DenoisingModel(Generic[Network]):
    """A denoiser, pre-trained on public images and fine-tuned on patients by DP-SGD, with an average; it then draws.

    What a subclass gives to DP-SGD takes units of two tensors, a row for each image: images (n, s, s[, 3]) uint8 and
    labels (n,) int64, -1 for none.
    """

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
