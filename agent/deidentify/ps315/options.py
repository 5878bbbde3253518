"""Which options of PS3.15 a site has on, as policy: each option with its code of PS3.16 CID 7050.

What was really done to one instance is stamped into it (0012,0064): an option of this policy that had
nothing to say about the pixels does not claim them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

# PS3.16 CID 7050, De-identification Method
BASIC: Final = "113100"
CODES: Final = MappingProxyType(
    {
        BASIC: "Basic Application Confidentiality Profile",
        "113101": "Clean Pixel Data Option",
        "113102": "Clean Recognizable Visual Features Option",
        "113103": "Clean Graphics Option",
        "113104": "Clean Structured Content Option",
        "113105": "Clean Descriptors Option",
        "113106": "Retain Longitudinal Temporal Information Full Dates Option",
        "113107": "Retain Longitudinal Temporal Information Modified Dates Option",
        "113108": "Retain Patient Characteristics Option",
        "113109": "Retain Device Identity Option",
        "113110": "Retain UIDs Option",
        "113111": "Retain Safe Private Option",
        "113112": "Retain Institution Identity Option",
    }
)
# Retain Full Dates, Retain UIDs, Retain Institution Identity are not offered: they give the patient away.
_OPTIONS: Final = MappingProxyType(
    {
        "clean_structured_content": "113104",
        "clean_descriptors": "113105",
        "retain_longitudinal": "113107",
        "retain_patient_characteristics": "113108",
        "retain_device": "113109",
        "retain_safe_private": "113111",
    }
)


@dataclass(frozen=True, slots=True)
class Profile:
    """The Basic Profile and its options. The default is what a research image needs, and no more."""

    retain_longitudinal: bool = True  # dates shifted by one amount per patient; off: emptied or removed
    times: bool = False  # keep the time of day beside the shifted dates (SUV of PET needs it)
    retain_device: bool = False  # keep what identifies the device (Retain Device Identity Option)
    # keep age, sex, size and weight (Retain Patient Characteristics Option)
    retain_patient_characteristics: bool = False
    # keep private attributes that the standard lists as safe (Retain Safe Private Option)
    retain_safe_private: bool = False
    clean_descriptors: bool = False  # words of a closed list survive in descriptions; off: removed
    clean_structured_content: bool = False  # structured reports are cleaned; off: refused
    clean_pixel_data: bool = False  # the pixels are blanked by region rules before ``clean`` sees them

    def __post_init__(self) -> None:
        """Every option is a plain yes or no; a time of day without a date to belong to is no use."""
        if not all(type(getattr(self, name)) is bool for name in self.__slots__):
            raise ValueError("profile: every option is true or false")
        if self.times and not self.retain_longitudinal:
            raise ValueError("profile: times needs retain_longitudinal")

    def codes(self) -> tuple[str, ...]:
        """CID 7050 codes of this policy without those about pixels, Basic Profile first, ascending."""
        return (BASIC, *(code for name, code in _OPTIONS.items() if getattr(self, name)))


BurnedIn = Literal["unknown", "vouched", "cleaned"]
Faces = Literal["unknown", "none", "removed"]


@dataclass(frozen=True, slots=True)
class Pixels:
    """Known facts about the pixels, from those who looked at the image or changed it."""

    burned_in: BurnedIn = "unknown"  # vouched: a rule or a person says there is no text; cleaned: blanked
    faces: Faces = "unknown"  # none: of a kind that has none, and no volume; removed: defaced

    def __post_init__(self) -> None:
        """Only the closed terms."""
        if self.burned_in not in ("unknown", "vouched", "cleaned") or self.faces not in (
            "unknown",
            "none",
            "removed",
        ):
            raise ValueError("pixels: not a known state")

    def codes(self) -> tuple[str, ...]:
        """CID 7050 codes of what was done to the pixels."""
        return ("113101",) * (self.burned_in == "cleaned") + ("113102",) * (self.faces == "removed")


UNKNOWN_PIXELS: Final = Pixels()
USUAL: Final = Profile()
