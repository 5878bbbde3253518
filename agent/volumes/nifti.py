"""NIfTI files as volumes, and back into the same bytes but for the voxels.

Which voxel lies where: the s-form or the q-form, whichever says "scanner"; where both do, or where they disagree on
which side is left, they must agree, or the file is refused. Units other than millimetres are refused.

Written back are the header's own bytes, untouched, and the voxels in the file's own type and byte order. Extensions
are blanked, because one may hold a whole DICOM header with a thumbnail of the face, and so is what follows the
voxels. The header's words (description, auxiliary file) stay: to take names out is the work of ingest.
"""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its header classes
from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final

import nibabel
import numpy as np
from numpy.typing import NDArray

from agent.deidentify import nifti
from agent.deidentify.errors import FileRejectedError
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import is_grid, spacing

MAX_VOXELS: Final = 2**28  # 0.4 mm in all directions, of a head
_HEADERS: Final = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
_MAGIC: Final = {348: (344, b"n+1\0"), 540: (4, b"n+2\0\r\n\x1a\n")}
_PEEK: Final = 1 << 16  # bytes that hold any header
_FARTHEST: Final = 1 << 24  # where the voxels may begin, behind the extensions
_SLACK: Final = 1 << 20  # bytes after the voxels that are still passed over
_FORMS: Final = frozenset(range(6))  # codes of nifti1.h, and 5 of nifti2: unknown, scanner, aligned, Talairach, MNI
_MILLIMETRES: Final = (0, 2)  # of xyzt_units; 0 is not said
_SCANNER: Final = 1
_APART: Final = 0.5  # voxels between a point's two places that count as the same place
_GZIP_LEVEL: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class NiftiForm:
    """All of a NIfTI file but its voxels."""

    head: bytes  # up to the first voxel
    dtype: np.dtype[Any]  # as stored, with its byte order
    shape: tuple[int, ...]  # as stated: three lengths, and ones
    zipped: bool
    scale: tuple[float, float]  # slope and intercept, (1, 0) when none is stated

    def encoded(self, values: NDArray[Any]) -> bytes:
        """The file with other voxels: (i, j, k), of the stored type but in native byte order."""
        stored = values.astype(self.dtype, copy=False)
        plain = self.head + stored.tobytes(order="F")
        return gzip.compress(plain, _GZIP_LEVEL, mtime=0) if self.zipped else plain


def opened(data: bytes) -> tuple[Volume, NiftiForm]:
    """Check a NIfTI file and take it apart. Nothing is allocated before its header was believed.

    Raises:
        NotDefacedError: ``unreadable``, ``too_large``, ``not_a_volume``, ``four_dimensional``, ``bad_affine``,
            ``not_finite``.
    """
    zipped = data.startswith(nifti.GZIP_MAGIC)
    header = header_of(data[:_PEEK])
    shape, dtype, affine = judged(header)
    voxels, stated = math.prod(shape), float(header["vox_offset"])
    if not header.sizeof_hdr + 4 <= stated <= _FARTHEST:
        raise NotDefacedError("unreadable")
    offset = int(stated)
    need = offset + voxels * dtype.itemsize
    try:
        plain = nifti.inflate(data, need + _SLACK)
    except FileRejectedError as refusal:
        raise NotDefacedError("too_large" if refusal.code == "too_large" else "unreadable") from None
    if len(plain) < need:
        raise NotDefacedError("unreadable")
    stored = np.frombuffer(plain, dtype, voxels, offset).reshape(shape[:3], order="F")
    values = stored.astype(dtype.newbyteorder("="), copy=False)
    if dtype.kind == "f" and not bool(np.isfinite(values).all()):
        raise NotDefacedError("not_finite")
    head = plain[: header.sizeof_hdr] + b"\0" * (offset - header.sizeof_hdr)
    return Volume(values, affine), NiftiForm(head, dtype, shape, zipped, _scale(header))


def header_of(start: bytes) -> nibabel.Nifti1Header:
    """The header of a file by its first bytes, plain or gzipped.

    Raises:
        NotDefacedError: ``unreadable``; ``not_a_volume``, neither NIfTI-1 nor NIfTI-2 in one file.
    """
    if start.startswith(nifti.GZIP_MAGIC):
        try:
            start = zlib.decompressobj(wbits=31).decompress(start, _PEEK)
        except zlib.error:
            raise NotDefacedError("unreadable") from None
    sizes = struct.unpack_from("<i", start) + struct.unpack_from(">i", start) if len(start) >= 4 else ()
    for size, kind in _HEADERS.items():
        place, magic = _MAGIC[size]
        if size not in sizes or start[place : place + len(magic)] != magic:
            continue
        if len(start) < size:
            raise NotDefacedError("unreadable")
        try:
            header: nibabel.Nifti1Header = kind.from_fileobj(io.BytesIO(start[:size]), check=False)
        except Exception:  # noqa: BLE001 - a parser may raise anything, and its text may quote the file
            raise NotDefacedError("unreadable") from None
        return header
    raise NotDefacedError("not_a_volume")


def judged(header: nibabel.Nifti1Header) -> tuple[tuple[int, ...], np.dtype[Any], NDArray[np.float64]]:
    """Shape as stated, type as stored and affine of a header that makes sense.

    Raises:
        NotDefacedError: see :func:`opened`.
    """
    try:
        shape = tuple(int(n) for n in header.get_data_shape())
        dtype = header.get_data_dtype()
    except Exception:  # noqa: BLE001 - as above
        raise NotDefacedError("unreadable") from None
    if not 1 <= int(header["dim"][0]) <= 7 or any(n < 1 for n in shape):
        raise NotDefacedError("unreadable")
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise NotDefacedError("not_a_volume")  # colours, complex numbers
    if any(n > 1 for n in shape[3:]):
        raise NotDefacedError("four_dimensional")
    if len(shape) < 3 or min(shape[:3]) < 2:
        raise NotDefacedError("not_a_volume")
    if math.prod(shape) > MAX_VOXELS:
        raise NotDefacedError("too_large")
    return shape, dtype, _affine(header, shape[:3])


def _affine(header: nibabel.Nifti1Header, shape: tuple[int, ...]) -> NDArray[np.float64]:
    codes = (int(header["sform_code"]), int(header["qform_code"]))
    units = int(header["xyzt_units"]) & 7
    if not (_FORMS.issuperset(codes) and any(codes) and units in _MILLIMETRES):
        raise NotDefacedError("bad_affine")
    stated = [read(header) for read, code in zip((_sform, _qform), codes, strict=True) if code]
    if not all(is_grid(affine) for affine in stated):
        raise NotDefacedError("bad_affine")
    if len(stated) == 1:
        return stated[0]
    if not _agree(stated[0], stated[1], shape, same_space=codes[0] == codes[1]):
        raise NotDefacedError("bad_affine")
    return stated[1] if _SCANNER == codes[1] != codes[0] else stated[0]


def _sform(header: nibabel.Nifti1Header) -> NDArray[np.float64]:
    return np.asarray(header.get_sform(), np.float64)


def _qform(header: nibabel.Nifti1Header) -> NDArray[np.float64]:
    sides, b, c, d = (np.asarray(v, np.float64) for v in (header["pixdim"][1:4], *_quaternion(header)))
    if not (bool(np.isfinite(sides).all()) and bool((sides > 0).all()) and float(b * b + c * c + d * d) <= 1.001):
        raise NotDefacedError("bad_affine")
    return np.asarray(header.get_qform(), np.float64)


def _quaternion(header: nibabel.Nifti1Header) -> tuple[Any, Any, Any]:
    return header["quatern_b"], header["quatern_c"], header["quatern_d"]


def _agree(one: NDArray[np.float64], other: NDArray[np.float64], shape: tuple[int, ...], *, same_space: bool) -> bool:
    """Two affines of one file: into one space they must be the same; into two, at least name the sides alike."""
    if nibabel.aff2axcodes(one) != nibabel.aff2axcodes(other):
        return False
    if not same_space:
        return True
    corners = np.array([[i, j, k, 1.0] for i in (0, shape[0]) for j in (0, shape[1]) for k in (0, shape[2])])
    apart = np.linalg.norm((corners @ (one - other).T)[:, :3], axis=1)
    return bool(apart.max() <= _APART * spacing(one).max())


def _scale(header: nibabel.Nifti1Header) -> tuple[float, float]:
    try:
        slope, intercept = header.get_slope_inter()
    except Exception:  # noqa: BLE001 - as above
        raise NotDefacedError("unreadable") from None
    return (1.0, 0.0) if slope is None else (float(slope), float(intercept))
