"""The log that both sides write: JSON lines of named events, keys from a list, and never patient data (P14).

``log.toml`` beside the log, when there is one, says how large a file may become and where a copy goes::

    megabytes = 64   # of one file; then a fresh one is begun
    keep = 16        # old ones: NAME.1 is the newest
    [syslog]         # a copy for the hospital's own collector, RFC 5424 over TLS
    to = "collector.hospital.example:6514"
    ca = "collector-ca.pem"
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO, cast

import structlog

from protos.lossy import Lossy
from protos.syslog import BadCollector, Collector, Forwarder
from protos.tally import PROCESS, Tally

FILE: Final = "log.toml"
_LONGEST: Final = 500  # characters of one value
_PATHS: Final = frozenset({"ca", "certificate", "key"})
_TYPES: Final = {"to": str, "ca": str, "certificate": str, "key": str, "facility": int, "hostname": str}


class UnlistedKey(RuntimeError):
    """A log call used a key that is not on the list; the event is not written."""


class BadLog(ValueError):
    """``log.toml`` cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """``log.toml``, checked."""

    megabytes: int = 64
    keep: int = 16
    syslog: Collector | None = None

    def __post_init__(self) -> None:
        """In range."""
        if not (1 <= self.megabytes <= 4096 and 1 <= self.keep <= 1000):
            raise BadLog(f"{FILE}: megabytes lies in 1 to 4096, keep in 1 to 1000")


def read_settings(folder: Path) -> LogSettings:
    """``log.toml`` of a home directory, or the defaults when there is none; all problems at once.

    Raises:
        BadLog: not TOML, or with unknown or senseless keys.
    """
    try:
        table = tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return LogSettings()
    except (OSError, ValueError):
        raise BadLog(f"{FILE} cannot be read as TOML") from None
    syslog = table.pop("syslog", None)
    problems = [f"unknown key: {key}" for key in table if key not in ("megabytes", "keep")]
    problems += [f"{key}: must be a whole number" for key, value in table.items() if type(value) is not int]
    if syslog is not None and not isinstance(syslog, dict):
        problems.append("syslog: must be a table")
    elif syslog is not None:
        problems += [f"syslog.{key}: unknown key" for key in syslog if key not in _TYPES]
        typed = [(key, _TYPES[key]) for key in syslog if key in _TYPES]
        problems += [
            f"syslog.{key}: must be a {kind.__name__}" for key, kind in typed if type(syslog[key]) is not kind
        ]
        problems += [] if "to" in syslog else ["syslog.to: missing"]
    if problems:
        raise BadLog(f"{FILE}: " + "; ".join(problems))
    return LogSettings(**table, syslog=_collector(folder, syslog))


def _collector(folder: Path, table: Mapping[str, Any] | None) -> Collector | None:
    if table is None:
        return None
    try:
        return Collector(**{key: folder / value if key in _PATHS else value for key, value in table.items()})
    except BadCollector as error:
        raise BadLog(f"{FILE}: syslog.{error}") from None


def only_listed(keys: Collection[str]) -> Callable[..., MutableMapping[str, Any]]:
    """structlog processor: refuse an event with an unlisted key, or a value that is no plain short one."""

    def check(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if key not in keys:
                raise UnlistedKey(f"{key!r} may not be logged")
            if not isinstance(value, str | int | float | list | tuple) or len(str(value)) > _LONGEST:
                raise UnlistedKey(f"the value of {key!r} may not be logged")
        return event

    return check


def open_journal(path: Path, app: str, keys: Collection[str], tally: Tally = PROCESS) -> Any:
    """A logger that appends to ``path`` (0600), counts what it writes, and forwards a copy where ``log.toml`` says.

    Args:
        path: of the log; ``log.toml`` lies beside it.
        app: the program's name in syslog.
        keys: which may be logged.
        tally: counts the events.
    Raises:
        BadLog: ``log.toml`` cannot be used.
    """
    settings = read_settings(path.parent)
    file = Lossy(path, settings.megabytes << 20, settings.keep, lambda lines: tally.lose("file", lines))
    forwarder = None
    if settings.syslog is not None:
        forwarder = Forwarder(settings.syslog, app, lambda lines: tally.lose("syslog", lines))
    as_json = structlog.processors.JSONRenderer()

    def written(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        level = str(event.get("level", "info"))
        tally.hear(event, level)
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
