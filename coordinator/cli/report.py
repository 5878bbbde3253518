"""``lazaret-coordinator report``: the HTML report as before, or one of the reports by name.

report OUT.html                          the report of everything, with --measured beside it
report NAME OUT [--release NAME]         one of the reports; its form is OUT's ending
report list                              which reports there are
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coordinator.edges import home as homes
from coordinator.reports.document import NoReport

OUT = Console(highlight=False)
Act = Callable[[argparse.Namespace], int]


def _step(what: str) -> None:
    """What is done next, for somebody who waits at a terminal: a ledger of a million entries takes a minute."""
    if sys.stderr.isatty():
        Console(stderr=True, highlight=False).print(f"{what} …", markup=False)


def add_command(commands: Any, add: Callable[..., argparse.ArgumentParser], everything: Act) -> None:
    """The parser of ``report``.

    Args:
        commands: the group of all commands.
        add: ``add(group, name, act, text)`` makes a parser.
        everything: writes the report of everything to ``arguments.out``, with ``arguments.measured``.
    """

    def act(arguments: argparse.Namespace) -> int:
        return _run(arguments, everything)

    report = add(commands, "report", act, "write a report: the page of everything, or one by its name")
    report.add_argument("what", nargs="+", metavar="[NAME] OUT", help="`list` shows the names")
    report.add_argument("--release", default="", metavar="NAME", help="the release or run that it is about")
    report.add_argument("--measured", type=Path, help="JSON with accuracy, ingest counts and times to show beside")


def _run(arguments: argparse.Namespace, everything: Act) -> int:
    words: list[str] = arguments.what
    if words == ["list"]:
        return _list()
    if len(words) == 1:
        if arguments.release:
            raise NoReport("name the report too: report certificate OUT.pdf --release NAME")
        _not_a_name(words[0])
        arguments.out = Path(words[0])
        return everything(arguments)
    if len(words) > 2 or arguments.measured:
        raise NoReport("give the name of one report and one file to write")
    from coordinator.edges.reports import make  # noqa: PLC0415 - what writes PDF, which no other command needs

    name, out = words[0], Path(words[1])
    form = out.suffix.removeprefix(".").lower()
    home, now = homes.Home(arguments.home), dt.datetime.now(dt.UTC)
    gc.disable()  # a million entries are no garbage; a quarter of the time
    try:
        made = make(home, name, form, arguments.release, now, step=_step)
    finally:
        gc.enable()
    homes.write_durably(out, made.body)
    OUT.print(f"wrote {out.name}", markup=False)
    if name == "certificate":
        OUT.print(f"check it with: lazaret-verify {out.name} --key FINGERPRINT --from ledger.export", markup=False)
    return 0


def _not_a_name(word: str) -> None:
    """One word is the file for the page of everything.

    Raises:
        NoReport: it is the name of a report, so that the file was forgotten.
    """
    if Path(word).suffix or Path(word).name != word:
        return
    from coordinator.edges.reports import REPORTS  # noqa: PLC0415 - as above

    report = REPORTS.get(word)
    if report is not None:
        form = report.forms[0]
        more = f" --release {report.about.upper()}" if report.about else ""
        raise NoReport(f"say also which file to write: report {word} {word}.{form}{more}")


def _list() -> int:
    from coordinator.edges.reports import REPORTS  # noqa: PLC0415 - as above

    table = Table("name", "as", "about", "what it is")
    for report in REPORTS.values():
        about = f"one {report.about}: --release" if report.about else "the whole ledger"
        table.add_row(report.name, ", ".join(report.forms), about, report.words)
    OUT.print(table)
    return 0
