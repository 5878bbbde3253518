"""The diffusion model of PrivImage, DPDM and PDP-Diffusion, as DP-SGD trains it.

Dockhorn, Cao, Vahdat & Kreis 2023 (DPDM, arXiv 2210.09929): EDM's loss of K noise draws of each image, averaged into
one gradient before it is clipped ("noise multiplicity", section 3.2). Li et al. 2023 (PrivImage, arXiv 2311.12850),
section 3.4; Ghalebikesabi et al. 2023 (PDP-Diffusion, arXiv 2302.13861). Low-rank fine-tuning: Hu et al. 2021.

All K draws are fresh for each image and step, and labels are dropped of draws, not of images: each draw is then a
sample of the whole loss, and the mean of K varies least, at a sensitivity that stays the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.domain import CheckpointStore
from agent.dp.clipping import PrivacyUnit
from agent.dp.dpsgd import TrainingTask
from agent.dp.noise import Entropy
from agent.mechanisms.common.generative_model import DenoisingModel, stratified
from agent.models.diffusion import edm, edm_training
from agent.models.image_tensors import to_bytes, to_unit
from agent.models.training_loop import TrainingProgress, device_generator, seeded, torch_generator

FREE: Final = ("device", "sampling_batch")  # of a configuration: they decide where and how fast, not what


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    """The public configuration; none of it may be derived from patients."""

    architecture: edm.DiffusionArchitecture
    seed: int
    draws: int = 8  # K, noise draws of each image in each step (DPDM: 8 to 32)
    p_mean: float = -1.2  # of ln sigma (EDM, Table 1)
    p_std: float = 1.2
    lr_pretrain: float = 3e-4
    lr_finetune: float = 3e-4
    ema: float = 0.999
    label_drop: float = 0.1
    guidance: float = 1.0  # of sampling: 1 is the plain conditional model
    sampler: Literal["heun", "ddim"] = "heun"
    sampling_steps: int = 18  # heun 18: 35 evaluations of the network; ddim 50: 50 (DPDM's)
    pretrain_batch: int = 128
    sampling_batch: int = 256
    lora_rank: int = 0  # 0: all weights are fine-tuned
    lora_reach: edm.Reach = "linear"
    precision: Literal["float32", "bfloat16"] = "float32"  # of pre-training and sampling; DP-SGD is always float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained or drawn, all of it at once."""
        good = {
            "draws": 1 <= self.draws <= 1024,
            "lr_finetune": 0.0 < self.lr_finetune < 1.0,
            "guidance": 0.0 <= self.guidance < 100.0,
            "sampler": self.sampler in SAMPLERS,
            "sampling_steps": 2 <= self.sampling_steps <= 10_000,
            "sampling_batch": self.sampling_batch >= 1,
            "lora_rank": 0 <= self.lora_rank <= 4096,
            "lora_reach": self.lora_reach in ("linear", "all"),
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for a diffusion model: {', '.join(wrong)}")
        _ = self.pretraining  # refuses the rest

    @property
    def pretraining(self) -> edm_training.DiffusionTraining:
        """What of it is of the public training."""
        return edm_training.DiffusionTraining(
            self.architecture,
            self.seed,
            batch=self.pretrain_batch,
            lr=self.lr_pretrain,
            p_mean=self.p_mean,
            p_std=self.p_std,
            label_drop=self.label_drop,
            ema=self.ema,
            precision=self.precision,
            device=self.device,
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it but the device and the size of a sampling batch."""
        told = {name: value for name, value in asdict(self).items() if name not in FREE}
        return hashlib.sha256(json.dumps({"diffusion": told}, sort_keys=True).encode()).hexdigest()


SAMPLERS: Final = {"heun": edm.heun, "ddim": edm.ddim}


class Diffusion(DenoisingModel[edm.Denoiser]):
    """A denoiser, its average while it is fine-tuned, and the sampler."""

    def __init__(self, config: DiffusionConfig, entropy: Entropy | None = None) -> None:
        """Draw the initial weights from ``config.seed``.

        Args:
            config: public.
            entropy: of the noise draws of the fine-tuning; the operating system's unless a test says otherwise.
        """
        self.config = config
        with seeded(config.seed):
            denoiser = edm.Denoiser(config.architecture)
        super().__init__(denoiser.to(config.device), entropy)
        self._public = False  # whether it has weights of public images

    @property
    def shape(self) -> tuple[int, ...]:
        """(s, s) grey or (s, s, 3) RGB."""
        return self.config.architecture.shape

    @property
    def classes(self) -> int:
        """Conditions 0 .. classes - 1."""
        return self.config.architecture.classes

    @property
    def fingerprint(self) -> str:
        """Of the configuration."""
        return self.config.fingerprint

    def pretrain(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        steps: int,
        place: CheckpointStore,
        say: Callable[[TrainingProgress], None] = lambda _: None,
    ) -> None:
        """Train on public images; what is fine-tuned afterwards, and draws, are the average weights.

        Args and errors as of ``train_denoiser``.
        """
        self._refuse_begun()
        self._denoiser = edm_training.train_denoiser(images, labels, self.config.pretraining, steps, place, say)
        self._public = True

    def task(self) -> TrainingTask:
        """All weights, or low-rank factors and the table of classes; an average follows them.

        Raises:
            ValueError: low-rank factors of a network that was never trained.
        """
        if self._average is None:
            if self.config.lora_rank:
                if not self._public:
                    raise ValueError("low-rank fine-tuning needs pre-trained weights: pretrain or restore first")
                with seeded(self.config.seed):
                    self._denoiser = edm.with_lora(self._denoiser, self.config.lora_rank, self.config.lora_reach)
            self._average = edm_training.Average(self._denoiser, self.config.ema)
        adam = functools.partial(torch.optim.Adam, lr=self.config.lr_finetune)
        return TrainingTask(self._denoiser, edm_training.row_losses, adam, self._expanded, self._average)

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """An image for each label, with the average weights.

        Args:
            labels: (n,), -1 for no condition.
            generator: on the CPU; what it gives also depends on ``sampling_batch`` and the device.
        Returns:
            (n, s, s) or (n, s, s, 3).
        Raises:
            ValueError: labels of another kind.
        """
        own = self.config
        levels = edm.noise_levels(own.sampling_steps).to(own.device, torch.float32)
        denoiser, draw = self._drawing(), device_generator(generator, own.device)
        kind = torch.device(own.device).type
        drawn = [np.empty((0, *self.shape), np.uint8)]
        wanted = edm_training.conditions(torch.from_numpy(labels), own.architecture).to(own.device)
        for part in torch.split(wanted, own.sampling_batch) if len(wanted) else ():
            size = (len(part), own.architecture.channels, own.architecture.side, own.architecture.side)
            noise = torch.randn(size, generator=draw, device=own.device)
            with torch.autocast(kind, torch.bfloat16, enabled=own.precision == "bfloat16"):
                made = SAMPLERS[own.sampler](edm.guided(denoiser, part, own.guidance), noise, levels)
            drawn.append(to_bytes(to_unit(made)))
        return np.concatenate(drawn)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state` in the place of a pre-training.

        Raises:
            WeightsError: it is of another configuration.
        """
        super().restore(state)
        self._public = True

    def _drawing(self) -> edm.Denoiser:
        """What draws: a copy with the average weights, without adapters."""
        return edm.merged(super()._drawing()).train(mode=False)

    def _expanded(self, unit: PrivacyUnit) -> PrivacyUnit:
        """K noise draws of each image: rows (noisy, sigma, clean, label), n K of each, for ``row_losses``.

        Each unit draws from a generator of its own. Within an image sigma is stratified, and every draw has the law
        of EDM's Table 1.
        """
        own, images, labels = self.config, *unit.rows
        draw = torch_generator(self._unit_seed(), own.device)
        clean = edm_training.planes(images, own.architecture).to(own.device).repeat_interleave(own.draws, dim=0)
        asked = edm_training.conditions(labels, own.architecture).to(own.device).repeat_interleave(own.draws)
        share = stratified(len(images), own.draws, draw)
        sigma = (own.p_mean + own.p_std * torch.special.ndtri(share.clamp(1e-9, 1.0 - 1e-9))).exp().float()
        return PrivacyUnit(
            (
                edm_training.noised(clean, sigma, draw),
                sigma,
                clean,
                edm_training.dropped(asked, own.label_drop, own.architecture, draw),
            )
        )
