"""The long-lived stream of notifications to each site."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from grpc import StatusCode

from coordinator.gateway.calls import Call, CallRejectedError
from protos.v1 import gateway_pb2

MOST: Final = 512  # open streams; each holds one of the service's threads
BEAT_S: Final = 20.0  # a session says that it lives


@dataclass(slots=True, eq=False)
class _Line:
    """One site's session: notices that wait for it."""

    notices: list[Any] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: bool = False
    shown: bool = False  # the site has shown the head of its own ledger since it began


def _say(line: _Line, notice: Any) -> None:
    """Add a notice to a session, or end it."""
    with line.changed:
        if notice is None:
            line.over = True
        else:
            line.notices.append(notice)
        line.changed.notify_all()


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether a site's session is open, and since when it is so or not."""

    online: bool
    since: float  # seconds since 1970


class NotificationStreams:
    """One stream for each site at most."""

    def __init__(self, log: Any, clock: Callable[[], float] = time.time) -> None:
        """Nobody is connected. ``clock`` gives seconds since 1970, to show people; nothing is decided by it."""
        self._log, self._mutex, self._lines = log, threading.Lock(), dict[str, _Line]()
        self._clock, self._seen = clock, dict[str, Presence]()

    def hold(self, call: Call, ended: Callable[[], str] = str) -> Iterator[Any]:
        """A site's notices, until it hangs up, a newer session of it begins, or :meth:`close`.

        ``ended`` is a run whose end the site may have missed while it was disconnected; "": none.
        """
        line, site = _Line(), call.peer.site
        with self._mutex:
            if site not in self._lines and not len(self._lines) < MOST:
                raise CallRejectedError(StatusCode.RESOURCE_EXHAUSTED, "too many sessions: go on without one", "busy")
            before, self._lines[site] = self._lines.get(site), line
            if before is None:
                self._seen[site] = Presence(True, self._clock())
        if before is not None:
            _say(before, None)
        self._log.info("session", site=site, state="open")
        # By gRPC's word, and not after the loop: of a peer that hangs up, this generator may never be asked again.
        if not call.context.add_callback(lambda: self._gone(site, line)):
            self._gone(site, line)
        yield gateway_pb2.Notice(kind="hello")
        if run := ended():  # asked only now, so that no end falls between the two
            yield gateway_pb2.Notice(kind="over", run=run)
        over = False
        while not over:
            with line.changed:
                line.changed.wait_for(lambda: line.notices or line.over, BEAT_S)
                fresh, line.notices, over = line.notices, [], line.over  # together: a last word is said
            yield from fresh or ([] if over else [gateway_pb2.Notice(kind="beat")])

    def _gone(self, site: str, line: _Line) -> None:
        """A session has ended, whoever ended it."""
        _say(line, None)
        with self._mutex:
            if self._lines.get(site) is line:
                del self._lines[site]
                self._seen[site] = Presence(False, self._clock())
        self._log.info("session", site=site, state="closed")

    def notify(self, kind: str, run: str = "", sites: tuple[str, ...] | None = None) -> None:
        """Say something to the sessions of some sites, or of all."""
        with self._mutex:
            lines = [line for site, line in self._lines.items() if sites is None or site in sites]
        for line in lines:
            _say(line, gateway_pb2.Notice(kind=kind, run=run))

    def shows_head(self, site: str) -> None:
        """A site's own ledger was judged, and found good, by this process."""
        with self._mutex:
            if site in self._lines:
                self._lines[site].shown = True

    def head_shown(self, site: str) -> bool:
        """Was it judged since the site's session began? A site for which there is no place goes on without one."""
        with self._mutex:
            line = self._lines.get(site)
            return line.shown if line is not None else not len(self._lines) < MOST

    def connected(self) -> tuple[str, ...]:
        """The sites with an open session."""
        with self._mutex:
            return tuple(sorted(self._lines))

    def presence(self) -> dict[str, Presence]:
        """Every site that had a session since this process started, and how it stands now."""
        with self._mutex:
            return dict(self._seen)

    def close(self) -> None:
        """Say goodbye to every site."""
        self.notify("bye")
        with self._mutex:
            lines = list(self._lines.values())
        for line in lines:
            _say(line, None)
