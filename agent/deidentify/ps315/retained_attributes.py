"""The retained attributes and their permitted forms; everything else is removed (default deny).

Retained attributes are those needed to decode and use an image: image pixel, geometry, display, acquisition and the
functional groups of multi-frame objects. None of them is free text. A number must parse as a finite number, a term
must be one of the defined terms of ``vocabulary.json``, a coded concept must be one of PS3.16, a maker or a product
must be a known one, whatever VR the file claims. Entire families are admitted by group and VR, but never attributes
that PS3.15 Table E.1-1 lists, retired ones, or those of ``_NEVER``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from pydicom._dicom_dict import DicomDictionary
from pydicom.datadict import tag_for_keyword

from agent.deidentify.ps315 import table


def tags(*keywords: str) -> frozenset[int]:
    """The tags of attributes. Raises: ValueError for a keyword that the dictionary lacks."""
    found = {keyword: tag_for_keyword(keyword) for keyword in keywords}
    unknown = [keyword for keyword, tag in found.items() if tag is None]
    if unknown:
        raise ValueError(f"not in the DICOM dictionary: {unknown}")
    return frozenset(tag for tag in found.values() if tag is not None)


def _vocabulary() -> Mapping[str, frozenset[str]]:
    raw = json.loads(files("agent.deidentify.ps315").joinpath("vocabulary.json").read_text(encoding="utf-8"))
    return MappingProxyType({name: frozenset(words) for name, words in raw.items() if isinstance(words, list)})


VOCABULARY: Final = _vocabulary()

PIXELS: Final = 0x7FE00010
# general, acquisition, relationship, image pixel, eye, procedure and SR macros, slides, device, intravascular,
# nuclear medicine, presentation LUT, functional groups
_GROUPS: Final = frozenset({0x08, 0x18, 0x20, 0x22, 0x28, 0x40, 0x48, 0x50, 0x52, 0x54, 0x2050, 0x5200})
_NUMBER_VRS: Final = frozenset({"DS", "IS", "FD", "FL", "US", "SS", "UL", "SL", "UV", "SV", "US or SS", "AT"})
# queries, inventories, what the file says about its private elements, counts of a patient's objects
_NEVER_STARTS: Final = (
    *("NumberOfPatientRelated", "NumberOfStudyRelated", "NumberOfSeriesRelated", "QueryRetrieve", "Inventor"),
    *("PrivateDataElement", "Deidentification", "NonidentifyingPrivate", "IdentifyingPrivate", "Updated"),
    *("Issuer", "Responsible", "Assigning", "OrderPlacer", "OrderFiller", "HumanPerformer", "Billing", "HL7"),
    *("FileAccess", "FileSetAccess", "Metadata", "StudyAccess", "XDS", "WADO", "STOW", "DICOM"),
    *("Incorporated", "PrivateGroup", "CodingSchemeResources", "CodingSchemeIdentification", "Context"),
)
_NEVER: Final = tags(
    *("InstanceAvailability", "ModalitiesInStudy", "SOPClassesInStudy", "ModeOfPercutaneousAccessSequence"),
    *("ScheduledProcedureStepSequence", "ReferencedRequestSequence", "PerformedSeriesSequence"),
)


def _admitted() -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    numbers, terms, sequences = set(), set(), set()
    for tag, (vr, _, _, retired, keyword) in DicomDictionary.items():
        if tag >> 16 not in _GROUPS or retired or table.row(tag) is not None or tag in _NEVER:
            continue
        if keyword.startswith(_NEVER_STARTS):
            continue
        if vr in _NUMBER_VRS:
            numbers.add(tag)
        elif vr == "CS":
            terms.add(tag)
        elif vr == "SQ":
            sequences.add(tag)
    return frozenset(numbers), frozenset(terms), frozenset(sequences)


_STANDARD_NUMBERS, _STANDARD_TERMS, _STANDARD_SEQUENCES = _admitted()
NUMBERS: Final = _STANDARD_NUMBERS
_LATERALITY: Final = tags("Laterality", "ImageLaterality", "FrameLaterality")
SEQUENCES: Final = _STANDARD_SEQUENCES | tags("ReferencedImageSequence", "SourceImageSequence")
LOOKUP_TABLES: Final[Mapping[int, int]] = MappingProxyType(
    # data and descriptor (PS3.3 C.11.1.1, C.7.6.3.1.5): cut to the length that the descriptor states
    {0x00283006: 0x00283002, 0x00281201: 0x00281101, 0x00281202: 0x00281102, 0x00281203: 0x00281103}
)
# only beside PALETTE COLOR pixels; decoding turns those into RGB
PALETTES: Final = frozenset({0x00281101, 0x00281102, 0x00281103, 0x00281201, 0x00281202, 0x00281203})
CLASS_UIDS: Final = tags("SOPClassUID", "ReferencedSOPClassUID", "RelatedGeneralSOPClassUID")
TERMS: Final[Mapping[int, frozenset[str]]] = MappingProxyType(
    {tag: VOCABULARY["terms"] for tag in _STANDARD_TERMS | tags("BodyPartExamined")}
    | {tag: frozenset({"L", "R", "U", "B"}) for tag in _LATERALITY}
)
# an unknown value in these is replaced, because their other values and the number of values matter
REPLACE_UNKNOWN: Final[Mapping[int, str]] = MappingProxyType({tag: "OTHER" for tag in tags("ImageType", "FrameType")})
NEVER_EMPTY: Final = tags("SpecificCharacterSet")  # type 1C; without it, ASCII, which is all that is written
TYPE_2: Final = tags(
    *("InstanceNumber", "SeriesNumber", "AcquisitionNumber", "KVP", "SliceThickness", "EchoTime", "StudyTime"),
)
# without these the stored values cannot be read, or mean something else
NEEDED: Final = tags(
    *("SamplesPerPixel", "NumberOfFrames", "Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit"),
    *("PixelRepresentation", "RescaleSlope", "RescaleIntercept"),
)
ORIENTATIONS: Final = tags("PatientOrientation")  # PS3.3 C.7.6.1.1.1: "A\\F", "PR\\L"
DIRECTION: Final = re.compile(r"[APLRHFTE]{0,3}")
# moved with the other dates although the column of the option, of an older edition, lacks them: when images
# and their frames were taken, and when was injected what they show (SUV); never dates of birth or of people
DATES: Final = tags(
    *("StudyDate", "SeriesDate", "AcquisitionDate", "ContentDate", "AcquisitionDateTime"),  # PS3.3 C.7.2.1 to C.7.6.1
    *("FrameAcquisitionDateTime", "FrameReferenceDateTime"),  # PS3.3 C.7.6.16.2.2, frame content
    *("RadiopharmaceuticalStartDateTime", "RadiopharmaceuticalStopDateTime"),  # PS3.3 C.8.9.2, PET isotope
    *("RadiopharmaceuticalStartTime", "RadiopharmaceuticalStopTime"),
    *("ContrastBolusStartTime", "ContrastBolusStopTime"),  # PS3.3 C.7.6.4
    "DecayCorrectionDateTime",  # PS3.3 C.8.22.4
)

MAKERS: Final = tags(
    *("Manufacturer", "SecondaryCaptureDeviceManufacturer", "DetectorManufacturerName"),
    *("ReceiveCoilManufacturerName", "TransmitCoilManufacturerName", "ApplicationManufacturer"),
)
MODELS: Final = tags(
    "ManufacturerModelName", "SecondaryCaptureDeviceManufacturerModelName", "DetectorManufacturerModelName"
)
VERSIONS: Final = tags("SoftwareVersions", "SecondaryCaptureDeviceSoftwareVersions", "ApplicationVersion")
SHORT_TEXTS: Final = tags(
    *("SequenceName", "PulseSequenceName", "ConvolutionKernel", "ImagedNucleus", "ReceiveCoilName"),
    *("TransmitCoilName", "FilterType", "TypeOfFilters", "CollimatorGridName", "Radiopharmaceutical"),
    *("ContrastBolusRoute", "RadiopharmaceuticalRoute", "AcquisitionMode", "DoseModeName", "PhosphorType"),
    *("ReconstructionMethod", "AttenuationCorrectionMethod", "ScatterCorrectionMethod", "RescaleType"),
    *("WindowCenterWidthExplanation", "StackID", "DimensionDescriptionLabel", "LUTExplanation", "ModalityLUTType"),
    *(
        "LossyImageCompressionMethod",
        "CardiacFramingType",
        "PositionReferenceIndicator",
        "TriggerSourceOrType",
        "PVCRejection",
    ),
)
CODE_VALUE, CODE_SCHEME, CODE_VERSION, CODE_MEANING = 0x00080100, 0x00080102, 0x00080103, 0x00080104
CODE_TAGS: Final = frozenset({CODE_VALUE, CODE_SCHEME, CODE_VERSION, CODE_MEANING})
_OLD_SNOMED: Final = ("SRT", "SNM3", "99SDM")

_SPLIT: Final = re.compile(r"[^A-Za-z0-9/+-]+")
# "2", "64", "B17", "VA30A", "tfl3d1", "16ns": few letters beside digits, so that no name fits
_NUMBERED: Final = re.compile(r"[A-Za-z]{0,3}\d{1,3}(?:[A-Za-z]{1,2}\d{0,3})?|\d{1,4}")
# a record number may be written in groups or over several values, so all digits of an attribute count together
_MOST_DIGITS: Final[Mapping[str, int]] = MappingProxyType({"short": 5, "model": 6, "version": 6})
_MOST_IN_WORDS: Final = 4
_QUAD: Final = re.compile(r"(?<!\d)\d{1,3}(?:[.]\d{1,3}){3}(?![.]?\d)")  # an address in a network
_MIXED: Final = re.compile(r"(?=.*\d)(?:[^A-Za-z]*[A-Za-z]){3}.*")
_D, _M, _Y, _GAP = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:0?[1-9]|1[0-2])", r"(?:(?:19|20)?\d\d)", r"[^0-9A-Za-z]{1,3}"
_DAY: Final = re.compile(  # written apart, in the three orders
    "|".join(rf"(?<!\d){a}{_GAP}{b}{_GAP}{c}(?!\d)" for a, b, c in ((_D, _M, _Y), (_M, _D, _Y), (_Y, _M, _D)))
)
_DD, _MM = r"(?:0[1-9]|[12]\d|3[01])", r"(?:0[1-9]|1[0-2])"
_PLAIN_DAY: Final = re.compile(f"{_DD}{_MM}{_Y}|{_MM}{_DD}{_Y}|{_Y}{_MM}{_DD}")
# versions of the standard's coding schemes: DCM "01", SRT "1.1", SNM3 "1993", UCUM "1.9", SNOMED CT's releases
CODE_VERSION_FORM: Final = re.compile(r"0?\d(?:[.]\d{1,2})?|1993|20[0-2]\d(?:0131|0731|0301|0901)?")
_VERSION: Final = re.compile(r"[A-Za-z]{0,2}\d{1,3}[A-Za-z]?(?:[.]\d{1,5}){0,5}[A-Za-z]?")


def concept(scheme: str, value: str) -> str | None:
    """The standard's meaning of a coded concept (PS3.16, as frozen in pydicom), None for one it lacks.

    SNOMED-RT codes count by their SNOMED-CT successor.
    """
    return _concepts().get(current_code(scheme, value))


def current_code(scheme: str, value: str) -> tuple[str, str]:
    """A code as it is written today: a SNOMED-RT code by its SNOMED-CT successor, "" where it has none."""
    from pydicom.sr._snomed_dict import mapping  # noqa: PLC0415 - as in `_concepts`

    return ("SCT", mapping["SRT"].get(value, "")) if scheme in _OLD_SNOMED else (scheme, value)


def meanings() -> Iterable[str]:
    """All meanings that ``concept`` may give."""
    return _concepts().values()


@cache
def _concepts() -> dict[tuple[str, str], str]:
    from pydicom.sr._concepts_dict import concepts  # noqa: PLC0415 - the reader of files needs it, and the agent not

    found: dict[tuple[str, str], str] = {}
    listing: dict[str, dict[str, dict[str, tuple[str, list[int]]]]] = dict(concepts)  # type: ignore[arg-type]  # annotated as object
    for scheme, keywords in listing.items():
        for listed in keywords.values():
            for value, (meaning, _) in listed.items():
                # a concept may come under several names: "Brain", "Brain structure (body structure)"
                known = found.setdefault((scheme, value), meaning)
                found[scheme, value] = min(known, meaning, key=len)
    return found


def maker(value: str) -> bool:
    """Whether the value is the name of a known maker of devices."""
    return " ".join(value.upper().split()) in VOCABULARY["manufacturers"]


def dated(value: str) -> bool:
    """Whether a text holds a date, written apart or as one run of digits, or is nothing but one beside letters."""
    runs = (*re.findall(r"\d+", value), digits(value))
    return bool(_DAY.search(value)) or any(_PLAIN_DAY.fullmatch(run) for run in runs)


def digits(value: str) -> str:
    """The digits of a text."""
    return "".join(c for c in value if c.isdigit())


def few_digits(kind: str, values: Iterable[str]) -> bool:
    """Whether all values of a technical text (``short``, ``model``, ``version``) carry too little for an identifier.

    Values that the vocabulary lists as a whole do not count, unless they are nothing but digits.
    """
    listed = {"short": _known_short(), "model": VOCABULARY["models"], "version": VOCABULARY["versions"]}[kind]
    free = " ".join(v for v in values if v.isdigit() or v.upper() not in listed)
    mixed = [w for w in _SPLIT.split(free) if w.upper() not in listed and _MIXED.fullmatch(w)]
    few = len(digits(free)) <= _MOST_DIGITS[kind] and len(mixed) <= 1
    return few and not dated(free) and not _QUAD.search(free)


def model(value: str) -> bool:
    """Whether every word belongs to a known product's name, or is a number with few letters."""
    words = value.upper().split()
    known = bool(words) and all(w in VOCABULARY["models"] or _NUMBERED.fullmatch(w) for w in words)
    return known and few_digits("model", (value,))


def version(value: str) -> bool:
    """Whether the value is a version: numbers with few letters, and names of known software."""
    words = re.split(r"[ _:;,*-]+", value.upper().strip("*"))
    known = bool(words) and all(w in VOCABULARY["versions"] or _VERSION.fullmatch(w) for w in words)
    return known and few_digits("version", (value,))


@cache
def _known_short() -> frozenset[str]:
    return VOCABULARY["short"] | VOCABULARY["terms"] | VOCABULARY["descriptors"]


def short_text(value: str) -> bool:
    """Whether every word of a technical name is known, or a number with few letters."""
    known = _known_short()
    if value.upper() in known:
        return True
    words = [w for w in _SPLIT.split(value) if w]
    return few_digits("short", (value,)) and all(w.upper() in known or _NUMBERED.fullmatch(w) for w in words)


def technical_words(value: str, own: frozenset[str]) -> str:
    """What the Clean Descriptors Option leaves of a description: listed words, numbers up to 3 digits.

    ``own`` are the patient's own words, folded: they go even when they are listed.
    """
    words = (w.strip("/+-") for w in _SPLIT.split(value))
    listed = VOCABULARY["descriptors"]
    few = len(digits(value)) <= _MOST_IN_WORDS and not dated(value)  # a number may be written in groups
    stays = [w for w in words if w.upper() in listed or (few and w.isascii() and w.isdigit() and len(w) <= 3)]
    return " ".join(w.upper() for w in stays if w.casefold() not in own)
