"""The strict safetensors profile: a file of tensors whose every byte but the values is known before it is read.

An approved :class:`Architecture` fixes names, types, shapes and the metadata, and so the header byte for byte, as
safetensors' own writer makes it (metadata, then tensors by falling alignment and by name; padded to 8 bytes). A file
is accepted if its header is exactly that one, its length follows from it, and every real number is finite. So
``save(load(x)) == x`` holds without a second parser: duplicate keys, other metadata, renamed or additional tensors,
holes, overlaps and trailing bytes are impossible. A wrong header is parsed only to give the reason.

Safetensors allows texts of any length next to the tensors. In a file that leaves a site there is one text: the
canonical JSON of ``kind``, ``config`` and empty ``notes``. It belongs to the approved architecture and is compared
byte for byte, so it contains nothing that the operator has not read. The release's signed statement says how it was
made.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protos.artifacts.bfloat16 import is_finite
from protos.artifacts.byte_source import ArtifactFormatError, ByteSource, BytesSource, blocks
from protos.common.canonical_json import KeyTwiceError, distinct

# In the order of the format's own type list, which its writer uses for alignment; bytes for each element.
WIDTHS: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_RANK: Final = {name: i for i, name in enumerate(WIDTHS)}
_NUMPY: Final = {"BOOL": "?"} | {
    name: f"<{name[0].lower()}{size}" for name, size in WIDTHS.items() if name not in ("BOOL", "BF16")
}
_VIEWED: Final = {**_NUMPY, "BF16": "<u2"}
_DTYPES: Final = {np.dtype(code): name for name, code in _NUMPY.items()}
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,200}")
MAX_HEADER: Final = 1 << 22  # bytes
MAX_BYTES: Final = 1 << 40  # of all tensors
MAX_RANK: Final = 8
MAX_TENSORS: Final = 20_000
KEY: Final = "lazaret"  # of the one text, in the header's ``__metadata__``
MOST: Final = 16_384  # characters: a person is to read it
_KIND: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def canonical(told: object) -> str:
    """The text of a JSON value: sorted keys, no spaces, ASCII.

    Raises:
        ArtifactFormatError: it is no JSON, or a number in it is not finite.
    """
    try:
        return json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ArtifactFormatError("what the file says of itself is not JSON") from None


def check_told(text: str) -> None:
    """Refuse everything but a kind, a configuration and empty notes, in the one form.

    Raises:
        ArtifactFormatError: with the first reason found.
    """
    if type(text) is not str or len(text) > MOST:
        raise ArtifactFormatError(f"what a file says of itself has at most {MOST} characters")
    try:
        told: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ArtifactFormatError("what the file says of itself is not JSON") from None
    if not isinstance(told, dict) or set(told) != {"kind", "config", "notes"} or canonical(told) != text:
        raise ArtifactFormatError("a file says of itself its kind, its config and empty notes, in canonical JSON")
    if type(told["kind"]) is not str or not _KIND.fullmatch(told["kind"]) or not isinstance(told["config"], dict):
        raise ArtifactFormatError("a kind is a short word of lower-case letters, and a config an object")
    if told["notes"] != {}:
        raise ArtifactFormatError(
            "a network that leaves a site has no notes: how it was made stands in its statement"
        )


@dataclass(frozen=True, slots=True, order=True)
class Tensor:
    """Name, type (a key of :data:`WIDTHS`) and shape of one tensor; never empty.

    Raises:
        ArtifactFormatError: any of them is out of bounds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Only what safetensors can write, with names that JSON need not escape."""
        if type(self.name) is not str or not _NAME.fullmatch(self.name) or self.name == "__metadata__":
            raise ArtifactFormatError("a tensor's name is 1 to 200 of letters, digits and _.:/-")
        if type(self.dtype) is not str or self.dtype not in WIDTHS:
            raise ArtifactFormatError(f"a tensor's type is one of {', '.join(WIDTHS)}")
        if len(self.shape) > MAX_RANK or not all(type(n) is int and 1 <= n <= MAX_BYTES for n in self.shape):
            raise ArtifactFormatError("a tensor's shape is at most 8 numbers of 1 or more")

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return WIDTHS[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a model's file must hold: these tensors and nothing else, sorted by name.

    Raises:
        ArtifactFormatError: no tensor, too many, two of one name, or too large; or what it says of itself has another
        form.
    """

    tensors: tuple[Tensor, ...]
    told: str = ""  # what the file says of itself; "": no metadata at all

    def __post_init__(self) -> None:
        """Check what the tensors are together."""
        names = [t.name for t in self.tensors]
        if not names or len(names) > MAX_TENSORS or names != sorted(set(names)):
            raise ArtifactFormatError("an architecture has 1 to 20000 tensors, sorted by name, each once")
        if not self.nbytes <= MAX_BYTES:
            raise ArtifactFormatError("an architecture has at most 2^40 bytes")
        if self.told:
            check_told(self.told)

    @staticmethod
    def of(tensors: Mapping[str, tuple[str, tuple[int, ...]]], told: str = "") -> Architecture:
        """From name -> (type, shape)."""
        return Architecture(tuple(sorted(Tensor(name, *tensor) for name, tensor in tensors.items())), told)

    @staticmethod
    def shown_by(source: ByteSource) -> Architecture:
        """The architecture that a file's header shows; whether it is in its one form is :func:`check_weights`'.

        Raises:
            ArtifactFormatError: the header is not one of plain tensors, or has other metadata.
        """
        head = _head(source)[8:]
        try:
            listed = json.loads(head, object_pairs_hook=distinct)
            metadata = listed.pop("__metadata__", None)
            shaped = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in listed.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ArtifactFormatError("the header is not one of plain tensors") from None
        if metadata is None:
            return Architecture.of(shaped)
        if not isinstance(metadata, dict) or set(metadata) != {KEY}:
            raise ArtifactFormatError(f"of metadata the header may carry the one text {KEY!r}")
        check_told(metadata[KEY])
        return Architecture.of(shaped, metadata[KEY])

    @staticmethod
    def parse(raw: bytes | str) -> Architecture:
        """From :meth:`encode`'s JSON, in that form alone.

        Raises:
            ArtifactFormatError: anything else.
        """
        try:
            value = json.loads(raw)
            shaped = {name: (dtype, tuple(shape)) for name, (dtype, shape) in value["tensors"].items()}
            found = Architecture.of(shaped, canonical(value["told"]) if "told" in value else "")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ArtifactFormatError("not an architecture") from None
        if found.encode() != (raw.encode() if isinstance(raw, str) else raw):
            raise ArtifactFormatError("the architecture is not in its canonical form")
        return found

    def encode(self) -> bytes:
        """Canonical JSON: ``{"tensors":{name:[dtype,[shape]],...},"told":{...}}``, the latter where there is any."""
        listed = {t.name: [t.dtype, list(t.shape)] for t in self.tensors}
        told = {"told": json.loads(self.told)} if self.told else {}
        return canonical({"tensors": listed, **told}).encode()

    def digest(self) -> str:
        """SHA-256 of :meth:`encode`, hexadecimal: what an approval or a statement names."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(t.nbytes for t in self.tensors)

    def placed(self) -> tuple[tuple[Tensor, int], ...]:
        """The tensors in the order of the file, each with the offset of its first byte behind the header."""
        found, offset = [], 0
        for tensor in sorted(self.tensors, key=lambda t: (-_RANK[t.dtype], t.name)):
            found.append((tensor, offset))
            offset += tensor.nbytes
        return tuple(found)

    def header(self) -> bytes:
        """The head of the file, with its length in front, as safetensors' writer makes it."""
        listed = {
            t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
            for t, at in self.placed()
        }
        metadata = {"__metadata__": {KEY: self.told}} if self.told else {}
        text = json.dumps({**metadata, **listed}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def vector_architecture(size: int, name: str = "flat", dtype: str = "F32") -> Architecture:
    """One tensor with one axis."""
    return Architecture.of({name: (dtype, (size,))})


def vector_bytes(size: int, name: str = "flat", dtype: str = "F32") -> int:
    """How many bytes the file of one tensor with one axis has."""
    return len(vector_architecture(size, name, dtype).header()) + size * WIDTHS[dtype]


def check_weights(source: ByteSource, architecture: Architecture) -> None:
    """Refuse everything but finite values for this architecture, in the one form; 4 MiB are held at once.

    Raises:
        ArtifactFormatError: with the first reason found.
    """
    expected = architecture.header()
    if _head(source) != expected:
        raise ArtifactFormatError(_difference(_head(source)[8:], architecture))
    surplus = source.size - len(expected) - architecture.nbytes
    if surplus:
        raise ArtifactFormatError("bytes follow the last tensor" if surplus > 0 else "the file ends early")
    for tensor, at in architecture.placed():
        start = len(expected) + at
        for block in blocks(source, start, start + tensor.nbytes):
            _check_values(block, tensor.dtype)


def check_vector(source: ByteSource, size: int | None = None) -> int:
    """Refuse everything but one finite float32 vector named ``flat``; returns its length p.

    Raises:
        ArtifactFormatError: with the first reason found; also when ``size`` is given and p is another.
    """
    return check_numbers(source, size, ("F32",))[1]


def check_numbers(
    source: ByteSource, size: int | None = None, dtypes: tuple[str, ...] = ("F32", "BF16")
) -> tuple[str, int]:
    """The same for an update, whose numbers may be bfloat16; returns their type, "F32" or "BF16", and the length.

    Raises:
        ArtifactFormatError: see :func:`check_vector`.
    """
    return _check_single(source, "flat", dtypes, size)


def check_ring(source: ByteSource, size: int | None = None) -> tuple[str, int]:
    """Refuse everything but one vector named ``ring`` of uint32 or uint64; returns ("U32" or "U64", length).

    A masked update (Bonawitz et al. 2017) is uniform over the ring, so that every value is admitted.

    Raises:
        ArtifactFormatError: with the first reason found; also when ``size`` is given and the length is another.
    """
    return _check_single(source, "ring", ("U32", "U64"), size)


def pack_weights(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name as a file of their architecture; types as in :data:`WIDTHS`, without BF16.

    Raises:
        ArtifactFormatError: a name, a type or a shape is out of bounds, or a value is not finite.
    """
    shaped: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, array in tensors.items():
        if array.dtype.newbyteorder("<") not in _DTYPES:
            raise ArtifactFormatError("no such type of tensor")
        shaped[name] = (_DTYPES[array.dtype.newbyteorder("<")], array.shape)
    architecture = Architecture.of(shaped)
    parts = [np.ascontiguousarray(tensors[t.name], _NUMPY[t.dtype]) for t, _ in architecture.placed()]
    # an array of one element at least lends its bytes: a large one is copied once, into the file
    raw = b"".join([architecture.header(), *(part.reshape(-1).view(np.uint8).data for part in parts)])
    check_weights(BytesSource(raw), architecture)
    return raw


def unpack_weights(raw: bytes, architecture: Architecture) -> dict[str, NDArray[Any]]:
    """The arrays of :func:`pack_weights`, read-only views of ``raw``; BF16 as its uint16 bit patterns.

    Raises:
        ArtifactFormatError: see :func:`check_weights`.
    """
    check_weights(BytesSource(raw), architecture)
    start = len(architecture.header())
    return {
        t.name: np.frombuffer(raw, _VIEWED[t.dtype], math.prod(t.shape), start + at).reshape(t.shape)
        for t, at in architecture.placed()
    }


def pack_numbers(numbers: NDArray[np.float32] | NDArray[np.uint16]) -> bytes:
    """(p,) float32, or the bits of bfloat16, as the one tensor ``flat``; copied once, into the file.

    Raises:
        ArtifactFormatError: p = 0, or a value is not finite.
    """
    return b"".join(parts_of_numbers(numbers))


def parts_of_numbers(numbers: NDArray[np.float32] | NDArray[np.uint16]) -> tuple[bytes, memoryview]:
    """The file of :func:`pack_numbers` in two parts: what stands before the numbers, and these where they lie.

    Raises:
        ArtifactFormatError: p = 0, or a value is not finite.
    """
    dtype = "BF16" if numbers.dtype == np.uint16 else "F32"
    architecture = vector_architecture(numbers.size, dtype=dtype)
    plain = np.ascontiguousarray(numbers, _VIEWED[dtype])
    if not is_finite(plain):
        raise ArtifactFormatError("a value is not finite")
    return architecture.header(), plain.view(np.uint8).data


def view_of_vector(raw: bytes, dtype: str, size: int) -> NDArray[Any]:
    """The numbers of a file that was checked, read-only and not copied; BF16 as its bits."""
    return np.frombuffer(raw, _VIEWED[dtype], size, len(raw) - size * WIDTHS[dtype])


def pack_ring(vector: NDArray[np.uint32] | NDArray[np.uint64]) -> bytes:
    """A (p,) vector of uint32 or uint64 as the one tensor ``ring``.

    Raises:
        ArtifactFormatError: another type or shape, or p = 0.
    """
    if vector.ndim != 1 or vector.dtype not in (np.uint32, np.uint64):
        raise ArtifactFormatError("a ring vector is one axis of uint32 or uint64")
    return pack_weights({"ring": vector})


def unpack_ring(raw: bytes) -> NDArray[np.uint32] | NDArray[np.uint64]:
    """The (p,) vector of :func:`pack_ring`, a read-only view of ``raw``.

    Raises:
        ArtifactFormatError: see :func:`check_ring`.
    """
    return view_of_vector(raw, *check_ring(BytesSource(raw)))


def _check_single(source: ByteSource, name: str, dtypes: tuple[str, ...], size: int | None) -> tuple[str, int]:
    """The header of one vector follows from its type and the file's length."""
    head = _head(source)
    for dtype in dtypes:
        length, rest = divmod(source.size - len(head), WIDTHS[dtype])
        if rest or not 1 <= length <= MAX_BYTES // 8 or vector_architecture(length, name, dtype).header() != head:
            continue
        if size is not None and length != size:
            raise ArtifactFormatError(f"the vector must have {size} values, not {length}")
        check_weights(source, vector_architecture(length, name, dtype))
        return dtype, length
    raise ArtifactFormatError(
        f"the file must hold one vector named {name} of type {' or '.join(dtypes)}, and no more"
    )


def _head(source: ByteSource) -> bytes:
    length = int.from_bytes(source.read(0, 8), "little")
    if not 2 <= length <= MAX_HEADER:
        raise ArtifactFormatError("the header's length is out of bounds")
    return source.read(0, 8 + length)


def _check_values(block: bytes, dtype: str) -> None:
    """A real must be finite: the payload of a NaN is room for a message. A truth value must be 0 or 1."""
    if dtype == "BF16":
        bits = np.frombuffer(block, "<u2")
        sound = bool(((bits & 0x7F80) != 0x7F80).all())  # an exponent of ones: infinite, or not a number
    elif dtype == "BOOL":
        sound = bool((np.frombuffer(block, "<u1") <= 1).all())
    elif dtype.startswith("F"):
        sound = bool(np.isfinite(np.frombuffer(block, _NUMPY[dtype])).all())
    else:
        return
    if not sound:
        raise ArtifactFormatError("a value is not finite" if dtype != "BOOL" else "a truth value is neither 0 nor 1")


def _difference(text: bytes, architecture: Architecture) -> str:
    """Why a header is not this architecture's. Names come from the architecture, never from the file."""
    try:
        found = json.loads(text, object_pairs_hook=distinct)
    except KeyTwiceError:
        return "the header has a key twice"
    except (ValueError, RecursionError):
        return "the header is not JSON"
    if not isinstance(found, dict):
        return "the header is not a JSON object"
    metadata = found.pop("__metadata__", None)
    if metadata is not None and not architecture.told:
        return "the header carries metadata"
    if architecture.told and metadata != {KEY: architecture.told}:
        return "the file says of itself something else than what was approved: kind, config or notes"
    return _other_names(set(found), architecture) or _other_entry(found, architecture)


def _other_names(found: set[str], architecture: Architecture) -> str:
    known = {t.name for t in architecture.tensors}
    missing, extra = sorted(known - found), found - known
    if missing:
        return f"{len(missing)} tensors are missing, {missing[0]} first; {len(extra)} have other names"
    return f"{len(extra)} tensors more than the architecture has" if extra else ""


def _other_entry(found: dict[str, Any], architecture: Architecture) -> str:
    for tensor in architecture.tensors:
        entry = found[tensor.name]
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            return f"the entry of {tensor.name} is malformed"
        if entry["dtype"] != tensor.dtype:
            return f"{tensor.name} must have the type {tensor.dtype}"
        if entry["shape"] != list(tensor.shape):
            return f"{tensor.name} must have the shape {list(tensor.shape)}"
    for tensor, at in architecture.placed():
        if found[tensor.name]["data_offsets"] != [at, at + tensor.nbytes]:
            return f"{tensor.name} is out of place: an overlap, a hole, or another order"
    return "the header is not written in its one form"
