"""Looks for what identifies a patient in bytes that should hold nothing of it, however it is packed in them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pydicom
from PIL import Image


def identities(pacs: Path) -> tuple[set[str], set[str]]:
    """Names, numbers, UIDs, addresses, texts; and dates: of every file that the hospitals hold."""
    words: set[str] = set()
    dates: set[str] = set()
    for path in pacs.rglob("*"):
        if path.is_file():
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for element in pydicom.dcmread(path, force=True).iterall():
                    if element.VR in ("SQ", "UN", "OB", "OW"):  # the text of a nested bomb would fill the memory
                        continue
                    values = _values(element)
                    if element.VR in ("DA", "DT"):
                        dates |= {value[:8] for value in values if re.fullmatch(r"\d{8}.*", value)}
                    elif element.VR in ("PN", "UI") or element.keyword in _IDENTIFYING:
                        words |= values
                        words |= {
                            part for value in values for part in re.split(r"[\^=]", value) if element.VR == "PN"
                        }
    for listed in pacs.glob("*/nifti.csv"):
        words |= {line.split(",")[1] for line in listed.read_text().splitlines()[1:]}
    # six characters or more, and not of the "000000000" kind, which any archive holds;
    # nor "operator", which is what one scanner file calls its operator, and what we call ours
    telling = {word for word in words if len(word) >= 6 and len(set(word)) > 2} - {"operator"}
    return {word for word in telling if not word.startswith("1.2.840.10008.")}, dates


def _values(element: pydicom.DataElement) -> set[str]:
    value = element.value
    listed = [value] if isinstance(value, str) or element.VM <= 1 else list(value)
    return {str(one) for one in listed if one not in (None, "")}


_IDENTIFYING = {
    "PatientID", "AccessionNumber", "PatientAddress", "InstitutionName", "InstitutionAddress", "OtherPatientIDs",
    "StudyDescription", "PatientComments", "ReferringPhysicianAddress", "StudyID", "DeviceSerialNumber",
    "StationName", "PatientTelephoneNumbers", "ImageComments", "IssuerOfPatientID",
}  # fmt: skip


def readable(raw: bytes, depth: int = 3) -> Iterator[bytes]:
    """The bytes themselves, and whatever is packed in them: base64, hexadecimal, PNG, JSON escapes."""
    yield raw
    if depth == 0:
        return
    for found in re.finditer(rb"[A-Za-z0-9+/]{40,}={0,2}", raw):
        with contextlib.suppress(binascii.Error):
            yield from readable(base64.b64decode(found.group() + b"=" * (-len(found.group()) % 4)), depth - 1)
    for found in re.finditer(rb"(?:[0-9a-fA-F]{2}){16,}", raw):
        yield bytes.fromhex(found.group().decode())
    for at in (m.start() for m in re.finditer(rb"\x89PNG\r\n", raw)):
        with contextlib.suppress(OSError, SyntaxError, ValueError), Image.open(io.BytesIO(raw[at:])) as picture:
            yield np.asarray(picture).tobytes()
    if rb"\u" in raw:
        with contextlib.suppress(UnicodeError):
            yield raw.decode("ascii").encode().decode("unicode_escape").encode()


class Scan:
    """Looks for identities in bytes, and in what is packed in them."""

    def __init__(self, words: set[str], dates: set[str]) -> None:
        self.words: dict[bytes, list[bytes]] = {}
        for word in (word.encode() for word in words):
            self.words.setdefault(word[:6], []).append(word)
        self.begins = np.zeros(1 << 24, bool)
        for start in self.words:
            self.begins[int.from_bytes(start[:3], "big")] = True
        # a date alone is eight digits: only where no other digit, and no digit of a hexadecimal number, touches it
        self.dates = {d.encode() for d in dates | {f"{d[:4]}-{d[4:6]}-{d[6:]}" for d in dates}}
        self.dated = re.compile(rb"(?<![0-9a-fA-F])(?:[0-9]{8}|[0-9]{4}-[0-9]{2}-[0-9]{2})(?![0-9a-fA-F])")

    def __call__(self, raw: bytes) -> set[bytes]:
        found: set[bytes] = set()
        for piece in readable(raw):
            found.update(self._words(piece))
            found |= self.dates & set(self.dated.findall(piece))
        return found

    def _words(self, piece: bytes) -> Iterator[bytes]:
        a = np.frombuffer(piece, np.uint8).astype(np.uint32)
        for at in np.flatnonzero(self.begins[(a[:-2] << 16) | (a[1:-1] << 8) | a[2:]]) if len(a) > 2 else ():
            for word in self.words.get(piece[at : at + 6], ()):
                if piece.startswith(word, at):
                    yield word
