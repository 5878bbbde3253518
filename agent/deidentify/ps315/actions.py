"""The actions of a profile: one decision per tag, computed once and looked up afterwards.

The order is the guarantee: what PS3.15 Table E.1-1 lists is decided by the table and the profile's options,
never by the lists of ``keep``; what neither knows is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from pydicom._dicom_dict import DicomDictionary

from agent.deidentify.ps315 import retained_attributes, structured_content, table
from agent.deidentify.ps315.action_trace import Action
from agent.deidentify.ps315.options import Profile

Kind = Literal[
    "removed", "emptied", "dummy", "keyed_id", "uid", "class_uid", "number", "term", "date", "clock",
    "sequence", "lut", "maker", "model", "version", "short", "device", "words", "age", "code", "pixels",
    "private", "stamped",
]  # fmt: skip
_TEXT_VRS: Final = frozenset({"LO", "SH", "ST", "LT", "UT", "UC", "PN"})
_TIMES: Final = frozenset({"DA", "TM", "DT"})
# a value that says nothing, for what must have one (action D)
DUMMIES: Final = {
    **{vr: b"REMOVED " for vr in _TEXT_VRS | {"AE", "CS"}},
    **{"DA": b"19000101", "TM": b"000000", "DT": b"19000101000000", "AS": b"000Y", "IS": b"0 ", "DS": b"0 "},
    **{"OB": b"\0\0"},
}
# identities that must stay consistent, written as keyed values (16 hex characters fit SH)
_IDENTITIES: Final = ("ID", "Number", "Identifier", "ImagingServiceRequest")
STAMPED: Final = retained_attributes.tags(
    *("PatientName", "PatientID", "PatientBirthDate", "PatientIdentityRemoved", "DeidentificationMethod"),
    *("DeidentificationMethodCodeSequence", "LongitudinalTemporalInformationModified", "BurnedInAnnotation"),
    "RecognizableVisualFeatures",
)


@dataclass(frozen=True, slots=True)
class AttributeDecision:
    """The fate of every occurrence of one attribute, as far as its value allows it."""

    kind: Kind
    vr: str
    action: Action  # what the trace says when the value allows it
    why: str


def _removed(why: str) -> AttributeDecision:
    return AttributeDecision("removed", "", "removed", why)


def _group(group: int) -> bool:
    """Groups of curves, overlays, padding, signatures and directories: nothing of them is ever looked at."""
    return group in (0x0000, 0x0002, 0x0004, 0xFFFA, 0xFFFC) or 0x5000 <= group <= 0x50FF or 0x6000 <= group <= 0x60FF


@cache
def decide(profile: Profile, tag: int) -> AttributeDecision:
    """The profile's decision on one tag."""
    if tag >> 16 & 1:
        if profile.retain_safe_private:
            return AttributeDecision("private", "", "kept", "retain_safe_private")
        return _removed("private")
    if _group(tag >> 16):
        return _removed("group")
    entry = DicomDictionary.get(tag)
    if entry is None:
        return _removed("unknown")
    vr, keyword = entry[0], entry[4]
    if tag in STAMPED:
        return AttributeDecision("stamped", vr, "replaced", "stamp")
    row = table.ATTRIBUTES.get(tag)
    if row is None:
        return _unlisted(profile, tag, vr)
    return _by_option(profile, tag, vr) or _by_action(row.action, vr, keyword)


def _unlisted(profile: Profile, tag: int, vr: str) -> AttributeDecision:
    """What the table does not list: admitted by ``keep``, or removed."""
    if tag == retained_attributes.PIXELS:
        return AttributeDecision("pixels", "OW", "kept", "listed")
    if tag in retained_attributes.CODE_TAGS:
        return AttributeDecision("code", vr, "kept", "listed")
    if (
        profile.clean_structured_content
        and tag in structured_content.SEQUENCES | structured_content.TERMS | structured_content.WORDS
    ):
        return structured_decision(tag, vr)
    families: tuple[tuple[frozenset[int], Kind], ...] = (
        (retained_attributes.CLASS_UIDS, "class_uid"),
        (retained_attributes.NUMBERS, "number"),
        (frozenset(retained_attributes.TERMS), "term"),
        (retained_attributes.SEQUENCES, "sequence"),
        (frozenset(retained_attributes.LOOKUP_TABLES), "lut"),
        (retained_attributes.MAKERS, "maker"),
        (retained_attributes.MODELS, "model"),
        (retained_attributes.VERSIONS, "version"),
        (retained_attributes.SHORT_TEXTS, "short"),
    )
    for members, kind in families:
        if tag in members:
            return AttributeDecision(kind, vr, "kept", "listed")
    if vr == "UI":
        return AttributeDecision("uid", vr, "rekeyed", "not_listed")
    return _removed("not_listed")


def structured_decision(tag: int, vr: str) -> AttributeDecision:
    """An attribute of a report's content tree (PS3.3 C.17.3), under the Clean Structured Content Option."""
    if tag in structured_content.WORDS:
        return AttributeDecision("dummy", vr, "replaced", "clean_structured")
    kind: Kind = "sequence" if tag in structured_content.SEQUENCES else "term"
    return AttributeDecision(kind, vr, "cleaned" if kind == "sequence" else "kept", "clean_structured")


def _by_option(profile: Profile, tag: int, vr: str) -> AttributeDecision | None:
    """A row of the table whose option is on."""
    options = table.OPTIONS
    if (
        profile.retain_longitudinal
        and vr in _TIMES
        and (tag in options["retain_longitudinal"] or tag in retained_attributes.DATES)
    ):
        return _when(profile, tag, vr)
    if profile.clean_structured_content and tag in structured_content.LISTED:
        return structured_decision(tag, vr) if vr == "SQ" or tag in structured_content.WORDS else None
    if profile.retain_patient_characteristics and tag in options["retain_patient_characteristics"]:
        return _about_the_patient(tag, vr)
    if profile.retain_device and tag in options["retain_device"] and vr in _TEXT_VRS | {"AE"}:
        return AttributeDecision("device", vr, "kept", "retain_device")
    if profile.clean_descriptors and tag in options["clean_descriptors"] and vr in _TEXT_VRS:
        return AttributeDecision("words", vr, "cleaned", "clean_descriptors")
    return None


def _when(profile: Profile, tag: int, vr: str) -> AttributeDecision:
    if vr != "TM":
        return AttributeDecision("date", vr, "shifted", "retain_longitudinal")
    if profile.times:
        return AttributeDecision("clock", vr, "kept", "retain_longitudinal")
    return _by_action(table.ATTRIBUTES[tag].action, vr, "")


def _about_the_patient(tag: int, vr: str) -> AttributeDecision | None:
    why = "retain_patient"
    if vr == "CS":
        return AttributeDecision("term", vr, "kept", why)
    if vr == "AS":
        return AttributeDecision("age", vr, "kept", why)
    if vr in ("DS", "US"):
        return AttributeDecision("number", vr, "kept", why)
    return AttributeDecision("words", vr, "cleaned", why) if vr in _TEXT_VRS else None


def _by_action(action: str, vr: str, keyword: str) -> AttributeDecision:
    """The Basic Profile's action. Of a choice, the gentlest for the object's conformance is taken."""
    why = "profile"
    if vr == "UI":
        return AttributeDecision("uid", vr, "rekeyed", why) if action == "U" else _removed(why)
    if action == "X/Z/U*":
        return AttributeDecision("sequence", vr, "cleaned", why)
    if action == "X" or (action == "X/D" and vr == "SQ"):
        return _removed(why)
    if action.startswith("X") and keyword in _REMOVED_BY_CHOICE:
        return _removed(why)
    if vr == "SQ":
        return AttributeDecision("emptied", vr, "emptied", why)
    if vr in ("SH", "LO", "UC") and keyword.endswith(_IDENTITIES) and not action.startswith("X"):
        return AttributeDecision("keyed_id", vr, "rekeyed", why)
    if action in ("Z", "Z/D", "X/Z", "X/Z/D"):
        return AttributeDecision("emptied", vr, "emptied", why)
    return AttributeDecision("dummy", vr, "replaced", why) if vr in DUMMIES else _removed(why)


# optional wherever an image has them (type 3), so that nothing is missed when they are gone
_REMOVED_BY_CHOICE: Final = frozenset(
    {"InstanceCreationDate", "InstanceCreationTime", "SeriesDate", "SeriesTime", "InstitutionName"}
    | {"StationName", "OperatorsName", "DeviceSerialNumber", "ProtocolName", "PatientSexNeutered"}
    | {"AcquisitionDeviceProcessingDescription", "DetectorID", "RequestedProcedureDescription"}
    | {"InstitutionCodeSequence", "DateOfLastDetectorCalibration", "TimeOfLastDetectorCalibration"}
    | {"AcquisitionTime", "AcquisitionDateTime"}
)
