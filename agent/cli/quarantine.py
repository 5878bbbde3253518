"""``quarantine``: list what was refused, try it again, look at it, or give it up. It imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from agent.cli.output import OUT, answered_ingest, print_ingest, print_stderr
from agent.deidentify.errors import REASONS
from agent.errors import SiteConfigError
from agent.event_log import open_log
from agent.file_access import contents
from agent.ingest.context import IngestContext, open_ingest
from agent.storage.quarantine import QuarantineEntry
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import SpoolError


def _list(way: IngestContext, arguments: argparse.Namespace) -> int:
    entries = way.quarantine.entries()
    if arguments.json:
        found = [{"name": e.name, "code": e.code, "attempts": e.attempts, **_place(way, e.name)} for e in entries]
        sys.stdout.write(json.dumps({"counts": way.quarantine.counts(), "files": found}, indent=2) + "\n")
        return 0
    if arguments.files:
        for entry in entries:  # no table: it would cut names, which are to be typed again
            place = _place(way, entry.name)
            source = place["source"] if place["source"].isprintable() else ascii(place["source"])
            words = (entry.name, entry.code, f"tried {entry.attempts}", place["road"], source)
            OUT.print("  ".join(words), markup=False, soft_wrap=True)
        OUT.print(f"{len(entries)} files in quarantine")
        return 0
    table = Table("reason", "files", "what to do", title=f"{len(entries)} files in quarantine")
    for code, count in way.quarantine.counts().items():
        table.add_row(code, str(count), REASONS[code])
    OUT.print(table)
    return 0


def _place(way: IngestContext, name: str) -> dict[str, str]:
    """Road and source: paths may name patients, so this is for the site's own console."""
    try:
        road, source = way.quarantine.source(name)
    except SpoolError:
        return {"road": "unknown", "source": "cannot be unsealed"}
    return {"road": road, "source": source}


def _named(way: IngestContext, names: Sequence[str]) -> list[QuarantineEntry]:
    """The entries of these names, each once.

    Raises:
        SiteConfigError: one of them is of nothing in quarantine; it is not said again, since it may be a path.
    """
    known = {entry.name: entry for entry in way.quarantine.entries()}
    unknown = sum(name not in known for name in set(names))
    if unknown:
        raise SiteConfigError(
            f"{unknown} of the names are not in quarantine: `quarantine list --files` shows the names"
        )
    return [known[name] for name in dict.fromkeys(names)]


def _retry(way: IngestContext, arguments: argparse.Namespace) -> int:
    entries = _named(way, arguments.names) if arguments.names else way.quarantine.entries()
    wanted = [entry for entry in entries if not arguments.code or entry.code == arguments.code]
    chosen = [e.name for e in wanted if arguments.once_more or e.attempts < way.quarantine.most]
    with way.intake(way.labels()) as intake:
        report = intake.run(way.refused(chosen))
    spent = len(wanted) - len(chosen)
    print_ingest(report, arguments.json, {"left_out": spent})
    if spent:
        print_stderr(
            f"{spent} files had reached the maximum of tries and were skipped: add --once-more to try them too"
        )
    return 0 if not report.quarantined else 1


def _show(way: IngestContext, arguments: argparse.Namespace) -> int:
    (entry,) = _named(way, arguments.names)
    arrival = way.quarantine.open(entry.name)
    body = arrival.body or contents(Path(arrival.source), way.ingestion.rules.max_bytes)
    with open(os.open(arguments.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(body)
    if arguments.json:
        told = {"name": entry.name, "code": entry.code, "bytes": len(body), "wrote": arguments.out.name}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        OUT.print(f"wrote {arguments.out.name}, unchanged. It identifies a patient: delete it when you have finished")
    return 0


def _drop(way: IngestContext, arguments: argparse.Namespace) -> int:
    if not arguments.yes:
        raise SiteConfigError("this deletes the files permanently. To confirm: --yes")
    log = open_log(way.home.root / "agent.log")
    entries = _named(way, arguments.names)
    for entry in entries:
        way.quarantine.remove(entry.name)
        log.info("quarantine_dropped", reason=entry.code)
    if arguments.json:
        sys.stdout.write(json.dumps({"dropped": len(entries)}) + "\n")
    else:
        OUT.print(f"{len(entries)} files deleted; agent.log records it")
    return 0


_OF_QUARANTINE: Final = {
    "list": _list,
    "retry": _retry,
    "show": _show,
    "drop": _drop,
}


def quarantine(arguments: argparse.Namespace) -> int:
    """List what was refused, try it again, look at it, or give it up."""
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way:
        return _OF_QUARANTINE[arguments.what](way, arguments)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered_ingest(quarantine, arguments)
