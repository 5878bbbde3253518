"""When an archive may be asked, and how fast: quiet hours and a rate, for all threads of a run."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protos.common.errors import Signal

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_NAP: Final = 5.0  # seconds until a halt is seen
_MOST_OWED: Final = 1600  # instances: sixteen associations with a list each


class OutsideHours(Signal):
    """The hours are over: what has not come yet must wait."""


class RetrievalStopped(Signal):
    """This run ends here."""


@dataclass(frozen=True, slots=True)
class Hours:
    """A daily span of local time, which may cross midnight."""

    start: dt.time
    end: dt.time

    @classmethod
    def parse(cls, text: str) -> Hours:
        """From ``22:00-06:00``.

        Raises:
            ValueError: another form, or an empty span.
        """
        match = _HOURS.fullmatch(text)
        if match is None or match[1] + match[2] == match[3] + match[4]:
            raise ValueError('hours are written "22:00-06:00"')
        return cls(dt.time(int(match[1]), int(match[2])), dt.time(int(match[3]), int(match[4])))

    def hold(self, when: dt.datetime) -> bool:
        """Is ``when`` (local time) within? The start is, the end is not."""
        at = when.time()
        if self.start < self.end:
            return self.start <= at < self.end
        return at >= self.start or at < self.end

    def opens_in(self, when: dt.datetime) -> float:
        """Seconds from ``when`` until the next start; 0.0 within the span."""
        if self.hold(when):
            return 0.0
        start = when.replace(hour=self.start.hour, minute=self.start.minute, second=0, microsecond=0)
        return ((start - when) % dt.timedelta(days=1)).total_seconds()


@dataclass(frozen=True, slots=True)
class Clock:
    """Clock functions, and the callback that stops the run."""

    now: Callable[[], dt.datetime]  # local
    sleep: Callable[[float], None]  # seconds
    stopping: Callable[[], bool] = lambda: False
    waiting: Callable[[dt.datetime], None] = lambda _until: None  # once when a wait for the hours begins: its end


class RateLimiter:
    """When the next instance may come."""

    def __init__(self, hours: str, waits: bool, per_minute: int, clock: Clock) -> None:
        """Open, unless the hours say otherwise.

        Args:
            hours: as :meth:`Hours.parse` reads them; "" for always.
            waits: outside them; else the run ends.
            per_minute: instances at most; 0 for any number.
            clock: see there.
        """
        self._hours = Hours.parse(hours) if hours else None
        self._waits = waits
        self._each = 60.0 / per_minute if per_minute else 0.0
        self._clock, self._lock, self._halted = clock, threading.Lock(), threading.Event()
        self._next: dt.datetime | None = None
        self._told: dt.datetime | None = None  # until when a wait was said to last

    def halt(self) -> None:
        """Every thread ends soon."""
        self._halted.set()

    def nap(self, seconds: float) -> None:
        """Wait, but not after a halt.

        Raises:
            RetrievalStopped: after it.
        """
        while True:
            if self._halted.is_set() or self._clock.stopping():
                raise RetrievalStopped
            if not seconds > 0:
                return
            self._clock.sleep(min(seconds, _NAP))
            seconds -= _NAP

    def gate(self) -> None:
        """Wait until the archive may be asked.

        Raises:
            RetrievalStopped: the site rather stops.
        """
        self.nap(0.0)
        while self._hours is not None and not self._hours.hold(now := self._clock.now()):
            if not self._waits:
                raise RetrievalStopped
            seconds = self._hours.opens_in(now)
            self._tell((now + dt.timedelta(seconds=seconds)).replace(microsecond=0))
            self.nap(max(1.0, seconds))

    def _tell(self, until: dt.datetime) -> None:
        """Say once, however many threads wait, when it may go on."""
        with self._lock:
            if self._told is None or self._told < until:
                self._told = until
                self._clock.waiting(until)

    def take(self, count: int = 1) -> None:
        """Wait for the turn of so many instances.

        Raises:
            OutsideHours: not within the hours.
            RetrievalStopped: after a halt.
        """
        now = self._clock.now()
        if self._hours is not None and not self._hours.hold(now):
            raise OutsideHours
        wait = 0.0
        if self._each:
            with self._lock:
                wait = (self._next - now).total_seconds() if self._next else 0.0
                if not 0.0 <= wait <= _MOST_OWED * self._each:  # nothing owed; or somebody set the clock back
                    wait = 0.0
                self._next = now + dt.timedelta(seconds=wait + count * self._each)
        self.nap(wait)
