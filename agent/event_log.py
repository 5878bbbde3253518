"""The agent's log: which keys may be in it, and never patient data (P14)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agent.errors import SiteConfigError
from protos.operations.event_counters import PROCESS, EventCounters
from protos.operations.event_log import LogConfigError, open_journal

KEYS: Final = frozenset(
    {
        "event", "level", "timestamp", "site", "step", "mechanism", "grant", "release", "run", "round", "epoch",
        "rule", "rules", "where", "count", "kept", "duplicates", "quarantined", "reason", "state", "seconds",
        "person", "role", "action", "page", "incident", "fault", "seq", "job",
    }
)  # fmt: skip


def open_log(path: Path, tally: EventCounters = PROCESS) -> Any:
    """A logger that appends to ``path`` (0600) as JSON lines; ``log.toml`` beside it says more.

    Args:
        path: of the log.
        tally: counts what is logged.
    Raises:
        SiteConfigError: ``log.toml`` cannot be used.
    """
    logging.getLogger("flwr").disabled = True
    try:
        return open_journal(path, "lazaret-agent", KEYS, tally)
    except LogConfigError as error:
        raise SiteConfigError(str(error)) from None


def log_end(log: Any, name: str) -> Callable[[str], None]:
    """What a keeper calls when its process has ended: :data:`protos.operations.kept_process.ENDED`."""
    return lambda how: log.warning("process_ended", where=name, state=how[:300])
