"""The long-lived stream of notifications from the coordinator.

Nothing is granted by it: a notice makes the agent look sooner, or leave a run that is over. A stream that breaks is
opened again, with growing waits; the coordinator ends it at once when this site's certificate is revoked.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

import grpc

from policies.statements import ID

KINDS: Final = frozenset({"hello", "beat", "run", "over", "bye"})
_PAUSES_S: Final = (1.0, 60.0)
_FRESH_S: Final = 2.0  # a stream that began just now is not taken for one whose end nobody noticed


class NotificationStream:
    """One stream, in a thread of its own, until closed."""

    def __init__(self, open_stream: Callable[[str], Any], heard: Callable[[str, str], None]) -> None:
        """Begin.

        Args:
            open_stream: version -> the stream of notices (:meth:`agent.gateway.client.GatewayClient.session`).
            heard: (kind, run) of each notice of a kind that is known, but for beats.
        """
        self._open, self._heard, self._over = open_stream, heard, threading.Event()
        self._stream: Any = None
        self._wake, self._greeted, self._since = threading.Event(), threading.Event(), 0.0
        self._thread = threading.Thread(target=self._listen, name="session", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._over.set()
        self._wake.set()
        if self._stream is not None:
            self._stream.cancel()

    def begin_again(self, seconds: float) -> None:
        """Open the stream now, where the coordinator says that there is none; wait until its beginning was heard.

        After a line was cut, this end may not have noticed, or wait for a minute before it tries again.

        Args:
            seconds: to wait at most.
        """
        if not self._greeted.is_set():
            self._wake.set()
        elif time.monotonic() - self._since > _FRESH_S:
            self._greeted.clear()
            self._wake.set()
            self._stream.cancel()
        self._greeted.wait(seconds)

    def _listen(self) -> None:
        pause = _PAUSES_S[0]
        while not self._over.is_set():
            try:
                self._stream = self._open(version("lazaret"))
                for notice in self._stream:
                    pause = _PAUSES_S[0]
                    if notice.kind in KINDS - {"beat"} and (not notice.run or ID.fullmatch(notice.run)):
                        self._heard(notice.kind, notice.run)
                    if notice.kind == "hello":
                        self._since = time.monotonic()
                        self._greeted.set()
            except (grpc.RpcError, ValueError):  # broken; or the channel was closed for a fresh one
                pass
            self._greeted.clear()
            woken = self._wake.wait(random.SystemRandom().uniform(0.5, 1.0) * pause)
            self._wake.clear()
            pause = _PAUSES_S[0] if woken else min(2 * pause, _PAUSES_S[1])
