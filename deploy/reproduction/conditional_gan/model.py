"""PrivImage's GAN: the discriminator learns from patients under DP-SGD, the generator from the discriminator alone.

Li et al. 2023, section 3.4 and table 6 (DPGAN without public pre-training, DPGAN-p and PrivImage+G with it). A
patient's images enter the discriminator and nothing else, so its noisy gradients are the only release; the
generator, its average and every image drawn from it are post-processing of them.

That needs two separate sources of randomness. The generator's own values (latents, classes) come from a stream whose
position depends on the number of steps only: if it shared a stream with a batch of patients, the generator's latents
would reveal the size of the batch. The choice of synthetic images that a patient is compared with comes from the
cryptographic generator: in a repeatable stream, one more patient would shift the choices of all later ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.domain import CheckpointStore
from agent.dp.clipping import PrivacyUnit
from agent.dp.dpsgd import TrainingTask
from agent.dp.noise import Entropy, SystemEntropy, draw_uniforms
from agent.models.augmentations import run_digest
from agent.models.image_tensors import to_bytes, to_unit
from agent.models.training_loop import TrainingPlan, TrainingProgress, seeded, torch_generator, train
from agent.models.weights import WeightsError, fill
from deploy.reproduction.conditional_gan import training
from deploy.reproduction.conditional_gan.network import AdversarialArchitecture, AdversarialDiscriminator

_AT_ONCE: Final = 256  # images of one forward pass when drawing


@dataclass(frozen=True, slots=True)
class Fine:
    """How the networks move under DP-SGD. Public constants; rate, steps, noise and clip are the job's.

    The defaults served best of the few that were tried, one seed each, on 1,200 digits of 8 px after public
    pre-training, at an epsilon of 10 (q 0.1, 160 steps, sigma 0.87, clip 1 or 0.1). Without pre-training a ratio of 1
    did better. Table 6 of the paper has learning rates of 1e-4, for larger networks: here they moved next to nothing.
    """

    generator: training.Descent = training.Descent(64, 2e-3, 0.9)  # noqa: RUF009 - frozen
    learning_rate: float = 2e-3  # of the discriminator, Adam on noisy gradients
    first_moment: float = 0.5
    update_ratio: int = 2  # noisy steps of the discriminator for one of the generator
    fakes: int = 1  # K, synthetic images that each real one is compared with in a step
    pool: int = 16  # synthetic images of each class, new in every step, from which they are chosen

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if not all(type(v) is int and v >= 1 for v in (self.update_ratio, self.fakes, self.pool)):
            raise ValueError("update_ratio, fakes and pool are whole numbers from 1")
        if not (0 < self.learning_rate < 1 and 0 <= self.first_moment < 1):
            raise ValueError("a learning rate lies between 0 and 1, a moment in [0, 1)")


@dataclass(frozen=True, slots=True)
class AdversarialConfig:
    """The public configuration of the whole. Nothing of it may be derived from patients."""

    architecture: AdversarialArchitecture
    seed: int = 0  # of initial weights, pre-training and the generator's own steps; never of noise or sampling
    pretraining: training.Pretraining = training.Pretraining()  # noqa: RUF009 - frozen
    fine: Fine = Fine()
    device: str = "cpu"
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        """Refuse a seed that torch does not take."""
        if not (0 <= self.seed < 2**63 and self.checkpoint_every >= 1):
            raise ValueError("a seed is a number of 63 bits, and checkpoints come after a step at least")


class Adversarial:
    """A ``GenerativeModel``: a discriminator for DP-SGD, and a generator that follows it."""

    def __init__(self, config: AdversarialConfig, entropy: Entropy | None = None) -> None:
        """Draw the initial weights from ``config.seed``.

        Args:
            config: public.
            entropy: of the choice of synthetic images; the operating system's unless a test says otherwise.
        """
        self.config = config
        self._entropy = SystemEntropy() if entropy is None else entropy
        with seeded(config.seed):
            generator, discriminator = training.fresh_networks(config.architecture)
        self._generator, self._discriminator = generator.to(config.device), discriminator.to(config.device)
        self._average = training.averaged(self._generator)
        self._following: Following | None = None  # of the fine-tuning

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
        """SHA-256 of the configuration, but for the device and the checkpoints, which decide nothing."""
        return run_digest({"adversarial": asdict(replace(self.config, device="cpu", checkpoint_every=1))})

    def pretrain(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        steps: int,
        place: CheckpointStore,
        say: Callable[[TrainingProgress], None] = lambda _: None,
    ) -> None:
        """Train both networks on public images. Without this it is DPGAN: fine-tuned from random weights.

        A class of which the images show nothing begins as the null class, where some images had no condition.

        Args and errors as of ``GenerativeModel.pretrain`` and ``agent.models.training_loop.train``; ``steps`` counts
        those of the discriminator.
        """
        self._refuse_begun()
        networks = (self._generator, self._discriminator)
        trainer = training.AdversarialTrainer(networks, self._average, (images, labels), self.config.pretraining)
        told = {"architecture": asdict(self.config.architecture), "how": asdict(self.config.pretraining)}
        run = run_digest({"adversarial": told, "seed": self.config.seed}, images, labels)
        train(trainer, TrainingPlan(steps, run, self.config.seed, self.config.checkpoint_every), place, say)
        if -1 in labels:
            absent = torch.tensor(sorted(set(range(self.classes)) - set(labels.tolist())), dtype=torch.int64)
            with torch.no_grad():
                for table in (net.embedding.weight for net in (*networks, self._average)):
                    table[absent] = table[-1].clone()

    def task(self) -> TrainingTask:
        """The discriminator alone, and the generator as its follower; begins at the weights that it has now."""
        if self._following is None:
            side = training.GeneratorSide(self._generator, self._average, self.config.fine.generator)
            self._following = Following(side, self._discriminator, self.config)
        fine = self.config.fine
        adam = functools.partial(torch.optim.Adam, lr=fine.learning_rate, betas=(fine.first_moment, 0.999))
        return TrainingTask(self._discriminator, training.row_losses, adam, self._expanded, self._following)

    def sample(self, labels: NDArray[np.int64], generator: torch.Generator) -> NDArray[np.uint8]:
        """An image for each label, by the average generator.

        Args:
            labels: (n,), -1 for no condition.
            generator: on the CPU.
        Returns:
            (n, \\*shape).
        Raises:
            ValueError: labels of no class.
        """
        if labels.ndim != 1 or not bool(((labels >= -1) & (labels < self.classes)).all()):
            raise ValueError(f"labels are 0 to {self.classes - 1}, or -1 for no condition")
        out = [np.empty((0, *self.shape), np.uint8)]
        for part in torch.split(torch.from_numpy(labels).to(self.config.device), _AT_ONCE):
            if len(part):
                out.append(to_bytes(to_unit(training.draw_images(self._average, part, generator))))
        return np.concatenate(out)

    def state(self) -> dict[str, Tensor]:
        """The average generator, which draws, and the discriminator, without which nothing more is learned."""
        parts = {"generator": self._average, "discriminator": self._discriminator}
        return {f"{name}.{key}": t.cpu() for name, part in parts.items() for key, t in part.state_dict().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state` in the place of a pre-training.

        Raises:
            WeightsError: it is of another configuration.
        """
        self._refuse_begun()
        parts = {"generator.": self._generator, "discriminator.": self._discriminator}
        if any(not name.startswith(tuple(parts)) for name in state):
            raise WeightsError("the state holds tensors of neither network")
        for prefix, module in parts.items():
            fill(module, {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
        fill(self._average, self._generator.state_dict())

    def _refuse_begun(self) -> None:
        if self._following is not None:
            raise ValueError("the fine-tuning has begun: build the model anew")

    def _expanded(self, unit: PrivacyUnit) -> PrivacyUnit:
        """Each image beside K made ones of its class: rows (real, label, made, label), n K of each.

        Which ones is drawn afresh from the cryptographic generator, for this unit by itself: what the others are
        compared with does not change when a patient is added, and the sum moves by no more than one clip.

        Raises:
            ValueError: a label of no class.
        """
        assert self._following is not None
        images, labels = unit.rows
        if not bool(((labels >= 0) & (labels < self.classes)).all()):
            raise ValueError(f"patients' labels are 0 to {self.classes - 1}")
        k, pool = self.config.fine.fakes, self._following.pool
        label = labels.to(pool.device).repeat_interleave(k)
        chosen = torch.from_numpy(draw_uniforms(self._entropy, len(label)) * pool.shape[1]).long().to(pool.device)
        real = training.planes(images).to(pool.device).repeat_interleave(k, dim=0)
        return PrivacyUnit((real, label, pool[label, chosen], label))


class Following:
    """The generator behind a noisy discriminator, and the synthetic images of the next step.

    All of it is a function of the noisy discriminator and of a stream that moves with the steps alone.
    """

    def __init__(
        self, side: training.GeneratorSide, discriminator: AdversarialDiscriminator, config: AdversarialConfig
    ) -> None:
        """Move ``side``; look at ``discriminator`` and never change it."""
        self._side, self._discriminator, self._config = side, discriminator, config
        self._draw = torch_generator((config.seed + 1) % 2**63)
        self.pool = self._made()

    def after(self, step: int) -> None:
        """One generator step when due, on its own latents and classes; the synthetic images are always new."""
        fine, architecture = self._config.fine, self._config.architecture
        if step % fine.update_ratio == 0:
            asked = torch.randint(architecture.classes, (fine.generator.batch,), generator=self._draw)
            self._side.step(self._discriminator, asked.to(self._config.device), self._draw)
        self.pool = self._made()

    def state(self) -> dict[str, Tensor]:
        """Everything that the next call depends on, but the discriminator."""
        return {**self._side.state(), "draw": self._draw.get_state(), "pool": self.pool}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of :meth:`state`.

        Raises:
            KeyError, RuntimeError: it is of another configuration.
        """
        if state["pool"].shape != self.pool.shape:
            raise RuntimeError("another pool")
        self._side.restore(state)
        self._draw.set_state(state["draw"])
        self.pool = state["pool"].to(self.pool)

    def _made(self) -> Tensor:
        """(classes, pool, c, s, s): images of the generator as it is now."""
        classes, pool = self._config.architecture.classes, self._config.fine.pool
        labels = torch.arange(classes, device=self._config.device).repeat_interleave(pool)
        parts = [
            training.draw_images(self._side.generator, part, self._draw) for part in torch.split(labels, _AT_ONCE)
        ]
        together = torch.cat(parts)
        return together.view(classes, pool, *together.shape[1:])
