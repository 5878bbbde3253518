"""DICOM in one form: a synthetic image or volume as a Secondary Capture, every element fixed or derived.

Explicit VR little endian, native pixels, and only the elements below: no private, text, date or sequence element
carries anything. The identifiers are UUIDs (PS3.5, annex B.2) computed from the content and its place in the set, so
that they too follow from the pixels. A reader regenerates the header and compares; pydicom is the oracle in tests.

Classes (PS3.4, annex B.5): one frame of 8 bits is Secondary Capture Image Storage; several frames, or 16 bits, are
the Multi-frame Grayscale Byte and Word classes (PS3.3, A.8.1, A.8.3, A.8.4).
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import uuid
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.byte_source import ArtifactFormatError, ByteSource, blocks

MAX_SIDE: Final = 2_048
MAX_VOXELS: Final = 1 << 24
MODALITIES: Final = ("CR", "CT", "DX", "MG", "MR", "NM", "OP", "OPT", "OT", "PT", "US", "XA", "XC")
_CLASS: Final = "1.2.840.10008.5.1.4.1.1.7"
_EXPLICIT_LITTLE: Final = "1.2.840.10008.1.2.1"
_IMPLEMENTATION: Final = "2.25.223498271059837461902837465019283746"
_LONG: Final = ("OB", "OW")  # the value representations here that have a 32-bit length (PS3.5, 7.1.2)
_MAX_HEAD: Final = 1 << 16
_MAX_ELEMENTS: Final = 64
_LENGTH: Final = re.compile(rb"(0|[1-9][0-9]{0,5})\.[0-9]{3} ?")


@dataclass(frozen=True, slots=True)
class DicomImage:
    """A file's metadata besides its pixels and its identifiers.

    ``shape`` is (rows, columns) or (frames, rows, columns) with two frames or more; ``dtype`` uint8 or uint16;
    ``spacing_um`` micrometres along the same axes.

    Raises:
        ArtifactFormatError: out of bounds.
    """

    shape: tuple[int, ...]
    dtype: str
    modality: str
    spacing_um: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the bounds before anything of that size is read."""
        if len(self.shape) not in (2, 3) or not all(1 <= n <= MAX_SIDE for n in self.shape):
            raise ArtifactFormatError(f"a DICOM image has sides of 1 to {MAX_SIDE} pixels")
        if len(self.shape) == 3 and self.shape[0] < 2:
            raise ArtifactFormatError("a DICOM volume has two frames or more")
        if not math.prod(self.shape) <= MAX_VOXELS:
            raise ArtifactFormatError("a DICOM image has too many pixels")
        if self.dtype not in ("uint8", "uint16") or self.modality not in MODALITIES:
            raise ArtifactFormatError(
                f"a DICOM image is uint8 or uint16, its modality one of {', '.join(MODALITIES)}"
            )
        if len(self.spacing_um) != len(self.shape) or not all(
            type(s) is int and 10 <= s <= 100_000 for s in self.spacing_um
        ):
            raise ArtifactFormatError("a DICOM spacing is 10 to 100000 micrometres for each axis")

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels, without padding."""
        return math.prod(self.shape) * (1 if self.dtype == "uint8" else 2)

    def header(self, content: bytes, index: int) -> bytes:
        """All that stands in front of the pixels; ``content`` is their SHA-256, ``index`` the place in the set."""
        frames = self.shape[0] if len(self.shape) == 3 else 1
        sop_class = _CLASS + (".3" if self.dtype == "uint16" else ".2" if frames > 1 else "")
        instance = self._uid("instance", content, index)
        meta = b"".join(
            (
                _element(0x0002, 0x0001, "OB", b"\0\1"),
                _element(0x0002, 0x0002, "UI", sop_class),
                _element(0x0002, 0x0003, "UI", instance),
                _element(0x0002, 0x0010, "UI", _EXPLICIT_LITTLE),
                _element(0x0002, 0x0012, "UI", _IMPLEMENTATION),
                _element(0x0002, 0x0013, "SH", "LAZARET"),
            )
        )
        parts = (
            bytes(128) + b"DICM" + _element(0x0002, 0x0000, "UL", struct.pack("<I", len(meta))) + meta,
            self._about(sop_class, instance, index),
            self._place(content, index, frames),
            self._pixels(frames, multi=sop_class != _CLASS),
        )
        return b"".join(parts)

    def _uid(self, kind: str, content: bytes, index: int) -> str:
        name = repr((kind, index, self.shape, self.dtype, self.modality, self.spacing_um)).encode()
        seed = hashlib.sha256(b"lazaret synthetic dicom\0" + name + b"\0" + content).digest()[:16]
        return f"2.25.{uuid.UUID(bytes=seed, version=5).int}"

    def _about(self, sop_class: str, instance: str, index: int) -> bytes:
        return b"".join(
            (
                _element(0x0008, 0x0008, "CS", "DERIVED\\SECONDARY"),
                _element(0x0008, 0x0016, "UI", sop_class),
                _element(0x0008, 0x0018, "UI", instance),
                _element(0x0008, 0x001C, "CS", "YES"),  # SyntheticData
                _element(0x0008, 0x0020, "DA", ""),
                _element(0x0008, 0x0030, "TM", ""),
                _element(0x0008, 0x0050, "SH", ""),
                _element(0x0008, 0x0060, "CS", self.modality),
                _element(0x0008, 0x0064, "CS", "SYN"),  # ConversionType: synthetic image
                _element(0x0008, 0x0070, "LO", "Lazaret"),
                _element(0x0008, 0x0090, "PN", ""),
                _element(0x0010, 0x0010, "PN", "SYNTHETIC"),
                _element(0x0010, 0x0020, "LO", f"SYN-{index:05d}"),
                _element(0x0010, 0x0030, "DA", ""),
                _element(0x0010, 0x0040, "CS", ""),
            )
        )

    def _place(self, content: bytes, index: int, frames: int) -> bytes:
        planes = "\\".join(_mm(self.spacing_um[0] * frame) for frame in range(frames))
        return b"".join(
            (
                _element(0x0018, 0x2005, "DS", planes) if frames > 1 else b"",  # Slice Location Vector
                _element(0x0020, 0x000D, "UI", self._uid("study", content, index)),
                _element(0x0020, 0x000E, "UI", self._uid("series", content, index)),
                _element(0x0020, 0x0010, "SH", ""),
                _element(0x0020, 0x0011, "IS", "1"),
                _element(0x0020, 0x0013, "IS", "1"),
                _element(0x0020, 0x0020, "CS", ""),
            )
        )

    def _pixels(self, frames: int, multi: bool) -> bytes:
        rows, columns = self.shape[-2:]
        bits = 8 if self.dtype == "uint8" else 16
        spacing = "\\".join(_mm(s) for s in self.spacing_um[-2:])
        parts = [
            _element(0x0028, 0x0002, "US", struct.pack("<H", 1)),
            _element(0x0028, 0x0004, "CS", "MONOCHROME2"),
            _element(0x0028, 0x0008, "IS", str(frames)) if multi else b"",
            _element(0x0028, 0x0009, "AT", struct.pack("<HH", 0x0018, 0x2005)) if frames > 1 else b"",
            _element(0x0028, 0x0010, "US", struct.pack("<H", rows)),
            _element(0x0028, 0x0011, "US", struct.pack("<H", columns)),
            _element(0x0028, 0x0030, "DS", spacing),
            _element(0x0028, 0x0100, "US", struct.pack("<H", bits)),
            _element(0x0028, 0x0101, "US", struct.pack("<H", bits)),
            _element(0x0028, 0x0102, "US", struct.pack("<H", bits - 1)),
            _element(0x0028, 0x0103, "US", struct.pack("<H", 0)),
            _element(0x0028, 0x0301, "CS", "NO"),  # BurnedInAnnotation
        ]
        if multi:
            parts += [
                _element(0x0028, 0x1052, "DS", "0"),
                _element(0x0028, 0x1053, "DS", "1"),
                _element(0x0028, 0x1054, "LO", "US"),
                _element(0x2050, 0x0020, "CS", "IDENTITY"),
            ]
        length = self.nbytes + self.nbytes % 2
        kind = "OB" if bits == 8 else "OW"
        parts.append(struct.pack("<HH2sHI", 0x7FE0, 0x0010, kind.encode(), 0, length))
        return b"".join(parts)


def pack_dicom(
    pixels: NDArray[np.uint8] | NDArray[np.uint16], modality: str, spacing_um: tuple[int, ...], index: int
) -> bytes:
    """A (rows, columns) image or (frames, rows, columns) volume; ``index`` is its place in the set, from 0.

    Raises:
        ArtifactFormatError: see :class:`DicomImage`.
    """
    picture = DicomImage(pixels.shape, pixels.dtype.name, modality, spacing_um)
    body = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    return picture.header(hashlib.sha256(body).digest(), index) + body + bytes(len(body) % 2)


def check_dicom(source: ByteSource, index: int) -> DicomImage:
    """What a file of :func:`pack_dicom` says besides its pixels, which are read in blocks.

    Raises:
        ArtifactFormatError: anything that :func:`pack_dicom` would not write in this place.
    """
    head = source.read(0, min(source.size, _MAX_HEAD))
    values, start = _elements(head)
    picture = _picture(values)
    if source.size != start + picture.nbytes + picture.nbytes % 2:
        raise ArtifactFormatError("a DICOM file is not as long as its header says")
    content = hashlib.sha256()
    for block in blocks(source, start, start + picture.nbytes):
        content.update(block)
    if picture.header(content.digest(), index) != head[:start]:
        raise ArtifactFormatError("a DICOM header says more, or other, than its pixels and its place give")
    if picture.nbytes % 2 and source.read(source.size - 1, 1) != b"\0":
        raise ArtifactFormatError("a DICOM file is padded with something")
    return picture


def _mm(micrometres: int) -> str:
    return f"{micrometres // 1000}.{micrometres % 1000:03d}"


def _element(group: int, number: int, vr: str, value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    raw += (b"\0" if vr == "UI" else b" ") * (len(raw) % 2)
    if vr in _LONG:
        return struct.pack("<HH2sHI", group, number, vr.encode(), 0, len(raw)) + raw
    return struct.pack("<HH2sH", group, number, vr.encode(), len(raw)) + raw


def _elements(head: bytes) -> tuple[dict[tuple[int, int], bytes], int]:
    """The values in front of the pixels, and where the pixels start; no sequence, nothing undefined in length."""
    if len(head) < 140 or head[128:132] != b"DICM":
        raise ArtifactFormatError("an image is not a DICOM file")
    values: dict[tuple[int, int], bytes] = {}
    at = 132
    while len(values) < _MAX_ELEMENTS and at + 12 <= len(head):
        group, number, vr, length = struct.unpack_from("<HH2sH", head, at)
        at += 8
        if vr in (b"OB", b"OW"):
            length = int.from_bytes(head[at : at + 4], "little")
            at += 4
        if (group, number) == (0x7FE0, 0x0010):
            return values, at
        if (group, number) in values or at + length > len(head):
            break
        values[group, number] = head[at : at + length]
        at += length
    raise ArtifactFormatError("a DICOM header has no pixels, too many elements, or one twice")


def _picture(values: dict[tuple[int, int], bytes]) -> DicomImage:
    try:
        frames = int(values.get((0x0028, 0x0008), b"1")[:8])
        rows, columns, bits = (
            int.from_bytes(values[0x0028, number], "little") for number in (0x0010, 0x0011, 0x0100)
        )
        modality = values[0x0008, 0x0060].decode("ascii").strip(" ")
        lengths = values[0x0028, 0x0030].split(b"\\")
        if frames > 1:
            lengths = [values[0x0018, 0x2005].split(b"\\", 2)[1], *lengths]
    except (KeyError, ValueError, IndexError):
        raise ArtifactFormatError("a DICOM header lacks an element, or has one that is malformed") from None
    if not all(_LENGTH.fullmatch(length) for length in lengths):
        raise ArtifactFormatError("a DICOM spacing is not in its one form")
    shape = (frames, rows, columns) if frames > 1 else (rows, columns)
    spacing = tuple(int(length.replace(b".", b"")) for length in lengths)
    return DicomImage(shape, {8: "uint8", 16: "uint16"}.get(bits, ""), modality, spacing)
