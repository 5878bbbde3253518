"""What one real private training betrays at least: a lower bound of epsilon from canary patients.

The production step trains a small classifier of real digits, and among its patients are canaries: each of eight
images that nobody drew, all with one wrong label, included or left out by its own coin. An observer of all noisy
gradients, which DP-SGD's claim is about, guesses the coins: an included canary has pulled the weights along its own
gradient. :mod:`agent.privacy_audit.lower_bounds` says what that many correct guesses prove.

The claimed epsilon here is 1 or 2. At a claim of 8 the test cannot even detect missing noise: the canaries of one run
give no bound of that size. It detects large faults only, and tests the training as a whole;
:func:`agent.privacy_audit.gate.conformance` detects much more, but only in the single step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.dp.clipping import ClippedSum, PrivacyUnit, loop_engine
from agent.dp.dpsgd import PrivateSgd, Task, train_privately
from agent.dp.noise import Entropy
from agent.models.training_loop import seeded
from agent.privacy_audit.lower_bounds import DELTA, Bound, lower_bound
from policies.accounting.accountant import tight_epsilon
from policies.accounting.claims import SubsampledGaussian
from policies.accounting.rounding import epsilon_at_least, epsilon_text

Training = Callable[[Task, Sequence[PrivacyUnit], PrivateSgd, Entropy, ClippedSum], int]
CANARIES: Final = 500
IMAGES: Final = 8
MOST_CLAIMED: Final = 2.0  # epsilon: beyond it, a pass would say nothing
JOB: Final = PrivateSgd(
    sampling_rate=0.25, noise_multiplier=4.5, steps=20, clip=1.0, images_per_patient=IMAGES, expected_batch=128.0
)
_FEATURES: Final = 512
_FREQUENCY: Final = 1.5  # of the features, per unit of brightness: those of two canaries are nearly orthogonal
_JITTER: Final = 0.03  # between the images of one canary
_RATE: Final = 0.1


@dataclass(frozen=True, slots=True)
class OneRun:
    """The claimed epsilon, and the lower bound from the run."""

    claimed: float  # epsilon at ``DELTA``, by PLD
    bound: Bound

    @property
    def holds(self) -> bool:
        """The run proves no more than is claimed. NaN does not hold."""
        return self.bound.epsilon <= self.claimed

    def sentence(self) -> str:
        """For people."""
        return (
            f"claimed {epsilon_text(self.claimed)}, proved at least {epsilon_at_least(self.bound.epsilon)} "
            f"({epsilon_at_least(self.bound.guessed)} by guesses, "
            f"{epsilon_at_least(self.bound.curved)} by the Gaussian curve; "
            f"{self.bound.canaries} canary patients). "
            "At a claim of 8 this could not even see that the noise is missing"
        )


class Waves(nn.Module):
    """The cosine of each number."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape that came."""
        return torch.cos(x)


def one_run_bound(
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
    entropy: Entropy,
    engine: ClippedSum = loop_engine,
    *,
    training: Training = train_privately,
    device: str = "cpu",
) -> OneRun:
    """Train a small classifier by :data:`JOB`, with canary patients among its own, and guess which of them were in.

    Args:
        images: (n, ...) in [0, 1], of public people: a patient each.
        labels: (n,), from 0 on.
        entropy: of the coins, the batches and the noise.
        engine: the one under test.
        training: the one under test; negative controls are broken ones.
        device: of the classifier.
    Raises:
        ValueError: the claim is weaker than ``MOST_CLAIMED``.
    """
    claimed = tight_epsilon([SubsampledGaussian(JOB.sampling_rate, JOB.noise_multiplier, JOB.steps)], DELTA)
    if not claimed <= MOST_CLAIMED:
        raise ValueError(
            f"an epsilon of {epsilon_text(claimed)} is claimed, and one run cannot even see absent noise there: "
            f"audit the same code at {MOST_CLAIMED:g} or less"
        )
    rng = np.random.default_rng(np.frombuffer(entropy.take(16), np.uint32))
    flat = torch.from_numpy(images.reshape(len(images), -1))
    classes = int(labels.max()) + 1
    pictures, wrong = _canaries(rng, flat.shape[1], classes)
    inside = np.frombuffer(entropy.take(CANARIES), np.uint8) < 128
    units = [PrivacyUnit((flat[i : i + 1], torch.from_numpy(labels[i : i + 1]))) for i in range(len(flat))]
    units += [PrivacyUnit((pictures[k], wrong[k])) for k in np.flatnonzero(inside)]
    model = _classifier(flat.shape[1], classes, rng).to(device)
    watch = _Watch(model, (pictures.to(device), wrong.to(device)))
    task = Task(model, _losses, lambda parameters: _Shown(parameters, watch.see))
    training(task, units, JOB, entropy, engine)
    return OneRun(claimed, lower_bound(watch.scores.double().cpu().numpy(), inside))


def _canaries(rng: np.random.Generator, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """(m, 8, size) images of noise, eight much alike for each canary, and (m, 8) labels drawn by lot."""
    alike = rng.random((CANARIES, 1, size)) + _JITTER * rng.normal(size=(CANARIES, IMAGES, size))
    labels = torch.from_numpy(rng.integers(0, classes, (CANARIES, 1)))
    return torch.from_numpy(alike.clip(0.0, 1.0).astype(np.float32)), labels.repeat(1, IMAGES)


def _classifier(size: int, classes: int, rng: np.random.Generator) -> nn.Module:
    """Random Fourier features (Rahimi & Recht 2007), frozen, and a linear head that begins at nothing."""
    with seeded(int(rng.integers(2**31))):
        features, head = nn.Linear(size, _FEATURES), nn.Linear(_FEATURES, classes)
        nn.init.normal_(features.weight, std=_FREQUENCY)
        nn.init.uniform_(features.bias, 0.0, 2.0 * math.pi)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    features.requires_grad_(False)
    return nn.Sequential(features, Waves(), head)


def _losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    return cross_entropy(model(rows[0]), rows[1], reduction="none")


class _Watch:
    """Adds up, for every canary, how far each noisy gradient goes along the canary's own."""

    def __init__(self, model: nn.Module, canaries: tuple[Tensor, Tensor]) -> None:
        self._model, self._labels = model, canaries[1].reshape(-1)
        self._pictures = canaries[0].reshape(len(self._labels), -1)
        self.scores = torch.zeros(CANARIES, device=self._labels.device)

    def see(self, gradients: list[Tensor]) -> None:
        """One step's noisy gradients, before the weights have moved: directional derivatives of the losses."""
        named = {name: p.detach() for name, p in self._model.named_parameters() if p.requires_grad}

        def losses(weights: dict[str, Tensor]) -> Tensor:
            out = torch.func.functional_call(self._model, weights, (self._pictures,))
            each = cross_entropy(out, self._labels, reduction="none")
            return each.view(CANARIES, IMAGES).mean(dim=1)

        along: Tensor = torch.func.jvp(losses, (named,), (dict(zip(named, gradients, strict=True)),))[1]
        self.scores += along.detach()


class _Shown(torch.optim.SGD):
    """Gradient descent that shows its gradients."""

    def __init__(self, parameters: list[nn.Parameter], see: Callable[[list[Tensor]], None]) -> None:
        super().__init__(parameters, lr=_RATE)
        self._parameters, self._see = parameters, see

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """As its parent's."""
        self._see([p.grad.detach() for p in self._parameters if p.grad is not None])
        super().step(closure)
