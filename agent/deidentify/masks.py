"""Masks: DICOM Segmentation objects (PS3.3 A.51), built anew from their geometry, their bits and a list of segments.

A segmentation object has texts in many places: labels, descriptions, algorithms, creators, tracking ids. Nothing of
them is copied. What is written is made from checked numbers, from keyed UIDs, and from the site's own list of
segments with the standard's meanings (PS3.16): a segment that is not on the list keeps the file out. The references
to the masked series are keyed as the series itself is, so that the mask finds it.

A label map (PS3.3 C.8.20.2, one number a pixel) becomes what the others are: a frame of bits for each segment that is
on a plane. So the vault has one form of masks, and the numbers of a file say nothing later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import DataElement, Dataset, FileDataset
from pydicom._uid_dict import UID_dictionary
from pydicom.sequence import Sequence as Items
from pydicom.tag import BaseTag

from agent.deidentify.attributes import frames, numbers, text
from agent.deidentify.deidentifier import DeidentifiedDataset, Deidentifier, file_meta
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import EXPLICIT_LE, IMPLICIT_LE
from agent.deidentify.ps315 import retained_attributes
from agent.deidentify.ps315.action_trace import AttributeAction, step
from agent.deidentify.ps315.options import UNKNOWN_PIXELS
from agent.deidentify.segment_list import LABEL_MAP, SEGMENTATION, Segment

_MOST_MM: Final = 10_000.0  # no scanner's table is longer
_MOST_SEGMENTS: Final = 256
_MOST_BITS: Final = 2**31  # of a label map's segments, each on its planes
_BACKGROUND: Final = ("DCM", "125040")  # segment 0 of a label map: no segment of anything
_DECIMALS: Final = 4  # of a position in mm: a tenth of a micrometre
_COSINES: Final = 6
_SOURCE: Final = "Source image for image processing operation"
_UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class _Frame:
    """One frame: which segment, where it lies, and which image it was drawn on."""

    segment: int
    position: tuple[float, ...]
    source: tuple[str, str]  # SOP class and instance; ("", "") where the file does not say


@dataclass(frozen=True, slots=True)
class _Read:
    """What is taken from a file, checked; nothing else of it goes on."""

    size: tuple[int, int, int]  # frames, rows, columns
    segments: tuple[tuple[int, Segment], ...]  # by number
    placed: tuple[_Frame, ...]
    orientation: tuple[float, ...]
    spacing: tuple[float, float]  # between rows, between columns
    thickness: float
    series: str  # that is masked
    frame_of_reference: str
    bits: bytes


def masked_series(dataset: Dataset) -> str:
    """The Series Instance UID of the one series that a mask is of.

    Raises:
        FileRejectedError: ``mask_without_series``.
    """
    items = dataset.get("ReferencedSeriesSequence") or []
    series = text(items[0], "SeriesInstanceUID") if isinstance(items, Items) and len(items) == 1 else ""
    if not series:
        raise FileRejectedError("mask_without_series")
    return series


def clean_mask(
    dataset: Dataset, transfer_syntax: str, who: Deidentifier, segments: Sequence[Segment]
) -> DeidentifiedDataset:
    """A new, de-identified segmentation object; of the argument nothing but checked values is in it.

    Raises:
        FileRejectedError: ``segment_not_listed``; ``mask_without_series``; ``mask_of_probabilities``;
            ``unsupported_encoding``, neither one bit a pixel nor whole numbers, or compressed; ``undecodable``, no
            geometry, or one that cannot be, or a pixel of a segment that the file does not describe; ``too_large``,
            a label map of too many segments; ``missing_patient``.
    """
    if transfer_syntax not in (IMPLICIT_LE, EXPLICIT_LE):
        raise FileRejectedError("unsupported_encoding")
    if text(dataset, "SegmentationType") == "FRACTIONAL":
        raise FileRejectedError("mask_of_probabilities")
    form = (text(dataset, "SOPClassUID"), text(dataset, "SegmentationType"), dataset.get("BitsAllocated"))
    labelled = form in ((LABEL_MAP, "LABELMAP", 8), (LABEL_MAP, "LABELMAP", 16))
    if not labelled and form != (SEGMENTATION, "BINARY", 1):
        raise FileRejectedError("unsupported_encoding")
    listed = _segments(dataset, segments, labelled=labelled)
    try:
        read = _read(dataset, listed, labelled=labelled)
    except _UNREADABLE:
        raise FileRejectedError("undecodable") from None
    made = _written(dataset, read, who)
    steps = [_fate(tag, made) for tag in sorted(dataset.keys())]
    steps += [step("preamble", "blanked", "preamble"), step("file_meta", "replaced", "file_meta")]
    return DeidentifiedDataset(made, tuple(steps))


def _fate(tag: BaseTag, made: Dataset) -> AttributeAction:
    path = f"{tag >> 16:04X},{tag & 0xFFFF:04X}"
    if tag not in made:
        return step(path, "removed", "not_listed")
    return step(path, "rekeyed", "profile") if made[tag].VR == "UI" else step(path, "cleaned", "listed")


# -- what is taken


def _segments(dataset: Dataset, listed: Sequence[Segment], *, labelled: bool) -> tuple[tuple[int, Segment], ...]:
    found: dict[int, Segment] = {}
    items = dataset.get("SegmentSequence") or []
    if not isinstance(items, Items) or not 0 < len(items) <= _MOST_SEGMENTS:
        raise FileRejectedError("undecodable")
    by_code = {one.meant: one for one in listed}
    for item in items:
        number, kinds = item.get("SegmentNumber"), item.get("SegmentedPropertyTypeCodeSequence") or []
        if not isinstance(number, int) or number in found or not isinstance(kinds, Items) or len(kinds) != 1:
            raise FileRejectedError("undecodable")
        kind = kinds[0]
        code = retained_attributes.current_code(text(kind, "CodingSchemeDesignator"), text(kind, "CodeValue"))
        if labelled and number == 0:
            if code != _BACKGROUND:
                raise FileRejectedError("undecodable")  # the number of what is no segment
            continue
        if code not in by_code:
            raise FileRejectedError("segment_not_listed")
        found[number] = by_code[code]
    if not found:
        raise FileRejectedError("undecodable")
    return tuple(sorted(found.items()))


def _read(dataset: Dataset, segments: tuple[tuple[int, Segment], ...], *, labelled: bool) -> _Read:
    size = (frames(dataset), int(dataset.Rows), int(dataset.Columns))
    shared = (dataset.get("SharedFunctionalGroupsSequence") or [Dataset()])[0]
    groups = list(dataset.PerFrameFunctionalGroupsSequence)
    if len(groups) != size[0]:
        raise ValueError("a group for each frame")
    orientations = {
        _macro(g, shared, "PlaneOrientationSequence", "ImageOrientationPatient", 6, _COSINES) for g in groups
    }
    spacings = {_macro(g, shared, "PixelMeasuresSequence", "PixelSpacing", 2, _DECIMALS) for g in groups}
    thick = {_macro(g, shared, "PixelMeasuresSequence", "SliceThickness", 1, _DECIMALS) for g in groups}
    (orientation,), (spacing,), (thickness,) = orientations, spacings, thick  # one plane and one grid for all frames
    _check_plane(orientation, (*spacing, *thickness))
    reference = text(dataset, "FrameOfReferenceUID")
    if not reference:
        raise ValueError("no frame of reference")
    drawn, bits = (_label_map if labelled else _planes)(dataset, size)
    if not {number for _, number in drawn if number} <= {number for number, _ in segments}:
        raise ValueError("a pixel, or a frame, of no segment")
    placed = tuple(_frame(groups[plane], shared, number or segments[0][0]) for plane, number in drawn)
    return _Read(
        (len(drawn), *size[1:]),
        segments,
        placed,
        orientation,
        (spacing[0], spacing[1]),
        thickness[0],
        masked_series(dataset),
        reference,
        bits,
    )


_Drawn = tuple[list[tuple[int, int]], bytes]  # plane and segment of each frame (0: an empty one), and all their bits


def _planes(dataset: Dataset, size: tuple[int, int, int]) -> _Drawn:
    """Of a file that has a frame of bits for a plane and a segment."""
    shared = (dataset.get("SharedFunctionalGroupsSequence") or [Dataset()])[0]
    places = [
        (group.get("SegmentIdentificationSequence") or shared.get("SegmentIdentificationSequence"))[0]
        for group in dataset.PerFrameFunctionalGroupsSequence
    ]
    numbers_said = [int(place.ReferencedSegmentNumber) for place in places]
    if not all(numbers_said):
        raise ValueError("a frame of no segment")
    count = math.prod(size)
    return list(enumerate(numbers_said)), _bits(_value(dataset, -(-count // 8)), count)


def _label_map(dataset: Dataset, size: tuple[int, int, int]) -> _Drawn:
    """Of a label map: a frame for each segment that is on a plane, and an empty one for a plane without any."""
    kind = np.dtype(np.uint8 if dataset.BitsAllocated == 8 else "<u2")
    if dataset.get("PixelRepresentation") != 0 or dataset.get("PixelPaddingValue", 0) != 0:
        raise ValueError("numbers of segments, of which 0 is none")
    count = math.prod(size)
    labels = np.frombuffer(_value(dataset, count * kind.itemsize), kind, count).reshape(size)
    drawn = []
    for plane, there in enumerate(map(np.unique, labels)):
        drawn += [(plane, int(number)) for number in there if number] or [(plane, 0)]
    if len(drawn) * size[1] * size[2] > _MOST_BITS:
        raise FileRejectedError("too_large")
    packed, ahead = bytearray(), list[NDArray[np.bool_]]()
    for at, (plane, number) in enumerate(drawn, 1):
        ahead.append((labels[plane] == number) & (number > 0))
        if len(ahead) == 8 or at == len(drawn):  # eight frames are whole bytes, whatever their size
            packed += np.packbits(np.stack(ahead), bitorder="little").tobytes()
            ahead.clear()
    return drawn, bytes(packed) + b"\0" * (len(packed) % 2)


def _value(dataset: Dataset, length: int) -> bytes:
    value = dataset["PixelData"].value
    if not isinstance(value, bytes) or len(value) < length:
        raise ValueError("fewer bits than pixels")
    return value


def _check_plane(orientation: tuple[float, ...], lengths: tuple[float, ...]) -> None:
    row, column = np.array(orientation[:3]), np.array(orientation[3:])
    straight = abs(np.linalg.norm(row) - 1) < 1e-3 and abs(np.linalg.norm(column) - 1) < 1e-3
    if not (straight and abs(float(row @ column)) < 1e-3 and all(0 < mm <= _MOST_MM for mm in lengths)):
        raise ValueError("no plane")


def _bits(value: bytes, count: int) -> bytes:
    """The pixels alone, padded to an even length; bits behind the last pixel are zero."""
    bits = np.unpackbits(np.frombuffer(value, np.uint8), count=count, bitorder="little")
    packed = np.packbits(bits, bitorder="little").tobytes()
    return packed + b"\0" * (len(packed) % 2)


def _frame(group: Dataset, shared: Dataset, segment: int) -> _Frame:
    position = _macro(group, shared, "PlanePositionSequence", "ImagePositionPatient", 3, _DECIMALS)
    derived = group.get("DerivationImageSequence") or []
    sources = [s for item in derived for s in item.get("SourceImageSequence") or []]
    source = ("", "")
    if len(sources) == 1:
        source = (text(sources[0], "ReferencedSOPClassUID"), text(sources[0], "ReferencedSOPInstanceUID"))
    return _Frame(segment, position, source if all(source) else ("", ""))


def _macro(
    group: Dataset, shared: Dataset, sequence: str, keyword: str, count: int, decimals: int
) -> tuple[float, ...]:
    place = (group.get(sequence) or shared.get(sequence))[0]
    found = numbers(place, keyword)
    if len(found) != count or not all(abs(value) <= _MOST_MM for value in found):
        raise ValueError("not so many numbers, or too large ones")
    return tuple(round(value, decimals) + 0.0 for value in found)


# -- what is written


def _item(**values: object) -> Dataset:
    """A data set of these attributes, by their keywords."""
    made = Dataset()
    for keyword, value in values.items():
        setattr(made, keyword, value)
    return made


def _written(source: Dataset, read: _Read, who: Deidentifier) -> FileDataset:
    pseudonym, instance = who.patient(source), who.uid(text(source, "SOPInstanceUID"))
    organisation, indexes = _dimensions(instance)
    places = sorted({frame.position for frame in read.placed})
    body = _item(
        **{"SOPClassUID": SEGMENTATION, "SOPInstanceUID": instance, "Modality": "SEG"},
        **{keyword: who.uid(text(source, keyword)) for keyword in ("StudyInstanceUID", "SeriesInstanceUID")},
        **{"FrameOfReferenceUID": who.uid(read.frame_of_reference), "PositionReferenceIndicator": ""},
        **dict.fromkeys(("Manufacturer", "StudyDate", "StudyTime", "StudyID", "AccessionNumber", "PatientSex"), ""),
        **dict.fromkeys(("ReferringPhysicianName", "ContentDescription", "ContentCreatorName"), ""),
        **{"SeriesNumber": "1", "InstanceNumber": "1", "ContentLabel": "MASK", "ImageType": ["DERIVED", "PRIMARY"]},
        **dict(zip(("NumberOfFrames", "Rows", "Columns"), read.size, strict=True)),
        **{"SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2", "PixelRepresentation": 0},
        **{"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0, "LossyImageCompression": "00"},
        **{"SegmentationType": "BINARY", "SegmentSequence": [_segment(*one) for one in read.segments]},
        **{"DimensionOrganizationSequence": organisation, "DimensionIndexSequence": indexes},
        **{"SharedFunctionalGroupsSequence": [_shared(read)], "ReferencedSeriesSequence": [_references(read, who)]},
        PerFrameFunctionalGroupsSequence=[_per_frame(f, places.index(f.position) + 1, who) for f in read.placed],
    )
    for tag, stamp in who.stamps(source, pseudonym, UNKNOWN_PIXELS).items():
        body[tag] = stamp
    body[0x7FE00010] = DataElement(0x7FE00010, "OB", read.bits)
    made = FileDataset("", Dataset(dict(sorted(body.items()))), preamble=b"\0" * 128, file_meta=file_meta(body))
    made.set_original_encoding(False, True)
    return made


def _code(scheme: str, value: str, meaning: str) -> Dataset:
    return _item(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning[:64])


def _segment(number: int, kind: Segment) -> Dataset:
    return _item(
        SegmentNumber=number,
        SegmentLabel=kind.name,
        SegmentAlgorithmType="MANUAL",  # whoever drew it: another would have to be named
        SegmentedPropertyCategoryCodeSequence=[_code("SCT", "123037004", "Anatomical Structure")],
        SegmentedPropertyTypeCodeSequence=[_code(*kind.meant, kind.meaning)],
    )


def _dimensions(instance: str) -> tuple[list[Dataset], list[Dataset]]:
    """Frames are ordered by segment and by place (PS3.3 C.7.6.17)."""
    pointers = ((0x0062000B, 0x0062000A), (0x00200032, 0x00209113))
    return [_item(DimensionOrganizationUID=instance)], [
        _item(DimensionOrganizationUID=instance, DimensionIndexPointer=pointer, FunctionalGroupPointer=group)
        for pointer, group in pointers
    ]


def _shared(read: _Read) -> Dataset:
    plane = _item(ImageOrientationPatient=[_decimal(value) for value in read.orientation])
    spacing, thickness = [_decimal(value) for value in read.spacing], _decimal(read.thickness)
    measures = _item(PixelSpacing=spacing, SliceThickness=thickness)
    return _item(PlaneOrientationSequence=[plane], PixelMeasuresSequence=[measures])


def _per_frame(frame: _Frame, place: int, who: Deidentifier) -> Dataset:
    group = _item(
        FrameContentSequence=[_item(DimensionIndexValues=[frame.segment, place])],
        PlanePositionSequence=[_item(ImagePositionPatient=[_decimal(value) for value in frame.position])],
        SegmentIdentificationSequence=[_item(ReferencedSegmentNumber=frame.segment)],
    )
    if frame.source[1]:
        source = _reference(frame.source, who)
        source.update(_item(PurposeOfReferenceCodeSequence=[_code("DCM", "121322", _SOURCE)]))
        derived = _item(SourceImageSequence=[source], DerivationCodeSequence=[_code("DCM", "113076", "Segmentation")])
        group.update(_item(DerivationImageSequence=[derived]))
    return group


def _reference(source: tuple[str, str], who: Deidentifier) -> Dataset:
    kind = source[0] if source[0] in UID_dictionary else ""
    return _item(ReferencedSOPClassUID=kind, ReferencedSOPInstanceUID=who.uid(source[1]))


def _references(read: _Read, who: Deidentifier) -> Dataset:
    sources = sorted({frame.source for frame in read.placed if frame.source[1]})
    instances = [_reference(source, who) for source in sources]
    return _item(SeriesInstanceUID=who.uid(read.series), ReferencedInstanceSequence=instances)


def _decimal(value: float) -> str:
    """As DS: at most 16 characters."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
