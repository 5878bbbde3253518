"""Chest radiographs with five findings: MIMIC-CXR-JPG 2.0.0 from its folder, and made-up ones in the same shape.

Privacy Distillation (section 4.1) is of MIMIC-CXR 2.0.0: 45,453 images of 25,852 patients, split by patient, and "10%
of the patients left for testing had half of their images and report pairs moved to the training dataset". Its list of
images is not published, and the split that comes with the data has 293 patients for testing: :func:`parted` draws one
by patient, and :func:`moved` moves the halves. The labels are CheXpert's, made by machine from the reports (Irvin et
al. 2019); no report is read here.

A list is read line by line, and only the images that are handed out are opened. Errors name files of the layout,
columns and numbers in a list, and nothing that stands in it.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from agent.field_of_view import fit
from deploy.phantoms.chest import FINDINGS, ChestPatient, Finding, label_of, stacked
from deploy.reproduction.file_lists import DatasetError, limited, none_bad, there

Part = Literal["train", "validate", "test"]
PARTS: Final[tuple[Part, ...]] = ("train", "validate", "test")
NOTE: Final = (
    "A patient is a subject_id. Frontal views (PA, AP) of studies that CheXpert labelled; a finding is present where "
    "its label is 1.0: uncertain (-1.0), negative and not mentioned count as absent."
)

_LIST: Final = "mimic-cxr-2.0.0-{}.csv.gz"  # 2.1.0 kept these names
_COLUMNS: Final[dict[str, Finding]] = {
    "Atelectasis": "atelectasis",
    "Cardiomegaly": "cardiomegaly",
    "Consolidation": "consolidation",
    "Edema": "edema",
    "Pleural Effusion": "effusion",
}
_LABELS: Final = {"": False, "1": True, "0": False, "-1": False}
_SUBJECT: Final = re.compile(r"1\d{7}")
_STUDY: Final = re.compile(r"\d{8}")
_PICTURE: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{8}){4}")
_LONGEST: Final = 1 << 16  # characters of a line
_MOST_LINES: Final = 2_000_000  # MIMIC's longest list has 377,111
_MOST_BYTES: Final = 4 << 30  # of images at once
_MOST_PIXELS: Final = 1 << 26  # of one file; MIMIC's largest have 15 million


@dataclass(frozen=True, slots=True, eq=False)
class Chests:
    """Frontal radiographs, with whose they are, what they show and what they are for."""

    images: NDArray[np.uint8]  # (n, s, s), bright is dense
    owners: NDArray[np.int64]  # (n,) a number for each patient, from 0
    findings: NDArray[np.bool_]  # (n, 5) in the order of FINDINGS
    part: NDArray[np.int64]  # (n,) index of PARTS

    def __post_init__(self) -> None:
        """One of each for each image, and known parts."""
        count = len(self.images)
        if self.images.ndim != 3 or not self.images.size or self.images.shape[1] != self.images.shape[2]:
            raise ValueError("radiographs are (n, s, s), not none")
        if self.images.dtype != np.uint8 or self.findings.dtype != np.bool_:
            raise ValueError("radiographs are uint8, and findings are true or false")
        if not self.owners.shape == self.part.shape == (count,) or self.findings.shape != (count, len(FINDINGS)):
            raise ValueError("a radiograph has an owner, five findings and a part")
        if not self.owners.min() >= 0 or not 0 <= self.part.min() <= self.part.max() < len(PARTS):
            raise ValueError("owners are numbers from 0, and parts are of PARTS")

    def __len__(self) -> int:
        """How many images."""
        return len(self.images)

    @property
    def labels(self) -> tuple[str, ...]:
        """Of each image: "none", or the names of its findings, as in "edema+effusion"."""
        return tuple(
            label_of([one for one, shown in zip(FINDINGS, row, strict=True) if shown]) for row in self.findings
        )

    def rows(self, part: Part) -> NDArray[np.int64]:
        """Which images are in this part."""
        found: NDArray[np.int64] = np.flatnonzero(self.part == PARTS.index(part)).astype(np.int64)
        return found

    def take(self, rows: NDArray[np.int64]) -> Chests:
        """Some of the images; patients keep their numbers. Raises: ValueError: none are taken."""
        return Chests(self.images[rows], self.owners[rows], self.findings[rows], self.part[rows])


def chests_from_phantoms(patients: Sequence[ChestPatient]) -> Chests:
    """Made-up radiographs, all of them for training (:func:`parted` draws who is left for testing)."""
    images, owners, findings = stacked(patients)
    pixels = np.rint(images * 255).astype(np.uint8)
    return Chests(pixels, owners, findings, np.zeros(len(owners), np.int64))


def parted(chests: Chests, share: float, rng: np.random.Generator) -> Chests:
    """Leave a share of the patients for testing, all others are for training: whatever the parts were.

    The paper's own: 2,132 patients of 25,400, a share of 0.084.

    Raises:
        ValueError: nobody would be left for one of the two.
    """
    people = np.unique(chests.owners)
    count = round(share * len(people)) if 0 < share < 1 else 0
    if not 1 <= count < len(people):
        raise ValueError("a share of the patients is for testing, and somebody is left for training")
    tested = np.isin(chests.owners, rng.choice(people, count, replace=False))
    return replace(chests, part=np.where(tested, PARTS.index("test"), PARTS.index("train")).astype(np.int64))


def moved(chests: Chests, rng: np.random.Generator, share: float = 0.1) -> Chests:
    """Move half of the images of some of the patients left for testing to training (section 4.1).

    Such a patient is in both parts, and no image is: what a model gives away of a patient it knows is asked with an
    image that it does not know.

    Args:
        chests: with a part for testing.
        rng: draws the patients and which half of each, rounded down.
        share: of the patients for testing; rounded up, of those with two images or more.
    Raises:
        ValueError: no patient for testing has two images, or the share is not in (0, 1].
    """
    rows = chests.rows("test")
    people, counts = np.unique(chests.owners[rows], return_counts=True)
    able = people[counts >= 2]
    if not 0 < share <= 1 or not len(able):
        raise ValueError("a share of the patients for testing is moved, of whom somebody has two images")
    part = chests.part.copy()
    for one in rng.choice(able, min(len(able), int(np.ceil(share * len(people)))), replace=False):
        own = rows[chests.owners[rows] == one]
        part[rng.choice(own, len(own) // 2, replace=False)] = PARTS.index("train")
    return replace(chests, part=part)


# ------------------------------------------------------------------ MIMIC-CXR-JPG


@dataclass(frozen=True, slots=True)
class _Listed:
    """One frontal image of the lists."""

    picture: str  # dicom_id
    patient: str  # subject_id
    study: str
    line: int  # in the metadata, from 1 for the first image


def mimic_cxr(folder: Path, side: int = 512, limit: int | None = None) -> Chests:
    """MIMIC-CXR-JPG 2.0.0 as PhysioNet publishes it, in the parts that come with it.

    ``mimic-cxr-2.0.0-metadata.csv.gz``, ``-chexpert.csv.gz``, ``-split.csv.gz`` and
    ``files/p10/p10000032/s50414267/<dicom_id>.jpg``. What an image and a label are: :data:`NOTE`.

    Args:
        folder: with these in it. ``files`` may be a link; what is in it must not lead out of it.
        side: of the images handed out: the centred square (:func:`agent.field_of_view.fit`), never enlarged.
        limit: the most images: those of the first patients of the list, all of a patient or none.
    Returns:
        Images in the order of the metadata; patients are numbered in the same order.
    Raises:
        DatasetError: the layout is another, an id is none or there twice, a patient is in two parts, a file is
        missing,
            unreadable or smaller than ``side``, or the images would take more than 4 GiB.
    """
    if not side >= 1:
        raise DatasetError("mimic-cxr: the side of an image is positive")
    frontal = _frontal(there(folder))
    findings = _findings(folder, {one.study: one.patient for one in frontal})
    known = [one for one in frontal if one.study in findings]
    kept = [known[index] for index in limited([one.patient for one in known], limit)]
    if not kept:
        raise DatasetError("mimic-cxr: no frontal image has labels, or the limit is less than the first patient's")
    if not len(kept) * side * side <= _MOST_BYTES:
        raise DatasetError(f"mimic-cxr: set a limit of at most {_MOST_BYTES // (side * side)} images of this side")
    parts = _parts(folder, {one.picture: one.patient for one in kept})
    paths = _paths(folder / "files", kept)
    images = np.empty((len(kept), side, side), np.uint8)
    for row, path in enumerate(paths):
        images[row] = _picture(path, side, kept[row].line)
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(one.patient for one in kept))}
    return Chests(
        images,
        np.array([numbers[one.patient] for one in kept], np.int64),
        np.array([findings[one.study] for one in kept], np.bool_),
        np.array([parts[one.picture] for one in kept], np.int64),
    )


def _frontal(folder: Path) -> list[_Listed]:
    """The frontal images of the metadata, in its order."""
    name, found, seen = _LIST.format("metadata"), list[_Listed](), set[str]()
    patients = dict[str, str]()
    for line, (picture, patient, study, view) in _lines(
        folder / name, ("dicom_id", "subject_id", "study_id", "ViewPosition")
    ):
        if not (_PICTURE.fullmatch(picture) and _SUBJECT.fullmatch(patient) and _STUDY.fullmatch(study)):
            none_bad(name, "an id is not one of MIMIC's", [line])
        if picture in seen:
            none_bad(name, "an image is there twice", [line])
        if patients.setdefault(study, patient) != patient:
            none_bad(name, "a study is of two patients", [line])
        seen.add(picture)
        if view in ("PA", "AP"):
            found.append(_Listed(picture, patient, study, line))
    return found


def _findings(folder: Path, studies: dict[str, str]) -> dict[str, list[bool]]:
    """The five findings, in the order of FINDINGS, of those of the studies that have labels."""
    name, found = _LIST.format("chexpert"), dict[str, list[bool]]()
    for line, (patient, study, *cells) in _lines(folder / name, ("subject_id", "study_id", *_COLUMNS)):
        if study not in studies:
            continue
        labels = [cell.removesuffix(".0") for cell in cells]
        if not set(labels) <= set(_LABELS):
            none_bad(name, "a label is not 1.0, 0.0, -1.0 or empty", [line])
        if study in found or studies[study] != patient:
            none_bad(name, "a study is there twice, or another patient's", [line])
        shown = {finding: _LABELS[label] for finding, label in zip(_COLUMNS.values(), labels, strict=True)}
        found[study] = [shown[one] for one in FINDINGS]
    return found


def _parts(folder: Path, pictures: dict[str, str]) -> dict[str, int]:
    """The part of each of the images; no patient is in two."""
    name, found, own = _LIST.format("split"), dict[str, int](), dict[str, str]()
    for line, (picture, patient, part) in _lines(folder / name, ("dicom_id", "subject_id", "split")):
        if part not in PARTS:
            none_bad(name, f"a part is not one of {', '.join(PARTS)}", [line])
        if own.setdefault(patient, part) != part:
            none_bad(name, "a patient is in two parts", [line])
        if picture not in pictures:
            continue
        if picture in found or pictures[picture] != patient:
            none_bad(name, "an image is there twice, or another patient's", [line])
        found[picture] = PARTS.index(part)
    if len(found) != len(pictures):
        raise DatasetError(f"{name}: {len(pictures) - len(found)} images of the metadata are in no part")
    return found


def _lines(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """These columns of a packed list, line by line, with the number of the line, from 1 after the head."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
            rows = csv.reader(_bounded(path.name, iter(lambda: stream.readline(_LONGEST), "")))
            head = next(rows, [])
            missing = [name for name in columns if name not in head]
            if missing:
                raise DatasetError(f"{path.name}: missing columns: {', '.join(missing)}")
            at = [head.index(name) for name in columns]
            for line, row in enumerate(rows, 1):
                if len(row) != len(head):
                    none_bad(path.name, "a row has not one cell for each column", [line])
                yield line, tuple(row[index].strip() for index in at)
    except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{path.name} is missing or cannot be read") from None


def _bounded(name: str, lines: Iterator[str]) -> Iterator[str]:
    """A packed file can unpack to anything: neither one line nor all of them may fill the memory."""
    for number, line in enumerate(lines):
        if number > _MOST_LINES or len(line) >= _LONGEST:
            raise DatasetError(f"{name}: it has more lines, or longer ones, than a list of MIMIC's")
        yield line


def _paths(root: Path, kept: Sequence[_Listed]) -> list[Path]:
    """The file of each image, inside ``root`` by its name and through every link."""
    paths = [root / f"p{p.patient[:2]}" / f"p{p.patient}" / f"s{p.study}" / f"{p.picture}.jpg" for p in kept]
    none_bad("mimic-cxr", "the file of an image is missing", _lines_where(kept, [not p.is_file() for p in paths]))
    real = root.resolve()
    outside = [not path.resolve().is_relative_to(real) for path in paths]
    none_bad("mimic-cxr", "the file of an image lies outside the folder", _lines_where(kept, outside))
    return paths


def _lines_where(kept: Sequence[_Listed], bad: Sequence[bool]) -> list[int]:
    return [one.line for one, wrong in zip(kept, bad, strict=True) if wrong]


def _picture(path: Path, side: int, line: int) -> NDArray[np.uint8]:
    """One image (side, side), read no finer than it needs to be."""
    try:
        with Pillow.open(path, formats=("JPEG",)) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise DatasetError(f"mimic-cxr: image {line} of the list has more pixels than a radiograph")
            opened.draft("L", (2 * side, 2 * side))  # JPEG unpacks at 1/2, 1/4 or 1/8: never less than asked for
            pixels = np.asarray(opened.convert("L"), np.float32) / np.float32(255)
    except (OSError, SyntaxError, Pillow.DecompressionBombError):
        raise DatasetError(f"mimic-cxr: image {line} of the list cannot be read") from None
    try:
        return np.rint(fit(pixels, side) * 255).astype(np.uint8)
    except ValueError:
        raise DatasetError(f"mimic-cxr: image {line} of the list is smaller than {side} x {side}") from None
