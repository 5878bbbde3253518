"""The PACS page: listeners, archives, the last errors, and a connection test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from starlette.responses import Response

from agent.console import log_reader
from agent.console.context import KEEPERS, LOOKERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.ingest.config import Ingestion, read_ingestion
from agent.ingest.retrieval import Archive, check_reachable, named
from agent.ingest.service import LISTENER, STOW
from agent.pacs.archive import ArchiveConfig
from agent.pacs.dimse.storage_scp import EVENTS
from agent.service.process_monitoring import ServiceStatus
from protos.web.router import RequestContext, Router

_GOOD = frozenset({"accepted", "released", "echoed", "stored", "stopped"})


@dataclass(frozen=True, slots=True)
class ArchiveView:
    """An archive of ``ingest.toml``."""

    kind: str  # "pacs" | "dicomweb": of its table
    name: str
    what: str  # how it is asked, in words
    where: str
    hours: str
    by_clock: bool
    last: log_reader.LogEvent | None  # the last pull that `serve` told of


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The page of the PACS."""
    pages.menu("PACS", "/pacs", LOOKERS)

    @pages.get("/pacs", LOOKERS)
    def pacs(asked: RequestContext) -> Response:
        events = log_reader.read(context.home.root / "agent.log")
        with errors_as_pages():
            ingestion = read_ingestion(context.home)
        with errors_as_pages():
            service = context.service()
        counts = _counts(service, events)
        return asked.page(
            "pacs.html",
            listening=tuple(_listening(service, ingestion)),
            callers=[(c.ae_title, ", ".join(c.addresses)) for c in ingestion.listener.callers]
            if ingestion.listener
            else [],
            counts=[(EVENTS[code], count, code in _GOOD) for code, count in counts.items() if code in EVENTS],
            here=service.received is not None,
            archives=tuple(_archives(ingestion, events)),
            folders=[(str(f.path), f.watch, f.path.is_dir()) for f in ingestion.folders],
            faults=[e for e in reversed(events) if e.fault][:20],
            minutes=ingestion.reading.pull_minutes,
            may=asked.person.role in KEEPERS,
        )

    @pages.post("/pacs/{kind}/{name}/ask", KEEPERS)
    def ask(asked: RequestContext, kind: str, name: str) -> Response:
        with errors_as_pages():
            check_reachable(named(read_ingestion(context.home), kind, name))
        context.log.info("archive_asked", where=name, state="answers")
        return asked.go("/pacs", f"{name} answers and accepts queries of this site.")


def _listening(service: ServiceStatus, ingestion: Ingestion) -> Iterator[tuple[str, str, bool]]:
    """What is to listen: for what, where, and whether it does, as far as the running service knows."""
    if ingestion.listener is not None:
        s = ingestion.listener
        safe = "DICOM TLS" if s.tls else "plain TCP"
        yield f"C-STORE as {s.ae_title}, {safe}", f"{s.host}:{s.port}", service.running(LISTENER)
    if ingestion.stow is not None:
        yield "STOW-RS", f"{ingestion.stow.host}:{ingestion.stow.port}", service.running(STOW)


def _counts(service: ServiceStatus, events: list[log_reader.LogEvent]) -> dict[str, int]:
    """What the listener counted since it started; where none runs, as the log last said."""
    if service.running(LISTENER):
        return dict(sorted((service.received or {}).items()))
    told = {e.state: e.count for e in events if e.name == "listener"}
    return dict(sorted(told.items()))


def _archives(ingestion: Ingestion, events: list[log_reader.LogEvent]) -> Iterator[ArchiveView]:
    every: list[tuple[str, str, Archive]] = [("pacs", name, one) for name, one in ingestion.pacs.items()]
    every += [("dicomweb", name, one) for name, one in ingestion.webs.items()]
    for kind, name, one in every:
        last = log_reader.last(events, "pulled", "pull_failed", where=name)
        if isinstance(one, ArchiveConfig):
            what = f"C-FIND and C-{one.mode.upper()} as {one.calling}, {'DICOM TLS' if one.tls else 'plain TCP'}"
            where = f"{one.aet} at {one.host}:{one.port}"
        else:
            what, where = "QIDO-RS and WADO-RS", one.url
        yield ArchiveView(kind, name, what, where, one.hours or "always", name in ingestion.reading.pull, last)
