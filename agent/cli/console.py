"""``lazaret-agent console``: the site console alone, beside a `serve` without one, or where nothing serves."""

from __future__ import annotations

import argparse
import signal
import threading

from agent.cli.output import OUT
from agent.console.app import console_server
from agent.event_log import open_log
from agent.storage.site_directory import SiteDirectory


def run(arguments: argparse.Namespace) -> int:
    """Serve the pages until told to stop.

    Raises:
        SiteConfigError, ConsoleConfigError: there is no console.toml, or something in it is wrong.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    home = SiteDirectory(arguments.home)
    home.settings()
    with console_server(home, open_log(home.root / "agent.log")) as serving:
        OUT.print(serving.told, markup=False, soft_wrap=True)
        stop.wait()
    return 0
