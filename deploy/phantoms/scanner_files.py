"""Files as they come from scanners, and files that were broken or made to break a reader.

The real ones ship with pydicom; nothing is downloaded. The head is Debian's ``mricron-data`` (Colin Holmes'
averaged T1 head), when that package is installed.
"""

from __future__ import annotations

import io
import shutil
import struct
from pathlib import Path
from typing import Final

import pydicom
from pydicom.data import get_testdata_file

# pydicom's name -> the name in the hospital's folder
_REAL: Final = {
    "CT_small.dcm": "ct.dcm",
    "MR_small.dcm": "mr.dcm",
    "MR_small_implicit.dcm": "mr_resent_implicit.dcm",  # the same instance in another transfer syntax
    "693_J2KI.dcm": "ct_jpeg2000.dcm",
    "J2K_pixelrep_mismatch.dcm": "ct_sign_mismatch.dcm",
    "examples_palette.dcm": "us_palette.dcm",
    "examples_rgb_color.dcm": "us_rgb.dcm",
    "examples_ybr_color.dcm": "us_cine.dcm",
    "examples_jpeg2k.dcm": "us_jpeg2000.dcm",
    "examples_overlay.dcm": "mr_overlay.dcm",
    "SC_rgb_rle_2frame.dcm": "capture_two_frames.dcm",
    "SC_rgb_jpeg.dcm": "capture_jpeg.dcm",
    "JPGExtended.dcm": "nm_jpeg_12_bit.dcm",
    "rtdose.dcm": "dose.dcm",
    "rtplan.dcm": "plan.dcm",
    "test-SR.dcm": "report.dcm",
    "waveform_ecg.dcm": "ecg.dcm",
    "liver_1frame.dcm": "segmentation.dcm",
    "dicomdirtests/DICOMDIR": "DICOMDIR",
    "badVR.dcm": "bad_vr.dcm",
    "MR_truncated.dcm": "mr_truncated.dcm",
    "meta_missing_tsyntax.dcm": "no_transfer_syntax.dcm",
    "nested_priv_SQ.dcm": "nested_private.dcm",
    "image_dfl.dcm": "deflated.dcm",
    "no_meta.dcm": "no_preamble.dcm",
}
# variants of one instance, each under a SOP Instance UID of its own here: an archive holds them side by side
_VARIANTS: Final = {
    "MR_small_RLE.dcm": ("mr_rle.dcm", b"1"),
    "MR_small_jp2klossless.dcm": ("mr_jpeg2000.dcm", b"2"),
    "MR_small_jpeg_ls_lossless.dcm": ("mr_jpegls.dcm", b"3"),
    "MR_small_bigendian.dcm": ("mr_big_endian.dcm", b"4"),
}
_HEADS: Final = ("ch2.nii.gz",)
_PREAMBLE: Final = b"\0" * 128 + b"DICM"


class NotBundled(FileNotFoundError):
    """pydicom was installed without its test files."""


def _bundled(name: str) -> bytes:
    path = get_testdata_file(name, download=False)
    if not isinstance(path, str):
        raise NotBundled(name)
    return Path(path).read_bytes()


def add_scanner_files(folder: Path) -> tuple[str, ...]:
    """Add real scanner files and broken ones to a hospital's folder, below ``scanner`` and ``broken``.

    Returns:
        Their paths relative to the folder.
    """
    scanner, broken = folder / "scanner", folder / "broken"
    scanner.mkdir(parents=True, exist_ok=True)
    broken.mkdir(parents=True, exist_ok=True)
    for name, new in _REAL.items():
        (scanner / new).write_bytes(_bundled(name))
    uid = str(pydicom.dcmread(io.BytesIO(_bundled("MR_small.dcm"))).SOPInstanceUID).encode()
    for name, (new, last) in _VARIANTS.items():
        (scanner / new).write_bytes(_bundled(name).replace(uid, uid[:-1] + last))
    digits = sorted(folder.glob("*/*/IM*.dcm"))
    _write_broken(broken, digits[0].read_bytes() if digits else _bundled("CT_small.dcm"))
    return tuple(sorted(str(p.relative_to(folder)) for d in (scanner, broken) for p in d.iterdir()))


def _write_broken(folder: Path, image: bytes) -> None:
    ct = _bundled("CT_small.dcm")
    files = {
        "empty.dcm": b"",
        "letter.dcm": b"Dear colleague, please find enclosed nothing that is an image.\n" * 8,
        "cut.dcm": ct[: len(ct) // 2],
        "sequence_bomb.dcm": sequence_bomb(1000),
        "length_beyond_end.dcm": length_beyond_end(),
        "again.dcm": image,
        # one bit of the last pixel differs
        "same_uid_other_content.dcm": image[:-1] + bytes([image[-1] ^ 1]),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _meta() -> bytes:
    syntax = b"1.2.840.10008.1.2.1\0"
    body = b"\x02\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    return _PREAMBLE + b"\x02\0\0\0UL\x04\0" + struct.pack("<I", len(body)) + body


def sequence_bomb(depth: int) -> bytes:
    """Sequences of defined length inside each other: 20 KB at depth 1000 hang a parser that walks them."""
    inner = b""
    for _ in range(depth):
        item = b"\xfe\xff\x00\xe0" + struct.pack("<I", len(inner)) + inner
        inner = b"\x08\0\x40\x11SQ\0\0" + struct.pack("<I", len(item)) + item
    return _meta() + inner


def length_beyond_end() -> bytes:
    """An element that claims 4 GiB in a file of a few hundred bytes."""
    return _meta() + b"\x08\0\x60\0CS\x02\0OT" + b"\xe0\x7f\x10\0OW\0\0" + struct.pack("<I", 0xFFFFFFF0) + b"\0" * 64


def find_head(below: Path = Path("/usr/share")) -> Path | None:
    """The head MRI of Debian's mricron-data, or None."""
    return next((p for name in _HEADS for p in sorted(below.glob(f"**/{name}"))), None)


def add_head(folder: Path, patient_id: str = "MRN-HEAD-00001") -> bool:
    """Add a head MRI as NIfTI with its line in ``nifti.csv``; False when this machine has none."""
    head = find_head()
    if head is None:
        return False
    (folder / "heads").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(head, folder / "heads" / head.name)
    (folder / "nifti.csv").write_text(f"file,patient_id\nheads/{head.name},{patient_id}\n", encoding="utf-8")
    return True
