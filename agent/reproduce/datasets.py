"""The papers' data sets, read from a folder of somebody who has them, and the real pictures that come with packages.

k-SALSA (section 4, supplement): APTOS 2019 and EyePACS, five grades, 512 x 512 RGB. AnonFACES (section 4): CelebA and
RaFD. Lists are read at once and checked whole; a picture is read, and fitted (:mod:`agent.stages.fit`), when it is
asked for. Errors name files of the layout, columns and numbers in a list, and nothing that stands in it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from sklearn.datasets import load_digits

from agent.nouns import Cohort, Image, Patient
from agent.stages.fit import field as field_of_view
from agent.stages.fit import fit

_GRADES: Final = frozenset("01234")
_EYE: Final = re.compile(r"(?P<patient>[^/\\]+)_(?P<eye>left|right)")
_RAFD: Final = re.compile(
    r"Rafd(?P<camera>\d{3})_(?P<patient>\d{1,3})_(?P<ethnicity>[A-Za-z]+)_(?P<gender>[a-z]+)"
    r"_(?P<expression>[a-z]+)_(?P<gaze>[a-z]+)\.jpe?g"
)
_MOST_TOLD: Final = 5  # problems in one message
_TILE: Final = 128  # pixels of the retina, of one crop


class BadDataset(ValueError):
    """A folder is not laid out as the data set is. The text says what is missing, and no content."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Pictures in files, with whose they are and what they show. One entry for each picture."""

    name: str
    side: int  # of the pictures as they are handed out
    paths: tuple[Path, ...] = field(repr=False)
    patients: tuple[str, ...] = field(repr=False)
    labels: tuple[str, ...] = field(repr=False)
    attributes: Mapping[str, tuple[str, ...]] = field(repr=False)
    unit_note: str  # what a "patient" is here

    def __post_init__(self) -> None:
        """As many of everything, each picture once."""
        columns = (self.patients, self.labels, *self.attributes.values())
        if not self.paths or any(len(column) != len(self.paths) for column in columns):
            raise BadDataset(f"{self.name}: there are no pictures, or a column has not one entry for each")
        if len(set(self.paths)) != len(self.paths):
            raise BadDataset(f"{self.name}: a picture is listed twice")
        if not self.side >= 1 or not all(self.patients):
            raise BadDataset(f"{self.name}: the side is positive, and every picture is somebody's")

    def __len__(self) -> int:
        """How many pictures."""
        return len(self.paths)

    def image(self, index: int) -> NDArray[np.float32]:
        """One picture, (side, side, 3) RGB in [0, 1], read from its file.

        Raises:
            BadDataset: it cannot be read, or is smaller than ``side``; it is named by its number in the list, from 1.
        """
        try:
            with Pillow.open(self.paths[index]) as opened:
                pixels = np.asarray(opened.convert("RGB"))
        except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError):
            raise BadDataset(f"{self.name}: picture {index + 1} of the list cannot be read") from None
        try:
            return fit(pixels.astype(np.float32) / np.float32(255), self.side)
        except ValueError:
            raise BadDataset(
                f"{self.name}: picture {index + 1} of the list is smaller than {self.side} x {self.side}"
            ) from None

    def images(self, indices: Iterable[int] | None = None) -> NDArray[np.float32]:
        """Several pictures, or all, (n, side, side, 3). Raises: BadDataset, see :meth:`image`."""
        return np.stack([self.image(index) for index in (range(len(self)) if indices is None else indices)])

    def rows(self) -> dict[str, tuple[int, ...]]:
        """Which pictures each patient has, patients in order."""
        found: dict[str, list[int]] = {}
        for index, patient in enumerate(self.patients):
            found.setdefault(patient, []).append(index)
        return {patient: tuple(found[patient]) for patient in sorted(found)}

    def cohort(self, patients: Iterable[str] | None = None) -> Cohort:
        """These patients with all their pictures, or all patients. Raises: BadDataset, see :meth:`image`."""
        rows = self.rows()
        return Cohort(
            tuple(
                Patient(one, tuple(Image(self.image(index), self.labels[index]) for index in rows[one]))
                for one in sorted(rows if patients is None else set(patients))
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Listed:
    """A list of pictures, before its files were looked for."""

    paths: Sequence[Path]
    patients: Sequence[str]
    labels: Sequence[str]
    attributes: Mapping[str, Sequence[str]]


def aptos(folder: Path, side: int = 512, limit: int | None = None) -> Dataset:
    """APTOS 2019 Blindness Detection: ``train.csv`` (id_code,diagnosis) and ``train_images/ID.png``.

    Args:
        folder: with these two in it.
        side: of the pictures handed out.
        limit: the most pictures; the first of the list, and all of a patient or none.
    Raises:
        BadDataset: the layout is another.
    """
    ids, grades = _columns(folder / "train.csv", ("id_code", "diagnosis"))
    _graded("train.csv", grades)
    listed = _Listed(
        [folder / "train_images" / f"{_plain('train.csv', i, one)}.png" for i, one in enumerate(ids, 1)],
        ids,
        grades,
        {},
    )
    note = (
        "APTOS names pictures and no persons: every picture counts as a patient of its own. "
        "Two pictures of one person count as two, so k is of pictures and not shown to be of persons."
    )
    return _dataset("aptos", side, listed, note, limit)


def eyepacs(folder: Path, side: int = 512, limit: int | None = None) -> Dataset:
    """EyePACS' Diabetic Retinopathy Detection: ``trainLabels.csv`` (image,level) and ``train/10_left.jpeg``.

    Args and errors: as of :func:`aptos`. The patient is the number before ``_left`` or ``_right``.
    """
    names, levels = _columns(folder / "trainLabels.csv", ("image", "level"))
    _graded("trainLabels.csv", levels)
    found = [
        (number, _EYE.fullmatch(_plain("trainLabels.csv", number, name))) for number, name in enumerate(names, 1)
    ]
    _none_bad("trainLabels.csv", "image is not a number, _left or _right", [n for n, match in found if match is None])
    sides = [match for _, match in found if match is not None]
    paths = [folder / "train" / f"{name}.jpeg" for name in names]
    listed = _Listed(paths, [m["patient"] for m in sides], levels, {"eye": [m["eye"] for m in sides]})
    return _dataset("eyepacs", side, listed, "A patient is the number before _left or _right: both eyes.", limit)


def celeba(folder: Path, side: int = 128, limit: int | None = None, label: str = "Male") -> Dataset:
    """CelebA: ``identity_CelebA.txt``, ``list_attr_celeba.txt`` (both in ``list`` or above it), ``img_align_celeba``.

    Args:
        folder: with these in it.
        side: of the pictures handed out.
        limit: the most pictures; the first of the list, and all of an identity or none.
        label: the attribute that is the label, "1" or "-1" as in the file.
    Raises:
        BadDataset: the layout is another, or there is no such attribute.
    """
    attributes, values = _celeba_attributes(_either(folder, "list_attr_celeba.txt"))
    if label not in attributes:
        raise BadDataset("list_attr_celeba.txt: it has no attribute of that name to be the label")
    lines = [line.split() for line in _lines(_either(folder, "identity_CelebA.txt"))]
    bad = [n for n, line in enumerate(lines, 1) if len(line) != 2 or line[0] not in values]
    _none_bad("identity_CelebA.txt", "a line is not a picture with attributes and its identity", bad)
    paths = [
        folder / "img_align_celeba" / _plain("identity_CelebA.txt", n, name) for n, (name, _) in enumerate(lines, 1)
    ]
    columns = {one: [values[name][at] for name, _ in lines] for at, one in enumerate(attributes)}
    listed = _Listed(paths, [who for _, who in lines], columns[label], columns)
    return _dataset("celeba", side, listed, "A patient is an identity of identity_CelebA.txt.", limit)


def rafd(folder: Path, side: int = 256, limit: int | None = None) -> Dataset:
    """RaFD: files ``Rafd090_01_Caucasian_female_angry_frontal.jpg``; the label is the expression.

    Args and errors: as of :func:`aptos`. The patient is the second number; the first one is the camera's angle.
    """
    paths = sorted(path for path in _folder(folder).iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    found = [_RAFD.fullmatch(path.name) for path in paths]
    _none_bad(
        "rafd", "a file is not named as RaFD names them", [n for n, match in enumerate(found, 1) if match is None]
    )
    names = [match for match in found if match is not None]
    columns = {one: [name[one] for name in names] for one in ("camera", "ethnicity", "gender", "expression", "gaze")}
    listed = _Listed(paths, [name["patient"].zfill(3) for name in names], columns["expression"], columns)
    return _dataset("rafd", side, listed, "A patient is a model of RaFD, the number after the camera's angle.", limit)


LOADERS: Final[Mapping[str, Callable[[Path, int, int | None], Dataset]]] = {
    "aptos": aptos,
    "eyepacs": eyepacs,
    "celeba": celeba,
    "rafd": rafd,
}


def _dataset(name: str, side: int, listed: _Listed, note: str, limit: int | None) -> Dataset:
    kept = _limited(listed.patients, limit)
    missing = [index + 1 for index in kept if not listed.paths[index].is_file()]
    _none_bad(name, "the file of a picture is missing", missing)

    def take(column: Sequence[str]) -> tuple[str, ...]:
        return tuple(column[index] for index in kept)

    attributes = {one: take(column) for one, column in listed.attributes.items()}
    paths = tuple(listed.paths[index] for index in kept)
    return Dataset(name, side, paths, take(listed.patients), take(listed.labels), attributes, note)


def _limited(patients: Sequence[str], limit: int | None) -> list[int]:
    """The first patients of a list with all their pictures, as long as these are not more than ``limit``."""
    if limit is None:
        return list(range(len(patients)))
    if not limit >= 1:
        raise BadDataset("a limit is one picture or more")
    sizes: dict[str, int] = {}
    for one in patients:
        sizes[one] = sizes.get(one, 0) + 1
    chosen, total = set[str](), 0
    for one, count in sizes.items():
        total += count
        if total > limit:
            break
        chosen.add(one)
    return [index for index, one in enumerate(patients) if one in chosen]


def _columns(path: Path, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Two columns of a CSV file with a head."""
    rows = list(csv.reader(_lines(path)))
    head = [cell.strip() for cell in rows[0]] if rows else []
    missing = [name for name in names if name not in head]
    if missing:
        raise BadDataset(f"{path.name}: missing columns: {', '.join(missing)}")
    _none_bad(
        path.name, "a row has not one cell for each column", [n for n, r in enumerate(rows, 1) if len(r) != len(head)]
    )
    first, second = (head.index(name) for name in names)
    return [row[first].strip() for row in rows[1:]], [row[second].strip() for row in rows[1:]]


def _celeba_attributes(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the attributes, and their values by picture: a count, the names, then a line for each picture."""
    lines = [line.split() for line in _lines(path)]
    if len(lines) < 3 or len(lines[0]) != 1:
        raise BadDataset(f"{path.name}: it does not begin with a count and the names of attributes")
    names = lines[1]
    bad = [n for n, line in enumerate(lines, 1) if n > 2 and len(line) != len(names) + 1]
    _none_bad(path.name, "a line has not one value for each attribute", bad)
    return names, {line[0]: line[1:] for line in lines[2:]}


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise BadDataset(f"{path.name} is missing or cannot be read") from None


def _either(folder: Path, name: str) -> Path:
    return folder / "list" / name if (folder / "list" / name).exists() else folder / name


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise BadDataset("the data set's folder is missing")
    return folder


def _graded(file: str, grades: Sequence[str]) -> None:
    _none_bad(file, "a grade is not 0 to 4", [n for n, grade in enumerate(grades, 1) if grade not in _GRADES])


def _plain(file: str, number: int, name: str) -> str:
    """A name that leads to no other folder."""
    if not name or name.startswith(".") or re.search(r"[/\\\0]", name):
        raise BadDataset(f"{file}: entry {number} is not the name of a picture")
    return name


def _none_bad(file: str, what: str, bad: Sequence[int]) -> None:
    if bad:
        more = " and more" if len(bad) > _MOST_TOLD else ""
        raise BadDataset(f"{file}: {what}: number {', '.join(map(str, bad[:_MOST_TOLD]))}{more} of the list")


# ------------------------------------------------------------------ real pictures without a download


@dataclass(frozen=True, slots=True, eq=False)
class RealPictures:
    """What was once in front of a pen or a camera."""

    digits: NDArray[np.float32]  # (1797, 8, 8) in [0, 1]
    digit_labels: NDArray[np.int64]  # (1797,)
    faces: NDArray[np.float32]  # (100, 25, 25) in [0, 1], of Labeled Faces in the Wild; whose they are is not said
    retina: NDArray[np.float32]  # (n, side, side, 3) in [0, 1], crops of one photograph that do not overlap


def real_pictures(side: int = 64) -> RealPictures:
    """scikit-learn's digits, scikit-image's faces and its retina, cut up: for tests and tables.

    Args:
        side: of the retina's crops, 128 at most.
    """
    # optional: scikit-image is no dependency of the agent, and nothing but tests and tables needs its pictures
    from skimage import data  # noqa: PLC0415

    untyped: Any = data
    found = load_digits()
    whole = untyped.retina().astype(np.float32) / np.float32(255)
    top, left, length = field_of_view(whole)
    starts = range(0, length - _TILE + 1, _TILE)
    tiles = [whole[top + y : top + y + _TILE, left + x : left + x + _TILE] for y in starts for x in starts]
    lit = [tile for tile in tiles if float(tile.max(axis=2).min()) > 0.1]  # within the disc
    return RealPictures(
        digits=(found.images / 16.0).astype(np.float32),
        digit_labels=found.target.astype(np.int64),
        faces=untyped.lfw_subset()[:100].astype(np.float32),  # the other hundred show no faces
        retina=np.stack([fit(tile, side) for tile in lit]),
    )
