"""DIMSE messages on the wire: command sets, responses, presentation data values, the head of a DICOM file.

A command set is a dozen elements in one fixed encoding. pynetdicom's codec parses it as a data set, with all that a
parser of data sets may do, and takes a third of a millisecond: as much as everything else about an instance.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agent.pacs.dimse.acceptor import IMPLEMENTATION, VERSION
from agent.pacs.dimse.pdu import DATA, MALFORMED, AssociationEnded

UID: Final = re.compile(r"(?=.{1,64}$)(?:0|[1-9][0-9]*)(?:\.(?:0|[1-9][0-9]*))+")  # PS3.5 section 9.1
_NO_DATA: Final = 0x0101


@dataclass(frozen=True, slots=True)
class Command:
    """A request as its command set says it (PS3.7 section 9.3)."""

    operation: int
    message: int
    has_data: bool
    sop_class: str
    sop_instance: str


def read_fields(data: bytes) -> dict[int, bytes]:
    """The elements of a command set (PS3.7 section 6.3.1) by element number.

    Raises:
        AssociationEnded: it is none.
    """
    found: dict[int, bytes] = {}
    offset, last = 0, -1
    while offset < len(data):
        if offset + 8 > len(data):
            raise AssociationEnded("malformed", MALFORMED)
        group, element, length = struct.unpack_from("<HHI", data, offset)
        offset += 8
        if group != 0 or element <= last or length > len(data) - offset:
            raise AssociationEnded("malformed", MALFORMED)
        found[element] = data[offset : offset + length]
        offset, last = offset + length, element
    return found


def read_command(data: bytes) -> Command:
    """Parse a command set: Implicit VR Little Endian, group 0000, tags ascending (PS3.7 section 6.3.1).

    Raises:
        AssociationEnded: it is none.
    """
    found = read_fields(data)
    numbers = [found.get(element, b"") for element in (0x0100, 0x0110, 0x0800)]
    if any(len(number) != 2 for number in numbers):
        raise AssociationEnded("malformed", MALFORMED)
    operation, message, data_set = (int.from_bytes(number, "little") for number in numbers)
    sop_class, instance = (found.get(e, b"").decode("latin-1").removesuffix("\0") for e in (0x0002, 0x1000))
    return Command(operation, message, data_set != _NO_DATA, sop_class, instance)


def response(context: int, command: Command, status: int) -> bytes:
    """A whole P-DATA-TF with the response to a request. What is no UID is not repeated.

    Args:
        context: id of the presentation context.
        command: the request.
        status: of PS3.7 annex C or PS3.4 table B.2-1.
    """

    def element(number: int, value: bytes) -> bytes:
        return struct.pack("<HHI", 0, number, len(value)) + value

    def uid(number: int, value: str) -> bytes:
        return element(number, _padded(value)) if UID.fullmatch(value) else b""

    body = uid(0x0002, command.sop_class) + b"".join(
        element(number, struct.pack("<H", value))
        for number, value in (
            (0x0100, command.operation | 0x8000),
            (0x0120, command.message),
            (0x0800, _NO_DATA),
            (0x0900, status),
        )
    )
    body += uid(0x1000, command.sop_instance)
    body = element(0x0000, struct.pack("<I", len(body))) + body
    return struct.pack(">BBIIBB", DATA, 0, len(body) + 6, len(body) + 2, context, 3) + body


def _padded(uid: str) -> bytes:
    return uid.encode() + b"\0" * (len(uid) % 2)


def file_head(command: Command, transfer_syntax: str, calling: str) -> bytes:
    """What stands before the data set in a DICOM file: zero preamble, prefix, file meta (PS3.10 section 7.1)."""

    def short(element: int, vr: bytes, value: bytes) -> bytes:
        return struct.pack("<HH2sH", 2, element, vr, len(value)) + value

    title = calling.encode()
    version = VERSION.encode()
    meta = b"".join(
        (
            struct.pack("<HH2sHI", 2, 1, b"OB", 0, 2) + b"\0\1",
            short(0x0002, b"UI", _padded(command.sop_class)),
            short(0x0003, b"UI", _padded(command.sop_instance)),
            short(0x0010, b"UI", _padded(transfer_syntax)),
            short(0x0012, b"UI", _padded(IMPLEMENTATION)),
            short(0x0013, b"SH", version + b" " * (len(version) % 2)),
            short(0x0016, b"AE", title + b" " * (len(title) % 2)),
        )
    )
    return bytes(128) + b"DICM" + short(0x0000, b"UL", struct.pack("<I", len(meta))) + meta


def data_values(unit: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The presentation data values of a P-DATA-TF: context, message control header, fragment (PS3.8 section 9.3.5).

    Raises:
        AssociationEnded: they do not fill the unit, or a header has unknown bits (PS3.8 annex E.2).
    """
    offset = 6
    while offset < len(unit) or offset == 6:
        if offset + 6 > len(unit):
            raise AssociationEnded("malformed", MALFORMED)
        length, context, control = struct.unpack_from(">IBB", unit, offset)
        end = offset + 4 + length
        if length < 2 or end > len(unit) or control & ~3:
            raise AssociationEnded("malformed", MALFORMED)
        yield context, control, unit[offset + 6 : end]
        offset = end
