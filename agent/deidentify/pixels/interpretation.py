"""From stored values to numbers with a meaning: the one place where modality, window, padding and geometry are read.

``interpret`` follows PS3.3: the modality LUT or rescale (C.11.1), the VOI window or LUT by policy (C.11.2),
MONOCHROME1, pixel padding (C.7.5.1.1.2), spacing and planes (C.7.6.2); of enhanced objects it reads the
functional groups, per frame before shared (C.7.6.16). pydicom and DCMTK do parts of this and serve as oracles
in the tests: pydicom works in float64 on whole series, knows no padding and no functional groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset

from agent.deidentify.attributes import frames, numbers, text
from agent.deidentify.errors import FileRejectedError
from protos.common.errors import RefusedError

Window = Literal["none", "first_window", "first_lut", "full_range"]
FULL_RANGE: Final = "full_range"
DISPLAY: Final = "display"  # units of [0, 1], dark to bright
UNSPECIFIED: Final = "unspecified"
Real = NDArray[np.float32]
Vector = tuple[float, float, float]
_UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
_APART: Final = 0.05  # of the distance of two slices: how far a slice may lie from its place
_STRAIGHT: Final = 1e-3  # deviation of direction cosines from orthonormal, and between slices


@dataclass(frozen=True, slots=True)
class Plane:
    """Where a frame lies in the patient, PS3.3 C.7.6.2.1.1: LPS+ millimetres and direction cosines."""

    origin: Vector  # the centre of the first pixel
    along_row: Vector  # the direction in which the column index grows
    along_column: Vector  # the direction in which the row index grows


@dataclass(frozen=True, slots=True, eq=False)
class Interpreted:
    """One image or several frames as numbers."""

    values: Real  # ([frames,] rows, columns[, 3])
    units: str  # "HU", "OD", "BQML" and the like; "display" in [0, 1]; "unspecified"
    spacing: tuple[float, float] | None  # mm between rows, and between columns
    planes: tuple[Plane, ...] | None  # one for each frame, None when any frame's is not stated
    bits: int  # stored bits of one sample


class NotAVolumeError(RefusedError, ValueError):
    """Slices do not form a volume. The text says why, and contains nothing of the files."""


def interpret(dataset: Dataset, stored: NDArray[np.integer[Any]], window: Window) -> Interpreted:
    """Stored values as real ones.

    Args:
        dataset: the image; its pixel data are not looked at.
        stored: ([frames,] rows, columns[, 3]) as ``pixels.decode`` gives them, colour as RGB.
        window: "none" gives the modality's units, in which padding takes the value that is displayed darkest.
            All others give [0, 1], bright is high: "first_window" (LINEAR, LINEAR_EXACT or SIGMOID) and
            "first_lut" use what the file states first; where it states none, and for colour, "full_range": 8-bit
            values span 0 to 255, deeper ones their smallest to largest over all frames.
    Returns:
        float32 throughout: stored values beyond 24 bits are rounded.
    Raises:
        FileRejectedError: ``undecodable``, an attribute that makes no sense, or a value that is not finite.
    """
    if window not in get_args(Window):
        raise ValueError("no such window policy")
    try:
        count = frames(dataset)
        colour = stored.ndim - (count > 1) == 3
        if not stored.size or stored.ndim != 2 + (count > 1) + colour or (colour and stored.shape[-1] != 3):
            raise FileRejectedError("undecodable")
        values = _colours(stored, window) if colour else _grey(dataset, stored, window, count)
        spacing = _spacing(macro(dataset, 0, "PixelMeasuresSequence"))
        units = UNSPECIFIED if colour else _units(dataset)
        bits = int(dataset.get("BitsStored") or 8 * stored.dtype.itemsize)
    except _UNREADABLE:
        raise FileRejectedError("undecodable") from None
    if not bool(np.isfinite(values).all()):
        raise FileRejectedError("undecodable")
    return Interpreted(values, units if window == "none" else DISPLAY, spacing, _planes(dataset, count), bits)


def _colours(stored: NDArray[np.integer[Any]], window: Window) -> Real:
    values = stored.astype(np.float32)
    return values if window == "none" else values / np.float32(np.iinfo(stored.dtype).max)


def _grey(dataset: Dataset, stored: NDArray[np.integer[Any]], window: Window, count: int) -> Real:
    inverse = text(dataset, "PhotometricInterpretation") == "MONOCHROME1"
    each = stored if count > 1 else stored[np.newaxis]
    transforms = [macro(dataset, i, "PixelValueTransformationSequence") for i in range(count)]
    real = np.empty(each.shape, dtype=np.float32)
    for i in range(count):
        _modality(transforms[i], each[i], real[i])
    padding = _padding(dataset, each)
    ends = _ends(real, padding)
    if padding is not None:
        real[padding] = ends[1] if inverse else ends[0]
    if window != "none":
        plain = each.dtype == np.uint8 and not any(_transforms(t) for t in transforms)
        full = (0.0, 255.0) if plain else ends
        for i in range(count):
            _show(macro(dataset, i, "FrameVOILUTSequence"), real[i], window, full)
        if inverse:
            np.subtract(np.float32(1), real, out=real)
    return real if count > 1 else real[0]


def macro(dataset: Dataset, frame: int, sequence: str) -> Dataset:
    """The data set with a macro's attributes (PS3.3 C.7.6.16): the frame's, the shared one, or the image itself."""
    per_frame, shared = (dataset.get(f"{which}FunctionalGroupsSequence") or [] for which in ("PerFrame", "Shared"))
    for items, index in ((per_frame, frame), (shared, 0)):
        if index < len(items) and items[index].get(sequence):
            found: Dataset = items[index][sequence].value[0]
            return found
    return dataset


def _transforms(group: Dataset) -> bool:
    return bool(group.get("ModalityLUTSequence")) or "RescaleSlope" in group


def _modality(group: Dataset, stored: NDArray[np.integer[Any]], out: Real) -> None:
    """PS3.3 C.11.1: a table, or slope and intercept; nothing when neither is stated."""
    if group.get("ModalityLUTSequence"):
        entries, _ = _table(group["ModalityLUTSequence"].value[0], stored)
        out[...] = entries
        return
    np.copyto(out, stored, casting="unsafe")
    slopes, intercepts = numbers(group, "RescaleSlope"), numbers(group, "RescaleIntercept")
    if slopes and slopes[0] != 1:
        np.multiply(out, np.float32(slopes[0]), out=out)
    if slopes and intercepts and intercepts[0] != 0:
        np.add(out, np.float32(intercepts[0]), out=out)


def _table(item: Dataset, values: NDArray[Any]) -> tuple[NDArray[np.uint16], int]:
    """Entries of a lookup table (PS3.3 C.11.1.1, C.11.2.1.1) for values, and the bits of an entry."""
    count, first, bits = (int(v) for v in item["LUTDescriptor"].value)
    count = count or 65536  # 0 stands for what 16 bits cannot say
    if values.dtype.kind == "i" and first > 0x7FFF:
        first -= 0x10000  # of signed values the descriptor is signed too, whatever VR was read
    data = item["LUTData"].value
    entries = np.frombuffer(data, "<u2") if isinstance(data, bytes) else np.asarray(data, dtype=np.uint16)
    if not (0 < bits <= 16 and entries.size >= count):
        raise ValueError("not a lookup table")
    index = np.clip(np.rint(values).astype(np.int64) - first, 0, count - 1)
    found: NDArray[np.uint16] = entries[index]
    return found, bits


def padding_range(dataset: Dataset, dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """The least and the greatest stored value that stand for "nothing was seen here" (PS3.3 C.7.5.1.1.2), or None."""
    ends = [*numbers(dataset, "PixelPaddingValue"), *numbers(dataset, "PixelPaddingRangeLimit")]
    if not ends or "PixelPaddingValue" not in dataset:
        return None
    kind = np.iinfo(dtype)
    whole = [int(v) - 2**kind.bits if v > kind.max and kind.min < 0 else int(v) for v in ends]
    return min(whole), max(whole)


def _padding(dataset: Dataset, stored: NDArray[np.integer[Any]]) -> NDArray[np.bool_] | None:
    """Where the scanner saw nothing."""
    ends = padding_range(dataset, stored.dtype)
    if ends is None:
        return None
    found: NDArray[np.bool_] = (stored >= ends[0]) & (stored <= ends[1])
    return found if bool(found.any()) and not bool(found.all()) else None


def _ends(real: Real, padding: NDArray[np.bool_] | None) -> tuple[float, float]:
    seen = real if padding is None else real[~padding]
    return float(seen.min()), float(seen.max())


def _show(group: Dataset, real: Real, window: Window, full: tuple[float, float]) -> None:
    """Real values to [0, 1], in place."""
    if window == "first_lut" and group.get("VOILUTSequence"):
        entries, bits = _table(group["VOILUTSequence"].value[0], np.rint(real).astype(np.int64))
        np.divide(entries, np.float32((1 << bits) - 1), out=real)
        np.minimum(real, np.float32(1), out=real)
    elif window == FULL_RANGE or not _windowed(group, real):
        _ramp(real, *full)


def _windowed(group: Dataset, real: Real) -> bool:
    """Apply the first window (PS3.3 C.11.2.1.2 and .3) in place; False when there is none that makes sense."""
    centres, widths = numbers(group, "WindowCenter"), numbers(group, "WindowWidth")
    if not (centres and widths):
        return False
    centre, width = centres[0], widths[0]
    function = text(group, "VOILUTFunction") or "LINEAR"
    if function == "LINEAR" and width >= 1:
        _ramp(real, centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2)
    elif function == "LINEAR_EXACT" and width > 0:
        _ramp(real, centre - width / 2, centre + width / 2)
    elif function == "SIGMOID" and width > 0:
        exponent = np.clip((real - np.float32(centre)) * np.float32(-4 / width), -80, 80)
        np.divide(np.float32(1), 1 + np.exp(exponent), out=real)
    else:
        return False
    return True


def _ramp(real: Real, low: float, high: float) -> None:
    """Low to 0, high to 1, clipped; a step above ``low`` when both are one."""
    if not high > low:
        real[...] = real > np.float32(low)
        return
    np.subtract(real, np.float32(low), out=real)
    np.multiply(real, np.float32(1 / (high - low)), out=real)
    np.clip(real, 0, 1, out=real)


def _units(dataset: Dataset) -> str:
    """What the modality's values are measured in."""
    group = macro(dataset, 0, "PixelValueTransformationSequence")
    modality = text(dataset, "Modality")
    if group.get("ModalityLUTSequence"):
        stated = text(group["ModalityLUTSequence"].value[0], "ModalityLUTType")
    else:
        stated = text(group, "RescaleType")
    if not stated and modality == "CT" and "RescaleSlope" in group:
        stated = "HU"  # PS3.3 C.8.2.1.1.1: of CT, unless stated otherwise
    if modality == "PT":
        stated = text(dataset, "Units")
    return stated if stated and stated != "US" else UNSPECIFIED  # "US" is DICOM's word for unspecified


def _spacing(group: Dataset) -> tuple[float, float] | None:
    for keyword in ("PixelSpacing", "ImagerPixelSpacing"):
        found = numbers(group, keyword)
        if len(found) == 2 and min(found) > 0:
            return found[0], found[1]
    return None


def _planes(dataset: Dataset, count: int) -> tuple[Plane, ...] | None:
    try:
        found = [_plane(dataset, i) for i in range(count)]
    except _UNREADABLE:
        return None
    planes = tuple(p for p in found if p is not None)
    return planes if len(planes) == count else None


def _plane(dataset: Dataset, frame: int) -> Plane | None:
    origin = numbers(macro(dataset, frame, "PlanePositionSequence"), "ImagePositionPatient")
    cosines = numbers(macro(dataset, frame, "PlaneOrientationSequence"), "ImageOrientationPatient")
    if len(origin) != 3 or len(cosines) != 6:
        return None
    row, column = np.array(cosines[:3]), np.array(cosines[3:])
    off = (abs(row @ row - 1), abs(column @ column - 1), abs(row @ column))
    if not max(off) < _STRAIGHT:
        return None
    return Plane(
        (origin[0], origin[1], origin[2]),
        (cosines[0], cosines[1], cosines[2]),
        (cosines[3], cosines[4], cosines[5]),
    )


def stack(pictures: Sequence[Interpreted]) -> tuple[Real, NDArray[np.float64]]:
    """Slices of one series as a volume, sorted by where they lie.

    Returns:
        (columns, rows, slices) float32, and the (4, 4) affine from indices to RAS+ millimetres, NIfTI's way.
    Raises:
        NotAVolumeError: fewer than two slices, a missing plane or spacing, different sizes, spacings or
            orientations, or slices that are not evenly spaced on one line (a tilted gantry's shear is kept).
    """
    slices = [(v, plane) for p in pictures for v, plane in _frames(p)]
    spacings = {p.spacing for p in pictures}
    spacing = next(iter(spacings), None)
    if len(slices) < 2 or len(spacings) != 1 or spacing is None:
        raise NotAVolumeError("a volume needs two slices or more of one spacing")
    if len({v.shape for v, _ in slices}) != 1:
        raise NotAVolumeError("slices of different sizes")
    row, column = np.array(slices[0][1].along_row), np.array(slices[0][1].along_column)
    for _, plane in slices:
        off = (np.abs(row - plane.along_row).max(), np.abs(column - plane.along_column).max())
        if not max(off) < _STRAIGHT:
            raise NotAVolumeError("slices of different orientations")
    normal = np.cross(row, column)
    slices.sort(key=lambda s: float(normal @ np.array(s[1].origin)))
    step = _step(np.array([plane.origin for _, plane in slices]), normal)
    volume = np.stack([values.T for values, _ in slices], axis=-1)
    affine = np.eye(4)
    affine[:3] = np.column_stack([row * spacing[1], column * spacing[0], step, np.array(slices[0][1].origin)])
    return volume, np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine  # LPS+ to RAS+


def _frames(picture: Interpreted) -> list[tuple[Real, Plane]]:
    planes = picture.planes
    if planes is None:
        raise NotAVolumeError("a slice without position or orientation")
    each = picture.values if len(planes) > 1 else picture.values[np.newaxis]
    if each.ndim != 3 or len(each) != len(planes):
        raise NotAVolumeError("a slice that is not grey")
    return list(zip(each, planes, strict=True))


def _step(origins: NDArray[np.float64], normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """(3,) from one slice to the next, in mm."""
    step: NDArray[np.float64] = (origins[-1] - origins[0]) / (len(origins) - 1)
    gap = float(step @ normal)
    places = origins[0] + step * np.arange(len(origins))[:, np.newaxis]
    if not gap > 0 or not float(np.abs(origins - places).max()) <= _APART * gap:
        raise NotAVolumeError("slices that are not evenly spaced on one line")
    return step
