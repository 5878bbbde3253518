"""Every bundled file and every transfer syntax: let in with the pixels DCMTK or GDCM sees, or the right reason."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import imagecodecs
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom.encaps import encapsulate
from pydicom.uid import UID, generate_uid

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.pixel_redaction import Blank, Rectangle
from agent.deidentify.pixels import pixel_data
from agent.deidentify.record import Record
from agent.ingest.parser_process import ParserLimits, ParserProcess
from tests.support.peers import need

DATA: Final = Path(pydicom.__file__).parent / "data"
FILES: Final = DATA / "test_files"
HEX: Final = "0" * 32
ULTRASOUND_SIZES: Final = ((240, 320), (350, 800), (480, 640), (60, 80))
# lets in as much as rules can: what is refused all the same is refused for what it is
RULES: Final = AdmissionRules(
    modalities=frozenset({"CT", "MR", "NM", "OT", "US", "CR"}),
    secondary_capture_modalities=frozenset({"OT", "NM"}),
    colour_modalities=frozenset({"OT", "NM"}),
    image_types=frozenset({("ORIGINAL", "PRIMARY"), ("DERIVED", "PRIMARY"), ("DERIVED", "SECONDARY")}),
    look_for_text=False,  # this is about decoding, and ultrasound is full of text
    blanks=tuple(Blank("US", rows, columns, (Rectangle(0, 0, 1, 1),)) for rows, columns in ULTRASOUND_SIZES),
)
ACCEPTED: Final = "accepted"


@pytest.fixture(scope="module")
def reader() -> Iterator[ParserProcess]:
    """One worker for all files."""
    with ParserProcess(RULES, Deidentifier(b"\7" * 32), ParserLimits()) as made:
        yield made


# what each bundled file is, and so what must become of it; the first line that matches counts
EXPECTED: Final = (
    ("*.txt", "not_dicom"),
    ("*.md", "not_dicom"),
    ("*.icc", "not_dicom"),
    ("*.dump", "not_dicom"),
    ("*/README", "not_dicom"),
    ("*.gz", "not_dicom"),  # gzip, but of a DICOM file: only volumes come gzipped
    ("*NoMeta.dcm", "not_dicom"),  # a data set without preamble
    ("*/no_meta.dcm", "not_dicom"),
    ("*/rtstruct.dcm", "not_dicom"),
    ("*/DICOMDIR*", "dicomdir"),
    ("*/chrJapMulti*.dcm", "no_pixels"),  # headers of a CR image
    ("*/chrKoreanMulti.dcm", "no_pixels"),
    ("*/chrSQEncoding*.dcm", "incomplete"),  # fragments of data sets without SOP class
    ("*/UN_sequence.dcm", "incomplete"),
    ("*/empty_charset_LEI.dcm", "incomplete"),
    ("*/nested_priv_SQ.dcm", "incomplete"),
    ("*/no_meta_group_length.dcm", "incomplete"),
    ("*/priv_SQ.dcm", "incomplete"),
    ("*/meta_missing_tsyntax.dcm", "unsupported_encoding"),
    ("palettes/*.dcm", "modality_not_allowed"),  # colour palette storage: no image, and no modality
    ("*/MR_truncated.dcm", "truncated"),
    ("*/rtplan_truncated.dcm", "truncated"),
    ("*/SC_rgb_jpeg.dcm", "malformed"),  # an element with blanks for its VR: DCMTK says non-standard too
    ("*/rt*.dcm", "not_an_image"),
    ("*/badVR.dcm", "not_an_image"),  # a dose
    ("*/report*.dcm", "not_an_image"),
    ("*/test-SR.dcm", "not_an_image"),
    ("*/waveform_ecg.dcm", "not_an_image"),
    ("*/JPEG2000-embedded-sequence-delimiter.dcm", "undecodable"),  # its width is 3.7 thousand million
    ("*/liver*.dcm", "not_an_image"),  # segmentations of one bit
    ("*/ExplVR_BigEnd.dcm", "missing_patient"),
    ("*/image_dfl.dcm", "missing_patient"),
    ("*/SC_rgb_jpeg_dcmd.dcm", "missing_patient"),
    ("*/GDCMJ2K_TextGBR.dcm", "modality_not_allowed"),  # these say no modality
    ("*/JPEGLSNearLossless_*.dcm", "modality_not_allowed"),
    ("*/SC_jpeg_no_color_transform*.dcm", "modality_not_allowed"),
    ("*/SC_rgb_jls_lossy_*.dcm", "modality_not_allowed"),
    ("*/SC_rgb_jpeg_app14_dcmd.dcm", "modality_not_allowed"),
    ("*/IM0000*", "no_pixels"),  # headers of CT images
    ("*", ACCEPTED),
)


def _expected(path: Path) -> str:
    return next(outcome for pattern, outcome in EXPECTED if path.relative_to(DATA).match(pattern))


def _bundled() -> list[Path]:
    left_out = (".py", ".pyc", ".json")
    found = sorted(p for p in DATA.rglob("*") if p.is_file() and p.suffix not in left_out)
    alike = [p for p in found if "PT000000" in p.parts]  # fifty copies of one header
    return [p for p in found if p not in alike[2:]]


def _read(reader: ParserProcess, data: bytes) -> Record | str:
    try:
        return reader.read(data, HEX, "somebody")
    except FileRejectedError as refusal:
        return refusal.code


def test_every_bundled_file_is_let_in_or_refused_for_what_it_is(reader: ParserProcess) -> None:
    reader.read((FILES / "CT_small.dcm").read_bytes(), HEX)
    started, wrong = reader.starts, {}
    for path in _bundled():
        outcome = _read(reader, path.read_bytes())
        code = outcome if isinstance(outcome, str) else ACCEPTED
        if code != _expected(path):
            wrong[path.name] = code
    assert not wrong
    assert reader.starts == started  # none stopped the worker
    assert len(_bundled()) > 100


# ------------------------------------------------------------------ pixels, beside another implementation

_DECODE: Final = {  # transfer syntax -> the tool that undoes it
    "1.2.840.10008.1.2": ("dcmconv", "+te"),
    "1.2.840.10008.1.2.1": ("dcmconv", "+te"),
    "1.2.840.10008.1.2.2": ("dcmconv", "+te"),
    "1.2.840.10008.1.2.1.99": ("dcmconv", "+te"),
    "1.2.840.10008.1.2.5": ("dcmdrle", "+te"),
    "1.2.840.10008.1.2.4.50": ("dcmdjpeg", "+te"),
    "1.2.840.10008.1.2.4.51": ("dcmdjpeg", "+te"),
    "1.2.840.10008.1.2.4.57": ("dcmdjpeg", "+te"),
    "1.2.840.10008.1.2.4.70": ("dcmdjpeg", "+te"),
    "1.2.840.10008.1.2.4.80": ("dcmdjpls", "+te"),
    "1.2.840.10008.1.2.4.81": ("dcmdjpls", "+te"),
    "1.2.840.10008.1.2.4.90": ("gdcmconv", "--raw"),  # DCMTK has no JPEG 2000
    "1.2.840.10008.1.2.4.91": ("gdcmconv", "--raw"),
}
_TOOLS: Final = tuple(sorted({tool for tool, _ in _DECODE.values()} | {"dcm2pnm"}))


def _raw(dataset: pydicom.Dataset) -> NDArray[np.int64]:
    """Native pixel data, read without pydicom's pixel code: (frames, rows, columns, samples), unused bits cleared."""
    samples, bits = int(dataset.get("SamplesPerPixel", 1)), int(dataset.BitsAllocated)
    count, rows, columns = int(dataset.get("NumberOfFrames") or 1), int(dataset.Rows), int(dataset.Columns)
    values = np.frombuffer(dataset.PixelData, f"<u{bits // 8}")[: count * rows * columns * samples].astype(np.int64)
    if samples == 3 and dataset.get("PlanarConfiguration", 0) == 1:
        values = values.reshape(count, 3, rows, columns).transpose(0, 2, 3, 1)
    return values.reshape(count, rows, columns, samples) & ((1 << int(dataset.BitsStored)) - 1)


def _theirs(path: Path, folder: Path) -> NDArray[np.int64]:
    """What DCMTK or GDCM decodes a file to."""
    header = pydicom.dcmread(path, stop_before_pixels=True)
    out = folder / "theirs.dcm"
    tool, option = _DECODE[header.file_meta.TransferSyntaxUID]
    subprocess.run([tool, option, str(path), str(out)], check=True, capture_output=True, timeout=60)
    return _raw(pydicom.dcmread(out))


def _pnm(path: Path, folder: Path) -> NDArray[np.int64]:
    """What DCMTK shows of a colour picture: its 8-bit RGB."""
    out = folder / "theirs.ppm"
    subprocess.run(["dcm2pnm", "+op", str(path), str(out)], check=True, capture_output=True, timeout=60)
    magic, columns, rows, _most, _body = out.read_bytes().split(None, 4)
    assert magic == b"P6"
    # split() took white space only up to the first byte that is none: the picture is the last rows x columns x 3
    size = int(rows) * int(columns) * 3
    return np.frombuffer(out.read_bytes()[-size:], np.uint8).astype(np.int64).reshape(1, int(rows), int(columns), 3)


def _complete(path: Path, folder: Path) -> Path:
    """The same pixel data, byte for byte, with the attributes that every image should have."""
    dataset = pydicom.dcmread(path)
    classes = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.7", "SOPInstanceUID": generate_uid()}
    needed: dict[str, Any] = {**classes, "StudyInstanceUID": generate_uid(), "PatientID": "X1", "Modality": "OT"}
    for keyword, value in needed.items():
        if not dataset.get(keyword):
            setattr(dataset, keyword, value)
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    out = folder / "complete.dcm"
    dataset.save_as(out)
    return out


def _ours(reader: ParserProcess, data: bytes) -> NDArray[np.int64]:
    record = _read(reader, data)
    assert isinstance(record, Record), record
    return _raw(pydicom.dcmread(io.BytesIO(record.payload)))


_INCOMPLETE: Final = (
    *("ExplVR_BigEnd.dcm", "image_dfl.dcm", "GDCMJ2K_TextGBR.dcm", "SC_jpeg_no_color_transform.dcm"),
    *("SC_jpeg_no_color_transform_2.dcm", "SC_rgb_jpeg_app14_dcmd.dcm", "JPEGLSNearLossless_08.dcm"),
    *("JPEGLSNearLossless_16.dcm", "SC_rgb_jls_lossy_line.dcm", "SC_rgb_jls_lossy_sample.dcm"),
)
_SHOWN: Final = {"examples_palette.dcm": 0, "SC_ybr_full_422_uncompressed.dcm": 1}  # levels that rounding may cost


def test_every_accepted_file_has_the_pixels_that_dcmtk_or_gdcm_decodes(reader: ParserProcess, tmp_path: Path) -> None:
    need(*_TOOLS)
    accepted = [p for p in _bundled() if _expected(p) == ACCEPTED]
    assert len(accepted) > 80
    paths = [*accepted, *(FILES / name for name in _INCOMPLETE)]
    wrong = {}
    for path in paths:
        source = _complete(path, tmp_path) if path.name in _INCOMPLETE else path
        ours = _ours(reader, source.read_bytes())
        theirs = _pnm(source, tmp_path) if path.name in _SHOWN else _theirs(source, tmp_path)
        assert ours.shape == theirs.shape, path.name
        theirs &= (1 << int(pydicom.dcmread(source, stop_before_pixels=True).BitsStored)) - 1  # GDCM widens some
        if ours.shape[1:3] in ULTRASOUND_SIZES:
            ours[:, 0, 0], theirs[:, 0, 0] = 0, 0  # the one pixel that the rule blanked
        worst = int(np.abs(ours - theirs).max())
        if worst > _SHOWN.get(path.name, 0):
            wrong[path.name] = worst
    assert not wrong


_VARIANTS: Final = {
    "implicit": ("dcmconv", "+ti"),
    "explicit": ("dcmconv", "+te"),
    "big-endian": ("dcmconv", "+tb"),
    "deflated": ("dcmconv", "+td"),
    "rle": ("dcmcrle",),
    "jpeg-baseline": ("dcmcjpeg", "+eb"),
    "jpeg-extended": ("dcmcjpeg", "+ee"),
    "jpeg-lossless": ("dcmcjpeg", "+el"),
    "jpeg-lossless-sv1": ("dcmcjpeg", "+e1"),
    "jpeg-ls": ("dcmcjpls", "+el"),
    "jpeg-ls-near": ("dcmcjpls", "+en"),
    "j2k": ("gdcmconv", "--j2k"),
}
_SOURCES: Final = {"ct": "CT_small.dcm", "mr": "MR_small.dcm", "colour": "SC_rgb_rle.dcm"}


@pytest.mark.parametrize("variant", _VARIANTS)
@pytest.mark.parametrize("source", _SOURCES)
def test_every_transfer_syntax_gives_the_pixels_that_its_makers_decode(
    source: str, variant: str, reader: ParserProcess, tmp_path: Path
) -> None:
    need(*_TOOLS)
    if variant == "jpeg-ls-near" and source != "colour":
        pytest.skip("DCMTK makes no near-lossless JPEG-LS of signed pixels")
    out, native = tmp_path / "made.dcm", FILES / _SOURCES[source]
    if source == "colour":
        subprocess.run(["dcmdrle", str(native), str(tmp_path / "native.dcm")], check=True, capture_output=True)
        native = tmp_path / "native.dcm"
    command = [*_VARIANTS[variant], str(native), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert np.array_equal(_ours(reader, out.read_bytes()), _theirs(out, tmp_path))


@pytest.mark.parametrize("syntax", ["201", "202", "203"])
@pytest.mark.parametrize("signed", [False, True])
def test_high_throughput_jpeg_2000_made_by_openjph_gives_the_pixels_back(
    syntax: str, signed: bool, reader: ParserProcess
) -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(-900 if signed else 0, 3000, (40, 56)).astype(np.int16 if signed else np.uint16)
    data = _with_stream(imagecodecs.htj2k_encode(values), syntax, values.shape, signed=signed)
    record = _read(reader, data)
    assert isinstance(record, Record)
    kept = pydicom.dcmread(io.BytesIO(record.payload))
    assert np.array_equal(np.frombuffer(kept.PixelData, "<i2" if signed else "<u2").reshape(40, 56), values)


def _with_stream(stream: bytes, syntax: str, size: tuple[int, ...], *, signed: bool = False) -> bytes:
    dataset = pydicom.dcmread(FILES / "MR_small.dcm")
    dataset.Rows, dataset.Columns = size
    dataset.PixelRepresentation, dataset.BitsStored, dataset.HighBit = int(signed), 16, 15
    dataset.PixelData = encapsulate([stream])
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True
    dataset.file_meta.TransferSyntaxUID = UID(f"1.2.840.10008.1.2.4.{syntax}")
    out = io.BytesIO()
    dataset.save_as(out)
    return out.getvalue()


# ------------------------------------------------------------------ streams that disagree with their header

_NOISE: Final = np.random.default_rng(1).integers(0, 4000, (40, 56)).astype(np.uint16)
_STREAMS: Final = {
    "57": imagecodecs.jpeg8_encode(_NOISE, lossless=True, bitspersample=16),
    "70": imagecodecs.jpeg8_encode(_NOISE, lossless=True, bitspersample=16),
    "80": imagecodecs.jpegls_encode(_NOISE),
    "90": imagecodecs.jpeg2k_encode(_NOISE, level=0),
    "201": imagecodecs.htj2k_encode(_NOISE),
}


@pytest.mark.parametrize("syntax", _STREAMS)
def test_a_stream_of_another_size_than_its_header_never_reaches_a_decoder(syntax: str, reader: ParserProcess) -> None:
    assert isinstance(_read(reader, _with_stream(_STREAMS[syntax], syntax, (40, 56))), Record)
    for size in ((41, 56), (40, 55), (56, 40), (8, 8)):
        assert _read(reader, _with_stream(_STREAMS[syntax], syntax, size)) == "undecodable"


@pytest.mark.parametrize(
    ("stream", "claimed"), [("57", "50"), ("57", "80"), ("80", "70"), ("90", "70"), ("70", "90")]
)
def test_a_stream_of_another_codec_than_the_transfer_syntax_says_is_refused(
    stream: str, claimed: str, reader: ParserProcess
) -> None:
    assert _read(reader, _with_stream(_STREAMS[stream], claimed, (40, 56))) == "undecodable"


@pytest.mark.parametrize("syntax", _STREAMS)
def test_a_stream_cut_or_damaged_anywhere_in_its_head_is_refused_or_read_and_never_faults(syntax: str) -> None:
    shape, whole = pixel_data.Shape(40, 56, 1, 16), _STREAMS[syntax]
    pixel_data.check(whole, f"1.2.840.10008.1.2.4.{syntax}", shape)
    rng = np.random.default_rng(2)
    for end in range(24):
        with pytest.raises(FileRejectedError, match="undecodable"):
            pixel_data.check(whole[:end], f"1.2.840.10008.1.2.4.{syntax}", shape)
    for _ in range(300):
        damaged = bytearray(whole[:200])
        damaged[rng.integers(0, 60)] = rng.integers(0, 256)
        try:
            pixel_data.check(bytes(damaged), f"1.2.840.10008.1.2.4.{syntax}", shape)
        except FileRejectedError as refusal:
            assert refusal.code == "undecodable"  # noqa: PT017


def test_float_pixels_and_pixels_of_one_bit_are_refused_by_name(reader: ParserProcess) -> None:
    dataset = pydicom.dcmread(FILES / "MR_small.dcm")
    for change in ("float", "bit"):
        copy = pydicom.dcmread(FILES / "MR_small.dcm")
        if change == "float":
            del copy.PixelData
            copy.BitsAllocated = 32
            copy.FloatPixelData = np.zeros((dataset.Rows, dataset.Columns), "<f4").tobytes()
        else:
            copy.BitsAllocated = copy.BitsStored = 1
            copy.HighBit = 0
        out = io.BytesIO()
        copy.save_as(out)
        assert _read(reader, out.getvalue()) == "unsupported_encoding"


@pytest.mark.parametrize("step", [1, 256, 257])
def test_a_palette_of_sixteen_bits_becomes_rgb_by_the_formula_of_the_standard(
    reader: ParserProcess, step: int
) -> None:
    """Entries that are bytes, written as n x 256 or n x 257, become 8-bit RGB, which ultrasound must have."""
    dataset = pydicom.dcmread(FILES / "CT_small.dcm")
    rng = np.random.default_rng(4)
    index = rng.integers(0, 256, (16, 16)).astype(np.uint8)
    tables = (rng.integers(0, 65536 if step == 1 else 256, (3, 200)) * step).astype("<u2")
    dataset.Rows, dataset.Columns = index.shape
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit, dataset.PixelRepresentation = 7, 0
    dataset.PhotometricInterpretation = "PALETTE COLOR"
    dataset.Modality, dataset.SOPClassUID = "OT", "1.2.840.10008.5.1.4.1.1.7"
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    for keyword in ("PixelPaddingValue", "SmallestImagePixelValue", "LargestImagePixelValue"):
        if keyword in dataset:
            delattr(dataset, keyword)
    for name, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        keyword = f"{name}PaletteColorLookupTableDescriptor"
        dataset.add_new(keyword, "US", [200, 10, 16])
        setattr(dataset, f"{name}PaletteColorLookupTableData", table.tobytes())
    dataset.PixelData = index.tobytes()
    out = io.BytesIO()
    dataset.save_as(out)
    # PS3.3 C.7.6.3.1.5: values below the first mapped one take the first entry, those beyond the last the last
    place = np.clip(index.astype(int) - 10, 0, 199)
    expected = np.stack([table[place] for table in tables], axis=-1)
    assert np.array_equal(_ours(reader, out.getvalue())[0], expected if step == 1 else expected >> 8)
