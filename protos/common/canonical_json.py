"""The one form of a JSON value that is signed, hashed or compared: sorted keys, no spaces, ASCII."""

from __future__ import annotations

import json
from typing import Any

JsonValue = None | bool | int | str | list["JsonValue"] | dict[str, "JsonValue"]


def canonical(value: Any) -> bytes:
    """A JSON value's canonical bytes.

    Raises:
        ValueError: a number is not finite, or the value holds itself.
        TypeError: a value is none of JSON's.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
