"""How a network sees an image, a study or a volume: at the task's size, spacing and window, with its mask."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import Dataset

from agent.deidentify.attributes import numbers, text
from agent.deidentify.record import grey
from agent.domain import ExampleRule, Volume
from agent.field_of_view import fit_to, part_for
from agent.storage.instance_index import ExampleStore, FaceInstance, FoundExample, InstanceRecord, Target
from agent.storage.withheld_series import volumes_of
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import averaged, oriented, resample, spacing
from agent.volumes.volume_io import VolumeSource

_LOWEST, _HIGHEST = 0.5, 99.5  # percentiles of a volume that become 0 and 1, where the task names no window
_SIDES: Final = re.compile(r"[RLAPHF]{1,3}")  # DICOM's letters of where a row or a column goes, PS3.3 C.7.6.1.1.1
_OPPOSITE: Final = str.maketrans("RLAPHF", "LRPAFH")
_VIEW: Final = re.compile(r"[A-Z]{2,6}|[RLB]")  # a code of ViewPosition; a side
Seen = tuple[NDArray[np.float32], Target]  # pixels and target of one example


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Where an image of a patient lies, as far as its file says it, by DICOM's letters; "" where it does not."""

    right: str = ""  # the patient's side at the right edge of the image
    bottom: str = ""
    view: str = ""  # view and laterality, such as "PA" or "MLO L"

    @property
    def left(self) -> str:
        """At the left edge."""
        return self.right.translate(_OPPOSITE)

    @property
    def top(self) -> str:
        """At the upper edge."""
        return self.bottom.translate(_OPPOSITE)


VOLUME_PLACES: Final = {  # of the slices of a volume as networks see it, see :func:`_volumes`, the head up
    "axial": ImagePlace("L", "P"),
    "coronal": ImagePlace("L", "F"),
    "sagittal": ImagePlace("P", "F"),
}


def places_of(vault: ExampleStore, rule: ExampleRule, found: FoundExample) -> list[ImagePlace]:
    """Where the image of each channel lies; nothing of a volume, which always lies as :data:`VOLUME_PLACES` has it.

    Raises:
        KeyError: it was deleted meanwhile.
    """
    return [] if len(rule.size) == 3 else [_place_of(vault, head) for head in _in_channels(vault, rule, found)]


def _place_of(vault: ExampleStore, head: InstanceRecord) -> ImagePlace:
    """Nothing where the header cannot be read: the image is an example all the same."""
    payload = vault.payload(head.name)
    try:
        header = pydicom.dcmread(io.BytesIO(payload), stop_before_pixels=True)
        return _image_place(header)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever a reader raises
        return ImagePlace()


def _image_place(header: Dataset) -> ImagePlace:
    sides = text(header, "PatientOrientation").split("\\")
    if len(sides) != 2 or not all(map(_SIDES.fullmatch, sides)):
        cosines = numbers(header, "ImageOrientationPatient")
        sides = [_towards(cosines[:3]), _towards(cosines[3:])] if len(cosines) == 6 else ["", ""]
    laterality = text(header, "ImageLaterality") or text(header, "Laterality")
    view = [word for word in (text(header, "ViewPosition"), laterality) if _VIEW.fullmatch(word)]
    return ImagePlace(sides[0], sides[1], " ".join(view))


def _towards(cosines: list[float]) -> str:
    """The patient's side that a direction in LPS+ mostly goes to."""
    most = max(range(3), key=lambda axis: abs(cosines[axis]))
    return ("LR", "PA", "HF")[most][cosines[most] < 0]


def as_seen(vault: ExampleStore, rule: ExampleRule, found: FoundExample) -> list[Seen | str]:
    """What a network sees of it, or why it sees nothing (a key of ``agent.storage.examples.REASONS``).

    Raises:
        KeyError: it was deleted meanwhile.
    """
    return _volumes(vault, rule, found) if len(rule.size) == 3 else [_picture(vault, rule, found)]


# -- images


def _picture(vault: ExampleStore, rule: ExampleRule, found: FoundExample) -> Seen | str:
    """(channels, h, w) of one image, or of the first images of a study, one in each channel; the rest are zeros."""
    size = (rule.size[0], rule.size[1])
    if not rule.per_study:
        seen = _seen(vault, rule, found.heads[0], size)
        if isinstance(seen, str):
            return seen
        pixels = np.ascontiguousarray(seen[None] if seen.ndim == 2 else seen.transpose(2, 0, 1))
        target = _drawn_on(vault, rule, found, size) if found.target is None else found.target
        return target if isinstance(target, str) else (pixels, target)
    made = np.zeros((rule.channels, *size), np.float32)
    for channel, head in enumerate(_in_channels(vault, rule, found)):
        seen = _seen(vault, rule, head, size)
        if isinstance(seen, str):
            return seen
        made[channel] = grey(seen)
    assert found.target is not None, "the rule refuses masks of a study"
    return made, found.target


def _drawn_on(vault: ExampleStore, rule: ExampleRule, found: FoundExample, size: tuple[int, int]) -> Target | str:
    """(h, w) int64: which segment each pixel of an image is of, seen as the image is; or why not."""
    from agent.volumes.segmentations import MaskMisfitError, segments_of  # noqa: PLC0415 - highdicom: half a second

    header, head = _header(vault, found.heads[0]), found.heads[0]
    try:
        drawn = [segments_of(vault.payload(name), header) for name in found.masks]
    except MaskMisfitError as misfit:
        return misfit.code
    whole = _numbered(rule, drawn)
    if whole is None:
        return "no_mask"
    if rule.spacing:
        measured = numbers(header, "PixelSpacing") or numbers(header, "ImagerPixelSpacing")
        edges = (1.0, *measured)
        return np.asarray(_at(whole[None], edges, (1, *size), (1.0, *rule.spacing), nearest=True)[0], np.int64)
    seen = vault.pixels(head.name)
    top, left, tall, wide = part_for(grey(seen) if rule.channels == 1 else seen, size)
    rows = top + ((np.arange(size[0]) + 0.5) * tall / size[0]).astype(np.intp)
    columns = left + ((np.arange(size[1]) + 0.5) * wide / size[1]).astype(np.intp)
    return np.asarray(whole[np.ix_(rows, columns)], np.int64)


def _numbered(rule: ExampleRule, drawn: list[dict[str, NDArray[np.bool_]]]) -> NDArray[np.float32] | None:
    """1 for the task's first segment and so on, 0 for none; a later one lies over an earlier one."""
    whole: NDArray[np.float32] | None = None
    for number, name in enumerate(rule.classes, 1):
        for segments in drawn:
            if name in segments:
                whole = np.zeros(segments[name].shape, np.float32) if whole is None else whole
                whole[segments[name]] = number
    return whole


def _in_channels(vault: ExampleStore, rule: ExampleRule, found: FoundExample) -> list[InstanceRecord]:
    """Of a study the images that count, in the order of the channels; else the one image."""
    if not rule.per_study:
        return [found.heads[0]]
    ordered = sorted(found.heads, key=lambda head: (_place(_header(vault, head)), head.name))
    return ordered[: rule.channels]


def _place(header: Dataset) -> tuple[str, str, float, float]:
    """Where an image stands in its study: view and side first, since they mean the same in every study."""
    order = [(numbers(header, keyword) or [0.0])[0] for keyword in ("SeriesNumber", "InstanceNumber")]
    side = text(header, "ImageLaterality") or text(header, "Laterality")
    return text(header, "ViewPosition"), side, order[0], order[1]


def _header(vault: ExampleStore, head: InstanceRecord, *, pixels: bool = False) -> Dataset:
    return pydicom.dcmread(io.BytesIO(vault.payload(head.name)), stop_before_pixels=not pixels)


def _seen(
    vault: ExampleStore, rule: ExampleRule, head: InstanceRecord, size: tuple[int, int]
) -> NDArray[np.float32] | str:
    """(h, w) or (h, w, 3) in [0, 1] of one image at the task's size; or why not, a key of REASONS."""
    pixels = vault.pixels(head.name)
    header = _header(vault, head, pixels=bool(rule.window)) if rule.window or rule.spacing else None
    if rule.window and header is not None:
        pixels = _windowed(_stored(header), rule.window)
    if rule.channels == 1 or rule.per_study:
        pixels = grey(pixels)
    if not rule.spacing or header is None:
        try:
            return fit_to(pixels, size)
        except ValueError:
            return "too_small"
    measured = numbers(header, "PixelSpacing") or numbers(header, "ImagerPixelSpacing")
    if len(measured) != 2 or not all(mm > 0 for mm in measured):
        return "no_spacing"
    planes = [pixels] if pixels.ndim == 2 else [pixels[:, :, channel] for channel in range(3)]
    made = [_at(plane[None], (1.0, *measured), (1, *size), (1.0, *rule.spacing))[0] for plane in planes]
    return made[0] if pixels.ndim == 2 else np.stack(made, axis=2)


def _stored(header: Dataset) -> NDArray[np.float32]:
    """The values that the file stores, in their units (Hounsfield units of CT)."""
    slope, intercept = (numbers(header, keyword) for keyword in ("RescaleSlope", "RescaleIntercept"))
    values: NDArray[np.float32] = np.asarray(header.pixel_array, np.float32)
    return values * np.float32(slope[0] if slope else 1) + np.float32(intercept[0] if intercept else 0)


def _windowed(values: NDArray[np.float32], window: tuple[float, ...]) -> NDArray[np.float32]:
    low, high = window
    seen: NDArray[np.float32] = np.clip((values - np.float32(low)) / np.float32(high - low), 0, 1, dtype=np.float32)
    return seen


def _at(
    values: NDArray[np.float32],
    edges: tuple[float, ...],
    size: tuple[int, ...],
    wanted: tuple[float, ...],
    *,
    nearest: bool = False,
) -> NDArray[np.float32]:
    """(k, h, w) in [0, 1], or segments' numbers, on a grid of another spacing around the same centre; 0 outside."""
    source, target = _grids(values.shape, edges, size, wanted)
    shape = (size[0], size[1], size[2])
    if nearest:
        return resample(values, source, shape, target, order=0)
    return np.clip(averaged(values, source, shape, target), 0, 1)


def _grids(
    there: tuple[int, ...], edges: tuple[float, ...], size: tuple[int, ...], wanted: tuple[float, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(4, 4) of a grid and of another one around the same centre: from an index to millimetres."""
    source, target = np.diag([*edges, 1.0]), np.diag([*wanted, 1.0])
    for axis in range(3):
        target[axis, 3] = edges[axis] * (there[axis] - 1) / 2 - wanted[axis] * (size[axis] - 1) / 2
    return source, target


# -- volumes


def _volumes(vault: ExampleStore, rule: ExampleRule, found: FoundExample) -> list[Seen | str]:
    """(1, k, h, w) of every volume of a series, in [0, 1]: k runs from the feet, h to the back, w to the left."""
    try:
        return [_one_volume(vault, rule, found, source) for source, _ in volumes_in(vault, found)]
    except NotDefacedError:
        return ["not_a_volume"]


def volumes_in(vault: ExampleStore, found: FoundExample) -> list[tuple[VolumeSource, list[FaceInstance]]]:
    """The volumes of a series, each with its instances in the order of its files.

    Raises:
        NotDefacedError: it is none; the code says why.
        KeyError: it was deleted meanwhile.
    """
    files = [
        FaceInstance(h.name, h.kind, h.modality, h.person, h.study, h.series, h.label, vault.payload(h.name))
        for h in found.heads
    ]
    return list(zip(*volumes_of(files), strict=True))


def _one_volume(vault: ExampleStore, rule: ExampleRule, found: FoundExample, source: VolumeSource) -> Seen | str:
    volume = source.real()
    pixels = cube(volume, rule)
    if isinstance(pixels, str):
        return pixels
    if found.target is not None:
        return pixels, found.target
    from agent.volumes.segmentations import MaskMisfitError, segments_on  # noqa: PLC0415 - highdicom: half a second

    try:
        whole = _numbered(rule, [segments_on(vault.payload(name), source) for name in found.masks])
    except MaskMisfitError as misfit:
        return misfit.code
    if whole is None:
        return "no_mask"
    return pixels, mask_cube(Volume(whole, volume.affine), rule)


def cube(volume: Volume, rule: ExampleRule) -> NDArray[np.float32] | str:
    """(1, k, h, w) of a volume, in [0, 1], at the task's size, spacing and window; or why not."""
    values, edges, wanted = _turned(volume, rule)
    if not bool(np.isfinite(values).all()):
        return "not_a_volume"
    low, high = rule.window or tuple(map(float, np.percentile(values, (_LOWEST, _HIGHEST))))
    return _at(_windowed(values, (low, high)), edges, rule.size, wanted)[None] if low < high else "blank"


def mask_cube(numbered: Volume, rule: ExampleRule) -> NDArray[np.int64]:
    """(k, h, w): which segment each voxel of :func:`cube` is of, from a volume of segments' numbers."""
    values, edges, wanted = _turned(numbered, rule)
    return _at(values, edges, rule.size, wanted, nearest=True).astype(np.int64)


def cube_place(volume: Volume, rule: ExampleRule) -> NDArray[np.float64]:
    """(4, 4), from an index of :func:`cube` to one of the volume's own values."""
    turned = oriented(volume)
    values, edges, wanted = _turned(volume, rule)
    source, target = _grids(values.shape, edges, rule.size, wanted)
    wide, tall = turned.values.shape[:2]
    # (k, h, w) of the turned and mirrored values -> (i, j, k) of the volume as it lies in space
    back = np.array([[0.0, 0, -1, wide - 1], [0, -1, 0, tall - 1], [1, 0, 0, 0], [0, 0, 0, 1]])
    own = np.rint(np.linalg.inv(volume.affine) @ turned.affine)  # whole steps along its own axes
    whole: NDArray[np.float64] = own @ back @ np.linalg.inv(source) @ target
    return whole


def picture_place(vault: ExampleStore, rule: ExampleRule, head: InstanceRecord) -> NDArray[np.float64]:
    """(3, 3), from an index of an image as the network sees it, before the transforms, to (row, column) of the file.

    Raises:
        KeyError: it was deleted meanwhile.
        ValueError: it is smaller than the task's size.
    """
    size, seen, place = (rule.size[0], rule.size[1]), vault.pixels(head.name), np.eye(3)
    if rule.spacing:
        header = _header(vault, head)
        edges = (1.0, *(numbers(header, "PixelSpacing") or numbers(header, "ImagerPixelSpacing")))
        source, target = _grids((1, *seen.shape[:2]), edges, (1, *size), (1.0, *rule.spacing))
        place[:] = (np.linalg.inv(source) @ target)[1:, 1:]
        return place
    if rule.window:
        seen = _windowed(_stored(_header(vault, head, pixels=True)), rule.window)
    top, left, tall, wide = part_for(grey(seen) if rule.channels == 1 else seen, size)
    for axis, (first, length) in enumerate(((top, tall), (left, wide))):
        scale = length / size[axis]
        place[axis, axis], place[axis, 2] = scale, first + scale / 2 - 0.5
    return place


def on_source(
    labels: NDArray[np.integer[Any]], place: NDArray[np.float64], shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    """Segments of a network's grid on the grid of the file, by the nearest index; 0 outside what the network saw.

    Args:
        labels: whole numbers up to 255, in d dimensions.
        place: (d + 1, d + 1), from an index of them to one of the file; each axis runs along one of the file's.
        shape: of the file, d sides.
    Raises:
        ValueError: the axes are turned otherwise.
    """
    count, back = labels.ndim, np.linalg.inv(place)
    along = [int(np.abs(back[axis, :count]).argmax()) for axis in range(count)]  # of each axis, the file's
    rest = back[:count, :count].copy()
    rest[range(count), along] = 0.0
    if sorted(along) != list(range(count)) or not np.abs(rest).max(initial=0.0) < 1e-4:
        raise ValueError("the axes of the network's grid run across those of the file")
    order = [along.index(axis) for axis in range(count)]
    made = np.asarray(labels, np.uint8).transpose(order)
    for axis, own in enumerate(order):
        at = np.floor(back[own, axis] * np.arange(shape[axis]) + back[own, count] + 0.5).astype(np.int64)
        inside = (at >= 0) & (at < made.shape[axis])
        made = np.take(made, np.clip(at, 0, made.shape[axis] - 1), axis)
        made[(*[slice(None)] * axis, ~inside)] = 0
    return made


def _turned(volume: Volume, rule: ExampleRule) -> tuple[NDArray[np.float32], tuple[float, ...], tuple[float, ...]]:
    """A volume's values (k, h, w), the distances of its voxels in mm, and those that the task wants."""
    turned = oriented(volume)
    values = np.asarray(turned.values, np.float32).transpose(2, 1, 0)[:, ::-1, ::-1]
    edges = tuple(float(mm) for mm in spacing(turned.affine)[::-1])
    extent = (edge * there for edge, there in zip(edges, values.shape, strict=True))
    return values, edges, rule.spacing or tuple(mm / side for mm, side in zip(extent, rule.size, strict=True))
