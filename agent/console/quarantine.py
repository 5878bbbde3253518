"""Pending and rejected files: reasons, counts, retry, discard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from agent.console import log_reader
from agent.console.background_task import Progress
from agent.console.context import KEEPERS, LOOKERS, SiteConsoleContext
from agent.console.errors import errors_as_pages, sentence
from agent.deidentify.errors import REASONS
from agent.ingest.context import IngestContext
from agent.storage.instance_index import StateCount
from agent.storage.quarantine import QuarantineEntry
from agent.storage.spool import SpoolError
from protos.web.router import PageError, RequestContext, Router

PAGE: Final = 50
STATES: Final = {
    "eligible": "eligible for releases",
    "unlabelled": "has no label",
    "face": "withheld: a face could be reconstructed from it",
    "volume": "a volume",
    "mask": "a mask of a series, which tasks use with it",
    "waiting": "its series is not complete yet",
    "held": "held back: text was found in an image, or its series names two studies",
}


@dataclass(frozen=True, slots=True)
class Queue:
    """The spool, quarantine and vault of a project, in counts."""

    project: str
    waiting: int
    oldest_s: float  # seconds since the oldest arrival; 0 where none waits
    refused: int
    held: int  # studies and series that a person must look at
    alike: int  # groups of patient ids that count as one patient towards k until a person decides
    counts: tuple[StateCount, ...]


@dataclass(frozen=True, slots=True)
class QuarantinedFileView:
    """One refused file as the site's own people see it: the source may name a patient."""

    name: str
    code: str
    attempts: int
    spent: bool  # tried as often as may be
    road: str
    source: str


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of ingest: what waits, and the quarantine."""
    pages.menu("Ingest", "/ingest", LOOKERS)
    pages.menu("Quarantine", "/quarantine", LOOKERS)

    @pages.get("/ingest", LOOKERS)
    def ingest(asked: RequestContext) -> Response:
        with errors_as_pages():
            queues = tuple(queue_of(context, name) for name in context.projects())
            receiving = context.service().received is not None
        events = log_reader.read(context.home.root / "agent.log")
        return asked.page(
            "ingest.html",
            queues=queues,
            states=STATES,
            last=[e for e in reversed(events) if e.name == "ingested"][:10],
            errand=context.errand.told(),
            may=asked.person.role in KEEPERS,
            receiving=receiving,
        )

    @pages.post("/ingest/{project}", KEEPERS)
    def let_in(asked: RequestContext, project: str) -> Response:
        require_project(context, project)
        _begin(
            context, f"reading pending files of {project}", lambda progress: read_waiting(context, project, progress)
        )
        return asked.go("/ingest", "Reading pending files. This page shows the progress.")

    @pages.get("/quarantine", LOOKERS)
    def quarantine(asked: RequestContext, project: str = "", code: str = "", after: str = "") -> Response:
        where = require_project(context, project or context.projects()[0])
        with errors_as_pages(), context.way(where) as way:
            counts = way.quarantine.counts()
            shown = page_of(way, code, after) if code else ()
            named = asked.person.role in KEEPERS
            files = tuple(refused(way, entry, named=named) for entry in shown)
            most = way.quarantine.most
        return asked.page(
            "quarantine.html",
            project=where,
            projects=context.projects(),
            counts=[(c, n, REASONS[c]) for c, n in counts.items()],
            code=code,
            why=REASONS.get(code, ""),
            files=files,
            after=files[-1].name if len(files) == PAGE else "",
            most=most,
            errand=context.errand.told(),
            may=named,
        )

    @pages.post("/quarantine/{project}/retry", KEEPERS)
    def retry(asked: RequestContext, project: str) -> Response:
        require_project(context, project)
        code, names = asked.form.get("code", ""), asked.form.all("name")
        once_more = asked.form.get("once_more", "") == "yes"
        _begin(
            context,
            "reading rejected files again",
            lambda p: read_again(context, (project, code, names), once_more, p),
        )
        return asked.go(f"/quarantine?project={project}", "Reading them again under the present rules.")

    @pages.post("/quarantine/{project}/drop", KEEPERS)
    def drop(asked: RequestContext, project: str) -> Response:
        require_project(context, project)
        names = asked.form.all("name")
        if not names or asked.form.get("sure", "") != "yes":
            raise PageError(400, "Choose files, and confirm that they will be deleted permanently. Nothing was done.")
        with errors_as_pages(), context.way(project) as way:
            entries = named_entries(way, names)
            for entry in entries:
                way.quarantine.remove(entry.name)
                context.log.info("quarantine_dropped", reason=entry.code)
        return asked.go(f"/quarantine?project={project}", f"{len(entries)} file(s) deleted; agent.log records it.")


def require_project(context: SiteConsoleContext, project: str) -> str:
    """A project that there is.

    Raises:
        PageError: there is none of that name.
    """
    if project not in context.projects():
        raise PageError(404, "There is no such project.")
    return project


def _begin(context: SiteConsoleContext, what: str, act: Callable[[Progress], str]) -> None:
    if not context.errand.begin("intake", what, act, sentence):
        raise PageError(409, "Another task is running: wait until it has ended.")


def queue_of(context: SiteConsoleContext, project: str) -> Queue:
    """What a project has waiting, refused and kept."""
    with context.way(project) as way:
        names = way.inbox.names()
        oldest = 0.0
        if names:
            try:
                oldest = max(0.0, time.time() - (way.inbox.folder / names[0]).stat().st_mtime)
            except FileNotFoundError:
                oldest = 0.0  # somebody took it meanwhile
        found = way.vault.counts(way.ingestion.rules.min_instances_per_series)
        refused_count = sum(way.quarantine.counts().values())
        held = len(way.vault.held() | way.vault.barred())
        return Queue(project, len(names), oldest, refused_count, held, len(way.vault.alike_ids()), found)


def page_of(way: IngestContext, code: str, after: str) -> Sequence[QuarantineEntry]:
    """A page of the files that were refused for one reason, by name."""
    return [e for e in way.quarantine.entries() if e.code == code and e.name > after][:PAGE]


def refused(way: IngestContext, entry: QuarantineEntry, *, named: bool) -> QuarantinedFileView:
    """One refused file; where it came from only for those who may read it."""
    road, source = "", ""
    if named:
        try:
            road, source = way.quarantine.source(entry.name)
        except (SpoolError, FileNotFoundError):
            road, source = "unknown", "cannot be unsealed"
    shown = source if source.isprintable() else ascii(source)
    return QuarantinedFileView(
        entry.name, entry.code, entry.attempts, entry.attempts >= way.quarantine.most, road, shown
    )


def named_entries(way: IngestContext, names: Sequence[str]) -> list[QuarantineEntry]:
    """The entries of these names, each once.

    Raises:
        PageError: one is of nothing in quarantine; nothing was done.
    """
    known = {entry.name: entry for entry in way.quarantine.entries()}
    unknown = sum(name not in known for name in set(names))
    if unknown:
        raise PageError(409, f"{unknown} of the files are not in quarantine any more. Nothing was done: look again.")
    return [known[name] for name in dict.fromkeys(names)]


def read_waiting(context: SiteConsoleContext, project: str, progress: Progress) -> str:
    """Ingest the pending files of the spool, and report the result."""
    with context.way(project) as way, way.intake(way.labels()) as intake:
        of = len(way.inbox.names())
        report = intake.run(way.waiting(), lambda done: progress(done, of))
    return _report(context, report.kept, report.duplicates, sum(report.quarantined.values()))


def read_again(
    context: SiteConsoleContext, which: tuple[str, str, Sequence[str]], once_more: bool, progress: Progress
) -> str:
    """Try refused files once more: those that are named, or all of a reason; what became of them.

    ``which``: project, reason ("" for any) and names (none for all).
    """
    project, code, names = which
    with context.way(project) as way:
        entries = named_entries(way, names) if names else way.quarantine.entries()
        wanted = [e for e in entries if not code or e.code == code]
        chosen = [e.name for e in wanted if once_more or e.attempts < way.quarantine.most]
        with way.intake(way.labels()) as intake:
            report = intake.run(way.refused(chosen), lambda done: progress(done, len(chosen)))
    told = _report(context, report.kept, report.duplicates, sum(report.quarantined.values()))
    spent = len(wanted) - len(chosen)
    return told + (f" {spent} had reached the maximum of tries and were skipped." if spent else "")


def _report(context: SiteConsoleContext, kept: int, duplicates: int, again: int) -> str:
    context.log.info("ingested", kept=kept, duplicates=duplicates, quarantined=again)
    return f"{kept} kept, {duplicates} duplicates, {again} rejected."
