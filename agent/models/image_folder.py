"""Public images from a folder, to train networks on: PNG and JPEG, fitted to one size. Nobody's patients."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from agent.field_of_view import fit
from agent.models.image_tensors import to_bytes
from protos.common.errors import ConfigError

_SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})
_MOST_PIXELS: Final = 1 << 27
_DEEP: Final = frozenset({"I", "F", "I;16", "I;16L", "I;16B", "I;16N"})  # modes of grey images of more than 8 bits
_WHITE: Final = 65_535
_FAULTS: Final = (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError)


class ImageFolderError(ConfigError, ValueError):
    """The folder cannot be used for training; the text gives the problem and the number of files."""


def read_image_folder(
    folder: Path, side: int, grey: bool, say: Callable[[int, int], None] = lambda _done, _all: None
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Every image below a folder, fitted to a square, in the order of their names.

    Args:
        folder: looked through with all that is below it.
        side: pixels; an image whose square, once its dark border is cut (:mod:`agent.field_of_view`), is smaller is
            passed over.
        grey: one channel, else three.
        say: told how many of how many are read.
    Returns:
        (n, side, side) or (n, side, side, 3) uint8, and the n paths relative to the folder.
    Raises:
        ImageFolderError: no folder, or no image in it that can be used.
    """
    if not folder.is_dir():
        raise ImageFolderError(f"{folder.name} is not a folder")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    kept: list[NDArray[np.uint8]] = []
    names: list[str] = []
    for number, path in enumerate(paths, 1):
        picture = _read(path, side, grey)
        if picture is not None:
            kept.append(picture)
            names.append(path.relative_to(folder).as_posix())
        say(number, len(paths))
    if not kept:
        raise ImageFolderError(
            f"{folder.name}: {len(paths)} image file(s), and none that can be read and has {side} pixels a side "
            "once its dark border is cut"
        )
    return np.stack(kept), tuple(names)


def _read(path: Path, side: int, grey: bool) -> NDArray[np.uint8] | None:
    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                return None
            return to_bytes(fit(_unit(opened, grey), side))
    except _FAULTS:
        return None


def _unit(opened: Image.Image, grey: bool) -> NDArray[np.float32]:
    """(h, w) or (h, w, 3) in [0, 1]. Sixteen bits are kept; Pillow would clip them to white.

    Raises:
        ValueError: numbers beyond sixteen bits, of which nobody knows what is white.
    """
    if opened.mode not in _DEEP:
        return np.asarray(opened.convert("L" if grey else "RGB"), dtype=np.float32) / np.float32(255)
    deep = np.asarray(opened)
    if not (opened.mode != "F" and deep.min() >= 0 and deep.max() <= _WHITE):
        raise ValueError("an image has 8 or 16 bits")
    unit = (deep / _WHITE).astype(np.float32)
    return unit if grey else np.repeat(unit[..., np.newaxis], 3, axis=2)


def read_identities(path: Path, names: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Who is on each image, from a CSV with the columns file and identity.

    Args:
        path: of the CSV.
        names: of the images, relative to their folder.
    Returns:
        The places (m,) in ``names`` of the images that are listed, and whose they are (m,), as whole numbers.
    Raises:
        ImageFolderError: no such file or columns, an image of two people, or no image of the folder in it.
    """
    whose = _column(path, "identity")
    order = {identity: i for i, identity in enumerate(sorted(set(whose.values())))}
    places = _places(whose, names, path.name)
    return places, np.array([order[whose[names[i]]] for i in places], np.int64)


def read_labels(path: Path | None, names: tuple[str, ...]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """What each image shows, from a CSV with the columns file and label, or from the folder that it lies in.

    Args:
        path: of the CSV; None: an image's folder is its label, and ``train/zebra/1.png`` shows a zebra.
        names: of the images, relative to their folder.
    Returns:
        The places (m,) in ``names`` of the images that have a label, rising, and their labels (m,).
    Raises:
        ImageFolderError: no such file or columns, an image with two labels or in no folder, or none with a label.
    """
    if path is not None:
        found = _column(path, "label")
        places = _places(found, names, path.name)
        return places, tuple(found[names[i]] for i in places)
    loose = sum("/" not in name for name in names)
    if loose:
        raise ImageFolderError(f"{loose} image(s) are not in a folder that names their label")
    return np.arange(len(names), dtype=np.int64), tuple(name.split("/")[-2] for name in names)


def _column(path: Path, column: str) -> dict[str, str]:
    """The files and one other column of a CSV."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error):
        raise ImageFolderError(f"{path.name} is not a CSV file in UTF-8") from None
    if not rows or not {"file", column} <= rows[0].keys():
        raise ImageFolderError(f"{path.name} has the columns file and {column}")
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        name, value = row["file"], row[column]
        if not name or not value or found.setdefault(name, value) != value:
            raise ImageFolderError(f"{path.name}: row {number} has no file or no {column}, or repeats an image")
    return found


def _places(found: dict[str, str], names: tuple[str, ...], source: str) -> NDArray[np.int64]:
    places = [i for i, name in enumerate(names) if name in found]
    if not places:
        raise ImageFolderError(f"{source} names no image of the folder")
    return np.array(places, np.int64)
