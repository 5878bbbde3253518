"""Who holds a place at the service, and for how long without saying anything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from grpc import StatusCode

from coordinator.gateway.calls import Call, CallRejectedError


class SiteQuota:
    """A site holds so many at most, so that none can take them all."""

    def __init__(self, most: int) -> None:
        """All are free."""
        self._most, self._mutex, self._taken = most, threading.Lock(), Counter[str]()

    @contextlib.contextmanager
    def take(self, site: str) -> Iterator[None]:
        """One place for a site.

        Raises:
            CallRejectedError: it holds as many as it may.
        """
        with self._mutex:
            if not self._taken[site] < self._most:
                raise CallRejectedError(
                    StatusCode.RESOURCE_EXHAUSTED, "too many uploads of this site at once", "busy"
                )
            self._taken[site] += 1
        try:
            yield
        finally:
            with self._mutex:
                self._taken[site] -= 1


class IdleTimeout:
    """Ends calls in which nothing arrives for so many seconds; one thread looks after all of them."""

    def __init__(self) -> None:
        """Nothing is looked after yet."""
        self._mutex, self._ends, self._ended = threading.Lock(), dict[Call, float](), set[Call]()
        threading.Thread(target=self._watch, name="patience", daemon=True).start()

    @contextlib.contextmanager
    def over(self, call: Call, seconds: float) -> Iterator[Callable[[], None]]:
        """Look after a call; what is given is to be called whenever something arrives."""

        def go_on() -> None:
            with self._mutex:
                self._ends[call] = time.monotonic() + seconds

        go_on()
        try:
            yield go_on
        finally:
            with self._mutex:
                self._ends.pop(call, None)
                self._ended.discard(call)

    def ended(self, call: Call) -> bool:
        """Was it ended here? To its method the stream then looks like one that the peer has finished."""
        with self._mutex:
            return call in self._ended

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            now = time.monotonic()
            with self._mutex:
                late = [call for call, end in self._ends.items() if not now < end]
                self._ended.update(late)
            for call in late:
                call.cancel()
