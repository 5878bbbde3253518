"""The way in removes who the patient is: planted identities, keyed replacements, refusals."""

from __future__ import annotations

import datetime
import io
import re

import numpy as np
import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom import DataElement, Dataset, FileDataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, EncapsulatedPDFStorage, ExplicitVRLittleEndian, MRImageStorage

from agent.deidentify import keep, table
from agent.deidentify.reasons import Refused
from agent.deidentify.tags import Deidentifier, shifted

KEY = bytes(range(32))
WHO = Deidentifier(KEY, "HOSPITAL")
MARK = "ZQXJ"  # every planted string has it, and no honest value does


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests write values that break the standard, and read them as the worker does."""
    monkeypatch.setattr(pydicom_config.settings, "_reading_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config.settings, "_writing_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config, "replace_un_with_known_vr", False)


def _mr() -> Dataset:
    return pydicom.dcmread(get_testdata_file("MR_small.dcm", download=False))


def _written(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


class _Plants:
    """Hands out planted strings and remembers them."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, shape: str = "{}") -> str:
        self.given.append(f"{MARK}{len(self.given):03d}")
        return shape.format(self.given[-1])


def _item(*elements: tuple[int, str, object]) -> Dataset:
    item = Dataset()
    for tag, vr, value in elements:
        item.add(DataElement(tag, vr, value, validation_mode=pydicom_config.IGNORE))
    return item


TOP_LEVEL = [
    *((0x00100010, "PN"), (0x00100020, "LO"), (0x00100021, "LO"), (0x00101040, "LO"), (0x00102154, "SH")),
    *((0x00080050, "SH"), (0x00080080, "LO"), (0x00080081, "ST"), (0x00080090, "PN"), (0x00081010, "SH")),
    *((0x00081030, "LO"), (0x0008103E, "LO"), (0x00081070, "PN"), (0x00104000, "LT"), (0x00204000, "LT")),
    *((0x00181000, "LO"), (0x00181030, "LO"), (0x00181400, "LO"), (0x00200010, "SH"), (0x00321060, "LO")),
    *((0x00400254, "LO"), (0x00380010, "LO"), (0x00120040, "LO"), (0x0040A160, "UT"), (0x00281055, "LO")),
    # 2026c: name to use, pronoun comment; retired: insurance plan, comments; unknown to the dictionary
    *((0x00100012, "LO"), (0x00100016, "UC"), (0x00101050, "LO"), (0x00084000, "LT"), (0x00187FFE, "LO")),
    *((0x00189999, "LO"), (0x50002500, "LO"), (0x50000022, "LO"), (0x60004000, "LT"), (0x60000022, "LO")),
    # values of attributes that stay, under a VR that is not theirs
    *((0x00280034, "LO"), (0x00280106, "LO"), (0x00180087, "LO"), (0x00281052, "LO"), (0x00185100, "LO")),
    *((0x00180015, "LO"), (0x00080060, "LO"), (0x00080020, "LO"), (0x0008002A, "LO"), (0x00200052, "LO")),
]


def _planted() -> tuple[Dataset, list[str]]:
    """A real MR image with an identity in every place that an attribute can have."""
    dataset, plant = _mr(), _Plants()
    for tag, vr in TOP_LEVEL:
        dataset[tag] = DataElement(tag, vr, plant(), validation_mode=pydicom_config.IGNORE)
    dataset[0x00080008] = DataElement(0x00080008, "CS", ["ORIGINAL", "PRIMARY", plant()])
    dataset[0x00280030] = DataElement(0x00280030, "LO", ["1.0", plant()])
    nested = _item((0x00100010, "PN", plant()), (0x00081155, "UI", "1.2.3"), (0x0040A160, "UT", plant()))
    nested[0x00081150] = DataElement(0x00081150, "UI", plant(), validation_mode=pydicom_config.IGNORE)
    nested[0x00091010] = DataElement(0x00091010, "LO", plant())
    deeper = _item((0x00100020, "LO", plant()))
    deeper.ReferencedImageSequence = [_item((0x00100010, "PN", plant()))]
    nested.SourceImageSequence = [deeper]
    dataset.ReferencedImageSequence = [nested]  # a sequence that stays
    dataset.RequestAttributesSequence = [_item((0x00321033, "LO", plant()))]
    dataset.VOILUTSequence = [
        _item((0x00283002, "US", [2, 0, 16]), (0x00283003, "LO", plant()), (0x00283006, "OW", b"\1\0\2\0"))
    ]
    dataset.VOILUTSequence[0][0x00283006].value += plant().encode() + b"!"
    dataset[0x00290010] = DataElement(0x00290010, "LO", plant("MAKER {}"))
    dataset[0x00291001] = DataElement(0x00291001, "UN", plant().encode() + b" ")
    dataset[0x00291002] = DataElement(0x00291002, "SQ", [_item((0x00100010, "PN", plant()))])
    dataset[0x00081110] = DataElement(0x00081110, "UN", plant().encode() + b" ")
    dataset[0x50003000] = DataElement(0x50003000, "OW", plant().encode() + b" ")
    dataset[0x60003000] = DataElement(0x60003000, "OW", plant().encode() + b" ")
    dataset[0xFFFCFFFC] = DataElement(0xFFFCFFFC, "OB", plant().encode() + b" ")
    dataset.PixelData += plant().encode() + b"!"
    meta = dataset.file_meta
    meta.SourceApplicationEntityTitle = plant()
    meta.PrivateInformationCreatorUID = "1.2.3.4"
    meta.PrivateInformation = plant().encode()
    dataset.preamble = plant().encode().ljust(128, b"\0")
    dataset["PatientName"].value = plant("Mustermann^{}")
    return dataset, plant.given


def test_no_planted_identity_survives_anywhere_in_the_file(lenient: None) -> None:
    dataset, plants = _planted()
    before = io.BytesIO()
    dataset.save_as(before, enforce_file_format=False)
    assert len(plants) >= 60
    overwritten = plants[TOP_LEVEL.index((0x00100010, "PN"))]  # its place was taken by the last plant
    assert [p for p in plants if p.encode() not in before.getvalue()] == [overwritten]
    source = pydicom.dcmread(io.BytesIO(before.getvalue()))
    after = _written(WHO.apply(source))
    assert MARK.encode() not in after
    assert b"Mustermann" not in after
    assert after[:128] == b"\0" * 128


def test_the_plants_would_be_found_without_the_engine(lenient: None) -> None:
    dataset, plants = _planted()
    dataset.remove_private_tags()
    data = _written(dataset)
    assert sum(p.encode() in data for p in plants) > 40


def test_the_image_itself_stays_as_it_was() -> None:
    dataset = _mr()
    clean = pydicom.dcmread(io.BytesIO(_written(WHO.apply(dataset))))
    assert np.array_equal(clean.pixel_array, dataset.pixel_array)
    for keyword in ("PixelSpacing", "ImageOrientationPatient", "WindowCenter", "Modality", "SOPClassUID"):
        assert clean[keyword].value == dataset[keyword].value
    assert clean.ImageType == list(dataset.ImageType)


def test_the_argument_is_left_as_it_was() -> None:
    dataset, again = _mr(), _mr()
    WHO.apply(dataset)
    assert dataset == again
    assert dataset.file_meta == again.file_meta


def test_every_kept_attribute_is_either_harmless_or_replaced_according_to_the_table() -> None:
    harmless = keep.NUMBERS | frozenset(keep.TERMS) | keep.LOOKUP_TABLES | keep.CLASS_UIDS | {keep.PIXELS}
    listed = {tag: row.action for tag in harmless if (row := table.row(tag)) is not None}
    assert listed == {}
    assert all(table.row(tag) is not None for tag in keep.DATES)
    # the only listed sequences that stay are references, whose items are cleaned in turn
    actions = {row.action for tag in keep.SEQUENCES if (row := table.row(tag)) is not None}
    assert actions <= {"X/Z/U*"}


def test_the_table_has_the_rows_of_edition_2026c() -> None:
    assert table.EDITION == "2026c"
    counts: dict[str, int] = {}
    for row in table.ATTRIBUTES.values():
        counts[row.action] = counts.get(row.action, 0) + 1
    assert counts == {
        **{"D": 93, "Z": 42, "X": 412, "U": 55, "Z/D": 6},
        **{"X/Z": 11, "X/D": 23, "X/Z/D": 8, "X/Z/U*": 2},
    }
    assert len(table.REPEATING) == 3
    assert all(row.name for row in table.ATTRIBUTES.values())


@pytest.mark.parametrize(
    ("tag", "action"),
    [
        *((0x00100010, "Z"), (0x00100020, "Z/D"), (0x00080018, "U"), (0x00081030, "X"), (0x0020000D, "U")),
        *((0x00080020, "Z"), (0x0040A730, "D"), (0x00081140, "X/Z/U*"), (0x50F00010, "X"), (0x60023000, "X")),
    ],
)
def test_the_table_says_what_the_standard_says(tag: int, action: str) -> None:
    row = table.row(tag)
    assert row is not None
    assert row.action == action


def test_an_attribute_that_the_table_does_not_list_has_no_row() -> None:
    assert table.row(0x00280010) is None


def test_references_stay_consistent_and_no_original_uid_survives() -> None:
    dataset = _mr()
    other = "1.2.840.99.7"
    dataset.ReferencedImageSequence = [
        _item((0x00081150, "UI", MRImageStorage), (0x00081155, "UI", dataset.SOPInstanceUID)),
        _item((0x00081150, "UI", "1.2.3.4.5"), (0x00081155, "UI", other)),
    ]
    clean = WHO.apply(dataset)
    first, second = clean.ReferencedImageSequence
    assert first.ReferencedSOPInstanceUID == clean.SOPInstanceUID == clean.file_meta.MediaStorageSOPInstanceUID
    assert second.ReferencedSOPInstanceUID == WHO.uid(other) != other
    assert first.ReferencedSOPClassUID == MRImageStorage
    assert "ReferencedSOPClassUID" not in second  # no class that the standard defines
    assert re.fullmatch(r"2\.25\.[1-9]\d{0,38}", clean.SOPInstanceUID)
    assert clean.SOPInstanceUID.is_valid


def test_another_key_gives_other_identities() -> None:
    other = Deidentifier(b"\1" * 32, "HOSPITAL")
    assert other.uid("1.2.3") != WHO.uid("1.2.3")
    assert other.pseudonym("A", "7") != WHO.pseudonym("A", "7")


def test_a_short_key_is_refused_and_a_key_is_never_printed() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes"):
        Deidentifier(b"short")
    assert "key" not in repr(WHO)


@pytest.mark.parametrize(("issuer", "patient"), [("hospital", "abc 1"), ("", " ABC  1 "), (" HOSPITAL ", "Abc 1")])
def test_one_patient_has_one_pseudonym_however_it_is_spelled(issuer: str, patient: str) -> None:
    assert WHO.pseudonym(issuer, patient) == WHO.pseudonym("HOSPITAL", "ABC 1")


def test_parts_of_an_identity_cannot_be_shifted_between_fields() -> None:
    assert WHO.pseudonym("AB", "C") != WHO.pseudonym("A", "BC")
    assert re.fullmatch(r"[0-9a-f]{32}", WHO.pseudonym("AB", "C"))


@pytest.mark.parametrize("patient", ["", "   ", "\u3000"])
def test_a_patient_without_an_identifier_is_refused(patient: str) -> None:
    with pytest.raises(Refused, match="missing_patient"):
        WHO.pseudonym("A", patient)
    dataset = _mr()
    dataset.PatientID = patient
    with pytest.raises(Refused, match="missing_patient"):
        WHO.apply(dataset)


def test_all_dates_of_a_patient_move_by_the_same_days_and_times_go() -> None:
    dataset = _mr()
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


def test_the_result_says_that_and_how_it_was_de_identified() -> None:
    clean = WHO.apply(_mr())
    assert clean.PatientIdentityRemoved == "YES"
    assert clean.LongitudinalTemporalInformationModified == "MODIFIED"
    assert [i.CodeValue for i in clean.DeidentificationMethodCodeSequence] == ["113100", "113107"]
    assert clean.PatientID == WHO.patient(_mr())
    assert set(clean.file_meta.dir()) == {
        *("FileMetaInformationVersion", "MediaStorageSOPClassUID", "MediaStorageSOPInstanceUID"),
        *("TransferSyntaxUID", "ImplementationClassUID", "ImplementationVersionName"),
    }


@pytest.mark.parametrize("name", ["test-SR.dcm", "rtdose.dcm", "rtplan.dcm", "waveform_ecg.dcm", "liver_1frame.dcm"])
def test_reports_plans_and_waveforms_are_refused(name: str) -> None:
    dataset = pydicom.dcmread(get_testdata_file(name, download=False))
    dataset.PatientID = "1"
    with pytest.raises(Refused, match="not_an_image"):
        WHO.apply(dataset)


def test_an_encapsulated_document_is_refused() -> None:
    dataset = _item((0x00080016, "UI", EncapsulatedPDFStorage), (0x00080018, "UI", "1.2.3"), (0x00100020, "LO", "1"))
    dataset.EncapsulatedDocument = b"%PDF-1.7 of Mr Smith"
    with pytest.raises(Refused, match="not_an_image"):
        WHO.apply(dataset)


def test_a_class_that_the_standard_does_not_define_is_refused() -> None:
    dataset = _mr()
    dataset.SOPClassUID = UID("1.3.12.2.1107.5.9.1")
    with pytest.raises(Refused, match="incomplete"):
        WHO.apply(dataset)


@pytest.mark.parametrize("name", ["MR_small_RLE.dcm", "MR_small_jp2klossless.dcm", "MR_small_bigendian.dcm"])
def test_compressed_pixel_data_is_refused_because_its_stream_may_hold_words(name: str) -> None:
    with pytest.raises(Refused, match="unsupported_encoding"):
        WHO.apply(pydicom.dcmread(get_testdata_file(name, download=False)))


def test_pixel_data_shorter_than_its_header_says_is_refused() -> None:
    dataset = _mr()
    dataset.PixelData = dataset.PixelData[:-2]
    with pytest.raises(Refused, match="undecodable"):
        WHO.apply(dataset)


def _nested(depth: int) -> Dataset:
    item = Dataset()
    for _ in range(depth):
        outer = Dataset()
        outer.ReferencedImageSequence = [item]
        item = outer
    return item


def test_sequences_are_cleaned_to_the_depth_limit_and_refused_beyond_it() -> None:
    dataset = _mr()
    dataset.ReferencedImageSequence = [_nested(15)]
    assert WHO.apply(dataset).PatientIdentityRemoved == "YES"
    dataset.ReferencedImageSequence = [_nested(16)]
    with pytest.raises(Refused, match="too_deep"):
        WHO.apply(dataset)


def test_too_many_elements_are_refused() -> None:
    dataset = _mr()
    dataset.ReferencedImageSequence = [_item((0x00081155, "UI", "1.2"), (0x00081150, "UI", "1.2"))] * 50_001
    with pytest.raises(Refused, match="too_deep"):
        WHO.apply(dataset)


def test_a_number_that_is_not_finite_does_not_stay() -> None:
    dataset = _mr()
    dataset[0x00189087] = DataElement(0x00189087, "FD", 1.0)
    dataset[0x00180088] = DataElement(0x00180088, "FD", float("nan"))
    dataset[0x00280030] = DataElement(0x00280030, "FD", [1.0, float("inf")])
    clean = WHO.apply(dataset)
    assert "SpacingBetweenSlices" not in clean
    assert "PixelSpacing" not in clean


def test_a_data_set_without_pixels_can_be_cleaned_too() -> None:
    dataset = _mr()
    del dataset.PixelData
    assert "PixelData" not in WHO.apply(dataset)


def test_the_new_file_can_be_read_back() -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    source = FileDataset("", _mr(), file_meta=meta, preamble=b"\0" * 128)
    again = pydicom.dcmread(io.BytesIO(_written(WHO.apply(source))))
    assert again.PatientName == ""
    assert again.SOPInstanceUID == WHO.uid(_mr().SOPInstanceUID)
