"""A folder of public images with a table of labels, as a task's examples: what simulated sites train on.

``labels.csv`` has a row for each image: ``file`` and ``patient``, a column for each label of the task (``label``
where the task names no table), ``mask`` for segmentation, and if need be ``site`` and ``study``. The first line of
``SOURCE.txt`` says who published the images, and under which licence. Without it nothing is read, because nothing
that a simulation does is reviewed or accounted. Images are PNG, JPEG or NIfTI. DICOM, in which hospitals keep their
patients, is not read. The network sees an image as it would see one of a vault: by the same rules of size, spacing
and window.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from agent.deidentify.record import grey
from agent.domain import Example, ExampleRule, TaskPatient
from agent.field_of_view import fit_to, part_for
from agent.mechanisms.federated.task_training import example_rule
from agent.storage.example_pixels import cube, mask_cube
from agent.storage.examples import REASONS as _WHY
from agent.volumes.errors import NotDefacedError
from agent.volumes.volume_io import read as read_volume
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, SEGMENTATION, Task
from protos.common.errors import ConfigError

TABLE: Final = "labels.csv"
SOURCE: Final = "SOURCE.txt"
_LABEL: Final = "label"  # the column of a task without a table
_PICTURES: Final = (".png", ".jpg", ".jpeg")
_VOLUMES: Final = (".nii", ".nii.gz")
_YES_NO: Final = {"1": 1.0, "0": 0.0, "": float("nan")}
_NONE: Final = "none"
_SHORT: Final = 200  # characters of a source that are shown

Row = Mapping[str, str]
Target = NDArray[np.int64] | NDArray[np.float32]
Seen = tuple[NDArray[np.float32], NDArray[np.int64] | None]


class PublicFolderError(ConfigError, ValueError):
    """The folder cannot be used; the text names the file and the column or key."""


@dataclass(frozen=True, slots=True, eq=False)
class PublicFolder:
    """Public patients and their images, as a task wants them; an image is read when its patient is asked for."""

    root: Path
    task: Task
    source: str  # who published it, and under which licence
    digest: str  # SHA-256 of the table, the source and the files' sizes
    groups: Mapping[str, tuple[str, ...]]  # the table's site, or "" without one -> its patients, sorted
    _rows: Mapping[str, tuple[Row, ...]] = field(repr=False)  # patient -> rows that have a target
    left_out: dict[str, str] = field(default_factory=dict, repr=False)  # file -> why, of those that were read
    _read: dict[str, TaskPatient | None] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, root: Path, task: Task) -> Self:
        """Read the table; no image yet.

        Raises:
            PublicFolderError: no source, no table, or a table without what the task needs.
        """
        source = _source(root)
        raw, rows = _table(root, _columns(task))
        sizes = [_size(root, row[name]) for row in rows for name in ("file", "mask") if row.get(name)]
        digest = hashlib.sha256(f"{source}\n{sizes}\n".encode() + raw).hexdigest()
        kept: dict[str, list[Row]] = {}
        sites: dict[str, str] = {}
        for number, row in enumerate(rows, 2):
            if sites.setdefault(row["patient"], row.get("site", "")) != row.get("site", ""):
                raise PublicFolderError(f"{TABLE}: row {number}: site: the patient is at another site in another row")
            if task.kind == SEGMENTATION or _target(task, row, f"{TABLE}: row {number}") is not None:
                kept.setdefault(row["patient"], []).append(row)
        groups: dict[str, list[str]] = {}
        for patient in sorted(kept):
            groups.setdefault(sites[patient], []).append(patient)
        return cls(
            root,
            task,
            source,
            digest,
            MappingProxyType({site: tuple(found) for site, found in sorted(groups.items())}),
            MappingProxyType({patient: tuple(found) for patient, found in kept.items()}),
        )

    def patient(self, name: str) -> TaskPatient | None:
        """All examples of one patient, which stay in memory; None where every image is left out, as a vault would.

        Raises:
            PublicFolderError: a file of it cannot be read, or does not fit the task.
        """
        if name not in self._read:
            examples = tuple(self._examples(self._rows[name]))
            self._read[name] = TaskPatient(name, examples) if examples else None
        return self._read[name]

    def _examples(self, rows: Sequence[Row]) -> Iterator[Example]:
        rule = example_rule(self.task)
        if not rule.per_study:
            for row in rows:
                seen = _seen(self.root, row, rule)
                if isinstance(seen, str):
                    self.left_out[row["file"]] = seen
                    continue
                pixels, whole = seen
                yield _example(pixels, whole if whole is not None else _target(self.task, row, row["file"]), row)
            return
        studies: dict[str, list[Row]] = {}
        for row in rows:
            studies.setdefault(row["study"], []).append(row)
        for images in studies.values():
            found = [_seen(self.root, row, rule) for row in images[: rule.channels]]
            if why := {row["file"]: seen for row, seen in zip(images, found, strict=False) if isinstance(seen, str)}:
                self.left_out.update(why)
                continue
            made = np.zeros((rule.channels, *rule.size), np.float32)
            for channel, seen in enumerate(found):
                made[channel] = seen[0][0]
            targets = [_target(self.task, row, row["file"]) for row in images]
            if any(not np.array_equal(targets[0], one, equal_nan=True) for one in targets):  # type: ignore[arg-type]
                raise PublicFolderError(f"{TABLE}: study {images[0]['study']}: its images have different labels")
            yield _example(made, targets[0], images[0])


def _source(root: Path) -> str:
    try:
        first = (root / SOURCE).read_text().strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        first = ""
    if not first:
        raise PublicFolderError(
            f"{root.name}/{SOURCE}: its first line must say who published these images and under which licence; a "
            "simulation is for public or made data only, since nothing in it is accounted"
        )
    return first[:_SHORT]


def _columns(task: Task) -> tuple[str, ...]:
    """What the table must have for a task."""
    named = task.labels.columns if task.labels.table else (_LABEL,)
    own = ("mask",) if task.kind == SEGMENTATION else named
    return ("file", "patient", *own, *(("study",) if task.input.example == "study" else ()))


def _table(root: Path, needed: Sequence[str]) -> tuple[bytes, list[Row]]:
    try:
        raw = (root / TABLE).read_bytes()
        lines = list(csv.reader(raw.decode("utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise PublicFolderError(f"{root.name}/{TABLE}: cannot be read ({type(fault).__name__})") from None
    head = lines[0] if lines else []
    if lacking := [name for name in needed if name not in head]:
        raise PublicFolderError(f"{TABLE}: the first row lacks: {', '.join(lacking)}")
    rows = list[Row]()
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(head):
            raise PublicFolderError(f"{TABLE}: row {number}: {len(line)} cells, and the first row has {len(head)}")
        row = dict(zip(head, line, strict=True))
        if empty := [name for name in ("file", "patient") if not row[name]]:
            raise PublicFolderError(f"{TABLE}: row {number}: {empty[0]}: empty")
        rows.append(MappingProxyType(row))
    return raw, rows


def _inside(root: Path, name: str) -> Path:
    """A file of the folder.

    Raises:
        PublicFolderError: it lies elsewhere.
    """
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise PublicFolderError(f"{TABLE}: {name}: not a file of the folder")
    return path


def _size(root: Path, name: str) -> int:
    try:
        return _inside(root, name).stat().st_size
    except OSError as fault:
        raise PublicFolderError(f"{TABLE}: {name}: {fault.strerror}") from None


# -- targets


def _target(task: Task, row: Row, where: str) -> Target | None:
    """What an image should give; None where nothing is known, or where it is none of the task's classes.

    Raises:
        PublicFolderError: a cell is of another kind.
    """
    labels = task.labels
    if task.kind == CLASSIFICATION:
        said = row[labels.columns[0] if labels.table else _LABEL]
        return np.array([labels.classes.index(said)], np.int64) if said in labels.classes else None
    if task.kind == MULTI_LABEL and labels.classes:
        (column,) = labels.columns
        if not row[column]:
            return None
        there = {word for word in row[column].split("|") if word != _NONE}
        return np.array([name in there for name in labels.classes], np.float32)
    read = _binary if task.kind == MULTI_LABEL else _scaled(labels.low, labels.high)
    values = np.array([read(at, row[column], f"{where}: {column}") for at, column in enumerate(labels.columns)])
    return None if bool(np.isnan(values).all()) else values.astype(np.float32)


def _binary(_: int, cell: str, where: str) -> float:
    if cell not in _YES_NO:
        raise PublicFolderError(f"{where}: 0, 1 or empty")
    return _YES_NO[cell]


def _scaled(low: Sequence[float], high: Sequence[float]) -> Callable[[int, str, str], float]:
    def read(at: int, cell: str, where: str) -> float:
        if not cell:
            return float("nan")
        try:
            value = float(cell)
        except ValueError:
            raise PublicFolderError(f"{where}: a number with a point, or empty") from None
        return (min(max(value, low[at]), high[at]) - low[at]) / (high[at] - low[at])

    return read


# -- pixels


def _seen(root: Path, row: Row, rule: ExampleRule) -> Seen | str:
    """(channels, *size) of an image, and its mask (*size) where the task learns one; or why it is left out."""
    path = _inside(root, row["file"])
    mask = _inside(root, row["mask"]) if rule.kind == SEGMENTATION and row["mask"] else None
    if rule.kind == SEGMENTATION and mask is None:
        raise PublicFolderError(f"{TABLE}: {row['file']}: mask: empty")
    wanted = _VOLUMES if len(rule.size) == 3 else _PICTURES
    if not all(one.name.lower().endswith(wanted) for one in (path, mask or path)):
        raise PublicFolderError(f"{TABLE}: {row['file']}: the task takes {' or '.join(wanted)}")
    try:
        return (_of_volume if len(rule.size) == 3 else _of_picture)(path, mask, rule)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        raise PublicFolderError(f"{row['file']}: it, or its mask, cannot be read") from None
    except NotDefacedError as fault:
        raise PublicFolderError(f"{row['file']}: it, or its mask, is no volume ({fault})") from None


def _of_volume(path: Path, mask: Path | None, rule: ExampleRule) -> Seen | str:
    volume = read_volume(path).real()
    pixels = cube(volume, rule)
    if isinstance(pixels, str):
        return _WHY[pixels]
    if mask is None:
        return pixels, None
    numbered = read_volume(mask).real()
    same = numbered.values.shape == volume.values.shape and np.allclose(numbered.affine, volume.affine, atol=1e-3)
    if not same:
        raise PublicFolderError(f"{mask.name}: the mask lies on another grid")
    return pixels, _numbers(mask_cube(numbered, rule), rule, mask)


def _of_picture(path: Path, mask: Path | None, rule: ExampleRule) -> Seen | str:
    if rule.spacing:
        raise PublicFolderError("input.spacing: pictures of a folder do not say how large a pixel is")
    stored, most = _stored(path)
    low, high = rule.window or (0.0, most)
    pixels = np.clip((stored - np.float32(low)) / np.float32(high - low), 0, 1, dtype=np.float32)
    if pixels.ndim == 3 and (rule.channels == 1 or rule.per_study):
        pixels = grey(pixels)
    if pixels.ndim == 2 and rule.channels == 3 and not rule.per_study:
        return _WHY["colour"]
    size = (rule.size[0], rule.size[1])
    try:
        seen = fit_to(pixels, size)
    except ValueError:
        return _WHY["too_small"]
    whole = None if mask is None else _numbers(_at_pixels(_stored(mask)[0], pixels, size, mask), rule, mask)
    return np.ascontiguousarray(seen[None] if seen.ndim == 2 else seen.transpose(2, 0, 1)), whole


def _stored(path: Path) -> tuple[NDArray[np.float32], float]:
    """(h, w) or (h, w, 3) as it is stored, and the largest value that its form can have."""
    with Image.open(path) as picture:
        deep = picture.mode.startswith("I")
        kept = picture if deep or picture.mode in ("L", "RGB") else picture.convert("RGB")
        return np.asarray(kept, np.float32), 65535.0 if deep else 255.0


def _at_pixels(
    whole: NDArray[np.float32], pixels: NDArray[np.float32], size: tuple[int, int], mask: Path
) -> NDArray[np.int64]:
    """The segment at the middle of each pixel of the fitted image."""
    if whole.shape != pixels.shape[:2]:
        raise PublicFolderError(f"{mask.name}: the mask lies on another grid")
    top, left, tall, wide = part_for(pixels, size)
    rows = top + ((np.arange(size[0]) + 0.5) * tall / size[0]).astype(np.intp)
    columns = left + ((np.arange(size[1]) + 0.5) * wide / size[1]).astype(np.intp)
    return np.asarray(whole[np.ix_(rows, columns)], np.int64)


def _numbers(whole: NDArray[np.int64], rule: ExampleRule, mask: Path) -> NDArray[np.int64]:
    if not bool((whole >= 0).all() and (whole <= len(rule.classes)).all()):
        raise PublicFolderError(f"{mask.name}: numbers from 0 to {len(rule.classes)}, in the order of labels.classes")
    return whole


def _example(pixels: NDArray[Any], target: Target | None, row: Row) -> Example:
    if target is None:
        raise PublicFolderError(f"{TABLE}: {row['file']}: no label")
    return Example(pixels.astype(np.float32), target)
