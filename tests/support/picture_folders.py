"""Folders of images as a person hands them in: PNG files, and lists of what each shows and whose it is."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def write_pictures(
    folder: Path,
    pictures: Mapping[str, NDArray[np.uint8]],
    labels: Mapping[str, Any] | None = None,
    identities: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``pictures/``, and ``labels.csv`` and ``who.csv`` where they are given, each by the name of the file."""
    for name, pixels in pictures.items():
        path = folder / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    for file, column, told in (("labels.csv", "label", labels), ("who.csv", "identity", identities)):
        if told is not None:
            with (folder / file).open("w", newline="") as stream:
                csv.writer(stream).writerows([("file", column), *told.items()])
    return folder
