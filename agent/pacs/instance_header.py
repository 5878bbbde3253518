"""Which instance a DICOM file says it is: a bounded look at its first elements, before anything may parse it.

The listeners hold unchecked files, and must name them to the sender. No parser is used: a few lengths are followed,
nothing is built, nothing is decoded. No later step trusts the result.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import EXPLICIT_BE, IMPLICIT_LE, UNDEFINED, read_meta

UID: Final = re.compile(r"[0-9]+(?:\.[0-9]+)*")  # PS3.5 section 9.1, leading zeros let pass
_MOST_STEPS: Final = 4096  # elements and items looked at
_LONG: Final = frozenset({b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"})
_CLASS, _INSTANCE = 0x00020002, 0x00020003  # Media Storage SOP Class and Instance UID
_STUDY: Final = 0x0020000D
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD


@dataclass(frozen=True, slots=True)
class Instance:
    """A file's meta information (PS3.10 section 7.1)."""

    sop_class: str
    sop_instance: str
    transfer_syntax: str  # "" when absent
    offset: int  # of the data set


@dataclass(frozen=True, slots=True)
class _Element:
    tag: int
    vr: bytes  # b"" in implicit VR, and for items
    length: int
    body: int


def is_uid(text: str) -> bool:
    """Does a text have the form of a UID?"""
    return len(text) <= 64 and UID.fullmatch(text) is not None


def instance_of(data: bytes) -> Instance:
    """Read group 0002.

    Raises:
        FileRejectedError: ``not_dicom``, ``truncated``, ``malformed``; ``incomplete`` when it does not say which
        instance.
    """
    meta = read_meta(data)
    found = {_CLASS: "", _INSTANCE: ""}
    position = 132
    while position < meta.offset:
        element = _element(data, position, explicit=True, order="<")
        if element.tag in found:
            found[element.tag] = _text(data, element)
        position = element.body + element.length
    if not all(is_uid(uid) for uid in found.values()):
        raise FileRejectedError("incomplete")
    return Instance(found[_CLASS], found[_INSTANCE], meta.transfer_syntax, meta.offset)


def study_of(data: bytes, instance: Instance) -> str:
    """The Study Instance UID of the data set, "" when a short look does not find it."""
    explicit = instance.transfer_syntax != IMPLICIT_LE
    order = ">" if instance.transfer_syntax == EXPLICIT_BE else "<"
    position, depth = instance.offset, 0
    try:
        for _ in range(_MOST_STEPS):
            element = _element(data, position, explicit=explicit, order=order)
            if depth == 0 and element.tag >= _STUDY:
                return _text(data, element) if element.tag == _STUDY else ""
            if element.length == UNDEFINED:
                if element.vr == b"UN":  # its items are written otherwise than the rest (PS3.5 section 6.2.2)
                    return ""
                depth, position = depth + 1, element.body
            elif element.tag in (_ITEM_END, _SEQUENCE_END):
                depth, position = depth - 1, element.body
            else:
                position = element.body + element.length
    except FileRejectedError:
        pass
    return ""


def _element(data: bytes, position: int, *, explicit: bool, order: str) -> _Element:
    try:
        group, number = struct.unpack_from(order + "HH", data, position)
        tag, vr, at, size = group << 16 | number, b"", position + 4, "I"
        if group != 0xFFFE and explicit:
            vr = data[position + 4 : position + 6]
            at, size = (position + 8, "I") if vr in _LONG else (position + 6, "H")
        (length,) = struct.unpack_from(order + size, data, at)
        return _Element(tag, vr, length, at + struct.calcsize(order + size))
    except struct.error:
        raise FileRejectedError("truncated") from None


def _text(data: bytes, element: _Element) -> str:
    value = data[element.body : element.body + min(element.length, 66)]
    return value.decode("ascii", "replace").strip("\0 ")
