"""Deterministic CBOR (RFC 8949 section 4.2.1) for ledger entries: one value, one byte string.

``cbor2`` was rejected: it accepts non-canonical input, and the auditor's verifier must run with nothing but
the standard library and ``cryptography``. Only what entries need exists: unsigned integers below 2^63, byte
and text strings, arrays, and maps with text keys. Anything else, and any other encoding of these, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from protos.common.errors import ArtifactError

Value = int | bytes | str | list["Value"] | dict[str, "Value"]

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 8
_UINT, _BYTES, _TEXT, _ARRAY, _MAP = 0, 2, 3, 4, 5


class EntryEncodingError(ArtifactError, ValueError):
    """Not the deterministic encoding of a permitted value."""


def _head(major: int, n: int) -> bytes:
    return _HEADS[major][n] if n < 256 else _long_head(major, n)


def _long_head(major: int, n: int) -> bytes:
    if n < 24:
        return bytes([major << 5 | n])
    for info, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if n < 1 << (8 * size):
            return bytes([major << 5 | info]) + n.to_bytes(size, "big")
    raise EntryEncodingError("number too large")


_HEADS: Final = tuple(tuple(_long_head(major, n) for n in range(256)) for major in range(6))


def encode(value: Value) -> bytes:
    """The one encoding of ``value``; what :func:`decode` would refuse is not made.

    Raises:
        EntryEncodingError: a negative or huge integer, a bool, a float, None, or a map with other than text keys.
    """
    if type(value) is int:
        if not 0 <= value < 1 << 63:
            raise EntryEncodingError("integers must lie in [0, 2^63)")
        return _head(_UINT, value)
    if type(value) is bytes:
        return _head(_BYTES, len(value)) + value
    if type(value) is str:
        try:
            raw = value.encode()
        except UnicodeEncodeError:
            raise EntryEncodingError("text that has no UTF-8 form") from None
        return _head(_TEXT, len(raw)) + raw
    if type(value) is list:
        return _head(_ARRAY, len(value)) + b"".join(encode(v) for v in value)
    if type(value) is dict:
        if not all(type(k) is str for k in value):
            raise EntryEncodingError("map keys must be text")
        pairs = sorted((encode(k), encode(v)) for k, v in value.items())
        return _head(_MAP, len(pairs)) + b"".join(k + v for k, v in pairs)
    raise EntryEncodingError(f"{type(value).__name__} has no place in an entry")


class _Reader:
    """A cursor over the bytes; every read is bounded by what is left."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, n: int) -> bytes:
        if n > len(self.raw) - self.at:
            raise EntryEncodingError("cut short")
        self.at += n
        return self.raw[self.at - n : self.at]

    def head(self) -> tuple[int, int]:
        first = self.take(1)[0]
        major, info = first >> 5, first & 31
        if info < 24:
            return major, info
        if info > 27:
            raise EntryEncodingError("indefinite lengths are not deterministic")
        size = 1 << (info - 24)
        n = int.from_bytes(self.take(size), "big")
        if n < (24 if size == 1 else 1 << (4 * size)):
            raise EntryEncodingError("number not in its shortest form")
        return major, n

    def value(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise EntryEncodingError("nested too deep")
        major, n = self.head()
        if major == _UINT:
            if n >= 1 << 63:
                raise EntryEncodingError("number too large")
            return n
        if major == _BYTES:
            return self.take(n)
        if major == _TEXT:
            return self.text(n)
        if major == _ARRAY:
            return [self.value(depth + 1) for _ in range(self.bounded(n))]
        if major == _MAP:
            return self.map(n, depth)
        raise EntryEncodingError("type not permitted")

    def bounded(self, n: int) -> int:
        if n > len(self.raw) - self.at:
            raise EntryEncodingError("cut short")
        return n

    def text(self, n: int) -> str:
        try:
            return self.take(n).decode()
        except UnicodeDecodeError:
            raise EntryEncodingError("text is not UTF-8") from None

    def map(self, n: int, depth: int) -> Value:
        out: dict[str, Value] = {}
        last = b""
        for _ in range(self.bounded(n)):
            start = self.at
            major, size = self.head()
            if major != _TEXT:
                raise EntryEncodingError("map keys must be text")
            key = self.text(size)
            encoded = self.raw[start : self.at]
            if encoded <= last:
                raise EntryEncodingError("map keys out of order or repeated")
            last = encoded
            out[key] = self.value(depth + 1)
        return out


def decode(raw: bytes) -> Value:
    """The value of a deterministic encoding, which must be the whole of ``raw``.

    Raises:
        EntryEncodingError: any other bytes. ``encode(decode(raw)) == raw`` for all that is accepted.
    """
    if len(raw) > MAX_BYTES:
        raise EntryEncodingError("entry too large")
    reader = _Reader(raw)
    value = reader.value(0)
    if reader.at != len(raw):
        raise EntryEncodingError("trailing bytes")
    return value


# The same grammar as regular expressions, for maps whose keys and types are known. An auditor reads a million
# entries; one match of a compiled pattern costs a twentieth of the cursor above. Every alternative is one header
# in its shortest form with exactly as many bytes as it announces, so whatever matches is deterministic. What does
# not match (long strings, arrays, bad bytes) is left to `decode`, which says what is wrong.


def _strings(major: int, lengths: Iterable[int]) -> bytes:
    return b"|".join(re.escape(_head(major, n)) + b".{%d}" % n for n in lengths)


_SHORT: Final = _strings(_TEXT, range(96))
_LISTS: Final = b"|".join(re.escape(_head(_ARRAY, n)) + b"(?:%b){%d}" % (_SHORT, n) for n in range(17))
PATTERNS: Final[Mapping[type, bytes]] = MappingProxyType(
    {
        int: rb"([\x00-\x17]|\x18[\x18-\xff]|\x19(?!\x00)..|\x1a(?!\x00\x00).{4}|\x1b(?!\x00{4})[\x00-\x7f].{7})",
        str: b"(" + _SHORT + b")",
        list: b"(" + _LISTS + b")",
        bytes: b"(" + _strings(_BYTES, (32, *range(32), *range(33, 192))) + b")",
    }
)


def _texts(raw: bytes) -> list[str]:
    """A list that its pattern matched: its head is one byte; a text's is one byte below 24, else two."""
    out, at = [], 1
    while at < len(raw):
        first = raw[at]
        start = at + 1 if first < 0x78 else at + 2
        at = start + (first - 0x60 if first < 0x78 else raw[at + 1])
        out.append(raw[start:at].decode())
    return out


READERS: Final[Mapping[type, Callable[[bytes], Any]]] = MappingProxyType(
    {
        int: lambda raw: raw[0] if len(raw) == 1 else int.from_bytes(raw[1:], "big"),
        str: lambda raw: (raw[1:] if len(raw) < 25 else raw[2:]).decode(),
        bytes: lambda raw: raw[1:] if len(raw) < 25 else raw[2:],
        list: _texts,
    }
)


def in_order(keys: Iterable[str]) -> list[str]:
    """Keys as a deterministic map has them: by their encoded bytes."""
    return sorted(keys, key=encode)


def map_pattern(values: Mapping[str, bytes]) -> bytes:
    """The pattern of a map with exactly these keys, given the pattern of each value."""
    pairs = [re.escape(encode(key)) + values[key] for key in in_order(values)]
    return re.escape(_head(_MAP, len(pairs))) + b"".join(pairs)


def map_head(pairs: int) -> bytes:
    """What a map of so many pairs begins with."""
    return _head(_MAP, pairs)
