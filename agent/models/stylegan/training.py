"""Training a generator: non-saturating loss, lazy R1, adaptive augmentation, a moving average of the weights.

Karras et al. 2020a (arXiv 1912.04958) and 2020b (arXiv 2006.06676). Style mixing and the path length regulariser of
2020a are there and off, as in the published setting for small images; :func:`auto` is the setting with both.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from agent.models.grids import write_grid
from agent.models.image_tensors import to_bytes, to_unit
from agent.models.stylegan.ada import AugmentationControl, augmented
from agent.models.stylegan.network import Discriminator, Generator, StyleGanShape, generator_bytes
from agent.models.training_loop import NetworkTrainer, TrainingPlan, TrainingProgress, device_generator, seeded, train
from protos.common.durable_files import replace_file

GENERATOR: Final = "generator.safetensors"
BETA2: Final = 0.99
PATH_EVERY: Final = 4  # minibatches between two path length steps (2020a, appendix B)
PATH_DECAY: Final = 0.01
SAMPLES: Final = (9, 4)  # batches of a grid, and images of a batch
LAYOUT: Final[dict[str, Any]] = {"memory_format": torch.channels_last}


@dataclass(frozen=True, slots=True)
class GanConfig:
    """The public configuration of a training. The images decide whether it is of grey or colour."""

    architecture: StyleGanShape
    steps: int
    seed: int
    batch: int = 16
    lr: float = 0.0025  # 2020b: 0.002 at 1024 px
    gamma: float | None = None  # of R1; None: 0.0002 * resolution^2 / batch, the rule of the "auto" setting
    r1_every: int = 16
    ema_kimg: float | None = None  # half-life; None: batch * 10 / 32
    ema_ramp: float | None = 0.05  # the half-life is at most this share of the images seen so far
    control: AugmentationControl | None = field(default_factory=AugmentationControl)  # None: no augmentation
    mirror: bool = False  # images are as likely when mirrored
    mixing: float = 0.0  # probability of a second style (2020a: 0.9)
    path_length: float = 0.0  # weight of the regulariser (2020a: 2)
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    checkpoint_every: int = 500
    say_every: int = 50

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, all of it at once."""
        wrong = [
            name
            for name, good in {
                "steps": self.steps >= 1,
                "seed": 0 <= self.seed < 2**63,
                "batch": self.batch >= 2,
                "lr": 0.0 < self.lr < 1.0,
                "gamma": self.gamma is None or 0.0 <= self.gamma < float("inf"),
                "r1_every": self.r1_every >= 1,
                "ema_kimg": self.ema_kimg is None or 0.0 < self.ema_kimg < float("inf"),
                "ema_ramp": self.ema_ramp is None or 0.0 < self.ema_ramp < float("inf"),
                "mixing": 0.0 <= self.mixing <= 1.0,
                "path_length": 0.0 <= self.path_length < float("inf"),
                "precision": self.precision in ("float32", "bfloat16"),
                "checkpoint_every": self.checkpoint_every >= 1,
                "say_every": self.say_every >= 1,
            }.items()
            if not good
        ]
        if wrong:
            raise ValueError(f"not usable for a training: {', '.join(wrong)}")

    @property
    def r1(self) -> float:
        """The weight of R1."""
        if self.gamma is not None:
            return self.gamma
        return 0.0002 * self.architecture.resolution**2 / self.batch

    def decay(self, seen: int) -> float:
        """What the moving average keeps in one step, after ``seen`` images."""
        half_life = (self.batch * 10.0 / 32.0 if self.ema_kimg is None else self.ema_kimg) * 1000.0
        if self.ema_ramp is not None:
            half_life = min(half_life, seen * self.ema_ramp)
        return float(0.5 ** (self.batch / max(half_life, 1e-8)))

    def run(self, images: NDArray[np.uint8]) -> str:
        """What the checkpoints are of: SHA-256 of configuration and images. The length of the run may change."""
        told = asdict(self)
        for free in ("steps", "checkpoint_every", "say_every"):
            del told[free]
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
        digest.update(str(images.shape).encode())
        digest.update(np.ascontiguousarray(images).tobytes())
        return digest.hexdigest()


def auto(architecture: StyleGanShape, steps: int, seed: int) -> GanConfig:
    """The "auto" setting of 2020b on one accelerator, with bfloat16 in the place of float16."""
    size = architecture.resolution
    return GanConfig(
        architecture,
        steps,
        seed,
        batch=max(min(4096 // size, 32), 2),
        lr=0.002 if size >= 1024 else 0.0025,
        mixing=0.9,
        path_length=2.0,
        precision="bfloat16",
        device="cuda",
    )


class GanTrainer(NetworkTrainer):
    """Generator, discriminator, their optimisers, the average generator and the augmentation's p."""

    def __init__(self, config: GanConfig, images: Tensor) -> None:
        """Draw the initial weights from ``config.seed``.

        Args:
            config: its architecture has the channels of the images.
            images: (n, c, r, r) uint8, on any device.
        """
        self.config = config
        self.images = images.to(config.device)
        with seeded(config.seed):
            generator, discriminator = Generator(config.architecture), Discriminator(config.architecture)
        self.generator = generator.to(config.device, **LAYOUT)
        self.discriminator = discriminator.to(config.device, **LAYOUT)
        self.averaged = copy.deepcopy(self.generator).eval().requires_grad_(False)
        super().__init__(
            {"generator": self.generator, "discriminator": self.discriminator, "average": self.averaged},
            {
                "g_optimizer": _adam(self.generator, config, PATH_EVERY if config.path_length > 0.0 else None),
                "d_optimizer": _adam(self.discriminator, config, config.r1_every if config.r1 > 0.0 else None),
            },
        )
        self.p = 0.0
        self.signs: list[float] = []
        self.path_mean = 0.0

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the generator of :meth:`step`."""
        out = super().state()
        numbers = [int(out.pop(self.counter)), self.p, self.path_mean, *self.signs]
        return out | {"numbers": torch.tensor(numbers, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`.

        Raises:
            KeyError, RuntimeError: it is not of this configuration.
        """
        numbers: list[float] = state["numbers"].tolist()
        super().restore({**state, self.counter: torch.tensor(int(numbers[0]))})
        for optimizer in self.optimizers.values():
            _same_layout(optimizer)
        self.p, self.path_mean, self.signs = numbers[1], numbers[2], numbers[3:]

    def descend(self, name: str, loss: Tensor, clipped: nn.Module | None = None) -> None:
        """One step of one optimiser down a loss; a gradient that is no number counts as none."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # it may overflow where the loss does not
                    parameter.grad.nan_to_num_(nan=0.0, posinf=1e5, neginf=-1e5)
        optimizer.step()

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One step of the generator and one of the discriminator, and what is due after so many steps.

        Returns:
            loss_g, loss_d, real_sign (E[sign D(real)]), p, and r1 (the penalty without its weight) where it was due.
        """
        draw = device_generator(generator, self.config.device)
        self.done += 1
        told = {"loss_g": self._generator_step(draw)}
        if self.config.path_length > 0.0 and self.done % PATH_EVERY == 0:
            self._path_step(draw)
        real = self._reals(draw)
        told["loss_d"], sign = self._discriminator_step(real, draw)
        if self.config.r1 > 0.0 and self.done % self.config.r1_every == 0:
            told["r1"] = self._r1_step(real, draw)
        self._follow()
        self._adapt(sign)
        return told | {"real_sign": sign, "p": self.p}

    def _mixed(self) -> torch.autocast:
        device = torch.device(self.config.device).type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def _reals(self, draw: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.images), (self.config.batch,), generator=draw, device=draw.device)
        real = self.images[chosen].float() / 127.5 - 1.0
        if self.config.mirror:
            flip = torch.rand(self.config.batch, generator=draw, device=draw.device) < 0.5
            real = torch.where(flip[:, None, None, None], real.flip(3), real)
        return real

    def _styles(self, count: int, draw: torch.Generator) -> Tensor:
        mapping, architecture = self.generator.mapping, self.config.architecture
        z = torch.randn(2, count, architecture.z_dim, generator=draw, device=draw.device)
        ws: Tensor = mapping(z[0])
        mapping.track(ws[:, 0])
        if (
            self.config.mixing > 0.0
            and float(torch.rand((), generator=draw, device=draw.device)) < self.config.mixing
        ):
            cut = int(torch.randint(1, architecture.num_ws, (), generator=draw, device=draw.device))
            ws = torch.cat([ws[:, :cut], mapping(z[1])[:, cut:]], dim=1)
        return ws

    def _fakes(self, count: int, draw: torch.Generator) -> Tensor:
        out: Tensor = self.generator.synthesis(self._styles(count, draw), "random", generator=draw)
        return out

    def _judged(self, images: Tensor, draw: torch.Generator) -> Tensor:
        out: Tensor = self.discriminator(augmented(images, self.p, draw))
        return out.float()

    def _generator_step(self, draw: torch.Generator) -> float:
        self.discriminator.requires_grad_(False)
        with self._mixed():
            loss = softplus(-self._judged(self._fakes(self.config.batch, draw), draw)).mean()
        self.descend("g_optimizer", loss)
        self.discriminator.requires_grad_(True)
        return loss.item()

    def _discriminator_step(self, real: Tensor, draw: torch.Generator) -> tuple[float, float]:
        with self._mixed():
            with torch.no_grad():
                fake = self._fakes(self.config.batch, draw)
            # one after the other: a group of the minibatch deviation never mixes real and synthetic images
            of_fake, of_real = self._judged(fake, draw), self._judged(real, draw)
            loss = softplus(of_fake).mean() + softplus(-of_real).mean()
        self.descend("d_optimizer", loss)
        return loss.item(), of_real.detach().sign().mean().item()

    def _r1_step(self, real: Tensor, draw: torch.Generator) -> float:
        """Mescheder et al. 2018: gamma / 2 E|grad D(real)|^2, every so many steps and as much heavier (2020a, B)."""
        real = real.detach().requires_grad_(True)
        with self._mixed():
            logits = self._judged(real, draw)
        (grad,) = torch.autograd.grad(logits.sum(), real, create_graph=True)
        penalty = grad.square().sum(dim=(1, 2, 3)).mean()
        self.descend("d_optimizer", penalty * (self.config.r1 / 2.0 * self.config.r1_every))
        return penalty.item()

    def _path_step(self, draw: torch.Generator) -> None:
        """2020a, Eq. 4: the Jacobian of the image with respect to w has about the same length everywhere."""
        ws = self._styles(max(self.config.batch // 2, 1), draw)
        with self._mixed():
            fake = self.generator.synthesis(ws, "random", generator=draw)
        noise = torch.randn(fake.shape, generator=draw, device=draw.device) / self.config.architecture.resolution
        (grad,) = torch.autograd.grad((fake * noise).sum(), ws, create_graph=True)
        lengths = grad.square().sum(dim=2).mean(dim=1).sqrt()
        self.path_mean += PATH_DECAY * (lengths.mean().item() - self.path_mean)
        penalty = (lengths - self.path_mean).square().mean()
        self.descend("g_optimizer", penalty * (self.config.path_length * PATH_EVERY))

    @torch.no_grad()
    def _follow(self) -> None:
        """The average generator follows the weights, and takes the buffers as they are."""
        beta = self.config.decay(self.done * self.config.batch)
        for mean, new in zip(self.averaged.parameters(), self.generator.parameters(), strict=True):
            mean.lerp_(new, 1.0 - beta)
        for held, now in zip(self.averaged.buffers(), self.generator.buffers(), strict=True):
            held.copy_(now)

    def _adapt(self, sign: float) -> None:
        control = self.config.control
        if control is None:
            return
        self.signs.append(sign)
        if len(self.signs) >= control.every:
            mean = sum(self.signs) / len(self.signs)
            self.p = control.moved(self.p, mean, self.config.batch * len(self.signs))
            self.signs = []


def _adam(module: torch.nn.Module, config: GanConfig, lazy: int | None) -> torch.optim.Adam:
    """Adam; where a regulariser takes a step of its own every ``lazy`` steps, slowed down to match (2020a, B)."""
    ratio = 1.0 if lazy is None else lazy / (lazy + 1)
    return torch.optim.Adam(module.parameters(), lr=config.lr * ratio, betas=(0.0, BETA2**ratio), eps=1e-8)


def _same_layout(optimizer: torch.optim.Optimizer) -> None:
    """Moments laid out in memory as their weights are: a kernel that walks both must meet the same numbers."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter.detach()).copy_(value)


def train_generator(
    images: NDArray[np.uint8],
    config: GanConfig,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> Generator:
    """Train, with checkpoints and grids of samples in ``folder``; write the average generator there.

    Args:
        images: (n, r, r) grey or (n, r, r, 3) RGB, of the architecture's resolution. They must be public, or the
            generator is a private component for ever (P6).
        config: of the run; its architecture takes the channels of the images.
        folder: of this run alone; one that was interrupted goes on.
        say: told of the progress.
    Returns:
        The average generator, in evaluation mode, on the CPU.
    Raises:
        ValueError: images that cannot be learned, or a folder whose run is longer already.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    config = _fitted(images, config)
    run = config.run(images)
    planes = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    trainer = GanTrainer(config, torch.from_numpy(np.ascontiguousarray(planes)))
    plan = TrainingPlan(config.steps, run, config.seed, config.checkpoint_every, config.say_every)
    begun = train(trainer, plan, folder, say, lambda step: _samples(trainer, folder / f"samples-{step:07d}.png"))
    if begun > config.steps:
        raise ValueError("the folder's run is already longer: choose at least as many steps, or another folder")
    notes = {"training": "gan", "run": run, "steps": config.steps, "batch": config.batch, "gamma": config.r1}
    replace_file(folder / GENERATOR, generator_bytes(trainer.averaged, notes))
    return trainer.averaged.cpu()


def _fitted(images: NDArray[np.uint8], config: GanConfig) -> GanConfig:
    """The configuration for grey or colour; refuses images that cannot be learned."""
    side = config.architecture.resolution
    if images.dtype != np.uint8:
        raise ValueError("images to learn are uint8: convert them first, and decide what a NaN is")
    if images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
        raise ValueError("images to learn are (n, h, w) grey or (n, h, w, 3) RGB")
    if images.shape[1:3] != (side, side):
        raise ValueError(f"the architecture draws {side} x {side} px, the images are of another size")
    if len(images) < 2:
        raise ValueError("fewer than two images: add images")
    if images.min() == images.max():
        raise ValueError("all pixels of all images are equal: there is nothing to learn")
    channels = 1 if images.ndim == 3 else 3
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return GanConfig(**fields | {"architecture": config.architecture.with_channels(channels)})


@torch.no_grad()
def _samples(trainer: GanTrainer, path: Path) -> None:
    """The same z after every checkpoint, from a generator of their own: drawing changes nothing."""
    device = trainer.config.device
    draw = torch.Generator().manual_seed(trainer.config.seed)
    z = torch.randn(*SAMPLES, trainer.config.architecture.z_dim, generator=draw)
    drawn = torch.cat([trainer.averaged(part.to(device)).cpu() for part in z])
    write_grid(path, to_bytes(to_unit(drawn)))
