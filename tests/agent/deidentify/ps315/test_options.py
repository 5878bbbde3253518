"""Each option of the profile, on and off, on a real image; what is stamped is what was done."""

from __future__ import annotations

import io
import subprocess
from dataclasses import replace
from pathlib import Path

import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.pixels import pixel_data
from agent.deidentify.ps315 import retained_attributes
from agent.deidentify.ps315.options import CODES, Pixels, Profile
from tests.support.peers import need

KEY = bytes(range(32))
EVERYTHING = Profile(
    times=True,
    retain_device=True,
    retain_patient_characteristics=True,
    retain_safe_private=True,
    clean_descriptors=True,
    clean_structured_content=True,
)


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests write values that break the standard, and read them as the worker does."""
    monkeypatch.setattr(pydicom_config.settings, "_reading_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config.settings, "_writing_validation_mode", pydicom_config.IGNORE)


def _image(**changes: object) -> Dataset:
    dataset = pydicom.dcmread(get_testdata_file("MR_small.dcm", download=False))
    for keyword, value in changes.items():
        setattr(dataset, keyword, value)
    return dataset


def _clean(dataset: Dataset, **options: bool) -> Dataset:
    return Deidentifier(KEY, "H", Profile(**options)).clean(dataset).dataset


def _codes(dataset: Dataset) -> list[str]:
    return [item.CodeValue for item in dataset.DeidentificationMethodCodeSequence]


DATED = {"StudyDate": "20230301", "SeriesDate": "20230304", "StudyTime": "101112", "SeriesTime": "101500.25"}


def test_with_modified_dates_intervals_survive_and_times_only_when_asked_for() -> None:
    dataset = _image(**DATED, AcquisitionDateTime="20230305101112.5+0100")
    plain, timed = _clean(dataset), _clean(dataset, times=True)
    assert int(plain.SeriesDate) - int(plain.StudyDate) in (3, 73, 72, 75, 8873, 8872)  # a month or year may turn
    assert plain.LongitudinalTemporalInformationModified == "MODIFIED"
    assert (plain.StudyTime, timed.StudyTime, timed.SeriesTime) == ("", "101112", "101500.25")
    assert timed.AcquisitionDateTime[8:] == "101112.5+0100"
    assert timed.StudyDate == plain.StudyDate != "20230301"
    assert timed.PatientBirthDate == ""


def test_without_modified_dates_no_date_is_left() -> None:
    clean = _clean(_image(**DATED, AcquisitionDateTime="20230305101112"), retain_longitudinal=False)
    assert clean.StudyDate == clean.StudyTime == ""
    assert "SeriesDate" not in clean
    assert "AcquisitionDateTime" not in clean
    assert clean.LongitudinalTemporalInformationModified == "REMOVED"
    assert "113107" not in _codes(clean)


def test_times_without_dates_are_no_policy() -> None:
    with pytest.raises(ValueError, match="times needs"):
        Profile(retain_longitudinal=False, times=True)
    with pytest.raises(ValueError, match="true or false"):
        Profile(retain_device=1)  # type: ignore[arg-type]


def test_the_device_stays_only_under_its_option_and_never_with_the_patients_name() -> None:
    dataset = _image(DeviceSerialNumber="12345-A", StationName="SMITHROOM", PatientName="Smithroom^John")
    kept = _clean(dataset, retain_device=True)
    assert kept.DeviceSerialNumber == "12345-A"
    assert "StationName" not in kept
    assert "DeviceSerialNumber" not in _clean(dataset)


def test_patient_characteristics_stay_only_under_their_option_and_great_age_is_capped() -> None:
    dataset = _image(PatientAge="093Y", PatientSex="F", PatientWeight="63.5", Allergies="Contrast of Mrs Smith")
    kept, gone = _clean(dataset, retain_patient_characteristics=True), _clean(dataset)
    assert (kept.PatientAge, kept.PatientSex, kept.PatientWeight) == ("090Y", "F", 63.5)
    assert kept.Allergies == "CONTRAST OF"
    assert gone.PatientSex == ""
    assert {"PatientAge", "PatientWeight", "Allergies"}.isdisjoint(gone.dir())


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("T1 AX BRAIN W/O CONTRAST", "T1 AX BRAIN W/O CONTRAST"),
        ("MRI brain for Mrs John Smith, 12 Main St 90210", "MRI BRAIN FOR"),
        ("MRI brain for Mrs John Smith, 12 Main St", "MRI BRAIN FOR 12"),
        *(
            ("CT chest 123 456 789", "CT CHEST"),
            ("CT chest 12 03 85", "CT CHEST"),
            ("CT chest 5 MM", "CT CHEST 5 MM"),
        ),
        ("CT chest 1.3.85", "CT CHEST"),
        ("HEAD 5551234567 SMITH^JOHN", ""),
        ("Schädel", ""),
    ],
)
def test_descriptions_keep_technical_words_only_and_none_of_the_patients_own(given: str, left: str) -> None:
    dataset = _image(SeriesDescription=given, PatientName="Head^John")
    assert _clean(dataset, clean_descriptors=True).SeriesDescription == left
    assert "SeriesDescription" not in _clean(dataset)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_no_word_outside_the_list_survives_in_a_description(value: str) -> None:
    words = retained_attributes.technical_words(value, frozenset({"brain"})).split()
    assert all(w in retained_attributes.VOCABULARY["descriptors"] or (w.isdigit() and len(w) <= 3) for w in words)
    assert "BRAIN" not in words


def _private(dataset: Dataset) -> Dataset:
    dataset[0x00190010] = DataElement(0x00190010, "LO", "SIEMENS MR HEADER")
    dataset[0x0019100C] = DataElement(0x0019100C, "IS", "1000")
    dataset[0x00191008] = DataElement(0x00191008, "CS", "SMITH")
    dataset[0x00290010] = DataElement(0x00290010, "LO", "SIEMENS CSA HEADER")
    dataset[0x00291010] = DataElement(0x00291010, "OB", b"SV10Smith^John")
    dataset[0x20050010] = DataElement(0x20050010, "LO", "Philips MR Imaging DD 001")
    dataset[0x2005100E] = DataElement(0x2005100E, "FL", 1.5)
    dataset[0x00430010] = DataElement(0x00430010, "LO", "SOMEBODY ELSE")
    dataset[0x00431039] = DataElement(0x00431039, "IS", "7")
    return dataset


def test_only_safe_private_numbers_stay_by_their_creator_and_only_under_the_option() -> None:
    dataset = _private(_image())
    kept = _clean(dataset, retain_safe_private=True)
    left = {int(tag) for tag in kept._dict if tag.is_private}
    assert left == {0x00190010, 0x0019100C, 0x20050010, 0x2005100E}
    assert kept[0x0019100C].value == 1000
    assert kept[0x2005100E].value == 1.5
    assert not any(tag.is_private for tag in _clean(dataset)._dict)


def test_words_in_a_safe_private_number_do_not_stay() -> None:
    dataset = _private(_image())
    dataset[0x0019100C] = DataElement(0x0019100C, "LO", "Smith")
    assert 0x0019100C not in _clean(dataset, retain_safe_private=True)


@pytest.mark.parametrize(
    ("option", "code"),
    [
        *(("clean_structured_content", "113104"), ("clean_descriptors", "113105"), ("retain_longitudinal", "113107")),
        *(
            ("retain_patient_characteristics", "113108"),
            ("retain_device", "113109"),
            ("retain_safe_private", "113111"),
        ),
    ],
)
def test_the_codes_name_exactly_the_options_that_are_on(option: str, code: str) -> None:
    off = Profile(retain_longitudinal=False)
    on = replace(off, **{option: True})
    assert off.codes() == ("113100",)
    assert on.codes() == ("113100", code)
    clean = Deidentifier(KEY, "H", on).clean(_image()).dataset
    assert _codes(clean) == ["113100", code]
    assert [i.CodeMeaning for i in clean.DeidentificationMethodCodeSequence] == [CODES["113100"], CODES[code]]
    assert len(clean.DeidentificationMethod) == 3


def test_the_codes_are_those_of_the_standard() -> None:
    # PS3.16 CID 7050 through pydicom's own copy of the standard's concepts
    for value in CODES:
        assert retained_attributes.concept("DCM", value) == CODES[value]


@pytest.mark.parametrize(
    ("state", "said", "burned_in", "faces", "codes"),
    [
        (Pixels(), "NO", None, None, set()),
        (Pixels(), "YES", "YES", "YES", set()),
        (Pixels("vouched", "none"), "NO", "NO", "NO", set()),
        (Pixels("cleaned"), "YES", "NO", "YES", {"113101"}),
        (Pixels("cleaned", "removed"), "YES", "NO", "NO", {"113101", "113102"}),
    ],
)
def test_what_is_said_about_the_pixels_is_what_was_done_to_them(
    state: Pixels, said: str, burned_in: str | None, faces: str | None, codes: set[str]
) -> None:
    dataset = _image(BurnedInAnnotation=said, RecognizableVisualFeatures=said)
    clean = Deidentifier(KEY, "H").clean(dataset, state).dataset
    assert clean.get("BurnedInAnnotation") == burned_in
    assert clean.get("RecognizableVisualFeatures") == faces
    assert {"113101", "113102"} & set(_codes(clean)) == codes


def _errors(path: Path) -> int:
    done = subprocess.run(["dciodvfy", str(path)], capture_output=True, text=True, check=False)
    return sum(line.startswith("Error") for line in (done.stdout + done.stderr).splitlines())


@pytest.mark.parametrize(
    "name",
    [
        *("CT_small.dcm", "MR_small.dcm", "examples_overlay.dcm", "JPEG2000.dcm", "examples_rgb_color.dcm"),
        *("examples_jpeg2k.dcm", "693_J2KI.dcm", "examples_ybr_color.dcm", "examples_palette.dcm"),
        "J2K_pixelrep_mismatch.dcm",
    ],
)
@pytest.mark.parametrize("profile", [Profile(), Profile(retain_longitudinal=False), EVERYTHING])
def test_a_validator_finds_no_more_errors_than_in_the_original(name: str, profile: Profile, tmp_path: Path) -> None:
    need("dciodvfy")
    source = Path(str(get_testdata_file(name, download=False)))
    dataset = pydicom.dcmread(source)
    native = pixel_data.native(dataset, pixel_data.decode(dataset, dataset.file_meta.TransferSyntaxUID))
    out = tmp_path / "out.dcm"
    stream = io.BytesIO()
    Deidentifier(KEY, "H", profile).clean(native).dataset.save_as(stream, enforce_file_format=True)
    out.write_bytes(stream.getvalue())
    assert _errors(out) <= _errors(source)


def test_dates_of_injection_and_of_frames_move_with_the_study_and_the_birth_does_not() -> None:
    """SUV needs the time from injection to scan (PS3.3 C.8.9.2); the option's column, older, has no such row."""
    isotope, frame = Dataset(), Dataset()
    isotope.RadiopharmaceuticalStartDateTime = "20230301093000"
    isotope.RadiopharmaceuticalStartTime = "093000"
    frame.FrameAcquisitionDateTime = "20230301103000"
    dataset = _image(**DATED, RadiopharmaceuticalInformationSequence=[isotope], FrameContentSequence=[frame])
    dataset.PatientBirthDate = "19500102"
    timed, plain, off = (
        _clean(dataset, times=True),
        _clean(dataset),
        _clean(dataset, retain_longitudinal=False),
    )
    inside = timed.RadiopharmaceuticalInformationSequence[0]
    assert inside.RadiopharmaceuticalStartDateTime == f"{timed.StudyDate}093000"
    assert inside.RadiopharmaceuticalStartTime == "093000"
    assert timed.FrameContentSequence[0].FrameAcquisitionDateTime == f"{timed.StudyDate}103000"
    assert plain.RadiopharmaceuticalInformationSequence[0].RadiopharmaceuticalStartDateTime == plain.StudyDate
    assert "RadiopharmaceuticalStartTime" not in plain.RadiopharmaceuticalInformationSequence[0]
    assert "20230301" not in str(timed) + str(plain) + str(off)
    assert timed.PatientBirthDate == ""
    assert "RadiopharmaceuticalInformationSequence" not in off


def test_an_empty_character_set_is_left_out_because_the_standard_forbids_it() -> None:
    dataset = _image(SpecificCharacterSet=["ISO 2022 IR 13", "ISO 2022 IR 87"])
    assert "SpecificCharacterSet" not in _clean(dataset)
    assert _clean(_image(SpecificCharacterSet="ISO_IR 100")).SpecificCharacterSet == "ISO_IR 100"
