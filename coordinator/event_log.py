"""The coordinator's log: which keys may be in it (P14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from coordinator.errors import CoordinatorConfigError
from protos.operations.event_log import LogConfigError, UnlistedKeyError, open_journal

__all__ = ["KEYS", "UnlistedKeyError", "open_log"]
KEYS: Final = frozenset(
    {
        "event", "level", "timestamp", "site", "call", "mechanism", "grant", "release", "run", "round",
        "rule", "rules", "incident", "fault", "admitted", "state", "sites", "seq",
        "person", "role", "action", "page", "where", "count", "reason", "seconds",
    }
)  # fmt: skip


def open_log(path: Path) -> Any:
    """A logger that appends to ``path`` (0600) as JSON lines; ``log.toml`` beside it says more.

    Raises:
        CoordinatorConfigError: ``log.toml`` cannot be used.
    """
    try:
        return open_journal(path, "lazaret-coordinator", KEYS)
    except LogConfigError as error:
        raise CoordinatorConfigError(str(error)) from None
