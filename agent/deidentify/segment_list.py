"""The segments that a site lets in with masks, by the standard's codes: ``[[segment]]`` of ``ingest.toml``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from agent.deidentify.ps315 import retained_attributes

SEGMENTATION: Final = "1.2.840.10008.5.1.4.1.1.66.4"
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
# skin, face, head, head and neck, neck, entire body, body surface: their outline is what a face is recognised by
_OUTLINES: Final = frozenset(
    {"39937001", "181469002", "89545001", "302549007", "69536005", "774007", "45048000", "38266002", "43109005"}
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One kind of segment. A mask with another kind does not come in."""

    name: str  # by which tasks name it
    code: str  # Code Value of its Segmented Property Type, one of PS3.16, such as 10200004 (liver)
    scheme: str = "SCT"  # Coding Scheme Designator of the code

    def __post_init__(self) -> None:
        """A short name, a code of the standard, and no outline of a head."""
        if not _NAME.fullmatch(self.name):
            raise ValueError("a segment has a short name of a-z, 0-9, _ and -, which begins with a letter")
        if retained_attributes.concept(self.scheme, self.code) is None:
            raise ValueError("code: not one of the standard's coded concepts (PS3.16) in this scheme")
        if self.meant[1] in _OUTLINES:
            raise ValueError("code: the outline of a head shows its face")

    @property
    def meant(self) -> tuple[str, str]:
        """Scheme and value, SNOMED-RT by its successor."""
        return retained_attributes.current_code(self.scheme, self.code)

    @property
    def meaning(self) -> str:
        """The standard's words."""
        return retained_attributes.concept(self.scheme, self.code) or ""
