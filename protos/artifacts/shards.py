"""A set of synthetic images or volumes: one plain USTAR shard of at most 256 MiB that WebDataset streams as it is.

Sample ``i`` is two members with one key: ``00000.png`` (or ``.nii``, ``.dcm``) and ``00000.txt``, its label (not
``.cls``, which WebDataset reads as a whole number: it fails on a word). Every header field follows from the name
and the length, the end is two blocks of zeros and the padding of POSIX to 10 KiB; a reader regenerates all that and
compares. So there are no links, no other owners or times, no extended headers, no paths, nothing behind the end. All
samples have one form, shape and geometry.

The limit of a set is its uncompressed size (:func:`plain_bytes`), so the number of samples does not depend on their
content, and unpacking never takes more than 256 MiB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.byte_source import ArtifactFormatError, ByteSource, Window
from protos.artifacts.dicom import check_dicom, pack_dicom
from protos.artifacts.nifti import check_nifti, pack_nifti
from protos.artifacts.png import pack_png, plain_size, read_earlier_png, read_png

MAX_SHARD: Final = 256 << 20  # bytes
MAX_SAMPLES: Final = 100_000  # what five digits can number
MAX_LABEL: Final = 32  # characters
_RECORD: Final = 10_240  # POSIX.1-1988: 20 blocks of 512 bytes
_BLOCK: Final = 512
_LOOKS: Final = 16  # blank samples: each has the longest identifiers with a probability of about nine tenths
_TOO_LARGE: Final = "a set has at most 256 MiB, counted without compression"
_OCTAL: Final = re.compile(rb"[0-7]{11}\0")
_LABEL: Final = re.compile(rb"[ -~]{0,32}")
_LINKS: Final = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
_EXTENDED: Final = (b"x", b"g", b"L", b"K", b"X", b"S", b"V")  # pax, GNU long names, sparse files, volume labels


@dataclass(frozen=True, slots=True)
class Png:
    """8-bit grey (h, w), or RGB (h, w, 3)."""


@dataclass(frozen=True, slots=True)
class Nifti:
    """(x, y, z) of int16 or float32; ``affine`` as in :class:`protos.artifacts.nifti.NiftiMetadata`."""

    affine: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Dicom:
    """(rows, columns) or (frames, rows, columns), uint8 or uint16; see :class:`protos.artifacts.dicom.DicomImage`."""

    modality: str
    spacing_um: tuple[int, ...]


Form = Png | Nifti | Dicom
_Found = tuple[str, tuple[int, ...], object]  # form, shape, and whatever else all samples of a set share
_Check = Callable[[ByteSource, int], _Found]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a shard holds: ``count`` samples of one ``form`` and ``shape``, and their labels in order.

    ``form`` is one of png, png-rgb, nifti-int16, nifti-float32, dicom-uint8, dicom-uint16.
    """

    form: str
    count: int
    shape: tuple[int, ...]
    labels: tuple[str, ...]


def pack_shard(samples: Sequence[NDArray[Any]], labels: Sequence[str], form: Form) -> bytes:
    """Samples with one label each, as a shard.

    Raises:
        ArtifactFormatError: no sample, too many, a label too long or not plain, different shapes, a sample that its
            form cannot hold, or more than 256 MiB in all, without compression.
    """
    if not len(samples) or len(samples) > MAX_SAMPLES or len(labels) != len(samples):
        raise ArtifactFormatError("a set has 1 to 100000 samples, with one label each")
    if len({(sample.shape, sample.dtype.str) for sample in samples}) != 1:
        raise ArtifactFormatError("the samples must have one shape and type")
    if not all(map(plain, labels)):
        raise ArtifactFormatError(f"a label is at most {MAX_LABEL} plain characters")
    parts: list[bytes] = []
    size = unpacked = 0
    for index, (sample, label) in enumerate(zip(samples, labels, strict=True)):
        suffix, body = _packed(sample, index, form)
        parts += [*_member(f"{index:05d}.{suffix}", body), *_member(f"{index:05d}.txt", label.encode())]
        size += sum(len(part) for part in parts[-6:])
        whole = plain_size(sample.shape) if isinstance(form, Png) else len(body)
        unpacked += _taken(whole) + _taken(len(label))
        if unpacked + _RECORD > MAX_SHARD:
            raise ArtifactFormatError(_TOO_LARGE)
    parts.append(bytes(_end(size) - size))
    return b"".join(parts)


def plain(label: str) -> bool:
    """Whether a set can hold it: at most 32 characters of ASCII that are printed."""
    return bool(_LABEL.fullmatch(label.encode("utf-8", "replace")))


def capacity(most: int, shape: tuple[int, ...], form: Form, dtype: type[np.generic] = np.uint8) -> int:
    """How many samples surely fit into a shard of ``most`` bytes, whatever they show and are labelled.

    Args:
        most: bytes of the whole shard.
        shape: of each sample.
        form: that they are written in.
        dtype: of their values.
    Raises:
        ArtifactFormatError: the form cannot hold such a sample.
    """
    members = min(most // _RECORD * _RECORD - 2 * _BLOCK, MAX_SHARD - _RECORD)
    return max(0, min(MAX_SAMPLES, members // _each(shape, form, dtype)))


def plain_bytes(count: int, shape: tuple[int, ...], form: Form, dtype: type[np.generic] = np.uint8) -> int:
    """The most that ``count`` samples can take as a shard, whatever they show and are labelled: see :func:`capacity`.

    Raises:
        ArtifactFormatError: the form cannot hold such a sample.
    """
    return _end(count * _each(shape, form, dtype))


def _each(shape: tuple[int, ...], form: Form, dtype: type[np.generic]) -> int:
    """What one sample can take with its label.

    Of a DICOM file, whose identifiers are a digit longer or shorter, the longest of some is taken.
    """
    if isinstance(form, Png):
        return _taken(plain_size(shape)) + _taken(MAX_LABEL)
    blank = np.zeros(shape, dtype)
    return max(_taken(len(_packed(blank, index, form)[1])) for index in range(_LOOKS)) + _taken(MAX_LABEL)


def check_shard(source: ByteSource, taken: Callable[[Window], None] | None = None) -> Contents:
    """Refuse everything that :func:`pack_shard` would not write; one member at most is held at once.

    ``taken`` is given every sample, once it is known to be sound.

    Raises:
        ArtifactFormatError: with the first reason found.
    """
    return _checked(source, taken, read_png)


def check_earlier_shard(source: ByteSource, taken: Callable[[Window], None] | None = None) -> Contents:
    """As :func:`check_shard`, of a set that was written before images were compressed.

    Raises:
        ArtifactFormatError: with the first reason found.
    """
    return _checked(source, taken, read_earlier_png)


def check_kept_shard(source: ByteSource, taken: Callable[[Window], None] | None = None) -> Contents:
    """As :func:`check_shard`, of a set that was admitted or made here, now or before images were compressed.

    For reading only: what comes in has one form. :func:`read_kept_png` reads the images.

    Raises:
        ArtifactFormatError: with the first reason found.
    """
    return _checked(source, taken, read_kept_png)


def read_kept_png(source: ByteSource) -> NDArray[np.uint8]:
    """An image of today's form, or of the form before it.

    Raises:
        ArtifactFormatError: it is of neither.
    """
    try:
        return read_png(source)
    except ArtifactFormatError:
        return read_earlier_png(source)


def _like(known: _Found | None, found: _Found) -> _Found:
    if known not in (None, found):
        raise ArtifactFormatError("the samples must have one form, shape and geometry")
    return found


def _checked(
    source: ByteSource, taken: Callable[[Window], None] | None, png: Callable[[ByteSource], NDArray[np.uint8]]
) -> Contents:
    checks: Mapping[str, _Check] = {".png": lambda one, _: _picture(png(one)), ".nii": _nifti, ".dcm": _dicom}
    if source.size > MAX_SHARD:
        raise ArtifactFormatError("a shard is at most 256 MiB")
    labels: list[str] = []
    suffix, at, unpacked, known = "", 0, 0, None
    while (head := source.read(at, _BLOCK)) != bytes(_BLOCK):
        index = len(labels)
        if index == MAX_SAMPLES:
            raise ArtifactFormatError(f"a set has at most {MAX_SAMPLES} samples")
        suffix = suffix or head[5:9].decode("ascii", "replace")
        if suffix not in checks:
            raise ArtifactFormatError(_odd(head))
        sample, at = _enter(source, at, head, f"{index:05d}{suffix}")
        known = _like(known, checks[suffix](sample, index))
        label, at = _enter(source, at, source.read(at, _BLOCK), f"{index:05d}.txt")
        labels.append(_label(label))
        unpacked += _taken(plain_size(known[1]) if suffix == ".png" else sample.size) + _taken(label.size)
        if unpacked + _RECORD > MAX_SHARD:
            raise ArtifactFormatError(_TOO_LARGE)
        if taken is not None:
            taken(sample)
    if known is None:
        raise ArtifactFormatError("a set has one sample or more")
    if source.size != _end(at) or any(source.read(at, source.size - at)):
        raise ArtifactFormatError("something follows the end of the archive, or the padding is not exact")
    return Contents(known[0], len(labels), known[1], tuple(labels))


def _packed(sample: NDArray[Any], index: int, form: Form) -> tuple[str, bytes]:
    match form:
        case Png():
            return "png", pack_png(sample)
        case Nifti(affine):
            return "nii", pack_nifti(sample, affine)
        case Dicom(modality, spacing_um):
            return "dcm", pack_dicom(sample, modality, spacing_um, index)


def _picture(image: NDArray[np.uint8]) -> _Found:
    return "png" if image.ndim == 2 else "png-rgb", image.shape, None


def _nifti(source: ByteSource, index: int) -> _Found:
    volume = check_nifti(source)
    return f"nifti-{volume.dtype}", volume.shape, volume


def _dicom(source: ByteSource, index: int) -> _Found:
    picture = check_dicom(source, index)
    return f"dicom-{picture.dtype}", picture.shape, picture


def _header(name: str, size: int) -> bytes:
    """The one header of a member: regular, mode 0644, all else zero (POSIX.1-1988 ustar)."""
    parts = [name.encode().ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size]
    parts += [b"00000000000\0", b" " * 8, b"0", bytes(100), b"ustar\00000", bytes(64), bytes(16), bytes(155 + 12)]
    raw = b"".join(parts)
    return raw[:148] + b"%06o\0 " % sum(raw) + raw[156:]


def _member(name: str, body: bytes) -> tuple[bytes, bytes, bytes]:
    return _header(name, len(body)), body, bytes(-len(body) % _BLOCK)


def _taken(size: int) -> int:
    """The bytes of a member whose body has ``size``."""
    return _BLOCK + size + -size % _BLOCK


def _end(at: int) -> int:
    """Where an archive ends whose members end at ``at``: two blocks of zeros, then up to a whole record."""
    return -(-(at + 2 * _BLOCK) // _RECORD) * _RECORD


def _enter(source: ByteSource, at: int, head: bytes, name: str) -> tuple[Window, int]:
    """The body of the member whose header stands at ``at``, and where the next one starts."""
    digits = head[124:136]
    size = int(digits[:11], 8) if _OCTAL.fullmatch(digits) else -1
    if size < 0 or head != _header(name, size):
        raise ArtifactFormatError(_odd(head))
    start, padding = at + _BLOCK, -size % _BLOCK
    if start + size + padding > source.size:
        raise ArtifactFormatError("a member is longer than the archive")
    if any(source.read(start + size, padding)):
        raise ArtifactFormatError("the padding of a member is not zero")
    return Window(source, start, size), start + size + padding


def _odd(head: bytes) -> str:
    """Why a member's header is not the expected one, without quoting it."""
    kind, name = head[156:157], head[:100].rstrip(b"\0")
    if kind in _LINKS:
        return f"a member is {_LINKS[kind]}"
    if kind in _EXTENDED:
        return "a member is an extended header"
    if b"/" in name or b".." in name or b"\\" in name or any(head[345:500]):
        return "a member's name is a path"
    if head[257:265] != b"ustar\00000":
        return "not a USTAR archive"
    return "a member is out of place, or its header has more than a name and a length"


def _label(source: ByteSource) -> str:
    raw = source.read(0, source.size) if source.size <= MAX_LABEL else b"\0"
    if not _LABEL.fullmatch(raw):
        raise ArtifactFormatError(f"a label is at most {MAX_LABEL} plain characters")
    return raw.decode()


def read_samples(source: ByteSource) -> tuple[Contents, NDArray[Any]]:
    """All samples of a shard of any form, now or earlier made, with what it says of them.

    Returns:
        The contents, and an array of ``(contents.count, *contents.shape)`` of the form's type; uint8 of PNG.
    Raises:
        ArtifactFormatError: see :func:`check_kept_shard`.
    """
    samples: list[NDArray[Any] | bytes] = []

    def take(sample: Window) -> None:
        picture = sample.read(0, 4) == b"\x89PNG"
        samples.append(read_kept_png(sample) if picture else sample.read(0, sample.size))

    contents = check_kept_shard(source, take)
    return contents, np.stack([_values(one, contents) for one in samples])


def _values(sample: NDArray[Any] | bytes, contents: Contents) -> NDArray[Any]:
    """The values of a sample. They stand at the end of a file of NIfTI; of DICOM, padded to an even length."""
    if not isinstance(sample, bytes):
        return sample
    name, _, dtype = contents.form.partition("-")
    kind = np.dtype(dtype).newbyteorder("<")
    size = math.prod(contents.shape) * kind.itemsize
    end = len(sample) - (size % 2 if name == "dicom" else 0)
    values = np.frombuffer(sample[end - size : end], kind).astype(dtype)
    return values.reshape(contents.shape, order="F" if name == "nifti" else "C")


def read_images(source: ByteSource) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """All images of a shard of PNG, (n, h, w) grey or (n, h, w, 3) RGB, and their labels, now or earlier made.

    Raises:
        ArtifactFormatError: see :func:`check_kept_shard`; or other samples.
    """
    contents, images = read_samples(source)
    if not contents.form.startswith("png"):
        raise ArtifactFormatError("the set holds other samples than 8-bit images")
    return images, contents.labels
