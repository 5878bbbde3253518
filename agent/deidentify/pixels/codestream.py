"""Read the headers of a compressed frame before any decoder does.

A decoder believes the stream's own header and allocates by it; the rules judged the DICOM header. Here the
two must agree. Only headers are read: JPEG and JPEG-LS frame headers (ITU-T T.81 B.2.2, T.87 C.2.2), the
SIZ segment of JPEG 2000 and HTJ2K (T.800 A.5.1) and the RLE header (PS3.5 annex G). pydicom has such a reader
for its own use, which does not look at sizes; that is why there is this one.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Final

from agent.deidentify.errors import FileRejectedError

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
