"""Made patients of a task's form: for a step whose time and memory are to be known before a patient is read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from agent.domain import Example, TaskCohort, TaskPatient
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, SEGMENTATION, Task


def made_cohort(task: Task, patients: int) -> TaskCohort:
    """So many, each with as many random examples as one patient brings to a step; always the same."""
    dice = np.random.default_rng(0)
    return TaskCohort(tuple(TaskPatient(f"{i:06d}", tuple(_examples(task, dice))) for i in range(patients)))


def _examples(task: Task, dice: np.random.Generator) -> Iterable[Example]:
    for _ in range(task.training.images_per_patient):
        pixels = dice.random((task.input.channels, *task.input.size), np.float32)
        yield Example(pixels, _target(task, dice))


def _target(task: Task, dice: np.random.Generator) -> NDArray[np.int64] | NDArray[np.float32]:
    if task.kind == CLASSIFICATION:
        return dice.integers(task.outputs, size=1)
    if task.kind == SEGMENTATION:
        return dice.integers(task.outputs, size=task.input.size)
    known = dice.random(task.outputs, np.float32)
    return np.round(known) if task.kind == MULTI_LABEL else known
