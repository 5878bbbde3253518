"""The diffusion model of PrivImage, DPDM and PDP-Diffusion, as DP-SGD trains it.

Dockhorn, Cao, Vahdat & Kreis 2023 (DPDM, arXiv 2210.09929): EDM's loss of K noise draws of each image, averaged into
one gradient before it is clipped ("noise multiplicity", section 3.2). Li et al. 2023 (PrivImage, arXiv 2311.12850),
section 3.4; Ghalebikesabi et al. 2023 (PDP-Diffusion, arXiv 2302.13861). Low-rank fine-tuning: Hu et al. 2021.

All K draws are fresh for each picture and step, and labels are dropped of draws, not of pictures: each draw is then a
sample of the whole loss, and the mean of K varies least, at a sensitivity that stays the same.
"""

from __future__ import annotations

import copy
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

from agent.nets.diffusion import (
    Denoiser,
    DiffusionArchitecture,
    Reach,
    ddim,
    guided,
    heun,
    merged,
    noise_levels,
    with_lora,
)
from agent.nets.pictures import to_bytes, to_unit
from agent.nets.weights import fill
from agent.stages.clipping import Unit
from agent.stages.finetune import Task
from agent.stages.noise import Entropy, SystemEntropy
from agent.training.diffusion import (
    Average,
    DiffusionTraining,
    conditions,
    dropped,
    local,
    noised,
    planes,
    row_losses,
    train_denoiser,
)
from agent.training.loop import Place, Progress, own_generator, seeded

FREE: Final = ("device", "sampling_batch")  # of a configuration: they decide where and how fast, not what


@dataclass(frozen=True, slots=True)
class DiffusionConfig:
    """The public configuration; none of it may be derived from patients."""

    architecture: DiffusionArchitecture
    seed: int
    draws: int = 8  # K, noise draws of each picture in each step (DPDM: 8 to 32)
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
    lora_reach: Reach = "linear"
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
    def pretraining(self) -> DiffusionTraining:
        """What of it is of the public training."""
        return DiffusionTraining(
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


SAMPLERS: Final = {"heun": heun, "ddim": ddim}


class Diffusion:
    """A ``GenerativeModel``: a denoiser, its average while it is fine-tuned, and the sampler."""

    def __init__(self, config: DiffusionConfig, entropy: Entropy | None = None) -> None:
        """Draw the initial weights from ``config.seed``.

        Args:
            config: public.
            entropy: of the noise draws of the fine-tuning; the operating system's unless a test says otherwise.
        """
        self.config = config
        self._entropy = SystemEntropy() if entropy is None else entropy
        with seeded(config.seed):
            self._denoiser = Denoiser(config.architecture).to(config.device)
        self._public = False  # whether it has weights of public pictures
        self._average: Average | None = None  # of the fine-tuning

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
        place: Place,
        say: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Train on public pictures; what is fine-tuned afterwards, and draws, are the average weights.

        Args and errors as of ``GenerativeModel.pretrain`` and ``train_denoiser``.
        """
        self._refuse_begun()
        self._denoiser = train_denoiser(images, labels, self.config.pretraining, steps, place, say)
        self._public = True

    def task(self) -> Task:
        """All weights, or low-rank factors and the table of classes; an average follows them.

        Raises:
            ValueError: low-rank factors of a network that was never trained.
        """
        if self._average is None:
            if self.config.lora_rank:
                if not self._public:
                    raise ValueError("low-rank fine-tuning needs pre-trained weights: pretrain or restore first")
                with seeded(self.config.seed):
                    self._denoiser = with_lora(self._denoiser, self.config.lora_rank, self.config.lora_reach)
            self._average = Average(self._denoiser, self.config.ema)
        adam = functools.partial(torch.optim.Adam, lr=self.config.lr_finetune)
        return Task(self._denoiser, row_losses, adam, self._expanded, self._average)

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """A picture for each label, with the average weights.

        Args:
            labels: (n,), -1 for no condition.
            generator: on the CPU; what it gives also depends on ``sampling_batch`` and the device.
        Returns:
            (n, s, s) or (n, s, s, 3).
        Raises:
            ValueError: labels of another kind.
        """
        own = self.config
        levels = noise_levels(own.sampling_steps).to(own.device, torch.float32)
        denoiser, draw = self._drawing(), local(generator, own.device)
        kind = torch.device(own.device).type
        drawn = [np.empty((0, *self.shape), np.uint8)]
        wanted = conditions(torch.from_numpy(labels), own.architecture).to(own.device)
        for part in torch.split(wanted, own.sampling_batch) if len(wanted) else ():
            size = (len(part), own.architecture.channels, own.architecture.side, own.architecture.side)
            noise = torch.randn(size, generator=draw, device=own.device)
            with torch.autocast(kind, torch.bfloat16, enabled=own.precision == "bfloat16"):
                made = SAMPLERS[own.sampler](guided(denoiser, part, own.guidance), noise, levels)
            drawn.append(to_bytes(to_unit(made)))
        return np.concatenate(drawn)

    def state(self) -> dict[str, Tensor]:
        """The weights that draw, low-rank factors merged, on the CPU."""
        return {name: tensor.detach().cpu() for name, tensor in self._drawing().state_dict().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state` in the place of a pre-training.

        Raises:
            BadWeights: it is of another configuration.
        """
        self._refuse_begun()
        fill(self._denoiser, state)
        self._public = True

    def _refuse_begun(self) -> None:
        if self._average is not None:
            raise ValueError("the fine-tuning has begun: build the model anew")

    def _drawing(self) -> Denoiser:
        """What draws: a copy with the average weights, without adapters."""
        out = copy.deepcopy(self._denoiser)
        if self._average is not None:
            self._average.give(out)
        return merged(out).train(mode=False)

    def _expanded(self, unit: Unit) -> Unit:
        """K noise draws of each picture: rows (noisy, sigma, clean, label), n K of each, for ``row_losses``.

        Each unit draws from a generator of its own, seeded by fresh entropy. One stream for all of them would shift
        when a patient is added: the others would get other draws, and the sum would move by more than one clip.

        Within a picture sigma is stratified: u_k = (u + k / K) mod 1 of one uniform u, then the quantile. Every draw
        has the law of EDM's Table 1, the mean of K draws varies less.
        """
        own, images, labels = self.config, *unit.rows
        seed = int.from_bytes(self._entropy.take(8), "little") >> 1
        draw = own_generator(seed, own.device)
        clean = planes(images, own.architecture).to(own.device).repeat_interleave(own.draws, dim=0)
        asked = conditions(labels, own.architecture).to(own.device).repeat_interleave(own.draws)
        start = torch.rand(len(images), 1, generator=draw, device=own.device, dtype=torch.float64)
        share = (start + torch.arange(own.draws, device=own.device) / own.draws).remainder(1.0).flatten()
        sigma = (own.p_mean + own.p_std * torch.special.ndtri(share.clamp(1e-9, 1.0 - 1e-9))).exp().float()
        return Unit(
            (noised(clean, sigma, draw), sigma, clean, dropped(asked, own.label_drop, own.architecture, draw))
        )
