"""Mutations that know the formats: JSON, CBOR, TOML, signed notes, exports. Pure, and the same for the same dice.

The command hands them to libFuzzer as its custom mutator, beside libFuzzer's own; the tests use them as they are.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from policies.ledger import cbor
from policies.ledger.cbor import EntryEncodingError
from tests.fuzz.ledger import redressed

Dice = random.Random
Mutator = Callable[[bytes, Dice], bytes]

_COMMON: Final = (b"\n", b"\r\n", b"\x00", b"\xff", b" ", b"=", b"\xef\xbb\xbf", "\u2014".encode(), "\u0663".encode())
_COSIGNATURE: Final = "\u2014 x ".encode() + b"A" * 102 + b"==\n"  # by nobody
TOKENS: Final[Mapping[str, tuple[bytes, ...]]] = MappingProxyType(
    {
        "toml": (
            b"[", b"{", b"]", b"}", b"[[", b"a.", b"9", b"0x", b"nan", b"-inf", b"1e999", b'"""', b"'''",
            b"epsilon = ", b"delta = ", b"k_min = ", b"levels = ", b"name = ", b"1979-05-27T07:32:00+24:00",
            b"0000-00-00", b'"\\ud800"', b'"\\U00110000"', b"[table]\n", b",", b'["A"]', b"_",
        ),
        "json": (
            b"[", b"{", b"]", b"}", b",", b":", b'"', b"null", b"true", b"1e9", b"-0", b"NaN", b"Infinity", b"9",
            b'"\\ud800"', b'"kind":', b'"k-anonymous"', b'"subsampled-gaussian"', b'"claim":', b'"predicate":',
            b'"_type":', b'"subject":', b'"nan"', b'"inf"', b'"1e-320"', b'{"a":1,"a":2}', b'"payload":', b'"sig":',
        ),
        "cbor": (
            b"\x18\x17", b"\x1b\x7f\xff\xff\xff\xff\xff\xff\xff", b"\x9f", b"\xbf", b"\x81", b"\xa1", b"\xf6",
            b"\xc0", b"\xfb", b"dtype", b"dbody", b"bat", b"ckey", b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff", b"\x20",
        ),
        "note": (b"-1", b"0", b"9" * 30, b"+1", b"01", b" ", b"\n\n", "\u2014 ".encode(), b"lazaret/test", b"AAAA"),
        "dicom": (
            b"\xff\xff\xff\xff", b"\xfe\xff\x00\xe0\xff\xff\xff\xff", b"\xfe\xff\x0d\xe0\0\0\0\0",
            b"\xfe\xff\xdd\xe0\0\0\0\0", b"SQ\0\0\xff\xff\xff\xff", b"UN\0\0\xff\xff\xff\xff", b"OW", b"SQ", b"PN",
            b"\x40\x00\x30\xa7SQ\0\0\xff\xff\xff\xff", b"\x28\x00\x10\x00US\2\0\xff\xff",
            b"\x28\x00\x08\x00IS\4\0999 ",
            b"\x09\x00\x10\x00LO\4\0Zqvx", b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.4.90",
            b"\\", b"\x1b$B", b"nan",
            b"1e999", b"\xff\x4f\xff\x51", b"\xff\xd8\xff\xfe", b"\0\0", b"YES", b"MONOCHROME1",
            b"RGB ", b"PALETTE COLOR ",
        ),
        "nifti": (
            b"\x1f\x8b\x08", b"n+1\0", b"n+2\0\r\n\x1a\n", b"\xff\xff\xff\xff", b"\xff\x7f", b"\0\0\xc0\x7f",
            b"\0\0\x80\x7f",
            b"\x5c\x01\0\0", b"\x1c\x02\0\0", b"\x07\0", b"\x80\x02", b"\0\0\0\0",
        ),
        "pdu": (
            b"\x01\0", b"\x10\0\0\0", b"\x20\0\0\x10", b"\x30\0\0\x11", b"\x40\0\0\x11", b"\x50\0\0\x04",
            b"\x51\0\0\x04",
            b"\x58\0\0\x08\x02\x01", b"\xff\xff\xff\xff", b"\0\0\0\0", b"1.2.840.10008.1.1", b"PACS            ",
            b"\0\x08\x02\0\0\0\x01\x01", b"..", b"/",
        ),
        "multipart": (
            b"--x1", b"--x1--", b"\r\n--x1\r\n", b"\r\n\r\n", b"\r\n", b"Content-Type: application/dicom\r\n",
            b"boundary=",
            b'"', b";", b"--", b"Content-Length: 9\r\n", b"x1", b" ",
        ),
        "export": (b"entries 0", b"witnessed 0", b"checkpoint", b"key ", b"AB==", _COSIGNATURE, b"-1", b"\xc3\xa9"),
    }
)  # fmt: skip
_NUMBERS: Final = (0, 1, 2, 7, 23, 24, 255, 256, 1025, 1 << 31, 1 << 53, (1 << 63) - 1)
_TEXTS: Final = (
    "",
    "a",
    "site-b",
    "\ud800",
    "\u0663",
    "é" * 40,
    "x" * 300,
    "nan",
    "inf",
    "-0.0",
    "1e-320",
    "0",
    "..",
)


def _slice(data: bytes, dice: Dice) -> tuple[int, int]:
    at = dice.randrange(len(data) + 1)
    return at, min(len(data), at + dice.choice((1, 1, 2, 4, 8, 32)))


def flip(data: bytes, dice: Dice) -> bytes:
    """One bit the other way."""
    if not data:
        return b"\x00"
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def drop(data: bytes, dice: Dice) -> bytes:
    """A few bytes less."""
    low, high = _slice(data, dice)
    return data[:low] + data[high:]


def repeat(data: bytes, dice: Dice) -> bytes:
    """A few bytes again, a few or very many times: depth and length are limits too."""
    low, high = _slice(data, dice)
    return data[:low] + data[low:high] * dice.choice((2, 2, 3, 70, 700)) + data[high:]


def cut(data: bytes, dice: Dice) -> bytes:
    """The beginning alone."""
    return data[: dice.randrange(len(data) + 1)]


def _insert(tokens: tuple[bytes, ...]) -> Mutator:
    def insert(data: bytes, dice: Dice) -> bytes:
        low, high = _slice(data, dice)
        token = dice.choice(tokens) * dice.choice((1, 1, 1, 1, 2, 600, 5000))
        return data[:low] + token + data[dice.choice((low, high)) :]

    return insert


def _leaf(value: Any, dice: Dice) -> Any:
    """Another value, mostly of the same kind."""
    if dice.random() < 0.15:
        return dice.choice(([], {}, ["a"], {"kind": "no-claim"}, 1, "", "k-anonymous"))
    if isinstance(value, bool) or value is None:
        return dice.choice((None, True, 0, "a"))
    if isinstance(value, int):
        return dice.choice((*_NUMBERS, value + 1, max(0, value - 1)))
    if isinstance(value, bytes):
        return dice.choice((b"", bytes(32), value[:-1], value + b"x", flip(value, dice)))
    if isinstance(value, str):
        return dice.choice((*_TEXTS, value + "x", value.upper(), value[:-1]))
    return value


def tree(value: Any, dice: Dice) -> Any:
    """The same value with one thing in it changed, taken away, doubled or added."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        return _dict(value, dice)
    if isinstance(value, list) and value and dice.random() < 0.9:
        return _list(value, dice)
    return _leaf(value, dice)


def _dict(value: dict[str, Any], dice: Dice) -> dict[str, Any]:
    key, other, way = dice.choice(sorted(value)), dice.choice(sorted(value)), dice.random()
    if way < 0.06:
        return {k: v for k, v in value.items() if k != key}
    if way < 0.12:
        return {**value, dice.choice(("x", "", "\u0663", key + "2")): value[key]}
    return {**value, key: value[other] if way < 0.18 else tree(value[key], dice)}


def _list(value: list[Any], dice: Dice) -> list[Any]:
    at, way = dice.randrange(len(value)), dice.random()
    if way < 0.1:
        return value[:at] + value[at + 1 :]
    if way < 0.2:
        return [*value, value[at]]
    if way < 0.3:
        return dice.sample(value, len(value))
    return [*value[:at], tree(value[at], dice), *value[at + 1 :]]


def in_json(data: bytes, dice: Dice) -> bytes:
    """One change in the value that JSON text holds, written in the canonical form again."""
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        return json.dumps(tree(json.loads(data), dice), sort_keys=True, separators=(",", ":")).encode()
    return flip(data, dice)


def in_statement(data: bytes, dice: Dice) -> bytes:
    """One change in a statement, mostly with the subject that belongs to what it then says."""
    changed = in_json(data, dice)
    return redressed(changed) if dice.random() < 0.8 else changed


def in_cbor(data: bytes, dice: Dice) -> bytes:
    """One change in the value that CBOR holds, encoded again; JSON inside byte strings is changed as JSON."""
    with contextlib.suppress(EntryEncodingError, UnicodeEncodeError):
        value = cbor.decode(data)
        if isinstance(value, dict) and isinstance(texts := value.get("payloads"), list) and dice.random() < 0.5:
            at = dice.randrange(len(texts) or 1)
            value["payloads"] = [in_json(t, dice) if n == at and type(t) is bytes else t for n, t in enumerate(texts)]
            return cbor.encode(value)
        return cbor.encode(tree(value, dice))
    return flip(data, dice)


def in_export(data: bytes, dice: Dice) -> bytes:
    """One line of an export changed inside its base64, dropped, doubled or moved; the counts may follow."""
    lines = data.split(b"\n")
    at = dice.randrange(len(lines))
    way = dice.random()
    if way < 0.6:
        with contextlib.suppress(ValueError):
            raw = base64.b64decode(lines[at], validate=True)
            lines[at] = base64.b64encode(dice.choice((in_cbor, in_json, flip, drop))(raw, dice))
    elif way < 0.7:
        del lines[at]
    elif way < 0.8:
        lines.insert(at, lines[at])
    else:
        other = dice.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    if dice.random() < 0.3:
        titles = [
            n
            for n, line in enumerate(lines)
            if line.startswith((b"entries ", b"envelopes ", b"witnessed ", b"checkpoint"))
        ]
        for here, following in itertools.pairwise(titles):
            lines[here] = lines[here].split(b" ")[0] + b" %d" % (following - here - 1)
    return b"\n".join(lines)


_OWN: Final[Mapping[str, Mutator]] = MappingProxyType(
    {"json": in_json, "statement": in_statement, "cbor": in_cbor, "export": in_export}
)


def mutated(data: bytes, kind: str, dice: Dice) -> bytes:
    """One to three mutations of an input whose format is ``kind``, a key of ``TOKENS``, or ``statement``."""
    tokens = TOKENS["json" if kind == "statement" else kind]
    ways: list[Mutator] = [flip, drop, repeat, cut, _insert((*_COMMON, *tokens)), _insert(tokens)]
    if kind in _OWN:
        ways += [_OWN[kind]] * 12
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        data = dice.choice(ways)(data, dice)
    return data
