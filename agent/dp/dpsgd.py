"""Fine-tune a model with patient-level DP-SGD.

Abadi et al. 2016, Algorithm 1, with the patient as the unit (design P2): patients are Poisson-sampled,
each contributes one gradient (of the mean loss over a bounded random choice of its images), and that
gradient is clipped over all parameters together. What is released is exactly what
``SubsampledGaussian(sampling_rate, noise_multiplier, steps)`` claims (P10): the sum of clipped gradients
plus lattice noise from a cryptographic generator, divided by a public constant. No loss, norm or batch
size comes out; an empty batch is a step like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import CheckpointStore
from agent.dp.clipping import (
    ChunkedSum,
    ClippedSum,
    PrivacyUnit,
    RowLosses,
    UnsuitableModelError,
    bookkeeping_engine,
    loop_engine,
    refuse_batch_statistics,
    trainable,
    vmap_engine,
)
from agent.dp.noise import Entropy, deviation, draw_uniforms, lattice_steps, noisy_sum
from agent.errors import DivergedError, OtherRunError, TrainingCheckpointError
from agent.models.training_loop import (
    PostStepHook,
    TrainingProgress,
    load_state,
    optimizer_state,
    restore_optimizer,
    save_state,
)

CHECKPOINT_EVERY: Final = 25  # steps; a constant, so that nothing of patients shows in it


@dataclass(frozen=True, slots=True)
class PrivateSgd:
    """The public constants of one private training job. None of them may be derived from patients."""

    sampling_rate: float  # q, the chance of each patient in each step
    noise_multiplier: float  # sigma, in units of the clipping bound
    steps: int
    clip: float  # C, the L2 bound of one patient's gradient
    images_per_patient: int  # drawn at random from the patient's images in each step
    expected_batch: float  # the divisor: q times a public bound of the number of patients, never N

    def __post_init__(self) -> None:
        """Refuse a job without noise, bound or sense."""
        if not (0.0 < self.sampling_rate <= 1.0 and 0.0 < self.noise_multiplier < math.inf):
            raise ValueError("sampling_rate must lie in (0, 1] and noise_multiplier be finite and positive")
        if not (0.0 < self.clip < math.inf and 0.0 < self.expected_batch < math.inf):
            raise ValueError("clip and expected_batch must be finite and positive")
        if not (self.steps >= 1 and self.images_per_patient >= 1):
            raise ValueError("steps and images_per_patient must be at least 1")


@dataclass(frozen=True, slots=True)
class SecureSumGrid:
    """What all sites agree on for the parts of a sum that only secure aggregation will see: public constants."""

    grid: float  # the lattice of every part, in units of the clipped sum
    bound: float  # of each coordinate of the clipped sum, before the noise

    def __post_init__(self) -> None:
        """Refuse a lattice or a bound that holds nothing."""
        if not 0.0 < self.grid < self.bound < math.inf:
            raise ValueError("grid and bound must be finite and positive, the grid the smaller one")


def identity(unit: PrivacyUnit) -> PrivacyUnit:
    """The unit as it is."""
    return unit


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTask:
    """What is trained, and how: the model is changed in place."""

    model: nn.Module
    loss: RowLosses
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # sees noisy gradients only
    # K noise draws of one unit's rows; own randomness, no other unit
    expand: Callable[[PrivacyUnit], PrivacyUnit] = identity
    follower: PostStepHook | None = None


def train_privately(  # noqa: PLR0913 - the last four are those of every training loop here
    task: TrainingTask,
    units: Sequence[PrivacyUnit],
    job: PrivateSgd,
    entropy: Entropy,
    clipped_sum: ClippedSum = loop_engine,
    *,
    place: CheckpointStore | None = None,
    run: str = "",
    every: int = 0,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> int:
    """Train ``task.model`` in place for exactly ``job.steps`` noisy steps, from the checkpoint if there is one.

    Everything that depends on patients passes through ``noisy_sum``; optimiser, schedules, follower and whatever the
    caller does with the weights afterwards are post-processing. The wall time of a step grows with its
    batch: whoever can time single steps sees more than the claim covers.

    A killed job resumes at its last checkpoint (every ``CHECKPOINT_EVERY`` steps). The steps after it are taken
    again, with fresh noise and another batch; their first results were lost with the process and never seen. So the
    output is a function of one path of ``job.steps`` noisy steps, as claimed, and the same grant pays for it. A
    checkpoint stays inside the site: it is not released before the job is complete.

    Args:
        task: its model, optimiser and follower are as they were built, also when the job goes on.
        units: the patients.
        job: the public constants.
        entropy: of batches and noise; nothing of it is ever saved.
        clipped_sum: the engine.
        place: of the checkpoint.
        run: what tells this job from another; must be told with a place.
        every: so many steps lie between checkpoints, and none is written after the last step; 0: see above.
        say: told every ``CHECKPOINT_EVERY`` steps how far it is: no loss, norm or batch size.
    Returns:
        The number of steps in the model, always ``job.steps``.
    Raises:
        UnsuitableModelError: batch statistics, a buffer that the training changed, or nothing to train.
        DivergedError: a parameter is not finite any more. That depends on noisy steps alone.
        OtherRunError: the place holds another job's checkpoint.
        TrainingCheckpointError: the checkpoint cannot be read.
    """
    refuse_batch_statistics(task.model)
    if place is not None and not run:
        raise ValueError("a place for checkpoints needs a run, else one job would go on with the steps of another")
    parameters = trainable(task.model)
    buffers = [buffer.clone() for buffer in task.model.buffers()]
    state = _State(task, parameters, task.optimizer(parameters), job)
    begun = 0 if place is None else state.restore(place.read(), run)
    for step in range(begun + 1, job.steps + 1):
        batch = _Drawn(_batch(units, job, entropy), task.expand)
        total = clipped_sum(task.model, task.loss, batch, job.clip).numpy()
        state.step(noisy_sum(total, job.clip, job.noise_multiplier, entropy) / job.expected_batch)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
            raise DivergedError(
                f"at step {step}: parameters are not finite; a smaller learning rate or more noise helps"
            )
        if task.follower is not None:
            task.follower.after(step)
        told = step % CHECKPOINT_EVERY == 0 or step == job.steps
        if place is not None and (step % every == 0 and step < job.steps if every else told):
            place.write(save_state(run, step, state.tensors()))
        if told:
            say(TrainingProgress(step, job.steps, {}))
    if not all(torch.equal(old, new) for old, new in zip(buffers, task.model.buffers(), strict=True)):
        raise UnsuitableModelError("a buffer changed in training: it would leave without noise")
    return job.steps


def best_engine(device: torch.device | str, expected_batch: float = 64.0) -> ChunkedSum:
    """The engine that the product takes.

    On a processor one backward pass for some patients, not more than the caches bear: the fastest of all in
    tests/benchmarks/dp_engine.py for patients of one row, and beside ``loop_engine`` for patients of eight. On an
    accelerator ``vmap``, with as many rows as keep it busy. A chunk has no more places than the public
    ``expected_batch`` fills: those left over are computed, too.
    """
    places = 1 << (math.ceil(max(expected_batch, 1.0)) - 1).bit_length()
    if torch.device(device).type == "cpu":
        return bookkeeping_engine(min(32, places), most_rows=64)
    return vmap_engine(min(64, places), most_rows=512)


def noisy_part(  # noqa: PLR0913 - as train_privately, and the box
    model: nn.Module,
    loss: RowLosses,
    units: Sequence[PrivacyUnit],
    job: PrivateSgd,
    entropy: Entropy,
    box: SecureSumGrid,
    *,
    clipped_sum: ClippedSum = loop_engine,
) -> NDArray[np.float64]:
    """One step's clipped sum with this site's share of the noise, as integer steps of ``box.grid``, (d,) float64.

    Parts of several sites are added up and only the sum is seen. Each part is boxed and rounded *before* it gets its
    noise, and the noise is rounded by itself: nothing that depends on patients is rounded or cut afterwards, and the
    sum of the parts is a sum of lattice vectors plus the sum of the noises. Boxing projects onto a convex set and
    brings no two neighbours further apart; rounding does, by at most grid sqrt(d), which the noise covers.

    The model is not changed, and nothing else of it may leave.

    Returns:
        Whole numbers, none above ``(box.bound + TAIL * deviation) / box.grid + 1``.
    Raises:
        UnsuitableModelError: batch statistics, or nothing to train.
    """
    refuse_batch_statistics(model)
    total = clipped_sum(model, loss, _batch(units, job, entropy), job.clip).numpy()
    spread = deviation(job.clip, job.noise_multiplier, len(total), box.grid)
    return lattice_steps(np.clip(total, -box.bound, box.bound), spread, box.grid, entropy)


class _Drawn(Sequence[PrivacyUnit]):
    """The units of one batch, expanded when they are asked for: the rows of all at once may not fit."""

    def __init__(self, units: Sequence[PrivacyUnit], expand: Callable[[PrivacyUnit], PrivacyUnit]) -> None:
        self._units, self._expand = units, expand

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[PrivacyUnit]:
        # the inherited one takes an IndexError of ``expand`` for the end, and leaves out everybody behind it
        return (self._expand(unit) for unit in self._units)

    @overload
    def __getitem__(self, index: int) -> PrivacyUnit: ...
    @overload
    def __getitem__(self, index: slice) -> _Drawn: ...
    def __getitem__(self, index: int | slice) -> PrivacyUnit | _Drawn:
        if isinstance(index, slice):
            return _Drawn(self._units[index], self._expand)
        return self._expand(self._units[index])


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """What a step changes: the parameters, the optimiser's moments, the follower."""

    task: TrainingTask
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    job: PrivateSgd

    def step(self, gradient: NDArray[np.float64]) -> None:
        """One step of the optimiser along a noisy gradient (d,)."""
        parts = torch.split(torch.from_numpy(gradient), [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.to(parameter).view_as(parameter)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, but the patients and the entropy."""
        state = {f"parameter.{i}": parameter for i, parameter in enumerate(self.parameters)}
        follower = {} if self.task.follower is None else self.task.follower.state()
        return {
            **state,
            **optimizer_state(self.optimizer, "optimizer"),
            **{f"follower.{name}": tensor for name, tensor in follower.items()},
            "job": self._job(),
        }

    def restore(self, raw: bytes | None, run: str) -> int:
        """Restore the state from ``tensors``, and return its step; 0 if there is none."""
        if raw is None:
            return 0
        step, state = load_state(raw, run)
        if not (torch.equal(state.get("job", torch.zeros(0)), self._job()) and 0 <= step <= self.job.steps):
            raise OtherRunError("the checkpoint belongs to a job with other constants: give the job another folder")
        try:
            with torch.no_grad():
                for i, parameter in enumerate(self.parameters):
                    tensor = state[f"parameter.{i}"]
                    if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                        raise TrainingCheckpointError(
                            "the checkpoint does not fit this model: delete it to start again"
                        )
                    parameter.copy_(tensor)
            restore_optimizer(self.optimizer, "optimizer", state)
            if self.task.follower is not None:
                named = {n.removeprefix("follower."): t for n, t in state.items() if n.startswith("follower.")}
                self.task.follower.restore(named)
        except (KeyError, RuntimeError) as fault:
            raise TrainingCheckpointError(
                "the checkpoint does not fit this model: delete it to start again"
            ) from fault
        return step

    def _job(self) -> Tensor:
        j = self.job
        constants = (j.sampling_rate, j.noise_multiplier, j.steps, j.clip, j.images_per_patient, j.expected_batch)
        return torch.tensor(constants, dtype=torch.float64)


def _batch(units: Sequence[PrivacyUnit], job: PrivateSgd, entropy: Entropy) -> list[PrivacyUnit]:
    """A Poisson sample of the units, each with a bounded random choice of its images."""
    drawn = [unit for unit, u in zip(units, draw_uniforms(entropy, len(units)), strict=True) if u < job.sampling_rate]
    return [_bounded(unit, job.images_per_patient, entropy) for unit in drawn]


def _bounded(unit: PrivacyUnit, most: int, entropy: Entropy) -> PrivacyUnit:
    """The unit with at most ``most`` of its images, chosen uniformly without replacement."""
    if len(unit) <= most:
        return unit
    chosen = torch.from_numpy(np.sort(draw_uniforms(entropy, len(unit)).argsort()[:most]))
    return PrivacyUnit(tuple(row[chosen] for row in unit.rows))
