"""``lazaret-agent doctor``: one line for each check, passed, noted, or failed with what to do. Exit 1: one failed."""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from agent import site_commands
from agent.edges import doctor
from agent.edges.home import BadSite, Home
from protos.doctor import Finding, as_json, as_lines, examine, failed, healthy, passed
from protos.keyfile import BadKeyFile

OUT = Console(highlight=False)
_EXPECTED: Final = (*doctor.EXPECTED, *site_commands.EXPECTED)


def findings(home: Home, now: dt.datetime) -> list[Finding]:
    """All of them: what a release needs, then the way in. ``now``: UTC, for certificates."""
    found = examine(doctor.before_the_way_in(home, now), _EXPECTED)
    if any(f.name == "site.toml" and f.state == "fail" for f in found):  # nothing else can be asked
        return found
    found += examine([("ingest.toml", lambda: _way_in(home))], _EXPECTED)
    try:
        checks = doctor.of_the_way_in(home, now)
    except (BadSite, BadKeyFile):  # said above
        checks = []
    return found + examine(checks, _EXPECTED)


def _way_in(home: Home) -> Iterator[Finding]:
    """The checks of :mod:`agent.site_commands`, whose disk's is made with the watermark instead."""
    for name, wrong in site_commands.doctor(home).items():
        if name != "room on the disk":
            yield failed(name, wrong) if wrong else passed(name)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; exit 1 when something failed."""
    found = findings(Home(arguments.home), dt.datetime.now(dt.UTC))
    if arguments.json:
        sys.stdout.write(as_json(found) + "\n")
    else:
        for line in as_lines(found):
            OUT.print(line, markup=False, soft_wrap=True)
    return 0 if healthy(found) else 1
