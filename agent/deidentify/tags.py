"""De-identification of a DICOM data set: PS3.15 Basic Profile, recursive, default deny.

An attribute stays only if ``keep`` lists it; one that the profile's table wants replaced is replaced;
everything else goes: private, unknown, retired, curves, overlays, padding, free text, and whatever new
attribute the standard adds. The result is built from nothing, with the VR of the dictionary and never
that of the file, so what was not copied cannot be in it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Final

from pydicom import DataElement, Dataset, FileDataset
from pydicom._uid_dict import UID_dictionary
from pydicom.datadict import dictionary_has_tag, dictionary_VR
from pydicom.dataset import FileMetaDataset
from pydicom.uid import UID
from pydicom.valuerep import DSfloat

from agent.deidentify import keep, table
from agent.deidentify.prescan import EXPLICIT_LE, IMPLICIT_LE, MAX_DEPTH, MAX_ELEMENTS
from agent.deidentify.reasons import Refused
from agent.deidentify.rules import MEDIA_DIRECTORY, NOT_IMAGES, text

MIN_KEY_BYTES: Final = 32
# 5 to 15 years back: no shifted study date falls on a date of the years that the cohort was scanned in
MIN_SHIFT_DAYS: Final = 1826
SHIFT_RANGE_DAYS: Final = 3653
IMPLEMENTATION_UID: Final = "2.25.161803398874989484820458683436563811"
_MAX_VALUES: Final = 64  # of one number attribute
_UNREADABLE: Final = (ValueError, TypeError, OverflowError, KeyError, NotImplementedError, AttributeError)
_TEXT_VRS: Final = frozenset({"LO", "SH", "ST", "LT", "UT", "UC", "PN"})
_DATE: Final = re.compile(r"(\d{8})(?:\d{2,6}(?:\.\d{1,6})?(?:[+-]\d{4})?)?")
_CODES: Final = (  # PS3.16 CID 7050
    ("113100", "Basic Application Confidentiality Profile"),
    ("113107", "Retain Longitudinal Temporal Information Modified Dates Option"),
)


@dataclass(frozen=True, slots=True)
class Deidentifier:
    """Replaces identities by keyed ones. Who lacks the key cannot go back, nor test a guess."""

    key: bytes = field(repr=False)  # at least 32 bytes, never leaves the site
    issuer: str = ""  # who gave out a patient id that names no issuer itself

    def __post_init__(self) -> None:
        """Refuse a key that could be guessed."""
        if len(self.key) < MIN_KEY_BYTES:
            raise ValueError(f"the pseudonym key must have at least {MIN_KEY_BYTES} bytes")

    def mac(self, purpose: str, *parts: bytes) -> str:
        """HMAC-SHA256 (RFC 2104) of length-prefixed parts under a purpose: 32 hex characters."""
        state = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            state.update(len(part).to_bytes(8, "big"))
            state.update(part)
        return state.hexdigest()[:32]

    def pseudonym(self, issuer: str, patient_id: str) -> str:
        """The patient's name inside the site: 32 hex characters.

        Case, spaces and Unicode forms are folded. One patient under two pseudonyms would be counted twice
        towards k (P3); two patients under one are counted once, which is the safe error.

        Raises:
            Refused: ``missing_patient``.
        """
        folded = [" ".join(unicodedata.normalize("NFKC", s).casefold().split()) for s in (issuer, patient_id)]
        if not folded[1]:
            raise Refused("missing_patient")
        default = " ".join(unicodedata.normalize("NFKC", self.issuer).casefold().split())
        return self.mac("patient", (folded[0] or default).encode(), folded[1].encode())

    def patient(self, dataset: Dataset) -> str:
        """The pseudonym of a data set's patient."""
        return self.pseudonym(text(dataset, "IssuerOfPatientID"), text(dataset, "PatientID"))

    def uid(self, original: str) -> str:
        """A keyed UID below 2.25 (PS3.5 B.2), the same for the same original; ``""`` stays empty."""
        original = original.strip("\0 ")
        return f"2.25.{int(self.mac('uid', original.encode()), 16)}" if original else ""

    def shift_days(self, pseudonym: str) -> int:
        """Days, negative, by which all dates of one patient move: intervals inside a patient survive."""
        return -(MIN_SHIFT_DAYS + int(self.mac("dates", pseudonym.encode()), 16) % SHIFT_RANGE_DAYS)

    def apply(self, dataset: Dataset) -> FileDataset:
        """A new, de-identified data set of an image; the argument is left as it was.

        The pixel data must be native: a compressed stream has comments of its own. What is burned into
        the pixels stays; ``rules.judge`` keeps risky pictures out.

        Returns:
            A data set with new file meta (Explicit VR Little Endian) and a zero preamble.
        Raises:
            Refused: reports, documents and other non-images, compressed or oversized pixel data, no patient,
                missing identifiers, too deep or too many elements.
        """
        sop_class = text(dataset, "SOPClassUID")
        if sop_class == MEDIA_DIRECTORY or sop_class.startswith(NOT_IMAGES):
            raise Refused("not_an_image")
        if not (sop_class in UID_dictionary and text(dataset, "SOPInstanceUID")):
            raise Refused("incomplete")
        pseudonym = self.patient(dataset)
        signed = dataset.get("PixelRepresentation") == 1
        visit = _Visit(self, self.shift_days(pseudonym), signed)
        body = visit.dataset(dataset, depth=0)
        pixels = _native_pixels(dataset)
        if pixels is not None:
            body.add(pixels)
        _stamp(body, pseudonym)
        clean = FileDataset("", body, preamble=b"\0" * 128, file_meta=_file_meta(body))
        clean.set_original_encoding(False, True)
        return clean


@dataclass(slots=True)
class _Visit:
    """One walk over one instance."""

    deidentifier: Deidentifier
    days: int
    signed: bool
    count: int = 0

    def dataset(self, source: Dataset, depth: int) -> Dataset:
        """The attributes of one data set that stay, items of sequences included."""
        if depth > MAX_DEPTH:
            raise Refused("too_deep")
        target = Dataset()
        for tag in sorted(source.keys()):
            self.count += 1
            if self.count > MAX_ELEMENTS:
                raise Refused("too_deep")
            number = int(tag)
            if tag.is_private or not dictionary_has_tag(number):
                continue
            try:
                element = self._element(source, number, depth)
            except _UNREADABLE:
                continue  # a value that cannot be understood is a value that does not stay
            if element is not None:
                target.add(element)
        return target

    def _element(self, source: Dataset, tag: int, depth: int) -> DataElement | None:
        """What stays of one attribute, or None. The value is read only if something of it stays."""
        vr = dictionary_VR(tag)
        if tag in keep.SEQUENCES and vr == "SQ":
            return DataElement(tag, vr, [self.dataset(item, depth + 1) for item in source[tag].value])
        if tag in keep.DATES:
            return DataElement(tag, vr, shifted(_first(source[tag].value), self.days))
        if tag in keep.TERMS:
            return _term(source, tag, vr)
        if tag in keep.NUMBERS:
            return _number(source, tag, vr, signed=self.signed)
        if tag in keep.LOOKUP_TABLES:
            return _lookup_table(source, tag)
        return self._identifier(source, tag, vr)

    def _identifier(self, source: Dataset, tag: int, vr: str) -> DataElement | None:
        """UIDs, and attributes that the table wants to be there without their value."""
        if tag in keep.CLASS_UIDS:
            value = _first(source[tag].value)
            return DataElement(tag, vr, value) if value in UID_dictionary else None
        row = table.row(tag)
        action = row.action if row is not None else "X"
        if action == "U" and vr == "UI":
            return DataElement(tag, vr, self.deidentifier.uid(_first(source[tag].value)))
        if action in ("Z", "Z/D") and vr in _TEXT_VRS | {"DA", "TM", "DT", "CS"}:
            return DataElement(tag, vr, "")
        return DataElement(tag, vr, "REMOVED") if action == "D" and vr in _TEXT_VRS else None


def shifted(value: str, days: int) -> str:
    """A DICOM date or date-time moved by whole days, time of day dropped; ``""`` for anything else."""
    match = _DATE.fullmatch(value)
    if match is None:
        return ""
    try:
        day = datetime.datetime.strptime(match[1], "%Y%m%d").replace(tzinfo=datetime.UTC)
        return (day + datetime.timedelta(days=days)).strftime("%Y%m%d").zfill(8)
    except (ValueError, OverflowError):
        return ""


def _first(value: object) -> str:
    """The only value as text; several values where one belongs are not understood, so nothing stays."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("one text value expected")
    return value.strip("\0 ")


def _values(value: object) -> list[object]:
    """The values of an attribute as a list."""
    if value is None or value == "":
        return []
    return [value] if isinstance(value, str | bytes) or not hasattr(value, "__iter__") else list(value)


def _term(source: Dataset, tag: int, vr: str) -> DataElement | None:
    allowed, replacement = keep.TERMS[tag], keep.REPLACE_UNKNOWN.get(tag)
    values = [str(v).strip("\0 ").upper() for v in _values(source[tag].value)][:_MAX_VALUES]
    if replacement is not None:
        values = [v if v in allowed else replacement for v in values]
    elif not all(v in allowed for v in values):
        return None
    return DataElement(tag, vr, values[0] if len(values) == 1 else values) if values else None


def _number(source: Dataset, tag: int, vr: str, *, signed: bool) -> DataElement | None:
    values = _values(source[tag].value)
    if not 0 < len(values) <= _MAX_VALUES:
        return None
    real = [float(str(v)) for v in values]
    if not all(math.isfinite(v) for v in real):
        return None
    if vr == "US or SS":
        vr = "SS" if signed else "US"
    if vr == "DS":
        new: list[object] = [DSfloat(v, auto_format=True) for v in real]
    elif vr in ("FD", "FL"):
        new = list(real)
    else:
        new = [int(str(v)) for v in values]
    return DataElement(tag, vr, new[0] if len(new) == 1 else new)


def _lookup_table(source: Dataset, tag: int) -> DataElement | None:
    """The entries of a table (PS3.3 C.11.1.1), as many as the descriptor states; 0 means 65536."""
    descriptor = [int(str(v)) for v in _values(source["LUTDescriptor"].value)]
    value = source[tag].value
    if isinstance(value, bytes):
        entries = [int.from_bytes(value[i : i + 2], "little") for i in range(0, len(value) - 1, 2)]
    else:
        entries = [int(str(v)) for v in _values(value)]
    wanted = descriptor[0] or 65536
    if len(descriptor) != 3 or not len(entries) >= wanted:  # first, count, bits
        return None
    return DataElement(tag, "OW", b"".join((e & 0xFFFF).to_bytes(2, "little") for e in entries[:wanted]))


def _native_pixels(dataset: Dataset) -> DataElement | None:
    """Native pixel data, exactly as long as the header says; what follows is dropped."""
    if "PixelData" not in dataset:
        return None
    meta = getattr(dataset, "file_meta", None)
    syntax = str(meta.get("TransferSyntaxUID", "")) if meta is not None else ""
    if syntax not in (IMPLICIT_LE, EXPLICIT_LE):
        raise Refused("unsupported_encoding")
    try:
        samples = int(dataset.Rows) * int(dataset.Columns) * int(dataset.get("SamplesPerPixel", 1))
        bits = int(dataset.BitsAllocated)
        length = samples * int(dataset.get("NumberOfFrames") or 1) * bits // 8
        value = dataset["PixelData"].value
    except _UNREADABLE:
        raise Refused("undecodable") from None
    if bits not in (8, 16, 32) or not isinstance(value, bytes) or not 0 < length <= len(value):
        raise Refused("undecodable")
    padded = value[:length] + b"\0" * (length % 2)
    return DataElement(keep.PIXELS, "OB" if bits == 8 else "OW", padded)


def _stamp(body: Dataset, pseudonym: str) -> None:
    """Say who the patient is now, and that and how the data set was de-identified (PS3.15 E.1.1)."""
    body.PatientName = ""
    body.PatientID = pseudonym
    body.PatientBirthDate = ""
    body.PatientIdentityRemoved = "YES"
    body.LongitudinalTemporalInformationModified = "MODIFIED"
    body.DeidentificationMethod = f"Lazaret, PS3.15 {table.EDITION} Basic Profile, default deny"
    items = []
    for value, meaning in _CODES:
        item = Dataset()
        item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = value, "DCM", meaning
        items.append(item)
    body.DeidentificationMethodCodeSequence = items


def _file_meta(body: Dataset) -> FileMetaDataset:
    """New file meta information: nothing of the old one survives."""
    meta = FileMetaDataset()
    meta.FileMetaInformationVersion = b"\0\1"
    meta.MediaStorageSOPClassUID = body.SOPClassUID
    meta.MediaStorageSOPInstanceUID = body.SOPInstanceUID
    meta.TransferSyntaxUID = UID(EXPLICIT_LE)
    meta.ImplementationClassUID = UID(IMPLEMENTATION_UID)
    meta.ImplementationVersionName = "LAZARET"
    return meta
