"""DICOM slices of one series as a volume, and back into the same files but for the pixels.

The numbers are the stored ones: rescale is kept beside them. Of a file that is written again every element stays as
it was, byte for byte, but for those of :data:`CHANGED` and :func:`_shows_more`:

- PixelData, native: a compressed stream becomes Explicit VR Little Endian, other transfer syntaxes stay.
- Recognizable Visual Features (0028,0302) is NO; where the identity was removed (0012,0062), the Clean Recognizable
  Visual Features Option 113102 is added to what was done (PS3.15 E.3).
- Image Type, and Frame Type of enhanced objects, begin with DERIVED (PS3.3 C.7.6.1.1.2), and Derivation Description
  says why. The image it came from is not named: it is the one with the face.
- What shows the old image is gone: overlays, curves, icons, pixels inside sequences, smallest and largest values,
  histograms, signatures, private elements of 4 KB and more, the preamble.
- UIDs: :func:`keep_uid` where the new file replaces the old one, as in the vault, so that references stay valid.
  :func:`derive_uid` where both remain: two images must not share a UID (PS3.3 C.12.1.1, PS3.4 B.4.1.4).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.datadict import dictionary_has_tag, dictionary_VR
from pydicom.sequence import Sequence as Items
from pydicom.tag import BaseTag
from pydicom.uid import UID

from agent.deidentify.admission_rules import NOT_IMAGES
from agent.deidentify.attributes import frames, numbers, text
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.pixels import interpretation, pixel_data
from agent.deidentify.prescan import DEFLATED_LE, EXPLICIT_BE, EXPLICIT_LE, IMPLICIT_LE, read_meta, scan, undeflate
from agent.deidentify.ps315.options import CODES
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import is_grid

MAX_VOXELS: Final = 2**28
MAX_BYTES: Final = 2**30  # of one file, inflated
CLEANED: Final = "113102"
CHANGED: Final = frozenset(
    {
        *(0x00080008, 0x00082111),  # Image Type, Derivation Description
        *(0x00080018, 0x0020000E),  # SOP Instance UID and Series Instance UID, unless kept
        *(0x00120063, 0x00120064, 0x00280302, 0x7FE00010),
    }
)
_DROPPED: Final = frozenset(
    {
        *(0x00280106, 0x00280107, 0x00280108, 0x00280109, 0x00280110, 0x00280111),  # smallest and largest values
        *(0x00880200, 0x00603000, 0x00420011, 0x54000100, 0x56000020),  # icon, histogram, document, waveform, spectra
        *(0x4FFE0001, 0xFFFAFFFA, 0xFFFCFFFC),  # signed hashes of the old image, padding at the end
    }
)
_FRAME_TYPES: Final = ("MRImageFrameTypeSequence", "CTImageFrameTypeSequence", "PETFrameTypeSequence")
_GROUPS: Final = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_PRIVATE_BYTES: Final = 4096  # a thumbnail of 64 x 64 is not smaller
_SAME: Final = (
    *("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "PatientID", "Modality"),
    *("PhotometricInterpretation", "Rows", "Columns", "BitsAllocated", "BitsStored", "PixelRepresentation"),
)
NAMES: Final = ("Modality", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "PatientID")  # of Labels
_GREY: Final = frozenset({"MONOCHROME1", "MONOCHROME2"})
Parsed = tuple[Dataset, str]  # and its transfer syntax
_UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def keep_uid(uid: str) -> str:
    """The same UID: the new file takes the place of the old."""
    return uid


def derive_uid(uid: str) -> str:
    """Another UID below 2.25 (PS3.5 B.2), the same for the same: the old file lives on.

    There is no key in it: who has the file with the face finds the one without. Both still name the patient.
    """
    return f"2.25.{int.from_bytes(hashlib.sha256(b'lazaret defaced' + uid.encode()).digest()[:16], 'big')}"


@dataclass(frozen=True, slots=True)
class Labels:
    """The patient and description of a series. For the site alone."""

    modality: str
    study: str
    series: str
    frame_of_reference: str
    patient: str


@dataclass(frozen=True, slots=True, eq=False)
class DicomForm:
    """All of a series but its pixels."""

    files: tuple[bytes, ...]
    slices: tuple[tuple[int, int], ...]  # file and frame of each slice of the volume
    scale: NDArray[np.float64]  # (slices, 2): slope and intercept of each
    padding: tuple[int, int] | None  # stored values, from and to, where the scanner saw nothing
    bits: tuple[int, int]  # smallest and largest value that fits into the stored bits

    def encoded(self, values: NDArray[Any], uid: Callable[[str], str]) -> Iterator[bytes]:
        """The files with other pixels, one at a time, in the order in which they came.

        Raises:
            ValueError: a value does not fit into the stored bits.
        """
        if not (values.min() >= self.bits[0] and values.max() <= self.bits[1]):
            raise ValueError("values do not fit into the stored bits")
        for number, data in enumerate(self.files):
            mine = sorted((frame, place) for place, (file, frame) in enumerate(self.slices) if file == number)
            stored = np.stack([values[:, :, place].T for _, place in mine])
            with pydicom_config.disable_value_validation():
                body = _written(data, stored, uid)
            yield body


def opened(files: Sequence[bytes], read: Sequence[Parsed]) -> tuple[Volume, Labels, DicomForm]:
    """Check the files of a series and stack their slices by where they lie.

    Args:
        files: of the series.
        read: what :func:`all_parsed` says of them.
    Raises:
        NotDefacedError: ``unreadable``, ``too_large``, ``not_a_volume``, ``four_dimensional``, ``mixed_series``,
            ``missing_slices``, ``bad_affine``.
    """
    with pydicom_config.disable_value_validation():  # its warnings quote values
        labels, order, affine = arranged([dataset for dataset, _ in read])
        each = [_decoded(dataset, syntax) for dataset, syntax in read]
        first, scale = read[0][0], np.array([_rescale(read[file][0], frame) for file, frame in order])
        padding = _padding(first, each[0])
    if len({stored.dtype for stored in each}) != 1:
        raise NotDefacedError("mixed_series")
    values = np.stack([each[file][frame].T for file, frame in order], axis=-1)
    bits, signed = int(first.BitsStored), int(values.dtype.kind == "i")
    fits = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return Volume(values, affine), labels, DicomForm(tuple(files), tuple(order), scale, padding, fits)


def all_parsed(files: Sequence[bytes]) -> list[Parsed]:
    """Each file by :func:`parsed`."""
    with pydicom_config.disable_value_validation():  # its warnings quote values
        return [parsed(data) for data in files]


def parsed(data: bytes, *, pixels_too: bool = True) -> Parsed:
    """A data set whose bytes were scanned first, and its transfer syntax.

    Raises:
        NotDefacedError: ``unreadable``, ``too_large``; ``not_a_volume``, not an image.
    """
    try:
        if len(data) > MAX_BYTES:
            raise FileRejectedError("too_large")
        meta = read_meta(data)
        if meta.transfer_syntax == DEFLATED_LE:
            data, meta = undeflate(data, meta, MAX_BYTES)
        scan(data, meta.offset, meta.transfer_syntax)
        dataset = pydicom.dcmread(io.BytesIO(data), stop_before_pixels=not pixels_too)
        no_image = text(dataset, "SOPClassUID").startswith(NOT_IMAGES)
    except FileRejectedError as refusal:
        raise NotDefacedError("too_large" if refusal.code == "too_large" else "unreadable") from None
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a parser may raise anything, and its text may quote the file
        raise NotDefacedError("unreadable") from None
    if no_image or (pixels_too and "PixelData" not in dataset):
        raise NotDefacedError("not_a_volume")
    return dataset, meta.transfer_syntax


def arranged(datasets: Sequence[Dataset]) -> tuple[Labels, list[tuple[int, int]], NDArray[np.float64]]:
    """Where the frames of a series belong, by their headers alone.

    Returns:
        Its labels; file and frame of each slice, in order; the (4, 4) affine of the volume.
    Raises:
        NotDefacedError: see :func:`opened`.
    """
    if not datasets:
        raise NotDefacedError("not_a_volume")
    try:
        for dataset in datasets:
            _grey(dataset)
        if len({tuple(text(dataset, keyword) for keyword in _SAME) for dataset in datasets}) != 1:
            raise NotDefacedError("mixed_series")
        if sum(frames(d) * int(d.Rows) * int(d.Columns) for d in datasets) > MAX_VOXELS:
            raise NotDefacedError("too_large")
        if len({text(d, "SOPInstanceUID") for d in datasets}) != len(datasets):
            raise NotDefacedError("missing_slices")  # the same instance twice
        pictures = placed(datasets)
    except _UNREADABLE as error:
        raise error if isinstance(error, NotDefacedError) else NotDefacedError("unreadable") from None
    _stackable(pictures)
    try:
        index, affine = interpretation.stack(pictures)
    except interpretation.NotAVolumeError:
        raise NotDefacedError("missing_slices") from None
    if not is_grid(affine):
        raise NotDefacedError("bad_affine")  # a tilted gantry
    where = [(file, frame) for file, dataset in enumerate(datasets) for frame in range(frames(dataset))]
    first = datasets[0]
    return Labels(*(text(first, keyword) for keyword in NAMES)), [where[int(n)] for n in index[0, 0]], affine


def _grey(dataset: Dataset) -> None:
    if text(dataset, "PhotometricInterpretation") not in _GREY or int(dataset.get("SamplesPerPixel", 1)) != 1:
        raise NotDefacedError("not_a_volume")
    if int(dataset.BitsAllocated) not in (8, 16, 32) or "ModalityLUTSequence" in dataset:
        raise NotDefacedError("not_a_volume")
    if min(int(dataset.Rows), int(dataset.Columns)) < 2:
        raise NotDefacedError("not_a_volume")
    if "MOSAIC" in text(dataset, "ImageType").split("\\"):
        raise NotDefacedError("four_dimensional")  # one file shows all slices of a moment, side by side


def placed(datasets: Sequence[Dataset]) -> list[interpretation.Interpreted]:
    """Every file as an image of one pixel a frame: the frame's number, so that ``stack`` says how it sorts."""
    found, number = [], 0
    for dataset in datasets:
        count = frames(dataset)
        spacings = {
            tuple(numbers(interpretation.macro(dataset, i, "PixelMeasuresSequence"), "PixelSpacing"))
            for i in range(count)
        }
        if len(spacings) != 1:
            raise NotDefacedError("mixed_series")
        index = np.arange(number, number + count, dtype=np.float32).reshape(-1, 1, 1)
        shape = np.zeros((count, 1, 1) if count > 1 else (1, 1), np.int16)
        try:
            picture = interpretation.interpret(dataset, shape, "none")
        except FileRejectedError:
            raise NotDefacedError("unreadable") from None
        found.append(replace(picture, values=index if count > 1 else index[0]))
        number += count
    return found


def _stackable(pictures: Sequence[interpretation.Interpreted]) -> None:
    """What ``stack`` asks too, said so that the operator knows what is wrong."""
    planes: list[interpretation.Plane] = []
    for picture in pictures:
        if picture.planes is None or picture.spacing is None:
            raise NotDefacedError("not_a_volume")
        planes += picture.planes
    if len(planes) < 2:
        raise NotDefacedError("not_a_volume")
    turns = np.array([(*plane.along_row, *plane.along_column) for plane in planes])
    if len({picture.spacing for picture in pictures}) != 1 or not float(np.ptp(turns, axis=0).max()) < 1e-3:
        raise NotDefacedError("mixed_series")
    origins = np.round([plane.origin for plane in planes], 3)
    _, times = np.unique(origins, axis=0, return_counts=True)
    if int(times.min()) > 1:
        raise NotDefacedError("four_dimensional")
    if int(times.max()) > 1:
        raise NotDefacedError("missing_slices")


def _rescale(dataset: Dataset, frame: int) -> tuple[float, float]:
    group = interpretation.macro(dataset, frame, "PixelValueTransformationSequence")
    try:
        slopes, intercepts = numbers(group, "RescaleSlope"), numbers(group, "RescaleIntercept")
    except _UNREADABLE:
        raise NotDefacedError("unreadable") from None
    return (slopes[0] if slopes else 1.0) or 1.0, intercepts[0] if slopes and intercepts else 0.0


def _padding(dataset: Dataset, stored: NDArray[Any]) -> tuple[int, int] | None:
    try:
        return interpretation.padding_range(dataset, stored.dtype)
    except _UNREADABLE:
        raise NotDefacedError("unreadable") from None


def _decoded(dataset: Dataset, syntax: str) -> NDArray[Any]:
    """(frames, rows, columns) in native byte order."""
    try:
        stored = pixel_data.decode(dataset, syntax)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - decoders raise errors of their own on broken data
        raise NotDefacedError("unreadable") from None
    native = stored.astype(stored.dtype.newbyteorder("="), copy=False)
    return native if frames(dataset) > 1 else native.reshape(1, *native.shape[-2:])


# ------------------------------------------------------------------ written again


def _written(data: bytes, stored: NDArray[Any], uid: Callable[[str], str]) -> bytes:
    dataset, syntax = parsed(data)
    _stripped(dataset, top=True)
    plain = syntax if syntax in (IMPLICIT_LE, EXPLICIT_BE) else EXPLICIT_LE
    dtype = stored.dtype.newbyteorder(">" if plain == EXPLICIT_BE else "<")
    body = np.ascontiguousarray(stored, dtype).tobytes()
    wide = "OB" if stored.dtype.itemsize == 1 else "OW"
    dataset[0x7FE00010] = DataElement(0x7FE00010, wide, body + b"\0" * (len(body) % 2))
    if int(dataset.get("PixelRepresentation", 0)) != int(stored.dtype.kind == "i"):
        dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    _stamped(dataset)
    for keyword in ("SOPInstanceUID", "SeriesInstanceUID"):
        before = text(dataset, keyword)
        if before and uid(before) != before:
            setattr(dataset, keyword, uid(before))
    dataset.file_meta.MediaStorageSOPClassUID = UID(text(dataset, "SOPClassUID"))
    dataset.file_meta.MediaStorageSOPInstanceUID = UID(text(dataset, "SOPInstanceUID"))
    dataset.file_meta.TransferSyntaxUID = UID(plain)
    dataset.preamble = b"\0" * 128
    out = io.BytesIO()
    dataset.save_as(out, enforce_file_format=True)
    return out.getvalue()


def _stamped(dataset: Dataset) -> None:
    dataset.RecognizableVisualFeatures = "NO"
    why = CODES[CLEANED].removesuffix(" Option")
    before = text(dataset, "DerivationDescription")
    if why not in before:
        dataset.DerivationDescription = f"{before}; {why}" if before else why
    _as_derived(dataset, "ImageType")
    for keyword in _GROUPS:
        for group in dataset.get(keyword) or []:
            for inside in _FRAME_TYPES:
                for item in group.get(inside) or []:
                    _as_derived(item, "FrameType")
    if text(dataset, "PatientIdentityRemoved") != "YES":
        return
    done = list(dataset.get("DeidentificationMethodCodeSequence") or [])
    if CLEANED in [text(item, "CodeValue") for item in done]:
        return
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = CLEANED, "DCM", CODES[CLEANED]
    dataset.DeidentificationMethodCodeSequence = sorted([*done, item], key=lambda i: text(i, "CodeValue"))
    methods = {m: "" for m in text(dataset, "DeidentificationMethod").split("\\") if m} | {why: ""}
    codes = {name.removesuffix(" Option"): code for code, name in CODES.items()}
    dataset.DeidentificationMethod = sorted(methods, key=lambda m: codes.get(m, ""))  # free words first, as by tags


def _as_derived(place: Dataset, keyword: str) -> None:
    values = text(place, keyword).split("\\")
    if values[0] and values[0] != "DERIVED":
        setattr(place, keyword, ["DERIVED", *values[1:]])


def _stripped(dataset: Dataset, *, top: bool) -> None:
    """Take away whatever may show the old image, at any depth."""
    for tag in list(dataset.keys()):
        if _shows_more(tag, dataset.get_item(tag), top=top):
            del dataset[tag]
        elif _is_sequence(tag, dataset.get_item(tag)) and isinstance(dataset[tag].value, Items):
            for item in dataset[tag].value:
                _stripped(item, top=False)


def _shows_more(tag: BaseTag, element: Any, *, top: bool) -> bool:
    if tag.group == 0x7FE0:
        return not (top and tag.element == 0x0010)
    if tag in _DROPPED or tag.group & 0xFF00 in (0x5000, 0x6000):
        return True
    value = getattr(element, "value", None)
    long = isinstance(value, bytes | str) and len(value) >= _PRIVATE_BYTES
    return bool(tag.is_private) and long and not _is_sequence(tag, element)


def _is_sequence(tag: BaseTag, element: Any) -> bool:
    if element.VR is None:
        return dictionary_has_tag(tag) and dictionary_VR(tag) == "SQ"
    return bool(element.VR == "SQ") or isinstance(element.value, Items)
