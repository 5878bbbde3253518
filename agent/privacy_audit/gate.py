"""Is the noise that was claimed the noise that is drawn? The audit that every differentially private release passes.

Three parts, from the exact to the empirical (design P10):

- :func:`sensitivity`: of toy cohorts, every one-patient neighbour; the query moves by no more than its bound.
- :func:`conformance`: canary patients whose gradients are orthogonal go through the *shipped* training step, and what
  comes out is held against the law that is claimed: without a canary N(0, T s^2 C^2) on a coordinate, with one
  C Bin(T, q) more. Each canary has eight images, so that clipping by image is seen.
- :func:`one_run_bound` (in :mod:`agent.privacy_audit.canaries`): what a real training betrays at least.

:func:`gate` runs the first two, and :mod:`agent.privacy_audit.query_conformance`. It runs before a release is priced,
and before a site takes part in rounds; it also refuses when it cannot decide. The reference distribution is the
audit's own: no number of it comes from the audited code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.dp.clipping import ClippedSum, PrivacyUnit, RowLosses, loop_engine
from agent.dp.dpsgd import PrivateSgd, TrainingTask, train_privately
from agent.dp.noise import Entropy
from agent.models.training_loop import seeded
from agent.privacy_audit.canaries import Training
from agent.privacy_audit.conformance import (
    LATTICE,
    Conformance,
    Trial,
    Values,
    claimed_deviation,
    exact_trial,
    of_noise,
    of_sampling,
    rows_differ,
    two_sided,
)
from agent.privacy_audit.query_conformance import (
    histogram_conformance,
    look_conformance,
    part_conformance,
    sum_conformance,
)
from protos.common.errors import RefusedError

Someone = TypeVar("Someone")

CANARIES: Final = 5000
IMAGES: Final = 8  # of each canary: clipping by image instead of by patient lets eight times the bound through
JOB: Final = PrivateSgd(
    sampling_rate=0.1, noise_multiplier=2.0, steps=10, clip=0.5, images_per_patient=IMAGES, expected_batch=128.0
)
_ROWS: Final = 50  # the canaries' module is a matrix with so many rows
_FEW: Final = 1000  # coordinates of the runs with hardly any canary
_LOUD: Final = 3.0  # norm of a canary's gradient, in units of the clip
_ROUNDING: Final = 1e-9  # of the bound: of two float64 sums that are compared


class NoiseAuditError(RefusedError):
    """The noise, the clip or the sampling of this machine does not match the claim, or cannot be verified."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How far one patient moved a query, of all neighbours that were tried."""

    largest: float
    bound: float
    neighbours: int

    @property
    def holds(self) -> bool:
        """NaN does not."""
        return self.largest <= self.bound * (1.0 + _ROUNDING)


def sensitivity(query: Callable[[Sequence[Someone]], Values], cohort: Sequence[Someone], bound: float) -> Sensitivity:
    """The exact L2 sensitivity of ``query`` on a toy cohort: every patient removed from it, and each one alone.

    Args:
        query: gives (d,) float64 of any part of the cohort, none of it included; without noise.
        cohort: patients, in whatever form the query takes them.
        bound: what is claimed, in the query's units.
    Raises:
        ValueError: nobody is in the cohort, or the bound is none.
    """
    if not len(cohort) or not 0.0 < bound < math.inf:
        raise ValueError("a sensitivity needs a cohort, and a finite bound above 0")
    everybody, nobody = query(cohort), query(cohort[:0])
    moves = [query([*cohort[:i], *cohort[i + 1 :]]) - everybody for i in range(len(cohort))]
    moves += [query([patient]) - nobody for patient in cohort]
    return Sensitivity(max((float(np.linalg.norm(m)) for m in moves), key=_worst), bound, len(moves))


def _worst(norm: float) -> float:
    return norm if norm == norm else math.inf  # noqa: PLR0124 - NaN counts as the largest


def gradient_sum(
    task: TrainingTask, clip: float, engine: ClippedSum = loop_engine
) -> Callable[[Sequence[PrivacyUnit]], Values]:
    """The clipped sum of a model family, for :func:`sensitivity`: expand the units beforehand, by ``task.expand``."""

    def query(units: Sequence[PrivacyUnit]) -> Values:
        total: Values = engine(task.model, task.loss, units, clip).numpy()
        return total

    return query


class _Toy(nn.Module):
    """All kinds of layers that an image and its condition pass, small; 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Conv2d(1, 4, 3, padding=1), nn.Embedding(5, 4)
        self.rest = nn.Sequential(
            *(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, stride=2, groups=2)),
            *(nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 3)),
        )

    def forward(self, pixels: Tensor, conditions: Tensor) -> Tensor:
        """(n, 1, 8, 8), (n,) -> (n, 3)."""
        scores: Tensor = self.rest(self.first(pixels) + self.table(conditions)[:, :, None, None])
        return scores


def toy_task(device: str = "cpu") -> TrainingTask:
    """A small network of the layers that images pass: convolutions, norms, a table of conditions, a linear head."""
    with seeded(0):
        model = _Toy()
    return TrainingTask(model.to(device), _classified, lambda parameters: torch.optim.SGD(parameters, lr=1.0))


def toy_cohorts() -> list[list[PrivacyUnit]]:
    """Cohorts of equally many images, few and many, and one of all that is odd.

    Engines compute patients of equally many images together, and in another way. The last cohort has patients with
    one image and with many, a quiet one, loud ones, and one whose pixels are infinite.
    """
    rng = np.random.default_rng(0)
    odd = ((1, 1.0), (9, 1.0), (2, 1e-3), (3, 1e6), (8, 100.0), (2, math.inf))
    return [_toys(rng, cohort) for cohort in (((1, 1.0),) * 8, ((8, 1.0),) * 6, odd)]


def _toys(rng: np.random.Generator, cohort: Sequence[tuple[int, float]]) -> list[PrivacyUnit]:
    """Patients with so many images of such a size."""
    units = []
    for images, scale in cohort:
        pixels = torch.tensor(rng.normal(size=(images, 1, 8, 8)) * scale, dtype=torch.float32)
        classes, conditions = (torch.tensor(rng.integers(0, most, images)) for most in (3, 5))
        units.append(PrivacyUnit((pixels, conditions, classes)))
    return units


def toy_sensitivity(engine: ClippedSum, device: str = "cpu") -> Sensitivity:
    """The worst that one patient does to an engine's sum, of all the toy cohorts."""
    query = gradient_sum(toy_task(device), JOB.clip, engine)
    found = [sensitivity(query, cohort, JOB.clip) for cohort in toy_cohorts()]
    return Sensitivity(max((f.largest for f in found), key=_worst), JOB.clip, sum(f.neighbours for f in found))


def _classified(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    return cross_entropy(model(*rows[:-1]), rows[-1], reduction="none")


def conformance(
    entropy: Entropy,
    engine: ClippedSum = loop_engine,
    job: PrivateSgd = JOB,
    canaries: int = CANARIES,
    device: str = "cpu",
) -> Conformance:
    """Canary patients through the shipped ``train_privately``, held against the law of ``job``.

    Args:
        entropy: of the coins, the batches and the noise.
        engine: the one under test.
        job: what is claimed; :data:`JOB` is small, and noise is a multiple of the clip whatever the job.
        canaries: coordinates of the module, of which half get a canary by coins; a multiple of 50, at least 1000.
        device: of the module.
    """
    return examine(train_privately, entropy, job, engine, canaries, device)


def examine(
    training: Training, entropy: Entropy, job: PrivateSgd, engine: ClippedSum, canaries: int, device: str = "cpu"
) -> Conformance:
    """As :func:`conformance`, of any ``training``: the negative controls are broken ones.

    Three runs: one with the canaries; two with one patient only, whose batches are mostly empty, and of which the
    second must not repeat the noise of the first.
    """
    if not canaries >= _FEW or canaries % _ROWS:
        raise ValueError(f"canaries: a multiple of {_ROWS}, at least {_FEW}")
    coins = np.frombuffer(entropy.take(canaries), np.uint8) < 128
    run = _Run(job, canaries, np.flatnonzero(coins), device)
    run.go(training, entropy, engine)
    first, second = (_Run(job, _FEW, np.arange(1), device) for _ in range(2))
    for sparse in (first, second):
        sparse.go(training, entropy, engine)
    if not all(part.whole for part in (run, first, second)):
        return Conformance(
            (exact_trial("every step is taken, empty batches too, and all weights are numbers", False),)
        )
    again = Trial("a second run has noise of its own", rows_differ(first.residuals(), second.residuals()))
    return Conformance((*run.trials(), *of_noise(first.residuals(), ", in steps that are mostly empty"), again))


class _Run:
    """One training of the canaries' module, and what was seen of it: batches, noisy gradients, weights."""

    def __init__(self, job: PrivateSgd, size: int, present: np.ndarray, device: str) -> None:
        self._job, self._size, self._present = job, size, present
        shape = (_ROWS, size // _ROWS)
        self._model = nn.Linear(shape[1], shape[0], bias=False, device="meta").to_empty(device=device)
        nn.init.zeros_(self._model.weight)
        self._at = np.zeros((0,), np.int64)
        self._drawn: list[Values] = []
        self._steps: list[Values] = []

    def go(self, training: Training, entropy: Entropy, engine: ClippedSum) -> None:
        """Train; the engine and the optimiser are looked over the shoulder, and changed in nothing."""
        waiting: list[int] = []

        def watched(model: nn.Module, loss: RowLosses, units: Sequence[PrivacyUnit], clip: float) -> Tensor:
            batch = list(units)
            waiting.extend(self._coordinate(unit) for unit in batch)
            return engine(model, loss, batch, clip)

        def note(gradient: Values) -> None:
            drawn = np.zeros(self._size + 1)
            np.add.at(drawn, waiting, 1.0)
            waiting.clear()
            self._drawn.append(drawn)
            self._steps.append(gradient)

        task = TrainingTask(self._model, _along_targets, lambda parameters: _Watched(parameters, note))
        training(task, self._units(), self._job, entropy, watched)

    def _units(self) -> list[PrivacyUnit]:
        """A canary for each present coordinate, and one whose gradient is not finite."""
        rows, columns = torch.eye(_ROWS), torch.eye(self._size // _ROWS)
        at = [divmod(int(k), self._size // _ROWS) for k in self._present]
        loud = _LOUD * self._job.clip
        units = [PrivacyUnit((columns[i].expand(IMAGES, -1) * loud, rows[j].expand(IMAGES, -1))) for j, i in at]
        broken = (torch.full((IMAGES, columns.shape[1]), math.inf), rows[:1].expand(IMAGES, -1))
        return [*units, PrivacyUnit(broken)]

    def _coordinate(self, unit: PrivacyUnit) -> int:
        """Where its gradient points; behind the last coordinate for the broken one."""
        inputs, targets = unit.rows[0][0], unit.rows[1][0]
        if not bool(torch.isfinite(inputs).all()):
            return self._size
        return int(targets.argmax()) * inputs.shape[0] + int(inputs.argmax())

    @property
    def whole(self) -> bool:
        """As many steps as claimed, and nothing but numbers."""
        if len(self._steps) != self._job.steps:
            return False
        return bool(np.isfinite(self._steps).all()) and bool(torch.isfinite(self._model.weight).all())

    def _moves(self) -> Values:
        """(steps, d): the noisy sums in units of the clip."""
        return np.stack(self._steps) * (self._job.expected_batch / self._job.clip)

    def residuals(self) -> Values:
        """(steps, d): what is left of the noisy sums without the canaries that were drawn; N(0, 1), as is claimed."""
        return (self._moves() - np.stack(self._drawn)[:, :-1]) / self._deviation

    @property
    def _deviation(self) -> float:
        """Of the noise, in units of the clip: the lattice widens it a little."""
        return claimed_deviation(self._job.noise_multiplier, 1.0, self._size, LATTICE)

    def trials(self) -> tuple[Trial, ...]:
        """All that is known of the law."""
        job, drawn = self._job, np.stack(self._drawn)
        drift, s = -self._model.weight.detach().double().cpu().numpy().ravel(), self._deviation
        taken = bool(np.abs(drift - np.sum(self._steps, axis=0)).max() <= 1e-3 * s * job.clip / job.expected_batch)
        drift *= job.expected_batch / job.clip
        variance = job.steps * s**2
        there = np.zeros(self._size, np.bool_)
        there[self._present] = True
        inside, outside = drift[there], drift[~there]
        q = job.sampling_rate
        wide = math.sqrt((variance + job.steps * q * (1.0 - q)) / len(inside))
        hit = drawn[:, :-1] > 0
        moved = self._moves()[hit]
        alone = float(moved.mean() - 1.0) * math.sqrt(len(moved)) / s if len(moved) else math.nan
        counts = np.append(drawn[:, self._present].sum(axis=0), drawn[:, -1].sum())
        return (
            exact_trial("the weights move by the noisy gradient and nothing else", taken),
            exact_trial("a patient is in a batch once", bool(drawn.max() <= 1.0)),
            *of_sampling(counts, drawn.sum(axis=1), q),
            Trial("a patient who is drawn adds the clip and no more", two_sided(alone)),
            Trial("a patient adds what the claim says", two_sided(float(inside.mean() - job.steps * q) / wide)),
            Trial("nothing else is added", two_sided(float(outside.sum()) / math.sqrt(variance * len(outside)))),
            *of_noise(self.residuals()),
        )


class _Watched(torch.optim.SGD):
    """Plain gradient descent with rate 1 that shows each noisy gradient (d,) to ``note``."""

    def __init__(self, parameters: list[nn.Parameter], note: Callable[[Values], None]) -> None:
        super().__init__(parameters, lr=1.0)
        self._parameters, self._note = parameters, note

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """As its parent's."""
        gradients = [p.grad.reshape(-1) for p in self._parameters if p.grad is not None]
        self._note(torch.cat(gradients).double().cpu().numpy())
        super().step(closure)


def _along_targets(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """(n,): the output along the target, whose gradient is the outer product of target and input."""
    along: Tensor = (model(rows[0]) * rows[1]).sum(dim=1)
    return along


def gate(
    entropy: Entropy, engine: ClippedSum = loop_engine, device: str = "cpu", canaries: int = CANARIES
) -> Conformance:
    """What a release asks before it is priced, and a site before it takes part in rounds; about a second.

    Args:
        entropy: the one that the release will use.
        engine: the one that it will use.
        device: the one that it will train on.
        canaries: as of :func:`conformance`; with 1000 instead of 5000, a fault of noise below 4 % is not seen.
    Returns:
        What was seen, which is nothing but chance.
    Raises:
        NoiseAuditError: two runs in a row do not follow the claimed law, a patient moves a sum by more than the clip,
        or
            the audit could not run. Nothing was priced.
    """
    try:
        moved = toy_sensitivity(engine, device)
        seen = repeat_if_failed(lambda: conformance(entropy, engine, JOB, canaries, device))
        queries = (sum_conformance, histogram_conformance, look_conformance, part_conformance)
        others = [repeat_if_failed(partial(query, entropy)) for query in queries]
    except Exception as fault:  # whatever it is: an audit that cannot run lets nothing through
        raise NoiseAuditError(
            f"the audit of the noise could not run ({type(fault).__name__}): nothing was priced"
        ) from fault
    if not moved.holds:
        raise NoiseAuditError(
            f"one patient moves the sum of gradients by {moved.largest:.4g}, and the bound is {moved.bound:g}: "
            "nothing was priced"
        )
    for found in (seen, *others):
        if not found.holds:
            raise NoiseAuditError(
                f'in two runs it is not so that "{found.worst.what}" (p = {found.p:.1g}): nothing was priced. '
                "Reinstall the agent, and run `lazaret-agent audit --full`"
            )
    return Conformance(tuple(trial for found in (seen, *others) for trial in found.trials))


def repeat_if_failed(run: Callable[[], Conformance]) -> Conformance:
    """A second run when the first looks odd: a sound machine fails one time in a million, not in a thousand."""
    first = run()
    return first if first.holds else run()
