"""The log on its way to the hospital's own collector: syslog (RFC 5424) over TLS (RFC 5425).

This is a copy; the file on disk is the log. Logging never waits for the sender. Lines that find the queue full are
dropped and counted, and the collector receives the count. Syslog has no acknowledgements: lines that the system had
buffered when a connection broke may be lost too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protos.common.errors import ConfigError

SEVERITIES: Final = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}  # RFC 5424, section 6.2.1
MOST: Final = 4096  # lines that wait; each is two kilobytes or less
_SECONDS: Final = 10.0  # to connect, and for one line
_PAUSES: Final = (1.0, 60.0)
_LEAVE: Final = 2.0  # seconds that the end of the process waits for the queue, and then for the line in hand
_NOT_NAME: Final = re.compile(r"[^\x21-\x7e]")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class CollectorConfigError(ConfigError, ValueError):
    """The settings of the collector make no sense; the text says which."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Where the log is forwarded to."""

    to: str  # host:port
    ca: Path | None = None  # PEM of who certifies the collector; None: the system's own list
    certificate: Path | None = None  # PEM, ours, where the collector asks for one
    key: Path | None = None  # of the certificate, PEM
    facility: int = 13  # log audit; RFC 5424, section 6.2.1
    hostname: str = ""  # how this machine is called there; "": as it calls itself

    def __post_init__(self) -> None:
        """An address, a facility, and a certificate with its key or neither."""
        match = _HOST.fullmatch(self.to)
        if match is None or not 0 < int(match[2]) < 65_536:
            raise CollectorConfigError("syslog.to must be host:port")
        if not 0 <= self.facility <= 23:
            raise CollectorConfigError("syslog.facility lies in 0 to 23")
        if (self.certificate is None) is not (self.key is None):
            raise CollectorConfigError("syslog: give certificate and key, or neither")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.to.rpartition(":")
        return host.strip("[]"), int(port)

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer that verifies the collector's chain and name (RFC 5425, section 5.2).

        Raises:
            OSError: a file cannot be read, or is no PEM.
        """
        context = ssl.create_default_context(cafile=self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate is not None and self.key is not None:
            context.load_cert_chain(self.certificate, self.key, password="")
        return context

    def connected(self) -> ssl.SSLSocket:
        """A connection.

        Raises:
            OSError: nobody answers, or not with a certificate that counts.
        """
        host, port = self.address
        plain = socket.create_connection((host, port), timeout=_SECONDS)
        try:
            return self.context().wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise


def message(app: str, collector: Collector, level: str, event: str, line: str) -> bytes:
    """One line of the log as a SYSLOG-MSG (RFC 5424, section 6): its JSON, in ASCII, is the free-form part.

    Args:
        app: the program's name.
        collector: for facility and host name.
        level: structlog's.
        event: becomes the MSGID.
        line: one JSON object with a ``timestamp``; what is not ASCII or a control character is escaped in it.
    """
    priority = 8 * collector.facility + SEVERITIES.get(level, 5)
    stamp = _name(json.loads(line).get("timestamp", ""), 32)
    host = _name(collector.hostname or socket.gethostname(), 255)
    head = f"<{priority}>1 {stamp} {host} {_name(app, 48)} {os.getpid()} {_name(event, 32)} -"
    return f"{head} {line}".encode("ascii")


def _name(text: str, most: int) -> str:
    """PRINTUSASCII, so long at most; "-" for nothing."""
    return _NOT_NAME.sub("?", text)[:most] or "-"


def framed(body: bytes) -> bytes:
    """With its length before it (RFC 5425, section 4.3)."""
    return f"{len(body)} ".encode() + body


class Forwarder:
    """Sends lines in the order in which they come, in a thread of its own, which starts with the first."""

    def __init__(
        self, collector: Collector, app: str, lost: Callable[[int], None] = lambda _lines: None, most: int = MOST
    ) -> None:
        """Nothing is sent yet.

        Args:
            collector: where to.
            app: the program's name.
            lost: hears how many lines were dropped; from the thread that logs.
            most: lines that wait at once.
        """
        self.collector, self._app, self._lost, self._most = collector, app, lost, most
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._missed, self._closing = 0, False
        self._thread: threading.Thread | None = None
        self._socket: ssl.SSLSocket | None = None
        self.connected = False

    def send(self, level: str, event: str, line: str) -> None:
        """Take one line along, or drop it when too many wait. Never waits."""
        body = message(self._app, self.collector, level, event, line)
        with self._changed:
            if self._closing or len(self._waiting) >= self._most:
                self._missed += 1
                self._lost(1)
                return
            self._waiting.append(body)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="syslog", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._changed.notify_all()

    def close(self) -> None:
        """Send what waits, for a few seconds at most, and hang up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, _LEAVE)
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LEAVE)
            atexit.unregister(self.close)

    def _work(self) -> None:
        pause = _PAUSES[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    self._hang_up()
                    return
                body = self._waiting[0]
            try:
                self._deliver(body)
                pause = _PAUSES[0]
            except OSError:
                self._hang_up()
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, _PAUSES[1])
                continue
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _deliver(self, body: bytes) -> None:
        """One line, on a connection that is still one; and before it how many were dropped since.

        Raises:
            OSError: it was not taken.
        """
        if self._socket is not None and _ended(self._socket):
            self._hang_up()
        if self._socket is None:
            self._socket = self.collector.connected()
            self.connected = True
        with self._changed:
            missed = self._missed
        if missed:
            self._socket.sendall(framed(self._gap(missed)))
            with self._changed:
                self._missed -= missed
        self._socket.sendall(framed(body))

    def _gap(self, missed: int) -> bytes:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        told = {"event": "syslog_dropped", "count": missed, "level": "warning", "timestamp": stamp}
        return message(self._app, self.collector, "warning", "syslog_dropped", json.dumps(told))

    def _hang_up(self) -> None:
        self.connected = False
        if self._socket is not None:
            with contextlib.suppress(OSError, ValueError):
                self._socket.settimeout(1.0)
                self._socket.unwrap()  # close_notify: RFC 5425, section 4.4
            self._socket.close()
            self._socket = None


def _ended(connection: ssl.SSLSocket) -> bool:
    """Has the collector hung up since? It says nothing otherwise, so there is nothing to read."""
    connection.settimeout(0)
    try:
        return not connection.recv(1)
    except (ssl.SSLWantReadError, BlockingIOError):
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(_SECONDS)
