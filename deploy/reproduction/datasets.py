"""The papers' data sets, read from a folder of somebody who has them, and the real images that come with packages.

k-SALSA (section 4, supplement): APTOS 2019 and EyePACS, five grades, 512 x 512 RGB. AnonFACES (section 4): CelebA and
RaFD. PrivImage (section 4.1): CIFAR-10 and CelebA, with ImageNet as its public set, and Camelyon17, of which its
successors tell (:mod:`deploy.reproduction.photo_datasets`). What a list must be:
:mod:`deploy.reproduction.file_lists`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from agent.field_of_view import field as field_of_view
from agent.field_of_view import fit
from deploy.reproduction.file_lists import (
    Dataset,
    DatasetError,
    Listed,
    columns_of,
    dataset,
    lines_of,
    none_bad,
    plain,
    there,
)
from deploy.reproduction.photo_datasets import camelyon17, cifar10, imagenet

__all__ = [
    "LOADERS",
    "Dataset",
    "DatasetError",
    "RealImages",
    "aptos",
    "camelyon17",
    "celeba",
    "cifar10",
    "eyepacs",
    "imagenet",
    "rafd",
    "real_images",
]

_GRADES: Final = frozenset("01234")
_EYE: Final = re.compile(r"(?P<patient>[^/\\]+)_(?P<eye>left|right)")
_RAFD: Final = re.compile(
    r"Rafd(?P<camera>\d{3})_(?P<patient>\d{1,3})_(?P<ethnicity>[A-Za-z]+)_(?P<gender>[a-z]+)"
    r"_(?P<expression>[a-z]+)_(?P<gaze>[a-z]+)\.jpe?g"
)
_TILE: Final = 128  # pixels of the retina, of one crop


def aptos(folder: Path, side: int = 512, limit: int | None = None) -> Dataset:
    """APTOS 2019 Blindness Detection: ``train.csv`` (id_code,diagnosis) and ``train_images/ID.png``.

    Args:
        folder: with these two in it.
        side: of the images handed out.
        limit: the most images; the first of the list, and all of a patient or none.
    Raises:
        DatasetError: the layout is another.
    """
    ids, grades = columns_of(folder / "train.csv", ("id_code", "diagnosis"))
    _graded("train.csv", grades)
    listed = Listed(
        [folder / "train_images" / f"{plain('train.csv', i, one)}.png" for i, one in enumerate(ids, 1)],
        ids,
        grades,
        {},
    )
    note = (
        "APTOS names images and no persons: every image counts as a patient of its own. "
        "Two images of one person count as two, so k is of images and not shown to be of persons."
    )
    return dataset("aptos", side, listed, note, limit)


def eyepacs(folder: Path, side: int = 512, limit: int | None = None) -> Dataset:
    """EyePACS' Diabetic Retinopathy Detection: ``trainLabels.csv`` (image,level) and ``train/10_left.jpeg``.

    Args and errors: as of :func:`aptos`. The patient is the number before ``_left`` or ``_right``.
    """
    names, levels = columns_of(folder / "trainLabels.csv", ("image", "level"))
    _graded("trainLabels.csv", levels)
    found = [(number, _EYE.fullmatch(plain("trainLabels.csv", number, name))) for number, name in enumerate(names, 1)]
    none_bad("trainLabels.csv", "image is not a number, _left or _right", [n for n, match in found if match is None])
    sides = [match for _, match in found if match is not None]
    paths = [folder / "train" / f"{name}.jpeg" for name in names]
    listed = Listed(paths, [m["patient"] for m in sides], levels, {"eye": [m["eye"] for m in sides]})
    return dataset("eyepacs", side, listed, "A patient is the number before _left or _right: both eyes.", limit)


def celeba(folder: Path, side: int = 128, limit: int | None = None, label: str = "Male") -> Dataset:
    """CelebA: ``identity_CelebA.txt``, ``list_attr_celeba.txt`` (both in ``list`` or above it), ``img_align_celeba``.

    Args:
        folder: with these in it.
        side: of the images handed out.
        limit: the most images; the first of the list, and all of an identity or none.
        label: the attribute that is the label, "1" or "-1" as in the file.
    Raises:
        DatasetError: the layout is another, or there is no such attribute.
    """
    attributes, values = _celeba_attributes(_either(folder, "list_attr_celeba.txt"))
    if label not in attributes:
        raise DatasetError("list_attr_celeba.txt: it has no attribute of that name to be the label")
    lines = [line.split() for line in lines_of(_either(folder, "identity_CelebA.txt"))]
    bad = [n for n, line in enumerate(lines, 1) if len(line) != 2 or line[0] not in values]
    none_bad("identity_CelebA.txt", "a line is not an image with attributes and its identity", bad)
    paths = [
        folder / "img_align_celeba" / plain("identity_CelebA.txt", n, name) for n, (name, _) in enumerate(lines, 1)
    ]
    columns = {one: [values[name][at] for name, _ in lines] for at, one in enumerate(attributes)}
    listed = Listed(paths, [who for _, who in lines], columns[label], columns)
    return dataset("celeba", side, listed, "A patient is an identity of identity_CelebA.txt.", limit)


def rafd(folder: Path, side: int = 256, limit: int | None = None) -> Dataset:
    """RaFD: files ``Rafd090_01_Caucasian_female_angry_frontal.jpg``; the label is the expression.

    Args and errors: as of :func:`aptos`. The patient is the second number; the first one is the camera's angle.
    """
    paths = sorted(path for path in there(folder).iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    found = [_RAFD.fullmatch(path.name) for path in paths]
    none_bad(
        "rafd", "a file is not named as RaFD names them", [n for n, match in enumerate(found, 1) if match is None]
    )
    names = [match for match in found if match is not None]
    columns = {one: [name[one] for name in names] for one in ("camera", "ethnicity", "gender", "expression", "gaze")}
    listed = Listed(paths, [name["patient"].zfill(3) for name in names], columns["expression"], columns)
    return dataset("rafd", side, listed, "A patient is a model of RaFD, the number after the camera's angle.", limit)


LOADERS: Final[Mapping[str, Callable[[Path, int, int | None], Dataset]]] = {
    "aptos": aptos,
    "eyepacs": eyepacs,
    "celeba": celeba,
    "rafd": rafd,
    "cifar10": cifar10,
    "camelyon17": camelyon17,
    "imagenet": imagenet,
}


def _celeba_attributes(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the attributes, and their values by image: a count, the names, then a line for each image."""
    lines = [line.split() for line in lines_of(path)]
    if len(lines) < 3 or len(lines[0]) != 1:
        raise DatasetError(f"{path.name}: it does not begin with a count and the names of attributes")
    names = lines[1]
    bad = [n for n, line in enumerate(lines, 1) if n > 2 and len(line) != len(names) + 1]
    none_bad(path.name, "a line has not one value for each attribute", bad)
    return names, {line[0]: line[1:] for line in lines[2:]}


def _either(folder: Path, name: str) -> Path:
    return folder / "list" / name if (folder / "list" / name).exists() else folder / name


def _graded(file: str, grades: Sequence[str]) -> None:
    none_bad(file, "a grade is not 0 to 4", [n for n, grade in enumerate(grades, 1) if grade not in _GRADES])


# ------------------------------------------------------------------ real images without a download


@dataclass(frozen=True, slots=True, eq=False)
class RealImages:
    """What was once in front of a pen or a camera."""

    digits: NDArray[np.float32]  # (1797, 8, 8) in [0, 1]
    digit_labels: NDArray[np.int64]  # (1797,)
    faces: NDArray[np.float32]  # (100, 25, 25) in [0, 1], of Labeled Faces in the Wild; whose they are is not said
    retina: NDArray[np.float32]  # (n, side, side, 3) in [0, 1], crops of one photograph that do not overlap


def real_images(side: int = 64) -> RealImages:
    """scikit-learn's digits, scikit-image's faces and its retina, cut up: for tests and tables.

    Args:
        side: of the retina's crops, 128 at most.
    """
    # optional: scikit-image is no dependency of the agent, and nothing but tests and tables needs its images
    from skimage import data  # noqa: PLC0415

    untyped: Any = data
    found = load_digits()
    whole = untyped.retina().astype(np.float32) / np.float32(255)
    top, left, length = field_of_view(whole)
    starts = range(0, length - _TILE + 1, _TILE)
    tiles = [whole[top + y : top + y + _TILE, left + x : left + x + _TILE] for y in starts for x in starts]
    lit = [tile for tile in tiles if float(tile.max(axis=2).min()) > 0.1]  # within the disc
    return RealImages(
        digits=(found.images / 16.0).astype(np.float32),
        digit_labels=found.target.astype(np.int64),
        faces=untyped.lfw_subset()[:100].astype(np.float32),  # the other hundred show no faces
        retina=np.stack([fit(tile, side) for tile in lit]),
    )
