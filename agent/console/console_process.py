"""The site console as ``serve`` has it: a process of its own, started again whenever it ends.

A fault of the pages, or the memory that a web framework takes, ends ``agent.console.console_main`` and neither the
receivers nor the ledger's owner. It is handed nothing that is open but one end of a socket pair, and an environment
of named variables. It reads what the pages show from the site's files, and asks the control socket for the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from agent.event_log import log_end
from agent.operations.metrics import CONSOLE
from protos.operations import child_process
from protos.operations.event_counters import PROCESS, EventCounters
from protos.operations.kept_process import ENDED, Born, KeptProcess, StartedProcess, how_ended
from protos.web.settings import ConsoleConfigError

MESSAGE_BYTES: Final = 1 << 14
_MODULE: Final = "agent.console.console_main"
_KEPT: Final = ("LANGUAGE", "SSL_CERT_FILE", "TESSDATA_PREFIX", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_START_S: Final = 120.0  # a first fold of a long ledger comes later; importing takes seconds
_GRACE_S: Final = 8.0  # for requests under way


class ConsoleProcess:
    """Runs the console while a block runs."""

    def __init__(self, home: Path, log: Any, tally: EventCounters = PROCESS) -> None:
        """Nothing runs yet.

        Args:
            home: with a ``console.toml``.
            log: hears of each end.
            tally: counts what the console logs, for the service's metrics.
        """
        self._home, self._tally = home, tally
        self._kept = KeptProcess(CONSOLE, self._start, log_end(log, CONSOLE))
        self._port = 0  # that it had first: its address is known by then
        self.told = ""  # its address, for the operator

    @property
    def pid(self) -> int | None:
        """Of its process; None while there is none."""
        return self._kept.pid

    def __enter__(self) -> Self:
        """Start it; when this returns, pages are answered.

        Raises:
            ConsoleConfigError: it cannot be opened as it is configured.
        """
        self._kept.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._kept.end(_GRACE_S)

    def _start(self, born: Born) -> StartedProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(self._home.absolute()), str(self._port), str(os.getpid())]
        try:
            process = child_process.start(_MODULE, words, [theirs.fileno()], _KEPT)
        except OSError as error:
            ours.close()
            raise ConsoleConfigError(f"the console does not start: {error.strerror}") from None
        finally:
            theirs.close()
        born(process)
        watchdog = threading.Timer(_START_S, process.kill)
        try:
            watchdog.start()
            while (said := _read(ours)) is not None and not said.keys() & {"port", "fault"}:
                self._count(said)
        except BaseException:
            ours.close()
            raise
        finally:
            watchdog.cancel()
        if said is None or type(said.get("port")) is not int:
            how = f"the console does not start: {how_ended(_refused(process, ours))}"
            raise ConsoleConfigError(str((said or {}).get("fault", how)))
        self._port, self.told = said["port"], str(said["told"])
        return StartedProcess(process, partial(self._listen, ours), partial(_hang_up, ours))

    def _listen(self, channel: socket.socket) -> None:
        """Count what it logs, until it ends."""
        while (said := _read(channel)) is not None:
            self._count(said)
        channel.close()

    def _count(self, said: Mapping[str, Any]) -> None:
        event = {name: str(said.get(name, ""))[:100] for name in ("event", "where", "state")}
        if event["event"] != ENDED:  # which this process alone logs
            self._tally.count(event, str(said.get("level", "info"))[:20])


def _refused(process: subprocess.Popen[bytes], channel: socket.socket) -> int:
    """Its exit status; one that ends already keeps its own."""
    process.kill()
    channel.close()
    return process.wait()


def _read(channel: socket.socket) -> Mapping[str, Any] | None:
    """The next message; None when it has ended, or says what it should not."""
    try:
        said = json.loads(channel.recv(MESSAGE_BYTES) or b"null")
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def _hang_up(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
