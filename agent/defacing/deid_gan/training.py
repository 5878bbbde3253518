"""Training C-DeID-GAN.

"Adversarial privacy preservation in MRI scans of the brain", sections 3.2 and 4.1: R-LSGAN without averages
(Jolicoeur-Martineau 2018, arXiv 1807.00734), AdamP (Heo et al. 2021, arXiv 2006.08217) at 2e-3 with betas (0, 0.99),
two heads a step. Ours: a moving average of the generator's weights, which is what is kept (Karras et al. 2018),
mirrored and slightly turned heads, and a weight for the mean absolute error, 0 as in the paper.

AdamP: Adam without the update component that only changes the length of a scale-invariant weight.

Heo et al. 2021, "AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights" (arXiv
2006.08217), Algorithm 2, with the published delta; without weight decay, which C-DeID-GAN does not use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample

from agent.defacing.deid_gan.layers import pooled, pyramid
from agent.defacing.deid_gan.network import DeidGanDiscriminator, DeidGanGenerator, VolumeGanConfig, drawn
from agent.defacing.privacy_transform import Gamma
from agent.domain import CheckpointStore
from agent.models.augmentations import run_digest
from agent.models.diffusion.edm_training import Average
from agent.models.grids import write_grid
from agent.models.training_loop import NetworkTrainer, TrainingPlan, TrainingProgress, seeded, torch_generator, train

DELTA: Final = 0.1  # Eq. 11: below DELTA / sqrt(dim) a weight and its gradient count as orthogonal
EPS: Final = 1e-8


class AdamP(torch.optim.Optimizer):
    """The optimiser; a group's ``step`` counts its steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        """Begin at step 0."""
        super().__init__(parameters, {"lr": lr, "betas": betas, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is computed anew
        """One step down the gradients that there are."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            rate = group["lr"] / (1.0 - beta1 ** group["step"])
            scale = math.sqrt(1.0 - beta2 ** group["step"])
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                grad, mean, square = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(grad, weight=1.0 - beta1)
                square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                update = square.sqrt().add_(EPS).reciprocal_().mul_(scale).mul_(mean)
                if parameter.ndim > 1:
                    _project(parameter, grad, update)
                parameter.add_(update, alpha=-rate)


def _project(weight: Tensor, grad: Tensor, update: Tensor) -> None:
    """Eq. 10 and 11: take the radial part out of ``update``, in place, where the weight is scale-invariant.

    A weight is tried by output channel first, then whole.
    """
    for rows in (len(weight), 1):
        w, g = weight.reshape(rows, -1), grad.reshape(rows, -1)
        if cosine_similarity(g, w, dim=1, eps=EPS).abs().max() < DELTA / math.sqrt(w.shape[1]):
            unit = w / w.norm(dim=1, keepdim=True).add(EPS)
            radial = (unit * update.reshape(rows, -1)).sum(dim=1, keepdim=True)
            update.sub_((unit * radial).view_as(update))
            return


BETAS: Final = (0.0, 0.99)
SHOWN: Final = 4  # heads of an image of samples
Say = Callable[[TrainingProgress], None]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training head, and its condition."""

    volume: NDArray[
        np.float32
    ]  # (S, S, S) in [0, 1], as gamma's intensities are normalised; inside the brain, they are
    gamma: Gamma
    person: str

    def __post_init__(self) -> None:
        """The scan lies on gamma's cube, and its brain is gamma's."""
        if self.volume.shape != self.gamma.cube.shape or self.volume.dtype != np.float32:
            raise ValueError("a volume is float32, on gamma's cube")
        if not (float(self.volume.min()) >= 0.0 and float(self.volume.max()) <= 1.0):
            raise ValueError("a volume's intensities lie in [0, 1]")
        if not bool((self.volume[self.gamma.brain] == self.gamma.intensities[self.gamma.brain]).all()):
            raise ValueError("inside the brain the volume is gamma's")


@dataclass(frozen=True, slots=True)
class VolumeGanTraining:
    """The public configuration of a training."""

    gan: VolumeGanConfig
    steps: int
    seed: int = 0
    batch: int = 2  # section 4.1
    lr: float = 2e-3  # section 4.1
    ema: float = 0.999  # what the moving average keeps in one step, at most; the paper names none
    # weight of the mean absolute error of what the discriminator sees. The paper has none; measured here at 32^3 on a
    # hundred steps and more, the printed loss alone runs away: the discriminator wins and the volumes leave [0, 1]
    absolute: float = 0.0
    mirror: bool = True  # left and right
    turn: float = 0.1  # rad, about a random axis, at most
    sparing: bool = False  # gradient checkpointing: less memory, a third more time
    precision: Literal["float32", "bfloat16"] = "float32"
    devices: tuple[str, str] = ("cpu", "cpu")  # of generator and discriminator
    checkpoint_every: int = 500
    say_every: int = 50

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, all of it at once."""
        good = {
            "steps": type(self.steps) is int and self.steps >= 1,
            "seed": 0 <= self.seed < 2**63,
            "batch": type(self.batch) is int and self.batch >= 1,
            "lr": 0.0 < self.lr < 1.0,
            "ema": 0.0 <= self.ema < 1.0,
            "absolute": 0.0 <= self.absolute < math.inf,
            "turn": 0.0 <= self.turn <= 0.5,
            "precision": self.precision in ("float32", "bfloat16"),
            "devices": len(self.devices) == 2,
            "checkpoint_every": self.checkpoint_every >= 1,
            "say_every": self.say_every >= 1,
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for a training: {', '.join(wrong)}")

    def run(self, examples: Sequence[Example]) -> str:
        """What the checkpoints are of: SHA-256 of configuration and heads.

        Where it runs, what it forgets to save memory, and its length may change.
        """
        free = ("steps", "checkpoint_every", "say_every", "devices", "sparing")
        told = {name: value for name, value in asdict(self).items() if name not in free}
        arrays = [part for e in examples for part in (e.volume, e.gamma.stack())]
        return run_digest(told, *arrays)


def train_volume_gan(
    examples: Sequence[Example],
    config: VolumeGanTraining,
    place: Path | CheckpointStore,
    say: Say = lambda _: None,
) -> DeidGanGenerator:
    """Train, from the checkpoint if there is one.

    Args:
        examples: of public heads, or of all folds but one. Any sequence will do, one that reads its heads from a disk
            too: a step takes ``batch`` of them.
        config: of the run.
        place: of the checkpoint; a folder is also given an image of samples at each checkpoint.
        say: told of the progress: generator, discriminator and absolute.
    Returns:
        The moving average of the generator, in evaluation, on the CPU.
    Raises:
        ValueError: no two heads, or heads on another cube.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    if len(examples) < 2:
        raise ValueError("a network learns from two heads or more")
    if any(e.volume.shape[0] != config.gan.side for e in examples):
        raise ValueError(f"every head lies on a cube of {config.gan.side} voxels a side")
    trainer = VolumeGanTrainer(examples, config)
    plan = TrainingPlan(config.steps, config.run(examples), config.seed, config.checkpoint_every, config.say_every)

    def picture(step: int) -> None:
        if isinstance(place, Path):
            write_grid(place / f"samples-{step:07d}.png", trainer.shown(), columns=3)

    train(trainer, plan, place, say, picture)
    return trainer.averaged()


class VolumeGanTrainer(NetworkTrainer):
    """Both networks with their optimisers."""

    average: Average

    def __init__(self, examples: Sequence[Example], config: VolumeGanTraining) -> None:
        """Draw the initial weights from ``config.seed``."""
        self.examples, self.config = examples, config
        with seeded(config.seed):
            self.generator, self.discriminator = DeidGanGenerator(config.gan), DeidGanDiscriminator(config.gan)
        self.place(*config.devices)
        self.generator.sparing = self.discriminator.sparing = config.sparing
        each = {"generator": self.generator, "discriminator": self.discriminator}
        adam = functools.partial(AdamP, lr=config.lr, betas=BETAS)
        super().__init__(
            each,
            {f"{name}_optimizer": adam(net.parameters()) for name, net in each.items()},
            Average(self.generator, config.ema),
        )

    def place(self, generator: str, discriminator: str) -> None:
        """Lay each network on a device; what passes between them follows. Before the first step only."""
        self.generator.to(generator)
        self.discriminator.to(discriminator)
        self.devices = (torch.device(generator), torch.device(discriminator))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`.

        Raises:
            KeyError, RuntimeError: it is not of this configuration.
        """
        super().restore(state)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:  # AdamP counts its steps there, and not in its state
                group["step"] = self.done

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """One step of the discriminator and one of the generator, on the same heads; gamma is drawn anew."""
        chosen = torch.randint(len(self.examples), (self.config.batch,), generator=generator)
        batch = [self.examples[int(i)] for i in chosen]
        x = torch.from_numpy(np.stack([e.volume for e in batch]))[:, None]
        masks = torch.from_numpy(np.stack([e.gamma.stack()[:2] for e in batch]))
        x, gamma = moved(x, masks, self.config, generator)
        told = {"discriminator": self._judge(x, gamma, generator)}
        told |= self._learn(x, gamma, generator)
        self.done += 1
        self.average.after(self.done)
        return told

    def averaged(self) -> DeidGanGenerator:
        """The generator with the averages in the place of its weights, in evaluation, on the CPU."""
        with seeded(self.config.seed):
            net = DeidGanGenerator(self.config.gan)
        net.load_state_dict(self.generator.state_dict())
        self.average.give(net)
        net.requires_grad_(requires_grad=False)
        return net.train(mode=False)

    def shown(self) -> NDArray[np.uint8]:
        """(3 SHOWN, S, S): what is drawn for the first heads, cut three ways; the same noise every time."""
        gammas = torch.from_numpy(np.stack([e.gamma.stack() for e in self.examples[:SHOWN]]))
        made = drawn(self.averaged().to(self.devices[0]), gammas, torch_generator(self.config.seed))[:, 0].numpy()
        return np.concatenate([cuts(volume) for volume in made])

    def _judge(self, x: Tensor, gamma: Tensor, draw: torch.Generator) -> float:
        with self._mixed(self.devices[1]):
            with torch.no_grad():
                real, made, gammas = self._both(x, gamma, draw)
            loss = discriminator_loss(
                self.discriminator(real, gammas).float(), self.discriminator(made, gammas).float()
            )
        self.descend("discriminator_optimizer", loss)
        return loss.item()

    def _learn(self, x: Tensor, gamma: Tensor, draw: torch.Generator) -> dict[str, float]:
        self.discriminator.requires_grad_(requires_grad=False)
        with self._mixed(self.devices[1]):
            real, made, gammas = self._both(x, gamma, draw)
            with torch.no_grad():
                of_real = self.discriminator(real, gammas).float()
            loss = generator_loss(of_real, self.discriminator(made, gammas).float())
        told = {"generator": loss.item()}
        apart = torch.stack([(a.float() - b).abs().mean() for a, b in zip(made, real, strict=True)]).mean()
        told["absolute"] = apart.item()
        self.descend(
            "generator_optimizer", loss + self.config.absolute * apart if self.config.absolute > 0.0 else loss
        )
        self.discriminator.requires_grad_(requires_grad=True)
        return told

    def _both(
        self, x: Tensor, gamma: Tensor, draw: torch.Generator
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Real heads, made ones with the real brains in them, and gamma: every scale, where the discriminator is."""
        sides, (of_g, of_d) = self.config.gan.sides, self.devices
        noise = torch.randn((len(x), *self.config.gan.noise), generator=draw)
        gammas = pyramid(gamma, sides, draw)
        with self._mixed(of_g):
            made = self.generator([part.to(of_g) for part in gammas], noise.to(of_g))
        gammas = [part.to(of_d) for part in gammas]
        real = [pooled(x.to(of_d), side) for side in sides]
        return real, embedded(real, [part.to(of_d) for part in made], gammas), gammas

    def _mixed(self, device: torch.device) -> torch.autocast:
        kind = "cpu" if device.type == "meta" else device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.config.precision == "bfloat16")


def embedded(real: Sequence[Tensor], made: Sequence[Tensor], gammas: Sequence[Tensor]) -> list[Tensor]:
    """b o x + (1 - b) o G (section 3.2, "Brain Preservation"), at every scale: what the discriminator sees.

    At a coarser scale b is the mask of that scale's gamma, and x the scan's average: there too the brain is the
    person's own in both, and tells nothing of which is made.

    Args:
        real: x of every scale, (n, 1, s, s, s).
        made: g of every scale.
        gammas: gamma of every scale.
    """
    out = []
    for x, g, gamma in zip(real, made, gammas, strict=True):
        b = gamma[:, 1:2]
        out.append(b * x + (1.0 - b) * g)
    return out


def generator_loss(real: Tensor, made: Tensor) -> Tensor:
    """L_G = 2 E[(D(x_r) - D(x_f) + 1)^2]: R-LSGAN, each real head against the one made for its own gamma."""
    return 2.0 * (real - made + 1.0).square().mean()


def discriminator_loss(real: Tensor, made: Tensor) -> Tensor:
    """L_D = 2 E[(D(x_f) - D(x_r) + 1)^2]."""
    return 2.0 * (made - real + 1.0).square().mean()


def moved(x: Tensor, masks: Tensor, config: VolumeGanTraining, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Heads mirrored and turned, each in its own way, with their gammas.

    Args:
        x: (n, 1, S, S, S) in [0, 1].
        masks: (n, 2, S, S, S): hull and brain.
        config: how far.
        generator: on the CPU, as everything else here.
    Returns:
        x, and gamma (n, 3, S, S, S), whose intensities are those of the new x inside the new brain.
    """
    if config.mirror:
        flip = (torch.rand(len(x), generator=generator) < 0.5)[:, None, None, None, None]
        x, masks = (torch.where(flip, t.flip(2), t) for t in (x, masks))
    if config.turn > 0.0:
        grid = affine_grid(_turns(len(x), config.turn, generator), list(x.shape), align_corners=False)
        x = grid_sample(x, grid, mode="bilinear", align_corners=False)
        masks = grid_sample(masks, grid, mode="nearest", align_corners=False)
    return x, torch.cat([masks, masks[:, 1:] * x], dim=1)


def _turns(count: int, most: float, generator: torch.Generator) -> Tensor:
    """(n, 3, 4): rotations about random axes, by up to ``most`` rad, about the cube's centre."""
    axis = torch.nn.functional.normalize(torch.randn((count, 3), generator=generator), dim=1)
    angle = most * (2.0 * torch.rand(count, generator=generator) - 1.0)
    zero = torch.zeros(count)
    x, y, z = axis.unbind(1)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=1).reshape(count, 3, 3)
    rotation = torch.linalg.matrix_exp(cross * angle[:, None, None])
    return torch.cat([rotation, torch.zeros(count, 3, 1)], dim=2)


def cuts(volume: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(S, S, S) in [0, 1] -> (3, S, S): sagittal, coronal and axial through the middle, top and front upwards."""
    half = len(volume) // 2
    planes = (volume[half], volume[:, half], volume[:, :, half])
    return np.stack([np.rint(plane.T[::-1] * 255).astype(np.uint8) for plane in planes])
