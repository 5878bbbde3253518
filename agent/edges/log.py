"""The agent's log: JSON lines of named events with keys from a short list, and never patient data (P14)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog

KEYS: Final = frozenset(
    {
        "event", "level", "timestamp", "site", "step", "mechanism", "grant", "release", "run", "round", "epoch",
        "rule", "rules", "where", "count", "kept", "duplicates", "quarantined", "reason", "state", "seconds",
    }
)  # fmt: skip


class UnlistedKey(RuntimeError):
    """A log call used a key that is not on the list; the event is not written."""


def only_listed(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: refuse an event with an unlisted key, or a value that is no plain short one."""
    for key, value in event.items():
        if key not in KEYS:
            raise UnlistedKey(f"{key!r} may not be logged")
        if not isinstance(value, str | int | float | list) or len(str(value)) > 500:
            raise UnlistedKey(f"the value of {key!r} may not be logged")
    return event


class Lossy:
    """A file that only grows. What the disk has no room for is not logged: a log changes nothing of what is done."""

    def __init__(self, path: Path) -> None:
        """Open it, 0600."""
        path.touch(mode=0o600)
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def write(self, text: str) -> None:
        """Append; after a line that found room for its beginning only, on a new line."""
        raw, done = ("\n" if self._torn else "").encode() + text.encode(), 0
        with contextlib.suppress(OSError):
            done = self._file.write(raw)
        self._torn = 0 < done < len(raw) or (self._torn and not done)

    def flush(self) -> None:
        """Nothing is held back."""


def open_log(path: Path) -> Any:
    """A logger that appends to ``path`` (0600) as JSON lines."""
    logging.getLogger("flwr").disabled = True
    return structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, Lossy(path))),
        processors=[
            only_listed,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
    )
