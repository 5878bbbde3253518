"""The phantom hospital: every digit in one place only, real DICOM, real broken files."""

from __future__ import annotations

import csv
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
from sklearn.datasets import load_digits

from deploy.phantoms import digits, scanner_files


def _keys(images: np.ndarray) -> list[bytes]:
    return [image.tobytes() for image in images]


def test_every_digit_is_dealt_out_exactly_once() -> None:
    dealt = digits.split(3, 225, 2)
    assert [len(s.images) for s in dealt.sites] == [450, 450, 450]
    assert (len(dealt.public.images), len(dealt.held_out.images)) == (150, 297)
    everything = [k for part in (*dealt.sites, dealt.public, dealt.held_out) for k in _keys(part.images)]
    assert sorted(everything) == sorted(_keys((load_digits().images / 16).astype(np.float32)))
    assert len(set(everything)) == len(everything) == 1797


def test_a_patients_images_show_one_digit_and_the_classes_are_balanced() -> None:
    for site in digits.split(3, 225, 2).sites:
        labels = site.labels.reshape(225, 2)
        assert (labels[:, 0] == labels[:, 1]).all()
        counts = np.bincount(labels[:, 0], minlength=10)
        assert counts.max() - counts.min() <= 1
    public = np.bincount(digits.split(3, 225, 2).public.labels, minlength=10)
    assert public.tolist() == [15] * 10


def test_the_split_is_the_same_for_everybody_and_cannot_be_written_to() -> None:
    one, two = digits.split(2, 20, 3), digits.split(2, 20, 3)
    assert all(np.array_equal(a.images, b.images) for a, b in zip(one.sites, two.sites, strict=True))
    with pytest.raises(ValueError, match="read-only"):
        one.held_out.images[0] = 0


def test_more_patients_than_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="not enough digits"):
        digits.split(3, 600, 1)


def test_upsampling_keeps_the_range_and_the_picture() -> None:
    images = digits.split(1, 10, 1).sites[0].images
    large = digits.upsample(images)
    assert (large.shape, large.dtype) == ((10, 32, 32), np.uint8)
    back = large.reshape(10, 8, 4, 8, 4).mean((2, 4)) / 255
    assert np.abs(back - images).mean() < 0.06  # cubic splines overshoot at edges, and are clipped
    assert len(set(_keys(large))) == 10


def test_a_hospitals_files_are_dicom_that_others_read(tmp_path: Path) -> None:
    planted = digits.write_hospital(tmp_path, 1, 2, 6, 2, np.random.default_rng(0))
    files = sorted(tmp_path.glob("*/*/*.dcm"))
    assert len(files) == 12
    pictures = digits.upsample(digits.split(2, 6, 2).sites[1].images)
    with (tmp_path / "labels.csv").open() as stream:
        labels = {row["sop_instance_uid"]: row["label"] for row in csv.DictReader(stream)}
    by_id = {p.patient_id: p for p in planted.patients}
    syntaxes = set()
    for path in files:
        dataset = pydicom.dcmread(path)
        syntaxes.add(dataset.file_meta.TransferSyntaxUID.name)
        assert any(np.array_equal(dataset.pixel_array, p) for p in pictures)
        assert labels[dataset.SOPInstanceUID] == by_id[dataset.PatientID].label
        mine = by_id[dataset.PatientID].strings
        assert {
            str(dataset.PatientName).split("^")[0],
            dataset.AccessionNumber,
            dataset.PatientAddress,
        } <= mine
    assert syntaxes == {"Explicit VR Little Endian", "Implicit VR Little Endian"}
    assert len(labels) == 12


def test_the_persons_come_from_the_generator_that_was_given(tmp_path: Path) -> None:
    one, two, other = (
        digits.write_hospital(tmp_path / name, 0, 1, 4, 1, np.random.default_rng(seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == two != other
    same = [(p.relative_to(tmp_path / "a"), p.read_bytes()) for p in sorted((tmp_path / "a").rglob("*.dcm"))]
    assert same == [(p.relative_to(tmp_path / "b"), p.read_bytes()) for p in sorted((tmp_path / "b").rglob("*.dcm"))]


def test_persons_of_different_sites_share_no_identifier(tmp_path: Path) -> None:
    hospitals = [digits.write_hospital(tmp_path / str(s), s, 2, 30, 1, np.random.default_rng(9)) for s in (0, 1)]
    uids = [{s for p in h.patients for s in p.strings if s.startswith(("1.2.", "MRN", "ACC"))} for h in hospitals]
    assert len(uids[0]) >= 120
    assert not uids[0] & uids[1]


def test_scanner_files_are_real_and_the_broken_ones_are_broken(tmp_path: Path) -> None:
    digits.write_hospital(tmp_path, 0, 1, 1, 1, np.random.default_rng(0))
    names = scanner_files.add_scanner_files(tmp_path)
    assert len(names) == len(set(names)) >= 30
    mr = pydicom.dcmread(tmp_path / "scanner" / "mr.dcm").pixel_array
    uids = set()
    for variant in ("mr_rle", "mr_jpeg2000", "mr_jpegls", "mr_big_endian"):
        dataset = pydicom.dcmread(tmp_path / "scanner" / f"{variant}.dcm")
        uids.add(dataset.SOPInstanceUID)
        assert dataset.file_meta.MediaStorageSOPInstanceUID == dataset.SOPInstanceUID
        assert np.array_equal(dataset.pixel_array, mr)
    assert len(uids) == 4
    (original,) = tmp_path.glob("*/*/IM0000.dcm")
    assert (tmp_path / "broken" / "again.dcm").read_bytes() == original.read_bytes()
    changed = pydicom.dcmread(tmp_path / "broken" / "same_uid_other_content.dcm")
    first = pydicom.dcmread(original)
    assert changed.SOPInstanceUID == first.SOPInstanceUID
    assert (changed.pixel_array != first.pixel_array).sum() == 1
    assert 15_000 < (tmp_path / "broken" / "sequence_bomb.dcm").stat().st_size < 25_000


def test_a_head_is_added_with_its_patient_where_this_machine_has_one(tmp_path: Path) -> None:
    if not scanner_files.add_head(tmp_path):
        assert scanner_files.find_head() is None
        assert list(tmp_path.iterdir()) == []
        return
    with (tmp_path / "nifti.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert nibabel.load(tmp_path / row["file"]).shape == (181, 217, 181)
    assert row["patient_id"]


def test_no_head_is_found_where_there_is_none(tmp_path: Path) -> None:
    assert scanner_files.find_head(tmp_path) is None
