"""What one real private training betrays at least: a lower bound of epsilon from canary patients.

The production step trains a small classifier of real digits, and among its patients are canaries: each of eight
images that nobody drew, all with one wrong label, included or left out by its own coin. An observer of all noisy
gradients, which DP-SGD's claim is about, guesses the coins: an included canary has pulled the weights along its own
gradient. :mod:`agent.privacy_audit.canaries` says what that many correct guesses prove.

The claimed epsilon here is 1 or 2. At a claim of 8 the test cannot even detect missing noise: the canaries of one run
give no bound of that size. It detects large faults only, and tests the training as a whole;
:func:`agent.privacy_audit.gate.conformance` detects much more, but only in the single step.

How much a single run betrays at least: lower bounds of epsilon from guesses about many canaries at once.

Steinke, Nasr & Jagielski 2023 (arXiv 2305.08846): each of m canaries is included by its own fair coin. An observer of
the release guesses the coins of the canaries that it is sure about, and abstains on the others. Under (epsilon,
delta) differential privacy the guesses cannot be right too often. Mahloujifar, Melis & Chaudhuri 2024 (arXiv
2410.22235, ICML 2025) bound the same number by an entire trade-off curve, which is tighter; here it is that of the
Gaussian mechanism.

There is a ceiling: with m = 1000 canaries, and every guess right, no more than an epsilon of about 5 can be proved.
An audit of this kind belongs to a claim of 1 or 2; at a claim of 8 it does not see that the noise is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtrc, expit, log_ndtr, ndtr, ndtri
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.dp.clipping import ClippedSum, PrivacyUnit, loop_engine
from agent.dp.dpsgd import PrivateSgd, TrainingTask, train_privately
from agent.dp.noise import Entropy
from agent.models.training_loop import seeded
from policies.accounting.accountant import tight_epsilon
from policies.accounting.claims import SubsampledGaussian
from policies.accounting.rounding import epsilon_at_least, epsilon_text

DELTA: Final = 1e-5
CONFIDENCE: Final = 0.95
SHARES: Final = (0.05, 0.1, 0.2, 0.4, 1.0)  # of the canaries are guessed at; fixed beforehand, and paid for
_MOST: Final = 60.0  # a larger epsilon is not looked for
_FINE: Final = 1e-6  # of an epsilon


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound on epsilon of one run, by default at ``DELTA`` and ``CONFIDENCE``."""

    guessed: float  # by Steinke, Nasr & Jagielski: of any mechanism
    curved: float  # by Mahloujifar, Melis & Chaudhuri: of one whose trade-off curve is a Gaussian's
    canaries: int
    right: float  # share of right guesses, when all are guessed at

    @property
    def epsilon(self) -> float:
        """The larger one. Each is computed at half of the risk, so that both hold together."""
        return max(self.guessed, self.curved)


def lower_bound(
    scores: NDArray[np.float64],
    inside: NDArray[np.bool_],
    delta: float = DELTA,
    confidence: float = CONFIDENCE,
) -> Bound:
    """The epsilon that scores of canaries prove, at least.

    The highest scores are guessed to be in, as many of the lowest to be out, for each share of ``SHARES``; the risk
    is divided by their number and by the two bounds (Bonferroni), so that the best of them may be taken.

    Args:
        scores: (m,), higher for canaries that are thought to be in.
        inside: (m,), what the coins said.
    Raises:
        ValueError: a score is not a number, or the shapes differ.
    """
    if scores.ndim != 1 or scores.shape != inside.shape or not bool(np.isfinite(scores).all()):
        raise ValueError("a bound needs a finite score, and a coin, for each canary")
    if not (0.0 < delta < 1.0 and 0.0 < confidence < 1.0 and len(scores) >= 2):
        raise ValueError("delta and confidence lie between 0 and 1, and there are two canaries or more")
    order, m = np.argsort(-scores, kind="stable"), len(scores)
    risk = (1.0 - confidence) / (2 * len(SHARES))
    guessed = curved = right = 0.0
    for share in SHARES:
        half = max(1, int(share * m) // 2)
        correct = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
        guessed = max(guessed, epsilon_guessed(m, 2 * half, correct, delta, risk))
        curved = max(curved, epsilon_curved(m, 2 * half, correct, delta, risk))
        right = correct / (2 * half)
    return Bound(guessed, curved, m, right)


def p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """At most how likely ``correct`` of ``guesses`` right ones are under (epsilon, delta)-DP, of ``m`` canaries.

    Steinke, Nasr & Jagielski 2023, theorem 5.2: with v right guesses of r, and B ~ Bin(r, e^eps / (1 + e^eps)),

        P[B >= v] + 2 m delta max over i = 1 .. v of P[v - i <= B < v] / i.
    """
    q = float(expit(epsilon))
    beta = float(bdtrc(correct - 1, guesses, q))
    if delta == 0.0 or correct == 0:
        return min(1.0, beta)
    i = np.arange(1, correct + 1)
    alpha = float(np.max((bdtrc(correct - i - 1, guesses, q) - beta) / i))
    return min(1.0, beta + 2.0 * m * delta * alpha)


def epsilon_guessed(m: int, guesses: int, correct: int, delta: float, risk: float) -> float:
    """The largest epsilon that :func:`p_value` rules out at ``risk``; 0 when it rules out none."""
    return _largest(lambda epsilon: p_value(m, guesses, correct, epsilon, delta) < risk)


def epsilon_curved(m: int, guesses: int, correct: int, delta: float, risk: float) -> float:
    """The largest epsilon, at ``delta``, of the Gaussian mechanisms that :func:`rules_out` excludes; or 0."""
    return _largest(lambda epsilon: rules_out(m, guesses, correct, gaussian_mu(epsilon, delta), risk))


def rules_out(m: int, guesses: int, correct: int, mu: float, risk: float) -> bool:
    """Are so many right guesses less likely than ``risk`` for a mu-Gaussian-DP mechanism?

    Mahloujifar, Melis & Chaudhuri 2024, algorithm 3 for two choices per canary. With r and h the shares of right and
    wrong guesses that a recursion from c right guesses downwards allows at least,

        h <- max(h, Phi(Phi^-1(r) - mu)),   r <- r + i / (c' - i) (h' - h),   i = c - 1 .. 0,

    the claim is excluded when r + h exceeds c' / m.
    """
    if correct == 0:
        return False
    right, wrong = risk * correct / m, risk * (guesses - correct) / m
    for i in range(correct - 1, -1, -1):
        more = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        if more == wrong:
            break
        right = min(1.0, right + i / (guesses - i) * (more - wrong))
        wrong = more
    return right + wrong > guesses / m


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta(epsilon) of mu-Gaussian differential privacy: Dong, Roth & Su 2019, corollary 2.13."""
    second = math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)))
    return float(ndtr(-epsilon / mu + mu / 2)) - second


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu of Gaussian differential privacy that reaches ``delta`` at ``epsilon``."""
    return float(brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 1e-7, 100.0, xtol=1e-12))


def _largest(excluded: Callable[[float], bool]) -> float:
    """Bisect; every epsilon below one that is excluded is excluded too."""
    low, high = _FINE, _MOST
    if not excluded(low):
        return 0.0
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low


Training = Callable[[TrainingTask, Sequence[PrivacyUnit], PrivateSgd, Entropy, ClippedSum], int]
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
    task = TrainingTask(model, _losses, lambda parameters: _Shown(parameters, watch.see))
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
