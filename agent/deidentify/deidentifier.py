"""De-identification of a DICOM data set: PS3.15 Basic Profile and its options, recursive, default deny.

Every attribute has one fate, by ``plan``, and leaves one ``AttributeAction`` in the trace. The result is built from
nothing, with the VR of the dictionary and never that of the file, out of bytes that ``values`` has checked, so
what was not copied cannot be in it. Own code because every library leaked on planted identifiers: nested
sequences, unknown VRs, file meta, preamble, attributes newer than their tables.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from pydicom import DataElement, Dataset, FileDataset
from pydicom._uid_dict import UID_dictionary
from pydicom.dataelem import RawDataElement
from pydicom.dataset import FileMetaDataset
from pydicom.tag import BaseTag
from pydicom.uid import UID

from agent.deidentify import dataset_walk
from agent.deidentify.admission_rules import MEDIA_DIRECTORY, NOT_IMAGES, text
from agent.deidentify.attributes import identifier, plain
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import EXPLICIT_LE, IMPLICIT_LE
from agent.deidentify.ps315 import retained_attributes, structured_content, table
from agent.deidentify.ps315.action_trace import AttributeAction, step
from agent.deidentify.ps315.actions import STAMPED
from agent.deidentify.ps315.options import CODES, UNKNOWN_PIXELS, USUAL, Pixels, Profile
from agent.deidentify.ps315.value_encoding import UNREADABLE, padded

MIN_KEY_BYTES: Final = 32
# 5 to 15 years back: no shifted study date falls on a date of the years that the cohort was scanned in
MIN_SHIFT_DAYS: Final = 1826
SHIFT_RANGE_DAYS: Final = 3653
IMPLEMENTATION_UID: Final = "2.25.161803398874989484820458683436563811"
_ITEM: Final = re.compile(r"\W+")
Key = Literal["project", "site"]
Names = Callable[[Key, str, tuple[bytes, ...]], str]  # which key, purpose, parts: what ``mac`` would answer


@dataclass(frozen=True, slots=True, eq=False)
class DeidentifiedDataset:
    """A de-identified data set, and what was done to each attribute of the original."""

    dataset: FileDataset
    trace: tuple[AttributeAction, ...]


@dataclass(frozen=True, slots=True)
class Deidentifier:
    """Replaces identities by keyed ones. Who lacks the key cannot go back, nor test a guess."""

    key: bytes = field(repr=False)  # the project's, at least 32 bytes, never leaves the site; b"" with ``names``
    issuer: str = ""  # who gave out a patient id that names no issuer itself
    profile: Profile = USUAL
    people: bytes = field(default=b"", repr=False)  # the site's, for ``person``; empty: the same as ``key``
    names: Names | None = field(default=None, repr=False)  # who is asked, in a process that holds no key

    def __post_init__(self) -> None:
        """Refuse a key that could be guessed."""
        if self.names is not None and (self.key or self.people):
            raise ValueError("names are asked for where there is no key, and made where there is one")
        if self.names is None and (len(self.key) < MIN_KEY_BYTES or 0 < len(self.people) < MIN_KEY_BYTES):
            raise ValueError(f"the pseudonym key must have at least {MIN_KEY_BYTES} bytes")
        try:
            plain(self.issuer)
        except ValueError:
            raise ValueError("the issuer is not one plain text") from None

    def mac(self, purpose: str, *parts: bytes) -> str:
        """HMAC-SHA256 (RFC 2104) of length-prefixed parts under a purpose: 32 hex characters."""
        return self.named("project", purpose, parts)

    def named(self, key: Key, purpose: str, parts: tuple[bytes, ...]) -> str:
        """``mac`` under the project's key or the site's."""
        if self.names is not None:
            return self.names(key, purpose, parts)
        return _mac(self.key if key == "project" else self.people or self.key, purpose, *parts)

    def pseudonym(self, issuer: str, patient_id: str) -> str:
        """The patient's name inside the project: 32 hex characters.

        Case, all spaces and Unicode's compatibility forms are folded. An identifier that cannot be read as
        one plain text is refused, because it could be another spelling of one that came before. One patient
        under two pseudonyms would be counted twice towards k (P3); two patients under one are counted once,
        which is the safe error. Punctuation, leading zeros and typing errors are not folded: ``A-1`` and
        ``A1`` are two patients. Nor can it be seen that a wrong character set was declared.

        The same number of two issuers is two patients, and without an issuer the site's own is meant. So a
        PACS that fills Issuer of Patient ID in a part of its files makes two patients of one, unless
        ``issuer`` in ingest.toml is what the PACS writes there.

        Raises:
            FileRejectedError: ``missing_patient``, also when either is not one plain text.
        """
        return self.named("project", "patient", self._folded(issuer, patient_id))

    def person(self, issuer: str, patient_id: str) -> str:
        """The patient's name at the whole site, over all its projects: budgets and k are counted by it.

        What is one patient is said at :meth:`pseudonym`.

        Raises:
            FileRejectedError: ``missing_patient``.
        """
        return self.named("site", "patient", self._folded(issuer, patient_id))

    def _folded(self, issuer: str, patient_id: str) -> tuple[bytes, bytes]:
        try:
            given, own, patient = (_fold(plain(s)) for s in (issuer, self.issuer, patient_id))
        except ValueError:
            raise FileRejectedError("missing_patient") from None
        if not patient:
            raise FileRejectedError("missing_patient")
        return (given or own).encode(), patient.encode()

    def patient(self, dataset: Dataset) -> str:
        """The pseudonym of a data set's patient inside the project: the Patient ID that is written."""
        return self.pseudonym(*_named(dataset))

    def person_of(self, dataset: Dataset) -> str:
        """The site-wide pseudonym of a data set's patient.

        Raises:
            FileRejectedError: ``missing_patient``, see ``attributes.identifier`` and :meth:`pseudonym`.
        """
        return self.person(*_named(dataset))

    def uid(self, original: str) -> str:
        """A keyed UID below 2.25 (PS3.5 B.2), the same for the same original; ``""`` stays empty."""
        original = original.strip("\0 ")
        return f"2.25.{int(self.mac('uid', original.encode()), 16)}" if original else ""

    def identifier(self, original: str) -> str:
        """A keyed accession number, study id or the like: 16 hex characters, ``""`` stays empty."""
        folded = " ".join(original.split())
        return self.mac("id", folded.encode())[:16] if folded else ""

    def shift_days(self, pseudonym: str) -> int:
        """Days, negative, by which all dates of one patient move: intervals inside a patient survive."""
        return -(MIN_SHIFT_DAYS + int(self.mac("dates", pseudonym.encode()), 16) % SHIFT_RANGE_DAYS)

    def apply(self, dataset: Dataset) -> FileDataset:
        """``clean`` without its trace."""
        return self.clean(dataset).dataset

    def clean(self, dataset: Dataset, pixels: Pixels = UNKNOWN_PIXELS) -> DeidentifiedDataset:
        """A new, de-identified data set; the argument is left as it was.

        The pixel data must be native: a compressed stream may contain comments. Burned-in text stays; ``rules.judge``
        keeps risky images out, and ``pixels`` says what others changed or vouch for. A structured report is cleaned
        under the Clean Structured Content Option.

        Returns:
            A data set with new file meta (Explicit VR Little Endian) and a zero preamble, and its trace.
        Raises:
            FileRejectedError: documents and other non-images, compressed or oversized pixel data, no patient,
                missing identifiers, too deep or too many elements.
        """
        sop_class = text(dataset, "SOPClassUID")
        report = self.profile.clean_structured_content and sop_class.startswith(structured_content.REPORTS)
        if sop_class == MEDIA_DIRECTORY or (sop_class.startswith(NOT_IMAGES) and not report):
            raise FileRejectedError("not_an_image")
        if not (sop_class in UID_dictionary and text(dataset, "SOPInstanceUID")):
            raise FileRejectedError("incomplete")
        if report and not structured_content.named(dataset):
            raise FileRejectedError("not_an_image")
        pseudonym = self.patient(dataset)
        keyed = dataset_walk.KeyedReplacements(self.uid, self.identifier, self.shift_days(pseudonym))
        signed, palette = dataset.get("PixelRepresentation") == 1, text(dataset, "PhotometricInterpretation")
        walk = dataset_walk.DatasetWalker(
            keyed, self.profile, dataset_walk.own_words(dataset), signed, palette == "PALETTE COLOR"
        )
        body = walk.dataset(dataset)
        pixel_data = _native_pixels(dataset, walk.steps)
        if pixel_data is not None:
            body[pixel_data.tag] = pixel_data
        stamps = self.stamps(dataset, pseudonym, pixels)
        body.update(stamps)
        walk.steps.extend(_stamp_steps(dataset, stamps))
        result = Dataset(dict(sorted(body.items())))
        clean = FileDataset("", result, preamble=b"\0" * 128, file_meta=file_meta(result))
        clean.set_original_encoding(False, True)
        return DeidentifiedDataset(clean, tuple(walk.steps))

    def stamps(self, source: Dataset, pseudonym: str, pixels: Pixels) -> dict[BaseTag, DataElement]:
        """Say who the patient is now, and that and how the data set was de-identified (PS3.15 E.1.1)."""
        options = sorted((*self.profile.codes(), *pixels.codes()))
        shifted_dates = self.profile.retain_longitudinal
        method = f"Lazaret, PS3.15 {table.EDITION}, default deny"
        stamps = [
            ("PatientName", "PN", ""),
            ("PatientID", "LO", pseudonym),
            ("PatientBirthDate", "DA", ""),
            ("PatientIdentityRemoved", "CS", "YES"),
            ("DeidentificationMethod", "LO", [method, *(CODES[o].removesuffix(" Option") for o in options)]),
            ("DeidentificationMethodCodeSequence", "SQ", [_code(o) for o in options]),
            ("LongitudinalTemporalInformationModified", "CS", "MODIFIED" if shifted_dates else "REMOVED"),
        ]
        # NO is somebody's word, YES is a warning: only the warning is taken over from the file
        for keyword, vouched in (
            ("BurnedInAnnotation", pixels.burned_in != "unknown"),
            ("RecognizableVisualFeatures", pixels.faces != "unknown"),
        ):
            if vouched or text(source, keyword).upper() == "YES":
                stamps.append((keyword, "CS", "NO" if vouched else "YES"))
        return {e.tag: e for e in (DataElement(keyword, vr, value) for keyword, vr, value in stamps)}


def _named(dataset: Dataset) -> tuple[str, str]:
    try:
        return identifier(dataset, "IssuerOfPatientID"), identifier(dataset, "PatientID")
    except ValueError:
        raise FileRejectedError("missing_patient") from None


def _fold(value: str) -> str:
    """Without spaces, case and compatibility forms (Unicode 3.13, D146)."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold())
    return "".join(folded.split())


def _mac(key: bytes, purpose: str, *parts: bytes) -> str:
    encoded = purpose.encode()
    message = [len(encoded).to_bytes(8, "big"), encoded]
    for part in parts:
        message += (len(part).to_bytes(8, "big"), part)
    return hmac.digest(key, b"".join(message), hashlib.sha256).hex()[:32]


def _code(value: str) -> Dataset:
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = value, "DCM", CODES[value]
    return item


def _stamp_steps(source: Dataset, stamps: dict[BaseTag, DataElement]) -> list[AttributeAction]:
    steps = [step("preamble", "blanked", "preamble"), step("file_meta", "replaced", "file_meta")]
    for tag in map(BaseTag, sorted(STAMPED)):
        path = f"{tag >> 16:04X},{tag & 0xFFFF:04X}"
        if tag in stamps:
            emptied = stamps[tag].value in ("", None)
            steps.append(step(path, "emptied" if emptied else "replaced", "profile" if emptied else "stamp"))
        elif tag in source:
            steps.append(step(path, "removed", "not_vouched"))
    return steps


def _native_pixels(dataset: Dataset, steps: list[AttributeAction]) -> RawDataElement | None:
    """Native pixel data, exactly as long as the header says; what follows is dropped."""
    if "PixelData" not in dataset:
        return None
    meta = getattr(dataset, "file_meta", None)
    syntax = str(meta.get("TransferSyntaxUID", "")) if meta is not None else ""
    if syntax not in (IMPLICIT_LE, EXPLICIT_LE):
        raise FileRejectedError("unsupported_encoding")
    try:
        samples = int(dataset.Rows) * int(dataset.Columns) * int(dataset.get("SamplesPerPixel", 1))
        bits = int(dataset.BitsAllocated)
        length = samples * int(dataset.get("NumberOfFrames") or 1) * bits // 8
        value = dataset["PixelData"].value
    except UNREADABLE:
        raise FileRejectedError("undecodable") from None
    if bits not in (8, 16, 32) or not isinstance(value, bytes) or not 0 < length <= len(value):
        raise FileRejectedError("undecodable")
    steps.append(step("7FE0,0010", "kept", "listed"))
    if len(value) > length + length % 2:
        steps.append(step("trailing", "removed", "trailing"))
    return dataset_walk.raw(retained_attributes.PIXELS, "OB" if bits == 8 else "OW", padded(value[:length], b"\0"))


def file_meta(body: Dataset) -> FileMetaDataset:
    """New file meta information: nothing of the old one survives."""
    meta = FileMetaDataset()
    meta.FileMetaInformationVersion = b"\0\1"
    meta.MediaStorageSOPClassUID = body.SOPClassUID
    meta.MediaStorageSOPInstanceUID = body.SOPInstanceUID
    meta.TransferSyntaxUID = UID(EXPLICIT_LE)
    meta.ImplementationClassUID = UID(IMPLEMENTATION_UID)
    meta.ImplementationVersionName = "LAZARET"
    return meta
