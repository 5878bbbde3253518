"""Read the end of ``agent.log``: the latest ingest events, from this process or another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TAIL: Final = 512 * 1024  # bytes of the end that are read
_FAULTS: Final = frozenset(
    {"intake_failed", "pull_failed", "defacing_failed", "link_failed", "ledger_forked", "process_ended"}
)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line: only keys of the log's own list are in it, and no patient (P14)."""

    at: str  # UTC, ISO 8601
    name: str
    where: str
    reason: str
    state: str
    kept: int
    count: int
    quarantined: int

    @property
    def fault(self) -> bool:
        """Is it something that the operator should look into?"""
        return self.name in _FAULTS


def read(path: Path) -> list[LogEvent]:
    """The events at the end of a log, oldest first; none where there is no log. A torn line is passed over."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL))
            raw = stream.read(_TAIL)
    except OSError:
        return []
    lines = raw.split(b"\n")
    return list(_events(lines if size <= _TAIL else lines[1:]))


def _events(lines: list[bytes]) -> Iterator[LogEvent]:
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("event"), str):
            yield LogEvent(
                at=_text(told, "timestamp"),
                name=_text(told, "event"),
                where=_text(told, "where"),
                reason=_text(told, "reason"),
                state=_text(told, "state"),
                kept=_count(told, "kept"),
                count=_count(told, "count"),
                quarantined=_count(told, "quarantined"),
            )


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name, "")
    return value[:500] if isinstance(value, str) and value.isprintable() else ""


def _count(told: dict[str, Any], name: str) -> int:
    value = told.get(name, 0)
    return value if type(value) is int else 0


def last(events: list[LogEvent], *names: str, where: str | None = None) -> LogEvent | None:
    """The newest event of these names, of that place."""
    found = (e for e in reversed(events) if e.name in names and (where is None or e.where == where))
    return next(found, None)
