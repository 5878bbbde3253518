"""``ingest``, and ``what-if``. Torch is imported only if a head scan arrives that must be defaced."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from agent.cli.administration import lines_of
from agent.cli.output import OUT, answered_ingest, file_progress, print_ingest, print_stderr
from agent.deidentify.errors import REASONS, FileRejectedError
from agent.deidentify.manifest import explain
from agent.errors import SiteConfigError
from agent.event_log import open_log
from agent.ingest import errors as ingest_errors
from agent.ingest.context import IngestContext, open_ingest, total
from agent.ingest.folders import Folder
from agent.ingest.parser_process import ParserProcess
from agent.ingest.patient_lists import read_pairs
from agent.ingest.pending import PendingFile
from agent.ingest.pipeline import IngestReport
from agent.ingest.retrieval import FAULTS, RetrievalCallbacks, RetrievalThread, named, narrowed
from agent.pacs.archive import ArchiveQuery
from agent.storage.site_directory import SiteDirectory

_LOOK_S: Final = 1.0  # how often what an archive sends is let in


@dataclass(slots=True)
class _Outcome:
    """What an `ingest` has done so far: it is told even when something ends it."""

    report: IngestReport = field(default_factory=lambda: total([]))
    began: bool = False
    faces: dict[str, Any] | None = None  # studies de-faced, and withheld with the reasons; None where none waited
    archive: dict[str, Any] | None = None  # what an archive did not send; None where none was asked

    def add(self, report: IngestReport) -> None:
        self.report, self.began = total([self.report, report]), True


def ingest(arguments: argparse.Namespace) -> int:
    """Ingest pending files, new files in the folders, and an archive's files; rejected files are stored with their
    reason.

    Exit 1: something of an archive is missing, or it was not asked. What was kept is told in any case.
    """
    home = SiteDirectory(arguments.home)
    log = open_log(arguments.home / "agent.log")
    done, complete = _Outcome(), True
    try:
        with open_ingest(home, arguments.project) as way, file_progress("ingest", arguments.json) as progress:
            if arguments.pacs or arguments.dicomweb:
                complete = _from_archive(way, arguments, progress, done)
            else:
                folders = [Folder(arguments.folder)] if arguments.folder else [way.usual(), *way.ingestion.folders]
                done.add(_waiting(way, progress))
                for folder in folders:
                    done.add(_from_folder(way, folder, progress))
            done.faces = _faces(way, silent=arguments.json)
    finally:
        if done.began:
            report, refused = done.report, sum(done.report.quarantined.values())
            more = {"archive": done.archive, "faces": done.faces}
            print_ingest(report, arguments.json, {name: told for name, told in more.items() if told})
            log.info("ingested", kept=report.kept, duplicates=report.duplicates, quarantined=refused)
    return 0 if complete else 1


def _faces(way: IngestContext, *, silent: bool) -> dict[str, Any] | None:
    """Take the faces off what has come, where ``[faces]`` says how; what keeps its face stays withheld."""
    if way.ingestion.faces is None or not way.vault.faces():
        return None
    from agent.ingest.vault_defacing import sweep  # noqa: PLC0415 - torch, and only where a head has come

    with file_progress("faces", silent) as progress:
        swept = sweep(way, progress)
    told = "".join(f"; {count} withheld: {why}" for why, count in swept.kept.items())
    print_stderr(f"studies de-faced: {swept.defaced}{told}")
    return {"defaced": swept.defaced, "withheld": dict(swept.kept)}


def _from_folder(way: IngestContext, folder: Folder, progress: Callable[[int, int | None], None]) -> IngestReport:
    lists = way.lists(folder)
    lying = way.lying(folder, lists)
    found: list[PendingFile] = [*lying, *way.missing(folder, lying)]
    with way.intake(lists) as intake:
        return intake.run(found, lambda done: progress(done, len(found)))


def _waiting(way: IngestContext, progress: Callable[[int, int | None], None]) -> IngestReport:
    with way.intake(way.labels()) as intake:
        return intake.run(way.waiting(), lambda done: progress(done, None))


def _from_archive(
    way: IngestContext, arguments: argparse.Namespace, progress: Callable[[int, int | None], None], done: _Outcome
) -> bool:
    """Retrieve in a thread, and let in what has come meanwhile; what waited before comes first. Is all there?

    Raises:
        ArchiveError, DicomWebError, VaultError, SpoolError: what ended the asking; what came until then is let in.
    """
    kind, name = ("pacs", arguments.pacs) if arguments.pacs else ("dicomweb", arguments.dicomweb)
    archive = named(way.ingestion, kind, name)
    archive = replace(archive, query=narrowed(archive.query, _query(arguments)))
    done.add(_waiting(way, progress))

    def waiting(until: dt.datetime) -> None:
        print_stderr(f"{name}: outside its hours; retrieval waits until {until:%H:%M}")

    with (
        way.intake(way.labels()) as intake,
        RetrievalThread(way.home, way.project, archive, RetrievalCallbacks(progress, waiting)) as pull,
    ):
        while not pull.over(_LOOK_S):
            done.add(intake.run(way.waiting()))
        done.add(intake.run(way.waiting()))
        try:
            brought = pull.result()
        except FAULTS as error:
            unknown = dict.fromkeys(("missing", "failed"))
            done.archive = unknown | {"stopped": True, "asked": True, "error": ingest_errors.sentence(error)}
            raise
    told = {key: getattr(brought, key) for key in ("missing", "failed", "stopped", "asked")}
    done.archive = told | {"why": {why: count for why, count in brought.left.items() if count}}
    for sentence in brought.sentences():
        print_stderr(f"{name}: {sentence}")
    return brought.complete


def _query(arguments: argparse.Namespace) -> ArchiveQuery:
    try:
        return ArchiveQuery(
            modalities=tuple(arguments.modality),
            since=arguments.since,
            until=arguments.until,
            patients=lines_of(arguments.patients),
            accessions=lines_of(arguments.accessions),
        )
    except ValueError as error:
        raise SiteConfigError(str(error)) from None


def what_if(arguments: argparse.Namespace) -> int:
    """What would be done to files, and why, without doing it; no value of theirs is shown. Exit 1: one is refused."""
    told = []
    with open_ingest(SiteDirectory(arguments.home), arguments.project) as way, way.reader() as reader:
        for path in arguments.files:
            told.append(_would(way, reader, path, arguments.patient_list))
    if arguments.json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        for one in told:
            _print_would(one)
    return 1 if any("refused" in one for one in told) else 0


def _would(way: IngestContext, reader: ParserProcess, path: Path, patients: Path | None) -> dict[str, Any]:
    who = read_pairs(patients, ("file", "patient_id")).get(path.name) if patients else None
    try:
        here = way.lying_at(path)
        digest = way.who.mac("file", here.body)
        record = reader.read(here.body, digest, who or here.patient_id or None, here.issuer, here.mask_of)
    except FileRejectedError as refusal:
        return {"file": path.name, "refused": refusal.code, "what_to_do": REASONS[refusal.code]}
    if record.pseudonym in way.vault.opted_out():
        return {"file": path.name, "refused": "opted_out", "what_to_do": REASONS["opted_out"]}
    if record.text and not way.vault.looked_at(record.study):
        return {"file": path.name, "refused": "burned_in_text", "what_to_do": REASONS["burned_in_text"]}
    rows = [{"tag": r.tag, "name": r.keyword, "action": r.action, "why": r.sentence} for r in explain(record.trace)]
    eligible = "no: a face may be reconstructed from it" if record.face else "yes, when it has a label"
    if record.kind == "mask":
        eligible = "as the mask of its series"
    return {"file": path.name, "kind": record.kind, "modality": record.modality, "eligible": eligible, "steps": rows}


def _print_would(one: dict[str, Any]) -> None:
    if "refused" in one:
        OUT.print(f"{one['file']}: would be refused, {one['refused']}: {one['what_to_do']}", markup=False)
        return
    OUT.print(f"{one['file']}: would be kept as {one['kind']}, {one['modality']}; eligible: {one['eligible']}")
    table = Table("attribute", "name", "what is done", "why")
    for step in one["steps"]:
        table.add_row(step["tag"], step["name"], step["action"], step["why"])
    OUT.print(table)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered_ingest(what_if if arguments.command == "what-if" else ingest, arguments)
