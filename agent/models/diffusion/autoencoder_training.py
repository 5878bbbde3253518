"""Training an autoencoder on public images: absolute error, features, a faint KL, and a patch discriminator.

Rombach et al. 2022 (arXiv 2112.10752), section 3.1 and appendix G, Eq. 25; Esser, Rombach & Ommer 2021 (VQGAN, arXiv
2012.09841), Eq. 6 and 7; Zhang et al. 2018 (LPIPS, arXiv 1801.03924), Eq. 1, with weights of 1 and a feature network
of the registry in the place of a trained VGG; Isola et al. 2017 (patches, arXiv 1611.07004).

The adversarial loss is weighed anew in every step, so that at the decoder's last layer its gradient is so many times
as long as that of the reconstruction (Esser et al., Eq. 7). A constant weight would have to be found again for every
size and kind of image, and one too large draws texture that no patient has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize, relu

from agent.models.augmentations import Pool, eased, run_digest
from agent.models.diffusion.autoencoder import AutoencoderArchitecture, AutoencoderNet, autoencoder_bytes
from agent.models.diffusion.edm_training import Average
from agent.models.features.extractors import RandomFeatures
from agent.models.features.feature_net import FeatureNet
from agent.models.training_loop import NetworkTrainer, TrainingPlan, TrainingProgress, device_generator, seeded, train
from protos.common.errors import TrainingError

LOOKED_AT: Final = 1024  # images, at most, of which mean and deviation of the latents are taken
LEAST_SPREAD: Final = 1e-3  # of the latents; below, they say nothing of the image
HEAVIEST: Final = 1e4  # Esser et al.'s code: the most that the adversarial loss may weigh
_BETAS: Final = (0.5, 0.9)  # of Adam, Rombach et al.'s code
_GROUPS: Final = 8
_LEAST: Final = 8  # pixels a side: below, a patch is larger than the image


class AutoencoderCollapsedError(TrainingError, ValueError):
    """The latents do not tell one image from another, and nothing could be drawn from them."""

    def __init__(self) -> None:
        """Say what may help."""
        super().__init__("the latents do not distinguish images: try more steps, a lower rate or a smaller KL weight")


@dataclass(frozen=True, slots=True)
class AutoencoderTraining:
    """The public configuration of a training."""

    architecture: AutoencoderArchitecture
    steps: int
    seed: int = 0
    batch: int = 8  # in short runs, more and smaller steps are better than fewer and larger ones
    lr: float | None = None  # None: 2e-3, measured; of networks wider than 64, 1e-4
    kl: float = 1e-6  # times the sum over an image's latents: enough to bound them, too little to blur (section 3.1)
    perceptual: float = 0.3  # weight of the distance of features; the mean absolute error weighs 1
    adversarial: float = 0.1  # length of its gradient at the last layer, as a share of the reconstruction's
    warmup: float = 0.5  # share of the steps without a discriminator
    patches: int = 32  # channels of the discriminator's first layer
    ema: float = 0.0  # what a moving average of the weights keeps in one step; 0: none, the falling rate averages
    precision: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    checkpoint_every: int = 500
    say_every: int = 50

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, all of it at once."""
        good = {
            "architecture": self.architecture.side >= _LEAST,
            "steps": type(self.steps) is int and self.steps >= 1,
            "seed": 0 <= self.seed < 2**63,
            "batch": type(self.batch) is int and self.batch >= 1,
            "lr": 0.0 < self.rate < 1.0,
            "kl": 0.0 <= self.kl < 1.0,
            "perceptual": 0.0 <= self.perceptual < math.inf,
            "adversarial": 0.0 <= self.adversarial < math.inf,
            "warmup": 0.0 <= self.warmup <= 1.0,
            "patches": type(self.patches) is int and self.patches >= _GROUPS and self.patches % _GROUPS == 0,
            "ema": 0.0 <= self.ema < 1.0,
            "precision": self.precision in ("float32", "bfloat16"),
            "checkpoint_every": self.checkpoint_every >= 1,
            "say_every": self.say_every >= 1,
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for a training: {', '.join(wrong)}")

    @property
    def rate(self) -> float:
        """Of learning, at its highest."""
        if self.lr is not None:
            return self.lr
        return 2e-3 if max(self.architecture.widths) <= 64 else 1e-4

    @property
    def alone(self) -> int:
        """Steps before the discriminator joins; all of them where it has no weight."""
        return self.steps if self.adversarial == 0.0 else round(self.warmup * self.steps)

    def run(self, images: NDArray[np.uint8], features: FeatureNet) -> str:
        """What the checkpoints are of: SHA-256 of configuration, feature network and images."""
        told = asdict(self) | {"features": features.origin.sha256}
        return run_digest({k: v for k, v in told.items() if k not in ("checkpoint_every", "say_every")}, images)


def train_autoencoder(
    images: NDArray[np.uint8],
    config: AutoencoderTraining,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
    features: FeatureNet | None = None,
) -> bytes:
    """Train on public images, then measure the scale of the latents on the same images.

    Args:
        images: (n, h, w) or (n, h, w, 3) uint8; resized to the architecture's side. Public or made, never the cohort:
            everything decoded later is of its provenance (P6).
        config: of the run.
        folder: of its checkpoint; a run that was killed goes on from there, to the same file.
        say: told of the progress: absolute, perceptual, kl (of an image, in nats), and adversarial, discriminator.
        features: of the perceptual loss; None for random ones. They are part of what the run is called.
    Returns:
        The file that :func:`agent.models.diffusion.autoencoder.autoencoder_from` reads.
    Raises:
        ValueError: images of another kind, or that do not differ; or features that nobody vouches for.
        AutoencoderCollapsedError: the latents tell no image from another; the checkpoint stays.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    own = features_for(config.architecture.channels) if features is None else features
    if own.origin.component != "public":
        raise ValueError("the perceptual loss takes features that are random, or public (vouched for by the site)")
    pool = Pool(images, config.architecture.side, config.architecture.channels, torch.device(config.device))
    trainer = AutoencoderTrainer(pool, config, own)
    run = config.run(images, own)
    train(
        trainer, TrainingPlan(config.steps, run, config.seed, config.checkpoint_every, config.say_every), folder, say
    )
    if config.ema > 0.0:
        trainer.average.give(trainer.net)
    net = trainer.net.train(mode=False)
    scale = scaled(net, pool)
    notes = {"features": own.name, "features_sha256": own.origin.sha256, "run": run, "seed": config.seed}
    return autoencoder_bytes(net, scale, notes | {"steps": config.steps, "training": "autoencoder"})


def features_for(channels: int) -> RandomFeatures:
    """The perceptual loss's own features: random, narrow (they cost as much as a small autoencoder), three levels."""
    return RandomFeatures(0, width=16, depth=3, channels=channels)


@torch.no_grad()
def scaled(net: AutoencoderNet, pool: Pool) -> float:
    """Move the latents' origin to their mean; 1 / their standard deviation, over images, channels and places.

    Rombach et al., appendix G: latents are divided by the deviation of those of the training images.

    Raises:
        AutoencoderCollapsedError: they hardly differ, or are no numbers.
    """
    # evenly through the set, so that whatever lies beside each other in it is seen
    count = len(pool.images)
    index = torch.linspace(0, count - 1, min(count, LOOKED_AT)).long()
    z = torch.cat([net.encode(pool.take(part))[0].double() for part in torch.split(index, 64)])
    mean = z.mean(dim=(0, 2, 3))
    z = z - mean[:, None, None]
    spread = float(z.square().mean().sqrt())
    # of one place over images: a latent that is the same for every image may still differ from place to place
    between = float((z - z.mean(dim=0)).square().mean().sqrt())
    if not (between > LEAST_SPREAD and spread < math.inf):
        raise AutoencoderCollapsedError
    net.centre(mean.to(net.last.dtype))
    return 1.0 / spread


def perceptual(features: FeatureNet, drawn: Tensor, real: Tensor) -> Tensor:
    """LPIPS (Zhang et al. 2018, Eq. 1) with weights of 1: a number, the mean over images, summed over levels.

    At every place the channels are scaled to unit length; what is left is their squared distance, mean over places.
    """
    with torch.no_grad():
        target = [normalize(m.float(), dim=1, eps=1e-6) for m in features.maps(real)]
    found = [normalize(m.float(), dim=1, eps=1e-6) for m in features.maps(drawn)]
    apart = [(a - b).square().sum(dim=1).mean() for a, b in zip(found, target, strict=True)]
    return torch.stack(apart).sum()


def divergence(mean: Tensor, deviation: Tensor) -> Tensor:
    """KL(q(z | x) | N(0, 1)) of an image, in nats: summed over its latents, the mean over images."""
    each = 0.5 * (mean.square() + deviation.square() - 1.0) - deviation.log()
    return each.float().flatten(1).sum(dim=1).mean()


def balance(rebuilt: Tensor, fooled: Tensor, last: Tensor) -> Tensor:
    """Esser et al., Eq. 7: how long the gradient of one loss is at the last layer, over that of the other."""
    (of_rebuilt,) = torch.autograd.grad(rebuilt, last, retain_graph=True)
    (of_fooled,) = torch.autograd.grad(fooled, last, retain_graph=True)
    weight: Tensor = of_rebuilt.norm() / (of_fooled.norm() + 1e-6)
    return weight.clamp(0.0, HEAVIEST).detach()


def discriminator(channels: int, patches: int, side: int) -> nn.Module:
    """MONAI's patch discriminator, normalised within groups of one image's channels; call inside ``seeded``."""
    from monai.networks.nets.patchgan_discriminator import PatchDiscriminator  # noqa: PLC0415 - it costs seconds

    return PatchDiscriminator(
        spatial_dims=2,
        channels=patches,
        in_channels=channels,
        # patches of 70 px, 34 in small images and 16 in tiny ones: what is larger, the reconstruction sees to
        num_layers_d=1 if side < 16 else 2 if side < 128 else 3,
        norm=("group", {"num_groups": _GROUPS}),
    )


class AutoencoderTrainer(NetworkTrainer):
    """Autoencoder and discriminator with their optimisers."""

    average: Average

    def __init__(self, pool: Pool, config: AutoencoderTraining, features: FeatureNet) -> None:
        """Draw the initial weights from ``config.seed``."""
        self.pool, self.config, self.features = pool, config, features
        own = config.architecture
        with seeded(config.seed):
            net, judge = AutoencoderNet(own), discriminator(own.channels, config.patches, own.side)
        self.net, self.judge = net.to(config.device), judge.to(config.device)
        each = {"optimizer": self.net, "judging": self.judge}
        super().__init__(
            {"net": self.net, "judge": self.judge},
            {name: torch.optim.Adam(part.parameters(), lr=config.rate, betas=_BETAS) for name, part in each.items()},
            Average(self.net, config.ema),
        )

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One step of the autoencoder on a batch drawn with replacement; later, one of the discriminator."""
        draw = device_generator(generator, self.config.device)
        self.set_rate(self.config.rate * eased(self.done, self.config.steps))
        real = self.pool.take(torch.randint(len(self.pool.images), (self.config.batch,), generator=generator))
        with self._mixed():
            mean, deviation = self.net.encode(real)
            noise = torch.randn(mean.shape, generator=draw, device=draw.device)
            drawn = self.net.decode(mean + deviation * noise).float()
            told = self._learn(real, drawn, divergence(mean.float(), deviation.float()))
        if self.done >= self.config.alone:
            told["discriminator"] = self._judge(real, drawn.detach())
        self.done += 1
        if self.config.ema > 0.0:
            self.average.after(self.done)
        return told

    def _learn(self, real: Tensor, drawn: Tensor, kl: Tensor) -> dict[str, float]:
        absolute = (drawn - real).abs().mean()
        told, rebuilt = {"absolute": absolute.item(), "kl": kl.item()}, absolute
        if self.config.perceptual > 0.0:
            seen = perceptual(self.features, drawn, real)
            told["perceptual"], rebuilt = seen.item(), rebuilt + self.config.perceptual * seen
        loss = rebuilt + self.config.kl * kl
        if self.done >= self.config.alone:
            self.judge.requires_grad_(False)
            fooled = -self.judge(drawn)[-1].float().mean()
            loss = loss + self.config.adversarial * balance(rebuilt, fooled, self.net.last) * fooled
            self.judge.requires_grad_(True)
            told["adversarial"] = fooled.item()
        self.descend("optimizer", loss)
        return told

    def _judge(self, real: Tensor, drawn: Tensor) -> float:
        """Hinge loss (Lim & Ye 2017), as Rombach et al.'s code has it."""
        with self._mixed():
            of_real, of_drawn = self.judge(real)[-1].float(), self.judge(drawn)[-1].float()
        loss = 0.5 * (relu(1.0 - of_real).mean() + relu(1.0 + of_drawn).mean())
        self.descend("judging", loss)
        return loss.item()

    def _mixed(self) -> torch.autocast:
        kind = torch.device(self.config.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.config.precision == "bfloat16")
