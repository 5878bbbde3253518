"""NIfTI-1 in one form: a single little-endian ``.nii`` whose header follows from shape, type and affine.

No text field, extension, scaling, intent, slice timing or quaternion has a value. Offsets and meanings are those of
``nifti1.h``; nibabel reads the files, and is the oracle of the tests.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.byte_source import ArtifactFormatError, ByteSource, blocks

MAX_SIDE: Final = 1_024
MAX_VOXELS: Final = 1 << 24
_OFFSET: Final = 352  # 348 bytes of header, and 4 that say: no extension
_TYPES: Final = {"int16": (4, 16), "float32": (16, 32)}  # datatype code, bits
_HEADER: Final = struct.Struct("<i10s18sihcB8h3fhhhh8f3fhbB4fii80s24shh6f12f16s4s")
_NAMES: Final = {code: name for name, (code, _) in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class NiftiMetadata:
    """A file's metadata besides its voxels.

    ``shape`` is (x, y, z); ``dtype`` int16 or float32; ``affine`` the first three rows of the matrix from voxels to
    millimetres (RAS+), row by row, each value exact in float32. The spacing is the length of its columns.

    Raises:
        ArtifactFormatError: out of bounds, or not a geometry.
    """

    shape: tuple[int, ...]
    dtype: str
    affine: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the bounds before anything of that size is read."""
        if len(self.shape) != 3 or not all(1 <= n <= MAX_SIDE for n in self.shape):
            raise ArtifactFormatError(f"a volume has three sides of 1 to {MAX_SIDE} voxels")
        if not math.prod(self.shape) <= MAX_VOXELS:
            raise ArtifactFormatError("a volume has too many voxels")
        if self.dtype not in _TYPES:
            raise ArtifactFormatError("a volume's type is int16 or float32")
        if len(self.affine) != 12 or not all(abs(x) <= 10_000 for x in self.affine):
            raise ArtifactFormatError("an affine is twelve finite numbers of at most 10000 mm")
        if any(struct.unpack("<f", struct.pack("<f", x))[0] != x or repr(x) == "-0.0" for x in self.affine):
            raise ArtifactFormatError("an affine's numbers must be exact in float32, and zero without a sign")
        if not all(0.01 <= s <= 100 for s in self.spacing) or not self._volume() > 1e-3 * math.prod(self.spacing):
            raise ArtifactFormatError("an affine's columns must be independent, of 0.01 to 100 mm")

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres from voxel to voxel along x, y and z."""
        a = self.affine
        return tuple(math.sqrt(a[i] ** 2 + a[4 + i] ** 2 + a[8 + i] ** 2) for i in range(3))

    @property
    def nbytes(self) -> int:
        """Bytes of the voxels."""
        return math.prod(self.shape) * _TYPES[self.dtype][1] // 8

    def _volume(self) -> float:
        a, b, c, _, d, e, f, _, g, h, i, _ = self.affine
        return abs(a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g))

    def header(self) -> bytes:
        """The bytes in front of the voxels."""
        code, bits = _TYPES[self.dtype]
        zeros = (0.0,) * 6
        head = _HEADER.pack(
            *(348, b"", b"", 0, 0, b"r", 0),  # regular: the letter that ANALYZE readers look for
            *(3, *self.shape, 1, 1, 1, 1),
            *(0.0, 0.0, 0.0, 0, code, bits, 0),
            *(1.0, *self.spacing, 0.0, 0.0, 0.0, 0.0),
            *(float(_OFFSET), 1.0, 0.0, 0, 0, 2),  # slope 1, intercept 0; millimetres
            *(0.0, 0.0, 0.0, 0.0, 0, 0),
            *(b"", b"", 0, 2),  # no quaternion; the affine is an alignment to a space of ours
            *zeros,
            *self.affine,
            *(b"", b"n+1\0"),
        )
        return head + bytes(4)


def pack_nifti(voxels: NDArray[np.int16] | NDArray[np.float32], affine: tuple[float, ...]) -> bytes:
    """An (x, y, z) volume of int16 or finite float32.

    Raises:
        ArtifactFormatError: see :class:`NiftiMetadata`; or a voxel is not finite.
    """
    volume = NiftiMetadata(voxels.shape, voxels.dtype.name, affine)
    if not bool(np.isfinite(voxels).all()):
        raise ArtifactFormatError("a voxel is not finite")
    return volume.header() + voxels.astype(voxels.dtype.newbyteorder("<")).tobytes(order="F")


def check_nifti(source: ByteSource) -> NiftiMetadata:
    """What a file of :func:`pack_nifti` says besides its voxels, which are read in blocks.

    Raises:
        ArtifactFormatError: anything that :func:`pack_nifti` would not write.
    """
    if source.size < _OFFSET:
        raise ArtifactFormatError("a volume is not NIfTI-1")
    head = source.read(0, _OFFSET)
    fields = _HEADER.unpack(head[:348])
    if fields[0] != 348 or fields[-1] != b"n+1\0" or fields[7] != 3 or fields[19] not in _NAMES:
        raise ArtifactFormatError("a volume is not a three-dimensional NIfTI-1 of int16 or float32")
    volume = NiftiMetadata(fields[8:11], _NAMES[fields[19]], fields[-14:-2])
    if volume.header() != head:
        raise ArtifactFormatError("a NIfTI header says more than shape, type and affine")
    if source.size != _OFFSET + volume.nbytes:
        raise ArtifactFormatError("a NIfTI file is not as long as its header says")
    if volume.dtype == "float32":
        for block in blocks(source, _OFFSET, source.size):
            if not bool(np.isfinite(np.frombuffer(block, "<f4")).all()):
                raise ArtifactFormatError("a voxel is not finite")
    return volume
