"""What lets a risky picture in: a region rule that fits it, and nothing is left where the rule says."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom.data import get_testdata_file

from agent.deidentify import pixel_redaction
from agent.deidentify.admission_rules import AdmissionRules, judge, same_instance
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.pixel_redaction import Blank, Rectangle, RedactedPart
from agent.deidentify.pixels import pixel_data
from agent.deidentify.prescan import EXPLICIT_LE, read_meta
from agent.ingest.parser_process import ParserLimits, ParserProcess

TOP = Rectangle(0, 0, 40, 320)
ULTRASOUND = AdmissionRules(modalities=frozenset({"US"}))
BANNER = Blank("US", 240, 320, (TOP,))


def _ultrasound(**changes: object) -> pydicom.FileDataset:
    dataset = pydicom.dcmread(str(get_testdata_file("examples_rgb_color.dcm", download=False)))
    for keyword, value in changes.items():
        setattr(dataset, keyword, value)
    return dataset


def _region(left: int, top: int, right: int, bottom: int) -> pydicom.Dataset:
    item = pydicom.Dataset()
    item.RegionLocationMinX0, item.RegionLocationMinY0 = left, top
    item.RegionLocationMaxX1, item.RegionLocationMaxY1 = right, bottom
    return item


def _code(dataset: pydicom.Dataset, rules: AdmissionRules) -> str:
    try:
        judge(dataset, EXPLICIT_LE, rules)
    except FileRejectedError as refusal:
        return refusal.code
    return "accepted"


def test_an_ultrasound_picture_comes_in_only_when_a_rule_fits_it() -> None:
    with_rule = replace(ULTRASOUND, blanks=(BANNER,))
    assert _code(_ultrasound(), ULTRASOUND) == "burned_in_risk"
    assert _code(_ultrasound(), with_rule) == "accepted"
    assert _code(_ultrasound(Rows=241), with_rule) == "burned_in_risk"
    assert _code(_ultrasound(), replace(with_rule, modalities=frozenset({"CT"}))) == "modality_not_allowed"


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        (replace(BANNER, manufacturer="philips  medical SYSTEMS"), True),
        (replace(BANNER, manufacturer="Other"), False),
        (replace(BANNER, model="X200"), True),
        (replace(BANNER, model="X2"), False),
        (Blank("CT", 240, 320, (TOP,)), False),
        (Blank("US", 320, 240, (Rectangle(0, 0, 40, 240),)), False),
    ],
)
def test_a_rule_fits_by_modality_size_maker_and_model(rule: Blank, fits: bool) -> None:
    dataset = _ultrasound(Manufacturer="Philips Medical Systems ", ManufacturerModelName="x200")
    assert rule.matches(dataset) is fits


def test_secondary_captures_derived_and_marked_pictures_come_in_by_rule_too() -> None:
    dataset = pydicom.dcmread(str(get_testdata_file("MR_small.dcm", download=False)))
    rules = AdmissionRules(modalities=frozenset({"MR"}))
    blanked = replace(rules, blanks=(Blank("MR", 64, 64, (Rectangle(0, 0, 8, 64),)),))
    for keyword, value in (
        ("ImageType", ["DERIVED", "SECONDARY"]),
        ("SOPClassUID", "1.2.840.10008.5.1.4.1.1.7"),
        ("BurnedInAnnotation", "YES"),
    ):
        dataset.ImageType, dataset.SOPClassUID = ["ORIGINAL", "PRIMARY"], "1.2.840.10008.5.1.4.1.1.4"
        setattr(dataset, keyword, value)
        assert _code(dataset, rules) == "burned_in_risk"
        assert _code(dataset, blanked) == "accepted"
        dataset.BurnedInAnnotation = "NO"


def test_ultrasound_regions_stay_and_everything_else_is_blanked() -> None:
    rules = replace(ULTRASOUND, us_regions=True)
    dataset = _ultrasound(SequenceOfUltrasoundRegions=[_region(10, 50, 99, 149), _region(200, 60, 219, 79)])
    assert _code(dataset, rules) == "accepted"
    values = pixel_data.decode(dataset, EXPLICIT_LE)
    parts = pixel_redaction.plan(dataset, (), us_regions=True)
    blanked = pixel_redaction.blank(values, parts, "RGB")
    expected = np.zeros_like(values)  # corners are inclusive
    expected[50:150, 10:100] = values[50:150, 10:100]
    expected[60:80, 200:220] = values[60:80, 200:220]
    assert np.array_equal(blanked, expected)
    assert values.any(axis=-1).sum() > blanked.any(axis=-1).sum()


def test_regions_count_only_when_the_site_says_so_and_for_ultrasound_only() -> None:
    items = [_region(10, 50, 99, 149)]
    assert _code(_ultrasound(SequenceOfUltrasoundRegions=items), ULTRASOUND) == "burned_in_risk"
    capture = _ultrasound(Modality="OT", SOPClassUID="1.2.840.10008.5.1.4.1.1.7", SequenceOfUltrasoundRegions=items)
    assert _code(capture, AdmissionRules(modalities=frozenset({"OT"}), us_regions=True)) == "burned_in_risk"


@pytest.mark.parametrize(
    "region", [(10, 50, 5, 90), (0, 0, 320, 100), (0, 0, 100, 240), (10, 50, 99, 10), (None, 0, 9, 9), None]
)
def test_regions_that_make_no_sense_are_refused(region: tuple[int, int, int, int] | None) -> None:
    items = [] if region is None else [_region(*region)]
    code = _code(_ultrasound(SequenceOfUltrasoundRegions=items), replace(ULTRASOUND, us_regions=True))
    assert code == "burned_in_risk"


def test_a_region_that_is_the_whole_picture_blanks_nothing_and_so_does_not_count() -> None:
    dataset = _ultrasound(SequenceOfUltrasoundRegions=[_region(0, 0, 319, 239)])
    parts = pixel_redaction.plan(dataset, (), us_regions=True)
    with pytest.raises(FileRejectedError, match="burned_in_risk"):
        pixel_redaction.blank(pixel_data.decode(dataset, EXPLICIT_LE), parts, "RGB")


@pytest.mark.parametrize(("photometric", "black"), [("MONOCHROME2", -5), ("MONOCHROME1", 900)])
def test_black_is_the_darkest_value_of_the_picture_in_every_frame(photometric: str, black: int) -> None:
    values = np.full((3, 8, 8), 7, dtype=np.int16)
    values[0, 7, 7], values[2, 6, 6] = -5, 900
    before = values.copy()
    out = pixel_redaction.blank(values, (RedactedPart((Rectangle(0, 0, 2, 8),), keep=False),), photometric)
    assert (out[:, :2] == black).all()
    assert np.array_equal(out[:, 2:], before[:, 2:])
    assert np.array_equal(values, before)


@given(
    st.tuples(st.integers(0, 11), st.integers(0, 8), st.integers(1, 12), st.integers(1, 9)).filter(
        lambda r: r[0] < r[2] and r[1] < r[3]
    ),
    st.booleans(),
)
def test_blanking_inside_and_keeping_inside_are_each_others_opposite(
    corners: tuple[int, int, int, int], colour: bool
) -> None:
    values = np.random.default_rng(3).integers(1, 255, (12, 9, 3) if colour else (12, 9)).astype(np.uint8)
    part, photometric = Rectangle(*corners), "RGB" if colour else "MONOCHROME2"
    black = 0 if colour else values.min()
    inside = np.zeros((12, 9), dtype=bool)
    inside[corners[0] : corners[2], corners[1] : corners[3]] = True
    blanked = pixel_redaction.blank(values, (RedactedPart((part,), keep=False),), photometric)
    assert (blanked[inside] == black).all()
    assert np.array_equal(blanked[~inside], values[~inside])
    if not inside.all():
        kept = pixel_redaction.blank(values, (RedactedPart((part,), keep=True),), photometric)
        assert (kept[~inside] == black).all()
        assert np.array_equal(kept[inside], values[inside])


@pytest.mark.parametrize(
    "arguments",
    [
        ("", 240, 320, (TOP,)),
        ("US", 0, 320, (TOP,)),
        ("US", 240, 320, ()),
        ("US", 30, 320, (TOP,)),
        ("US", 40, 320, (TOP,), True),  # keeps everything
    ],
)
def test_a_rule_that_blanks_nothing_cannot_be_written(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"rectangle|region"):
        Blank(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rectangle"):
        Rectangle(5, 0, 5, 10)


def test_the_reader_blanks_what_is_kept_and_shown_and_writes_it_down() -> None:
    rules = replace(ULTRASOUND, blanks=(BANNER,))
    data = Path(str(get_testdata_file("examples_rgb_color.dcm", download=False))).read_bytes()
    with ParserProcess(rules, Deidentifier(b"\7" * 32), ParserLimits()) as reader:
        record = reader.read(data, "0" * 32)
    kept = pydicom.dcmread(io.BytesIO(record.payload)).pixel_array
    source = pydicom.dcmread(io.BytesIO(data)).pixel_array
    assert source[:40].any()  # there is a hospital's name
    assert not kept[:40].any()
    assert np.array_equal(kept[40:], source[40:])
    assert record.pixels is not None
    assert not record.pixels[:40].any()
    assert [s.action for s in record.trace if s.path == "pixels"] == ["blanked"]


def test_makers_are_compared_without_regard_to_case_and_an_unknown_one_is_refused() -> None:
    dataset = pydicom.dcmread(str(get_testdata_file("MR_small.dcm", download=False)))
    dataset.ImageType = ["ORIGINAL", "PRIMARY"]
    dataset.Manufacturer = " Toshiba_MEC "
    rules = AdmissionRules(modalities=frozenset({"MR"}), manufacturers=frozenset({"TOSHIBA_mec"}))
    assert _code(dataset, rules) == "accepted"
    for other in ("TOSHIBA", "", None):
        dataset.Manufacturer = other
        assert _code(dataset, rules) == "manufacturer_not_allowed"
        assert _code(dataset, replace(rules, manufacturers=frozenset())) == "accepted"


def test_reports_come_in_only_where_they_are_listed() -> None:
    dataset = pydicom.dcmread(str(get_testdata_file("test-SR.dcm", download=False)))
    dataset.PatientID = "X"
    assert _code(dataset, AdmissionRules(modalities=frozenset({"CT"}))) == "not_an_image"
    assert _code(dataset, AdmissionRules(modalities=frozenset({"CT"}), structured_reports=True)) == "accepted"


@pytest.mark.parametrize("keyword", ["SOPClassUID", "SOPInstanceUID"])
def test_file_meta_that_speaks_of_another_object_is_refused(keyword: str) -> None:
    data = Path(str(get_testdata_file("MR_small.dcm", download=False))).read_bytes()
    dataset = pydicom.dcmread(io.BytesIO(data))
    same_instance(read_meta(data), dataset)
    setattr(dataset, keyword, "1.2.3")
    with pytest.raises(FileRejectedError, match="instance_mismatch"):
        same_instance(read_meta(data), dataset)
