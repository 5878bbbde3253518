"""The log that both sides write: JSON lines of named events, keys from a list, and never patient data (P14).

``log.toml`` beside the log, when there is one, says how large a file may become and where a copy goes::

    megabytes = 64   # of one file; then a fresh one is begun
    keep = 16        # old ones: NAME.1 is the newest
    [syslog]         # a copy for the hospital's own collector, RFC 5424 over TLS
    to = "collector.hospital.example:6514"
    ca = "collector-ca.pem"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog

from protos.common.errors import ConfigError, InvariantError
from protos.operations import toml_file
from protos.operations.event_counters import PROCESS, EventCounters
from protos.operations.log_file import BestEffortFile
from protos.operations.syslog_sender import Collector, Forwarder

FILE: Final = "log.toml"
_LONGEST: Final = 500  # characters of one value


class UnlistedKeyError(InvariantError, RuntimeError):
    """A log call used a key that is not on the list; the event is not written."""


class LogConfigError(ConfigError, ValueError):
    """``log.toml`` cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """``log.toml``, checked."""

    megabytes: int = 64  # of one file; then a fresh one is begun
    keep: int = 16  # old files
    syslog: Collector | None = None  # a copy to a collector; left out: none

    def __post_init__(self) -> None:
        """In range."""
        if not (1 <= self.megabytes <= 4096 and 1 <= self.keep <= 1000):
            raise LogConfigError("megabytes lies in 1 to 4096, keep in 1 to 1000")


def read_settings(folder: Path) -> LogSettings:
    """``log.toml`` of a home directory, or the defaults when there is none; all problems at once.

    Raises:
        LogConfigError: not TOML, or with unknown or senseless keys.
    """
    return toml_file.read(folder / FILE, LogSettings, LogConfigError) or LogSettings()


def only_listed(keys: Collection[str]) -> Callable[..., MutableMapping[str, Any]]:
    """structlog processor: refuse an event with an unlisted key, or a value that is no plain short one."""

    def check(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if key not in keys:
                raise UnlistedKeyError(f"{key!r} may not be logged")
            if not isinstance(value, str | int | float | list | tuple) or len(str(value)) > _LONGEST:
                raise UnlistedKeyError(f"the value of {key!r} may not be logged")
        return event

    return check


def open_journal(path: Path, app: str, keys: Collection[str], tally: EventCounters = PROCESS) -> Any:
    """A logger that appends to ``path`` (0600), counts what it writes, and forwards a copy where ``log.toml`` says.

    Args:
        path: of the log; ``log.toml`` lies beside it.
        app: the program's name in syslog.
        keys: which may be logged.
        tally: counts the events.
    Raises:
        LogConfigError: ``log.toml`` cannot be used.
    """
    settings = read_settings(path.parent)
    file = BestEffortFile(path, settings.megabytes << 20, settings.keep, lambda lines: tally.lose("file", lines))
    forwarder = None
    if settings.syslog is not None:
        forwarder = Forwarder(settings.syslog, app, lambda lines: tally.lose("syslog", lines))
    as_json = structlog.processors.JSONRenderer()

    def written(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        level = str(event.get("level", "info"))
        tally.count(event, level)
        line = str(as_json(logger, name, event))  # json escapes all but printable ASCII: no line break, no ESC
        if forwarder is not None:
            forwarder.send(level, str(event.get("event", "")), line)
        return line

    return structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, file)),
        processors=[
            only_listed(keys),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            written,
        ],
    )
