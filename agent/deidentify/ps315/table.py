"""DICOM PS3.15 Table E.1-1, edition 2026c: what the Basic Profile does with each listed attribute.

The rows are frozen data in ``ps315.json``, which names their source and carries its BSD licence. Codes
(PS3.15 section E.1.1): D a dummy value, Z a zero-length or dummy value, X removed, U a new UID; ``X/Z``
and the like leave the choice to the object's type, ``X/Z/U*`` is for sequences of references.

The columns of the options are frozen in ``ps315_options.json``: K keep, C clean. They come from another source,
whose 460 rows are of an edition older than 2024e. A row that is missing there has the Basic Profile's action and
no option, so that less is kept; for dates of the acquisition ``keep.DATES`` makes up for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

CODES: Final = frozenset({"D", "Z", "X", "U", "Z/D", "X/Z", "X/D", "X/Z/D", "X/Z/U*"})


@dataclass(frozen=True, slots=True)
class AttributeRow:
    """One attribute of the table."""

    action: str  # one of CODES
    name: str  # the attribute's name in the standard

    def __post_init__(self) -> None:
        """Refuse an action that the engine does not know."""
        if self.action not in CODES:
            raise ValueError(f"unknown action {self.action!r} in ps315.json")


@dataclass(frozen=True, slots=True)
class RepeatingRow:
    """A row for a repeating group: it covers every tag with ``tag & mask == value``."""

    value: int
    mask: int
    row: AttributeRow


def _load() -> tuple[str, Mapping[int, AttributeRow], tuple[RepeatingRow, ...]]:
    raw = json.loads(files("agent.deidentify.ps315").joinpath("ps315.json").read_text(encoding="utf-8"))
    single = {int(tag, 16): AttributeRow(action, name) for tag, (action, name) in raw["attributes"].items()}
    repeating = tuple(
        RepeatingRow(int(value, 16), int(mask, 16), AttributeRow(action, name))
        for value, mask, action, name in raw["repeating"]
    )
    return raw["edition"], MappingProxyType(single), repeating


EDITION, ATTRIBUTES, REPEATING = _load()

# our policy's name of an option -> the column's
_COLUMNS: Final = MappingProxyType(
    {
        "retain_longitudinal": "rtnLongModifDatesOpt",
        "retain_device": "rtnDevIdOpt",
        "retain_patient_characteristics": "rtnPatCharsOpt",
        "clean_descriptors": "cleanDescOpt",
        "clean_structured_content": "cleanStructContOpt",
    }
)


def _options() -> tuple[str, Mapping[str, Mapping[int, str]]]:
    raw = json.loads(files("agent.deidentify.ps315").joinpath("ps315_options.json").read_text(encoding="utf-8"))
    columns = {
        name: {int(tag, 16): action for tag, action in raw["options"][column].items() if not set(tag) & set("xX-")}
        for name, column in _COLUMNS.items()
    }
    if not all(set(column.values()) <= {"K", "C"} for column in columns.values()):
        raise ValueError("unknown action in ps315_options.json")
    return raw["edition"], MappingProxyType({k: MappingProxyType(v) for k, v in columns.items()})


OPTIONS_EDITION, OPTIONS = _options()


def row(tag: int) -> AttributeRow | None:
    """The table's row for one attribute, or None when the table does not list it."""
    found = ATTRIBUTES.get(tag)
    if found is not None:
        return found
    return next((r.row for r in REPEATING if tag & r.mask == r.value), None)
