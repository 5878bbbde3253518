"""Notify systemd (sd_notify(3)): ready, stopping, and, while the service is healthy, the watchdog.

Type=notify and WatchdogSec= in the unit. A datagram to the socket that NOTIFY_SOCKET names, and no library. The
variable is taken out of the environment, so that no child process speaks for this one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, MutableMapping
from typing import Final, Self

_MOST: Final = 2048  # bytes of one message


class Systemd:
    """Tells the service manager how it is; does nothing where there is none. Use as a context, once all is up."""

    def __init__(self, wrong: Callable[[], str | None], environment: MutableMapping[str, str] | None = None) -> None:
        """Nothing is said yet.

        Args:
            wrong: what is wrong with the service, or None. While it is something, or does not come back, the
                watchdog is not fed, and systemd starts the service again.
            environment: the process's own.
        """
        given = os.environ if environment is None else environment
        address = given.pop("NOTIFY_SOCKET", "")
        every = given.pop("WATCHDOG_USEC", "")
        of = given.pop("WATCHDOG_PID", str(os.getpid()))
        self._address = "\0" + address[1:] if address.startswith("@") else address
        # a third of it: an answer that came too late once does not end the service
        self._every = int(every) / 3e6 if every.isdigit() and of == str(os.getpid()) else 0.0
        self._wrong, self._over = wrong, threading.Event()
        self._thread = threading.Thread(target=self._feed, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        """Ready."""
        self.say("READY=1")
        if self._address and self._every > 0:
            self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stopping: what is still to be done is not cut short by the watchdog."""
        self._over.set()
        self.say("STOPPING=1")

    def say(self, text: str) -> None:
        """One message; a manager that is not there any more is not waited for."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
            there.settimeout(1.0)
            there.sendto(text.encode()[:_MOST], self._address)

    def _feed(self) -> None:
        while not self._over.wait(self._every):
            wrong = self._wrong()
            if wrong is None:
                self.say("WATCHDOG=1\nSTATUS=well")
            else:
                self.say("STATUS=" + wrong.replace("\n", " "))
