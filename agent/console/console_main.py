"""The site console in a process of its own; :mod:`agent.console.console_process` starts it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agent.console.app import console_server
from agent.event_log import open_log
from agent.storage.site_directory import SiteDirectory
from protos.common.errors import LazaretError
from protos.operations.confinement import end_with
from protos.operations.event_counters import EventCounters

_OOM_SCORE: Final = "500"  # of 1000: when memory runs out, jobs end first (900), then this, then the service


class RelayedCounters(EventCounters):
    """Counts of the log, which the service hears of: its metrics tell them."""

    def __init__(self, channel: socket.socket) -> None:
        """``channel``: to the service."""
        super().__init__()
        self._channel = channel

    def count(self, event: Mapping[str, Any], level: str) -> None:
        """Here and there. A service that does not read is not waited for."""
        super().count(event, level)
        told = {name: str(event.get(name, "")) for name in ("event", "where", "state")}
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps({**told, "level": level}).encode(), socket.MSG_DONTWAIT)


def main(words: list[str]) -> None:
    """Serve the pages until the service ends, or says so by hanging up.

    Args:
        words: the descriptor of a socket to the service, the home directory, the port to take ("0": what console.toml
            says), and the service's process number.
    """
    channel = socket.socket(fileno=int(words[0]))
    channel.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM):  # systemd and a terminal tell all at once; the service says when
        signal.signal(number, lambda *_: None)
    end_with(int(words[3]))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    home = SiteDirectory(Path(words[1]))
    try:
        log = open_log(home.root / "agent.log", RelayedCounters(channel))
        with console_server(home, log, int(words[2])) as serving:
            channel.send(json.dumps({"port": serving.port, "told": serving.told}).encode())
            with contextlib.suppress(OSError):
                channel.recv(1)
    except (LazaretError, OSError) as fault:
        said = fault.strerror or type(fault).__name__ if isinstance(fault, OSError) else str(fault)
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"fault": said}).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
