"""Fine-tune a model with patient-level DP-SGD: the one place where noise is drawn.

Abadi et al. 2016, Algorithm 1, with the patient as the unit (design P2): patients are Poisson-sampled,
each contributes one gradient (of the mean loss over a bounded random choice of its images), and that
gradient is clipped over all parameters together. What is released is exactly what
``SubsampledGaussian(sampling_rate, noise_multiplier, steps)`` claims (P10): the sum of clipped gradients
plus lattice noise from a cryptographic generator, divided by a public constant. No loss, norm or batch
size comes out; an empty batch is a step like any other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

GRID: Final = 2.0**-24  # lattice step in units of the clipping bound
MARGIN: Final = 1e-6  # of the bound: covers the rounding of norms and of float64 sums
TAIL: Final = 8.66  # no number of ``gaussians`` is larger: sqrt(-2 log 2^-54) = 8.653
_53: Final = 2.0**-53

Loss = Callable[[Tensor, Tensor], Tensor]  # (model output, targets) -> mean over the images, a scalar


class Entropy(Protocol):
    """A source of unpredictable bytes. In production it is ``SystemEntropy`` and nothing else."""

    def take(self, count: int) -> bytes:
        """Give ``count`` fresh bytes."""
        ...


@dataclass(frozen=True, slots=True)
class SystemEntropy:
    """The operating system's cryptographic generator."""

    def take(self, count: int) -> bytes:
        """Give ``count`` bytes of ``os.urandom``."""
        return os.urandom(count)


class UnsuitableModel(ValueError):
    """The model would carry patients' data past the noise, or has nothing to train."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Everything that one patient brings to the training."""

    images: Tensor  # (n, ...), n >= 1
    targets: Tensor  # (n, ...)

    def __post_init__(self) -> None:
        """A target for each image."""
        if not 1 <= len(self.images) == len(self.targets):
            raise ValueError("a unit needs images, with a target for each")


@dataclass(frozen=True, slots=True)
class Box:
    """What all sites agree on for the parts of a sum that only secure aggregation will see: public constants."""

    grid: float  # the lattice of every part, in units of the clipped sum
    bound: float  # of each coordinate of the clipped sum, before the noise

    def __post_init__(self) -> None:
        """Refuse a lattice or a bound that holds nothing."""
        if not 0.0 < self.grid < self.bound < math.inf:
            raise ValueError("grid and bound must be finite and positive, the grid the smaller one")


class ClippedSum(Protocol):
    """An engine: the sum over units of the clipped gradients, (d,) float64, on the host."""

    def __call__(self, model: nn.Module, loss: Loss, units: Sequence[Unit], clip: float) -> Tensor:
        """Sum the units' gradients, each of L2 norm at most ``clip`` over all parameters together."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What is trained, and how: the model is changed in place."""

    model: nn.Module
    loss: Loss
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # sees noisy gradients only


def looped(model: nn.Module, loss: Loss, units: Sequence[Unit], clip: float) -> Tensor:
    """The reference engine: one ordinary backward pass for each patient; any module, little memory."""
    parameters = _trainable(model)
    total = torch.zeros(_count(parameters), dtype=torch.float64)
    for unit in units:
        value = loss(model(unit.images), unit.targets)
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([gradient.reshape(-1).double() for gradient in gradients])
        total += _clipped(flat[None], clip)[0].cpu()
    return total


def chunked(size: int) -> ClippedSum:
    """An engine for GPUs: ``torch.func.vmap`` over at most ``size`` patients with equally many images.

    Equal to ``looped`` up to rounding; the model must be one that ``torch.func`` can trace.
    """
    if not size >= 1:
        raise ValueError("a chunk holds at least one patient")

    def clipped_sum(model: nn.Module, loss: Loss, units: Sequence[Unit], clip: float) -> Tensor:
        named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

        def value(weights: dict[str, Tensor], images: Tensor, targets: Tensor) -> Tensor:
            return loss(torch.func.functional_call(model, weights, (images,)), targets)

        gradient = torch.func.vmap(torch.func.grad(value), in_dims=(None, 0, 0))
        total = torch.zeros(_count(list(named.values())), dtype=torch.float64)
        alike = groupby(sorted(units, key=lambda u: len(u.images)), key=lambda u: len(u.images))
        for group in (list(group) for _, group in alike):
            for start in range(0, len(group), size):
                part = group[start : start + size]
                images, targets = (
                    torch.stack([u.images for u in part]),
                    torch.stack([u.targets for u in part]),
                )
                found = gradient(named, images, targets)
                flat = torch.cat([found[name].reshape(len(part), -1).double() for name in named], dim=1)
                total += _clipped(flat, clip).sum(dim=0).cpu()
        return total

    return clipped_sum


def train_privately(
    task: Task,
    units: Sequence[Unit],
    job: PrivateSgd,
    entropy: Entropy,
    clipped_sum: ClippedSum = looped,
) -> int:
    """Train ``task.model`` in place for exactly ``job.steps`` noisy steps.

    Everything that depends on patients passes through ``_noisy``; optimiser, schedules and whatever the
    caller does with the weights afterwards are post-processing. The wall time of a step grows with its
    batch: whoever can time single steps sees more than the claim covers.

    Returns:
        The number of steps taken, always ``job.steps``.
    Raises:
        UnsuitableModel: batch statistics, a buffer that the training changed, or nothing to train.
    """
    refuse_batch_statistics(task.model)
    parameters = _trainable(task.model)
    buffers = [buffer.clone() for buffer in task.model.buffers()]
    optimizer = task.optimizer(parameters)
    for _ in range(job.steps):
        total = clipped_sum(task.model, task.loss, _batch(units, job, entropy), job.clip)
        _set_gradients(parameters, _noisy(total.numpy(), job, entropy) / job.expected_batch)
        optimizer.step()
    if not all(torch.equal(old, new) for old, new in zip(buffers, task.model.buffers(), strict=True)):
        raise UnsuitableModel("a buffer changed in training: it would leave without noise")
    return job.steps


def noisy_part(
    model: nn.Module, loss: Loss, units: Sequence[Unit], job: PrivateSgd, entropy: Entropy, box: Box
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
        UnsuitableModel: batch statistics, or nothing to train.
    """
    refuse_batch_statistics(model)
    total = looped(model, loss, _batch(units, job, entropy), job.clip).numpy()
    lattice = _on_lattice(np.clip(total, -box.bound, box.bound), job, entropy, box.grid)
    whole: NDArray[np.float64] = np.rint(lattice / box.grid)
    return whole


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse layers that mix patients or remember them.

    Raises:
        UnsuitableModel: batch normalisation of any kind, or instance normalisation with running statistics.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and (
            module.track_running_stats or not isinstance(module, nn.modules.instancenorm._InstanceNorm)
        ):
            raise UnsuitableModel(f"{type(module).__name__} keeps statistics of patients: use GroupNorm")


def uniforms(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """(count,) independent uniforms in [0, 1), multiples of 2^-53."""
    words = np.frombuffer(entropy.take(8 * count), "<u8") >> np.uint64(11)
    return words.astype(np.float64) * _53


def gaussians(entropy: Entropy, count: int) -> NDArray[np.float64]:
    """(count,) independent standard normals: Box & Muller 1958 in float64, tails to 8.6 sigma.

    float32 uniforms would cut the tails at 5.8 sigma.
    """
    half = (count + 1) // 2
    radius = np.sqrt(-2.0 * np.log(uniforms(entropy, half) + 0.5 * _53))
    angle = 2.0 * math.pi * uniforms(entropy, half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _noisy(total: NDArray[np.float64], job: PrivateSgd, entropy: Entropy) -> NDArray[np.float64]:
    """The clipped sum (d,) with its noise, on a lattice of C 2^-24.

    Floating-point noise has holes that betray what it was added to (Mironov 2012); on a lattice the sum
    is exact. Rounding moves two neighbouring sums apart by at most grid sqrt(d), which the noise covers.
    """
    return _on_lattice(total, job, entropy, job.clip * GRID)


def _on_lattice(total: NDArray[np.float64], job: PrivateSgd, entropy: Entropy, grid: float) -> NDArray[np.float64]:
    noise = gaussians(entropy, len(total)) * deviation(job, len(total), grid)
    lattice: NDArray[np.float64] = (np.rint(total / grid) + np.rint(noise / grid)) * grid
    return lattice


def deviation(job: PrivateSgd, size: int, grid: float) -> float:
    """Standard deviation of the noise on each of ``size`` coordinates, on a lattice of ``grid``."""
    return job.noise_multiplier * (job.clip + grid * math.sqrt(size))


def _clipped(flat: Tensor, clip: float) -> Tensor:
    """Scale each row of (n, d) float64 to norm <= clip; a row that is not finite becomes zero.

    One patient's broken gradient must neither void the model nor show that the patient was there.
    """
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    factor = (clip / (norms * (1.0 + MARGIN) + 1e-30)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), flat * factor, torch.zeros_like(flat))


def _batch(units: Sequence[Unit], job: PrivateSgd, entropy: Entropy) -> list[Unit]:
    """A Poisson sample of the units, each with a bounded random choice of its images."""
    drawn = [unit for unit, u in zip(units, uniforms(entropy, len(units)), strict=True) if u < job.sampling_rate]
    return [_bounded(unit, job.images_per_patient, entropy) for unit in drawn]


def _bounded(unit: Unit, most: int, entropy: Entropy) -> Unit:
    """The unit with at most ``most`` of its images, chosen uniformly without replacement."""
    if len(unit.images) <= most:
        return unit
    chosen = torch.from_numpy(np.sort(uniforms(entropy, len(unit.images)).argsort()[:most]))
    return Unit(unit.images[chosen], unit.targets[chosen])


def _set_gradients(parameters: Sequence[nn.Parameter], flat: NDArray[np.float64]) -> None:
    source = torch.from_numpy(flat)
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.grad = source[start:stop].to(parameter).view_as(parameter)
        start = stop


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UnsuitableModel("the model has no parameter to train")
    return parameters


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
