"""The Retain Safe Private Option (PS3.15 section E.3.10): numbers of a frozen list, known by their creator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from pydicom import Dataset
from pydicom.dataelem import RawDataElement
from pydicom.tag import BaseTag

from agent.deidentify.ps315 import value_encoding
from agent.deidentify.ps315.numeric_bounds import NumericBound


@dataclass(frozen=True, slots=True)
class SafeElement:
    """One safe element: its VR, and what its values may be."""

    vr: str
    bound: NumericBound


def _load() -> Mapping[tuple[str, int, int], SafeElement]:
    raw = json.loads(files("agent.deidentify.ps315").joinpath("safe_private.json").read_text(encoding="utf-8"))
    found = {}
    for creator, groups in raw["elements"].items():
        for group, elements in groups.items():
            for low, (vr, least, greatest, most) in elements.items():
                cycle = raw["cycle"].get(creator, {}).get(group, {}).get(low, 0)
                bound = NumericBound(least, greatest, most=most, cycle=cycle)
                found[creator, int(group, 16), int(low, 16)] = SafeElement(vr, bound)
    return MappingProxyType(found)


SAFE: Final = _load()
_CREATORS: Final = MappingProxyType({creator: creator.upper() for creator, _, _ in SAFE})


def safe(source: Dataset, tag: BaseTag) -> tuple[RawDataElement, bool] | None:
    """A safe private number within its bound, or the creator's name of a block that has one; None for the rest.

    Returns:
        The element, and whether a value of it was rounded.

    Raises:
        NotOneOfError, or what ``values.UNREADABLE`` lists: the value is not the number that the list says.
    """
    group, element = tag >> 16, tag & 0xFFFF
    if 0x10 <= element <= 0xFF:
        return _creator(source, tag)
    name = _name(source, BaseTag(group << 16 | element >> 8))
    known = SAFE.get((name, group, element & 0xFF))
    if known is None:
        return None
    given, vr, bound = source.get_item(tag), known.vr, known.bound
    if vr in ("DS", "IS"):
        value, rounded = (value_encoding.decimals if vr == "DS" else value_encoding.integers)(source, given, bound)
    elif isinstance(given, RawDataElement) and given.VR in (None, "UN") and given.is_little_endian:
        value, rounded = value_encoding.packed(source, given._replace(VR=vr), vr, bound)
    else:
        value, rounded = value_encoding.packed(source, given, vr, bound)
    return RawDataElement(tag, vr, len(value), value, 0, False, True), rounded


def _name(source: Dataset, tag: BaseTag) -> str:
    """A block's creator as the list spells it, or ``""``."""
    if tag not in source:
        return ""
    given = value_encoding.texts(source, source.get_item(tag))
    upper = given[0].upper() if len(given) == 1 else ""
    return next((creator for creator, known in _CREATORS.items() if known == upper), "")


def _creator(source: Dataset, tag: BaseTag) -> tuple[RawDataElement, bool] | None:
    name = _name(source, tag)
    group, block = tag >> 16, tag & 0xFF
    held = (t for t in source._dict if t >> 16 == group and (t & 0xFFFF) >> 8 == block)
    if not name or not any((name, group, t & 0xFF) in SAFE for t in held):
        return None
    value = value_encoding.padded(name.encode("ascii"))
    return RawDataElement(tag, "LO", len(value), value, 0, False, True), False
