"""The process of a run, held to loopback like the coordinator that starts it: its notes lie beside that one's.

A round's timeout is over when the test says so, and not after so many seconds on a machine that may be busy. Once
there is a file ``gone.json``, {"asked": 3, "answered": 2}, a wait for that many sites ends with that many answers.
Each such end is a line of ``timeouts.txt``.
"""

# ruff: noqa: E402 - the guard comes first

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.flower.loopback import guard

HOME = Path(os.environ["FLWR_HOME"]).parent
guard(HOME / "network.txt")

from flwr.app import Message

from coordinator.edges import grid, running


class Clock:
    """The grid's clock, which jumps to the end of a wait."""

    skipped = 0.0

    def monotonic(self) -> float:
        """Seconds, with those that were skipped."""
        return time.monotonic() + self.skipped


CLOCK = Clock()


class GridOfTheTest(grid.PromptGrid):
    """The product's grid, whose waits for sites that are gone end as soon as everybody else's answer is here."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock, self._answered = threading.Lock(), 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The product's own, with a second thread that watches for the end."""
        outgoing, over = list(messages), threading.Event()
        self._answered = 0
        watching = threading.Thread(target=self._watch, args=(len(outgoing), timeout or 0.0, over))
        watching.start()
        try:
            return super().send_and_receive(outgoing, timeout=timeout)
        finally:
            over.set()
            watching.join()

    def _watch(self, asked: int, timeout: float, over: threading.Event) -> None:
        while not over.wait(0.05):
            gone = HOME / "gone.json"
            if gone.exists() and json.loads(gone.read_text()) == {"asked": asked, "answered": self._answered}:
                with (HOME / "timeouts.txt").open("a") as out:
                    out.write(f"{asked} were asked\n")
                CLOCK.skipped += timeout
                return

    def _fetch(self, *arguments: Any) -> Message:
        try:
            return super()._fetch(*arguments)
        finally:
            with self._lock:
                self._answered += 1


vars(grid)["time"] = CLOCK
vars(running)["PromptGrid"] = GridOfTheTest

if __name__ == "__main__":
    sys.exit(running.main(*map(int, sys.argv[1:])))
