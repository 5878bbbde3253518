"""Looks for planted texts in what came out: byte search in every encoding, and a walk over the parsed values.

Written without the product's own residual scan, which it checks.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import html
import io
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final
from urllib.parse import quote

import pydicom
from pydicom import Dataset
from pydicom.multival import MultiValue

from tests.torture.plants import unchecked
from tests.torture.sower import Plant
from tests.torture.streams import hidden_bits

_CODECS: Final = (
    *("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "latin-1", "iso8859-2", "iso8859-5", "koi8-r"),
    *("cp1251", "cp1252", "shift_jis", "euc_jp", "euc_kr", "gb18030", "gbk", "big5", "cp037", "utf-7"),
)
_ESCAPING: Final = ("iso2022_jp", "iso2022_jp_2", "iso2022_kr")  # what is between the escape sequences counts
_LEAST: Final = 6  # characters that a byte search is fair for: shorter texts are looked for in values alone


def _forms(text: str) -> set[str]:
    """A text, and a date as people write dates."""
    forms = {text, html.escape(text), text.encode("ascii", "xmlcharrefreplace").decode()}
    forms |= {text.encode("unicode_escape").decode(), quote(text)}
    if len(text) == 8 and text.isdigit():
        year, month, day = text[:4], text[4:6], text[6:]
        forms |= {f"{year}{s}{month}{s}{day}" for s in "-/.:"} | {f"{day}{s}{month}{s}{year}" for s in "-/."}
    return forms


@cache
def needles(text: str) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Byte strings to look for: in lower-cased bytes, and in the bytes as they are."""
    folded: set[bytes] = set()
    exact: set[bytes] = set()
    for form in _forms(text):
        for codec in _CODECS:
            with contextlib.suppress(UnicodeEncodeError):
                folded.add(form.encode(codec).lower())
        for codec in _ESCAPING:
            with contextlib.suppress(UnicodeEncodeError):
                coded = form.encode(codec).replace(b"\x0e", b"\x1b").replace(b"\x0f", b"\x1b")
                longest = max(coded.split(b"\x1b"), key=len)
                exact.add(longest if form.isascii() else longest[2:])
    raw = text.encode()
    folded |= {raw.hex().encode(), text.encode("utf-16-be").hex().encode(), text.encode("utf-16-le").hex().encode()}
    folded.add(raw[::-1].lower())
    for shift in range(3):
        coded = base64.b64encode(b"\0" * shift + raw).rstrip(b"=")
        exact.add(coded[(shift * 8 + 5) // 6 : len(coded) - 1])
    floor = _LEAST if text.isascii() else 4
    return frozenset(n for n in folded if len(n) >= floor), frozenset(n for n in exact if len(n) >= floor)


def _swapped(data: bytes) -> bytes:
    even = bytearray(data[: len(data) // 2 * 2])
    even[0::2], even[1::2] = even[1::2], even[0::2]
    return bytes(even)


def blobs(data: bytes) -> Iterator[bytes]:
    """The bytes that a reader of a file could come to see."""
    with contextlib.suppress(OSError, EOFError, zlib.error):
        if data[:2] == b"\x1f\x8b":
            data = data + gzip.decompress(data)
    yield data
    if b"1.2.840.10008.1.2.1.99" in data[:1024]:
        for start in range(132, min(len(data), 2048)):
            with contextlib.suppress(zlib.error):
                inflated = zlib.decompressobj(-15).decompress(data[start:], 1 << 24)
                if len(inflated) > 256:
                    yield inflated


def values(dataset: Dataset) -> Iterator[str]:
    """Every value of a data set and of what is nested in it, as folded text."""
    for element in dataset.iterall():
        with contextlib.suppress(Exception):  # a value that cannot be read is left to the byte search
            value = element.value
            each = value if isinstance(value, MultiValue | list) else [value]
            for one in each:
                if isinstance(one, bytes):
                    yield one.decode("latin-1").casefold() if len(one) < 1 << 16 else ""
                elif not isinstance(one, Dataset):
                    yield unicodedata.normalize("NFKC", str(one)).casefold()


def parsed(data: bytes) -> Dataset | None:
    """The data set, or None when it is no DICOM."""
    with unchecked():
        try:
            dataset = pydicom.dcmread(io.BytesIO(data), force=data[128:132] == b"DICM")
        except Exception:  # noqa: BLE001 - then there are no values to walk
            return None
    return dataset


def residues(data: bytes, plants: Iterable[Plant]) -> list[Plant]:
    """The plants that are still in a file. Burned-in text is looked for elsewhere."""
    wanted = [plant for plant in plants if plant.treatment != "pixels"]
    found = _in_bytes(data, wanted)
    dataset = parsed(data)
    if dataset is not None:
        with unchecked():
            texts = list(values(dataset))
            pixels = dataset.get("PixelData", b"")
        found |= _in_bytes(hidden_bits(pixels), wanted) | _in_bytes(hidden_bits(pixels[1:]), wanted)
        for plant in wanted:
            sentinel = unicodedata.normalize("NFKC", plant.sentinel).casefold()
            if any(sentinel in text for text in texts) or _as_number(sentinel, texts):
                found.add(plant)
    return [plant for plant in wanted if plant in found]


def _as_number(sentinel: str, texts: list[str]) -> bool:
    """Is an identifier of digits still there as a number, however it is written?"""
    if not (sentinel.isdigit() and len(sentinel) >= _LEAST):
        return False
    wanted = float(sentinel)
    for text in texts:
        with contextlib.suppress(ValueError):
            if float(text) == wanted:
                return True
    return False


def _in_bytes(data: bytes, plants: Iterable[Plant]) -> set[Plant]:
    found = set()
    for blob in blobs(data):
        lowered = blob.lower()
        for plant in plants:
            folded, exact = needles(plant.sentinel)
            if any(n in lowered for n in folded) or any(n in blob for n in exact):
                found.add(plant)
    swapped = [_swapped(data).lower(), _swapped(data[1:]).lower()]  # text in 16-bit words of the other byte order
    for plant in plants:
        raw = plant.sentinel.encode().lower()
        if len(raw) >= _LEAST and any(raw in blob for blob in swapped):
            found.add(plant)
    return found
