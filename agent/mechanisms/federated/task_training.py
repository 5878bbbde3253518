"""What a task trains at a site: its network, its patients as units, the loss of each example, the optimiser's steps.

Everything that one patient brings hangs on this patient's own examples, on public constants and on fresh randomness,
never on others; what the optimiser sees has its noise already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import Cohort, Example, ExampleRule, Split, TaskCohort, TaskPatient
from agent.dp.clipping import ClippedSum, PrivacyUnit, RowLosses, vmap_engine
from agent.dp.dpsgd import best_engine
from agent.dp.evaluation_sums import ScoredExample
from agent.dp.noise import Entropy
from agent.dp.per_example_gradients import suitable
from agent.errors import TransformError
from agent.models.networks.public_weights import WeightFiles
from agent.models.networks.trainable import TrainableNetwork, build
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, SEGMENTATION, Task

FEW: Final = 4  # patients of a chunk where no rule of ours is: their gradients stand beside each other in memory
_SECRET: Final = 32  # bytes
_SMOOTH: Final = 1.0  # pixels: of an overlap of nothing with nothing


def network_of(task: Task, files: WeightFiles) -> TrainableNetwork:
    """The task's network at its start: public weights where the task names some, else numbers from its seed."""
    return build(task.network, task.input.channels, task.input.size, task.outputs, task.seed, files)


def engine_of(network: TrainableNetwork, expected_batch: float) -> ClippedSum:
    """One pass for some patients with our own rules, or by ``vmap`` where a module that is trained has no rule."""
    return best_engine("cpu", expected_batch) if has_rules(network) else vmap_engine(FEW)


def has_rules(network: TrainableNetwork) -> bool:
    """Whether every module that is trained has a rule of ours for the gradients of patients."""
    owners = (m for m in network.trained.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))
    return all(map(suitable, owners))


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


_View = tuple[NDArray[np.float32], NDArray[np.int64] | NDArray[np.float32]]  # pixels, target


def _views(task: Task, patient: TaskPatient, number: int, secret: bytes) -> list[_View]:
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
        from agent.models.transforms import Augmentation, view_seed  # noqa: PLC0415 - MONAI costs seconds

        vary = Augmentation(constants.augmentation, task.input.size)
        mask = seen[1] if task.kind == SEGMENTATION else None
        views = []
        for view in range(constants.views):
            pixels, turned = vary(seen[0], mask, view_seed(secret, patient.pseudonym, number, view))  # type: ignore[arg-type]
            views.append((pixels, seen[1] if turned is None else turned))
    except TransformError:
        return []
    return views


def as_seen(task: Task, example: Example) -> _View:
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


def _has_target(task: Task, example: Example) -> bool:
    """Whether anything is known of it: of several findings or numbers, one is enough."""
    return task.kind in (CLASSIFICATION, SEGMENTATION) or not bool(np.isnan(example.target).all())


def scores(task: Task, network: TrainableNetwork, cohort: TaskCohort) -> NDArray[np.float32]:
    """What the network says of every example, patient after patient: (n, outputs), of masks (n, outputs, *size)."""
    found = [np.zeros((0, task.outputs), np.float32)] if not cohort.patients else []
    with torch.no_grad():
        for patient in cohort.patients:
            pixels = np.stack([as_seen(task, example)[0] for example in patient.examples])
            found.append(network.trained(network.prepare(torch.from_numpy(pixels))).numpy())
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
            with torch.no_grad():
                (outputs,) = network.trained(network.prepare(torch.from_numpy(pixels[None])))
            found.append(ScoredExample(_shares(task, outputs).numpy(), target))
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

    def losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        outputs: Tensor = model(rows[0])
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
