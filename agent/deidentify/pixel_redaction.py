"""Parts of images that are blanked, because devices write names there: by the site's rules, or all but the scans.

A rule names a kind of image (modality, size, perhaps maker and model) and rectangles. For ultrasound the device
itself may state where its scans are (PS3.3 C.8.5.5, Sequence of Ultrasound Regions); patients' names are drawn
outside of them. This module does not detect text: a person must know the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from agent.deidentify.attributes import text
from agent.deidentify.errors import FileRejectedError

_ULTRASOUND: Final = tuple(f"1.2.840.10008.5.1.4.1.1.{part}" for part in ("3.1", "6.1", "6.2", "6.3"))
_MAX_REGIONS: Final = 64
_MAX_SIDE: Final = 65535  # Rows and Columns are 16-bit numbers


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right``, the ends not included, counted from 0."""

    top: int  # first row
    left: int  # first column
    bottom: int  # row below the last
    right: int  # column after the last

    def __post_init__(self) -> None:
        """A rectangle has an area."""
        if not (0 <= self.top < self.bottom <= _MAX_SIDE and 0 <= self.left < self.right <= _MAX_SIDE):
            raise ValueError("a rectangle is top < bottom and left < right, in pixels from 0")


@dataclass(frozen=True, slots=True)
class Blank:
    """A site's rule for one kind of image."""

    modality: str  # of the images that the rule is for
    rows: int  # of exactly this height
    columns: int  # and this width
    rectangles: tuple[Rectangle, ...]  # what is blanked, in pixels from the top left
    keep: bool = False  # the rectangles are what stays, instead of what is blanked
    manufacturer: str = ""  # "" is any
    model: str = ""  # "" is any

    def __post_init__(self) -> None:
        """A rule blanks something, and only inside its image."""
        if not (self.modality and 0 < self.rows <= _MAX_SIDE and 0 < self.columns <= _MAX_SIDE):
            raise ValueError("a rule to blank regions names a modality, rows and columns")
        if not all(r.bottom <= self.rows and r.right <= self.columns for r in self.rectangles):
            raise ValueError("a rectangle to blank or keep lies outside its image")
        if not self.rectangles or not bool(_mask(self._part(), (self.rows, self.columns)).any()):
            raise ValueError("a rule to blank regions blanks nothing")

    def _part(self) -> RedactedPart:
        return RedactedPart(self.rectangles, self.keep)

    def matches(self, dataset: Dataset) -> bool:
        """Is this the kind of image? Text is compared without regard to case and spaces."""
        size = (dataset.get("Rows"), dataset.get("Columns"))
        maker, model = text(dataset, "Manufacturer"), text(dataset, "ManufacturerModelName")
        return (
            size == (self.rows, self.columns)
            and folded(text(dataset, "Modality")) == folded(self.modality)
            and folded(self.manufacturer) in ("", folded(maker))
            and folded(self.model) in ("", folded(model))
        )


@dataclass(frozen=True, slots=True)
class RedactedPart:
    """Rectangles of one image that are blanked, or that alone stay."""

    rectangles: tuple[Rectangle, ...]
    keep: bool


def folded(value: str) -> str:
    """Text for comparing: case and spaces do not matter."""
    return " ".join(value.casefold().split())


def is_ultrasound(dataset: Dataset) -> bool:
    """By modality or by class."""
    return text(dataset, "Modality") == "US" or text(dataset, "SOPClassUID") in _ULTRASOUND


def plan(dataset: Dataset, blanks: tuple[Blank, ...], *, us_regions: bool) -> tuple[RedactedPart, ...]:
    """What is to be blanked; empty when no rule is for this image.

    Raises:
        FileRejectedError: ``burned_in_risk``, an ultrasound image whose regions make no sense.
    """
    parts = [RedactedPart(rule.rectangles, rule.keep) for rule in blanks if rule.matches(dataset)]
    if us_regions and is_ultrasound(dataset) and "SequenceOfUltrasoundRegions" in dataset:
        parts.append(RedactedPart(_scans(dataset), keep=True))
    return tuple(parts)


def _scans(dataset: Dataset) -> tuple[Rectangle, ...]:
    """The regions of an ultrasound image; their corners are inclusive (PS3.3 C.8.5.5.1.4)."""
    items = dataset["SequenceOfUltrasoundRegions"].value or []
    if not 0 < len(items) <= _MAX_REGIONS:
        raise FileRejectedError("burned_in_risk")
    found = []
    for item in items:
        corners = [item.get(f"RegionLocation{corner}") for corner in ("MinX0", "MinY0", "MaxX1", "MaxY1")]
        if not all(isinstance(c, int) for c in corners):
            raise FileRejectedError("burned_in_risk")
        left, top, right, bottom = corners
        try:
            found.append(Rectangle(top, left, bottom + 1, right + 1))
        except ValueError:
            raise FileRejectedError("burned_in_risk") from None
        if not (bottom < dataset.Rows and right < dataset.Columns):
            raise FileRejectedError("burned_in_risk")
    return tuple(found)


def _mask(part: RedactedPart, size: tuple[int, int]) -> NDArray[np.bool_]:
    """(rows, columns): True where the image is blanked."""
    mask = np.full(size, part.keep)
    for r in part.rectangles:
        mask[r.top : r.bottom, r.left : r.right] = not part.keep
    return mask


def blank(values: NDArray[Any], parts: tuple[RedactedPart, ...], photometric: str) -> NDArray[Any]:
    """Stored values with every part black, in all frames; the argument is left as it was.

    Args:
        values: ([frames,] rows, columns[, 3]) as ``pixels.decode`` gives them, colour as RGB.
        photometric: of the file; MONOCHROME1 is black where it is highest (PS3.3 C.7.6.3.1.2).
    Raises:
        FileRejectedError: ``burned_in_risk``, a part that leaves the whole image as it is.
    """
    if not parts:
        return values
    colour = values.shape[-1] == 3 and not photometric.startswith("MONOCHROME")
    size = values.shape[-3:-1] if colour else values.shape[-2:]
    masks = [_mask(part, (size[0], size[1])) for part in parts]
    if not all(bool(mask.any()) for mask in masks):
        raise FileRejectedError("burned_in_risk")
    # the image's own darkest value: a new one would change how the rest is displayed
    black = 0 if colour else values.max() if photometric == "MONOCHROME1" else values.min()
    frames = values.copy().reshape(-1, *size, 3) if colour else values.copy().reshape(-1, *size)
    frames[:, np.logical_or.reduce(masks)] = black
    return frames.reshape(values.shape)
