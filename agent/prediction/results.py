"""What a prediction writes: segmentations or a table, and a sheet to look at. Everything is made in memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.deidentify.attributes import text
from agent.deidentify.segment_list import Segment
from agent.errors import CommandError
from agent.pacs.dimse.storage_scu import StoredObject
from agent.prediction.model_folder import ExportedModel
from agent.prediction.predictor import NotPredicted, OriginalStore, Prediction
from agent.prediction.result_folder import NOTICE
from agent.prediction.segmentation_object import (
    DrawnImage,
    SegmentationSource,
    as_stored,
    part10,
    segmentation,
)
from agent.reports.task_preview import LabelWord, PreviewCard, TaskPreview, planes_of, render
from agent.volumes.errors import NotDefacedError
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, SEGMENTATION, Task

TABLE: Final = "predictions.csv"
SHEET: Final = "predictions.html"
_MOST_CARDS: Final = 48  # of a sheet: it is held in memory
_UIDS: Final = ("PatientID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
_FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would take for one
_WARNING: Final = (
    "Research, not for diagnosis. This page shows images of patients: it must not leave the hospital, in whole or in "
    "part. Delete it when it has been looked at."
)
_LOOK: Final = (
    "Is the input the right part of the body, and the right way round? Letters at its edges say the patient's side.",
    "The model was not tested for diagnosis or treatment. Its card says what it was tested for.",
)


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """The files of a prediction, and what can be sent of them."""

    files: Mapping[str, bytes] = field(repr=False)
    objects: Sequence[StoredObject] = field(repr=False)  # the segmentations


def results(
    model: ExportedModel, store: OriginalStore, found: Sequence[Prediction], segments: Iterable[Segment]
) -> tuple[Results, list[NotPredicted]]:
    """The files of what was predicted, and of what no segmentation could be made, and why.

    Args:
        model: that predicted.
        store: of the images.
        found: at least one prediction.
        segments: that the site lists.
    """
    files = {SHEET: sheet(model.task, model.name, found)}
    if model.task.kind != SEGMENTATION:
        return Results({TABLE: table(model.task, store, found), **files}, ()), []
    source = SegmentationSource(
        model.name, model.sha256, model.task.name, model.task.labels.classes, {one.name: one for one in segments}
    )
    objects, lost = list[StoredObject](), list[NotPredicted]()
    for images in _by_series(store, found, lost):
        try:
            made = segmentation(images, source, len(objects) + 1)
        except CommandError as error:
            lost.append(NotPredicted(str(error), len(images)))
            continue
        body = part10(made)
        objects.append(as_stored(body))
        files[f"segmentation-{len(objects):04d}.dcm"] = body
    return Results(files, objects), lost


def _by_series(
    store: OriginalStore, found: Sequence[Prediction], lost: list[NotPredicted]
) -> Iterable[list[DrawnImage]]:
    """The images of a series that have one size are one object; each volume is one."""
    groups: dict[tuple[object, ...], list[DrawnImage]] = {}
    for number, one in enumerate(found):
        if not one.masks:
            lost.append(NotPredicted("a NIfTI file has no images that a DICOM SEG could refer to", len(one.names)))
        for name, drawn in one.masks:
            header = store.header(name)
            volume = number if one.drawn is not None and one.drawn.ndim == 3 else -1
            alone = number if len(drawn) > 1 else -1  # highdicom takes one file of many frames
            key = (one.person, one.series, text(header, "FrameOfReferenceUID"), *drawn.shape[1:], volume, alone)
            groups.setdefault(key, []).append(DrawnImage(header, drawn))
    return groups.values()


# -- the table


def table(task: Task, store: OriginalStore, found: Sequence[Prediction]) -> bytes:
    """A row for each example: which images it is of, and what the model says."""
    outputs = task.labels.classes or task.labels.columns
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    chosen = ["prediction"] if task.kind == CLASSIFICATION else []
    rows.writerow(["patient", "study_uid", "series_uid", "instance_uid", *outputs, *chosen, "notice"])
    for one in found:
        said = [f"{score:.6g}" for score in one.scores]
        best = [outputs[int(one.scores.argmax())]] if chosen else []
        rows.writerow([*map(_cell, _identity(store, one)), *said, *best, NOTICE])
    return out.getvalue().encode()


def _identity(store: OriginalStore, one: Prediction) -> list[str]:
    """Patient, study, series and the first image, as the files name them; of NIfTI, as the vault does."""
    try:
        header = store.header(one.names[0])
    except NotDefacedError:
        return [one.person, one.study, one.series, one.names[0]]
    return [text(header, keyword) for keyword in _UIDS]


def _cell(value: str) -> str:
    """A patient's id is foreign text: a spreadsheet must not run it."""
    return f"'{value}" if value.startswith(_FORMULAS) else value


# -- the sheet


def words(task: Task, one: Prediction) -> tuple[LabelWord, ...]:
    """What the model says, for people."""
    names = task.labels.classes or task.labels.columns
    if task.kind == SEGMENTATION:
        shares = zip(names, one.scores[1:], range(1, len(names) + 1), strict=True)
        return tuple(LabelWord(f"{n} {s:.1%}", "there" if s else "absent", number) for n, s, number in shares)
    if task.kind == CLASSIFICATION:
        best = int(one.scores.argmax())
        return tuple(
            LabelWord(f"{name} {score:.0%}", "there" if at == best else "absent")
            for at, (name, score) in enumerate(zip(names, one.scores, strict=True))
        )
    if task.kind == MULTI_LABEL:
        pairs = zip(names, one.scores, strict=True)
        return tuple(LabelWord(f"{n} {s:.0%}", "there" if s >= 0.5 else "absent") for n, s in pairs)
    return tuple(LabelWord(f"{name}: {score:.4g}", "there") for name, score in zip(names, one.scores, strict=True))


def card(task: Task, one: Prediction, number: int, said: Sequence[LabelWord]) -> PreviewCard:
    """One example as the network saw it, with what is said of it, and its outlines."""
    colour = task.input.channels == 3 and task.input.example == "image"
    planes = planes_of(one.pixels, one.drawn, list(one.places), colour=colour)
    return PreviewCard(number, tuple(said), planes, (), (float(one.pixels.min()), float(one.pixels.max())))


def sheet(task: Task, model: str, found: Sequence[Prediction]) -> bytes:
    """A page of the first predictions."""
    shown = found[:_MOST_CARDS]
    cards = tuple(card(task, one, number, words(task, one)) for number, one in enumerate(shown, 1))
    told = (f"{len(cards)} of {len(found)} predictions of the model {model}, in the order of the results.",)
    facts = (("model", model), ("task", task.name), ("SHA-256 of the task", task.digest), ("notice", NOTICE))
    page = TaskPreview(
        task.name, facts, told, cards, (), (), title="What the model says", warning=_WARNING, look=_LOOK
    )
    return render(page)
