"""Every identifying value of one original data set, for the residual check of its result.

Read from everywhere that a parser can reach: nested items, private and unknown elements, file meta, preamble.
The values stay in the process: nothing here is printed, logged or put into an exception.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pydicom import Dataset
from pydicom._dicom_dict import DicomDictionary
from pydicom._uid_dict import UID_dictionary
from pydicom.dataelem import RawDataElement
from pydicom.multival import MultiValue
from pydicom.sequence import Sequence
from pydicom.valuerep import PersonName

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import MAX_DEPTH
from agent.deidentify.ps315 import retained_attributes, table, value_encoding
from agent.deidentify.ps315.actions import decide
from agent.deidentify.ps315.options import CODES, USUAL, Profile

Kind = str  # of KINDS
KINDS: Final = ("name", "id", "uid", "date", "text", "device")
_LEAST: Final = 4  # characters of what is looked for anywhere; shorter ones only as words of text
_LEAST_UID: Final = 12
_LEAST_JOINED: Final = 5
_BIRTHS: Final = retained_attributes.tags("PatientBirthDate", "PatientBirthDateInAlternativeCalendar")
_MOST_BLOB: Final = 2048  # bytes: larger unknown values are images and tables of a vendor's own
_TEXT: Final = frozenset({"LO", "SH", "ST", "LT", "UT", "UC", "AE", "UR"})
_OPAQUE: Final = frozenset({"UN", "OB"})
_REMOVING: Final = frozenset({"removed", "emptied", "dummy", "keyed_id", "words", "stamped", "private"})
_RUN: Final = re.compile(rb"[\x20-\x7e\x80-\xff]{6,}")
_ESCAPED: Final = re.compile(rb"[\x1b\x80-\xff]")  # ISO 2022, or beyond ASCII
_NAME_PARTS: Final = re.compile(r"[\^=\s,;.()]+")
_WORD: Final = re.compile(r"[^\W_]+")
_TITLED: Final = re.compile(
    r"\b(?:mrs?|ms|dr|prof|herr|frau|mme|patient|name)\b[.:]?\s+([^\W\d_]{2,})", re.IGNORECASE
)
_DAY: Final = re.compile(r"(\d{4})[.]?(\d{2})[.]?(\d{2})")
_NO_DAYS: Final = frozenset({"19000101", "00010101"})
_NUMBER: Final = re.compile(r"[+-]?\d*\.?\d*(?:[eE][+-]?\d+)?")
_METHOD: Final = "lazaret default deny removed modified dicm basic yes no"


def _ours() -> tuple[frozenset[str], str]:
    words = {
        w.casefold()
        for listed in retained_attributes.VOCABULARY.values()
        for entry in listed
        for w in _WORD.findall(entry)
    }
    words |= {w for meaning in (*CODES.values(), _METHOD) for w in _WORD.findall(meaning.casefold())}
    return frozenset(words), "\n".join(sorted(words))


OUR_WORDS, _OUR_TEXT = _ours()  # what this agent itself writes: finding it says nothing


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IdentifierSet:
    """Values to search for: ``anywhere`` in any byte; ``words`` as entire words or entire values of texts."""

    anywhere: dict[str, Kind] = field(default_factory=dict)
    words: dict[str, Kind] = field(default_factory=dict)  # folded
    encoded: dict[bytes, Kind] = field(default_factory=dict)  # as the file itself writes them
    joined: dict[str, Kind] = field(default_factory=dict)  # folded, without separators: numbers written in groups
    born: set[tuple[int, int, int]] = field(default_factory=set)  # year, month, day


def identifiers(dataset: Dataset, profile: Profile = USUAL) -> IdentifierSet:
    """The identifying values of a data set under a profile: what the profile keeps is not one.

    Raises:
        FileRejectedError: ``too_deep``.
    """
    found = IdentifierSet()
    _collect(dataset, profile, found, 0)
    meta = getattr(dataset, "file_meta", None)
    if meta is not None:
        _collect(meta, profile, found, 0)
    preamble = getattr(dataset, "preamble", None)
    if preamble:
        _runs(preamble, found)
    return found


def of_patient(patient_id: str) -> IdentifierSet:
    """The one identifying value that is known of a file which names nobody itself (NIfTI)."""
    named = Dataset()
    named.PatientID = patient_id
    return identifiers(named)


def _collect(source: Dataset, profile: Profile, found: IdentifierSet, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise FileRejectedError("too_deep")
    for tag in tuple(source._dict):
        element = source.get_item(tag)
        entry = DicomDictionary.get(int(tag))
        vr = entry[0] if entry is not None else (element.VR or "UN")
        if vr in _NUMERIC and entry is not None:
            continue
        try:
            if vr == "SQ" or element.VR == "SQ":
                items = source[tag].value
                for item in items if isinstance(items, Sequence) else ():
                    _collect(item, profile, found, depth + 1)
                if isinstance(items, bytes) and len(items) <= _MOST_BLOB:
                    _runs(items, found)
                continue
            _element(source, element, int(tag), vr, profile, found)
        except value_encoding.UNREADABLE:
            if isinstance(element, RawDataElement) and element.value:
                _runs(element.value, found)


_NUMERIC: Final = frozenset(
    {"US", "SS", "UL", "SL", "FL", "FD", "DS", "IS", "CS", "AT", "OW", "OF", "OD", "OL", "TM", "AS", "UV", "SV"}
    | {"US or SS", "US or OW", "US or SS or OW", "OB or OW"}
)


def _element(
    source: Dataset, element: value_encoding.Element, tag: int, vr: str, profile: Profile, found: IdentifierSet
) -> None:
    """Add what one element says, according to what kind of thing it is."""
    claimed = element.VR or vr
    if "UI" in (vr, claimed) or vr in ("DA", "DT"):
        add = _date if vr in ("DA", "DT") else _uid
        for value in value_encoding.texts(source, element):
            add(value, found)
            if tag in _BIRTHS:
                _birth(value, found)
    elif "PN" in (vr, claimed):
        _person(source, element, found)
    elif claimed in _OPAQUE or (vr == "UN" and isinstance(element.value, bytes)):
        if isinstance(element.value, bytes) and len(element.value) <= _MOST_BLOB:
            _runs(element.value, found)
    elif (vr in _TEXT or claimed in _TEXT) and not _creator(tag):
        _text(source, tag, profile, found)


def _creator(tag: int) -> bool:
    return bool(tag >> 16 & 1) and 0x10 <= (tag & 0xFFFF) <= 0xFF


def _strings(source: Dataset, tag: int) -> list[str]:
    value = source[tag].value
    many = list(value or ()) if isinstance(value, MultiValue | list) else [value]
    return [str(v).strip("\0 ") for v in many if v is not None]


def _person(source: Dataset, element: value_encoding.Element, found: IdentifierSet) -> None:
    for encoded in _as_written(source, element):
        for part in re.split(rb"[\^=\\ ]+", encoded):
            if len(part) >= _LEAST:
                found.encoded[part.lower()] = "name"
    for value in _strings(source, element.tag):
        parts = [p for p in _NAME_PARTS.split(value) if p]
        for part in parts:
            _token(part, "name", found)
        if len(parts) > 1:
            for whole in (value, " ".join(parts), " ".join(reversed(parts[:2])), ", ".join(parts[:2])):
                found.anywhere[whole] = "name"


def _as_written(source: Dataset, element: value_encoding.Element) -> list[bytes]:
    """Names that are not ASCII, in the bytes of the file's own character set, parsed already or not."""
    value = element.value
    if isinstance(element, RawDataElement):
        return [value] if value and _ESCAPED.search(value) else []
    names = list(value) if isinstance(value, MultiValue | list) else [value]
    written = [name.encode() for name in names if isinstance(name, PersonName)]
    return [w for w in written if isinstance(w, bytes) and _ESCAPED.search(w)]


def _token(part: str, kind: Kind, found: IdentifierSet) -> None:
    """One word of a name, and its writing without accents."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", part) if not unicodedata.combining(c))
    for word in {part, plain}:
        folded = word.casefold()
        if folded in OUR_WORDS or len(word) < 2 or (word.isdigit() and len(word) < 6):
            continue
        long = len(word) >= _LEAST or len(word.encode()) >= 2 * _LEAST
        if long and folded not in _OUR_TEXT:
            found.anywhere[word] = kind
        else:
            found.words[folded] = kind


def _uid(uid: str, found: IdentifierSet) -> None:
    if not uid or uid in UID_dictionary or uid.startswith("1.2.840.10008."):
        return
    if len(uid) < _LEAST_UID:
        found.words[uid.casefold()] = "uid"
    else:
        found.anywhere[uid] = "uid"


def _date(value: str, found: IdentifierSet) -> None:
    match = _DAY.match(value)
    if match is None or "".join(match.groups()) in _NO_DAYS:
        return
    y, m, d = match.groups()
    for writing in (y + m + d, f"{y}-{m}-{d}", f"{y}.{m}.{d}", f"{y}/{m}/{d}", f"{d}.{m}.{y}", f"{d}/{m}/{y}"):
        found.anywhere[writing] = "date"
    found.anywhere[f"{m}/{d}/{y}"] = "date"
    found.anywhere[f"{d}-{m}-{y}"] = "date"


def _birth(value: str, found: IdentifierSet) -> None:
    """A date of birth as digits alone, in the usual orders, with and without the century."""
    match = _DAY.match(value)
    if match is None or "".join(match.groups()) in _NO_DAYS:
        return
    y, m, d = match.groups()
    found.born.add((int(y), int(m), int(d)))
    for year in (y, y[2:]):
        found.joined.update(dict.fromkeys((year + m + d, d + m + year, m + d + year), "date"))


def is_identifying(value: str) -> bool:
    """Whether a text has a word that this agent would not write itself."""
    if _NUMBER.fullmatch(value) and not (value.isdigit() and len(value) >= 6):
        return False
    words = _WORD.findall(value.casefold())
    return any(w not in OUR_WORDS and not (w.isdigit() and len(w) < 4) for w in words)


def _text(source: Dataset, tag: int, profile: Profile, found: IdentifierSet) -> None:
    """A text that does not stay: whole, by its lines, and the words that are called names in it."""
    if decide(profile, tag).kind not in _REMOVING:
        return
    entry = DicomDictionary.get(tag)
    keyword = entry[4] if entry is not None else ""
    identity = tag in table.ATTRIBUTES and keyword.endswith(("ID", "IDs", "Number", "Numbers", "Identifier"))
    for value in _strings(source, tag):
        for titled in _TITLED.findall(value):
            _token(titled, "name", found)
        if identity:
            _identity(value, found)
            continue
        label = "device" if tag in table.OPTIONS["retain_device"] else "text"
        for line in {value, *re.split(r"[\r\n]+", value)}:
            if len(line) >= 6 and is_identifying(line):
                found.anywhere[line] = label


def _identity(value: str, found: IdentifierSet) -> None:
    whole = "".join(_WORD.findall(value.casefold()))
    for form in (whole, retained_attributes.digits(whole), retained_attributes.digits(whole).lstrip("0")):
        if len(form) >= _LEAST_JOINED and retained_attributes.digits(form) and form not in _OUR_TEXT:
            found.joined[form] = "id"
    for writing in {value, value.lstrip("0"), re.sub(r"[\s./-]+", "", value)}:
        if len(writing) < 2 or writing.casefold() in OUR_WORDS:
            continue
        digits_only = writing.isdigit()
        if len(writing) >= (6 if digits_only else _LEAST) and writing.casefold() not in _OUR_TEXT:
            found.anywhere[writing] = "id"
        elif not digits_only or len(writing) > 2:
            found.words[writing.casefold()] = "id"


def _runs(data: bytes, found: IdentifierSet) -> None:
    """Readable runs of bytes in what has no known form."""
    if data.startswith((b"II*\0", b"MM\0*")) or not data.strip(b"\0"):
        return
    for run in _RUN.findall(data):
        text = run.decode("latin-1").strip()
        if len(text) >= 6 and is_identifying(text):
            found.anywhere[text] = "text"
            found.encoded[run.strip().lower()] = "text"


def encodings_of(needles: IdentifierSet) -> Iterator[tuple[bytes, str, Kind, int]]:
    """Every needle in every encoding: folded bytes, the text, its kind, bytes per character (1 or 2)."""
    seen: set[bytes] = set()
    for text, kind in needles.anywhere.items():
        forms: Iterable[str] = (text,) if text.isascii() else {text, text.lower(), text.upper(), text.casefold()}
        for form in forms:
            coded = [(form.encode("utf-8", "replace"), 1)]
            if not form.isascii():
                coded.append((form.encode("latin-1", "ignore"), 1))
            coded += [(form.encode("utf-16-le", "replace"), 2), (form.encode("utf-16-be", "replace"), 2)]
            for data, width in coded:
                folded = data.lower()
                if len(folded) >= _LEAST and folded not in seen:
                    seen.add(folded)
                    yield folded, text, kind, width
    for data, kind in needles.encoded.items():
        if len(data) >= _LEAST and data not in seen:
            seen.add(data)
            yield data, "", kind, 1
