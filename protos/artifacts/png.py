"""PNG in one form: 8-bit grey or RGB, one IDAT, no other chunk; the pixels alone decide which bytes it has.

Every row is filtered by the one above it (filter 2, Up) and compressed by :mod:`protos.artifacts.deflate`, whose
stream is a function of its data, whatever version of a compressor either side has. If that is not smaller than the
plain form, the image is in the plain form: every row unfiltered, in stored blocks (RFC 1951, section 3.2.4). So an
image takes at most :func:`plain_size` bytes, which is known in advance, and unpacks to at most eight times its size.

A reader inflates no more than the header promises, and writes the file again to compare. Before there was compression
every image was in the plain form: :func:`read_earlier_png` reads those.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.byte_source import ArtifactFormatError, ByteSource
from protos.artifacts.deflate import compressed

MAX_SIDE: Final = 2_048
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_STORED: Final = 65_535  # bytes of one stored block
_CHANNELS: Final = {0: 1, 2: 3}  # colour type -> samples for each pixel (RFC 2083, section 4.1.1)
_NONE, _UP = 0, 2  # filters of a row (RFC 2083, section 6)
_BEFORE: Final = len(_SIGNATURE) + 25 + 8  # bytes of a file before its zlib stream
_BEHIND: Final = 4 + 12  # and behind it
_ODD: Final = "a PNG has other chunks, compression or bytes than its one form"


def pack_png(image: NDArray[np.uint8]) -> bytes:
    """An (h, w) grey or (h, w, 3) RGB image of uint8.

    Raises:
        ArtifactFormatError: another type or shape, or a side of more than 2048.
    """
    rows = _rows(image)
    differences = rows.copy()
    differences[1:] -= rows[:-1]  # modulo 256
    packed = compressed(_lines(differences, _UP))
    small = len(packed) < _stored_size(rows.size + len(rows))
    return _file(image, packed if small else _stored(_lines(rows, _NONE)))


def pack_earlier_png(image: NDArray[np.uint8]) -> bytes:
    """The image in the plain form, as images were written before they were compressed.

    Raises:
        ArtifactFormatError: see :func:`pack_png`.
    """
    return _file(image, _stored(_lines(_rows(image), _NONE)))


def plain_size(shape: tuple[int, ...]) -> int:
    """The bytes of an image (h, w) or (h, w, 3) in the plain form: no image of that shape takes more.

    Raises:
        ArtifactFormatError: no image has that shape.
    """
    if shape[2:] not in ((), (3,)) or len(shape) < 2:
        raise ArtifactFormatError("an image is (h, w) or (h, w, 3) of uint8")
    height, width = shape[:2]
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise ArtifactFormatError(f"an image has sides of 1 to {MAX_SIDE} pixels")
    return _BEFORE + _stored_size(height * (1 + width * (3 if shape[2:] else 1))) + _BEHIND


def read_png(source: ByteSource) -> NDArray[np.uint8]:
    """The image of :func:`pack_png`. Its size is known from the header, and bounded, before a pixel is read.

    Raises:
        ArtifactFormatError: anything that :func:`pack_png` would not write.
    """
    shape, plain = _head(source)
    if source.size > plain:
        raise ArtifactFormatError(_ODD)
    raw = source.read(0, source.size)
    image = _plain(raw, shape) if source.size == plain else _inflated(raw, shape)
    if pack_png(image) != raw:
        raise ArtifactFormatError(_ODD)
    return image


def read_earlier_png(source: ByteSource) -> NDArray[np.uint8]:
    """The image of :func:`pack_earlier_png`.

    Raises:
        ArtifactFormatError: anything that :func:`pack_earlier_png` would not write.
    """
    shape, plain = _head(source)
    if source.size != plain:
        raise ArtifactFormatError(_ODD)
    raw = source.read(0, source.size)
    image = _plain(raw, shape)
    if pack_earlier_png(image) != raw:
        raise ArtifactFormatError(_ODD)
    return image


def _head(source: ByteSource) -> tuple[tuple[int, ...], int]:
    """The shape that the header promises, and the bytes of such an image in the plain form."""
    head = source.read(0, 33) if source.size >= 33 else b""
    if head[:16] != _SIGNATURE + b"\0\0\0\rIHDR":
        raise ArtifactFormatError("an image is not a PNG")
    width, height, depth, colour = struct.unpack(">IIBB", head[16:26])
    if depth != 8 or colour not in _CHANNELS:
        raise ArtifactFormatError("an image is not 8-bit grey or RGB")
    shape = (height, width, 3) if colour == 2 else (height, width)
    return shape, plain_size(shape)


def _plain(raw: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The pixels of a file in the plain form; of another one, whatever stands in their place."""
    stream = raw[_BEFORE + 2 : -(4 + _BEHIND)]  # between the zlib header and its checksum
    lines = b"".join(stream[at + 5 : at + 5 + _STORED] for at in range(0, len(stream), _STORED + 5))
    return np.frombuffer(lines, np.uint8).reshape(shape[0], -1)[:, 1:].reshape(shape)


def _inflated(raw: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The pixels of a compressed file. What is inflated never exceeds what the header promises.

    Raises:
        ArtifactFormatError: the stream is none, or is of another length.
    """
    size = shape[0] * (1 + int(np.prod(shape[1:])))
    try:
        lines = zlib.decompressobj().decompress(raw[_BEFORE:-_BEHIND], size)
    except zlib.error:
        raise ArtifactFormatError(_ODD) from None
    if len(lines) != size:
        raise ArtifactFormatError(_ODD)
    differences = np.frombuffer(lines, np.uint8).reshape(shape[0], -1)[:, 1:]
    return np.add.accumulate(differences, axis=0, dtype=np.uint8).reshape(shape)


def _rows(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The samples of each row, (h, w) or (h, 3 w).

    Raises:
        ArtifactFormatError: another type or shape, or a side of more than 2048.
    """
    if image.dtype != np.uint8:
        raise ArtifactFormatError("an image is (h, w) or (h, w, 3) of uint8")
    plain_size(image.shape)
    return image.reshape(len(image), -1)


def _lines(rows: NDArray[np.uint8], filtered: int) -> bytes:
    """What a PNG compresses: before each row its filter."""
    lines = np.empty((len(rows), 1 + rows.shape[1]), np.uint8)
    lines[:, 0], lines[:, 1:] = filtered, rows
    return lines.tobytes()


def _file(image: NDArray[np.uint8], stream: bytes) -> bytes:
    height, width = image.shape[:2]
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if image.ndim == 3 else 0, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", stream) + _chunk(b"IEND", b"")


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
