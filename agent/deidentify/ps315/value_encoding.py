"""Values of attributes, checked and written again as the bytes of Explicit VR Little Endian (PS3.5 section 6.2).

Each function takes one element as pydicom holds it, parsed or not, and gives bytes that cannot be anything
but what they claim to be. Unparsed little-endian values are checked in place: parsing every one through
pydicom costs three times as much.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
from typing import Final

from pydicom import DataElement, Dataset
from pydicom.dataelem import RawDataElement
from pydicom.valuerep import format_number_as_ds

from agent.deidentify.ps315 import numeric_bounds
from agent.deidentify.ps315.numeric_bounds import NumericBound
from protos.common.errors import RefusedError

Element = DataElement | RawDataElement
UNREADABLE: Final = (
    ValueError,
    TypeError,
    OverflowError,
    KeyError,
    NotImplementedError,  # pydicom raises it for a VR that it cannot read
    AttributeError,
    struct.error,
)
_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")
_INTEGER: Final = re.compile(r"[+-]?\d{1,12}")
_PACKED: Final = {
    **{"US": "H", "SS": "h", "UL": "I", "SL": "i", "FL": "f", "FD": "d", "UV": "Q", "SV": "q", "AT": "HH"},
}
_DATE: Final = re.compile(r"(\d{8})((?:\d{2}){0,3}(?:\.\d{1,6})?)([+-]\d{4})?")
_MOST_FRACTION: Final = 3  # digits behind the seconds: milliseconds
_OLD_DATE: Final = re.compile(r"\d{4}\.\d{2}\.\d{2}")  # ACR-NEMA (PS3.5 section 6.2, note on DA)
# PS3.5 section 6.2: 60 is a leap second, and no place is further than 14 hours from UTC
_TIME: Final = re.compile(r"((?:[01]\d|2[0-3])(?:[0-5]\d(?:[0-5]\d|60)?)?)(?:(?<=\d{6})(\.\d{1,6}))?")
_ZONE: Final = re.compile(r"[+-](?:(?:0\d|1[0-3])[0-5]\d|1400)")
_AGE: Final = re.compile(r"(\d{3})([DWMY])")
_OLDEST: Final = 90  # years: who is older is rare enough to be known by it (45 CFR 164.514(b)(2)(i)(C))
_LETTERS: Final = re.compile(rb"[A-Za-z^ ]{8,}")


class NotOneOfError(RefusedError, ValueError):
    """The value can be read, and is not of the closed list that its attribute has. Carries no value."""


def padded(value: bytes, pad: bytes = b" ") -> bytes:
    """A value of even length (PS3.5 section 7.1.1)."""
    return value + pad if len(value) % 2 else value


def texts(source: Dataset, element: Element) -> list[str]:
    """The values of a text attribute, stripped. Without a character set: closed lists are ASCII."""
    value = element.value
    if isinstance(element, RawDataElement):
        if not value:
            return []
        return [v.strip("\0 ") for v in value.decode("latin-1").split("\\")]
    if value is None or value == "":
        return []
    values = [value] if isinstance(value, str | bytes) or not hasattr(value, "__iter__") else list(value)
    return [str(v).strip("\0 ") for v in values]


def decimals(source: Dataset, element: Element, bound: NumericBound) -> tuple[bytes, bool]:
    """Decimal strings, each a finite number within its bound, and whether one was rounded.

    A number's own writing stays unless it was rounded or is longer than DS may be.

    Raises:
        NotOneOfError: no number, out of range, or too many of them.
    """
    values = texts(source, element)
    if len(values) > bound.most:
        raise NotOneOfError
    parts: list[str] = []
    changed = False
    for value in values:
        if not value:
            parts.append(value)
            continue
        number = float(value) if _DECIMAL.fullmatch(value) else math.nan
        fitted = bound.fit(number)
        if not math.isfinite(fitted):
            raise NotOneOfError
        own = fitted == number and len(value) <= 16
        parts.append(value if own else format_number_as_ds(fitted))
        changed |= fitted != number
    return padded("\\".join(parts).encode("ascii")), changed


def integers(source: Dataset, element: Element, bound: NumericBound) -> tuple[bytes, bool]:
    """Integer strings within a bound, and whether one was rounded.

    What some devices write as decimals with nothing behind the point is admitted.

    Raises:
        NotOneOfError: no integer, out of range, or too many of them.
    """
    values = [v[:-2] if v.endswith(".0") else v for v in texts(source, element)]
    if len(values) > bound.most or not all(not v or _INTEGER.fullmatch(v) for v in values):
        raise NotOneOfError
    fitted = [_whole(int(v), bound) if v else None for v in values]
    changed = any(f is not None and f != int(v) for f, v in zip(fitted, values, strict=True))
    parts = [v if f is None or f == int(v) else str(f) for f, v in zip(fitted, values, strict=True)]
    return padded("\\".join(parts).encode("ascii")), changed


def _whole(value: int, bound: NumericBound) -> int:
    fitted = bound.fit(value)
    if not math.isfinite(fitted):
        raise NotOneOfError
    return int(fitted)


def packed(source: Dataset, element: Element, vr: str, bound: NumericBound) -> tuple[bytes, bool]:
    """Binary numbers within a bound, and whether one was rounded; AT values name attributes of the standard.

    Raises:
        NotOneOfError: not finite, out of range, too many, or letters.
    """
    code = "<" + _PACKED[vr]
    data = _as_it_is(element, vr)
    if data is None:
        data = _packed_again(source, element, vr)
    size = struct.calcsize(code)
    if len(data) % size or len(data) > bound.most * size or _LETTERS.search(data):
        raise NotOneOfError
    if vr == "AT":
        if not all(numeric_bounds.standard(group << 16 | number) for group, number in struct.iter_unpack(code, data)):
            raise NotOneOfError
        return data, False
    fitted = [_fitted(value, vr, bound) for (value,) in struct.iter_unpack(code, data)]
    written = struct.pack(f"<{len(fitted)}{code[1:]}", *fitted)
    return written, written != data


def _fitted(value: float, vr: str, bound: NumericBound) -> float:
    if vr not in ("FL", "FD"):
        return _whole(int(value), bound)
    fitted = bound.fit(value)
    if not math.isfinite(fitted):
        raise NotOneOfError
    # 24 bits have no more digits than a number may carry, and rounding decimals would only change them
    return value if vr == "FL" and not bound.cycle else fitted


def _packed_again(source: Dataset, element: Element, vr: str) -> bytes:
    """The values that pydicom has parsed, as little-endian bytes."""
    code = _PACKED[vr]
    values = source[element.tag].value
    listed = [] if values is None or values == "" else list(values) if _many(values) else [values]
    if vr == "AT":
        listed = [part for v in listed for part in (int(v) >> 16, int(v) & 0xFFFF)]
        code = "H"
    return struct.pack(f"<{len(listed)}{code}", *(float(v) if vr in ("FL", "FD") else int(v) for v in listed))


def _many(value: object) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes)


def _as_it_is(element: Element, vr: str) -> bytes | None:
    """The bytes of an element that is unparsed, little-endian and of the VR that the dictionary gives it."""
    if not isinstance(element, RawDataElement) or not element.is_little_endian:
        return None
    if element.VR not in (None, vr):
        return None
    value: bytes | None = element.value
    return value or b""


def lookup_table(source: Dataset, element: Element, descriptor: int) -> bytes:
    """The entries of a table (PS3.3 C.11.1.1), as many as the descriptor states; 0 means 65536."""
    stated = source[descriptor].value
    first = [int(v) for v in stated]
    value = source[element.tag].value
    packed_already = isinstance(value, bytes)
    entries = value if packed_already else b"".join((int(e) & 0xFFFF).to_bytes(2, "little") for e in value)
    wanted = 2 * (first[0] & 0xFFFF or 65536)
    if len(first) == 3 and len(entries) == wanted // 2 and first[2] == 8:
        return padded(entries, b"\0")  # one byte for each entry, as some devices write them
    if len(first) != 3 or not len(entries) >= wanted:
        raise NotOneOfError
    return entries[:wanted]


def shifted(value: str, days: int, *, times: bool = False) -> str:
    """A DICOM date or date-time moved by whole days; ``""`` for anything else.

    The time of day is dropped unless ``times``; moving days alone keeps it, and every interval, consistent.
    With ``times``, a time that no clock shows, or an offset that no place has, leaves nothing of the value.
    """
    match = _DATE.fullmatch(value.replace(".", "") if _OLD_DATE.fullmatch(value) else value)
    if match is None:
        return ""
    try:
        day = datetime.datetime.strptime(match[1], "%Y%m%d").replace(tzinfo=datetime.UTC)
        moved = (day + datetime.timedelta(days=days)).strftime("%Y%m%d").zfill(8)
    except (ValueError, OverflowError):
        return ""
    if not times:
        return moved
    time, zone = match[2] and _time(match[2]), match[3] or ""
    return "" if time is None or (zone and not _ZONE.fullmatch(zone)) else moved + time + zone


def _time(value: str) -> str | None:
    """A time of day with milliseconds at most; None for what no clock shows."""
    match = _TIME.fullmatch(value)
    return None if match is None else match[1] + (match[2] or "")[: 1 + _MOST_FRACTION]


def dates(source: Dataset, element: Element, days: int, *, times: bool) -> bytes:
    """All dates or date-times of an attribute, moved; what is none becomes empty."""
    values = texts(source, element)
    return padded("\\".join(shifted(v, days, times=times) for v in values).encode("ascii"))


def clock(source: Dataset, element: Element) -> bytes:
    """Times of day, or an offset from UTC, and nothing else."""
    values = texts(source, element)
    stays = [v if not v or _ZONE.fullmatch(v) else _time(v) for v in values]
    if None in stays:
        raise NotOneOfError
    return padded("\\".join(v or "" for v in stays).encode("ascii"))


def age(source: Dataset, element: Element) -> bytes:
    """An age string; 90 years and more become 90."""
    values = texts(source, element)
    match = _AGE.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        raise NotOneOfError
    old = match[2] == "Y" and not int(match[1]) < _OLDEST
    return f"{_OLDEST:03d}Y".encode() if old else values[0].encode("ascii")
