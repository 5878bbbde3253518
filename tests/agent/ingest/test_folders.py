"""Ingest from a folder, with real scanner files, broken files and a worker that is stopped on purpose."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
from pydicom import Dataset
from pydicom.data import get_testdata_file
from pydicom.uid import RLELossless

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import REASONS
from agent.deidentify.record import Record, instance_name
from agent.ingest.folders import in_folder
from agent.ingest.patient_lists import PatientListError, read_lists
from agent.ingest.pipeline import IngestDependencies, IngestPipeline, IngestReport
from agent.storage.quarantine import Quarantine
from deploy.phantoms import digits, scanner_files

WHO = Deidentifier(b"\7" * 32, digits.ISSUER)
RULES = AdmissionRules(
    modalities=frozenset({"CT", "MR", "OT", "NM"}),
    secondary_capture_modalities=frozenset({"OT"}),
    image_types=frozenset({("ORIGINAL", "PRIMARY"), ("DERIVED", "PRIMARY"), ("DERIVED", "SECONDARY")}),
    max_bytes=2 * 2**20,
    max_pixels=2**20,
)
HEX = "0" * 32

Hospital = tuple[Path, digits.Planted, "Shelf", IngestReport]


class Shelf:
    """The smallest honest vault: it keeps records in memory and knows their names and digests."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.known: dict[str, tuple[str, str]] = {}

    def has(self, key: str) -> bool:
        return key in self.known

    def kept(self, name: str) -> tuple[str, str] | None:
        return self.known.get(name)

    def refusal(self, record: Record) -> str | None:
        return None

    def looked_at(self, study: str) -> bool:
        return False

    def hold(self, study: str) -> None:
        raise AssertionError("nothing here shows text")

    def sent_again(self, marks: Iterable[tuple[str, str]]) -> None:
        raise AssertionError("no sender names what lies in a folder")

    def keep_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.records.append(record)
            self.known |= dict.fromkeys((record.name, record.digest), (record.after, record.pseudonym))


def _ingest(
    folder: Path,
    shelf: Shelf,
    rules: AdmissionRules = RULES,
    progress: Callable[[int], None] = lambda done: None,
) -> IngestReport:
    lists = read_lists(folder)
    labels = {instance_name(WHO, uid): label for uid, label in lists.labels_of_instances.items()}
    quarantine = _quarantine(folder)
    found = in_folder(folder, lists, (quarantine.folder,), rules.max_bytes)
    with IngestPipeline(IngestDependencies(rules, WHO, shelf, quarantine, labels), jobs=2) as intake:
        return intake.run(found, progress)


def _quarantine(folder: Path) -> Quarantine:
    return Quarantine(folder.parent / "quarantine", b"q" * 32)


def _bytes(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path).read_bytes()


def _refusals(folder: Path) -> dict[str, str]:
    quarantine = _quarantine(folder)
    found = {quarantine.source(e.name)[1]: e.code for e in quarantine.entries()}
    return {str(Path(place).relative_to(folder)): code for place, code in found.items()}


def _edited(**changes: object) -> bytes:
    """The small MR image with other attributes; None removes one."""
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))
    for keyword, value in changes.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    return _saved(dataset)


def _saved(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    dataset.save_as(stream)
    return stream.getvalue()


def _memory_bomb() -> bytes:
    """An RLE image of a few kilobytes that claims 30000 x 30000 pixels of 16 bits."""
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small_RLE.dcm")))
    assert dataset.file_meta.TransferSyntaxUID == RLELossless
    dataset.Rows = dataset.Columns = 30_000
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3.4.5.6"
    return _saved(dataset)


@pytest.fixture(scope="module")
def hospital(
    tmp_path_factory: pytest.TempPathFactory,
) -> Hospital:
    """A hospital's folder, ingested once."""
    folder = tmp_path_factory.mktemp("site") / "export"
    planted = digits.write_hospital(folder, 0, 3, 12, 2, np.random.default_rng(5))
    scanner_files.add_scanner_files(folder)
    extra = {
        "x/no_patient.dcm": _edited(PatientID=""),
        "x/no_pixels.dcm": _edited(PixelData=None),
        "x/ultrasound_no_more.dcm": _edited(Modality="PT"),
        "x/pathology.dcm": _edited(SOPClassUID="1.2.840.10008.5.1.4.1.1.77.1.6"),
        "x/undecodable.dcm": _edited(HighBit=3, SOPInstanceUID="1.2.3.4"),
        "x/large.dcm": _bytes("MR_small.dcm") + b"\0" * RULES.max_bytes,
        "x/orphan.nii.gz": gzip.compress(nibabel.Nifti1Image(np.ones((3, 3, 3)), np.eye(4)).to_bytes()),
        "x/zz_vanishes.dcm": b"gone before it is read",
    }
    (folder / "x").mkdir()
    for name, data in extra.items():
        (folder / name).write_bytes(data)
    (folder / "x" / "link.dcm").symlink_to(folder / "scanner" / "ct.dcm")
    (folder / "x" / "linked_folder").symlink_to(folder / "scanner")
    os.mkfifo(folder / "x" / "pipe.dcm")
    # a file that is removed between being listed and being opened
    shelf = Shelf()
    report = _ingest(folder, shelf, progress=lambda done: (folder / "x/zz_vanishes.dcm").unlink(missing_ok=True))
    return folder, planted, shelf, report


def test_every_file_is_kept_known_or_refused_with_the_right_reason(hospital: Hospital) -> None:
    folder, _, shelf, report = hospital
    assert report.kept == len(shelf.records)
    assert report.files == report.kept + report.duplicates + sum(report.quarantined.values())
    assert _refusals(folder) == {
        "broken/cut.dcm": "truncated",
        "broken/empty.dcm": "not_dicom",
        "broken/length_beyond_end.dcm": "truncated",
        "broken/letter.dcm": "not_dicom",
        "broken/same_uid_other_content.dcm": "conflicting_instance",
        "broken/sequence_bomb.dcm": "too_deep",
        "scanner/DICOMDIR": "dicomdir",
        "scanner/bad_vr.dcm": "not_an_image",
        "scanner/capture_jpeg.dcm": "malformed",  # JPEG transfer syntax, yet written with implicit VR
        "scanner/capture_two_frames.dcm": "burned_in_risk",
        "scanner/deflated.dcm": "missing_patient",
        "scanner/dose.dcm": "not_an_image",
        "scanner/ecg.dcm": "not_an_image",
        "scanner/mr_truncated.dcm": "truncated",
        "scanner/nested_private.dcm": "incomplete",
        "scanner/nm_jpeg_12_bit.dcm": "burned_in_risk",
        "scanner/no_preamble.dcm": "not_dicom",
        "scanner/no_transfer_syntax.dcm": "unsupported_encoding",
        "scanner/plan.dcm": "not_an_image",
        "scanner/report.dcm": "not_an_image",
        "scanner/segmentation.dcm": "not_an_image",
        "scanner/us_cine.dcm": "burned_in_risk",
        "scanner/us_jpeg2000.dcm": "burned_in_risk",
        "scanner/us_palette.dcm": "burned_in_risk",
        "scanner/us_rgb.dcm": "burned_in_risk",
        "x/large.dcm": "too_large",
        "x/link.dcm": "not_a_file",
        "x/linked_folder": "not_a_file",
        "x/no_patient.dcm": "missing_patient",
        "x/no_pixels.dcm": "no_pixels",
        "x/orphan.nii.gz": "nifti_without_patient",
        "x/pathology.dcm": "sop_class_not_allowed",
        "x/pipe.dcm": "not_a_file",
        "x/ultrasound_no_more.dcm": "modality_not_allowed",
        "x/undecodable.dcm": "undecodable",
        "x/zz_vanishes.dcm": "unreadable",
    }
    # 24 digits; CT, two compressed CT, MR, its four variants, MR with overlay
    assert report.kept == 24 + 9
    assert report.duplicates == 2  # one file twice, and one instance again in another transfer syntax


def test_every_reason_code_is_reached_by_a_file_of_these_tests(hospital: Hospital) -> None:
    # those that are missing here have tests of their own: a stopped worker, the vault, the alert, a medium, a network
    elsewhere = {"parser_stopped", "inconsistent_series", "opted_out", "residual_identifier", "burned_in_text"}
    # tests/agent/deidentify/test_masks.py, and test_nifti_pairs_folders.py
    elsewhere |= {"segment_not_listed", "mask_without_series", "mask_of_probabilities"}
    elsewhere |= {"mask_without_volume", "mask_of_other_shape", "mask_of_other_place"}
    elsewhere |= {"instance_mismatch", "nifti_without_modality", "missing_from_medium", "manufacturer_not_allowed"}
    assert set(hospital[3].quarantined) | elsewhere == set(REASONS)
    assert all(sentence.endswith(".") for sentence in REASONS.values())


def test_nothing_that_was_planted_is_in_what_is_kept(hospital: Hospital) -> None:
    _, planted, shelf, _ = hospital
    assert len(planted.strings) > 100
    for record in shelf.records:
        words = f"{record.name} {record.pseudonym} {record.study} {record.modality} {record.label}"
        for string in planted.strings:
            assert string.encode() not in record.payload
            assert string.encode("latin-1", "replace") not in record.payload
            assert string not in words


def test_the_plants_are_in_the_files_that_were_read(hospital: Hospital) -> None:
    folder, planted, _, _ = hospital
    everything = b"".join(p.read_bytes() for p in sorted(folder.glob("*/*/IM*.dcm")))
    assert [
        s for s in planted.strings | planted.dates if s.encode() not in everything and s not in planted.shared
    ] == []
    assert any(s.encode() in everything for s in planted.shared)


def test_dates_are_in_no_attribute_of_what_is_kept(hospital: Hospital) -> None:
    _, planted, shelf, _ = hospital
    for record in shelf.records[:24]:
        dataset = pydicom.dcmread(io.BytesIO(record.payload))
        values = {str(e.value) for e in dataset.iterall() if e.VR in ("DA", "TM", "DT", "LO", "SH", "CS", "IS")}
        assert not values & planted.dates


def test_a_patients_images_have_one_pseudonym_their_label_and_their_pixels(hospital: Hospital) -> None:
    _, planted, shelf, _ = hospital
    pictures = digits.upsample(digits.split(3, 12, 2).sites[0].images)
    for number, patient in enumerate(planted.patients):
        mine = [r for r in shelf.records if r.pseudonym == WHO.pseudonym(digits.ISSUER, patient.patient_id)]
        assert len(mine) == 2
        assert {r.label for r in mine} == {patient.label}
        assert len({r.study for r in mine}) == 1
        for record in mine:
            assert record.pixels is not None
            stored = np.rint(record.pixels * 255).astype(np.uint8)
            assert any(np.array_equal(stored, p) for p in pictures[2 * number : 2 * number + 2])
            assert not record.face


def test_what_is_kept_from_compressed_files_is_the_same_image(hospital: Hospital) -> None:
    small = [r for r in hospital[2].records if r.pixels is not None and r.pixels.shape == (64, 64)]
    assert len(small) == 5
    assert all(r.face for r in small)
    assert all(np.array_equal(r.pixels, small[0].pixels) for r in small)
    original = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm"))).pixel_array
    for record in small:
        assert np.array_equal(pydicom.dcmread(io.BytesIO(record.payload)).pixel_array, original)


def test_a_second_run_keeps_nothing_and_lists_nothing_twice(hospital: Hospital) -> None:
    folder, _, shelf, first = hospital
    listed = _refusals(folder)
    again = _ingest(folder, shelf)
    assert (again.kept, again.duplicates) == (0, first.kept + first.duplicates)
    expected = dict(first.quarantined)
    del expected["unreadable"]  # that file is gone
    assert again.quarantined == expected
    assert _refusals(folder) == listed


def test_the_quarantine_is_sealed_and_its_names_say_nothing(hospital: Hospital) -> None:
    where = hospital[0].parent / "quarantine"
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    for file in where.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.name.split(".")[1] in REASONS
        assert b".dcm" not in file.read_bytes()


def test_a_file_that_is_refused_again_and_again_is_left_alone_in_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "bad.dcm").write_bytes(_edited(PatientID=""))
    tried = []
    for _ in range(5):
        assert _ingest(folder, Shelf()).quarantined == {"missing_patient": 1}
        tried += [e.attempts for e in _quarantine(folder).entries()]
    assert tried == [1, 2, 3, 3, 3]


def test_a_file_that_was_mended_in_the_pacs_comes_in(tmp_path: Path) -> None:
    folder, shelf = tmp_path / "export", Shelf()
    folder.mkdir()
    (folder / "bad.dcm").write_bytes(_edited(PatientID=""))
    for _ in range(4):
        _ingest(folder, shelf)
    (folder / "bad.dcm").write_bytes(_edited(PatientID="4MR1"))
    assert _ingest(folder, shelf).kept == 1
    assert _quarantine(folder).entries() == []


def test_the_report_has_codes_and_counts_only(hospital: Hospital) -> None:
    folder, planted, _, report = hospital
    text = repr(report)
    assert set(report.quarantined) <= set(REASONS)
    assert not any(string in text for string in planted.strings)
    assert ".dcm" not in text
    assert str(folder) not in text


def test_the_hospitals_folder_is_only_read(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    digits.write_hospital(folder, 0, 1, 2, 1, np.random.default_rng(1))
    scanner_files.add_scanner_files(folder)

    def state() -> dict[str, tuple[int, bytes]]:
        files = (p for p in folder.rglob("*") if p.is_file())
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    before = state()
    _ingest(folder, Shelf())
    assert state() == before


def test_a_file_that_needs_too_much_memory_loses_itself_only(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "a_bomb.dcm").write_bytes(_memory_bomb())
    (folder / "b_good.dcm").write_bytes(_bytes("CT_small.dcm"))
    generous = AdmissionRules(
        modalities=RULES.modalities, image_types=RULES.image_types, max_bytes=2**32, max_pixels=2**32
    )
    shelf = Shelf()
    report = _ingest(folder, shelf, rules=generous)
    assert report.quarantined == {"undecodable": 1}
    assert [r.modality for r in shelf.records] == ["CT"]


# ------------------------------------------------------------------ lists, volumes, folders


def test_a_volume_comes_in_with_the_patient_that_the_list_names(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    image = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4))
    image.header["descrip"] = b"SMITH JOHN 1950"
    (folder / "head.nii").write_bytes(image.to_bytes())
    (folder / "nifti.csv").write_text("file,patient_id\nhead.nii,MRN-77\n")
    shelf = Shelf()
    assert _ingest(folder, shelf).kept == 1
    (record,) = shelf.records
    assert (record.kind, record.face, record.pixels) == ("volume", True, None)
    assert record.pseudonym == WHO.pseudonym("", "mrn-77")
    assert b"SMITH" not in record.payload
    again = nibabel.Nifti1Image.from_bytes(record.payload)
    assert np.array_equal(again.get_fdata(), image.get_fdata())


def test_a_multi_frame_object_is_a_volume_without_pixels(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))
    dataset.NumberOfFrames, dataset.PixelData = 3, dataset.PixelData * 3
    (folder / "cine.dcm").write_bytes(_saved(dataset))
    shelf = Shelf()
    assert _ingest(folder, shelf).kept == 1
    (record,) = shelf.records
    assert (record.kind, record.face, record.pixels) == ("volume", True, None)
    assert pydicom.dcmread(io.BytesIO(record.payload)).pixel_array.shape == (3, 64, 64)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("labels.csv", "uid,label\n1.2,3\n", "first line"),
        ("labels.csv", "sop_instance_uid,label\n1.2\n", "line 2"),
        ("labels.csv", "sop_instance_uid,label\n1.2,a\n1.2,b\n", "line 3"),
        ("labels.csv", f"sop_instance_uid,label\n1.2,{'a' * 65}\n", "64 printable"),
        ("nifti.csv", "file,patient_id\nx.nii,\n", "line 2"),
    ],
)
def test_a_bad_list_stops_the_run_before_anything_is_kept(tmp_path: Path, name: str, text: str, says: str) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "ct.dcm").write_bytes(_bytes("CT_small.dcm"))
    (folder / name).write_text(text)
    shelf = Shelf()
    with pytest.raises(PatientListError, match=says) as caught:
        _ingest(folder, shelf)
    assert "1.2" not in str(caught.value)
    assert shelf.records == []


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PatientListError, match="does not exist"):
        _ingest(tmp_path / "nowhere", Shelf())


def test_a_vault_that_fails_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "ct.dcm").write_bytes(_bytes("CT_small.dcm"))

    class Full(Shelf):
        def keep_all(self, records: Iterable[Record]) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _ingest(folder, Full())


def test_the_same_files_come_in_the_same_order_wherever_they_lie(tmp_path: Path) -> None:
    digits.write_hospital(tmp_path / "a", 0, 1, 3, 2, np.random.default_rng(1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, two = Shelf(), Shelf()
    steps: list[int] = []
    _ingest(tmp_path / "a", one, progress=steps.append)
    _ingest(tmp_path / "b", two)
    assert [r.digest for r in one.records] == [r.digest for r in two.records]
    assert [r.payload for r in one.records] == [r.payload for r in two.records]
    assert steps == sorted(steps)
    assert steps[-1] == 6


def test_a_socket_in_the_folder_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "s"))
        assert _ingest(folder, Shelf()).quarantined == {"not_a_file": 1}
