"""Pixels of a DICOM image: pinned decoders that are shown only what agrees with the header, and native output.

Read the headers of a compressed frame before any decoder does.

A decoder believes the stream's own header and allocates by it; the rules judged the DICOM header. Here the
two must agree. Only headers are read: JPEG and JPEG-LS frame headers (ITU-T T.81 B.2.2, T.87 C.2.2), the
SIZ segment of JPEG 2000 and HTJ2K (T.800 A.5.1) and the RLE header (PS3.5 annex G). pydicom has such a reader
for its own use, which does not look at sizes; that is why there is this one.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import generate_frames
from pydicom.pixels.processing import apply_color_lut, convert_color_space
from pydicom.pixels.utils import pixel_array
from pydicom.uid import UID

from agent.deidentify.admission_rules import DECODERS, IMAGECODECS
from agent.deidentify.attributes import frames, text
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.pixels.interpretation import FULL_RANGE, interpret
from agent.deidentify.prescan import EXPLICIT_LE

RLE: Final = "1.2.840.10008.1.2.5"
_JPEG: Final = "1.2.840.10008.1.2.4."
# the frame headers (SOFn) that each JPEG transfer syntax may carry: a decoder would take others too
_FRAME_MARKERS: Final = {
    _JPEG + "50": frozenset({0xC0}),
    _JPEG + "51": frozenset({0xC0, 0xC1}),
    _JPEG + "57": frozenset({0xC3}),
    _JPEG + "70": frozenset({0xC3}),
    _JPEG + "80": frozenset({0xF7}),
    _JPEG + "81": frozenset({0xF7}),
}
_WAVELETS: Final = frozenset(_JPEG + part for part in ("90", "91", "201", "202", "203"))
_STANDALONE: Final = frozenset({0x01, *range(0xD0, 0xD8)})
_ALL_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {0xF7}
_MAX_SEGMENTS: Final = 4096
_JP2: Final = b"\0\0\0\x0cjP  "  # a JPEG 2000 file instead of a codestream: not allowed, but found in practice
_JP2_BOXES: Final = 4096  # bytes in which the codestream must begin
_RLE_SEGMENTS: Final = 15
_RLE_EXPANDS: Final = 64  # two bytes become at most 128


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one frame."""

    rows: int
    columns: int
    samples: int
    bits: int  # of one sample: allocated, in a DICOM header; the precision, in a codestream


def check(frame: bytes, transfer_syntax: str, expected: Shape) -> None:
    """Compare one compressed frame with the DICOM header.

    Raises:
        FileRejectedError: ``undecodable``, the frame is not of its transfer syntax, or of another size than the
        header says.
    """
    try:
        if transfer_syntax == RLE:
            sound = _rle_fits(frame, expected)
        elif transfer_syntax in _WAVELETS:
            sound = _agree(_siz(frame), expected)
        else:
            sound = _agree(_sof(frame, _FRAME_MARKERS[transfer_syntax]), expected)
    except (struct.error, IndexError, KeyError):
        sound = False
    if not sound:
        raise FileRejectedError("undecodable")


def _agree(found: Shape | None, expected: Shape) -> bool:
    if found is None:
        return False
    same = (found.rows, found.columns, found.samples) == (expected.rows, expected.columns, expected.samples)
    return same and 0 < found.bits <= expected.bits


def _sof(frame: bytes, wanted: frozenset[int]) -> Shape | None:
    """The first frame header of a JPEG or JPEG-LS stream, None when it is of another process."""
    if frame[:2] != b"\xff\xd8":
        return None
    position = 2
    for _ in range(_MAX_SEGMENTS):
        if frame[position] != 0xFF:
            return None
        while frame[position] == 0xFF:  # fill bytes may stand before a marker
            position += 1
        marker = frame[position]
        if marker in _STANDALONE:
            position += 1
            continue
        (length,) = struct.unpack_from(">H", frame, position + 1)
        if marker in _ALL_FRAMES:
            bits, rows, columns, samples = struct.unpack_from(">BHHB", frame, position + 3)
            return Shape(rows, columns, samples, bits) if marker in wanted else None
        if marker in (0xD8, 0xD9, 0xDA) or length < 2:
            return None
        position += 1 + length
    return None


def _siz(frame: bytes) -> Shape | None:
    """The image size of a JPEG 2000 codestream; None when its components differ."""
    start = 0
    if frame.startswith(_JP2):
        start = frame.find(b"\xff\x4f\xff\x51", 0, _JP2_BOXES)
    if start < 0 or frame[start : start + 4] != b"\xff\x4f\xff\x51":
        return None
    x1, y1, x0, y0 = struct.unpack_from(">4I", frame, start + 8)
    (samples,) = struct.unpack_from(">H", frame, start + 40)
    if not (0 < samples <= 4 and x0 < x1 and y0 < y1):
        return None
    components = [struct.unpack_from(">3B", frame, start + 42 + 3 * i) for i in range(samples)]
    if any(c[1:] != (1, 1) or c[0] != components[0][0] for c in components):
        return None
    return Shape(y1 - y0, x1 - x0, samples, (components[0][0] & 0x7F) + 1)


def _rle_fits(frame: bytes, expected: Shape) -> bool:
    """One segment for each byte of a sample, in order, and enough bytes to expand to the image."""
    (segments,) = struct.unpack_from("<I", frame, 0)
    wanted = expected.samples * expected.bits // 8
    if segments != wanted or not 0 < segments <= _RLE_SEGMENTS:
        return False
    starts = [*struct.unpack_from(f"<{segments}I", frame, 4), len(frame)]
    plane = expected.rows * expected.columns
    gaps = itertools.pairwise(starts)
    return starts[0] == 64 and all((end - start) * _RLE_EXPANDS >= plane for start, end in gaps)


Stored = NDArray[np.integer[Any]]
_PALETTE: Final = "PALETTE COLOR"
_PALETTES: Final = tuple(f"{colour}PaletteColorLookupTableData" for colour in ("Red", "Green", "Blue"))
_LOSSY_JPEG: Final = frozenset({"1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51"})


def decode(dataset: Dataset, transfer_syntax: str) -> Stored:
    """The stored values, ([frames,] rows, columns[, 3]), colour and palettes as RGB.

    Bits above BitsStored are cleared (an old-style overlay, a drawing or a name, can hide there).

    Raises:
        FileRejectedError: ``unsupported_encoding``, ``undecodable``; decoders raise errors of their own on broken
        data.
    """
    if transfer_syntax not in DECODERS:
        raise FileRejectedError("unsupported_encoding")
    decoder = DECODERS[transfer_syntax]
    streams = list(_streams(dataset, transfer_syntax)) if decoder else []
    if decoder == IMAGECODECS:
        values: Stored = _jpeg(dataset, streams, transfer_syntax)
    else:
        values = pixel_array(dataset, decoding_plugin=decoder)
    values = _cleared(dataset, values)
    return _coloured(dataset, values) if text(dataset, "PhotometricInterpretation") == _PALETTE else values


def _streams(dataset: Dataset, transfer_syntax: str) -> Iterator[bytes]:
    """The compressed frames, each found to agree with the header."""
    count, samples = frames(dataset), int(dataset.get("SamplesPerPixel", 1))
    expected = Shape(int(dataset.Rows), int(dataset.Columns), samples, int(dataset.BitsAllocated))
    found = 0
    for frame in generate_frames(dataset.PixelData, number_of_frames=count):
        check(frame, transfer_syntax, expected)
        found += 1
        yield frame
    if found != count:
        raise FileRejectedError("undecodable")


def _jpeg(dataset: Dataset, streams: list[bytes], transfer_syntax: str) -> Stored:
    """JPEG by libjpeg-turbo. Which colours a stream has is said by DICOM, not by its own markers (PS3.5 8.2.1)."""
    samples, photometric = int(dataset.get("SamplesPerPixel", 1)), text(dataset, "PhotometricInterpretation")
    luma = photometric.startswith("YBR_FULL")
    inside = None if samples == 1 else "YCBCR" if luma and transfer_syntax in _LOSSY_JPEG else "RGB"
    outside = None if samples == 1 else "RGB"
    container = np.dtype(f"u{int(dataset.BitsAllocated) // 8}")
    decoded = [imagecodecs.jpeg8_decode(s, colorspace=inside, outcolorspace=outside) for s in streams]
    pictures = [picture.astype(container, copy=False) for picture in decoded]
    values: Stored = np.stack(pictures) if len(pictures) > 1 else pictures[0]
    if samples == 3 and luma and inside == "RGB":  # a lossless stream holds the luma as it is
        values = convert_color_space(values, photometric, "RGB", per_frame=True)
    return values.view(f"i{container.itemsize}") if dataset.get("PixelRepresentation") == 1 else values


def _cleared(dataset: Dataset, values: Stored) -> Stored:
    samples, count = int(dataset.get("SamplesPerPixel", 1)), frames(dataset)
    shape = (count,) * (count > 1) + (int(dataset.Rows), int(dataset.Columns)) + (3,) * (samples == 3)
    allocated, stored = int(dataset.BitsAllocated), int(dataset.BitsStored)
    sound = values.shape == shape and values.dtype.kind in "iu" and values.dtype.itemsize * 8 == allocated
    if not (sound and 0 < stored <= allocated and dataset.get("HighBit", stored - 1) == stored - 1):
        raise FileRejectedError("undecodable")
    # pydicom 3.0.2 clears the bits of native pixel data too; the guarantee must not hang on its version
    if stored == allocated:
        return values
    if values.dtype.kind == "i":
        return (values << (allocated - stored)) >> (allocated - stored)
    return values & values.dtype.type((1 << stored) - 1)


def _coloured(dataset: Dataset, values: Stored) -> Stored:
    """Indices into a palette (PS3.3 C.7.6.3.1.5) as 8- or 16-bit RGB; 16 bits that say no more than 8 become 8."""
    colours: Stored = apply_color_lut(values, dataset)
    if colours.shape != (*values.shape, 3):
        raise FileRejectedError("undecodable")
    return (colours >> 8).astype(np.uint8) if colours.dtype == np.uint16 and _eight_bits(dataset) else colours


def _eight_bits(dataset: Dataset) -> bool:
    """Whether all entries of a 16-bit palette are bytes, written as ``n * 256`` or as ``n * 257``."""
    tables = [
        np.frombuffer(dataset[t].value, "<u2") for t in _PALETTES if t in dataset and len(dataset[t].value) % 2 == 0
    ]
    if len(tables) != len(_PALETTES):
        return False
    return any(all(bool((t & 0xFF == low(t)).all()) for t in tables) for low in (np.zeros_like, _high))


def _high(entries: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return (entries >> 8).astype(np.uint16)


def native(dataset: Dataset, values: Stored) -> Dataset:
    """The data set with its pixel data replaced by decoded values, uncompressed.

    What a compressed stream carries beside the image (comments, EXIF, bytes after the end) is gone.
    """
    copy = Dataset(dataset)
    copy.file_meta = FileMetaDataset()
    copy.file_meta.TransferSyntaxUID = UID(EXPLICIT_LE)
    data = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
    copy.PixelData = data if len(data) % 2 == 0 else data + b"\0"
    copy.PixelRepresentation = int(values.dtype.kind == "i")
    photometric = text(dataset, "PhotometricInterpretation")
    if photometric == _PALETTE:
        copy.SamplesPerPixel = 3
        copy.BitsAllocated = copy.BitsStored = 8 * values.dtype.itemsize
        copy.HighBit = copy.BitsStored - 1
    if photometric == _PALETTE or int(dataset.get("SamplesPerPixel", 1)) == 3:
        copy.PhotometricInterpretation = "RGB"
        copy.PlanarConfiguration = 0
    return copy


def unit_range(dataset: Dataset, values: Stored) -> NDArray[np.float32]:
    """One frame as (h, w) or (h, w, 3) float32 in [0, 1], bright is high, as ingest shows every image.

    The modality LUT, then the first window, without one the full range; colour stays RGB.

    Raises:
        FileRejectedError: ``undecodable``, not finite or not one frame.
    """
    frame = values.ndim == 2 or (values.ndim == 3 and values.shape[-1] == 3 and frames(dataset) == 1)
    if not frame or not values.size:
        raise FileRejectedError("undecodable")
    return interpret(dataset, values, FULL_RANGE if values.ndim == 3 else "first_window").values
