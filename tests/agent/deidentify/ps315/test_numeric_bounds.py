"""A number that stays is one that the attribute can have: no telephone number, no record number, no letters."""

from __future__ import annotations

import io
import math
import struct
from decimal import Decimal

import numpy as np
import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file
from pydicom.datadict import dictionary_VR, keyword_for_tag, tag_for_keyword
from pydicom.dataelem import RawDataElement
from pydicom.tag import BaseTag

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.ps315 import numeric_bounds, retained_attributes, safe_private
from agent.deidentify.ps315.options import Profile
from tests.support.instances import WHO, item, mr, written

PHONE = 5367017066
SAFE = Deidentifier(bytes(range(32)), "HOSPITAL", Profile(retain_safe_private=True))
_PARSED = {"DS": str, "IS": str, "FD": float, "FL": float}


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests write values that break the standard, and read them as the worker does."""
    monkeypatch.setattr(pydicom_config.settings, "_reading_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config.settings, "_writing_validation_mode", pydicom_config.IGNORE)


def _cleaned(keyword: str, value: object) -> Dataset:
    dataset = mr()
    dataset[keyword] = DataElement(keyword, dictionary_VR(keyword), value)
    return WHO.apply(dataset)


def _raw(tag: int, vr: str, value: bytes) -> RawDataElement:
    return RawDataElement(BaseTag(tag), vr, len(value), value, 0, False, True)


def _wide() -> list[int]:
    """The kept attributes whose VR could hold a number of ten digits."""
    return sorted(t for t in retained_attributes.NUMBERS if dictionary_VR(t) not in ("US", "SS", "US or SS", "AT"))


def test_no_kept_attribute_takes_a_telephone_number() -> None:
    """All of them, each by itself, and several at once where that is admitted."""
    assert len(_wide()) > 500
    for tag in _wide():
        bound, vr = numeric_bounds.bound_of(tag), dictionary_VR(tag)
        fitted = bound.fit(PHONE)
        rounded = Decimal(fitted).normalize().as_tuple() if math.isfinite(fitted) else None
        assert rounded is None or len(rounded.digits) <= 5, keyword_for_tag(tag)
        if vr in _PARSED and tag not in retained_attributes.NEEDED:
            dataset = mr()
            dataset[tag] = DataElement(tag, vr, _PARSED[vr](PHONE))
            assert str(PHONE).encode() not in written(WHO.apply(dataset)), keyword_for_tag(tag)


@pytest.mark.parametrize(
    "keyword", ["InstanceNumber", "KVP", "XRayTubeCurrent", "WindowCenter", "ImagePositionPatient"]
)
def test_a_number_out_of_range_does_not_stay_and_the_trace_says_why(keyword: str) -> None:
    dataset = mr()
    dataset[keyword] = DataElement(
        keyword, dictionary_VR(keyword), [str(PHONE)] * (3 if "Position" in keyword else 1)
    )
    clean = WHO.clean(dataset)
    assert not clean.dataset.get(keyword)
    tag = BaseTag(tag_for_keyword(keyword) or 0)
    (step,) = (s for s in clean.trace if s.path == f"{tag.group:04X},{tag.element:04X}")
    assert step.action in ("removed", "emptied")
    assert step.why == "no_number"


@pytest.mark.parametrize("keyword", ["InstanceNumber", "SeriesNumber", "KVP"])
def test_what_has_to_be_there_is_left_empty(keyword: str) -> None:
    assert keyword in _cleaned(keyword, str(PHONE))


@pytest.mark.parametrize("keyword", ["RescaleSlope", "RescaleIntercept", "NumberOfFrames"])
@pytest.mark.parametrize("value", [str(PHONE), "SMITH"])
def test_a_picture_that_would_mean_something_else_without_its_number_is_refused(keyword: str, value: str) -> None:
    dataset = mr()
    dataset[keyword] = DataElement(keyword, "LO", value)
    with pytest.raises(FileRejectedError, match="undecodable"):
        WHO.apply(dataset)


@pytest.mark.parametrize(
    ("keyword", "given", "stays"),
    [
        *(("SliceLocation", "0.4613843675", "0.461384"), ("SliceLocation", "-77.2040634155", "-77.204063")),
        *(("SliceThickness", "5.000000", "5.000000"), ("EchoTime", "4.613843675", "4.613844")),
        *(("FlipAngle", "15.000", "15.000"), ("ImagingFrequency", "63.6788921234", "63.67889")),
        *(("PixelSpacing", "0.0002521234567\\0.00025", "0.000252123\\0.00025"),),  # a microscope's
        *(("ImagePositionPatient", "-161.32421875\\0\\7", "-161.32421875\\0\\7"),),
        (
            "ImageOrientationPatient",
            "0.9999368679\\-0.0112339996\\6e-17\\0\\1\\0",
            "0.99993687\\-0.0112339996\\6e-17\\0\\1\\0",
        ),
    ],
)
def test_numbers_keep_the_digits_that_they_need(keyword: str, given: str, stays: str) -> None:
    clean = _cleaned(keyword, given.split("\\") if "\\" in given else given)
    assert written(clean).count(stays.encode()) >= 1
    assert clean[keyword].value == DataElement(keyword, "DS", stays).value


def test_letters_in_the_bytes_of_numbers_do_not_stay() -> None:
    words = b"SmithJohn Mueller Oslo01"
    for tag, vr in (
        (0x00189089, "FD"),
        (0x00189087, "FD"),
        (0x00189306, "FD"),
        (0x00209157, "UL"),
        (0x00289001, "UL"),
    ):
        data = words[: 8 if vr == "FD" and tag != 0x00189089 else 24]
        dataset = mr()
        dataset._dict[BaseTag(tag)] = _raw(tag, vr, data)
        after = written(WHO.apply(dataset))
        assert data[:8] not in after, keyword_for_tag(tag)
        assert data[-6:] not in after, keyword_for_tag(tag)


def test_an_attribute_tag_names_an_attribute_of_the_standard_or_goes() -> None:
    pointer = 0x00280009
    for value, stays in ((struct.pack("<HH", 0x0018, 0x1063), True), (b"John", False), (b"\x19\0\x0c\x10", False)):
        dataset = mr()
        dataset._dict[BaseTag(pointer)] = _raw(pointer, "AT", value)
        assert (pointer in WHO.apply(dataset)) is stays


def test_more_values_than_the_standard_admits_do_not_stay() -> None:
    assert not _cleaned("InstanceNumber", ["536", "701", "706"]).get("InstanceNumber")
    assert _cleaned("WindowCenter", ["40", "400"]).WindowCenter == [40, 400]


@given(st.floats(allow_nan=True, allow_infinity=True, width=64))
def test_a_fitted_number_is_near_the_given_one_and_short(value: float) -> None:
    for bound in (
        numeric_bounds.bound_of(0x00180060),
        numeric_bounds.bound_of(0x00280010),
        numeric_bounds.bound_of(0x00200032),
        numeric_bounds.bound_of(0x00200037),
    ):
        fitted = bound.fit(value)
        inside = bound.low <= value <= bound.high
        assert math.isfinite(fitted) == inside
        if not inside:
            continue
        assert fitted == bound.fit(fitted)
        if bound.decimals:
            assert abs(fitted - value) <= 10.0**-bound.decimals
            assert numeric_bounds._fraction(fitted) < 10
        else:
            assert len(Decimal(repr(fitted)).normalize().as_tuple().digits) <= 7
            assert math.isclose(fitted, value, rel_tol=1e-6)


def _geometry() -> list[int]:
    return [t for t in retained_attributes.NUMBERS if numeric_bounds.bound_of(t).decimals]


def test_the_geometry_of_real_images_is_exact_to_a_nanometre() -> None:
    seen = 0
    for name in ("CT_small.dcm", "MR_small.dcm", "JPEG2000.dcm", "examples_overlay.dcm"):
        dataset = pydicom.dcmread(get_testdata_file(name, download=False))
        dataset.PatientID = "1"
        clean = pydicom.dcmread(io.BytesIO(written(WHO.apply(_native(dataset)))))
        for tag in _geometry():
            if tag in dataset and dataset[tag].value:
                before, after = (np.ravel(np.array(d[tag].value, dtype=np.float64)) for d in (dataset, clean))
                assert before.shape == after.shape
                assert float(np.abs(before - after).max()) <= 1e-6, (name, keyword_for_tag(tag))
                seen += 1
    assert seen > 12


def _native(dataset: Dataset) -> Dataset:
    """Without pixels where they are compressed: this is about the header."""
    if dataset.file_meta.TransferSyntaxUID.is_compressed:
        del dataset.PixelData
    return dataset


PRIVATE = {
    "SIEMENS MR HEADER": (0x0019, 0x0E, "FD", struct.pack("<3d", 0.6, -0.8, 0.0), b"JohnSmith from Bergen 17"),
    "GEMS_PARM_01": (0x0043, 0x39, "IS", b"700\\8\\0\\0 ", b"1\\2\\5367017066 "),
    "PHILIPS IMAGING DD 001": (0x2001, 0x0A, "IS", b"12", b"5367017066"),
    "PHILIPS MR IMAGING DD 005": (0x2005, 0x0A, "DS", b"2.879853", b"0.5367017066"),
    "PHILIPS MR IMAGING DD 001": (0x2005, 0xB0, "FL", struct.pack("<f", 0.5), b"John"),
}


@pytest.mark.parametrize("creator", PRIVATE)
def test_a_safe_private_number_is_one_that_a_device_writes(creator: str) -> None:
    group, low, vr, good, bad = PRIVATE[creator]
    tag = BaseTag(group << 16 | 0x1000 | low)
    for value, claimed in ((good, vr), (bad, vr), (bad, "UN"), (good, "UN")):
        dataset = mr()
        dataset.add_new(group << 16 | 0x10, "LO", creator)
        dataset._dict[tag] = _raw(tag, claimed, value)
        clean = SAFE.apply(dataset)
        if value is good:
            assert clean.get_item(tag).value == good
        else:
            assert bad.strip() not in written(clean)


def test_ge_counts_of_b_values_lose_the_billion_that_says_how_they_were_made() -> None:
    dataset = mr()
    dataset.add_new(0x00430010, "LO", "GEMS_PARM_01")
    dataset.add_new(0x00431039, "IS", ["1000000700", "8", "0", "0"])
    clean = SAFE.clean(dataset)
    assert clean.dataset[0x00431039].value == [700, 8, 0, 0]
    assert [s.action for s in clean.trace if s.path == "0043,1039"] == ["cleaned"]


def test_every_safe_private_element_has_a_range_that_no_ten_digits_pass() -> None:
    assert len(safe_private.SAFE) > 20
    for known in safe_private.SAFE.values():
        assert known.bound.low < known.bound.high <= 1e6
        assert known.bound.most <= 1024


def test_no_element_of_a_nested_item_is_less_bounded() -> None:
    dataset = mr()
    dataset.SharedFunctionalGroupsSequence = [
        item((0x00180060, "DS", str(PHONE)), (0x00200013, "IS", str(PHONE)), (0x00180088, "DS", "2.5"))
    ]
    (kept,) = WHO.apply(dataset).SharedFunctionalGroupsSequence
    assert kept.SpacingBetweenSlices == 2.5
    assert not kept.get("KVP")
    assert not kept.get("InstanceNumber")
