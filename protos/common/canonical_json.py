"""The one form of a JSON value that is signed, hashed or compared: sorted keys, no spaces, ASCII.

And JSON of others, read strictly: no key twice, no NaN, no infinity.
"""

from __future__ import annotations

import json
from typing import Any

from protos.common.errors import ArtifactError

JsonValue = None | bool | int | str | list["JsonValue"] | dict[str, "JsonValue"]


def canonical(value: Any) -> bytes:
    """A JSON value's canonical bytes.

    Raises:
        ValueError: a number is not finite, or the value holds itself.
        TypeError: a value is none of JSON's.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


class KeyTwiceError(ArtifactError, ValueError):
    """A JSON object has one key twice."""


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as ``object_pairs_hook``.

    Raises:
        KeyTwiceError: a key stands in it twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise KeyTwiceError("a key appears twice")
    return found


def json_object(text: str) -> dict[str, Any]:
    """A JSON object of distinct keys and finite numbers.

    Raises:
        ValueError: it is not one.
    """
    try:
        values = json.loads(text, object_pairs_hook=distinct, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if type(values) is not dict:
        raise ValueError("not an object")
    return values


def _no_constant(_: str) -> float:
    raise ValueError("not a number")
