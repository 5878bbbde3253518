"""What was done to each attribute, and why: values never appear, so a trace can be shown to the site's staff."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, get_args

Action = Literal["kept", "replaced", "emptied", "shifted", "rekeyed", "cleaned", "removed", "blanked"]
ACTIONS: Final = frozenset(get_args(Action))
# why -> a sentence for people; a closed list, so that nothing of a file can be in a reason
WHY: Final = MappingProxyType(
    {
        "listed": "on the list of what an image needs: a number, a defined term, a coded concept, a sequence",
        "profile": "PS3.15 Table E.1-1, Basic Profile",
        "retain_longitudinal": "Retain Longitudinal Temporal Information Modified Dates Option",
        "retain_device": "Retain Device Identity Option",
        "retain_patient": "Retain Patient Characteristics Option",
        "retain_safe_private": "Retain Safe Private Option",
        "clean_descriptors": "Clean Descriptors Option",
        "clean_structured": "Clean Structured Content Option",
        "clean_pixels": "Clean Pixel Data Option",
        "private": "private attribute",
        "unknown": "not in the dictionary, or of unknown VR",
        "group": "curve, overlay, padding, signature or retired group",
        "not_listed": "listed nowhere: default deny",
        "no_code": "its code is not one of the standard's coded concepts",
        "no_product": "its value is not a known maker, product or version",
        "no_word": "none of its words is on the list of technical words",
        "empty": "nothing was left in it",
        "not_vouched": "a claim about the pixels that nobody here vouches for",
        "no_term": "its value is not one of the defined terms",
        "no_number": "its value is not a finite number, or larger than its attribute's can be",
        "unreadable": "its value cannot be understood",
        "stamp": "says who the patient is now, and how that was done",
        "preamble": "the 128 bytes before the file, always zero",
        "file_meta": "file meta information, made new",
        "trailing": "bytes after the data set or the pixel data",
    }
)
_PATH: Final = re.compile(
    r"(?:[0-9A-F]{4},[0-9A-F]{4}\[\d{1,6}\]/){0,32}"
    r"(?:[0-9A-F]{4},[0-9A-F]{4}(?:\[\d{1,6}\])?|preamble|file_meta|trailing|pixels)"
)


@dataclass(frozen=True, slots=True)
class AttributeAction:
    """One attribute's fate."""

    path: str  # "0010,0010", or of an item "0040,A730[0]", below it "0040,A730[0]/0010,0010"
    action: Action
    why: str  # a key of WHY

    def __post_init__(self) -> None:
        """Refuse what is not from the closed lists: this also checks what the reader sent."""
        if self.action not in ACTIONS or self.why not in WHY or not _PATH.fullmatch(self.path):
            raise ValueError("not a step of de-identification")


# a series has the same few hundred steps in each of its instances
step = lru_cache(maxsize=1 << 15)(AttributeAction)


def dumps(trace: Iterable[AttributeAction]) -> bytes:
    """A trace as bytes, for a pipe: JSON rows of path, action and why."""
    return json.dumps([(s.path, s.action, s.why) for s in trace], separators=(",", ":")).encode()


def loads(data: bytes) -> tuple[AttributeAction, ...]:
    """The trace in ``dumps``'s bytes, each step checked.

    Raises:
        ValueError: not a trace.
    """
    rows = json.loads(data)
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 3 for r in rows):
        raise ValueError("not a trace")
    return tuple(step(*(str(part) for part in row)) for row in rows)
