"""JSON objects as an operator writes them, read strictly: no key twice, no NaN, no infinity."""

from __future__ import annotations

import json
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """A JSON object of distinct keys and finite numbers.

    Raises:
        ValueError: it is not one.
    """
    try:
        values = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if type(values) is not dict:
        raise ValueError("not an object")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _no_constant(_: str) -> float:
    raise ValueError("not a number")
