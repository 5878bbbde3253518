"""What a model says of studies: the same inputs as in training, and segments back on the grid of the images.

Pure but for the store that it reads from. Whether an image becomes an input follows the task's rule, by the code that
a round uses; labels alone are not asked for.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydicom import Dataset

from agent.domain import ExampleRule
from agent.dp.compute_device import AcceleratorLostError, accelerator_failed
from agent.errors import TransformError
from agent.mechanisms.federated.task_training import as_placed, example_rule, predictions
from agent.models.networks.trainable import TrainableNetwork
from agent.storage.example_pixels import (
    ImagePlace,
    cube,
    cube_place,
    on_source,
    picture_place,
    places_of,
    volumes_in,
)
from agent.storage.examples import REASONS, read_found, without_labels
from agent.storage.instance_index import ExampleStore, FoundExample
from agent.volumes.dicom_series import DicomForm
from agent.volumes.errors import REASONS as VOLUME_REASONS
from agent.volumes.errors import NotDefacedError
from policies.tasks.task import REGRESSION, SEGMENTATION, Task

_ASKED: Final = np.zeros(1, np.int64)  # in the place of a target that nobody knows
_NONE: Final[frozenset[str]] = frozenset()
Pixels = NDArray[np.float32]


@contextlib.contextmanager
def of_accelerator() -> Iterator[None]:
    """What an accelerator fails at, of work that a person started, as a sentence.

    Raises:
        AcceleratorLostError: it is gone, or its memory ran out; the text says what to type.
    """
    try:
        yield
    except RuntimeError as fault:
        if not isinstance(fault, torch.OutOfMemoryError) and not accelerator_failed(fault):
            raise
        what = "its memory ran out" if isinstance(fault, torch.OutOfMemoryError) else "it failed"
        told = f"the accelerator was given up: {what}. Nothing was written: type the command with --device cpu"
        raise AcceleratorLostError(told) from None


class OriginalStore(ExampleStore, Protocol):
    """A store that also knows each file as results shall name it."""

    def header(self, name: str) -> Dataset:
        """The header of the file that a result refers to. Raises: NotDefacedError, it is none of DICOM."""


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What the model says of one image, study or volume."""

    names: tuple[str, ...] = field(repr=False)  # of its instances in the store
    person: str = field(repr=False)
    study: str = field(repr=False)
    series: str = field(repr=False)
    pixels: Pixels = field(repr=False)  # (channels, *size), as the network saw it
    scores: NDArray[np.float64] = field(repr=False)  # (outputs,); of a segmentation the share of each class
    drawn: NDArray[np.int64] | None = field(repr=False)  # (*size) of a segmentation, on the network's grid
    masks: tuple[tuple[str, NDArray[np.uint8]], ...] = field(repr=False)  # name, (frames, h, w) on the file's grid
    places: tuple[ImagePlace, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NotPredicted:
    """Why there is no prediction of some images."""

    why: str
    images: int


def predict(
    task: Task,
    network: TrainableNetwork,
    store: ExampleStore,
    excluded: frozenset[str] = _NONE,
    *,
    here: Callable[[ExampleRule], ExampleRule] = lambda rule: rule,
) -> Iterator[Prediction | NotPredicted]:
    """What the model says, one example after the other, and what it says nothing of, and why.

    Args:
        task: of the model.
        network: at its parameters.
        store: of the images.
        excluded: pseudonyms that may not take part.
        here: what the site adds to the task's rule.
    """
    rule = here(example_rule(task))
    yield from _misfits(rule, store)
    found, left = without_labels(store, rule, excluded)
    yield from (NotPredicted(REASONS[one.reason], one.images) for one in left)
    for one in found:
        yield from (
            _of_volumes(task, network, store, rule, one)
            if len(rule.size) == 3
            else _of_picture(task, network, store, rule, one)
        )


def _misfits(rule: ExampleRule, store: ExampleStore) -> Iterator[NotPredicted]:
    """What is of another modality or part of the body: a model says nothing of it."""
    others: Counter[str] = Counter()
    for head in store.heads():
        if head.kind == "mask":
            continue
        if head.modality != rule.modality:
            others[f"it is {head.modality}, and the model takes {rule.modality}"] += 1
        elif rule.body_part and head.body_part != rule.body_part:
            told = head.body_part or "of no body part that is known here"
            others[f"it is {told}, and the model takes {rule.body_part}"] += 1
    yield from (NotPredicted(why, count) for why, count in sorted(others.items()))


def _of_picture(
    task: Task, network: TrainableNetwork, store: ExampleStore, rule: ExampleRule, found: FoundExample
) -> Iterator[Prediction | NotPredicted]:
    count = len(found.heads)
    (seen,) = read_found(store, rule, replace(found, target=_ASKED))
    if isinstance(seen, str):
        yield NotPredicted(REASONS[seen], count)
        return
    try:
        pixels, place = as_placed(task, seen.pixels)
    except TransformError as error:
        yield NotPredicted(str(error), count)
        return
    scores, drawn = _said(task, network, pixels)
    masks: tuple[tuple[str, NDArray[np.uint8]], ...] = ()
    if drawn is not None:
        (head,) = found.heads
        to_file = picture_place(store, rule, head) @ place
        shape = store.pixels(head.name).shape[:2]
        masks = ((head.name, on_source(drawn, to_file, shape)[None]),)
    first = found.heads[0]
    yield Prediction(
        tuple(head.name for head in found.heads), found.person, first.study, first.series, pixels, scores, drawn,
        masks, tuple(places_of(store, rule, found)),
    )  # fmt: skip


def _of_volumes(
    task: Task, network: TrainableNetwork, store: ExampleStore, rule: ExampleRule, found: FoundExample
) -> Iterator[Prediction | NotPredicted]:
    try:
        volumes = volumes_in(store, found)
    except NotDefacedError as refusal:
        yield NotPredicted(VOLUME_REASONS[refusal.code], len(found.heads))
        return
    for source, members in volumes:
        volume = source.real()
        seen = cube(volume, rule)
        why = seen if isinstance(seen, str) else "" if np.ptp(seen) > 0 else "blank"
        if why or isinstance(seen, str):
            yield NotPredicted(REASONS[why], len(members))
            continue
        try:
            pixels, place = as_placed(task, seen)
        except TransformError as error:
            yield NotPredicted(str(error), len(members))
            continue
        scores, drawn = _said(task, network, pixels)
        masks: tuple[tuple[str, NDArray[np.uint8]], ...] = ()
        if drawn is not None:
            whole = on_source(drawn, cube_place(volume, rule) @ place, volume.values.shape)
            masks = tuple(_by_file(whole, source.form, [one.name for one in members]))
        names = tuple(one.name for one in members)
        first = members[0]
        yield Prediction(names, found.person, first.study, first.series, pixels, scores, drawn, masks, ())


def _said(
    task: Task, network: TrainableNetwork, pixels: Pixels
) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
    return readable(task, predictions(task, network, pixels[None])[0])


def readable(task: Task, said: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
    """What a network says of one example, as people read it.

    Returns:
        Shares, probabilities or numbers in their units; of segments, shares of the area, and what was drawn.
    """
    if task.kind == SEGMENTATION:
        drawn = said.astype(np.int64)
        return np.bincount(drawn.ravel(), minlength=task.outputs) / drawn.size, drawn
    scores = said.astype(np.float64)
    if task.kind == REGRESSION:
        low, high = (np.array(ends) for ends in (task.labels.low, task.labels.high))
        scores = low + scores * (high - low)
    return scores, None


def _by_file(whole: NDArray[np.uint8], form: object, names: list[str]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """(i, j, k) of a volume -> (frames, h, w) of each DICOM file; a NIfTI file has no images to refer to."""
    if not isinstance(form, DicomForm):
        return
    for number, name in enumerate(names):
        mine = sorted((frame, at) for at, (file, frame) in enumerate(form.slices) if file == number)
        yield name, np.stack([whole[:, :, at].T for _, at in mine])
