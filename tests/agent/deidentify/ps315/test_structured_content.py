"""Structured reports: refused, or under their option cleaned of every text and name, however deep."""

from __future__ import annotations

import io

import pydicom
import pytest
from pydicom import Dataset
from pydicom.data import get_testdata_file

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.identifying_values import identifiers
from agent.deidentify.ps315.options import Profile
from agent.deidentify.residual_check import residual

STRICT = Deidentifier(bytes(range(32)), "H")
WHO = Deidentifier(bytes(range(32)), "H", Profile(clean_structured_content=True))


def _code(value: str, scheme: str, meaning: str) -> Dataset:
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = value, scheme, meaning
    return item


def _content(kind: str, concept: tuple[str, str], **values: object) -> Dataset:
    item = Dataset()
    item.RelationshipType, item.ValueType = "CONTAINS", kind
    item.ConceptNameCodeSequence = [_code(*concept, "about Mr Zqxjson")]
    for keyword, value in values.items():
        setattr(item, keyword, value)
    return item


def _report() -> Dataset:
    report = pydicom.dcmread(get_testdata_file("test-SR.dcm", download=False))
    report.PatientID, report.PatientName = "Z-4711-Q", "Zqxjson^Petra"
    report.ValueType, report.ContinuityOfContent = "CONTAINER", "SEPARATE"
    report.ConceptNameCodeSequence = [_code("126000", "DCM", "of Zqxjson")]
    measured = Dataset()
    measured.NumericValue = "12.5"
    measured.MeasurementUnitsCodeSequence = [_code("mm", "UCUM", "Zqxjson")]
    inner = _content("NUM", ("121206", "DCM"), MeasuredValueSequence=[measured])
    text = _content("TEXT", ("121071", "DCM"), TextValue="Mrs Zqxjson has a finding", ContentSequence=[inner])
    person = _content("PNAME", ("121008", "DCM"), PersonName="Zqxjson^Otto")
    uid = _content("UIDREF", ("121126", "DCM"), UID="1.2.3.4.5.6.7.8.9")
    day = _content("DATE", ("111536", "DCM"), Date="19611002")
    unknown = _content("TEXT", ("9", "99ZQXJSON"), TextValue="x", ContentSequence=[person])
    report.ContentSequence = [text, person, uid, day, unknown]
    return report


def _bytes(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def test_a_report_is_refused_without_the_option() -> None:
    with pytest.raises(FileRejectedError, match="not_an_image"):
        STRICT.clean(_report())


def test_a_report_keeps_its_tree_codes_and_numbers_and_no_text() -> None:
    report = _report()
    clean = pydicom.dcmread(io.BytesIO(_bytes(WHO.clean(report).dataset)))
    text, person, uid, day = clean.ContentSequence
    assert text.TextValue == "REMOVED"
    assert text.ConceptNameCodeSequence[0].CodeMeaning == "Finding"
    number = text.ContentSequence[0]
    assert number.MeasuredValueSequence[0].NumericValue == 12.5
    assert number.MeasuredValueSequence[0].MeasurementUnitsCodeSequence[0].CodeValue == "mm"
    assert person.PersonName == "REMOVED"
    assert WHO.uid("1.2.3.4.5.6.7.8.9") == uid.UID
    assert day.Date != "19611002"


def test_no_identity_is_left_in_the_bytes_of_a_cleaned_report() -> None:
    report = _report()
    before = _bytes(report)
    after = _bytes(WHO.clean(report).dataset)
    assert before.lower().count(b"zqxjson") > 5
    assert b"zqxjson" not in after.lower()
    assert residual(identifiers(report, WHO.profile), after) == ()
    assert residual(identifiers(report, WHO.profile), before)


def test_a_content_item_whose_concept_is_not_known_goes_with_all_below_it() -> None:
    trace = WHO.clean(_report()).trace
    below = [s for s in trace if s.path.startswith("0040,A730[4]")]
    assert [(s.path, s.action) for s in below] == [("0040,A730[4]", "removed")]


def test_a_report_without_a_tree_or_with_two_titles_is_refused() -> None:
    report = _report()
    report.ConceptNameCodeSequence = [report.ConceptNameCodeSequence[0]] * 2
    with pytest.raises(FileRejectedError, match="not_an_image"):
        WHO.clean(report)
    report = _report()
    del report.ContentSequence
    with pytest.raises(FileRejectedError, match="not_an_image"):
        WHO.clean(report)


@pytest.mark.parametrize("name", ["rtplan.dcm", "rtdose.dcm", "waveform_ecg.dcm", "liver_1frame.dcm"])
def test_the_option_lets_in_no_other_kind_of_object(name: str) -> None:
    dataset = pydicom.dcmread(get_testdata_file(name, download=False))
    dataset.PatientID = "1"
    with pytest.raises(FileRejectedError, match="not_an_image"):
        WHO.clean(dataset)
