"""Background tasks of the console: one at a time, in a thread, with progress as counts and sentences."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]  # done, of how many (0: nobody knows)


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """How an errand stands, for people."""

    what: str  # "" when there was none yet
    of_page: str = ""  # which pages its result is for: "releases" or "intake"
    done: int = 0
    of: int = 0
    over: bool = True
    result: str = ""
    failed: bool = False


class BackgroundTask:
    """One thread at most."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._lock, self._told = threading.Lock(), TaskStatus("")
        self._thread: threading.Thread | None = None

    def told(self) -> TaskStatus:
        """How it stands."""
        with self._lock:
            return self._told

    def begin(
        self, of_page: str, what: str, act: Callable[[Progress], str], sentence: Callable[[Exception], str]
    ) -> bool:
        """Run ``act`` in a thread, unless something is under way; it returns what came of it, in a sentence.

        ``sentence`` says what a fault means, without a word that may hold patient data.
        """
        with self._lock:
            if not self._told.over:
                return False
            self._told = TaskStatus(what, of_page, over=False)

        def progress(done: int, of: int) -> None:
            with self._lock:
                self._told = TaskStatus(what, of_page, done, of, over=False)

        def work() -> None:
            try:
                result, failed = act(progress), False
            except Exception as error:  # noqa: BLE001 - whatever it was: it is over, and told in our words
                result, failed = sentence(error), True
            with self._lock:
                at = self._told
                self._told = TaskStatus(what, of_page, at.done, at.of, True, result, failed)

        self._thread = threading.Thread(target=work, name="errand", daemon=True)
        self._thread.start()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait so long; is nothing under way?"""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.told().over
