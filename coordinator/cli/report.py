"""``lazaret-coordinator report``: the overview as HTML, or one of the reports by name.

report OUT.html                          the overview of the whole ledger, with --measured beside it
report NAME OUT [--release NAME]         one of the reports; its form is OUT's ending
report list                              which reports there are

And ``round report NAME --out DIR``: what became of a run, beside the commands with which it was launched and watched.
It is about a run, released or not; the reports above are about what the ledger admitted.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from coordinator.cli.output import ERR, OUT
from coordinator.reports.document import ReportError
from coordinator.storage import directory as homes
from protos.common import durable_files


def _step(what: str) -> None:
    """What is done next, for somebody who waits at a terminal: a ledger of a million entries takes a minute."""
    if sys.stderr.isatty():
        ERR.print(f"{what} …", markup=False)


def run(arguments: argparse.Namespace) -> int:
    """Write the report that was asked for, or list them all."""
    words: list[str] = arguments.what
    if words == ["list"]:
        return _list()
    if len(words) == 1:
        if arguments.release:
            raise ReportError("name the report too: report certificate OUT.pdf --release NAME")
        _not_a_name(words[0])
        measured = json.loads(arguments.measured.read_text()) if arguments.measured else None
        from coordinator.reports.catalog import overview_html  # noqa: PLC0415 - what writes PDF; no other command needs it

        return _write(arguments, Path(words[0]), lambda home, now: overview_html(home, measured, now, step=_step))
    if len(words) > 2 or arguments.measured:
        raise ReportError("give the name of one report and one file to write")
    from coordinator.reports.catalog import make  # noqa: PLC0415 - as above

    name, out = words[0], Path(words[1])
    form = out.suffix.removeprefix(".").lower()
    _write(arguments, out, lambda home, now: make(home, name, form, arguments.release, now, step=_step).body)
    if name == "certificate":
        OUT.print(f"check it with: lazaret-verify {out.name} --key FINGERPRINT --from ledger.export", markup=False)
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write ``report.html`` and ``report.json`` of a run; both are made before a file is written."""
    from coordinator.reports.catalog import make_run_report  # noqa: PLC0415 - as above

    out: Path = arguments.out
    if out.exists() and not out.is_dir():
        raise ReportError(f"{out.name} is a file: name a folder")
    made = make_run_report(homes.CoordinatorDirectory(arguments.home), arguments.run, dt.datetime.now(dt.UTC))
    out.mkdir(parents=True, exist_ok=True)
    for form in ("json", "html"):
        durable_files.replace_file(out / f"report.{form}", made.files[form].body)
    OUT.print(f"{made.told}; wrote report.html and report.json in {out.name}", markup=False)
    return 0


def _write(
    arguments: argparse.Namespace, out: Path, made: Callable[[homes.CoordinatorDirectory, dt.datetime], bytes]
) -> int:
    """One report into one file."""
    gc.disable()  # a million entries are no garbage; a quarter of the time
    try:
        body = made(homes.CoordinatorDirectory(arguments.home), dt.datetime.now(dt.UTC))
    finally:
        gc.enable()
    durable_files.replace_file(out, body)
    OUT.print(f"wrote {out.name}", markup=False)
    return 0


def _not_a_name(word: str) -> None:
    """One word is the file for the page of everything.

    Raises:
        ReportError: it is the name of a report, so that the file was forgotten.
    """
    if Path(word).suffix or Path(word).name != word:
        return
    from coordinator.reports.catalog import REPORTS  # noqa: PLC0415 - as above

    report = REPORTS.get(word)
    if report is not None:
        form = report.forms[0]
        more = f" --release {report.about.upper()}" if report.about else ""
        raise ReportError(f"name the file to write: report {word} {word}.{form}{more}")


def _list() -> int:
    from coordinator.reports.catalog import REPORTS  # noqa: PLC0415 - as above

    table = Table("name", "as", "about", "what it is")
    for report in REPORTS.values():
        about = f"one {report.about}: --release" if report.about else "the whole ledger"
        table.add_row(report.name, ", ".join(report.forms), about, report.words)
    OUT.print(table)
    return 0
