"""Watchers of a run, the order of runs, and signs of life."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

ENDS: Final = frozenset({"finished", "failed", "stopped"})
NOT_APPROVED_YET: Final = "not_approved_yet"  # why a run waits: persons at its sites decide
FROZEN: Final = "frozen"  # the same: after a restore nothing is granted before the sites have shown their receipts


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something happened in a run; ``round`` 0 is the pricing."""

    run: str
    round: int
    state: str  # granted | declined | sent | refused | waiting | closed | evaluated | stopped | finished | failed
    sites: tuple[str, ...] = ()
    reason: str = ""  # of an evaluation, its first figure


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """A site's last call of its training link."""

    at: float  # seconds since 1970
    received: int  # bytes that its link has sent since this process started, and been sent
    sent: int
    rate: float  # bytes a second of the newest large call from it; 0: there was none
    stage: str  # what it is at, one of `protos.federation.messages.STAGES`; "": an agent of an earlier version
    answered: float = 0.0  # when the newest piece of an answer came from it, seconds since 1970; 0: none has
    down: float = 0.0  # seconds from the first piece of the newest message to it until it had all; 0: there was none
    up: float = 0.0  # the same of its newest answer


@dataclass(slots=True)
class EventStream:
    """A run's events so far, and a way to wait for more."""

    events: list[RunEvent] = field(default_factory=list)
    over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: threading.Event = field(default_factory=threading.Event)  # has its turn, or stands in line for it

    def put(self, event: RunEvent) -> None:
        """Say that something happened."""
        with self.changed:
            self.events.append(event)
            self.over = self.over or event.state in ENDS
            self.changed.notify_all()

    def close(self) -> None:
        """The process ends: whoever still waits for an event is let go."""
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def follow(self) -> Iterator[RunEvent]:
        """Every event from the first; ends with the run."""
        seen = 0
        while True:
            with self.changed:
                while seen == len(self.events) and not self.over:
                    self.changed.wait(1.0)
                fresh, over = self.events[seen:], self.over
            yield from fresh
            seen += len(fresh)
            if over and seen == len(self.events):
                return


@dataclass(slots=True, eq=False)
class _Person:
    """One who stands in the line, or has had their turn and is not done."""

    sites: frozenset[str] | None  # None: all there are
    going: bool = False

    def apart(self, other: _Person) -> bool:
        """Whether both may go at once."""
        return self.sites is not None and other.sites is not None and self.sites.isdisjoint(other.sites)


class RunQueue:
    """First come, first served: several at a time, but never two of the same site, and in their order."""

    def __init__(self, most: int = 4) -> None:
        """Nobody stands in it; ``most`` may go at a time."""
        self._most = most
        self._people: list[_Person] = []
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, standing: threading.Event, sites: Collection[str] | None = None) -> Iterator[None]:
        """Stand in line (``standing`` is set then), go on when it is one's turn. Without ``sites``: alone."""
        me = _Person(None if sites is None else frozenset(sites))
        with self._changed:
            self._people.append(me)
            standing.set()
            self._let_go()
            self._changed.wait_for(lambda: me.going)
        try:
            yield
        finally:
            with self._changed:
                self._people.remove(me)
                self._let_go()

    def _let_go(self) -> None:
        """Whose turn it is now."""
        for place, person in enumerate(self._people):
            if sum(one.going for one in self._people) < self._most:
                person.going = person.going or all(person.apart(one) for one in self._people[:place])
        self._changed.notify_all()
