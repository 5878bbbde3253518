"""``lazaret-agent console``: the site console alone, beside a `serve` without one, or where nothing serves."""

from __future__ import annotations

import argparse
import signal
import threading

from rich.console import Console

from agent.console.app import Lent, beside
from agent.edges.home import BadSite, Home
from agent.edges.log import open_log

OUT = Console(highlight=False)


def run(arguments: argparse.Namespace) -> int:
    """Serve the pages until told to stop.

    Raises:
        BadSite, BadConsole: there is no console.toml, or something in it is wrong.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    home = Home(arguments.home)
    home.settings()
    with beside(home, Lent(home), open_log(home.root / "agent.log")) as told:
        if not told:
            raise BadSite("console.toml is missing: without it there is no console; see deploy/docs/consoles.md")
        OUT.print(told, markup=False, soft_wrap=True)
        stop.wait()
    return 0
