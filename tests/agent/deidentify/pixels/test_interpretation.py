"""Stored values become real ones as pydicom and DCMTK have them, and slices a volume as dcm2niix has it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydicom.data import get_testdata_file
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut, apply_windowing
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.pixels.interpretation import Interpreted, NotAVolumeError, interpret, stack
from tests.support.peers import need

HEAD = Path("/usr/share/mricron/templates/ch2.nii.gz")


def _file(name: str) -> pydicom.FileDataset:
    return pydicom.dcmread(str(get_testdata_file(name, download=False)))


def _grey(stored: NDArray[Any], **attributes: object) -> pydicom.Dataset:
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.SamplesPerPixel, dataset.BitsStored = 1, 8 * stored.dtype.itemsize
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    for keyword, value in attributes.items():
        setattr(dataset, keyword, value)
    return dataset


def _lut(first: int, entries: NDArray[Any], bits: int) -> pydicom.Dataset:
    item = pydicom.Dataset()
    item.add_new("LUTDescriptor", "US", [len(entries) % 65536, first, bits])
    item.add_new("LUTData", "OW", entries.astype("<u2").tobytes())
    return item


@pytest.mark.parametrize(
    "name", ["CT_small.dcm", "MR_small.dcm", "examples_overlay.dcm", "dicomdirtests/98892001/CT5N/2062"]
)
def test_modality_values_are_pydicoms(name: str) -> None:
    dataset = _file(name)
    stored = dataset.pixel_array
    if "PixelPaddingValue" in dataset:
        del dataset.PixelPaddingValue  # pydicom does not know padding
    found = interpret(dataset, stored, "none")
    assert np.array_equal(found.values, apply_modality_lut(stored, dataset).astype(np.float32))
    assert found.bits == dataset.BitsStored
    assert found.spacing == tuple(dataset.PixelSpacing)


def test_a_ct_is_in_hounsfield_units_and_air_is_where_it_should_be() -> None:
    dataset = _file("CT_small.dcm")
    found = interpret(dataset, dataset.pixel_array, "none")
    assert found.units == "HU"
    assert -1100 < np.percentile(found.values, 1) < -800  # air around the patient
    assert interpret(dataset, dataset.pixel_array, "first_window").units == "display"


@pytest.mark.parametrize(
    ("kind", "stored", "units"),
    [({"RescaleType": "OD"}, "u2", "OD"), ({"RescaleType": "US"}, "u2", "unspecified"), ({}, "u2", "unspecified")],
)
def test_units_are_those_that_the_file_states(kind: dict[str, str], stored: str, units: str) -> None:
    values = np.arange(4, dtype=stored).reshape(2, 2)
    assert interpret(_grey(values, RescaleSlope=1, RescaleIntercept=0, **kind), values, "none").units == units
    pet = _grey(values, Modality="PT", Units="BQML", RescaleSlope=1, RescaleIntercept=0)
    assert interpret(pet, values, "none").units == "BQML"


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@given(centre=st.integers(-500, 2000), width=st.integers(2, 3000), slope=st.sampled_from([1.0, 0.5, 2.25]))
def test_windows_are_pydicoms(function: str, centre: int, width: int, slope: float) -> None:
    stored = np.arange(-1200, 2800, 7, dtype=np.int16)[np.newaxis]
    dataset = _grey(stored, WindowCenter=centre, WindowWidth=width, VOILUTFunction=function)
    dataset.RescaleSlope, dataset.RescaleIntercept = slope, -3
    real = apply_modality_lut(stored, dataset)
    shown = apply_windowing(real, dataset)
    # pydicom's window spans what 16 bits, rescaled, can say
    low, high = slope * -32768 - 3, slope * 32767 - 3
    found = interpret(dataset, stored, "first_window").values
    assert np.allclose(found, (shown - low) / (high - low), rtol=0, atol=2e-5)


def test_a_window_of_width_one_is_a_step_at_its_centre() -> None:
    stored = np.array([[9, 10, 11]], dtype=np.uint16)
    dataset = _grey(stored, WindowCenter=10, WindowWidth=1)
    # PS3.3 C.11.2.1.2.1: x <= c - 0.5 is black
    assert interpret(dataset, stored, "first_window").values.tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize(("first", "kind"), [(10, np.uint16), (-50, np.int16), (0, np.uint8)])
def test_lookup_tables_of_modality_and_display_are_pydicoms(first: int, kind: type) -> None:
    rng = np.random.default_rng(6)
    low, high = (-90, 300) if kind is np.int16 else (0, 250)
    stored = rng.integers(low, high, (16, 16)).astype(kind)
    dataset = _grey(stored)
    entries = np.sort(rng.integers(0, 65536, 200))
    item = _lut(0, entries, 16)
    item["LUTDescriptor"].VR = "SS" if first < 0 else "US"
    item.LUTDescriptor = [200, first, 16]
    dataset.VOILUTSequence = [item]
    shown = apply_voi_lut(stored, dataset)
    found = interpret(dataset, stored, "first_lut")
    assert np.allclose(found.values, shown / 65535, rtol=0, atol=1e-6)
    del dataset.VOILUTSequence
    item.ModalityLUTType = "OD"
    dataset.ModalityLUTSequence = [item]
    real = interpret(dataset, stored, "none")
    assert np.array_equal(real.values, apply_modality_lut(stored, dataset))
    assert real.units == "OD"


@pytest.mark.parametrize(
    ("options", "window", "changes"),
    [
        (("+Wi", "1"), "first_window", {}),
        (("+Wi", "1"), "first_window", {"PhotometricInterpretation": "MONOCHROME1"}),
        (("+Wi", "1"), "first_window", {"VOILUTFunction": "SIGMOID"}),
        (("+Wi", "1"), "first_window", {"RescaleSlope": "1.5", "RescaleIntercept": "-20"}),
        (("+Wm",), "full_range", {"RescaleSlope": "0.5", "RescaleIntercept": "0"}),
        (("+Wl", "1"), "first_lut", {}),
    ],
)
def test_what_is_shown_is_what_dcmtk_shows(
    options: tuple[str, ...], window: Any, changes: dict[str, str], tmp_path: Path
) -> None:
    need("dcm2pnm")
    dataset = _file("MR_small.dcm")
    dataset.WindowCenter, dataset.WindowWidth = "600", "1600"
    dataset.VOILUTSequence = [_lut(0, np.linspace(0, 65535, 3000).astype(int), 16)]
    for keyword in ("SmallestImagePixelValue", "LargestImagePixelValue"):
        if keyword in dataset:
            delattr(dataset, keyword)
    for keyword, value in changes.items():
        setattr(dataset, keyword, value)
    source, out = tmp_path / "in.dcm", tmp_path / "out.pgm"
    dataset.save_as(source)
    subprocess.run(["dcm2pnm", "+op", *options, str(source), str(out)], check=True, capture_output=True, timeout=60)
    size = int(dataset.Rows) * int(dataset.Columns)
    theirs = np.frombuffer(out.read_bytes()[-size:], np.uint8).reshape(dataset.Rows, dataset.Columns)
    ours = interpret(dataset, dataset.pixel_array, window).values
    assert ours.std() > 0.05
    # a level of eight bits, for DCMTK cuts where others round, and half a modality unit, for it rounds those too
    assert np.abs(ours * 255 - theirs).max() <= 1.0 + 0.5 * 255 / 1600


def test_padding_is_shown_black_and_does_not_stretch_the_range() -> None:
    stored = np.array([[-2000, 0, 50, 100]], dtype=np.int16)
    dataset = _grey(stored)
    dataset.add_new("PixelPaddingValue", "US", 63536)  # -2000 in the wrong VR, as real scanners write it
    assert interpret(dataset, stored, "full_range").values.tolist() == [[0.0, 0.0, 0.5, 1.0]]
    assert interpret(dataset, stored, "none").values.tolist() == [[0.0, 0.0, 50.0, 100.0]]
    dataset.PhotometricInterpretation = "MONOCHROME1"
    assert interpret(dataset, stored, "full_range").values.tolist() == [[0.0, 1.0, 0.5, 0.0]]
    dataset.add_new("PixelPaddingRangeLimit", "SS", 0)
    assert interpret(dataset, stored, "full_range").values.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_an_enhanced_object_is_read_frame_by_frame() -> None:
    stored = np.arange(24, dtype=np.uint16).reshape(3, 2, 4)
    dataset = _grey(stored, NumberOfFrames=3, Modality="MR")
    measures, orientation = pydicom.Dataset(), pydicom.Dataset()
    measures.PixelSpacing = ["0.5", "0.75"]
    orientation.ImageOrientationPatient = ["1", "0", "0", "0", "1", "0"]
    shared = pydicom.Dataset()
    shared.PixelMeasuresSequence, shared.PlaneOrientationSequence = [measures], [orientation]
    dataset.SharedFunctionalGroupsSequence = [shared]
    groups = []
    for i in range(3):
        transform, position, window = pydicom.Dataset(), pydicom.Dataset(), pydicom.Dataset()
        transform.RescaleSlope, transform.RescaleIntercept, transform.RescaleType = i + 1, 10 * i, "OD"
        position.ImagePositionPatient = ["1", "2", str(5 * i)]
        window.WindowCenter, window.WindowWidth = "0.5", "2"
        group = pydicom.Dataset()
        group.PixelValueTransformationSequence, group.PlanePositionSequence = [transform], [position]
        group.FrameVOILUTSequence = [window]
        groups.append(group)
    dataset.PerFrameFunctionalGroupsSequence = groups
    found = interpret(dataset, stored, "none")
    assert np.array_equal(found.values, np.stack([stored[i] * (i + 1.0) + 10 * i for i in range(3)]))
    assert (found.units, found.spacing) == ("OD", (0.5, 0.75))
    assert found.planes is not None
    assert [p.origin for p in found.planes] == [(1, 2, 0), (1, 2, 5), (1, 2, 10)]
    volume, affine = stack([found])
    assert volume.shape == (4, 2, 3)
    # column, row and slice steps, the origin; x and y change sign from LPS to RAS
    assert np.array_equal(affine, [[-0.75, 0, 0, -1], [0, -0.5, 0, -2], [0, 0, 5, 0], [0, 0, 0, 1]])
    # PS3.3 C.11.2.1.2.1: (0 - (0.5 - 0.5)) / (2 - 1) + 0.5
    assert interpret(dataset, stored, "first_window").values[0, 0, 0] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"RescaleSlope": "1e38", "RescaleIntercept": "0"},
        {"VOILUTSequence": [_lut(0, np.arange(4), 40)]},
        {"ModalityLUTSequence": [pydicom.Dataset()]},
        {"NumberOfFrames": 7},
    ],
)
def test_attributes_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    stored = np.array([[1, 60000]], dtype=np.uint16)
    with pytest.raises(FileRejectedError, match="undecodable"):
        interpret(_grey(stored, **changes), stored, "first_lut" if "VOILUTSequence" in changes else "none")


def test_an_unknown_policy_is_a_fault_of_the_caller() -> None:
    stored = np.zeros((2, 2), dtype=np.uint8)
    with pytest.raises(ValueError, match="policy"):
        interpret(_grey(stored), stored, "second_window")  # type: ignore[arg-type]


def _slice(
    values: NDArray[np.uint16], affine: NDArray[np.float64], k: int, uids: tuple[str, str, str]
) -> pydicom.FileDataset:
    """One axial MR slice of a volume in NIfTI's axes."""
    source = _file("MR_small.dcm")
    to_lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    dataset = pydicom.Dataset()
    dataset.file_meta = source.file_meta
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SOPClassUID, dataset.SOPInstanceUID = source.SOPClassUID, generate_uid()
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID, dataset.FrameOfReferenceUID = uids
    dataset.Modality, dataset.PatientID, dataset.PatientName = "MR", "HEAD", "TEST^HEAD"
    dataset.ImageType, dataset.InstanceNumber, dataset.SeriesNumber = ["ORIGINAL", "PRIMARY", "OTHER"], k + 1, 1
    dataset.Manufacturer, dataset.StudyDate, dataset.StudyTime = "TEST", "20200101", "120000"
    dataset.Rows, dataset.Columns = values.shape[1], values.shape[0]
    steps = np.linalg.norm(to_lps[:3, :3], axis=0)
    dataset.PixelSpacing, dataset.SliceThickness = [steps[1], steps[0]], steps[2]
    dataset.ImageOrientationPatient = [float(v) for v in (*(to_lps[:3, 0] / steps[0]), *(to_lps[:3, 1] / steps[1]))]
    dataset.ImagePositionPatient = [float(v) for v in (to_lps @ [0, 0, k, 1])[:3]]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 12, 11, 0
    dataset.PixelData = np.ascontiguousarray(values[:, :, k].T).tobytes()
    return dataset


def _head(below: int) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    """A real head where mricron is installed, else a shape of the same kind; and its affine."""
    if HEAD.exists():
        image = nibabel.load(HEAD)
        return np.asanyarray(image.dataobj)[:, :, :below].astype(np.uint16), np.asarray(image.affine)
    rng = np.random.default_rng(8)
    affine = np.diag([1.0, 1.5, 2.0, 1.0])
    affine[:3, 3] = -90, -126, -72
    return rng.integers(0, 4000, (40, 50, below)).astype(np.uint16), affine


def test_a_head_of_slices_in_any_order_is_the_volume_that_dcm2niix_makes(tmp_path: Path) -> None:
    need("dcm2niix")
    values, affine = _head(24)
    uids = (generate_uid(), generate_uid(), generate_uid())
    slices = [_slice(values, affine, k, uids) for k in range(values.shape[2])]
    (tmp_path / "in").mkdir()
    for k, one in enumerate(slices):
        one.save_as(tmp_path / "in" / f"{k:03d}.dcm", enforce_file_format=True)
    command = ["dcm2niix", "-b", "n", "-z", "n", "-f", "head", "-o", str(tmp_path), str(tmp_path / "in")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    theirs = nibabel.as_closest_canonical(nibabel.load(tmp_path / "head.nii"))
    order = np.random.default_rng(9).permutation(len(slices))
    files = [pydicom.dcmread(tmp_path / "in" / f"{k:03d}.dcm") for k in order]
    volume, found = stack([interpret(f, f.pixel_array, "none") for f in files])
    ours = nibabel.as_closest_canonical(nibabel.Nifti1Image(volume, found))
    assert np.allclose(ours.affine, theirs.affine, rtol=0, atol=1e-4)
    assert np.array_equal(np.asarray(ours.dataobj), np.asarray(theirs.dataobj))
    assert np.array_equal(volume, values)
    assert np.allclose(found, affine, rtol=0, atol=1e-9)


def _pictures(count: int = 4, **changes: object) -> list[Interpreted]:
    values, affine = np.arange(5 * 6 * count, dtype=np.uint16).reshape(5, 6, count), np.diag([1.0, 1.0, 3.0, 1.0])
    slices = [_slice(values, affine, k, ("1.2.1", "1.2.2", "1.2.3")) for k in range(count)]
    for keyword, value in changes.items():
        setattr(slices[1], keyword, value)
    return [interpret(s, s.pixel_array, "none") for s in slices]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ImagePositionPatient": [0, 0, 4.0]}, "evenly"),
        ({"ImagePositionPatient": [1.0, 0, 3.0]}, "evenly"),
        ({"ImagePositionPatient": [0, 0, 0]}, "evenly"),
        ({"ImagePositionPatient": None}, "without position"),
        ({"ImageOrientationPatient": [0, 1, 0, 1, 0, 0]}, "orientations"),
        ({"ImageOrientationPatient": [1, 1, 0, 0, 1, 0]}, "without position"),
        ({"PixelSpacing": [1, 2]}, "one spacing"),
    ],
)
def test_slices_that_do_not_fit_are_no_volume(changes: dict[str, object], text: str) -> None:
    assert stack(_pictures())[0].shape == (5, 6, 4)
    with pytest.raises(NotAVolumeError, match=text):
        stack(_pictures(**changes))
    with pytest.raises(NotAVolumeError, match="two slices"):
        stack(_pictures()[:1])


def test_a_tilted_gantry_keeps_its_shear() -> None:
    pictures = _pictures()
    sheared = []
    for k, picture in enumerate(pictures):
        assert picture.planes is not None
        plane = replace(picture.planes[0], origin=(0.0, 0.8 * k, 3.0 * k))
        sheared.append(Interpreted(picture.values, picture.units, picture.spacing, (plane,), picture.bits))
    _, affine = stack(sheared)
    assert np.allclose(affine[:3, 2], [0, -0.8, 3.0], rtol=0, atol=1e-12)
