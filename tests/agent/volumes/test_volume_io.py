"""Volumes in and out: geometry as dcm2niix has it, bit for bit what is not changed, and bad input refused."""

# mypy: disable-error-code="no-untyped-call, attr-defined"
# nibabel has no annotations on what it loads
from __future__ import annotations

import errno
import gzip
import io
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import (
    UID,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)
from scipy.spatial.transform import Rotation

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.ps315.options import Pixels
from agent.volumes import nifti as volume_nifti
from agent.volumes.dicom_series import CHANGED, derive_uid
from agent.volumes.errors import NotDefacedError
from agent.volumes.series import grouped, series_of, studies
from agent.volumes.volume_io import VolumeSource, read, read_bytes
from tests.support.instances import written
from tests.support.peers import need

HEAD = Path("/usr/share/mricron/templates/ch2.nii.gz")
STUDY, SERIES, FRAME = (f"2.25.{n}" for n in (11, 12, 13))
COMPRESSED = (RLELossless, JPEG2000Lossless, JPEGLSLossless)
MR, ENHANCED_MR = "1.2.840.10008.5.1.4.1.1.4", "1.2.840.10008.5.1.4.1.1.4.1"
AXIAL = np.eye(3)  # LPS: along a row, along a column, from slice to slice
SAGITTAL = np.array([[0.0, 0.0, -1.0], [1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
OBLIQUE = Rotation.from_euler("xyz", (20, -35, 10), degrees=True).as_matrix()


def ramp(shape: tuple[int, int, int] = (9, 8, 7), dtype: str = "u2") -> NDArray[Any]:
    return (np.arange(np.prod(shape)).reshape(shape) % 100).astype(dtype)


# ------------------------------------------------------------------ DICOM


def slice_of(stored: NDArray[Any], origin: Sequence[float], turn: NDArray[np.float64], number: int) -> Dataset:
    """One MR slice: ``stored`` is (rows, columns)."""
    d = Dataset()
    d.file_meta = pydicom.dataset.FileMetaDataset()
    d.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    d.SOPClassUID, d.SOPInstanceUID = MR, f"2.25.{1000 + number}"
    d.StudyInstanceUID, d.SeriesInstanceUID, d.FrameOfReferenceUID = STUDY, SERIES, FRAME
    d.Modality, d.PatientID, d.PatientName, d.PatientBirthDate, d.PatientSex = "MR", "ZZ17", "ZZHEAD^TEST", "", "O"
    d.StudyDate, d.StudyTime, d.AccessionNumber, d.StudyID, d.ReferringPhysicianName = (
        "20200101",
        "120000",
        "",
        "1",
        "",
    )
    d.SeriesNumber, d.InstanceNumber, d.Manufacturer, d.PatientPosition = 1, number + 1, "SYN", "HFS"
    d.ImageType, d.ScanningSequence, d.SequenceVariant = ["ORIGINAL", "PRIMARY", "M"], "GR", "SP"
    d.ScanOptions, d.MRAcquisitionType, d.EchoTime, d.RepetitionTime = "", "3D", "3", "9"
    d.EchoTrainLength, d.SliceThickness, d.PositionReferenceIndicator = 1, "1.5", ""
    d.PixelSpacing = ["1.25", "1"]  # rows apart, columns apart
    d.ImageOrientationPatient = [f"{v:.10f}"[:16] for v in (*turn[:, 0], *turn[:, 1])]
    d.ImagePositionPatient = [f"{v:.10f}"[:16] for v in origin]
    _pixels(d, stored)
    return d


def _pixels(d: Dataset, stored: NDArray[Any]) -> None:
    d.Rows, d.Columns = stored.shape[-2:]
    bits = 8 * stored.dtype.itemsize
    d.SamplesPerPixel, d.PhotometricInterpretation = 1, "MONOCHROME2"
    d.BitsAllocated, d.BitsStored, d.HighBit = bits, bits, bits - 1
    d.PixelRepresentation = int(stored.dtype.kind == "i")
    body = np.ascontiguousarray(stored).tobytes()
    d.add_new(0x7FE00010, "OB" if bits == 8 else "OW", body + b"\0" * (len(body) % 2))


def origins(count: int, turn: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([30.0, -40.0, 12.5]) + 1.5 * np.arange(count)[:, np.newaxis] * turn[:, 2]


def series(values: NDArray[Any] | None = None, turn: NDArray[np.float64] = AXIAL) -> list[Dataset]:
    """Slices in a shuffled order: values[:, :, k].T lies at k steps along the normal."""
    values = ramp() if values is None else values
    places = origins(values.shape[2], turn)
    found = [slice_of(values[:, :, k].T, places[k], turn, k) for k in range(values.shape[2])]
    return [found[k] for k in np.random.default_rng(3).permutation(len(found))]


def enhanced(values: NDArray[Any] | None = None, turn: NDArray[np.float64] = AXIAL, order: int = 1) -> Dataset:
    """One multi-frame object, its frames top down or (-1) bottom up, each with a rescale of its own."""
    values = ramp() if values is None else values
    count = values.shape[2]
    places = origins(count, turn)
    d = slice_of(values[:, :, 0].T, places[0], turn, 0)
    for keyword in ("PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient", "SliceThickness", "EchoTime"):
        del d[keyword]
    d.SOPClassUID, d.NumberOfFrames = ENHANCED_MR, count
    shared, measures, turned, kind = Dataset(), Dataset(), Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = ["1.25", "1"], "1.5"
    turned.ImageOrientationPatient = [f"{v:.10f}"[:16] for v in (*turn[:, 0], *turn[:, 1])]
    kind.FrameType = ["ORIGINAL", "PRIMARY", "M", "NONE"]
    shared.PixelMeasuresSequence, shared.PlaneOrientationSequence = [measures], [turned]
    shared.MRImageFrameTypeSequence = [kind]
    d.SharedFunctionalGroupsSequence = [shared]
    frames = list(range(count))[::order]
    groups = []
    for n, k in enumerate(frames):
        group, position, scale, content = Dataset(), Dataset(), Dataset(), Dataset()
        position.ImagePositionPatient = [f"{v:.10f}"[:16] for v in places[k]]
        scale.RescaleSlope, scale.RescaleIntercept, scale.RescaleType = str(1 + k), str(10 * k), "US"
        content.InStackPositionNumber, content.StackID, content.DimensionIndexValues = n + 1, "1", [1, n + 1]
        group.PlanePositionSequence, group.PixelValueTransformationSequence = [position], [scale]
        group.FrameContentSequence = [content]
        groups.append(group)
    d.PerFrameFunctionalGroupsSequence = groups
    _pixels(d, np.stack([values[:, :, k].T for k in frames]))
    return d


def encode(datasets: Sequence[Dataset]) -> list[bytes]:
    return [written(_with_meta(d)) for d in datasets]


def _with_meta(d: Dataset) -> Dataset:
    d.file_meta.MediaStorageSOPClassUID, d.file_meta.MediaStorageSOPInstanceUID = d.SOPClassUID, d.SOPInstanceUID
    return d


def as_syntax(data: bytes, syntax: str) -> bytes:
    """The same in another transfer syntax."""
    d = pydicom.dcmread(io.BytesIO(data))
    out = io.BytesIO()
    if syntax in COMPRESSED:
        d.compress(syntax, generate_instance_uid=False)
        return written(d)
    if syntax == ExplicitVRBigEndian:
        d["PixelData"].value = d.pixel_array.byteswap().tobytes() if d.BitsAllocated > 8 else d.PixelData
    d.file_meta.TransferSyntaxUID = UID(syntax)
    pydicom.dcmwrite(
        out, d, implicit_vr=syntax == ImplicitVRLittleEndian, little_endian=syntax != ExplicitVRBigEndian
    )
    return out.getvalue()


def refused(files: Sequence[bytes] | bytes) -> str:
    with pytest.raises(NotDefacedError) as failure:
        read_bytes([files] if isinstance(files, bytes) else files)
    return failure.value.code


@pytest.mark.parametrize("turn", [AXIAL, SAGITTAL, OBLIQUE], ids=["axial", "sagittal", "oblique"])
@pytest.mark.parametrize("form", ["slices", "frames", "frames_upside_down"])
def test_a_series_lies_where_dcm2niix_lays_it(turn: NDArray[np.float64], form: str, tmp_path: Path) -> None:
    need("dcm2niix")
    values = ramp((16, 14, 9))
    datasets = series(values, turn) if form == "slices" else [enhanced(values, turn, -1 if "down" in form else 1)]
    if form != "slices":
        for group in datasets[0].PerFrameFunctionalGroupsSequence:  # dcm2niix would apply them
            del group.PixelValueTransformationSequence
    (tmp_path / "in").mkdir()
    for n, data in enumerate(encode(datasets)):
        (tmp_path / "in" / f"{n:03d}.dcm").write_bytes(data)
    subprocess.run(["dcm2niix", "-o", tmp_path, "-f", "v", tmp_path / "in"], check=True, capture_output=True)
    theirs = nibabel.load(tmp_path / "v.nii")
    ours = read(sorted((tmp_path / "in").iterdir()))
    assert np.array_equal(np.sort(ours.volume.values.ravel()), np.sort(np.asarray(theirs.dataobj).ravel()))
    assert _at_places(ours.volume.values, ours.volume.affine) == _at_places(np.asarray(theirs.dataobj), theirs.affine)
    assert ours.volume.values.tobytes() == values.tobytes()  # (columns, rows, slices), along the normal


def _at_places(values: NDArray[Any], affine: NDArray[np.float64]) -> dict[tuple[float, ...], int]:
    index = np.indices(values.shape).reshape(3, -1)
    places = np.rint((affine[:3, :3] @ index + affine[:3, 3:]) * 20).T.astype(int)  # to 0.05 mm
    return {tuple(place): int(v) for place, v in zip(places.tolist(), values.ravel().tolist(), strict=True)}


def _changed_here(source: VolumeSource) -> NDArray[Any]:
    values = source.volume.values.copy()
    values[2:5, 3:6, 1:3] = 77
    return values


def _tags(d: Dataset) -> dict[int, Any]:
    return {int(element.tag): element for element in d if int(element.tag) not in CHANGED}


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "i4"])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian, *COMPRESSED])
def test_a_series_written_again_differs_in_the_changed_voxels_alone(dtype: str, syntax: str) -> None:
    if dtype == "i4" and syntax != ExplicitVRLittleEndian:
        pytest.skip("32 bits are seen native, little-endian")
    values = ramp((40, 33, 4) if syntax in COMPRESSED else (9, 8, 7), dtype) - (50 if dtype[0] == "i" else 0)
    files = [as_syntax(data, syntax) for data in encode(series(values.astype(dtype)))]
    source = read_bytes(files)
    assert source.volume.values.dtype == np.dtype(dtype)
    assert source.volume.values.dtype.isnative
    same = read_bytes(source.encoded(source.volume.values))
    assert same.volume.values.tobytes() == source.volume.values.tobytes()
    values = _changed_here(source)
    out = source.encoded(values)
    again = read_bytes(out)
    assert np.array_equal(again.volume.values, values)
    assert np.array_equal(again.volume.affine, source.volume.affine)
    differs = 0
    for before, after in zip(files, out, strict=True):
        old, new = (pydicom.dcmread(io.BytesIO(data)) for data in (before, after))
        assert _tags(old) == _tags(new)
        assert new.RecognizableVisualFeatures == "NO"
        assert new.ImageType[0] == "DERIVED"
        assert new.SOPInstanceUID == old.SOPInstanceUID == new.file_meta.MediaStorageSOPInstanceUID
        expected = ExplicitVRLittleEndian if syntax in COMPRESSED else syntax
        assert new.file_meta.TransferSyntaxUID == expected
        differs += int((old.pixel_array != new.pixel_array).sum())
    assert differs == int((values != source.volume.values).sum()) > 0


@pytest.mark.parametrize("order", [1, -1])
def test_frames_keep_their_groups_and_their_order(order: int) -> None:
    data = encode([enhanced(order=order)])
    source = read_bytes(data)
    values = _changed_here(source)
    (out,) = source.encoded(values)
    old, new = (pydicom.dcmread(io.BytesIO(d)) for d in (data[0], out))
    assert new.SharedFunctionalGroupsSequence[0].MRImageFrameTypeSequence[0].FrameType[0] == "DERIVED"
    new.SharedFunctionalGroupsSequence[0].MRImageFrameTypeSequence[0].FrameType[0] = "ORIGINAL"
    assert _tags(old) == _tags(new)
    assert np.array_equal(read_bytes([out]).volume.values, values)
    assert int((old.pixel_array != new.pixel_array).sum()) == int((values != source.volume.values).sum())


def test_real_values_are_those_of_each_slice_and_go_back() -> None:
    source = read_bytes(encode([enhanced()]))
    k = np.arange(source.volume.values.shape[2])
    assert source.scaled
    assert np.array_equal(source.real().values, source.volume.values * (1.0 + k) + 10.0 * k)
    real = source.real().values.copy()
    real[0, 0, 6] = 7 * 40 + 60.0
    back = source.stored(real)
    assert back.dtype == source.volume.values.dtype
    assert back[0, 0, 6] == 40
    back[0, 0, 6] = source.volume.values[0, 0, 6]
    assert np.array_equal(back, source.volume.values)


def test_padding_is_as_low_as_air() -> None:
    values = ramp(dtype="i2")
    values[0] = -2000
    datasets = series(values)
    for d in datasets:
        d.add_new(0x00280120, "SS", -2000)
        d.RescaleSlope, d.RescaleIntercept = "1", "-1024"
    source = read_bytes(encode(datasets))
    assert source.scaled
    assert source.real().values.min() == -1024.0 + values[1:].min()
    assert source.volume.values.min() == -2000


def test_a_value_beyond_the_stored_bits_is_not_written() -> None:
    datasets = series()
    for d in datasets:
        d.BitsStored, d.HighBit = 12, 11
    source = read_bytes(encode(datasets))
    assert source.stored(np.full(source.volume.values.shape, 1e6)).max() == 4095
    with pytest.raises(ValueError, match="stored bits"):
        source.encoded(np.full_like(source.volume.values, 4096))
    with pytest.raises(ValueError, match="shape and the type"):
        source.encoded(source.volume.values.astype("i4"))


def test_nothing_that_shows_the_old_picture_is_written() -> None:
    face = b"OLDFACE!" * 1024
    icon, wrapped, inner = Dataset(), Dataset(), Dataset()
    _pixels(icon, np.frombuffer(face[:64], "u1").reshape(8, 8))
    inner.add_new(0x7FE00010, "OW", face)
    wrapped.IconImageSequence = [icon]
    wrapped.add_new(0x00091001, "SQ", [inner])
    wrapped.add_new(0x00090010, "LO", "MAKER")
    datasets = series()
    for d in datasets:
        d.IconImageSequence = [icon]
        d.ReferencedImageSequence = [wrapped]
        d.add_new(0x60000010, "US", 8)
        d.add_new(0x60003000, "OW", face)
        d.add_new(0x00290010, "LO", "MAKER")
        d.add_new(0x00291010, "OB", face)
        d.add_new(0x00291011, "OB", b"few bytes ")
        d.add_new(0x00291012, "UT", face.decode())
        d.add_new(0x00280106, "US", 0)
        d.add_new(0x00280107, "US", 99)
        d.add_new(0xFFFCFFFC, "OB", face)
    files = [b"II*\0" + bytes(124) + data[128:] for data in encode(datasets)]
    source = read_bytes(files)
    for data in source.encoded(source.volume.values):
        assert b"OLDFACE" not in data
        assert not any(data[:128])
        new = pydicom.dcmread(io.BytesIO(data))
        assert new[0x00291011].value == b"few bytes "
        assert 0x00280107 not in new


def test_what_was_deidentified_says_what_was_done_as_our_own_profile_does() -> None:
    who = Deidentifier(bytes(range(32)), "HOSPITAL")
    found = [_cleaned(who, d, Pixels()) for d in series()]
    source = read_bytes(found)
    for data, original in zip(source.encoded(source.volume.values), series(), strict=True):
        new = pydicom.dcmread(io.BytesIO(data))
        like = pydicom.dcmread(io.BytesIO(_cleaned(who, original, Pixels(faces="removed"))))
        for keyword in ("DeidentificationMethodCodeSequence", "DeidentificationMethod", "RecognizableVisualFeatures"):
            assert new[keyword] == like[keyword]
        assert new.DeidentificationMethod[0].startswith("Lazaret")


def _cleaned(who: Deidentifier, d: Dataset, known: Pixels) -> bytes:
    out = io.BytesIO()
    who.clean(pydicom.dcmread(io.BytesIO(written(_with_meta(d)))), known).dataset.save_as(
        out, enforce_file_format=True
    )
    return out.getvalue()


def test_a_file_beside_its_original_has_names_of_its_own() -> None:
    files = encode(series())
    source = read_bytes(files)
    first, second = (source.encoded(source.volume.values, derive_uid) for _ in range(2))
    assert first == second
    new = [pydicom.dcmread(io.BytesIO(data)) for data in first]
    assert len({d.SOPInstanceUID for d in new}) == len(files)
    assert {d.SeriesInstanceUID for d in new} == {derive_uid(SERIES)}
    assert {d.StudyInstanceUID for d in new} == {STUDY}
    assert {d.FrameOfReferenceUID for d in new} == {FRAME}
    assert all(d.SOPInstanceUID == d.file_meta.MediaStorageSOPInstanceUID for d in new)


def test_labels_are_kept_and_not_shown() -> None:
    source = read_bytes(encode(series()))
    assert (source.kind, source.modality, source.study, source.series) == ("dicom", "MR", STUDY, SERIES)
    assert (source.frame_of_reference, source.patient) == (FRAME, "ZZ17")
    assert "ZZ" not in repr(source)
    assert STUDY not in repr(source)


def _set(keyword: str, value: object, every: bool = False) -> Any:
    def change(datasets: list[Dataset]) -> None:
        for d in datasets if every else datasets[:1]:
            setattr(d, keyword, value)

    return change


def _tilt(datasets: list[Dataset]) -> None:
    for d in datasets:
        x, y, z = (float(v) for v in d.ImagePositionPatient)
        d.ImagePositionPatient = [f"{v:.6f}" for v in (x, y + 0.2 * z, z)]


def _twice(datasets: list[Dataset]) -> None:
    for d in list(datasets):
        other = pydicom.dcmread(io.BytesIO(written(_with_meta(d))))
        other.SOPInstanceUID = generate_uid()
        datasets.append(other)


@pytest.mark.filterwarnings("ignore:Invalid value")
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda s: s.pop(next(n for n, d in enumerate(s) if d.InstanceNumber == 4)), "missing_slices"),
        (lambda s: s.append(s[0]), "missing_slices"),
        (_twice, "four_dimensional"),
        (_tilt, "bad_affine"),
        (_set("ImageOrientationPatient", ["1", "0", "0", "0", "0", "-1"]), "mixed_series"),
        (_set("PixelSpacing", ["1", "1"]), "mixed_series"),
        (_set("SeriesInstanceUID", "2.25.99"), "mixed_series"),
        (_set("PatientID", "ZZ18"), "mixed_series"),
        (_set("FrameOfReferenceUID", "2.25.98"), "mixed_series"),
        (_set("BitsStored", 12), "mixed_series"),
        (_set("ImagePositionPatient", None), "not_a_volume"),
        (_set("ImageOrientationPatient", ["1", "0", "0", "1", "0", "0"], every=True), "not_a_volume"),
        (_set("PixelSpacing", ["nan", "1"], every=True), "unreadable"),
        (_set("PixelSpacing", ["0", "1"], every=True), "not_a_volume"),
        (_set("PhotometricInterpretation", "RGB", every=True), "not_a_volume"),
        (_set("SamplesPerPixel", 3, every=True), "not_a_volume"),
        (_set("ImageType", ["ORIGINAL", "PRIMARY", "M", "MOSAIC"], every=True), "four_dimensional"),
        (_set("SOPClassUID", "1.2.840.10008.5.1.4.1.1.66.4", every=True), "not_a_volume"),
        (_set("Rows", 60000, every=True), "unreadable"),
        (lambda s: s.__delitem__(slice(1, None)), "not_a_volume"),
        (lambda s: [d.__delitem__("PixelData") for d in s], "not_a_volume"),
    ],
)  # fmt: skip
def test_a_series_that_is_no_volume_is_refused(spoil: Any, code: str) -> None:
    datasets = series()
    assert read_bytes(encode(datasets)).volume.values.shape == (9, 8, 7)
    spoil(datasets)
    assert refused(encode(datasets)) == code


def test_a_gap_between_frames_is_refused() -> None:
    d = enhanced()
    group = d.PerFrameFunctionalGroupsSequence[3]
    group.PlanePositionSequence[0].ImagePositionPatient = ["30", "-40", "17.4"]
    assert refused(encode([d])) == "missing_slices"
    group.PlanePositionSequence[0].ImagePositionPatient = ["30", "-40", "12.5"]
    assert refused(encode([d])) == "missing_slices"


def test_frames_of_different_spacings_are_no_volume() -> None:
    d = enhanced()
    other = Dataset()
    other.PixelSpacing = ["1", "1"]
    d.PerFrameFunctionalGroupsSequence[2].PixelMeasuresSequence = [other]
    assert refused(encode([d])) == "mixed_series"


def test_a_dicom_header_that_lies_about_its_size_is_refused_before_it_is_believed() -> None:
    datasets = series()
    for d in datasets:
        d.Rows = d.Columns = 65000
    assert refused(encode(datasets)) == "too_large"
    d = enhanced()
    d.NumberOfFrames = 2**30
    assert refused(encode([d])) in ("too_large", "unreadable")


def test_a_cut_file_and_noise_are_refused() -> None:
    files = encode(series())
    assert refused([files[0][:-20], *files[1:]]) == "unreadable"
    assert refused([files[0][:300], *files[1:]]) == "unreadable"
    assert refused([b"noise" * 100]) == "not_a_volume"
    assert refused([]) == "not_a_volume"
    assert refused([files[0], nifti()]) == "mixed_series"


# ------------------------------------------------------------------ NIfTI


def nifti(
    values: NDArray[Any] | None = None, affine: NDArray[np.float64] | None = None, two: bool = False, **fields: Any
) -> bytes:
    """A plain file; header fields are set as they are, right or wrong."""
    values = ramp((6, 7, 8), "i2") if values is None else values
    kind = nibabel.Nifti2Image if two else nibabel.Nifti1Image
    image = kind(values, np.diag([1.0, 1.0, 1.5, 1.0]) if affine is None else affine, dtype=values.dtype)
    image.header["descrip"] = b"as it was"
    if fields.pop("extended", False):
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"OLDFACE" * 20))
    image.header.set_xyzt_units("mm")
    data = bytearray(image.to_bytes())
    swapped = np.frombuffer(data, image.header.template_dtype, 1).copy()
    for name, value in fields.items():
        swapped[name] = value
    data[: swapped.nbytes] = swapped.tobytes()
    return bytes(data)


def big_endian(values: NDArray[Any]) -> bytes:
    header = nibabel.Nifti1Header(endianness=">")
    header.set_data_dtype(values.dtype.newbyteorder(">"))
    image = nibabel.Nifti1Image(values, np.diag([1.0, 1.0, 1.5, 1.0]), header)
    data: bytes = image.to_bytes()
    assert data[:4] == struct.pack(">i", 348)
    return data


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("form", ["one", "two", "gz", "big", "last"])
def test_a_nifti_file_written_again_differs_in_the_changed_voxels_alone(dtype: str, form: str) -> None:
    values = ramp((6, 7, 8), dtype)
    if form == "last":  # a fourth axis of one is kept
        data = nifti(values[..., np.newaxis])
    else:
        data = big_endian(values) if form == "big" else nifti(values, two=form == "two")
    given = gzip.compress(data, 9, mtime=12345) if form == "gz" else data
    source = read_bytes([given])
    assert source.volume.values.dtype == np.dtype(dtype)
    assert source.volume.values.dtype.isnative
    assert np.array_equal(source.volume.values, values)
    (same,) = source.encoded(source.volume.values)
    assert (gzip.decompress(same) if form == "gz" else same) == data
    changed = _changed_here(source)
    (out,) = source.encoded(changed)
    plain = gzip.decompress(out) if form == "gz" else out
    assert out == source.encoded(changed)[0]
    bytes_changed = sum(a != b for a, b in zip(plain, data, strict=True))
    assert 0 < bytes_changed <= values.itemsize * int((changed != values).sum())
    again = nibabel.Nifti2Image if form == "two" else nibabel.Nifti1Image
    image = again.from_bytes(plain)
    assert image.header == again.from_bytes(data).header
    assert np.array_equal(np.asarray(image.dataobj).reshape(changed.shape), changed)


def test_a_scale_is_kept_and_stored_numbers_are_what_is_seen() -> None:
    data = nifti(scl_slope=0.5, scl_inter=-3.0)
    source = read_bytes([data])
    assert source.volume.values.max() == 99
    assert not source.scaled
    assert source.real().values.max() == 99 * 0.5 - 3
    assert source.encoded(source.volume.values) == [data]
    assert np.array_equal(source.stored(source.real().values), source.volume.values)


def test_an_extension_and_what_follows_the_voxels_are_not_written_again() -> None:
    data = nifti(extended=True)
    assert b"OLDFACE" in data
    source = read_bytes([data + b"OLDFACE"])
    (out,) = source.encoded(source.volume.values)
    assert b"OLDFACE" not in out
    assert out[:348] == data[:348]
    assert len(nibabel.Nifti1Image.from_bytes(out).header.extensions) == 0
    assert np.array_equal(np.asarray(nibabel.Nifti1Image.from_bytes(out).dataobj), source.volume.values)


FLAT = {"srow_x": (1, 0, 0, 0), "srow_y": (2, 0, 0, 0), "srow_z": (0, 0, 1, 0)}
MIRRORED = {"srow_x": (-1, 0, 0, 0)}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"sform_code": 0, "qform_code": 0}, "bad_affine"),
        ({"sform_code": 17}, "bad_affine"),
        ({"qform_code": -3}, "bad_affine"),
        (FLAT, "bad_affine"),
        ({"srow_x": (np.nan, 0, 0, 0)}, "bad_affine"),
        ({"srow_x": (1, 0.3, 0, 0)}, "bad_affine"),
        ({**MIRRORED, "sform_code": 1, "qform_code": 1}, "bad_affine"),
        ({**MIRRORED, "sform_code": 4, "qform_code": 1}, "bad_affine"),
        ({"srow_x": (1, 0, 0, 30), "sform_code": 1, "qform_code": 1}, "bad_affine"),
        ({"sform_code": 0, "qform_code": 1, "quatern_b": np.nan}, "bad_affine"),
        ({"sform_code": 0, "qform_code": 1, "quatern_b": 3.0}, "bad_affine"),
        ({"sform_code": 0, "qform_code": 1, "pixdim": (1, 1, 0, 1, 0, 0, 0, 0)}, "bad_affine"),
        ({"xyzt_units": 1}, "bad_affine"),
        ({"xyzt_units": 3}, "bad_affine"),
        ({"datatype": 128, "bitpix": 24}, "not_a_volume"),
        ({"datatype": 32, "bitpix": 64}, "not_a_volume"),
        ({"datatype": 9999}, "unreadable"),
        ({"dim": (4, 6, 7, 4, 2, 1, 1, 1)}, "four_dimensional"),
        ({"dim": (5, 6, 7, 4, 1, 2, 1, 1)}, "four_dimensional"),
        ({"dim": (2, 6, 7, 1, 1, 1, 1, 1)}, "not_a_volume"),
        ({"dim": (3, 6, 7, 1, 1, 1, 1, 1)}, "not_a_volume"),
        ({"dim": (3, 6, 7, -1, 1, 1, 1, 1)}, "unreadable"),
        ({"dim": (9, 6, 7, 1, 1, 1, 1, 1)}, "unreadable"),
        ({"dim": (3, 6, 7, 9, 1, 1, 1, 1)}, "unreadable"),
        ({"dim": (3, 1000, 1000, 1000, 1, 1, 1, 1)}, "too_large"),
        ({"vox_offset": 0}, "unreadable"),
        ({"vox_offset": 1e9}, "unreadable"),
        ({"vox_offset": np.nan}, "unreadable"),
        ({"magic": b"ni1"}, "not_a_volume"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_nifti_header_that_makes_no_sense_is_refused(fields: dict[str, Any], code: str, zipped: bool) -> None:
    affine = np.diag([1.0, 1.0, 1.5, 1.0])
    assert read_bytes([nifti(affine=affine)]).volume.values.shape == (6, 7, 8)
    data = nifti(affine=affine, **fields)
    assert refused(gzip.compress(data) if zipped else data) == code


def test_the_scanners_space_goes_before_another_and_both_are_kept() -> None:
    fields: dict[str, Any] = {"sform_code": 4, "qform_code": 1, "srow_x": (1.1, 0, 0, 30)}
    data = nifti(**fields)
    source = read_bytes([data])
    assert np.allclose(source.volume.affine, np.diag([1.0, 1.0, 1.5, 1.0]))
    assert source.encoded(source.volume.values) == [data]
    assert np.allclose(read_bytes([nifti(**{**fields, "qform_code": 2})]).volume.affine[0], (1.1, 0, 0, 30))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_voxel_that_is_no_number_is_refused(wrong: float) -> None:
    values = ramp((6, 7, 8), "f4")
    values[1, 2, 3] = wrong
    assert refused(nifti(values)) == "not_finite"


def test_a_cut_or_swollen_gzip_is_refused() -> None:
    whole = gzip.compress(nifti(np.random.default_rng(0).integers(0, 999, (20, 20, 20)).astype("i2")))
    for length in (5, 200, len(whole) // 2, len(whole) - 9):
        assert refused(whole[:length]) in ("unreadable", "not_a_volume")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    assert refused(bytes(damaged)) == "unreadable"
    bomb = gzip.compress(nifti() + bytes(2**22))
    assert refused(bomb) == "too_large"


def test_a_size_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.deidentify.nifti.inflate", _never)
    monkeypatch.setattr(np, "frombuffer", _never)
    data = bytearray(nibabel.Nifti1Header(check=False).binaryblock + bytes(4))
    struct.pack_into("<8h", data, 40, 3, 1024, 1024, 1024, 1, 1, 1, 1)
    struct.pack_into("<hh", data, 70, 4, 16)
    struct.pack_into("<f", data, 108, 352.0)
    struct.pack_into("<hh", data, 252, 1, 0)
    data[344:348] = b"n+1\0"
    with pytest.raises(NotDefacedError, match="too_large"):
        volume_nifti.opened(gzip.compress(bytes(data)))


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("asked for too early")


# ------------------------------------------------------------------ files


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _laid(folder: Path, datasets: Sequence[Dataset]) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"IM{n:04d}" for n in range(len(datasets))]
    for path, data in zip(paths, encode(datasets), strict=True):
        path.write_bytes(data)
    return paths


def test_a_series_is_written_as_a_whole_under_its_files_names(tmp_path: Path) -> None:
    paths = _laid(tmp_path / "in", series())
    source = read(paths)
    out = source.write(_changed_here(source), tmp_path / "made" / "out")
    assert [p.name for p in out] == [p.name for p in paths]
    assert read(tmp_path / "made" / "out").volume.values.tobytes() == _changed_here(source).tobytes()
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["out"]
    with pytest.raises(FileExistsError):
        source.write(_changed_here(source), tmp_path / "made" / "out")
    assert read(tmp_path / "in").volume.values.tobytes() == source.volume.values.tobytes()


def test_one_file_is_written_under_a_name_or_into_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "head.nii.gz"
    path.write_bytes(gzip.compress(nifti()))
    source = read(path)
    assert source.write(source.volume.values, tmp_path / "new.nii.gz") == [tmp_path / "new.nii.gz"]
    (tmp_path / "there").mkdir()
    assert source.write(source.volume.values, tmp_path / "there") == [tmp_path / "there" / "head.nii.gz"]
    assert _tree(tmp_path)["new.nii.gz"] == _tree(tmp_path)["there/head.nii.gz"]
    with pytest.raises(ValueError, match="gzipped"):
        source.write(source.volume.values, tmp_path / "new.nii")
    with pytest.raises(FileExistsError):
        source.write(source.volume.values, path)
    (frames,) = _laid(tmp_path / "in", [enhanced()])
    multi = read(frames)
    assert multi.write(multi.volume.values, tmp_path / "new.dcm") == [tmp_path / "new.dcm"]


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "folder that is there"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, after: int) -> None:
    source = read(_laid(tmp_path / "in", series()))
    out = tmp_path / "made" / "out"
    (out if there else out.parent).mkdir(parents=True)
    real, count = os.fsync, iter(range(100))

    def full(descriptor: int) -> None:
        if next(count) >= after:
            raise OSError(errno.ENOSPC, "no space")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        source.write(source.volume.values, out)
    assert _tree(tmp_path / "made") == {}
    assert out.exists() == there


KILLED = """
import os, signal, sys
from pathlib import Path
from agent.volumes.volume_io import read
source, count, real = read(Path(sys.argv[1])), iter(range(100)), os.fsync
def killed(descriptor):
    real(descriptor)
    if next(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killed
source.write(source.volume.values, Path(sys.argv[2]))
"""


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "folder that is there"])
def test_a_kill_leaves_no_half_file(tmp_path: Path, there: bool) -> None:
    _laid(tmp_path / "in", series())
    out = tmp_path / "made" / "out"
    (out if there else out.parent).mkdir(parents=True)
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "in", out], check=False)
    assert ended.returncode == -signal.SIGKILL
    left = [name for name in _tree(tmp_path / "made") if not any(part.startswith(".") for part in Path(name).parts)]
    assert left == []
    assert series_of(tmp_path / "made") == []
    source = read(tmp_path / "in")
    source.write(source.volume.values, out)  # and it can be done again
    assert read(out).volume.values.tobytes() == source.volume.values.tobytes()


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path / "none.nii", [tmp_path / "none.dcm"], tmp_path):
        with pytest.raises(NotDefacedError):
            read(wrong)


# ------------------------------------------------------------------ folders


def _study(tmp_path: Path) -> Iterator[tuple[str, list[Dataset]]]:
    yield "head", series()
    other = series(turn=SAGITTAL)
    for d in other:
        d.SeriesInstanceUID, d.SOPInstanceUID = "2.25.50", f"{d.SOPInstanceUID}1"
    yield "sagittal", other
    scout = [
        slice_of(ramp()[:, :, n].T, (0, 0, 0), turn, 600 + n) for n, turn in enumerate((AXIAL, SAGITTAL, OBLIQUE))
    ]
    for d in scout:
        d.SeriesInstanceUID = "2.25.51"
    yield "scout", scout
    echoes = [*series(), *series()]
    for n, d in enumerate(echoes):
        d.SeriesInstanceUID, d.SOPInstanceUID = "2.25.52", f"{d.SOPInstanceUID}{2 + n // 7}"
        d.EchoTime = str(3 + n // 7)
    yield "echoes", echoes
    multi = enhanced()
    multi.SeriesInstanceUID, multi.SOPInstanceUID, multi.StudyInstanceUID = "2.25.53", "2.25.530", "2.25.77"
    yield "multi", [multi]


def test_a_folder_is_taken_apart_into_volumes_and_what_is_none(tmp_path: Path) -> None:
    for name, datasets in _study(tmp_path):
        _laid(tmp_path / name, datasets)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "README").write_text("nothing")
    (tmp_path / ".head.part").write_bytes(encode(series())[0])
    (tmp_path / "broken").write_bytes(encode(series())[0][:300])
    for name, sop_class in (("outline", "66.4"), ("words", "88.33")):  # a segmentation, a report
        other = series()[0]
        other.SOPClassUID = f"1.2.840.10008.5.1.4.1.1.{sop_class}"
        (tmp_path / name).write_bytes(encode([other])[0])
    groups = series_of(tmp_path)
    told = sorted((g.paths[0].relative_to(tmp_path).parts[0], len(g.paths), g.why) for g in groups)
    assert told == [
        ("broken", 1, "unreadable"),
        ("echoes", 7, ""),
        ("echoes", 7, ""),
        ("head", 7, ""),
        ("multi", 1, ""),
        ("outline", 1, "not_a_volume"),
        ("sagittal", 7, ""),
        *[("scout", 1, "not_a_volume")] * 3,
    ]
    for group in groups:
        if not group.why:
            assert read(group.paths).volume.values.shape[2] == 7
            assert group.frame_of_reference == FRAME
    sizes = sorted(len(study) for study in studies(groups))
    assert sizes == [1, 1, 1, 7]


def test_files_in_hand_are_taken_apart_as_those_of_a_folder_are(tmp_path: Path) -> None:
    bodies = {f"{name}/{n}": data for name, ds in _study(tmp_path) for n, data in enumerate(encode(ds))}
    bodies["head"] = nifti()
    groups = grouped((Path(name), data) for name, data in bodies.items())
    assert sorted(len(group.paths) for group in groups) == [1, 1, 1, 1, 1, 7, 7, 7, 7]
    for group in groups:
        if not group.why:
            assert read_bytes([bodies[str(path)] for path in group.paths]).volume.values.ndim == 3


def test_sessions_of_a_bids_folder_are_studies(tmp_path: Path) -> None:
    sessions = ("sub-01/ses-a/anat/a_T1w.nii", "sub-01/ses-a/anat/a_T2w.nii", "sub-01/ses-b/anat/b_T1w.nii")
    for name in (*sessions, "sub-02/anat/sub-02_T1w.nii", "loose.nii", "other.nii"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(nifti())
    (tmp_path / "sub-02/anat/sub-02_bold.nii").write_bytes(nifti(dim=(4, 6, 7, 4, 2, 1, 1, 1)))
    (tmp_path / "sub-02/anat/cut.nii.gz").write_bytes(b"\x1f\x8b")
    groups = series_of(tmp_path)
    assert sorted(len(study) for study in studies(groups)) == [1, 1, 1, 2, 3]
    why = {group.paths[0].name: group.why for group in groups}
    assert why["sub-02_bold.nii"] == "four_dimensional"
    assert why["cut.nii.gz"] in ("unreadable", "not_a_volume")
    assert why["loose.nii"] == ""


def test_a_real_head_comes_back_from_both_formats(tmp_path: Path) -> None:
    image = nibabel.load(HEAD)
    values = np.asarray(image.dataobj)[::4, ::4, ::4]
    data = nifti(np.ascontiguousarray(values), image.affine @ np.diag([4.0, 4.0, 4.0, 1.0]))
    source = read_bytes([data])
    assert np.array_equal(source.volume.values, values)
    slices = series(values.astype("u2"), OBLIQUE)
    stacked = read(_laid(tmp_path / "in", slices))
    assert np.array_equal(stacked.volume.values, values)
    assert np.array_equal(read_bytes(stacked.encoded(stacked.volume.values)).volume.values, values)
