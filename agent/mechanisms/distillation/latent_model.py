"""The latent diffusion model of Privacy Distillation, teacher and student, as it is trained with and without noise.

Fernandez, Sanchez, Pinaya, Jacenków, Tsaftaris & Cardoso 2023, section 2.1. With DP-SGD it is PrivImage's procedure
(Li et al. 2023, section 3.4) on latents: K noise draws of each image are one gradient before it is clipped
(Dockhorn et al. 2023, DPDM, section 3.2), labels are dropped of draws, not of images. Only the denoiser learns: the
autoencoder is frozen and public.
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
from agent.models.diffusion.autoencoder import Autoencoder
from agent.models.diffusion.edm_training import Average
from agent.models.diffusion.latent import (
    ComputeSettings,
    LatentArchitecture,
    LatentDenoiser,
    LatentSampler,
    latent_bytes,
    planes,
)
from agent.models.diffusion.latent_training import LatentTraining, dropped, encoded, row_losses, train_latent_denoiser
from agent.models.diffusion.noise_schedule import TIMES, Drawing, Noising, Prediction, Sampler
from agent.models.diffusion.prompts import Conditions
from agent.models.training_loop import TrainingProgress, device_generator, seeded, torch_generator

FREE: Final = ("device", "sampling_batch")  # of a configuration: they decide where and how fast, not what


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The public configuration; none of it may be derived from patients."""

    architecture: LatentArchitecture  # PRESETS[name].fitted(autoencoder, conditions)
    seed: int
    prediction: Prediction = "v"
    batch: int = 32
    lr: float = 2e-3
    ema: float = 0.995
    label_drop: float = 0.1
    guidance: float = 1.5  # of sampling: 1 is the plain conditional model
    sampler: Sampler = "pndm"
    sampling_steps: int = 20  # a divisor of 1000
    lr_finetune: float = 3e-4
    draws: int = 8  # K, noise draws of each image in each step of DP-SGD
    sampling_batch: int = 256
    checkpoint_every: int = 500
    precision: Literal["float32", "bfloat16"] = "float32"  # of training and sampling; DP-SGD is always float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained or drawn, all of it at once."""
        good = {
            "draws": 1 <= self.draws <= 1024,
            "lr_finetune": 0.0 < self.lr_finetune < 1.0,
            "sampling_batch": self.sampling_batch >= 1,
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for a latent diffusion model: {', '.join(wrong)}")
        _ = self.training, self.drawing  # refuse the rest

    @property
    def training(self) -> LatentTraining:
        """What of it is of the training without noise."""
        return LatentTraining(
            self.architecture,
            self.seed,
            prediction=self.prediction,
            batch=self.batch,
            lr=self.lr,
            label_drop=self.label_drop,
            ema=self.ema,
            precision=self.precision,
            device=self.device,
            checkpoint_every=self.checkpoint_every,
        )

    @property
    def drawing(self) -> Drawing:
        """What of it a released model needs to draw."""
        return Drawing(self.prediction, self.sampler, self.sampling_steps, self.guidance)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it but the device, the size of a sampling batch and how often a checkpoint is written."""
        told = {name: value for name, value in asdict(self).items() if name not in (*FREE, "checkpoint_every")}
        return hashlib.sha256(json.dumps({"latent diffusion": told}, sort_keys=True).encode()).hexdigest()


class LatentDiffusion(DenoisingModel[LatentDenoiser]):
    """A denoiser of an autoencoder's latents, its average while it is fine-tuned, sampling."""

    def __init__(
        self,
        config: LatentConfig,
        autoencoder: Autoencoder,
        conditions: Conditions,
        entropy: Entropy | None = None,
    ) -> None:
        """Draw the initial weights from ``config.seed``.

        Args:
            config: public; its architecture is fitted to the other two.
            autoencoder: trained on public or synthetic images.
            conditions: public.
            entropy: of the noise draws of the fine-tuning; the operating system's unless a test says otherwise.
        Raises:
            ValueError: the architecture is for other latents or prompts.
        """
        config.architecture.demand(autoencoder, conditions)
        self.config, self.autoencoder, self.conditions = config, autoencoder, conditions
        with seeded(config.seed):
            denoiser = LatentDenoiser(config.architecture)
        super().__init__(denoiser.to(config.device), entropy)
        self._noising = Noising(config.prediction)
        self._latents: dict[bytes, Tensor] = {}  # (c, h, w) by SHA-256 of the image

    @property
    def shape(self) -> tuple[int, ...]:
        """(s, s) grey or (s, s, 3) RGB."""
        return self.autoencoder.shape

    @property
    def classes(self) -> int:
        """Conditions 0 .. classes - 1."""
        return self.conditions.count

    @property
    def fingerprint(self) -> str:
        """Of the configuration, the autoencoder and the conditions."""
        told = (self.config.fingerprint, self.autoencoder.origin.sha256, self.conditions.digest)
        return hashlib.sha256(" ".join(told).encode()).hexdigest()

    def pretrain(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        steps: int,
        place: CheckpointStore,
        say: Callable[[TrainingProgress], None] = lambda _: None,
    ) -> None:
        """Train without noise; what is fine-tuned afterwards, and draws, are the average weights.

        On public images it is the pre-training of a private model. On patients it is the whole training of a
        teacher, which promises nothing and must not leave; ``place`` is then the vault's.

        Args and errors as of ``encoded`` and ``train_latent_denoiser``.
        """
        self._refuse_begun()
        data = encoded(images, labels, self.autoencoder, self.conditions, self.config.device)
        self._denoiser = train_latent_denoiser(data, self.config.training, steps, place, say)

    def task(self) -> TrainingTask:
        """All weights of the denoiser, none of the autoencoder; an average follows them."""
        if self._average is None:
            self._average = Average(self._denoiser, self.config.ema)
        adam = functools.partial(torch.optim.Adam, lr=self.config.lr_finetune)
        return TrainingTask(self._denoiser, row_losses, adam, self._expanded, self._average)

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """An image for each label, with the average weights.

        Args:
            labels: (n,), -1 for no condition.
            generator: on the CPU; what it gives also depends on ``sampling_batch`` and the device.
        Returns:
            (n, s, s) or (n, s, s, 3).
        Raises:
            ValueError: labels of another kind.
            LatentNotFiniteError: the network says no numbers.
        """
        return self._drawer().sample(labels, generator, self._where)

    def file(self, notes: Mapping[str, object]) -> bytes:
        """The model file of what draws: see ``latent_bytes``."""
        return latent_bytes(self._drawer(), notes)

    @property
    def _where(self) -> ComputeSettings:
        return ComputeSettings(self.config.device, self.config.sampling_batch, self.config.precision == "bfloat16")

    def _drawer(self) -> LatentSampler:
        return LatentSampler(self._drawing(), self.autoencoder, self.conditions, self.config.drawing)

    def _expanded(self, unit: PrivacyUnit) -> PrivacyUnit:
        """K noise draws of each image: rows (noisy latent, t, target, tokens), n K of each, for ``row_losses``.

        Each unit draws from a generator of its own. Within an image t is stratified: floor(T u_k), and every draw is
        uniform over the times.
        """
        own, images, labels = self.config, *unit.rows
        generator = torch_generator(self._unit_seed())
        asked = dropped(labels.cpu().repeat_interleave(own.draws), own.label_drop, generator)
        tokens = self.conditions.tokens(asked, generator).to(own.device)
        draw = device_generator(generator, own.device)
        clean = self._encoded(images).repeat_interleave(own.draws, dim=0)
        t = (stratified(len(images), own.draws, draw) * TIMES).long().clamp(max=TIMES - 1)
        noise = torch.randn(clean.shape, generator=draw, device=own.device)
        return PrivacyUnit((self._noising.noised(clean, t, noise), t, self._noising.target(clean, t, noise), tokens))

    @torch.no_grad()
    def _encoded(self, images: Tensor) -> Tensor:
        """The latents (n, c, h, w) of images (n, s, s[, 3]).

        An image is encoded once, and by itself: its latent is a function of nobody else's images, to the last bit.
        """
        found = []
        for image in images.cpu():
            key = hashlib.sha256(image.contiguous().numpy().tobytes()).digest()
            if key not in self._latents:
                plane = planes(image[None].to(self.config.device), self.autoencoder)
                self._latents[key] = self.autoencoder.encode(plane)[0]
            found.append(self._latents[key])
        return torch.stack(found)
