"""Values that stay are what they claim to be: finite numbers, known terms and words, moved dates."""

from __future__ import annotations

import datetime
import re
import struct

import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file
from pydicom.datadict import dictionary_VR

from agent.deidentify.ps315 import retained_attributes, table
from agent.deidentify.ps315.value_encoding import NotOneOfError, clock, shifted
from tests.support.instances import WHO, item, mr


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests write values that break the standard, and read them as the worker does."""
    monkeypatch.setattr(pydicom_config.settings, "_reading_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config.settings, "_writing_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config, "replace_un_with_known_vr", False)


def test_nothing_that_stays_unchanged_is_listed_by_the_table() -> None:
    texts = (
        retained_attributes.MAKERS
        | retained_attributes.MODELS
        | retained_attributes.VERSIONS
        | retained_attributes.SHORT_TEXTS
    )
    harmless = (
        retained_attributes.NUMBERS
        | frozenset(retained_attributes.TERMS)
        | frozenset(retained_attributes.LOOKUP_TABLES)
        | retained_attributes.CLASS_UIDS
        | texts
    )
    assert {
        tag: table.row(tag) for tag in harmless | {retained_attributes.PIXELS} if table.row(tag) is not None
    } == {}
    assert all(table.row(tag) is not None for tag in retained_attributes.DATES)
    # the only listed sequences that stay are references, whose items are cleaned in turn
    actions = {row.action for tag in retained_attributes.SEQUENCES if (row := table.row(tag)) is not None}
    assert actions == {"X/Z/U*"}


def test_nothing_that_stays_unchanged_is_free_text_or_private() -> None:
    numbers = {"DS", "IS", "FD", "FL", "US", "SS", "UL", "SL", "UV", "SV", "US or SS", "AT"}
    assert {dictionary_VR(tag) for tag in retained_attributes.NUMBERS} <= numbers
    assert {dictionary_VR(tag) for tag in retained_attributes.TERMS} == {"CS"}
    assert {dictionary_VR(tag) for tag in retained_attributes.SEQUENCES} == {"SQ"}
    assert not any(
        tag >> 16 & 1
        for tag in retained_attributes.NUMBERS | retained_attributes.SEQUENCES | frozenset(retained_attributes.TERMS)
    )


def test_all_dates_of_a_patient_move_by_the_same_days_and_times_go() -> None:
    dataset = mr()
    dataset.StudyDate, dataset.SeriesDate, dataset.StudyTime = "20230301", "20230304", "101112"
    dataset.AcquisitionDateTime, dataset.PatientBirthDate = "20230302101112.5+0100", "19500102"
    clean = WHO.apply(dataset)
    days = [datetime.datetime.strptime(d, "%Y%m%d") for d in (clean.StudyDate, clean.SeriesDate)]
    assert (days[1] - days[0]).days == 3
    assert clean.AcquisitionDateTime == (days[0] + datetime.timedelta(days=1)).strftime("%Y%m%d")
    assert clean.StudyTime == clean.PatientBirthDate == ""
    moved = (days[0] - datetime.datetime(2023, 3, 1)).days
    assert moved == WHO.shift_days(WHO.patient(dataset))
    dataset.PatientID = "another"
    assert WHO.apply(dataset).StudyDate != clean.StudyDate


@given(st.text(max_size=20))
def test_what_is_no_date_becomes_empty_and_what_is_one_becomes_another(value: str) -> None:
    result = shifted(value, -2000)
    assert result == "" or (re.fullmatch(r"\d{8}", result) and result != value[:8])


@pytest.mark.parametrize("value", ["00010101", "20230230", "2023", "20230101-20230301", "SMITH JR"])
def test_a_date_that_cannot_be_moved_is_emptied(value: str) -> None:
    assert shifted(value, -2000) == ""


def test_a_number_that_is_not_finite_does_not_stay() -> None:
    dataset = mr()
    dataset[0x00189087] = DataElement(0x00189087, "FD", 1.0)
    dataset[0x00180088] = DataElement(0x00180088, "FD", float("nan"))
    dataset[0x00280030] = DataElement(0x00280030, "FD", [1.0, float("inf")])
    clean = WHO.apply(dataset)
    assert "SpacingBetweenSlices" not in clean
    assert "PixelSpacing" not in clean


def _coded(value: str, scheme: str, meaning: str) -> Dataset:
    return item((0x00080100, "SH", value), (0x00080102, "SH", scheme), (0x00080104, "LO", meaning))


def test_a_coded_concept_keeps_its_code_and_gets_the_meaning_of_the_standard() -> None:
    dataset = mr()
    dataset.AnatomicRegionSequence = [_coded("12738006", "SCT", "brain of Mr Smith"), _coded("4711", "99X", "Smith")]
    clean = WHO.apply(dataset)
    (item,) = clean.AnatomicRegionSequence
    assert (item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning) == ("12738006", "SCT", "Brain")
    dataset.AnatomicRegionSequence = [_coded("T-A0100", "SRT", "whatever")]
    assert WHO.apply(dataset).AnatomicRegionSequence[0].CodeMeaning == "Brain"


@pytest.mark.parametrize(
    ("keyword", "given", "stays"),
    [
        *(("Manufacturer", "SIEMENS", "SIEMENS"), ("Manufacturer", "Smith Scanners", "")),
        *(("ManufacturerModelName", "SOMATOM Definition AS+", "SOMATOM Definition AS+"),),
        *(("ManufacturerModelName", "Smith's own", None), ("SoftwareVersions", "syngo MR B17", "syngo MR B17")),
        *(("ConvolutionKernel", "B30f", "B30f"), ("ConvolutionKernel", "smith", None)),
        *(("SequenceName", "*tfl3d1_16ns", "*tfl3d1_16ns"), ("SequenceName", "for J Smith", None)),
        *(("SoftwareVersions", "V3.51*P25", "V3.51*P25"), ("SoftwareVersions", "475.321.2345", None)),
        *(("SoftwareVersions", "475 321 234 5", None), ("SequenceName", "475 321 234 5", None)),
        *(("ManufacturerModelName", "475 321 2345", None),),
        *(("PatientOrientation", ["A", "F"], ["A", "F"]), ("PatientOrientation", ["A", "SMITH"], "")),
        *(("ScanOptions", "SMITH", ""), ("ScanOptions", "FS", "FS"), ("FlipAngle", "15.000", "15.000")),
    ],
)
def test_technical_texts_stay_when_every_word_is_known(
    keyword: str, given: object, stays: object, lenient: None
) -> None:
    dataset = mr()
    setattr(dataset, keyword, given)
    clean = WHO.apply(dataset)
    if stays is None:
        assert keyword not in clean
    else:
        assert clean.get(keyword) == stays or str(clean[keyword].value) == stays


_CARRIERS = [
    *("123 456 789", "12 03 1985", "12.3.85", "85/03/12", "EM850312", "Lee850312", "KH876543", "MRN876543"),
    *("13.04.1986", "10.20.30.40", "AL1.85.0312", "0171 23456", ["0171 2345", "6789 012"], ["123", "456", "789"]),
]


@pytest.mark.parametrize("given", _CARRIERS)
@pytest.mark.parametrize(
    "keyword",
    [
        *("SequenceName", "StackID", "ConvolutionKernel", "WindowCenterWidthExplanation", "FilterType"),
        *("ManufacturerModelName", "SoftwareVersions", "RescaleType"),
    ],
)
def test_no_technical_text_takes_a_number_in_groups_a_date_or_an_address(
    keyword: str, given: object, lenient: None
) -> None:
    """Values of nobody in this file: what is not looked for must not fit in the first place."""
    dataset = mr()
    setattr(dataset, keyword, given)
    assert keyword not in WHO.apply(dataset)


@given(st.text("0123456789 ./_-", min_size=7, max_size=16).filter(lambda v: sum(c.isdigit() for c in v) > 6))
def test_more_than_six_digits_never_fit_in_a_technical_text(value: str) -> None:
    assert not any(
        fits(value)
        for fits in (retained_attributes.short_text, retained_attributes.model, retained_attributes.version)
    )


@given(st.dates(datetime.date(1900, 1, 1)), st.sampled_from(["%d.%m.%Y", "%d %m %y", "%y%m%d", "%Y%m%d", "%m/%d/%Y"]))
def test_no_date_fits_in_a_technical_text(day: datetime.date, form: str) -> None:
    assert not any(
        fits(day.strftime(form))
        for fits in (retained_attributes.short_text, retained_attributes.model, retained_attributes.version)
    )


@pytest.mark.parametrize(
    ("keyword", "number", "given"),
    [
        *(("StudyID", "S4711", "S47 11"), ("AccessionNumber", "CT12345", "CT12 345")),
        *(("PatientID", "12-345", "12 345"), ("PatientName", "Doe^J", "Doe12")),
    ],
)
def test_the_patients_own_numbers_do_not_stay_however_they_are_grouped(
    keyword: str, number: str, given: str, lenient: None
) -> None:
    dataset = mr()
    dataset.SequenceName = given
    assert WHO.apply(dataset).SequenceName == given
    setattr(dataset, keyword, number)
    assert "SequenceName" not in WHO.apply(dataset)


def test_terms_that_are_nothing_but_digits_do_not_add_up_to_a_number(lenient: None) -> None:
    dataset = mr()
    dataset.ScanOptions = ["01", "1", "2", "3"]
    assert list(WHO.apply(dataset).ScanOptions) == ["01", "1", "2", "3"]
    dataset.ScanOptions = ["01", "1", "2", "3", "3", "2"]
    assert not WHO.apply(dataset).ScanOptions


@pytest.mark.parametrize(
    ("version", "stays"),
    [
        *(("01", True), ("1.4", True), ("1993", True), ("20180131", True), ("20190731", True)),
        *(("87654321", False), ("19850312", False), ("20180312", False), ("123456", False), ("12.03.85", False)),
    ],
)
def test_the_version_of_a_coding_scheme_is_one_that_there_is(version: str, stays: bool, lenient: None) -> None:
    dataset = mr()
    coded = _coded("12738006", "SCT", "Brain")
    coded.CodingSchemeVersion = version
    dataset.AnatomicRegionSequence = [coded]
    assert ("CodingSchemeVersion" in WHO.apply(dataset).AnatomicRegionSequence[0]) is stays


@pytest.mark.parametrize("value", ["987654.876543", "240000", "126000", "120061", "876543.210987", "+8765", "-1401"])
def test_a_time_that_no_clock_shows_does_not_stay(value: str, lenient: None) -> None:
    element = DataElement(0x00080032, "TM", value)
    with pytest.raises(NotOneOfError):
        clock(Dataset(), element)
    assert shifted("20200505" + value, -2000, times=True) == ""


@given(st.times(), st.integers(-14 * 60, 14 * 60))
def test_a_time_stays_to_the_millisecond_and_so_does_its_offset(time: datetime.time, offset: int) -> None:
    zone = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02d}{abs(offset) % 60:02d}"
    plain = time.strftime("%H%M%S.%f")
    assert clock(Dataset(), DataElement(0x00080032, "TM", plain)).strip() == plain[:-3].encode()
    assert shifted("20200505" + plain + zone, 1, times=True) == "20200506" + plain[:-3] + zone


def test_a_technical_word_that_is_the_patients_name_does_not_stay() -> None:
    dataset = mr()
    dataset.PatientName, dataset.ConvolutionKernel = "Bone^John", "BONE"
    assert "ConvolutionKernel" not in WHO.apply(dataset)


def test_letters_in_a_binary_number_do_not_stay() -> None:
    dataset = mr()
    dataset[0x00189087] = DataElement(0x00189087, "FD", struct.unpack("<d", b"SmithJon")[0])
    assert "DiffusionBValue" not in WHO.apply(dataset)


def test_over_removal_is_measured_on_the_acquisition_of_real_images() -> None:
    for name, keywords in {
        "CT_small.dcm": ("KVP", "Exposure", "GantryDetectorTilt", "ConvolutionKernel", "Manufacturer", "ScanOptions"),
        "MR_small.dcm": (
            "EchoTime",
            "PercentSampling",
            "SAR",
            "ImagedNucleus",
            "EchoTrainLength",
            "ScanningSequence",
        ),
    }.items():
        dataset = pydicom.dcmread(get_testdata_file(name, download=False))
        clean = WHO.apply(dataset)
        assert [k for k in keywords if k in dataset and clean.get(k) != dataset.get(k)] == []
