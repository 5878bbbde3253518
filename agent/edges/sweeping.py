"""`serve` takes the faces off by itself: once nothing has come for a while, in a thread beside the reading."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from agent.edges.home import Home
from agent.edges.way import open_way


class Sweeping:
    """A sweep of the vault whenever something has come since the last one, and it has been quiet since."""

    def __init__(self, home: Home, project: str, log: Any, settle_s: float, now: Callable[[], float]) -> None:
        """``settle_s``: seconds without anything new; ``now``: a clock that does not jump."""
        self._home, self._project, self._log, self._settle_s, self._now = home, project, log, settle_s, now
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._came: float | None = now()  # what was in the vault before the start counts as new

    def came(self) -> None:
        """Something was let in."""
        self._came = self._now()

    def look(self) -> None:
        """Begin a sweep, if it is time and none is under way."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._came is None or self._now() < self._came + self._settle_s:
            return
        self._came = None
        self._thread = threading.Thread(target=self._work, name="faces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """After the study in hand."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            from agent.edges.sweep import sweep  # noqa: PLC0415 - torch, and only where a head has come

            with open_way(self._home, self._project) as way:
                if way.vault.faces():
                    found = sweep(way, stopping=self._stop.is_set)
                    self._log.info("defaced", count=found.defaced, kept=sum(found.kept.values()))
                    for why, count in found.kept.items():
                        self._log.warning("face_withheld", reason=why, count=count)
        except Exception as error:  # noqa: BLE001 - whatever it is: heads stay withheld, and reading goes on
            self._log.error("defacing_failed", reason=type(error).__name__)
            self._came = self._now()  # and again, after as long
