"""The commands of the way in: ingest, what-if, quarantine, manifest, cohort, opt-out, project. None imports torch."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agent import site_commands
from agent.deidentify.manifest import explain, manifest
from agent.deidentify.reasons import REASONS, Refused
from agent.edges.alike import Alike
from agent.edges.archives import FAULTS, Ears, Pulling, named, narrowed
from agent.edges.files import Folder, contents
from agent.edges.home import BadSite, Home
from agent.edges.intake import IngestReport
from agent.edges.lists import read_pairs
from agent.edges.log import open_log
from agent.edges.quarantine import Entry
from agent.edges.reader import Reader
from agent.edges.remote import Query
from agent.edges.room import RoomError
from agent.edges.waiting import Found
from agent.edges.way import Way, open_way, total

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
_SAME: Final = {  # what two patient ids have in common
    "picture": "equal pictures",
    "study": "one study UID",
    "series": "one series UID",
    "instance": "one instance UID",
}
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
    """Let in what waits, what lies in the folders, and what an archive has; refused files get their reasons.

    Exit 1: something of an archive is missing, or it was not asked. What was kept is told in any case.
    """
    home = Home(arguments.home)
    log = open_log(arguments.home / "agent.log")
    done, complete = _Outcome(), True
    try:
        with open_way(home, arguments.project) as way, _bar("ingest", arguments.json) as progress:
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
            _print_ingest(report, arguments.json, {name: told for name, told in more.items() if told})
            log.info("ingested", kept=report.kept, duplicates=report.duplicates, quarantined=refused)
    return 0 if complete else 1


def _faces(way: Way, *, silent: bool) -> dict[str, Any] | None:
    """Take the faces off what has come, where ``[faces]`` says how; what keeps its face stays withheld."""
    if way.ingestion.faces is None or not way.vault.faces():
        return None
    from agent.edges.sweep import sweep  # noqa: PLC0415 - torch, and only where a head has come

    with _bar("faces", silent) as progress:
        swept = sweep(way, progress)
    told = "".join(f"; {count} withheld: {why}" for why, count in swept.kept.items())
    _say(f"studies de-faced: {swept.defaced}{told}")
    return {"defaced": swept.defaced, "withheld": dict(swept.kept)}


def _from_folder(way: Way, folder: Folder, progress: Callable[[int, int | None], None]) -> IngestReport:
    lists = way.lists(folder)
    lying = way.lying(folder, lists)
    found: list[Found] = [*lying, *way.missing(folder, lying)]
    with way.intake(lists) as intake:
        return intake.run(found, lambda done: progress(done, len(found)))


def _waiting(way: Way, progress: Callable[[int, int | None], None]) -> IngestReport:
    with way.intake(way.labels()) as intake:
        return intake.run(way.waiting(), lambda done: progress(done, None))


def _from_archive(
    way: Way, arguments: argparse.Namespace, progress: Callable[[int, int | None], None], done: _Outcome
) -> bool:
    """Retrieve in a thread, and let in what has come meanwhile; what waited before comes first. Is all there?

    Raises:
        PacsError, WebError, VaultError, RoomError: what ended the asking; what came until then is let in.
    """
    kind, name = ("pacs", arguments.pacs) if arguments.pacs else ("dicomweb", arguments.dicomweb)
    archive = named(way.ingestion, kind, name)
    archive = replace(archive, query=narrowed(archive.query, _query(arguments)))
    done.add(_waiting(way, progress))

    def waiting(until: dt.datetime) -> None:
        _say(f"{name}: outside its hours; it waits until {until:%H:%M}")

    with way.intake(way.labels()) as intake, Pulling(way.home, way.project, archive, Ears(progress, waiting)) as pull:
        while not pull.over(_LOOK_S):
            done.add(intake.run(way.waiting()))
        done.add(intake.run(way.waiting()))
        try:
            brought = pull.result()
        except FAULTS as error:
            unknown = dict.fromkeys(("missing", "failed"))
            done.archive = unknown | {"stopped": True, "asked": True, "error": site_commands.sentence(error)}
            raise
    told = {key: getattr(brought, key) for key in ("missing", "failed", "stopped", "asked")}
    done.archive = told | {"why": {why: count for why, count in brought.left.items() if count}}
    for sentence in brought.sentences():
        _say(f"{name}: {sentence}")
    return brought.complete


def _say(text: str) -> None:
    """A sentence for the operator, beside what the command gives out."""
    ERR.print(text, markup=False, soft_wrap=True)


def _query(arguments: argparse.Namespace) -> Query:
    try:
        return Query(
            modalities=tuple(arguments.modality),
            since=arguments.since,
            until=arguments.until,
            patients=site_commands.lines_of(arguments.patients),
            accessions=site_commands.lines_of(arguments.accessions),
        )
    except ValueError as error:
        raise BadSite(str(error)) from None


@contextmanager
def _bar(title: str, silent: bool) -> Iterator[Callable[[int, int | None], None]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ERR, disable=silent) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def _print_ingest(report: IngestReport, as_lines: bool, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    if as_lines:
        counts = {"files": report.files, "kept": report.kept, "duplicates": report.duplicates}
        sys.stdout.write(json.dumps({**counts, "quarantined": dict(report.quarantined), **more}) + "\n")
        return
    table = Table("what became of the files", "count", title=f"{report.files} files read")
    table.add_row("kept, de-identified, in the vault", str(report.kept))
    table.add_row("known already", str(report.duplicates))
    for reason, count in report.quarantined.items():
        table.add_row(f"quarantined: {reason}", str(count))
    OUT.print(table)
    if report.quarantined:
        OUT.print("`quarantine list` says what to do about each")


def what_if(arguments: argparse.Namespace) -> int:
    """What would be done to files, and why, without doing it; no value of theirs is shown. Exit 1: one is refused."""
    told = []
    with open_way(Home(arguments.home), arguments.project) as way, way.reader() as reader:
        for path in arguments.files:
            told.append(_would(way, reader, path, arguments.patient_list))
    if arguments.json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        for one in told:
            _print_would(one)
    return 1 if any("refused" in one for one in told) else 0


def _would(way: Way, reader: Reader, path: Path, patients: Path | None) -> dict[str, Any]:
    who = read_pairs(patients, ("file", "patient_id")).get(path.name) if patients else None
    try:
        data = contents(path, way.ingestion.rules.max_bytes)
        record = reader.read(data, way.who.mac("file", data), who)
    except Refused as refusal:
        return {"file": path.name, "refused": refusal.code, "what_to_do": REASONS[refusal.code]}
    if record.pseudonym in way.vault.opted_out():
        return {"file": path.name, "refused": "opted_out", "what_to_do": REASONS["opted_out"]}
    if record.text and not way.vault.looked_at(record.study):
        return {"file": path.name, "refused": "burned_in_text", "what_to_do": REASONS["burned_in_text"]}
    rows = [{"tag": r.tag, "name": r.keyword, "action": r.action, "why": r.sentence} for r in explain(record.trace)]
    eligible = "no: a face may be reconstructed from it" if record.face else "yes, when it has a label"
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


def quarantine(arguments: argparse.Namespace) -> int:
    """List what was refused, try it again, look at it, or give it up."""
    with open_way(Home(arguments.home), arguments.project) as way:
        return _OF_QUARANTINE[arguments.what](way, arguments)


def _quarantine_list(way: Way, arguments: argparse.Namespace) -> int:
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


def _place(way: Way, name: str) -> dict[str, str]:
    """Road and source: paths may name patients, so this is for the site's own console."""
    try:
        road, source = way.quarantine.source(name)
    except RoomError:
        return {"road": "unknown", "source": "cannot be unsealed"}
    return {"road": road, "source": source}


def _named(way: Way, names: Sequence[str]) -> list[Entry]:
    """The entries of these names, each once.

    Raises:
        BadSite: one of them is of nothing in quarantine; it is not said again, since it may be a path.
    """
    known = {entry.name: entry for entry in way.quarantine.entries()}
    unknown = sum(name not in known for name in set(names))
    if unknown:
        raise BadSite(f"{unknown} of the names are of nothing in quarantine: `quarantine list --files` has the names")
    return [known[name] for name in dict.fromkeys(names)]


def _quarantine_retry(way: Way, arguments: argparse.Namespace) -> int:
    entries = _named(way, arguments.names) if arguments.names else way.quarantine.entries()
    wanted = [entry for entry in entries if not arguments.code or entry.code == arguments.code]
    chosen = [e.name for e in wanted if arguments.once_more or e.attempts < way.quarantine.most]
    with way.intake(way.labels()) as intake:
        report = intake.run(way.refused(chosen))
    spent = len(wanted) - len(chosen)
    _print_ingest(report, arguments.json, {"left_out": spent})
    if spent:
        _say(f"{spent} files were tried as often as may be, and left out: say --once-more to try them too")
    return 0 if not report.quarantined else 1


def _quarantine_show(way: Way, arguments: argparse.Namespace) -> int:
    (entry,) = _named(way, arguments.names)
    arrival = way.quarantine.open(entry.name)
    body = arrival.body or contents(Path(arrival.source), way.ingestion.rules.max_bytes)
    with open(os.open(arguments.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(body)
    if arguments.json:
        told = {"name": entry.name, "code": entry.code, "bytes": len(body), "wrote": arguments.out.name}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        OUT.print(f"wrote {arguments.out.name}, as it came: it identifies a patient; delete it when you have looked")
    return 0


def _quarantine_drop(way: Way, arguments: argparse.Namespace) -> int:
    if not arguments.yes:
        raise BadSite("this forgets the files for good: say --yes")
    log = open_log(way.home.root / "agent.log")
    entries = _named(way, arguments.names)
    for entry in entries:
        way.quarantine.remove(entry.name)
        log.info("quarantine_dropped", reason=entry.code)
    if arguments.json:
        sys.stdout.write(json.dumps({"dropped": len(entries)}) + "\n")
    else:
        OUT.print(f"{len(entries)} files given up; agent.log says so")
    return 0


_OF_QUARANTINE: Final = {
    "list": _quarantine_list,
    "retry": _quarantine_retry,
    "show": _quarantine_show,
    "drop": _quarantine_drop,
}


def show_manifest(arguments: argparse.Namespace) -> int:
    """What was removed, replaced and kept in each study, and why, with digests before and after."""
    with open_way(Home(arguments.home), arguments.project) as way:
        studies = way.vault.studies()
        if arguments.study and arguments.study not in studies:
            raise BadSite("there is no study of that name: `manifest` without --study has all")
        chosen = [arguments.study] if arguments.study else studies
        made = {study: manifest(study, way.vault.instances(study), way.ingestion.profile) for study in chosen}
    if arguments.out is not None:
        arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for study, told in made.items():
            (arguments.out / f"{study}.json").write_text(_as_text(told))
        wrote = f"wrote {len(made)} manifests to {arguments.out.name}"
        sys.stdout.write(json.dumps({"manifests": len(made)}) + "\n" if arguments.json else wrote + "\n")
    elif arguments.json and len(made) != 1:
        sys.stdout.write(_as_text(list(made.values())))
    else:
        for told in made.values():
            sys.stdout.write(_as_text(told))
    return 0


def _as_text(told: object) -> str:
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


def cohort(arguments: argparse.Namespace) -> int:
    """How many patients there are to work with, by modality, body part and state: for this console alone."""
    with open_way(Home(arguments.home), arguments.project) as way:
        _decide(way, arguments)
        if arguments.held:
            held = sorted(way.vault.held() | way.vault.barred())
            sys.stdout.write(json.dumps(held) + "\n" if arguments.json else "".join(f"{one}\n" for one in held))
            return 0
        same = way.vault.alike()
        if arguments.same:
            _print_same(same, as_json=arguments.json)
            return 0
        found = way.vault.counts(way.ingestion.rules.min_instances_per_series)
    if arguments.json:
        sys.stdout.write(json.dumps([{k: getattr(c, k) for k in c.__slots__} for c in found], indent=2) + "\n")
        return 0
    table = Table("modality", "body part", "state", "instances", "patients", title=f"project {arguments.project}")
    for c in found:
        table.add_row(c.modality, c.body_part or "-", c.state, str(c.instances), str(c.patients))
    OUT.print(table)
    if same:
        _say(f"{len(same)} groups of patient ids count as one patient each towards k: `cohort --same` says why")
    return 0


def _decide(way: Way, arguments: argparse.Namespace) -> None:
    """What a person has decided: labels, a study or series that was looked at, ids that are as many patients."""
    log = open_log(way.home.root / "agent.log")
    if arguments.labels is not None:
        raw = read_pairs(arguments.labels, ("sop_instance_uid", "label"))
        changed = way.vault.relabel({way.name_of(uid): label for uid, label in raw.items()})
        ERR.print(f"{changed} labels changed")
    if arguments.lift:
        if arguments.lift not in way.vault.held() | way.vault.barred():
            raise BadSite("no study or series of that name is held back: `cohort --held` lists them")
        way.vault.lift(arguments.lift)
        log.info("study_lifted", where=arguments.lift)
    if arguments.apart:
        try:
            count = way.vault.tell_apart(arguments.apart)
        except KeyError:
            raise BadSite("no patient ids of that name count as one: `cohort --same` lists them") from None
        log.info("ids_told_apart", where=arguments.apart, count=count)


def _print_same(same: Sequence[Alike], *, as_json: bool) -> None:
    """Patient ids that may be one person: how many, why, and the studies that a person looks at."""
    if as_json:
        told = [{"name": o.name, "ids": len(o.persons), "why": list(o.why), "studies": list(o.studies)} for o in same]
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    for one in same:  # no table: it would cut names, which are to be typed again
        why = ", ".join(_SAME[kind] for kind in one.why)
        OUT.print(f"{one.name}  {len(one.persons)} ids  {why}", markup=False, soft_wrap=True)
        for study in one.studies:
            OUT.print(f"    study {study}", markup=False, soft_wrap=True)
    if same:
        OUT.print(
            "Each group counts as one patient towards k. Look in the PACS whether it is one person. If each id is "
            "another person, say `cohort --apart NAME`; if not, leave it so. Level A does not depend on it.",
            soft_wrap=True,
        )


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ingest": ingest,
    "what-if": what_if,
    "quarantine": quarantine,
    "manifest": show_manifest,
    "cohort": cohort,
    **site_commands.COMMANDS,
}


def run(name: str, arguments: argparse.Namespace) -> int:
    """Run one command; what it expects to go wrong becomes a sentence and exit status 1."""
    try:
        return COMMANDS[name](arguments)
    except site_commands.EXPECTED as error:
        ERR.print(f"refused: {site_commands.sentence(error)}", markup=False, soft_wrap=True)
        return 1
