"""NIfTI volumes: checked before they are inflated, and written again with nothing but grid and voxels."""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations on its header classes
from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.deidentify import prescan
from agent.deidentify.errors import FileRejectedError

if TYPE_CHECKING:
    import nibabel

GZIP_MAGIC: Final = b"\x1f\x8b"
_NIFTI1: Final = (348, 344, b"n+1\0")  # header size, offset and text of the magic
_NIFTI2: Final = (540, 4, b"n+2\0\r\n\x1a\n")
_GZIP: Final = 31  # zlib's name for the container


def looks_like_nifti(data: bytes) -> bool:
    """True for a single-file NIfTI-1 or NIfTI-2, plain, or for anything gzipped."""
    return data.startswith(GZIP_MAGIC) or _version(data) > 0


def _version(data: bytes) -> int:
    """1 or 2; 0 for another format."""
    for number, (size, offset, magic) in enumerate((_NIFTI1, _NIFTI2), 1):
        sizes = (struct.pack("<i", size), struct.pack(">i", size))
        if data[:4] in sizes and data[offset : offset + len(magic)] == magic:
            return number
    return 0


def inflate(data: bytes, max_bytes: int) -> bytes:
    """Undo gzip, never making more than ``max_bytes``.

    Raises:
        FileRejectedError: ``too_large``, ``truncated``, ``malformed``.
    """
    if not data.startswith(GZIP_MAGIC):
        return data
    return prescan.inflate(data, _GZIP, max_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedNifti:
    """A NIfTI file whose header can be believed, and its stored numbers."""

    kind: type[nibabel.Nifti1Image]
    header: nibabel.Nifti1Header
    stored: NDArray[Any]  # (i, j, k) or (i, j, k, t), finite, of the file's own type and byte order

    @property
    def affine(self) -> NDArray[np.float64]:
        """(4, 4) from voxels to millimetres: the s-form, or else the q-form."""
        return np.asarray(self.header.get_best_affine(), np.float64)

    @property
    def scale(self) -> tuple[float, float]:
        """Slope and intercept, (1, 0) where none is stated."""
        slope, inter = self.header.get_slope_inter()
        return (1.0 if slope is None else float(slope), 0.0 if inter is None else float(inter))


def clean(data: bytes, max_pixels: int) -> bytes:
    """A NIfTI file with the same voxels, bit for bit, on the same grid, and no words.

    The header is a new one: description, auxiliary file, intent and data base names, and all extensions
    are gone.

    Raises:
        FileRejectedError: see :func:`checked`.
    """
    found = checked(data, max_pixels)
    return written(found, found.stored, found.scale)


def checked(data: bytes, max_pixels: int) -> CheckedNifti:
    """Read a NIfTI file, nothing of which is allocated before its header was believed.

    Raises:
        FileRejectedError: ``not_dicom`` (neither format), ``truncated``, ``too_large``, ``undecodable``.
    """
    import nibabel  # noqa: PLC0415 - the agent only asks what a file looks like; its reader has imported it

    version = _version(data)
    if not version:
        raise FileRejectedError("not_dicom")
    kind = nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image
    header = kind.header_class.from_fileobj(io.BytesIO(data[: kind.header_class.sizeof_hdr]), check=True)
    shape, dtype = header.get_data_shape(), header.get_data_dtype()
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) not in (3, 4) or not all(n > 0 for n in shape) or dtype.kind not in "iuf":
        raise FileRejectedError("undecodable")
    voxels = math.prod(shape)
    if not voxels <= max_pixels:
        raise FileRejectedError("too_large")
    offset = int(header.get_data_offset())
    if not 0 < offset <= len(data):
        raise FileRejectedError("malformed")
    if len(data) < offset + voxels * dtype.itemsize:
        raise FileRejectedError("truncated")
    stored = np.frombuffer(data, dtype=dtype, count=voxels, offset=offset).reshape(shape, order="F")
    if not bool(np.isfinite(stored).all()):
        raise FileRejectedError("undecodable")
    return CheckedNifti(kind, header, stored)


def written(grid: CheckedNifti, stored: NDArray[Any], scale: tuple[float, float], words: bytes = b"") -> bytes:
    """A new file on the grid of another one.

    Args:
        grid: whose shape, axes and units it has.
        stored: the numbers, of that shape.
        scale: slope and intercept.
        words: of a comment extension (code 6); b"" for none.
    """
    from nibabel.nifti1 import Nifti1Extension  # noqa: PLC0415 - see ``checked``

    header, native = grid.header, stored.astype(stored.dtype.newbyteorder("<"))
    new = grid.kind(native, grid.affine, dtype=native.dtype).header
    new.set_qform(header.get_qform(), int(header["qform_code"]))
    new.set_sform(header.get_sform(), int(header["sform_code"]))
    new.set_zooms(header.get_zooms()[: native.ndim])
    new.set_xyzt_units(*header.get_xyzt_units())
    # nibabel would rescale the array on writing; header and voxels are written side by side instead
    new.set_slope_inter(*scale)
    if words:
        new.extensions.append(Nifti1Extension(6, words))
    start = int(new.single_vox_offset + new.extensions.get_sizeondisk())
    new.set_data_offset(start)
    out = io.BytesIO()
    new.write_to(out)
    out.write(b"\0" * (start - out.tell()))
    out.write(native.tobytes(order="F"))
    return out.getvalue()
