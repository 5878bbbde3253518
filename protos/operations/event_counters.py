"""Counts of each logged event since the process began: the metrics of PACS, link and faults.

Whatever is worth a line in the log is counted here as the line is written, so that no road needs counters of its own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

_MOST: Final = 1000  # different ones; beyond, they are counted together: a log must not fill the memory
OTHER: Final = "other"


class CountedEvent(NamedTuple):
    """Which event, how grave, and where, if it says so."""

    event: str
    level: str
    where: str


class EventCounters:
    """Counts of events; any thread may add."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Nothing yet. ``clock``: seconds since 1970."""
        self._clock, self._lock = clock, threading.Lock()
        self._counts: Counter[CountedEvent] = Counter()
        self._lost: Counter[str] = Counter()
        self._last: dict[tuple[str, str], tuple[float, str]] = {}

    def count(self, event: Mapping[str, Any], level: str) -> None:
        """An event is about to be logged, with keys that may be."""
        name, where = str(event.get("event", "")), str(event.get("where", ""))
        with self._lock:
            heard = CountedEvent(name, level, where)
            if heard not in self._counts and len(self._counts) >= _MOST:
                heard = CountedEvent(OTHER, level, "")
            self._counts[heard] += 1
            if (name, where) in self._last or len(self._last) < _MOST:
                self._last[name, where] = (self._clock(), str(event.get("state", "")))

    def lose(self, what: str, count: int) -> None:
        """So many lines did not get to ``what``: "file" or "syslog"."""
        with self._lock:
            self._lost[what] += count

    def counts(self) -> dict[CountedEvent, int]:
        """How often each was logged."""
        with self._lock:
            return dict(self._counts)

    def lost(self, what: str) -> int:
        """How many lines did not get there."""
        with self._lock:
            return self._lost[what]

    def last(self, event: str, where: str = "") -> tuple[float, str] | None:
        """When an event was last logged (seconds since 1970), and the state that it told; None: not yet."""
        with self._lock:
            return self._last.get((event, where))


PROCESS: Final = EventCounters()  # of this process's log
