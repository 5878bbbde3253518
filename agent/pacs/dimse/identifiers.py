"""Command sets and identifiers of queries on the wire: encode, and decode only the requested attributes of a
response.

Command sets are read by hand here, as in :mod:`agent.pacs.dimse.messages`: pynetdicom's codec parses them as data
sets, with all that a parser of data sets may do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from io import BytesIO

from pydicom.dataset import Dataset
from pydicom.filereader import read_dataset
from pydicom.tag import Tag

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import IMPLICIT_LE, scan
from agent.pacs.dimse.pdu import MALFORMED, AssociationEnded


def us_of(fields: Mapping[int, bytes], element: int) -> int:
    """A US of a command set; -1 when it is absent or no US."""
    value = fields.get(element, b"")
    return int.from_bytes(value, "little") if len(value) == 2 else -1


def write_fields(fields: Mapping[int, bytes]) -> bytes:
    """A command set with its group length."""
    body = b"".join(struct.pack("<HHI", 0, n, len(v)) + v for n, v in sorted(fields.items()))
    return struct.pack("<HHII", 0, 0, 4, len(body)) + body


def us(value: int) -> bytes:
    """A US value."""
    return struct.pack("<H", value)


def even(text: str, pad: bytes) -> bytes:
    """A text value, padded to even length (PS3.5 section 6.2)."""
    return text.encode() + pad * (len(text) % 2)


def read_match(raw: bytes, keywords: Iterable[str]) -> dict[str, str]:
    """The values of some elements of an identifier, "" for an absent one. Nothing else of it is looked at.

    Raises:
        AssociationEnded: it is no data set of Implicit VR Little Endian, or deeper than any.
    """
    tags = {keyword: Tag(keyword) for keyword in keywords}
    try:
        scan(raw, 0, IMPLICIT_LE)
        found = read_dataset(BytesIO(raw), True, True, specific_tags=list(tags.values()))
        values = {keyword: found.get_item(tag).value if tag in found else b"" for keyword, tag in tags.items()}
    except FileRejectedError:
        raise AssociationEnded("malformed", MALFORMED) from None
    except Exception:  # noqa: BLE001 - a parser of others' bytes raises anything, and its text quotes them
        raise AssociationEnded("malformed", MALFORMED) from None
    return {
        keyword: value.decode("utf-8", "replace").strip(" \0") if isinstance(value, bytes) else ""
        for keyword, value in values.items()
    }


def identifier(level: str, keys: Mapping[str, str]) -> Dataset:
    """The identifier of a query or retrieval (PS3.4 section C.4.1.1.3): its level and its keys."""
    asked = Dataset()
    if not all(value.isascii() for value in keys.values()):
        asked.SpecificCharacterSet = "ISO_IR 192"
    asked.QueryRetrieveLevel = level
    for keyword, value in keys.items():
        setattr(asked, keyword, value)
    return asked
