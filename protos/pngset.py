"""PNG in one form: 8-bit grey or RGB, one IDAT of stored blocks, no other chunk, every row unfiltered.

Stored blocks (RFC 1951, section 3.2.4) make the encoding a function of the pixels alone, whatever version of a
compressor either side has, and leave nothing to be inflated: a file is as large as what it holds, so that a bomb
cannot be written down. The price is size: 8-bit grey takes width times height bytes.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.blocks import BadArtifact, Source

MAX_SIDE: Final = 2_048
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_STORED: Final = 65_535  # bytes of one stored block
_CHANNELS: Final = {0: 1, 2: 3}  # colour type -> samples for each pixel (RFC 2083, section 4.1.1)


def pack_png(image: NDArray[np.uint8]) -> bytes:
    """An (h, w) grey or (h, w, 3) RGB image of uint8.

    Raises:
        BadArtifact: another type or shape, or a side of more than 2048.
    """
    colour = {2: 0, 3: 2}.get(image.ndim)
    if image.dtype != np.uint8 or colour is None or image.shape[2:] not in ((), (3,)):
        raise BadArtifact("an image is (h, w) or (h, w, 3) of uint8")
    height, width = image.shape[:2]
    _check_sides(height, width)
    rows = np.zeros((height, 1 + width * _CHANNELS[colour]), np.uint8)  # the first byte: filter 0, none
    rows[:, 1:] = image.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", _stored(rows.tobytes())) + _chunk(b"IEND", b"")


def read_png(source: Source) -> NDArray[np.uint8]:
    """The image of :func:`pack_png`. Its size is known from the header, and bounded, before a pixel is read.

    Raises:
        BadArtifact: anything that :func:`pack_png` would not write.
    """
    head = source.read(0, 33) if source.size >= 33 else b""
    if head[:16] != _SIGNATURE + b"\0\0\0\rIHDR":
        raise BadArtifact("an image is not a PNG")
    width, height, depth, colour = struct.unpack(">IIBB", head[16:26])
    if depth != 8 or colour not in _CHANNELS:
        raise BadArtifact("an image is not 8-bit grey or RGB")
    _check_sides(height, width)
    line = 1 + width * _CHANNELS[colour]
    if source.size != len(_SIGNATURE) + 25 + 12 + _stored_size(line * height) + 12:
        raise BadArtifact("a PNG has other chunks, compression or bytes than its one form")
    raw = source.read(0, source.size)
    stream = raw[len(_SIGNATURE) + 25 + 8 + 2 : -(12 + 4 + 4)]  # between the zlib header and its checksum
    packed = b"".join(stream[at + 5 : at + 5 + _STORED] for at in range(0, len(stream), _STORED + 5))
    rows = np.frombuffer(packed, np.uint8).reshape(height, line)[:, 1:]
    image = rows.reshape((height, width, 3) if colour == 2 else (height, width))
    if pack_png(image) != raw:
        raise BadArtifact("a PNG has other chunks, compression or bytes than its one form")
    return image


def _check_sides(height: int, width: int) -> None:
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise BadArtifact(f"an image has sides of 1 to {MAX_SIDE} pixels")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _stored(data: bytes) -> bytes:
    """A zlib stream (RFC 1950) of stored blocks, as few as possible."""
    parts = [b"\x78\x01"]
    for at in range(0, len(data), _STORED):
        part = data[at : at + _STORED]
        parts += [struct.pack("<BHH", at + _STORED >= len(data), len(part), 0xFFFF ^ len(part)), part]
    return b"".join([*parts, struct.pack(">I", zlib.adler32(data))])


def _stored_size(count: int) -> int:
    return 2 + 5 * -(-count // _STORED) + count + 4
