"""Attributes of a data set as plain values: absent, empty and many-valued ones are all said in one way."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Final

from pydicom import Dataset
from pydicom.charset import decode_bytes, python_encoding
from pydicom.valuerep import TEXT_VR_DELIMS

# an identifier is LO; SH is its short form, and UN what a system writes that does not know the attribute
_OF_IDENTIFIERS: Final = (None, "LO", "SH", "UN")
_ASCII_ONLY: Final = frozenset({"", "ISO_IR 6", "ISO 2022 IR 6"})
_EXTENDED: Final = "ISO 2022 "
_ESCAPE: Final = b"\x1b"
# not of the categories C*, and still nothing to see: Default_Ignorable_Code_Point (UAX 44), empty braille
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def text(dataset: Dataset, keyword: str) -> str:
    """An attribute as stripped text; ``""`` when absent, several values joined by a backslash.

    Of an attribute that came as UN only the bytes are known: they are text if they are ASCII, else ``""``.
    """
    value = dataset.get(keyword)
    if value is None:
        return ""
    if isinstance(value, bytes):
        value = value.decode("ascii") if value.isascii() else ""
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return "\\".join(str(v).strip("\0 ") for v in values)


def frames(dataset: Dataset) -> int:
    """Number of frames; 1 when the attribute is absent or empty."""
    return int(dataset.get("NumberOfFrames") or 1)


def numbers(dataset: Dataset, keyword: str) -> list[float]:
    """An attribute as numbers, empty when absent. Raises: ValueError, not a finite number."""
    value = dataset.get(keyword)
    values = [] if value is None or value == "" else [value] if not hasattr(value, "__iter__") else list(value)
    found = [float(v) for v in values]
    if not all(math.isfinite(v) for v in found):
        raise ValueError("not a finite number")
    return found


def identifier(dataset: Dataset, keyword: str) -> str:
    """An attribute that names somebody, decoded strictly; ``""`` when absent or empty.

    Ask before anything else reads the attribute: only then are its bytes still there. Afterwards pydicom's
    text is what there is, in which undecodable bytes are U+FFFD, and undeclared ones look like Latin-1.

    Raises:
        ValueError: a VR other than LO, SH or UN, or bytes that are not of the declared character set
            (PS3.5 section 6.1.2); without one, not ASCII.
    """
    if keyword not in dataset:
        return ""
    element = dataset.get_item(keyword)
    if element is None or element.VR not in _OF_IDENTIFIERS:
        raise ValueError("not an identifier")
    value, terms = element.value, text(dataset, "SpecificCharacterSet").split("\\")
    if isinstance(value, bytes):
        return _decoded(value, terms)
    value = value if isinstance(value, str) else text(dataset, keyword)
    if not value.isascii() and (_ASCII_ONLY.issuperset(terms) or not set(terms) <= set(python_encoding)):
        raise ValueError("not of the declared character set")
    return value


def _decoded(value: bytes, terms: list[str]) -> str:
    if value.isascii() and _ESCAPE not in value:
        return value.decode("ascii")  # the same in every character set that DICOM has
    if not set(terms) <= set(python_encoding):
        raise ValueError("not of the declared character set")
    extended = any(term.startswith(_EXTENDED) for term in terms)
    first, *escaped = value.split(_ESCAPE, 1)
    if (escaped and not extended) or (terms[0] in _ASCII_ONLY and not first.isascii()):
        raise ValueError("not of the declared character set")
    encodings = [python_encoding[term] for term in terms]
    return decode_bytes(value, encodings, TEXT_VR_DELIMS) if escaped else value.decode(encodings[0])


def plain(value: str) -> str:
    """One plain text without its padding of NULs and spaces at the end.

    Raises:
        ValueError: several values, a character that could not be decoded, or one that nobody sees
            (categories Cc, Cf, Cs, Co, Cn, and the default ignorables).
    """
    value = value.rstrip("\0 ")
    hidden = any(unicodedata.category(c).startswith("C") for c in value)
    if hidden or "\\" in value or "\ufffd" in value or _INVISIBLE.search(value):
        raise ValueError("not one plain text")
    return value
