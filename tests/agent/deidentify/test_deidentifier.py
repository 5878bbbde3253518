"""De-identification removes who the patient is: planted identities, keyed replacements, refusals."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pydicom
import pytest
from pydicom import DataElement, Dataset, FileDataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID, EncapsulatedPDFStorage, ExplicitVRLittleEndian, MRImageStorage

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.ps315.action_trace import dumps, loads
from tests.support.instances import WHO, item, mr, written

MARK = "ZQXJ"  # every planted string has it, and no honest value does


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests write values that break the standard, and read them as the worker does."""
    monkeypatch.setattr(pydicom_config.settings, "_reading_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config.settings, "_writing_validation_mode", pydicom_config.IGNORE)
    monkeypatch.setattr(pydicom_config, "replace_un_with_known_vr", False)


class _Plants:
    """Hands out planted strings and remembers them."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, shape: str = "{}") -> str:
        self.given.append(f"{MARK}{len(self.given):03d}")
        return shape.format(self.given[-1])


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
    *((0x00280034, "LO"), (0x00280106, "LO"), (0x00180087, "LO"), (0x00181150, "LO"), (0x00185100, "LO")),
    *((0x00180015, "LO"), (0x00080060, "LO"), (0x00080020, "LO"), (0x0008002A, "LO"), (0x00200052, "LO")),
]


def _planted() -> tuple[Dataset, list[str]]:
    """A real MR image with an identity in every place that an attribute can have."""
    dataset, plant = mr(), _Plants()
    for tag, vr in TOP_LEVEL:
        dataset[tag] = DataElement(tag, vr, plant(), validation_mode=pydicom_config.IGNORE)
    dataset[0x00080008] = DataElement(0x00080008, "CS", ["ORIGINAL", "PRIMARY", plant()])
    dataset[0x00280030] = DataElement(0x00280030, "LO", ["1.0", plant()])
    nested = item((0x00100010, "PN", plant()), (0x00081155, "UI", "1.2.3"), (0x0040A160, "UT", plant()))
    nested[0x00081150] = DataElement(0x00081150, "UI", plant(), validation_mode=pydicom_config.IGNORE)
    nested[0x00091010] = DataElement(0x00091010, "LO", plant())
    deeper = item((0x00100020, "LO", plant()))
    deeper.ReferencedImageSequence = [item((0x00100010, "PN", plant()))]
    nested.SourceImageSequence = [deeper]
    dataset.ReferencedImageSequence = [nested]  # a sequence that stays
    dataset.RequestAttributesSequence = [item((0x00321033, "LO", plant()))]
    dataset.VOILUTSequence = [
        item((0x00283002, "US", [2, 0, 16]), (0x00283003, "LO", plant()), (0x00283006, "OW", b"\1\0\2\0"))
    ]
    dataset.VOILUTSequence[0][0x00283006].value += plant().encode() + b"!"
    dataset[0x00290010] = DataElement(0x00290010, "LO", plant("MAKER {}"))
    dataset[0x00291001] = DataElement(0x00291001, "UN", plant().encode() + b" ")
    dataset[0x00291002] = DataElement(0x00291002, "SQ", [item((0x00100010, "PN", plant()))])
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
    after = written(WHO.apply(source))
    assert MARK.encode() not in after
    assert b"Mustermann" not in after
    assert after[:128] == b"\0" * 128


def test_the_plants_would_be_found_without_the_engine(lenient: None) -> None:
    dataset, plants = _planted()
    dataset.remove_private_tags()
    data = written(dataset)
    assert sum(p.encode() in data for p in plants) > 40


def test_the_image_itself_stays_as_it_was() -> None:
    dataset = mr()
    clean = pydicom.dcmread(io.BytesIO(written(WHO.apply(dataset))))
    assert np.array_equal(clean.pixel_array, dataset.pixel_array)
    for keyword in ("PixelSpacing", "ImageOrientationPatient", "WindowCenter", "Modality", "SOPClassUID"):
        assert clean[keyword].value == dataset[keyword].value
    assert clean.ImageType == list(dataset.ImageType)


def test_the_argument_is_left_as_it_was() -> None:
    dataset, again = mr(), mr()
    WHO.apply(dataset)
    assert dataset == again
    assert dataset.file_meta == again.file_meta


def test_references_stay_consistent_and_no_original_uid_survives() -> None:
    dataset = mr()
    other = "1.2.840.99.7"
    dataset.ReferencedImageSequence = [
        item((0x00081150, "UI", MRImageStorage), (0x00081155, "UI", dataset.SOPInstanceUID)),
        item((0x00081150, "UI", "1.2.3.4.5"), (0x00081155, "UI", other)),
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
    with pytest.raises(FileRejectedError, match="missing_patient"):
        WHO.pseudonym("A", patient)
    dataset = mr()
    dataset.PatientID = patient
    with pytest.raises(FileRejectedError, match="missing_patient"):
        WHO.apply(dataset)


def test_the_result_says_that_and_how_it_was_de_identified() -> None:
    clean = WHO.apply(mr())
    assert clean.PatientIdentityRemoved == "YES"
    assert clean.LongitudinalTemporalInformationModified == "MODIFIED"
    assert [i.CodeValue for i in clean.DeidentificationMethodCodeSequence] == ["113100", "113107"]
    assert clean.PatientID == WHO.patient(mr())
    assert set(clean.file_meta.dir()) == {
        *("FileMetaInformationVersion", "MediaStorageSOPClassUID", "MediaStorageSOPInstanceUID"),
        *("TransferSyntaxUID", "ImplementationClassUID", "ImplementationVersionName"),
    }


@pytest.mark.parametrize("name", ["test-SR.dcm", "rtdose.dcm", "rtplan.dcm", "waveform_ecg.dcm", "liver_1frame.dcm"])
def test_reports_plans_and_waveforms_are_refused(name: str) -> None:
    dataset = pydicom.dcmread(get_testdata_file(name, download=False))
    dataset.PatientID = "1"
    with pytest.raises(FileRejectedError, match="not_an_image"):
        WHO.apply(dataset)


def test_an_encapsulated_document_is_refused() -> None:
    dataset = item((0x00080016, "UI", EncapsulatedPDFStorage), (0x00080018, "UI", "1.2.3"), (0x00100020, "LO", "1"))
    dataset.EncapsulatedDocument = b"%PDF-1.7 of Mr Smith"
    with pytest.raises(FileRejectedError, match="not_an_image"):
        WHO.apply(dataset)


def test_a_class_that_the_standard_does_not_define_is_refused() -> None:
    dataset = mr()
    dataset.SOPClassUID = UID("1.3.12.2.1107.5.9.1")
    with pytest.raises(FileRejectedError, match="incomplete"):
        WHO.apply(dataset)


@pytest.mark.parametrize("name", ["MR_small_RLE.dcm", "MR_small_jp2klossless.dcm", "MR_small_bigendian.dcm"])
def test_compressed_pixel_data_is_refused_because_its_stream_may_hold_words(name: str) -> None:
    with pytest.raises(FileRejectedError, match="unsupported_encoding"):
        WHO.apply(pydicom.dcmread(get_testdata_file(name, download=False)))


def test_pixel_data_shorter_than_its_header_says_is_refused() -> None:
    dataset = mr()
    dataset.PixelData = dataset.PixelData[:-2]
    with pytest.raises(FileRejectedError, match="undecodable"):
        WHO.apply(dataset)


def _nested(depth: int) -> Dataset:
    item = Dataset()
    for _ in range(depth):
        outer = Dataset()
        outer.ReferencedImageSequence = [item]
        item = outer
    return item


def test_sequences_are_cleaned_to_the_depth_limit_and_refused_beyond_it() -> None:
    dataset = mr()
    dataset.ReferencedImageSequence = [_nested(15)]
    assert WHO.apply(dataset).PatientIdentityRemoved == "YES"
    dataset.ReferencedImageSequence = [_nested(16)]
    with pytest.raises(FileRejectedError, match="too_deep"):
        WHO.apply(dataset)


def test_too_many_elements_are_refused() -> None:
    dataset = mr()
    dataset.ReferencedImageSequence = [item((0x00081155, "UI", "1.2"), (0x00081150, "UI", "1.2"))] * 50_001
    with pytest.raises(FileRejectedError, match="too_deep"):
        WHO.apply(dataset)


def test_a_data_set_without_pixels_can_be_cleaned_too() -> None:
    dataset = mr()
    del dataset.PixelData
    assert "PixelData" not in WHO.apply(dataset)


def test_the_new_file_can_be_read_back() -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    source = FileDataset("", mr(), file_meta=meta, preamble=b"\0" * 128)
    again = pydicom.dcmread(io.BytesIO(written(WHO.apply(source))))
    assert again.PatientName == ""
    assert again.SOPInstanceUID == WHO.uid(mr().SOPInstanceUID)


def test_every_attribute_of_the_original_has_exactly_one_step(lenient: None) -> None:
    for name in ("CT_small.dcm", "MR_small.dcm", "examples_overlay.dcm"):
        dataset = pydicom.dcmread(get_testdata_file(name, download=False))
        trace = WHO.clean(dataset).trace
        counts = Counter(step.path for step in trace)
        assert set(counts.values()) == {1}
        top = {f"{tag >> 16:04X},{tag & 0xFFFF:04X}" for tag in dataset._dict}
        assert top <= set(counts)


def test_the_trace_tells_the_truth_about_the_result() -> None:
    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm", download=False))
    clean = WHO.clean(dataset)
    for step in clean.trace:
        if "," not in step.path or "[" in step.path:
            continue
        tag = int(step.path.replace(",", ""), 16)
        if step.action == "removed":
            assert tag not in clean.dataset
        elif step.action == "kept":
            assert clean.dataset[tag].value == dataset[tag].value
        elif step.action == "emptied":
            assert not clean.dataset[tag].value
        elif tag in dataset and dataset[tag].value:
            assert clean.dataset[tag].value != dataset[tag].value


def test_a_trace_survives_the_pipe_and_a_false_one_is_refused() -> None:
    trace = WHO.clean(mr()).trace
    assert loads(dumps(trace)) == trace
    for bad in (b"{}", b'[["0010,0010","kept","because Smith"]]', b'[["Smith","kept","listed"]]', b"[[1,2]]"):
        with pytest.raises(ValueError, match=r"trace|step"):
            loads(bad)


def test_a_person_is_counted_over_projects_and_written_per_project() -> None:
    one, two = (Deidentifier(bytes([n]) * 32, "H", people=b"p" * 32) for n in (1, 2))
    assert one.person("", "7") == two.person("", "7") != one.pseudonym("", "7")
    assert one.pseudonym("", "7") != two.pseudonym("", "7")
    assert WHO.person("", "7") == WHO.pseudonym("", "7")
    assert one.apply(mr()).PatientID == one.patient(mr()) != one.person_of(mr())


def test_another_process_gives_the_same_identities_to_nested_references() -> None:
    dataset = mr()
    dataset.AccessionNumber, dataset.StudyID = "A 17", "S9"
    dataset.ReferencedImageSequence = [item((0x00081150, "UI", MRImageStorage), (0x00081155, "UI", "1.2.3.4"))]
    before = io.BytesIO()
    dataset.save_as(before)
    code = (
        "import io,sys,pydicom;from agent.deidentify.deidentifier import Deidentifier;"
        "d=Deidentifier(bytes(range(32)),'HOSPITAL').apply(pydicom.dcmread(io.BytesIO(sys.stdin.buffer.read())));"
        "print(d.PatientID,d.AccessionNumber,d.StudyID,d.StudyInstanceUID,"
        "d.ReferencedImageSequence[0].ReferencedSOPInstanceUID)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=before.getvalue(), capture_output=True, check=True)
    here = WHO.apply(dataset)
    assert done.stdout.decode().split() == [
        *(here.PatientID, here.AccessionNumber, here.StudyID, here.StudyInstanceUID),
        here.ReferencedImageSequence[0].ReferencedSOPInstanceUID,
    ]
    assert here.AccessionNumber not in ("", "A 17")
