"""Negative controls: private training that is broken in one way each, which the audit has to see.

An audit that never fails proves nothing. Every control is the shipped step with one argument falsified, or taken step
by step so that some are left out, and it trains canaries only: nothing here is given a patient, and nothing outside
the audit calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.dp.clipping import ClippedSum, PrivacyUnit, RowLosses, bookkeeping_engine, loop_engine
from agent.dp.dpsgd import PrivateSgd, TrainingTask, train_privately
from agent.dp.noise import Entropy, draw_uniforms
from agent.privacy_audit.canaries import OneRun, Training, one_run_bound
from agent.privacy_audit.conformance import Conformance
from agent.privacy_audit.gate import CANARIES, JOB, examine

_NONE: Final = 1e-9  # a noise multiplier that is no noise; none at all is refused


@dataclass(frozen=True, slots=True, eq=False)
class NegativeControl:
    """One way to break private training."""

    what: str
    training: Training = train_privately
    breaking: Callable[[ClippedSum], ClippedSum] = lambda engine: engine

    def run(
        self, entropy: Entropy, engine: ClippedSum = loop_engine, canaries: int = CANARIES, device: str = "cpu"
    ) -> Conformance:
        """What :func:`agent.privacy_audit.gate.conformance` sees of it."""
        return examine(self.training, entropy, JOB, self.breaking(engine), canaries, device)


def _noise(factor: Callable[[PrivateSgd], float]) -> Training:
    def training(
        task: TrainingTask, units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy, engine: ClippedSum
    ) -> int:
        less = replace(job, noise_multiplier=max(_NONE, job.noise_multiplier * factor(job)))
        return train_privately(task, units, less, entropy, engine)

    return training


def unclipped(engine: ClippedSum) -> ClippedSum:
    """Clipping is off."""
    return lambda model, loss, units, clip: engine(model, loss, units, 1e9)


def by_image(engine: ClippedSum) -> ClippedSum:
    """Every image is clipped by itself, and the sum is sold as one of patients."""

    def clipped_sum(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
        single = [PrivacyUnit(tuple(row[i : i + 1] for row in unit.rows)) for unit in units for i in range(len(unit))]
        return engine(model, loss, single, clip)

    return clipped_sum


def by_layer(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
    """Every parameter tensor is clipped by itself: the whole has a norm of up to clip sqrt(tensors)."""
    parameters = list(model.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for unit in units:
        found = torch.autograd.grad(loss(model, unit.rows).mean(), parameters)
        parts = [g.double().reshape(-1) * (clip / (g.double().norm() + 1e-30)).clamp(max=1.0) for g in found]
        flat = torch.cat(parts)
        total += flat if bool(torch.isfinite(flat).all()) else torch.zeros_like(flat)
    return total


def all_together(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
    """The mean of the batch is clipped, and multiplied by its size: one patient turns all of it."""
    sound = [unit for unit in units if bool(torch.isfinite(unit.rows[0]).all())]
    if not sound:
        return loop_engine(model, loss, [], clip)
    rows = tuple(torch.cat(tensors) for tensors in zip(*(unit.rows for unit in sound), strict=True))
    return loop_engine(model, loss, [PrivacyUnit(rows)], clip) * len(sound)


def _rate(
    task: TrainingTask, units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy, engine: ClippedSum
) -> int:
    return train_privately(task, units, replace(job, sampling_rate=1.5 * job.sampling_rate), entropy, engine)


def _normaliser(
    task: TrainingTask, units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy, engine: ClippedSum
) -> int:
    return train_privately(task, units, replace(job, expected_batch=job.sampling_rate * len(units)), entropy, engine)


@dataclass(frozen=True, slots=True)
class _Repeating:
    """The same bytes whenever as many are asked for."""

    entropy: Entropy
    given: dict[int, bytes]

    def take(self, count: int) -> bytes:
        if count not in self.given:
            self.given[count] = self.entropy.take(count)
        return self.given[count]


def _same_steps(
    task: TrainingTask, units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy, engine: ClippedSum
) -> int:
    return train_privately(task, units, job, _Repeating(entropy, {}), engine)


class _Seeded:
    """A stream that begins anew in each run: what a seed in a configuration does."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def take(self, count: int) -> bytes:
        return self._rng.bytes(count)


def _same_runs(
    task: TrainingTask, units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy, engine: ClippedSum
) -> int:
    return train_privately(task, units, job, _Seeded(0), engine)


def _stepwise(quiet: Callable[[int, float], bool], left_out: bool) -> Training:
    """Step by step, ``quiet`` ones without noise, or not at all.

    Args:
        quiet: is told how many were drawn, and how many are expected.
        left_out: leave quiet steps out.
    """

    def training(
        task: TrainingTask, units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy, engine: ClippedSum
    ) -> int:
        one = replace(job, steps=1, sampling_rate=1.0)
        for _ in range(job.steps):
            hit = draw_uniforms(entropy, len(units)) < job.sampling_rate
            drawn = [unit for unit, there in zip(units, hit, strict=True) if there]
            odd = quiet(len(drawn), job.sampling_rate * len(units))
            if odd and left_out:
                continue
            train_privately(task, drawn, replace(one, noise_multiplier=_NONE) if odd else one, entropy, engine)
        return job.steps

    return training


CONTROLS: Final = (
    NegativeControl("noise absent", _noise(lambda job: 0.0)),
    NegativeControl("noise halved", _noise(lambda job: 0.5)),
    NegativeControl("noise x 0.9", _noise(lambda job: 0.9)),
    NegativeControl("noise x 0.97", _noise(lambda job: 0.97)),
    NegativeControl(
        "noise divided by the root of the batch", _noise(lambda job: 1.0 / math.sqrt(job.expected_batch))
    ),
    NegativeControl("noise not scaled by the clip", _noise(lambda job: job.clip)),
    NegativeControl("clipping off", breaking=unclipped),
    NegativeControl("clipping by image, sold as by patient", breaking=by_image),
    NegativeControl("sampling rate x 1.5", _rate),
    NegativeControl("the same seed at every step", _same_steps),
    NegativeControl("the same seed in every run", _same_runs),
    NegativeControl("small batches skipped", _stepwise(lambda drawn, expected: drawn < expected, left_out=True)),
    NegativeControl("empty batches skipped", _stepwise(lambda drawn, expected: drawn == 0, left_out=True)),
    NegativeControl("empty batches without noise", _stepwise(lambda drawn, expected: drawn == 0, left_out=False)),
    NegativeControl("divided by the number of patients", _normaliser),
)
LARGE: Final = ("noise absent", "clipping off", "clipping by image, sold as by patient")  # faults that a bound sees
ENGINES: Final[dict[str, ClippedSum]] = {
    "clipping off": unclipped(loop_engine),
    "clipping by image, sold as by patient": by_image(loop_engine),
    "clipping each layer by itself": by_layer,
    "clipping the mean of the batch": all_together,
}


def proved(
    control: NegativeControl,
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
    entropy: Entropy,
    device: str = "cpu",
) -> OneRun:
    """What :func:`agent.privacy_audit.canaries.one_run_bound` proves of it."""
    engine = control.breaking(bookkeeping_engine(64))
    return one_run_bound(images, labels, entropy, engine, training=control.training, device=device)
