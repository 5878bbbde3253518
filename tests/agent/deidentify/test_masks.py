"""A mask is made anew: its bits, its place and listed segments, and no word of the file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom import Dataset

from agent.deidentify import masks
from agent.deidentify.admission_rules import AdmissionRules, judge
from agent.deidentify.attributes import text
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.identifying_values import identifiers
from agent.deidentify.masks import clean_mask
from agent.deidentify.prescan import EXPLICIT_LE
from agent.deidentify.residual_check import residual
from agent.deidentify.segment_list import Segment
from tests.support.instances import WHO
from tests.support.segmentations import LISTED, PLANTED, abdomen, drawing, mask

SERIES = abdomen()


@pytest.fixture
def source() -> Dataset:
    return mask(SERIES)


@pytest.fixture(params=["BINARY", "LABELMAP"])
def either(request: pytest.FixtureRequest) -> Dataset:
    return mask(SERIES, kind=request.param)


def cleaned(source: Dataset) -> bytes:
    out = io.BytesIO()
    clean_mask(source, EXPLICIT_LE, WHO, LISTED).dataset.save_as(out, enforce_file_format=True)
    return out.getvalue()


def test_no_word_no_uid_and_no_date_of_the_file_is_in_what_is_kept(source: Dataset) -> None:
    raw = cleaned(source)
    whole = io.BytesIO()
    source.save_as(whole)
    for planted in (*PLANTED, "P-1", "1.9.1", "1.7.1", "20200102", "CompressedSamples"):
        assert planted.encode() in whole.getvalue(), f"{planted} was there to be found"
        assert planted.encode() not in raw
    assert not residual(identifiers(source, WHO.profile), raw)
    assert b"highdicom" not in raw.lower()


def test_the_leak_test_sees_a_cleaner_that_keeps_the_label(source: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control."""
    made = masks._segment

    def leaky(number: int, kind: Segment) -> Dataset:
        item = made(number, kind)
        item.SegmentLabel = text(source.SegmentSequence[number - 1], "SegmentLabel")
        return item

    monkeypatch.setattr(masks, "_segment", leaky)
    assert b"PLANTED-LABEL" in cleaned(source)


def test_the_references_are_keyed_as_the_masked_series_is(either: Dataset) -> None:
    made = pydicom.dcmread(io.BytesIO(cleaned(either)))
    images = [WHO.apply(one) for one in SERIES]
    assert made.ReferencedSeriesSequence[0].SeriesInstanceUID == images[0].SeriesInstanceUID
    assert made.FrameOfReferenceUID == images[0].FrameOfReferenceUID
    assert (made.StudyInstanceUID, made.PatientID) == (images[0].StudyInstanceUID, images[0].PatientID)
    known = {image.SOPInstanceUID for image in images}
    for group in made.PerFrameFunctionalGroupsSequence:
        assert group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID in known


def test_the_bits_and_the_listed_names_are_kept(source: Dataset) -> None:
    made = pydicom.dcmread(io.BytesIO(cleaned(source)))
    assert np.array_equal(made.pixel_array, source.pixel_array)
    assert [text(item, "SegmentLabel") for item in made.SegmentSequence] == ["liver", "mass"]
    assert [item.SegmentedPropertyTypeCodeSequence[0].CodeMeaning for item in made.SegmentSequence] == [
        "Liver",
        "Mass",
    ]


def test_bits_behind_the_last_pixel_are_not_kept() -> None:
    drawn = drawing()[:, :63, :63]
    series = abdomen()
    for one in series:
        one.Rows = one.Columns = 63
        one.PixelData = np.zeros((63, 63), np.int16).tobytes()
    source = mask(series, drawn)
    source.PixelData = source.PixelData[:-2] + b"\xff\xff" + b"SECRET"
    raw = cleaned(source)
    assert b"SECRET" not in raw
    made = pydicom.dcmread(io.BytesIO(raw))
    count = int(made.NumberOfFrames) * 63 * 63
    assert len(made.PixelData) == 2 * -(-count // 16)
    assert not np.unpackbits(np.frombuffer(made.PixelData, np.uint8), bitorder="little")[count:].any()


def test_every_attribute_of_the_file_has_its_fate_and_no_value_is_in_one(source: Dataset) -> None:
    trace = clean_mask(source, EXPLICIT_LE, WHO, LISTED).trace
    fates = {step.path: step.action for step in trace}
    assert len(trace) == len(source) + 2
    assert (fates["0010,0020"], fates["0020,000D"]) == ("cleaned", "rekeyed")
    assert fates["0018,1000"] == "removed"


Change = Callable[[Dataset], Any]


def _first(source: Dataset) -> Dataset:
    found: Dataset = source.PerFrameFunctionalGroupsSequence[0]
    return found


def _shared(source: Dataset) -> Dataset:
    found: Dataset = source.SharedFunctionalGroupsSequence[0]
    return found


REFUSED: dict[str, tuple[str, Change]] = {
    "probabilities": ("mask_of_probabilities", lambda s: setattr(s, "SegmentationType", "FRACTIONAL")),
    "eight bits": ("unsupported_encoding", lambda s: setattr(s, "BitsAllocated", 8)),
    "no segments": ("undecodable", lambda s: delattr(s, "SegmentSequence")),
    "a number twice": ("undecodable", lambda s: setattr(s.SegmentSequence[1], "SegmentNumber", 1)),
    "no kind": ("undecodable", lambda s: delattr(s.SegmentSequence[0], "SegmentedPropertyTypeCodeSequence")),
    "a kind of its own": (
        "segment_not_listed",
        lambda s: setattr(s.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0], "CodeValue", "SMITH"),
    ),
    "a scheme of its own": (
        "segment_not_listed",
        lambda s: setattr(
            s.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0], "CodingSchemeDesignator", "99SMITH"
        ),
    ),
    "no series": ("mask_without_series", lambda s: delattr(s, "ReferencedSeriesSequence")),
    "two series": (
        "mask_without_series",
        lambda s: s.ReferencedSeriesSequence.append(Dataset()),
    ),
    "no frame of reference": ("undecodable", lambda s: setattr(s, "FrameOfReferenceUID", "")),
    "fewer bits": ("undecodable", lambda s: setattr(s, "PixelData", s.PixelData[:-100])),
    "no frames": ("undecodable", lambda s: delattr(s, "PerFrameFunctionalGroupsSequence")),
    "more frames than groups": ("undecodable", lambda s: setattr(s, "NumberOfFrames", 2)),
    "a frame of no segment": (
        "undecodable",
        lambda s: setattr(_first(s).SegmentIdentificationSequence[0], "ReferencedSegmentNumber", 7),
    ),
    "no place": ("undecodable", lambda s: delattr(_first(s), "PlanePositionSequence")),
    "a place far away": (
        "undecodable",
        lambda s: setattr(_first(s).PlanePositionSequence[0], "ImagePositionPatient", [0, 0, 19700101]),
    ),
    "no plane": (
        "undecodable",
        lambda s: setattr(_shared(s).PlaneOrientationSequence[0], "ImageOrientationPatient", [1, 0, 0, 1, 0, 0]),
    ),
    "no distance": (
        "undecodable",
        lambda s: setattr(_shared(s).PixelMeasuresSequence[0], "PixelSpacing", [0, 1]),
    ),
    "no patient": ("missing_patient", lambda s: setattr(s, "PatientID", "")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mask_that_is_none_is_refused_with_a_code(source: Dataset, what: str) -> None:
    code, change = REFUSED[what]
    change(source)
    with pytest.raises(FileRejectedError) as caught:
        clean_mask(source, EXPLICIT_LE, WHO, LISTED)
    assert caught.value.code == code


def test_a_compressed_mask_and_one_of_an_unlisted_segment_are_refused(source: Dataset) -> None:
    with pytest.raises(FileRejectedError, match="unsupported_encoding"):
        clean_mask(source, "1.2.840.10008.1.2.5", WHO, LISTED)
    with pytest.raises(FileRejectedError, match="segment_not_listed"):
        clean_mask(source, EXPLICIT_LE, WHO, LISTED[:1])


# -- label maps: one number a pixel


@pytest.fixture
def label_map() -> Dataset:
    return mask(SERIES, kind="LABELMAP")


def numbered(made: Dataset) -> NDArray[np.uint8]:
    """(slices, rows, columns): the number of the segment at each pixel, by the places that the frames state."""
    whole = np.zeros((5, made.Rows, made.Columns), np.uint8)
    for group, bits in zip(made.PerFrameFunctionalGroupsSequence, made.pixel_array, strict=True):
        plane = round(float(group.PlanePositionSequence[0].ImagePositionPatient[2]) / 3)
        whole[plane][bits > 0] = group.SegmentIdentificationSequence[0].ReferencedSegmentNumber
    return whole


def test_a_label_map_is_kept_as_the_bits_of_its_segments(label_map: Dataset, source: Dataset) -> None:
    assert (label_map.SegmentationType, label_map.BitsAllocated) == ("LABELMAP", 8), "highdicom wrote one"
    made = pydicom.dcmread(io.BytesIO(cleaned(label_map)))
    assert (made.SegmentationType, made.BitsAllocated) == ("BINARY", 1)
    assert [text(item, "SegmentLabel") for item in made.SegmentSequence] == ["liver", "mass"]
    assert np.array_equal(numbered(made), drawing())


@pytest.mark.parametrize("side", [63, 64])
def test_bits_of_a_label_map_lie_where_its_numbers_did_whatever_the_size(side: int) -> None:
    series, drawn = abdomen(), np.random.default_rng(0).integers(0, 3, (5, side, side)).astype(np.uint8)
    for one in series:
        one.Rows = one.Columns = side
        one.PixelData = np.zeros((side, side), np.int16).tobytes()
    made = pydicom.dcmread(io.BytesIO(cleaned(mask(series, drawn, kind="LABELMAP"))))
    assert len(made.PixelData) == 2 * -(-10 * side * side // 16)
    assert np.array_equal(numbered(made), drawn)


def test_a_label_map_of_sixteen_bits_is_read_as_one_of_eight(label_map: Dataset) -> None:
    wide = mask(SERIES, kind="LABELMAP")
    wide.BitsAllocated = wide.BitsStored = 16
    wide.PixelData = np.frombuffer(wide.PixelData, np.uint8).astype("<u2").tobytes()
    assert cleaned(wide) == cleaned(label_map)


def test_a_label_map_without_anything_says_that_nothing_is_there() -> None:
    empty = mask(SERIES, np.zeros_like(drawing()), kind="LABELMAP")
    made = pydicom.dcmread(io.BytesIO(cleaned(empty)))
    assert not made.pixel_array.any()
    assert [text(item, "SegmentLabel") for item in made.SegmentSequence] == ["liver", "mass"]


def test_no_word_and_no_uid_of_a_label_map_is_in_what_is_kept(label_map: Dataset) -> None:
    label_map.SegmentSequence[0].SegmentLabel = "PLANTED-BACKGROUND"
    label_map.PixelData += b"PLANTED-TAIL"
    raw, whole = cleaned(label_map), io.BytesIO()
    label_map.save_as(whole)
    for planted in (*PLANTED, "PLANTED-BACKGROUND", "PLANTED-TAIL", "P-1", "1.9.1", "1.7.1", "20200102"):
        assert planted.encode() in whole.getvalue(), f"{planted} was there to be found"
        assert planted.encode() not in raw
    assert not residual(identifiers(label_map, WHO.profile), raw)


LABELLED: dict[str, tuple[str, Change]] = {
    "a number outside its list": ("undecodable", lambda s: setattr(s, "PixelData", b"\7" + s.PixelData[1:])),
    "another background": ("undecodable", lambda s: setattr(s, "PixelPaddingValue", 1)),
    "an organ as background": (
        "undecodable",
        lambda s: setattr(s.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0], "CodeValue", "10200004"),
    ),
    "a background alone": ("undecodable", lambda s: setattr(s, "SegmentSequence", s.SegmentSequence[:1])),
    "a kind of its own": (
        "segment_not_listed",
        lambda s: setattr(s.SegmentSequence[1].SegmentedPropertyTypeCodeSequence[0], "CodeValue", "SMITH"),
    ),
    "signed numbers": ("undecodable", lambda s: setattr(s, "PixelRepresentation", 1)),
    "fewer numbers": ("undecodable", lambda s: setattr(s, "PixelData", s.PixelData[:-100])),
    "numbers of four bytes": ("unsupported_encoding", lambda s: setattr(s, "BitsAllocated", 32)),
    "bits by its type": ("unsupported_encoding", lambda s: setattr(s, "SegmentationType", "BINARY")),
    "the class of the others": (
        "unsupported_encoding",
        lambda s: setattr(s, "SOPClassUID", "1.2.840.10008.5.1.4.1.1.66.4"),
    ),
    "no frame of reference": REFUSED["no frame of reference"],
    "no series": REFUSED["no series"],
    "no place": REFUSED["no place"],
}


@pytest.mark.parametrize("what", LABELLED)
def test_a_label_map_that_is_none_is_refused_with_a_code(label_map: Dataset, what: str) -> None:
    code, change = LABELLED[what]
    change(label_map)
    with pytest.raises(FileRejectedError) as caught:
        clean_mask(label_map, EXPLICIT_LE, WHO, LISTED)
    assert caught.value.code == code


def test_a_label_map_of_more_segments_than_fit_is_too_large(
    label_map: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_MOST_BITS", 3 * 64 * 64 - 1)
    with pytest.raises(FileRejectedError, match="too_large"):
        clean_mask(label_map, EXPLICIT_LE, WHO, LISTED)


def test_probabilities_as_the_library_writes_them_stay_out() -> None:
    drawn = (drawing() == 1).astype(np.float32) / 2
    with pytest.raises(FileRejectedError, match="mask_of_probabilities"):
        clean_mask(mask(SERIES, drawn, "liver", kind="FRACTIONAL"), EXPLICIT_LE, WHO, LISTED)


# -- whether it may come in at all


def test_a_mask_is_admitted_where_segments_are_listed_and_nowhere_else(either: Dataset) -> None:
    listed = AdmissionRules(frozenset({"MR"}), segments=LISTED)
    judge(either, EXPLICIT_LE, listed)
    with pytest.raises(FileRejectedError, match="not_an_image"):
        judge(either, EXPLICIT_LE, AdmissionRules(frozenset({"MR", "SEG"})))
    with pytest.raises(FileRejectedError, match="too_large"):
        judge(either, EXPLICIT_LE, AdmissionRules(frozenset({"MR"}), segments=LISTED, max_pixels=1000))
    for keyword, code in (("PixelData", "no_pixels"), ("Rows", "undecodable"), ("StudyInstanceUID", "incomplete")):
        broken = mask(SERIES)
        delattr(broken, keyword)
        with pytest.raises(FileRejectedError, match=code):
            judge(broken, EXPLICIT_LE, listed)


def test_other_objects_that_are_no_images_stay_out_where_masks_come_in(source: Dataset) -> None:
    rules = AdmissionRules(frozenset({"MR"}), segments=LISTED)
    for other in ("66.5", "66.8", "66", "481.3", "88.33"):  # surfaces, height maps, raw data, contours, a report
        source.SOPClassUID = f"1.2.840.10008.5.1.4.1.1.{other}"
        with pytest.raises(FileRejectedError, match="not_an_image"):
            judge(source, EXPLICIT_LE, rules)
