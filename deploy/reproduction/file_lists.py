"""Lists of images in files, as a published data set's folder has them, checked whole before an image is read.

An image is read, and fitted (:mod:`agent.field_of_view`), when it is asked for. Errors name files of the layout,
columns and numbers in a list, and nothing that stands in it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from agent.domain import Cohort, Image, Patient
from agent.field_of_view import fit
from protos.common.errors import ConfigError

_MOST_TOLD: Final = 5  # problems in one message


class DatasetError(ConfigError, ValueError):
    """A folder is not laid out as the data set is. The text says what is missing, and no content."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images in files, with whose they are and what they show. One entry for each image."""

    name: str
    side: int  # of the images as they are handed out
    paths: tuple[Path, ...] = field(repr=False)
    patients: tuple[str, ...] = field(repr=False)
    labels: tuple[str, ...] = field(repr=False)
    attributes: Mapping[str, tuple[str, ...]] = field(repr=False)
    unit_note: str  # what a "patient" is here
    records: tuple[int, ...] = field(default=(), repr=False)  # of images that share files: which one of its file
    read: Callable[[Path, int], NDArray[np.uint8]] | None = None  # and how it is read, as (h, w, 3)

    def __post_init__(self) -> None:
        """As many of everything, each image once."""
        columns = (self.patients, self.labels, *self.attributes.values())
        if not self.paths or any(len(column) != len(self.paths) for column in columns):
            raise DatasetError(f"{self.name}: there are no images, or a column has not one entry for each")
        if len(set(self._places())) != len(self.paths):
            raise DatasetError(f"{self.name}: an image is listed twice")
        if (len(self.records) if self.read else len(self.paths)) != len(self.paths):
            raise DatasetError(f"{self.name}: images that share files have a number in their file each")
        if not self.side >= 1 or not all(self.patients):
            raise DatasetError(f"{self.name}: the side is positive, and every image is somebody's")

    def __len__(self) -> int:
        """How many images."""
        return len(self.paths)

    def _places(self) -> Iterable[tuple[Path, int]]:
        return zip(self.paths, self.records or (0,) * len(self.paths), strict=True)

    def image(self, index: int) -> NDArray[np.float32]:
        """One image, (side, side, 3) RGB in [0, 1], read from its file.

        Raises:
            DatasetError: it cannot be read, or is smaller than ``side``; it is named by its number in the list, from
            1.
        """
        try:
            pixels = self.read(self.paths[index], self.records[index]) if self.read else _picture(self.paths[index])
        except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError):
            raise DatasetError(f"{self.name}: image {index + 1} of the list cannot be read") from None
        try:
            return fit(pixels.astype(np.float32) / np.float32(255), self.side)
        except ValueError:
            raise DatasetError(
                f"{self.name}: image {index + 1} of the list is smaller than {self.side} x {self.side}"
            ) from None

    def images(self, indices: Iterable[int] | None = None) -> NDArray[np.float32]:
        """Several images, or all, (n, side, side, 3). Raises: DatasetError, see :meth:`image`."""
        return np.stack([self.image(index) for index in (range(len(self)) if indices is None else indices)])

    def rows(self) -> dict[str, tuple[int, ...]]:
        """Which images each patient has, patients in order."""
        found: dict[str, list[int]] = {}
        for index, patient in enumerate(self.patients):
            found.setdefault(patient, []).append(index)
        return {patient: tuple(found[patient]) for patient in sorted(found)}

    def cohort(self, patients: Iterable[str] | None = None) -> Cohort:
        """These patients with all their images, or all patients. Raises: DatasetError, see :meth:`image`."""
        rows = self.rows()
        return Cohort(
            tuple(
                Patient(one, tuple(Image(self.image(index), self.labels[index]) for index in rows[one]))
                for one in sorted(rows if patients is None else set(patients))
            )
        )


def _picture(path: Path) -> NDArray[np.uint8]:
    with Pillow.open(path) as opened:
        pixels: NDArray[np.uint8] = np.asarray(opened.convert("RGB"))
    return pixels


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """A list of images, before its files were looked for."""

    paths: Sequence[Path]
    patients: Sequence[str]
    labels: Sequence[str]
    attributes: Mapping[str, Sequence[str]]


def dataset(name: str, side: int, listed: Listed, note: str, limit: int | None) -> Dataset:
    """The images of a list, or the first of them: all of a patient or none.

    Raises:
        DatasetError: a file is missing, or what is left is no data set.
    """
    kept = limited(listed.patients, limit)
    missing = [index + 1 for index in kept if not listed.paths[index].is_file()]
    none_bad(name, "the file of an image is missing", missing)

    def take(column: Sequence[str]) -> tuple[str, ...]:
        return tuple(column[index] for index in kept)

    attributes = {one: take(column) for one, column in listed.attributes.items()}
    paths = tuple(listed.paths[index] for index in kept)
    return Dataset(name, side, paths, take(listed.patients), take(listed.labels), attributes, note)


def limited(patients: Sequence[str], limit: int | None) -> list[int]:
    """The first patients of a list with all their images, as long as these are not more than ``limit``."""
    if limit is None:
        return list(range(len(patients)))
    if not limit >= 1:
        raise DatasetError("a limit is one image or more")
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


def columns_of(path: Path, names: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Two columns of a CSV file with a head."""
    rows = list(csv.reader(lines_of(path)))
    head = [cell.strip() for cell in rows[0]] if rows else []
    missing = [name for name in names if name not in head]
    if missing:
        raise DatasetError(f"{path.name}: missing columns: {', '.join(missing)}")
    none_bad(
        path.name, "a row has not one cell for each column", [n for n, r in enumerate(rows, 1) if len(r) != len(head)]
    )
    first, second = (head.index(name) for name in names)
    return [row[first].strip() for row in rows[1:]], [row[second].strip() for row in rows[1:]]


def lines_of(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises: DatasetError: it cannot be read."""
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise DatasetError(f"{path.name} is missing or cannot be read") from None


def there(folder: Path) -> Path:
    """The folder itself. Raises: DatasetError: there is none."""
    if not folder.is_dir():
        raise DatasetError("the data set's folder is missing")
    return folder


def plain(file: str, number: int, name: str) -> str:
    """A name that leads to no other folder."""
    if not name or name.startswith(".") or re.search(r"[/\\\0]", name):
        raise DatasetError(f"{file}: entry {number} is not the name of an image")
    return name


def none_bad(file: str, what: str, bad: Sequence[int]) -> None:
    """Raises DatasetError, with the first of the numbers, if anything is wrong."""
    if bad:
        more = " and more" if len(bad) > _MOST_TOLD else ""
        raise DatasetError(f"{file}: {what}: number {', '.join(map(str, bad[:_MOST_TOLD]))}{more} of the list")
