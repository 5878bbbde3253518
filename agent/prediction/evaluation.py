"""How good a model is on a site's own labels: exact figures, and its worst errors. For the site alone. Pure.

Nothing here has noise, so nothing of it may leave: a figure of patients is a release (P8).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, roc_auc_score

from agent.domain import Example
from agent.errors import TransformError
from agent.mechanisms.federated.task_training import as_seen, predictions
from agent.models.networks.trainable import TrainableNetwork
from agent.storage.example_pixels import ImagePlace
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, REGRESSION, SEGMENTATION, Task

WORST: Final = 12  # on the sheet
_SURE: Final = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """One example: what the model says, what is true, and how wrong it is."""

    person: str = field(repr=False)
    pixels: NDArray[np.float32] = field(repr=False)
    said: NDArray[Any] = field(repr=False)
    true: NDArray[Any] = field(repr=False)
    error: float
    places: tuple[ImagePlace, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFigures:
    """All that the site is told."""

    patients: int
    examples: int
    figures: tuple[tuple[str, str], ...]
    worst: tuple[Judged, ...]  # the worst first


def judged(
    task: Task, network: TrainableNetwork, examples: Iterable[tuple[str, Example, tuple[ImagePlace, ...]]]
) -> Iterator[Judged]:
    """Every example that the network can take, one at a time."""
    for person, example, places in examples:
        try:
            pixels, true = as_seen(task, example)
        except TransformError:
            continue
        said = predictions(task, network, pixels[None])[0]
        yield Judged(person, pixels, said, true, _error(task, said, true), places)


def figures(task: Task, found: Iterable[Judged]) -> ModelFigures:
    """The figures over all examples; only the worst are kept with their pixels."""
    worst: list[tuple[float, int, Judged]] = []
    persons, rows = set[str](), list[tuple[NDArray[Any], NDArray[Any]]]()
    for number, one in enumerate(found):
        persons.add(one.person)
        masked = task.kind == SEGMENTATION  # of a mask the overlap alone is kept
        rows.append((_dices(task, one.said, one.true), np.zeros(0)) if masked else (one.said, one.true))
        entry = (one.error, -number, one)
        if len(worst) < WORST:
            heapq.heappush(worst, entry)
        else:
            heapq.heappushpop(worst, entry)
    names = task.labels.classes or task.labels.columns
    told = tuple(_figures(task, names, rows)) if rows else ()
    return ModelFigures(len(persons), len(rows), told, tuple(one for _, _, one in sorted(worst, reverse=True)))


def _error(task: Task, said: NDArray[Any], true: NDArray[Any]) -> float:
    """0 for a right answer, and more for a worse one."""
    if task.kind == CLASSIFICATION:
        return float(1 - said[int(true[0])])
    if task.kind == SEGMENTATION:
        known = _dices(task, said, true)
        return float(1 - np.nanmean(known)) if bool(np.isfinite(known).any()) else 0.0
    apart = np.abs(said - true)
    return float(np.nanmean(apart)) if bool(np.isfinite(apart).any()) else 0.0


def _dices(task: Task, said: NDArray[Any], true: NDArray[Any]) -> NDArray[np.float64]:
    """Dice of each segment; NaN where neither has it."""
    found = np.full(len(task.labels.classes), np.nan)
    for number in range(len(found)):
        own, right = said == number + 1, true == number + 1
        if size := int(own.sum() + right.sum()):
            found[number] = 2 * int((own & right).sum()) / size
    return found


def _figures(
    task: Task, names: Sequence[str], rows: Sequence[tuple[NDArray[Any], NDArray[Any]]]
) -> Iterator[tuple[str, str]]:
    said, true = np.stack([one for one, _ in rows]), np.stack([one for _, one in rows])
    if task.kind == CLASSIFICATION:
        yield from _of_classes(names, said, true[:, 0])
    elif task.kind == SEGMENTATION:
        for name, own in zip(names, said.T, strict=True):
            known = own[np.isfinite(own)]
            yield f"Dice of {name}", f"{known.mean():.4f} over {len(known)} examples" if len(known) else "not known"
    elif task.kind == MULTI_LABEL:
        for at, name in enumerate(names):
            known = np.isfinite(true[:, at])
            yield f"AUC of {name}", _area(true[known, at], said[known, at])
    else:
        assert task.kind == REGRESSION
        for at, name in enumerate(names):
            known, width = np.isfinite(true[:, at]), task.labels.high[at] - task.labels.low[at]
            apart = np.abs(said[known, at] - true[known, at]) * width
            yield f"mean absolute error of {name}", f"{apart.mean():.4g}" if len(apart) else "not known"


def _of_classes(names: Sequence[str], said: NDArray[Any], true: NDArray[Any]) -> Iterator[tuple[str, str]]:
    best = said.argmax(axis=1)
    yield "accuracy", f"{(best == true).mean():.4f}"
    for at, name in enumerate(names):
        yield f"AUC of {name}", _area(true == at, said[:, at])
    for name, line in zip(names, confusion_matrix(true, best, labels=range(len(names))), strict=True):
        counts = ", ".join(f"{count} {other}" for other, count in zip(names, line, strict=True))
        yield f"labelled {name}, and the model says", counts


def _area(true: NDArray[Any], scores: NDArray[Any]) -> str:
    both = len(true) > 0 and 0 < int((true > _SURE).sum()) < len(true)
    return f"{roc_auc_score(true > _SURE, scores):.4f}" if both else "not known: one of the two is missing"
