"""The segments that a site lets in with masks, by the standard's codes: ``[[segment]]`` of ``ingest.toml``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from agent.deidentify.ps315 import retained_attributes

SEGMENTATION: Final = "1.2.840.10008.5.1.4.1.1.66.4"  # of bits, or of probabilities
LABEL_MAP: Final = "1.2.840.10008.5.1.4.1.1.66.7"  # of numbers: of its segment at each pixel
MOST_VALUE: Final = 65_535  # of a NIfTI mask
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}")
# what a face is recognised by, in the standard's words; of what lies inside, the words after it
_OUTLINE: Final = re.compile(
    r"\b(?:skin|scalp|face|facial|heads?|forehead|skull|jaw|mandible|maxilla|nose|nasal|ears?|cheek|chin|lips?|eyelid|necks?"
    r"|entire body|whole body)\b",
    re.IGNORECASE,
)
_INSIDE: Final = re.compile(
    r"lesion|lymph node|nerve|artery|vascular|muscle|of rib|inner ear|middle ear", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One kind of segment. A mask with another kind does not come in."""

    name: str  # by which tasks name it
    code: str  # Code Value of its Segmented Property Type, one of PS3.16, such as 10200004 (liver)
    scheme: str = "SCT"  # Coding Scheme Designator of the code
    nifti_values: tuple[int, ...] = ()  # that mean it in NIfTI masks, which do not say what their numbers mean

    def __post_init__(self) -> None:
        """A short name, a code of the standard, no outline of a head, and numbers that are not the background's."""
        if not _NAME.fullmatch(self.name):
            raise ValueError("a segment has a short name of a-z, 0-9, _ and -, which begins with a letter")
        if retained_attributes.concept(self.scheme, self.code) is None:
            raise ValueError("code: not one of the standard's coded concepts (PS3.16) in this scheme")
        if _OUTLINE.search(self.meaning) and not _INSIDE.search(self.meaning):
            raise ValueError("code: the outline of a head shows its face")
        if not all(0 < value <= MOST_VALUE for value in self.nifti_values):
            raise ValueError(f"nifti_values: whole numbers from 1 to {MOST_VALUE}; 0 is the background")

    @property
    def meant(self) -> tuple[str, str]:
        """Scheme and value, SNOMED-RT by its successor."""
        return retained_attributes.current_code(self.scheme, self.code)

    @property
    def meaning(self) -> str:
        """The standard's words."""
        return retained_attributes.concept(self.scheme, self.code) or ""
