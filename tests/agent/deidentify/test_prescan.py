"""The raw scan, the rules, the pixels and the NIfTI header: what stands before and after the tag engine."""

from __future__ import annotations

import gzip
import io
import struct
import time
import zlib
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.data import get_testdata_file
from pydicom.uid import ExplicitVRLittleEndian

from agent.deidentify import nifti
from agent.deidentify.admission_rules import AdmissionRules, judge
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.face_risk import may_show_a_face
from agent.deidentify.pixels import pixel_data
from agent.deidentify.prescan import EXPLICIT_LE, MAX_ELEMENTS, read_meta, scan
from agent.deidentify.record import Record
from deploy.phantoms import scanner_files

HEX = "0" * 32


def _bytes(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path).read_bytes()


def _scan(data: bytes) -> int:
    meta = read_meta(data)
    return scan(data, meta.offset, meta.transfer_syntax)


@pytest.mark.parametrize(
    "name",
    [
        *("CT_small.dcm", "MR_small_implicit.dcm", "MR_small_bigendian.dcm", "MR_small_RLE.dcm"),
        *("MR_small_jp2klossless.dcm", "examples_ybr_color.dcm", "rtplan.dcm", "test-SR.dcm", "priv_SQ.dcm"),
        *("MR_small_padded.dcm", "nested_priv_SQ.dcm", "waveform_ecg.dcm", "693_J2KI.dcm"),
    ],
)
def test_the_scan_lets_real_files_pass_and_counts_every_element(name: str) -> None:
    dataset = pydicom.dcmread(io.BytesIO(_bytes(name)))
    assert _scan(_bytes(name)) >= sum(1 for _ in dataset.iterall())


@pytest.mark.parametrize("depth", [17, 1000, 20_000])
def test_nested_sequences_are_refused_at_once(depth: int) -> None:
    bomb = scanner_files.sequence_bomb(min(depth, 3000))
    started = time.process_time()
    with pytest.raises(FileRejectedError, match="too_deep"):
        _scan(bomb)
    assert time.process_time() - started < 1.0


def test_open_ended_sequences_are_refused_at_once() -> None:
    head = scanner_files.sequence_bomb(0)
    level = b"\x08\0\x40\x11SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    with pytest.raises(FileRejectedError, match="too_deep"):
        _scan(head + level * 5000)
    un = b"\x09\0\x40\x11UN\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    implicit = b"\x08\0\x40\x11\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    with pytest.raises(FileRejectedError, match="too_deep"):
        _scan(head + un + implicit * 100)


def test_sixteen_levels_are_still_allowed() -> None:
    assert _scan(scanner_files.sequence_bomb(16)) == 32


def test_a_length_beyond_the_end_of_the_file_is_refused() -> None:
    with pytest.raises(FileRejectedError, match="truncated"):
        _scan(scanner_files.length_beyond_end())


def test_an_item_longer_than_its_sequence_is_refused() -> None:
    data = scanner_files.sequence_bomb(0) + b"\x08\0\x40\x11SQ\0\0" + struct.pack("<I", 8)
    data += b"\xfe\xff\x00\xe0" + struct.pack("<I", 10) + b"\x08\0\x60\0CS\x02\0OT"
    with pytest.raises(FileRejectedError, match="malformed"):
        _scan(data)


def test_more_elements_than_any_image_has_are_refused() -> None:
    element = b"\x08\0\x60\0CS\x02\0OT"
    with pytest.raises(FileRejectedError, match="too_deep"):
        _scan(scanner_files.sequence_bomb(0) + element * (MAX_ELEMENTS + 1))


@given(st.lists(st.tuples(st.integers(132, 9000), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_passes_or_is_refused_and_nothing_else(damage: list[tuple[int, int]]) -> None:
    data = bytearray(_bytes("MR_small.dcm"))
    for position, value in damage:
        data[position] = value
    try:
        assert _scan(bytes(data)) > 0
    except FileRejectedError as refusal:
        assert refusal.code in ("truncated", "malformed", "too_deep", "not_dicom")  # noqa: PT017


def test_a_file_cut_anywhere_in_its_header_is_refused() -> None:
    data = _bytes("CT_small.dcm")
    whole = pydicom.dcmread(io.BytesIO(data))
    for end in range(200, len(data) - len(whole.PixelData), 97):
        try:
            _scan(data[:end])
        except FileRejectedError:
            continue
        assert "PixelData" not in pydicom.dcmread(io.BytesIO(data[:end]))  # cut between two elements


RULES = AdmissionRules(modalities=frozenset({"MR", "OT"}))


def _mr(**changes: object) -> pydicom.Dataset:
    dataset = pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm")))
    dataset.ImageType = ["ORIGINAL", "PRIMARY"]
    for keyword, value in changes.items():
        setattr(dataset, keyword, value)
    return dataset


def test_a_scanners_own_picture_is_let_in() -> None:
    judge(_mr(), EXPLICIT_LE, RULES)


SECONDARY = "1.2.840.10008.5.1.4.1.1.7"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ImageType": ["DERIVED", "SECONDARY", "SCREEN SAVE"]}, "burned_in_risk"),
        ({"ImageType": None}, "burned_in_risk"),
        ({"BurnedInAnnotation": "YES"}, "burned_in_risk"),
        ({"Modality": "US"}, "burned_in_risk"),
        ({"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3}, "burned_in_risk"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "burned_in_risk"),
        ({"PhotometricInterpretation": "HSV"}, "unsupported_encoding"),
        ({"SOPClassUID": SECONDARY}, "burned_in_risk"),
        ({"SOPClassUID": SECONDARY + ".2", "Modality": "OT"}, "burned_in_risk"),
        ({"SOPClassUID": "1.2.840.10008.5.1.4.1.1.77.1.6"}, "sop_class_not_allowed"),
        ({"SOPClassUID": "1.3.12.2.1107.5.9.1"}, "sop_class_not_allowed"),
        ({"SOPClassUID": "1.2.840.10008.1.3.10"}, "dicomdir"),
        ({"SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.33"}, "not_an_image"),
        ({"SOPClassUID": None}, "incomplete"),
        ({"StudyInstanceUID": ""}, "incomplete"),
        ({"Modality": "CT"}, "modality_not_allowed"),
        ({"Modality": None}, "modality_not_allowed"),
        ({"PatientID": "  "}, "missing_patient"),
        ({"BitsAllocated": 1}, "unsupported_encoding"),
        ({"Rows": 0}, "undecodable"),
        ({"NumberOfFrames": -1}, "undecodable"),
        ({"Rows": 65535, "Columns": 65535}, "too_large"),
        ({"NumberOfFrames": 2**31 - 1}, "too_large"),
    ],
)
def test_everything_else_is_refused_with_its_reason(changes: dict[str, object], code: str) -> None:
    with pytest.raises(FileRejectedError) as caught:
        judge(_mr(**changes), EXPLICIT_LE, RULES)
    assert caught.value.code == code


def test_a_marked_annotation_is_refused_even_from_a_vouched_capture_device() -> None:
    rules = AdmissionRules(modalities=frozenset({"OT"}), secondary_capture_modalities=frozenset({"OT"}))
    judge(_mr(SOPClassUID=SECONDARY, Modality="OT"), EXPLICIT_LE, rules)
    with pytest.raises(FileRejectedError, match="burned_in_risk"):
        judge(_mr(SOPClassUID=SECONDARY, Modality="OT", BurnedInAnnotation="YES"), EXPLICIT_LE, rules)


def test_deflated_and_unknown_transfer_syntaxes_are_refused() -> None:
    for syntax in ("1.2.840.10008.1.2.1.99", "1.2.840.10008.1.2.4.102", "1.2.3"):
        with pytest.raises(FileRejectedError, match="unsupported_encoding"):
            judge(_mr(), syntax, RULES)


@pytest.mark.parametrize(
    ("changes", "face"),
    [
        ({}, True),
        ({"BodyPartExamined": "HEAD"}, True),
        ({"BodyPartExamined": "WHATEVER"}, True),
        ({"BodyPartExamined": "ABDOMEN"}, False),
        ({"Modality": "OT"}, True),  # an MR slice that calls itself something else
        ({"Modality": "OT", "SOPClassUID": SECONDARY}, False),
        ({"Modality": "OT", "SOPClassUID": SECONDARY, "NumberOfFrames": 20}, True),
        ({"Modality": "OP", "SOPClassUID": SECONDARY}, False),
    ],
)
def test_a_face_is_assumed_unless_the_file_says_otherwise(changes: dict[str, object], face: bool) -> None:
    assert may_show_a_face(_mr(**changes)) is face


@pytest.mark.parametrize(
    "name",
    [
        "MR_small_RLE.dcm",
        "MR_small_jp2klossless.dcm",
        "MR_small_jpeg_ls_lossless.dcm",
        "MR_small_bigendian.dcm",
    ],
)
def test_lossless_variants_decode_to_the_same_pixels(name: str) -> None:
    plain, other = (pydicom.dcmread(io.BytesIO(_bytes(n))) for n in ("MR_small.dcm", name))
    expected = pixel_data.decode(plain, plain.file_meta.TransferSyntaxUID)
    values = pixel_data.decode(other, other.file_meta.TransferSyntaxUID)
    assert np.array_equal(values, expected)
    rewritten = pixel_data.native(other, values)
    assert rewritten.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian
    assert rewritten.PixelData == plain.PixelData


def test_a_name_hidden_in_the_unused_bits_of_the_pixels_is_cleared() -> None:
    dataset = _mr(BitsStored=12, HighBit=11, PixelRepresentation=0)
    clean = np.full((64, 64), 77, dtype="<u2")
    dataset.PixelData = (clean | 0xA000).tobytes()
    values = pixel_data.decode(dataset, EXPLICIT_LE)
    assert np.array_equal(values, clean)
    assert pixel_data.native(dataset, values).PixelData == clean.tobytes()


def test_signed_pixels_with_unused_bits_keep_their_sign() -> None:
    dataset = _mr(BitsStored=12, HighBit=11, PixelRepresentation=1)
    dataset.PixelData = np.full((64, 64), 0x0FFF, dtype="<u2").tobytes()  # -1 in twelve bits
    assert (pixel_data.decode(dataset, EXPLICIT_LE) == -1).all()


def test_comments_in_a_compressed_stream_do_not_come_through() -> None:
    data = _bytes("MR_small_jp2klossless.dcm")
    dataset = pydicom.dcmread(io.BytesIO(data))
    comment = b"JOHN SMITH 1950"
    marker = b"\xff\x64" + struct.pack(">HH", 4 + len(comment), 1) + comment
    start = dataset.PixelData.index(b"\xff\x52")  # before the coding style: the main header
    stream = dataset.PixelData[:start] + marker + dataset.PixelData[start:]
    offset = stream.index(b"\xff\x4f") - 4  # the fragment's length
    (length,) = struct.unpack_from("<I", stream, offset)
    grown = length + len(marker)
    assert grown % 2 == 1
    stream = (
        stream[:offset]
        + struct.pack("<I", grown + 1)
        + stream[offset + 4 : offset + 4 + grown]
        + b"\0"
        + stream[offset + 4 + grown :]
    )
    dataset.PixelData = stream
    values = pixel_data.decode(dataset, dataset.file_meta.TransferSyntaxUID)
    assert np.array_equal(values, pydicom.dcmread(io.BytesIO(_bytes("MR_small.dcm"))).pixel_array)
    assert comment not in pixel_data.native(dataset, values).PixelData


def test_eight_bit_pixels_span_zero_to_one_and_monochrome1_is_inverted() -> None:
    dataset = pydicom.Dataset()
    dataset.PhotometricInterpretation = "MONOCHROME2"
    values = np.array([[0, 51], [204, 255]], dtype=np.uint8)
    assert np.allclose(pixel_data.unit_range(dataset, values), [[0, 0.2], [0.8, 1]], rtol=0, atol=1e-6)
    dataset.PhotometricInterpretation = "MONOCHROME1"
    assert pixel_data.unit_range(dataset, values)[0, 0] == 1.0


def test_the_linear_window_follows_the_standards_formula() -> None:
    dataset = pydicom.Dataset()
    dataset.WindowCenter, dataset.WindowWidth = 2048, 4096  # PS3.3 C.11.2.1.2.1, its own example
    values = np.array([[0, 2048, 4095]], dtype=np.uint16)
    # y = ((x - (c - 0.5)) / (w - 1) + 0.5): 0 -> 0, 4095 -> 1
    expected = [[0.0, (2048 - 2047.5) / 4095 + 0.5, 1.0]]
    assert np.allclose(pixel_data.unit_range(dataset, values), expected, rtol=0, atol=1e-6)


def test_a_flat_image_and_a_broken_window_give_finite_pixels() -> None:
    dataset = pydicom.Dataset()
    dataset.WindowCenter, dataset.WindowWidth = 10, 0
    unit = pixel_data.unit_range(dataset, np.full((2, 2), 7, dtype=np.int16))
    assert np.array_equal(unit, np.zeros((2, 2), dtype=np.float32))


def _volume(words: str = "JOHN SMITH") -> nibabel.Nifti1Image:
    rng = np.random.default_rng(3)
    image = nibabel.Nifti1Image(rng.integers(-500, 900, (5, 6, 7)).astype(np.int16), np.diag([1.5, 2, 3, 1]))
    image.header["descrip"], image.header["aux_file"] = words.encode(), words.encode()
    image.header["intent_name"], image.header["db_name"] = words.encode(), words.encode()
    image.header.set_slope_inter(2.0, -7.0)
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", words.encode()))
    return image


@pytest.mark.parametrize("packed", [False, True])
def test_a_volume_keeps_its_voxels_and_grid_and_loses_its_words(packed: bool) -> None:
    source = _volume()
    data = source.to_bytes()
    assert data.count(b"JOHN SMITH") == 5
    clean = nifti.clean(nifti.inflate(gzip.compress(data) if packed else data, 1 << 20), 1 << 20)
    assert b"JOHN" not in clean
    again, before = nibabel.Nifti1Image.from_bytes(clean), nibabel.Nifti1Image.from_bytes(data)
    assert np.array_equal(again.get_fdata(), before.get_fdata())
    assert np.array_equal(again.dataobj.get_unscaled(), before.dataobj.get_unscaled())
    assert np.array_equal(again.affine, before.affine)
    assert again.header.get_zooms() == before.header.get_zooms()
    assert len(again.header.extensions) == 0
    for name in ("descrip", "aux_file", "intent_name", "db_name"):
        assert bytes(again.header[name]).strip(b"\0") == b""


def test_a_nifti2_volume_comes_through_too() -> None:
    source = nibabel.Nifti2Image(np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.eye(4))
    again = nibabel.Nifti2Image.from_bytes(nifti.clean(source.to_bytes(), 1000))
    assert np.array_equal(again.get_fdata(), source.get_fdata())


def test_an_inflating_bomb_is_stopped_at_the_limit() -> None:
    bomb = gzip.compress(b"\0" * (64 << 20))
    with pytest.raises(FileRejectedError, match="too_large"):
        nifti.inflate(bomb, 1 << 20)


def test_damaged_volumes_are_refused_with_their_reason() -> None:
    data = _volume().to_bytes()
    packed = gzip.compress(data)
    with pytest.raises(FileRejectedError, match="truncated"):
        nifti.inflate(packed[:-20], 1 << 20)
    with pytest.raises(FileRejectedError, match="malformed"):
        nifti.inflate(packed[:12] + b"\xff" * 40 + packed[52:], 1 << 20)
    with pytest.raises(FileRejectedError, match="truncated"):
        nifti.clean(data[:-4], 1 << 20)
    with pytest.raises(FileRejectedError, match="too_large"):
        nifti.clean(data, 100)
    with pytest.raises(FileRejectedError, match="not_dicom"):
        nifti.clean(zlib.compress(data), 1 << 20)


def test_a_volume_of_complex_or_infinite_numbers_is_refused() -> None:
    complex_image = nibabel.Nifti1Image(np.ones((2, 2, 2), dtype=np.complex64), np.eye(4))
    infinite = nibabel.Nifti1Image(np.full((2, 2, 2), np.inf, dtype=np.float32), np.eye(4))
    for image in (complex_image, infinite):
        with pytest.raises(FileRejectedError, match="undecodable"):
            nifti.clean(image.to_bytes(), 1000)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "MRN-1"},
        {"pseudonym": "Smith^John"},
        {"kind": "report"},
        {"kind": "volume"},
        {"pixels": None},
        {"pixels": np.full((2, 2), np.nan, dtype=np.float32)},
        {"pixels": np.full((2, 2), 1.5, dtype=np.float32)},
        {"pixels": np.zeros((2, 2))},
        {"modality": "smith john"},
        {"payload": b""},
    ],
)
def test_a_record_with_anything_raw_or_out_of_range_cannot_be_built(changes: dict[str, object]) -> None:
    good: dict[str, object] = {
        **{"name": HEX, "digest": HEX, "pseudonym": HEX, "study": HEX, "modality": "MR", "kind": "image"},
        **{"label": "", "pixels": np.zeros((2, 2), dtype=np.float32), "payload": b"x", "face": False},
    }
    Record(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"record|pixels|image"):
        Record(**{**good, **changes})  # type: ignore[arg-type]


def test_an_unknown_reason_code_cannot_be_raised() -> None:
    with pytest.raises(ValueError, match="unknown reason code"):
        FileRejectedError("because")
