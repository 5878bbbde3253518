"""Times, numbers and foreign texts as people read them, the same in every table, page and message. Pure."""

from __future__ import annotations

import datetime as dt
from typing import Final

DATE: Final = "%Y-%m-%d"
MINUTE: Final = "%Y-%m-%d %H:%M"


def utc(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Seconds since 1970 as people write them, in UTC; "not a time" where a foreign number is none."""
    try:
        return dt.datetime.fromtimestamp(at, dt.UTC).strftime(form)
    except (OverflowError, ValueError, OSError, TypeError):
        return "not a time"


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}".replace(",", " ")


def printable(text: object, instead: str = "?") -> str:
    """A foreign text without invisible characters, so that it cannot move or reorder the text around it."""
    return "".join(c if c.isprintable() else instead for c in str(text))
