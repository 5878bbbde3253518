"""Train a ReStyle encoder for a generator: first on images that the generator makes, then on public ones.

Alaluf, Patashnik & Cohen-Or 2021 (arXiv 2104.02699), section 3 and Fig. 2; k-SALSA, section 3.3 and supplement B.
Every refinement pass has its own losses and its own backward pass, between two passes nothing is differentiated, and
one optimiser step takes the sum of their gradients.

The first stage is ours. A generator is an endless supply of pairs (w, G(w)), so that the error of a code is known
exactly, and no image of anybody is needed: an encoder of this stage alone is a function of the generator only.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.models.features.feature_net import FeatureNet
from agent.models.grids import write_grid
from agent.models.image_tensors import to_bytes, to_tensor, to_unit
from agent.models.stylegan import restyle
from agent.models.stylegan.network import Generator
from agent.models.training_loop import NetworkTrainer, TrainingPlan, TrainingProgress, seeded, train
from protos.common.durable_files import replace_file

FILE: Final = "encoder.safetensors"
PICTURES: Final = "pictures"
_SHOWN: Final = 8  # images in a grid
_RAMP: Final = 0.05  # share of a run over which the rate rises
_STEEPEST: Final = 1.0  # norm of a gradient, at most: codes far out draw images far out, and their errors are huge


@dataclass(frozen=True, slots=True)
class Losses:
    """Weights of the losses. k-SALSA: pixels 1, perceptual maps 0.8, embedding 0.5, norm of the code 0."""

    code: float = 1.0  # of pairs: mean squared error of the code; 1 is what the average latent gets
    pixel: float = 1.0  # mean squared error of pixels in [-1, 1]
    maps: float = 0.8  # of images, where there are features: squared error of unit-length feature maps
    embed: float = 0.5  # of images, where there are features: 1 - cosine of the embeddings
    norm: float = 0.0  # of images: mean squared distance from the average latent, in units of the scatter

    def __post_init__(self) -> None:
        """Refuse negative weights, infinite ones, and a stage with nothing to learn from."""
        if not all(0.0 <= w < math.inf for w in (self.code, self.pixel, self.maps, self.embed, self.norm)):
            raise ValueError("weights of losses are finite and not negative")
        if not (self.pixel > 0.0):
            raise ValueError("the pixel loss teaches in both stages: its weight is positive")


@dataclass(frozen=True, slots=True)
class InversionConfig:
    """A training run: public configuration."""

    pair_steps: int = 20_000  # on (w, G(w))
    image_steps: int = 80_000  # on public images; k-SALSA: 100 000 in all
    batch: int = 8
    passes: int = restyle.PASSES
    rate: float = 1e-4  # of Adam
    decay: float = 0.25  # the share of the run, at its end, over which the rate falls to nothing (cosine)
    mixing: int = 3  # draws of the mapping network of which a pair's layers are mixed, at most
    perturbation: float = 0.3  # standard deviation of what is added to a pair's code, at most, in its scatter
    losses: Losses = field(default_factory=Losses)
    flip: bool = False  # mirror half of the images: an eye's side, or a heart's, is then no longer told
    bf16: bool = False  # autocast; weights and losses stay float32
    seed: int = 0
    checkpoint_every: int = 500
    say_every: int = 50
    architecture: restyle.EncoderArchitecture | None = None  # None: the preset of the generator

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if not (self.pair_steps >= 0 and self.image_steps >= 0 and self.pair_steps + self.image_steps >= 1):
            raise ValueError("a run has at least one step")
        if not min(self.batch, self.passes, self.mixing, self.checkpoint_every, self.say_every) >= 1:
            raise ValueError("batch, passes, mixing and the two intervals are at least 1")
        if not (0.0 < self.rate < 1.0 and 0.0 <= self.decay <= 1.0 and 0.0 <= self.perturbation < 10.0):
            raise ValueError("rate, decay or perturbation out of range")

    @property
    def steps(self) -> int:
        """Of both stages."""
        return self.pair_steps + self.image_steps


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """What a batch should become: computed once, compared in every pass."""

    images: Tensor  # (n, c, r, r)
    ws: Tensor | None  # (n, num_ws, w_dim), of pairs
    maps: tuple[Tensor, ...] = ()  # of unit length over channels
    embedding: Tensor | None = None


class InversionTrainer(NetworkTrainer):
    """The trainer of :mod:`agent.models.training_loop`. The generator is copied and frozen; the caller's stays as it
    is.
    """

    def __init__(
        self,
        encoder: restyle.Encoder,
        generator: Generator,
        config: InversionConfig,
        images: NDArray[np.float32] | None = None,
        features: FeatureNet | None = None,
    ) -> None:
        """Set the encoder's unit of code from the generator.

        Args:
            encoder: built anew.
            generator: G, trained, with its average latent.
            config: of the run.
            images: public images (n, r, r[, 3]) in [0, 1]; none, if there is no second stage.
            features: of the feature losses; none, for pixels alone.
        Raises:
            ValueError: shapes that do not fit, or a second stage without images.
        """
        restyle.check_fits(encoder, generator)
        a = generator.architecture
        shape = (a.resolution, a.resolution) + ((3,) if a.channels == 3 else ())
        if images is not None and (images.shape[1:] != shape or not bool(np.isfinite(images).all())):
            raise ValueError("the images do not have the generator's shape, or are not finite")
        if config.image_steps and (images is None or not len(images)):
            raise ValueError("the second stage needs images: give some, or no image_steps")
        self.encoder, self.config, self.images, self.features = encoder, config, images, features
        self.generator = copy.deepcopy(generator).eval().requires_grad_(requires_grad=False)
        super().__init__({"encoder": encoder}, {"adam": torch.optim.Adam(encoder.parameters(), lr=config.rate)})
        with torch.no_grad():
            self._drawn_first = restyle.average_image(self.generator)
            encoder.spread.copy_(restyle.scatter(self.generator, config.seed))

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One batch, all its passes, one step of Adam. The losses told are the last pass's."""
        target = self._pair(generator) if self.done < self.config.pair_steps else self._picture(generator)
        self.done += 1
        self.set_rate(_rate(self.config, self.done))
        self.optimizers["adam"].zero_grad(set_to_none=True)
        n, told = len(target.images), dict[str, Tensor]()
        ws, drawn = restyle.average_code(self.generator, n), self._drawn_first.expand(n, -1, -1, -1)
        for _ in range(self.config.passes):
            with self._autocast():
                ws = ws.detach() + self.encoder(target.images, drawn.detach())
                drawn = self.generator.synthesis(ws, noise="const").float()
            told = self._losses(ws, drawn, target)
            total = torch.stack([getattr(self.config.losses, name) * loss for name, loss in told.items()]).sum()
            torch.autograd.backward([total])  # of this pass; gradients add up over passes
        torch.nn.utils.clip_grad_norm_(self.encoder.parameters(), _STEEPEST)
        self.optimizers["adam"].step()
        return {name: loss.item() for name, loss in told.items()}

    @torch.no_grad()
    def _pair(self, generator: torch.Generator) -> _Target:
        with self._autocast():
            ws = draw_codes(self.generator, self.config, self.encoder.spread.item(), generator).float()
            images = self.generator.synthesis(ws, noise="const").float()
        return _Target(images, ws)

    @torch.no_grad()
    def _picture(self, generator: torch.Generator) -> _Target:
        assert self.images is not None
        chosen = torch.randint(len(self.images), (self.config.batch,), generator=generator).numpy()
        images = to_tensor(self.images[chosen])
        if self.config.flip:
            mirrored = torch.rand(self.config.batch, generator=generator) < 0.5
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        images = images.to(self._drawn_first.device)
        if self.features is None:
            return _Target(images, None)
        with self._autocast():
            return _Target(images, None, self._maps(images), self._embedding(images))

    def _losses(self, ws: Tensor, drawn: Tensor, target: _Target) -> dict[str, Tensor]:
        weights, unit = self.config.losses, self.encoder.spread.square()
        out = {"pixel": (drawn - target.images).square().mean()}
        if target.ws is not None:
            return out | {"code": (ws - target.ws).square().mean() / unit}
        with self._autocast():
            if target.maps:
                pairs = zip(self._maps(drawn), target.maps, strict=True)
                apart = [(a - b).square().sum(dim=1).mean() for a, b in pairs]
                out["maps"] = torch.stack(apart).mean()
            embedding = self._embedding(drawn)
            if embedding is not None and target.embedding is not None:
                out["embed"] = 1.0 - (embedding * target.embedding).sum(dim=1).mean()
        if weights.norm:
            out["norm"] = (ws - restyle.average_code(self.generator, len(ws))).square().mean() / unit
        return out

    def _maps(self, images: Tensor) -> tuple[Tensor, ...]:
        """Maps of unit length over channels (Zhang et al. 2018, Eq. 1, with equal weights): scales do not count."""
        if self.features is None or not self.config.losses.maps:
            return ()
        return tuple(torch.nn.functional.normalize(m.float(), dim=1, eps=1e-6) for m in self.features.maps(images))

    def _embedding(self, images: Tensor) -> Tensor | None:
        if self.features is None or not self.config.losses.embed:
            return None
        return torch.nn.functional.normalize(self.features.embed(images).float(), dim=1, eps=1e-6)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._drawn_first.device.type, torch.bfloat16, enabled=self.config.bf16)


def _rate(config: InversionConfig, step: int) -> float:
    """Adam's rate at a step, counted from 1: a short ramp, constant, then half a cosine's period down."""
    if step <= _RAMP * config.steps:
        return config.rate * step / (_RAMP * config.steps)
    falling = config.decay * config.steps
    if step <= config.steps - falling:
        return config.rate
    return config.rate * 0.5 * (1.0 + math.cos(math.pi * (step - config.steps + falling) / (falling + 1.0)))


@torch.no_grad()
def draw_codes(generator: Generator, config: InversionConfig, spread: float, rng: torch.Generator) -> Tensor:
    """Codes in W+ about where those of real images lie: (batch, num_ws, w_dim).

    Each has a number of draws of the mapping network between 1 and ``config.mixing``; each layer takes one of them
    at random (style mixing, Karras et al. 2019, section 3.1), and Gaussian noise of a random size is added.
    """
    a, n, m = generator.architecture, config.batch, config.mixing
    z = torch.randn(n * m, a.z_dim, generator=rng)
    used = torch.randint(1, m + 1, (n, 1), generator=rng)
    which = (torch.rand(n, a.num_ws, generator=rng) * used).long().clamp_(max=m - 1)
    noise = torch.randn(n, a.num_ws, a.w_dim, generator=rng) * torch.rand(n, 1, 1, generator=rng)
    device = generator.w_avg.device
    drawn = generator.mapping(z.to(device)).reshape(n, m, a.num_ws, a.w_dim)
    mixed = drawn[torch.arange(n)[:, None].to(device), which.to(device), torch.arange(a.num_ws).to(device)]
    out: Tensor = mixed + noise.to(device) * (config.perturbation * spread)
    return out


def train_encoder(
    generator: Generator,
    images: NDArray[np.float32] | None,
    config: InversionConfig,
    folder: Path,
    say: Callable[[TrainingProgress], None] = lambda _: None,
    features: FeatureNet | None = None,
) -> Path:
    """Train, or go on training, and write ``encoder.safetensors``; grids of images beside it at every checkpoint.

    Args:
        generator: G, on the device to train on.
        images: public or synthetic images (n, r, r[, 3]) in [0, 1]: never patients' (design P6).
        config: of the run.
        folder: of checkpoint, grids and result; one run for each.
        say: told of progress.
        features: of the feature losses in the second stage.
    Returns:
        The file's place.
    Raises:
        ValueError: images, generator and configuration do not fit together.
        OtherRunError, TrainingCheckpointError, DivergedError: as :func:`agent.models.training_loop.train`.
    """
    architecture = replace(
        config.architecture or restyle.architecture_for(generator.architecture), passes=config.passes
    )
    with seeded(config.seed):
        encoder = restyle.Encoder(architecture)
    trainer = InversionTrainer(encoder.to(generator.w_avg.device), generator, config, images, features)
    notes = _notes(generator, images, config, features)
    plan = TrainingPlan(
        steps=config.steps,
        run=hashlib.sha256(json.dumps([notes, asdict(architecture)], sort_keys=True).encode()).hexdigest(),
        seed=config.seed,
        checkpoint_every=config.checkpoint_every,
        say_every=config.say_every,
    )
    train(trainer, plan, folder, say, lambda step: _grid(trainer, folder / PICTURES / f"{step:07d}.png"))
    replace_file(folder / FILE, restyle.encoder_bytes(encoder, notes))
    return folder / FILE


def _notes(
    generator: Generator, images: NDArray[np.float32] | None, config: InversionConfig, features: FeatureNet | None
) -> dict[str, Any]:
    """What the encoder is a function of, for its file and for the run's digest."""
    used = images if config.image_steps else None
    return {
        "generator": restyle.fingerprint(generator),
        "images": "" if used is None else hashlib.sha256(f"{used.shape}".encode() + used.tobytes()).hexdigest(),
        "features": "" if used is None or features is None else features.name,
        "features_origin": {} if used is None or features is None else asdict(features.origin),
        "config": {name: value for name, value in asdict(config).items() if name not in _SHOWING},
    }


_SHOWING: Final = {"checkpoint_every", "say_every", "architecture"}  # change nothing, or stand elsewhere


def _grid(trainer: InversionTrainer, path: Path) -> None:
    """A PNG: a row of sources, a row of their reconstructions. The same sources every time."""
    if trainer.images is not None and len(trainer.images):
        sources = to_tensor(trainer.images[:_SHOWN]).to(trainer.generator.w_avg.device)
    else:
        rng = torch.Generator().manual_seed(trainer.config.seed)
        codes = draw_codes(trainer.generator, trainer.config, trainer.encoder.spread.item(), rng)[:_SHOWN]
        with torch.no_grad():
            sources = trainer.generator.synthesis(codes, noise="const")
    _, seen = restyle.invert_recorded(trainer.encoder, trainer.generator, sources, trainer.config.passes)
    path.parent.mkdir(exist_ok=True)
    write_grid(path, to_bytes(to_unit(torch.cat([sources, seen[-1]]))), columns=len(sources))
