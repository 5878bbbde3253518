"""The proof after de-identification: no identifying value of the original is in any byte of the result.

``identifiers`` (from ``needles``) reads the original, ``residual`` looks through the output, folded, in UTF-8,
Latin-1, UTF-16 of both orders and the file's own encoding. Neither ``bytes.find`` for each needle nor an
alternation of ``re`` is fast enough over half a megabyte of pixels, hence two stages: a table of hashed words
of the needles over aligned words of the pixels, by numpy, and a comparison where the table says maybe.
A pixel is a number that may look like a letter, so below 8 characters (10 digits) a run of pixels that spells
a needle is chance, and is not looked for; outside the pixels everything is.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.identifying_values import OUR_WORDS, IdentifierSet, encodings_of
from agent.deidentify.ps315 import retained_attributes
from agent.deidentify.ps315.actions import STAMPED

_LEAST_IN_PIXELS: Final = 8
_LEAST_DIGITS_IN_PIXELS: Final = 10
_BITS: Final = 18
_FOLD: Final = 0x2020202020202020  # makes ASCII letters lower case, and others alike: a weaker, faster fold
_MIX: Final = 0x9E3779B97F4A7C15  # Knuth, TAOCP 6.4: multiplicative hashing
_FLOOD: Final = 4096  # places worth a second look; beyond, one search for each needle is faster
_LONG: Final = frozenset({b"OB", b"OW", b"OF", b"OD", b"OL", b"OV", b"SQ", b"UC", b"UR", b"UT", b"UN", b"SV", b"UV"})
_TEXTS: Final = frozenset({b"LO", b"SH", b"ST", b"LT", b"UT", b"UC", b"PN", b"AE"})
_NUMBERS: Final = frozenset({b"DS", b"IS", b"TM"})
_KEYED: Final = re.compile(rb"2\.25\.\d{1,39}|[0-9a-f]{16}|[0-9a-f]{32}")
_LEAST_IN_KEYED: Final = 12
_OURS: Final = STAMPED | retained_attributes.CODE_TAGS  # written by ``tags``, or of the standard's closed lists
_UNPACKED: Final = {b"US": "H", b"SS": "h", b"UL": "I", b"SL": "i", b"UV": "Q", b"SV": "q", b"FL": "f", b"FD": "d"}
_FEW_VALUES: Final = 64  # in longer lists of numbers, five digits or three letters are chance
_LARGEST_COMMON: Final = 9_999
_LARGE: Final = 100_000
_SHORT_NAME: Final = 3
_WORD: Final = re.compile(r"[^\W_]+")
_UNDEFINED: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Place:
    """One value of the output."""

    start: int
    end: int
    tag: int
    vr: bytes
    path: str


@dataclass(frozen=True, slots=True)
class _Pattern:
    data: bytes
    kind: str
    digits: int  # of a needle that is nothing but digits, 0 for others
    width: int  # bytes per character


def residual(needles: IdentifierSet, output: bytes) -> tuple[str, ...]:
    """Where identifying values are still to be found: ``kind@path``, each once, never a value.

    Args:
        needles: of the original.
        output: a DICOM file (Explicit VR Little Endian), a NIfTI file, or any other bytes.
    """
    places, bulk = _layout(output)
    patterns = [
        _Pattern(data, kind, len(text) if text.isdigit() else 0, width)
        for data, text, kind, width in encodings_of(needles)
    ]
    found: set[str] = set()
    rest = [(0, bulk[0]), (bulk[1], len(output))] if bulk[1] > bulk[0] else [(0, len(output))]
    for start, end in rest:
        for pattern, at in _anywhere(patterns, output[start:end].lower()):
            path = _counts(pattern, start + at, output, places)
            if path:
                found.add(f"{pattern.kind}@{path}")
    if bulk[1] > bulk[0]:
        name = next((p.path for p in places if p.start == bulk[0]), "voxels")
        large = [p for p in patterns if _fits_pixels(p)]
        found |= {f"{p.kind}@{name}" for p in _in_bulk(large, output, *bulk)}
    found |= _words(needles, output, places)
    found |= _regrouped(needles, output, places) | _as_numbers(needles, output, places)
    return tuple(sorted(found))


def _fits_pixels(pattern: _Pattern) -> bool:
    least = _LEAST_DIGITS_IN_PIXELS if pattern.digits else _LEAST_IN_PIXELS
    return len(pattern.data) // pattern.width >= least


# ------------------------------------------------------------------ where things are in the output


def _layout(output: bytes) -> tuple[list[_Place], tuple[int, int]]:
    """The values of a file, and the range of its pixels; nothing is skipped in what is not understood."""
    if output[128:132] != b"DICM":
        return [], _voxels(output)
    places: list[_Place] = []
    try:
        _walk(output, 132, len(output), "", places)
    except (struct.error, ValueError):
        return places, (0, 0)
    pixels = next((p for p in places if p.tag == retained_attributes.PIXELS and "/" not in p.path), None)
    return places, (pixels.start, pixels.end) if pixels is not None else (0, 0)


def _voxels(output: bytes) -> tuple[int, int]:
    for size, where, form in ((348, 108, "<f"), (540, 168, "<q")):
        if len(output) >= size and output[:4] == struct.pack("<i", size):
            offset = int(struct.unpack_from(form, output, where)[0])
            return (offset, len(output)) if size <= offset <= len(output) else (0, 0)
    return 0, 0


def _walk(output: bytes, position: int, end: int, path: str, places: list[_Place], depth: int = 0) -> None:
    """Explicit VR Little Endian, as ``tags`` writes it (PS3.5 section 7.1.2)."""
    if depth > 20:
        raise ValueError("too deep")
    while position < end:
        group, number, vr = struct.unpack_from("<HH2s", output, position)
        if vr in _LONG:
            (length,) = struct.unpack_from("<I", output, position + 8)
            body = position + 12
        else:
            (length,) = struct.unpack_from("<H", output, position + 6)
            body = position + 8
        here = f"{path}{group:04X},{number:04X}"
        if length == _UNDEFINED or body + length > end:
            raise ValueError("not ours")
        position = body + length
        if vr == b"SQ":
            _items(output, body, position, here, places, depth)
        else:
            places.append(_Place(body, position, group << 16 | number, vr, here))


def _items(output: bytes, position: int, end: int, path: str, places: list[_Place], depth: int) -> None:
    count = 0
    while position < end:
        group, number, length = struct.unpack_from("<HHI", output, position)
        if (group, number) != (0xFFFE, 0xE000) or length == _UNDEFINED:
            raise ValueError("not ours")
        _walk(output, position + 8, position + 8 + length, f"{path}[{count}]/", places, depth + 1)
        position, count = position + 8 + length, count + 1


# ------------------------------------------------------------------ outside the pixels


def _anywhere(patterns: list[_Pattern], folded: bytes) -> Iterator[tuple[_Pattern, int]]:
    """Every occurrence of every pattern, by the hash of its first four bytes at every offset."""
    if len(folded) < 4:
        return
    index: dict[int, list[_Pattern]] = {}
    for pattern in patterns:
        index.setdefault(int.from_bytes(pattern.data[:4], "little"), []).append(pattern)
    if not index:
        return
    data = np.frombuffer(folded, dtype=np.uint8).astype(np.uint32)
    words = data[:-3] | data[1:-2] << 8 | data[2:-1] << 16 | data[3:] << 24
    table = _table(index)
    for at in np.flatnonzero(table[_hash(words.astype(np.uint64))]).tolist():
        for pattern in index.get(int(words[at]), ()):
            if folded.startswith(pattern.data, at):
                yield pattern, at


def _table(words: dict[int, list[_Pattern]] | dict[int, list[tuple[_Pattern, int]]]) -> NDArray[np.bool_]:
    table = np.zeros(1 << _BITS, dtype=np.bool_)
    table[_hash(np.fromiter(words, dtype=np.uint64, count=len(words)))] = True
    return table


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    hashed: NDArray[np.uint64] = (words * np.uint64(_MIX)) >> np.uint64(64 - _BITS)
    return hashed


def _counts(pattern: _Pattern, at: int, output: bytes, places: list[_Place]) -> str:
    """The path of a hit that is no chance, ``""`` for one that is."""
    end = at + len(pattern.data)
    place = next((p for p in places if p.start < end and at < p.end), None)
    if pattern.digits and pattern.width == 1 and not _apart(pattern, at, end, output):
        return ""
    if place is None:
        return "preamble" if at < 128 and places else "bytes"
    value = output[place.start : place.end]
    part = next((v for v in value.split(b"\\") if _KEYED.fullmatch(v.strip(b"\0 "))), None)
    # keyed values are random digits and letters; so are meanings of codes, the standard's own
    if part is not None and len(pattern.data) < _LEAST_IN_KEYED:
        return ""
    said = value.strip(b"\0 ").decode("ascii", "replace")
    if place.tag == retained_attributes.CODE_MEANING and said in _meanings():
        return ""
    # a whole value that is a product's name is no patient's: private elements repeat it, cut to their own lengths
    if (place.tag in retained_attributes.MAKERS and retained_attributes.maker(said)) or (
        place.tag in retained_attributes.MODELS and retained_attributes.model(said)
    ):
        return ""
    return place.path


def _apart(pattern: _Pattern, at: int, end: int, output: bytes) -> bool:
    """Whether a run of digits is a number of its own and no part of a longer one; dates may lead a time."""
    before, after = output[at - 1 : at] if at else b"", output[end : end + 2]
    if before.isdigit() or before == b".":
        return False
    if pattern.kind == "date" or pattern.digits >= _LEAST_IN_KEYED:
        return True
    return not (after[:1].isdigit() or (after[:1] == b"." and after[1:].isdigit()))


@cache
def _meanings() -> frozenset[str]:
    return frozenset(m.encode("ascii", "ignore")[:64].decode().strip() for m in retained_attributes.meanings())


def _words(needles: IdentifierSet, output: bytes, places: list[_Place]) -> set[str]:
    """Short needles: whole words, or whole values, of the texts."""
    if not needles.words:
        return set()
    found = set()
    for place in places:
        if place.vr not in _TEXTS and place.vr != b"UI":
            continue
        value = output[place.start : place.end].decode("utf-8", "replace").casefold().strip("\0 ")
        parts = value.split("\\")
        words = {*parts} if place.vr == b"UI" else {*parts, *_WORD.findall(value)} - OUR_WORDS
        if place.tag == retained_attributes.CODE_MEANING:
            continue
        found |= {f"{needles.words[w]}@{place.path}" for w in words & needles.words.keys()}
    return found


def _regrouped(needles: IdentifierSet, output: bytes, places: list[_Place]) -> set[str]:
    """Numbers of people in texts, whatever separates their digits, and over several values."""
    found = set()
    for place in places:
        if place.vr not in _TEXTS or place.tag in _OURS or not needles.joined:
            continue
        parts = [v.strip(b"\0 ") for v in output[place.start : place.end].split(b"\\")]
        text = "\\".join(p.decode("utf-8", "replace").casefold() for p in parts if not _KEYED.fullmatch(p))
        joined, digits = "".join(_WORD.findall(text)), retained_attributes.digits(text)
        for needle, kind in needles.joined.items():
            if needle in joined if not needle.isdigit() else needle in digits and _in_groups(needle, text):
                found.add(f"{kind}@{place.path}")
    return found


def _in_groups(needle: str, text: str) -> bool:
    """Whether digits stand in a text, from the start of one number to the end of another."""
    pattern = r"(?<!\d)" + r"\D*".join(needle) + r"(?!\d)"
    # a fraction that happens to be the same digits is no number of its own
    return any(m[0] != needle or not re.search(r"\d[.]$", text[: m.start()]) for m in re.finditer(pattern, text))


def _as_numbers(needles: IdentifierSet, output: bytes, places: list[_Place]) -> set[str]:
    """Numbers of people, dates of birth and short names in the attributes whose values are numbers."""
    plain = {int(n): kind for n, kind in needles.joined.items() if n.isdigit() and int(n) > _LARGEST_COMMON}
    names = [n for n, kind in needles.words.items() if kind == "name" and len(n) == _SHORT_NAME and n.isascii()]
    born = {order for y, m, d in needles.born for order in ((y, m, d), (d, m, y), (m, d, y))}
    found = set()
    for place in places:
        if place.vr not in _UNPACKED and place.vr not in (b"DS", b"IS"):
            continue
        whole = _whole_numbers(place, output)
        many = len(whole) > _FEW_VALUES
        kinds = {plain[n] for n in whole if n is not None and n in plain and not (many and n < _LARGE)}
        if not many and len(whole) >= _SHORT_NAME:
            letters = "".join(chr(n) if n is not None and 0 < n < 128 else "\0" for n in whole).casefold()
            kinds |= {"name" for n in names if n in letters}
            kinds |= {"date" for three in zip(whole, whole[1:], whole[2:], strict=False) if three in born}
        found |= {f"{kind}@{place.path}" for kind in kinds}
    return found


def _whole_numbers(place: _Place, output: bytes) -> list[int | None]:
    """The values of an attribute of numbers, None for those that are not whole."""
    value = output[place.start : place.end]
    numbers: list[float]
    if place.vr in _UNPACKED:
        form = _UNPACKED[place.vr]
        count = len(value) // struct.calcsize(f"<{form}")
        numbers = list(struct.unpack_from(f"<{count}{form}", value))
    else:
        try:
            numbers = [float(v or b"nan") for v in value.strip(b"\0 ").split(b"\\")]
        except ValueError:
            return []  # not a number of ours, and the scan of all bytes has looked at it
    return [int(n) if float(n).is_integer() else None for n in numbers]


# ------------------------------------------------------------------ in the pixels


def _in_bulk(patterns: list[_Pattern], output: bytes, start: int, end: int) -> list[_Pattern]:
    """The patterns that occur between two offsets; single-byte ones by 4-byte words, others by 8-byte words."""
    narrow = [p for p in patterns if p.width == 1]
    wide = [p for p in patterns if p.width == 2]
    return _by_words(narrow, output, start, end, 4) + _by_words(wide, output, start, end, 8)


def _by_words(patterns: list[_Pattern], output: bytes, start: int, end: int, size: int) -> list[_Pattern]:
    """A needle of at least 2 x size - 1 bytes holds an aligned word of ``size`` bytes at one of its phases."""
    count = (end - start) // size
    if not patterns or not count:
        return []
    fold = _FOLD & (1 << 8 * size) - 1
    index: dict[int, list[tuple[_Pattern, int]]] = {}
    for pattern in patterns:
        for phase in range(size):
            word = int.from_bytes(pattern.data[phase : phase + size], "little") | fold
            index.setdefault(word, []).append((pattern, phase))
    words: NDArray[np.unsignedinteger]
    if size == 4:
        words = narrow = np.frombuffer(output, dtype=np.uint32, count=count, offset=start) | np.uint32(fold)
        places = np.flatnonzero(_table32(index)[_hash32(narrow)])
    else:
        words = wide = np.frombuffer(output, dtype=np.uint64, count=count, offset=start) | np.uint64(fold)
        places = np.flatnonzero(_table(index)[_hash(wide)])
    if len(places) > _FLOOD:
        folded = output[start:end].lower()
        return [p for p in patterns if p.data in folded]
    return list(_verified(index, words, places, output, start, size))


def _verified(
    index: dict[int, list[tuple[_Pattern, int]]],
    words: NDArray[np.unsignedinteger],
    places: NDArray[np.intp],
    output: bytes,
    start: int,
    size: int,
) -> Iterator[_Pattern]:
    for place in places.tolist():
        for pattern, phase in index.get(int(words[place]), ()):
            at = start + place * size - phase
            if at >= 0 and output[at : at + len(pattern.data)].lower() == pattern.data:
                yield pattern


def _hash32(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    hashed: NDArray[np.uint32] = (words * np.uint32(_MIX >> 32 | 1)) >> np.uint32(32 - _BITS)
    return hashed


def _table32(index: dict[int, list[tuple[_Pattern, int]]]) -> NDArray[np.bool_]:
    table = np.zeros(1 << _BITS, dtype=np.bool_)
    table[_hash32(np.fromiter(index, dtype=np.uint32, count=len(index)))] = True
    return table
