"""The agent's log: JSON lines of named events with keys from a short list, and never patient data (P14)."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog

from protos.lossy import Lossy

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
