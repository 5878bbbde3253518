"""A raw look at the bytes of a DICOM file before a parser sees them.

A parser that recurses or trusts lengths can be hung by 20 KB. This scan walks tags and lengths (PS3.5
section 7) with an explicit stack, builds nothing, and bounds depth, number of elements and every length.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from typing import Final

from pydicom.datadict import dictionary_has_tag, dictionary_VR

from agent.deidentify.errors import FileRejectedError

MAX_DEPTH: Final = 16
MAX_ELEMENTS: Final = 100_000
UNDEFINED: Final = 0xFFFFFFFF
IMPLICIT_LE: Final = "1.2.840.10008.1.2"
EXPLICIT_LE: Final = "1.2.840.10008.1.2.1"
EXPLICIT_BE: Final = "1.2.840.10008.1.2.2"
DEFLATED_LE: Final = "1.2.840.10008.1.2.1.99"

_LONG: Final = frozenset({b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"})
_SHORT: Final = frozenset(
    {b"AE", b"AS", b"AT", b"CS", b"DA", b"DS", b"DT", b"FD", b"FL", b"IS", b"LO", b"LT"}
    | {b"PN", b"SH", b"SL", b"SS", b"ST", b"TM", b"UI", b"UL", b"US"}
)
_PIXEL_DATA: Final = (0x7FE0, 0x0010)
_MEDIA_CLASS, _MEDIA_INSTANCE, _TRANSFER_SYNTAX = 0x0002, 0x0003, 0x0010  # elements of group 0002
_CHUNK: Final = 1 << 20
_RAW_DEFLATE: Final = -15  # zlib's name for a stream without header (RFC 1951)
_PREAMBLE: Final = 128


@dataclass(frozen=True, slots=True)
class Meta:
    """The file meta information, and where the data set starts."""

    transfer_syntax: str  # "" when absent
    media_class: str  # Media Storage SOP Class UID, "" when absent
    offset: int  # bytes from the start of the file
    media_instance: str = ""  # Media Storage SOP Instance UID, "" when absent
    preamble: bool = False  # something stands in the 128 bytes before the mark: another format's header, perhaps


@dataclass(frozen=True, slots=True)
class _Frame:
    end: int  # byte after the last one
    open_ended: bool  # undefined length: closed by a delimiter
    explicit: bool
    holds_items: bool  # a sequence, not a data set


@dataclass(frozen=True, slots=True)
class _Head:
    tag: tuple[int, int]
    vr: bytes  # b"" in implicit VR
    length: int
    body: int  # where the value starts


def read_meta(data: bytes) -> Meta:
    """Read group 0002 (PS3.10 section 7.1), always Explicit VR Little Endian.

    Raises:
        FileRejectedError: ``not_dicom`` without the DICM mark; ``truncated``, ``malformed``.
    """
    if data[128:132] != b"DICM":
        raise FileRejectedError("not_dicom")
    position, found = 132, {_MEDIA_CLASS: "", _MEDIA_INSTANCE: "", _TRANSFER_SYNTAX: ""}
    for _ in range(64):
        if position + 8 > len(data) or data[position : position + 2] != b"\x02\x00":
            occupied = any(data[:_PREAMBLE])
            return Meta(found[_TRANSFER_SYNTAX], found[_MEDIA_CLASS], position, found[_MEDIA_INSTANCE], occupied)
        head = _head(data, position, explicit=True, order="<")
        if head.body + head.length > len(data):
            raise FileRejectedError("truncated")
        if head.tag[1] in found:
            value = data[head.body : head.body + min(head.length, 128)]
            found[head.tag[1]] = value.decode("ascii", "replace").strip("\0 ")
        position = head.body + head.length
    raise FileRejectedError("malformed")


def inflate(data: bytes, wbits: int, max_bytes: int) -> bytes:
    """Undo DEFLATE, never making more than ``max_bytes``; what does not fit is counted, not kept.

    Args:
        wbits: zlib's name for the container, 31 for gzip.
    Raises:
        FileRejectedError: ``too_large``, ``truncated``, ``malformed``.
    """
    machine, rest, total = zlib.decompressobj(wbits=wbits), data, 0
    try:
        while not machine.eof:
            part = machine.decompress(rest, _CHUNK)
            rest = machine.unconsumed_tail
            total += len(part)
            if total > max_bytes:
                raise FileRejectedError("too_large")
            if not part and not machine.eof:
                raise FileRejectedError("truncated")
        # the second time, into one buffer of the known size: a list of chunks would need twice the memory
        return zlib.decompress(data[: len(data) - len(machine.unused_data)], wbits, max(total, 1))
    except zlib.error:
        raise FileRejectedError("malformed") from None


def undeflate(data: bytes, meta: Meta, max_bytes: int) -> tuple[bytes, Meta]:
    """A file in Deflated Explicit VR Little Endian (PS3.5 A.5) as one in Explicit VR Little Endian.

    The file meta information is not carried over: ``meta`` has what is needed of it.

    Raises:
        FileRejectedError: ``too_large``, ``truncated``, ``malformed``.
    """
    syntax = EXPLICIT_LE.encode().ljust(20, b"\0")
    head = b"\0" * _PREAMBLE + b"DICM" + b"\x02\0\x10\0UI" + struct.pack("<H", len(syntax)) + syntax
    body = inflate(data[meta.offset :], _RAW_DEFLATE, max_bytes)
    return head + body, replace(meta, transfer_syntax=EXPLICIT_LE, offset=len(head))


def _head(data: bytes, position: int, *, explicit: bool, order: str) -> _Head:
    """One element's tag, VR and length at ``position``."""
    if position + 8 > len(data):
        raise FileRejectedError("truncated")
    group, element = struct.unpack_from(order + "HH", data, position)
    if group == 0xFFFE or not explicit:
        (length,) = struct.unpack_from(order + "I", data, position + 4)
        return _Head((group, element), b"", length, position + 8)
    vr = data[position + 4 : position + 6]
    if vr in _SHORT:
        (length,) = struct.unpack_from(order + "H", data, position + 6)
        return _Head((group, element), vr, length, position + 8)
    if vr not in _LONG:
        raise FileRejectedError("malformed")
    if position + 12 > len(data):
        raise FileRejectedError("truncated")
    (length,) = struct.unpack_from(order + "I", data, position + 8)
    return _Head((group, element), vr, length, position + 12)


def _is_sequence(head: _Head) -> bool:
    if head.vr:
        return head.vr == b"SQ"
    tag = head.tag[0] << 16 | head.tag[1]
    return dictionary_has_tag(tag) and dictionary_VR(tag) == "SQ"


def _fragments(data: bytes, position: int, end: int, order: str) -> int:
    """Skip the fragments of encapsulated pixel data (PS3.5 A.4); the position after their delimiter."""
    for _ in range(MAX_ELEMENTS):
        head = _head(data, position, explicit=True, order=order)
        if head.tag == (0xFFFE, 0xE0DD):
            return head.body
        if head.tag != (0xFFFE, 0xE000):
            raise FileRejectedError("malformed")
        position = head.body + head.length
        if position > end:
            raise FileRejectedError("truncated")
    raise FileRejectedError("too_deep")


def scan(data: bytes, offset: int, transfer_syntax: str) -> int:
    """Walk the data set that starts at ``offset``; the number of its elements, nested ones and items counted.

    Raises:
        FileRejectedError: ``truncated`` (a length beyond the end), ``too_deep`` (depth or count), ``malformed``.
    """
    order = ">" if transfer_syntax == EXPLICIT_BE else "<"
    if transfer_syntax == IMPLICIT_LE and data[offset + 4 : offset + 6].isalpha():
        raise FileRejectedError(
            "malformed"
        )  # explicit after all: pydicom would read it so, and not what is scanned here
    stack = [_Frame(len(data), False, transfer_syntax != IMPLICIT_LE, False)]
    position, count = offset, 0
    while True:
        frame = stack[-1]
        if position >= frame.end:
            if position > frame.end:
                raise FileRejectedError("malformed")
            if frame.open_ended:
                raise FileRejectedError("truncated")
            stack.pop()
            if not stack:
                return count
            continue
        head = _head(data, position, explicit=frame.explicit, order=order)
        count += 1
        if count > MAX_ELEMENTS:
            raise FileRejectedError("too_deep")
        position = _step(data, head, stack, order)
        if len(stack) > 2 * MAX_DEPTH + 1:  # a sequence and its item are one level
            raise FileRejectedError("too_deep")


def _step(data: bytes, head: _Head, stack: list[_Frame], order: str) -> int:
    """Enter, leave or skip one element; the next position."""
    frame = stack[-1]
    if head.tag[0] == 0xFFFE and head.tag[1] != 0xE000:
        closes = 0xE0DD if frame.holds_items else 0xE00D
        if not frame.open_ended or head.tag[1] != closes or head.length:
            raise FileRejectedError("malformed")
        stack.pop()
        return head.body
    if (head.tag == (0xFFFE, 0xE000)) is not frame.holds_items:
        raise FileRejectedError("malformed")
    if head.length == UNDEFINED and head.tag == _PIXEL_DATA:
        return _fragments(data, head.body, frame.end, order)
    open_ended = head.length == UNDEFINED
    end = frame.end if open_ended else head.body + head.length
    if end > len(data):
        raise FileRejectedError("truncated")
    if end > frame.end:
        raise FileRejectedError("malformed")
    # Undefined length makes a sequence whatever the VR; in UN its items are implicit (PS3.5 6.2.2).
    if frame.holds_items or open_ended or _is_sequence(head):
        explicit = frame.explicit and head.vr != b"UN"
        stack.append(_Frame(end, open_ended, explicit, not frame.holds_items))
        return head.body
    return end
