"""What a task trains at a site: its network, its patients as units, the loss of each example, the optimiser's steps.

Everything that one patient brings hangs on this patient's own examples, on public constants and on fresh randomness,
never on others; what the optimiser sees has its noise already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import Cohort, Example, ExampleRule, Split, TaskCohort, TaskPatient
from agent.dp.clipping import ChunkedSum, PatientMemoryError, PrivacyUnit, RowLosses, trainable, vmap_engine
from agent.dp.compute_device import (
    CPU,
    OPACUS,
    AcceleratorLostError,
    ComputePlan,
    TaskMemoryError,
    accelerator_failed,
    memory_gib,
)
from agent.dp.dpsgd import best_engine
from agent.dp.evaluation_sums import ScoredExample
from agent.dp.gradient_recorder import GradientRecorder, NoGradientRuleError
from agent.dp.noise import Entropy
from agent.dp.per_example_gradients import in_full
from agent.errors import TransformError
from agent.models.networks.public_weights import WeightFiles
from agent.models.networks.trainable import TrainableNetwork, build, build_trained
from policies.tasks.task import BFLOAT16, CLASSIFICATION, MULTI_LABEL, SEGMENTATION, Task

FEW: Final = 4  # patients of a chunk where no rule of ours is: their gradients stand beside each other in memory
# numbers that go into what is trained, in one pass on a processor: with sixteen times as many, features of volumes
# leave the caches, and a patient takes four times as long
CACHED: Final = 1 << 21
_SECRET: Final = 32  # bytes
_HERE: Final = ComputePlan()  # the processor
_SMOOTH: Final = 1.0  # pixels: of an overlap of nothing with nothing


def network_of(task: Task, files: WeightFiles) -> TrainableNetwork:
    """The task's network at its start: public weights where the task names some, else numbers from its seed."""
    network = build(task.network, task.input.channels, task.input.size, task.outputs, task.seed, files)
    return network.with_own_head() if task.training.head == "own" else network


def trained_network_of(task: Task, files: WeightFiles) -> TrainableNetwork:
    """The network of a finished model, at its start: it must not be trained (:func:`build_trained`)."""
    return build_trained(task.network, task.input.channels, task.input.size, task.outputs, task.seed, files)


def engine_of(network: TrainableNetwork, expected_batch: float, plan: ComputePlan = _HERE) -> ChunkedSum:
    """One pass for some patients with our own rules, or by ``vmap`` where a module that is trained has no rule.

    Or Opacus' hooks, where the site's plan says so.
    """
    if plan.engine == OPACUS or has_rules(network):
        return site_engine(plan, expected_batch)
    return vmap_engine(FEW)


def site_engine(plan: ComputePlan, expected_batch: float = 64.0) -> ChunkedSum:
    """The engine that the site chose, for networks that it can train."""
    if plan.engine != OPACUS:
        return best_engine(plan.device, expected_batch)
    from agent.dp.opacus_engine import opacus_engine  # noqa: PLC0415 - it costs seconds

    return opacus_engine(FEW)


def fitted_engine(task: Task, network: TrainableNetwork, plan: ComputePlan) -> ChunkedSum:
    """The engine with chunks that fit in memory here, found with a made patient who has as many rows as one may.

    Raises:
        PatientMemoryError: not even one such patient fits.
    """
    constants, shape = task.training, (task.input.channels, *task.input.size)
    inputs = network.prepare(torch.zeros(1, *shape))
    at_once = max(1, CACHED // inputs.numel()) if plan.device == CPU else constants.expected_batch
    engine = engine_of(network, min(constants.expected_batch, at_once), plan)
    rows = constants.images_per_patient * constants.views
    target = {
        CLASSIFICATION: torch.zeros(1, 1, dtype=torch.int64),
        SEGMENTATION: torch.zeros(1, *task.input.size, dtype=torch.int64),
    }.get(task.kind, torch.zeros(1, task.outputs))
    made = PrivacyUnit(tuple(one.expand(rows, *one.shape[1:]) for one in (inputs, target)))
    engine.fit(network.trained, row_losses(task), made, constants.clip)
    return engine


def engine_refusal(task: Task, engine: str) -> str:
    """Why the site's engine cannot train the task's network; "": it can."""
    if engine != OPACUS:
        return ""
    from agent.dp.opacus_engine import NOT_EXACT  # noqa: PLC0415 - it costs seconds

    if task.training.precision == BFLOAT16:
        why = "training.precision: its hooks give gradients of 16 bits"
        return f'engine = "opacus" in site.toml cannot train task {task.name}: {why}: set "own"'
    if (name := task.network.name) not in NOT_EXACT or task.network.trained == "head":  # hooks hold what is trained
        return ""
    why = f"network.name: {name}: {NOT_EXACT[name]}"
    return f'engine = "opacus" in site.toml cannot train task {task.name}: {why}: set "own"'


@contextmanager
def told_by_task(task: Task, plan: ComputePlan) -> Iterator[None]:
    """What a machine lacks or loses while a task is computed becomes a sentence.

    Raises:
        TaskMemoryError: one patient does not fit in memory.
        AcceleratorLostError: the accelerator failed.
    """
    try:
        yield
    except PatientMemoryError:
        raise TaskMemoryError(
            f"task {task.name!r}: training.images_per_patient, training.views, input.size: one patient needs more "
            f"than the {memory_gib(plan.device):.1f} GiB of memory of {plan.device}"
        ) from None
    except RuntimeError as fault:
        if not accelerator_failed(fault):
            raise
        raise AcceleratorLostError from None


def has_rules(network: TrainableNetwork) -> bool:
    """Whether every module that is trained has a rule of ours for the gradients of patients."""
    try:
        GradientRecorder(network.trained, trainable(network.trained))
    except NoGradientRuleError:
        return False
    return True


# -- examples become rows


def example_rule(task: Task, split: Split | None = None, part: str = "") -> ExampleRule:
    """Which images of the vault are the task's examples; with a split, those of the patients in a part of it."""
    seen, labels = task.input, task.labels
    return ExampleRule(
        kind=task.kind,  # type: ignore[arg-type] # one of the words that a task may have
        modality=seen.modality,
        size=seen.size,
        body_part=seen.body_part,
        channels=seen.channels,
        spacing=seen.spacing,
        window=seen.window,
        per_study=seen.example == "study",
        table=labels.table,
        columns=labels.columns,
        classes=labels.classes,
        low=labels.low,
        high=labels.high,
        split=split,
        part=part,
    )


def labelled_examples(task: Task, cohort: Cohort) -> TaskCohort:
    """The images that came with a label of the task's classes; patients with no other are left out."""
    places = {name: place for place, name in enumerate(task.labels.classes)}
    patients = []
    for patient in cohort.patients:
        known = [image for image in patient.images if image.label in places]
        examples = [Example(_channels(image.pixels), np.array([places[image.label]])) for image in known]
        if examples:
            patients.append(TaskPatient(patient.pseudonym, tuple(examples)))
    return TaskCohort(tuple(patients))


def _channels(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """(h, w) or (h, w, 3) -> (channels, h, w)."""
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def units(task: Task, network: TrainableNetwork, cohort: TaskCohort, entropy: Entropy) -> list[PrivacyUnit]:
    """Every patient that has an example with a target, with what the network's frozen part makes of its examples.

    Each view of an example is drawn once for a round, by a seed that no other patient is in.
    """
    secret = entropy.take(_SECRET)
    found = (unit_of(task, network, patient, secret) for patient in cohort.patients)
    return [unit for unit in found if unit is not None]


def unit_of(task: Task, network: TrainableNetwork, patient: TaskPatient, secret: bytes = b"") -> PrivacyUnit | None:
    """One patient's rows: inputs after the frozen part, and targets. None where no example has a target.

    Raises:
        ValueError: an example is of another shape than the task's input.
    """
    seen = [view for number in range(len(patient.examples)) for view in _views(task, patient, number, secret)]
    if not seen:
        return None
    pixels, targets = (torch.from_numpy(np.stack(parts)) for parts in zip(*seen, strict=True))
    return PrivacyUnit((network.prepare(pixels), targets))


SeenExample = tuple[NDArray[np.float32], NDArray[np.int64] | NDArray[np.float32]]  # pixels, target


def _views(task: Task, patient: TaskPatient, number: int, secret: bytes) -> list[SeenExample]:
    """One example as the network sees it, once or several times; not at all if nothing is known of it.

    A picture that the transforms cannot take is left out, which hangs on this picture alone: an error would show that
    the patient is here.
    """
    example, constants = patient.examples[number], task.training
    if not _has_target(task, example):
        return []
    try:
        seen = as_seen(task, example)
        if not constants.augmentation:
            return [seen]
        from agent.models.transforms import view_seed  # noqa: PLC0415 - MONAI costs seconds

        seeds = (view_seed(secret, patient.pseudonym, number, view) for view in range(constants.views))
        return [view_of(task, seen, seed) for seed in seeds]
    except TransformError:
        return []


def view_of(task: Task, seen: SeenExample, seed: int) -> SeenExample:
    """One random view of what :func:`as_seen` gives, a mask turned alike; ``seed`` is below 2^32.

    Raises:
        TransformError: the augmentation cannot take it.
    """
    from agent.models.transforms import Augmentation  # noqa: PLC0415 - MONAI costs seconds

    mask = seen[1] if task.kind == SEGMENTATION else None
    pixels, turned = Augmentation(task.training.augmentation, task.input.size)(seen[0], mask, seed)  # type: ignore[arg-type]
    return pixels, seen[1] if turned is None else turned


def as_seen(task: Task, example: Example) -> SeenExample:
    """An example after the fixed transforms: pixels (channels, *size), and the target, a mask turned alike.

    Raises:
        ValueError: it is of another shape than the task's input.
        TransformError: the transforms cannot take it.
    """
    if example.pixels.shape != (task.input.channels, *task.input.size):
        raise ValueError("the images do not have the configured shape")
    if not task.input.transforms:
        return example.pixels, example.target
    from agent.models.transforms import InputPipeline  # noqa: PLC0415 - MONAI costs seconds

    mask = example.target if task.kind == SEGMENTATION else None
    pixels, turned = InputPipeline(task.input.transforms, task.input.size)(example.pixels, mask)  # type: ignore[arg-type]
    return pixels, example.target if turned is None else turned


def as_placed(task: Task, pixels: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Pixels after the same transforms as :func:`as_seen`, and where each of them came from.

    Returns:
        (channels, *size); (d + 1, d + 1), from an index of it to one of ``pixels``.
    Raises:
        TransformError: the transforms cannot take it.
    """
    if not task.input.transforms:
        return pixels, np.eye(len(task.input.size) + 1)
    from agent.models.transforms import InputPipeline  # noqa: PLC0415 - MONAI costs seconds

    return InputPipeline(task.input.transforms, task.input.size).placed(pixels)


def predictions(task: Task, network: TrainableNetwork, pixels: NDArray[np.float32]) -> NDArray[Any]:
    """What the network says of inputs after the transforms, scored as in a look: see :class:`ScoredExample`.

    Args:
        task: of the network.
        network: at the released parameters.
        pixels: (n, channels, *size).
    Returns:
        (n, outputs) shares, probabilities or scaled numbers; of a segmentation (n, *size), each pixel's class.
    """
    with torch.no_grad():
        outputs = network.outputs(torch.from_numpy(pixels))
    return np.stack([_shares(task, one).numpy() for one in outputs])


def _has_target(task: Task, example: Example) -> bool:
    """Whether anything is known of it: of several findings or numbers, one is enough."""
    return task.kind in (CLASSIFICATION, SEGMENTATION) or not bool(np.isnan(example.target).all())


def scores(task: Task, network: TrainableNetwork, cohort: TaskCohort) -> NDArray[np.float32]:
    """What the network says of every example, patient after patient: (n, outputs), of masks (n, outputs, *size)."""
    found = [np.zeros((0, task.outputs), np.float32)] if not cohort.patients else []
    with torch.no_grad():
        for patient in cohort.patients:
            pixels = np.stack([as_seen(task, example)[0] for example in patient.examples])
            found.append(network.outputs(torch.from_numpy(pixels)).numpy())
    told: NDArray[np.float32] = np.concatenate(found)
    return told


def scored(task: Task, network: TrainableNetwork, cohort: TaskCohort) -> Iterator[list[ScoredExample]]:
    """What the network says of each patient's examples, beside what is true; of one that it cannot take, nothing."""
    for patient in cohort.patients:
        found = []
        for example in patient.examples:
            try:
                pixels, target = as_seen(task, example)
            except TransformError:
                continue
            found.append(ScoredExample(predictions(task, network, pixels[None])[0], target))
        yield found


def _shares(task: Task, outputs: Tensor) -> Tensor:
    """Of one example's outputs what a look scores: shares, probabilities, numbers, or each pixel's class."""
    if task.kind == CLASSIFICATION:
        return outputs.softmax(dim=0)
    if task.kind == SEGMENTATION:
        return outputs.argmax(dim=0)
    return outputs.sigmoid() if task.kind == MULTI_LABEL else outputs


# -- losses: one number for each row, of that row alone


def row_losses(task: Task) -> RowLosses:
    """The loss that the task names, of rows (inputs, targets)."""
    weights = torch.tensor(task.loss.weights) if task.loss.weights else torch.ones(task.outputs)
    of = {
        "cross-entropy": _cross_entropy if task.kind == CLASSIFICATION else _pixel_entropy,
        "binary-cross-entropy": _binary_entropy,
        "squared-error": _squared_error,
        "absolute-error": _absolute_error,
        "dice": _dice,
        "dice-cross-entropy": _dice_and_entropy,
    }[task.loss.name]

    # The network alone; its parameters stay of 32 bits, and so are each patient's gradient, its norm and the sum.
    half = task.training.precision == BFLOAT16

    def losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast(rows[0].device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            outputs: Tensor = in_full(model(rows[0]))
        return of(outputs, rows[1], weights.to(outputs), task.loss.smoothing)

    return losses


def _cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """(n, c) and (n, 1) -> (n,)."""
    return F.cross_entropy(outputs, targets[:, 0], weights, reduction="none", label_smoothing=smoothing)


def _binary_entropy(outputs: Tensor, targets: Tensor, weights: Tensor, _: float) -> Tensor:
    """(n, f) and (n, f) in {0, 1} or NaN -> (n,): the mean over the findings that are known."""
    known, told = _known(targets)
    return _mean(F.binary_cross_entropy_with_logits(outputs, told.to(outputs), reduction="none") * weights, known)


def _squared_error(outputs: Tensor, targets: Tensor, weights: Tensor, _: float) -> Tensor:
    """(n, q) and (n, q) in [0, 1] or NaN -> (n,)."""
    known, told = _known(targets)
    return _mean((outputs - told.to(outputs)).square() * weights, known)


def _absolute_error(outputs: Tensor, targets: Tensor, weights: Tensor, _: float) -> Tensor:
    """(n, q) and (n, q) in [0, 1] or NaN -> (n,)."""
    known, told = _known(targets)
    return _mean((outputs - told.to(outputs)).abs() * weights, known)


def _known(targets: Tensor) -> tuple[Tensor, Tensor]:
    known = ~torch.isnan(targets)
    return known, torch.where(known, targets, torch.zeros_like(targets))


def _mean(losses: Tensor, known: Tensor) -> Tensor:
    kept = torch.where(known, losses, torch.zeros_like(losses))
    return kept.sum(dim=1) / known.sum(dim=1).clamp(min=1)


def _pixel_entropy(outputs: Tensor, targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """(n, c, *size) and (n, *size) -> (n,): the mean over all pixels."""
    losses = F.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=smoothing)
    return losses.flatten(1).mean(dim=1)


def _dice(outputs: Tensor, targets: Tensor, weights: Tensor, _: float) -> Tensor:
    """1 less the soft Dice overlap (Milletari et al. 2016), its mean over the segments, background not counted."""
    chances = outputs.softmax(dim=1).flatten(2)
    wanted = F.one_hot(targets.flatten(1), outputs.shape[1]).transpose(1, 2).to(chances)
    both = 2.0 * (chances * wanted).sum(dim=2) + _SMOOTH
    overlap = both / (chances.sum(dim=2) + wanted.sum(dim=2) + _SMOOTH)
    return ((1.0 - overlap) * weights)[:, 1:].mean(dim=1)


def _dice_and_entropy(outputs: Tensor, targets: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    return _dice(outputs, targets, weights, smoothing) + _pixel_entropy(outputs, targets, weights, 0.0)


# -- what noisy gradients do


class RoundSgd(torch.optim.SGD):
    """Steps with momentum on h(w) = F(w) + mu / 2 |w - w_start|^2: Li et al. 2020 (arXiv 1812.06127), equation 2.

    The term's gradient, mu (w - w_start), depends on released numbers alone: the round's start and noisy steps. It is
    added after clipping and noise, so that no patient's contribution changes and it costs nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, mu: float) -> None:
        """Remember where the round starts."""
        listed = list(parameters)
        super().__init__(listed, lr=lr, momentum=momentum)
        self._pairs = [(parameter, parameter.detach().clone()) for parameter in listed]
        self._mu = mu

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the noisy gradient and the proximal one."""
        for parameter, start in self._pairs:
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=self._mu)
        loss: float | None = super().step(closure)
        return loss
