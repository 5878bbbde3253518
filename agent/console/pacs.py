"""The way to the PACS: what listens, which archives are asked, what went wrong last, and a knock on the door."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from starlette.responses import Response

from agent.console import journal
from agent.console.desk import KEEPERS, LOOKERS, Desk
from agent.console.said import said
from agent.edges.archives import Archive, named, reach
from agent.edges.dimse import EVENTS
from agent.edges.ingestion import Ingestion, read_ingestion
from agent.edges.remote import Remote
from protos.web.pages import Asked, Pages

_GOOD = frozenset({"accepted", "released", "echoed", "stored", "stopped"})


@dataclass(frozen=True, slots=True)
class Known:
    """An archive of ``ingest.toml``."""

    kind: str  # "pacs" | "dicomweb": of its table
    name: str
    what: str  # how it is asked, in words
    where: str
    hours: str
    by_clock: bool
    last: journal.Event | None  # the last pull that `serve` told of


def add(pages: Pages, desk: Desk) -> None:
    """The page of the PACS."""
    pages.menu("PACS", "/pacs", LOOKERS)

    @pages.get("/pacs", LOOKERS)
    def pacs(asked: Asked) -> Response:
        events = journal.read(desk.home.root / "agent.log")
        with said():
            ingestion = read_ingestion(desk.home)
        counts = _counts(desk, events)
        return asked.page(
            "pacs.html",
            listening=tuple(_listening(desk, ingestion)),
            callers=[(c.ae_title, ", ".join(c.addresses)) for c in ingestion.listener.callers]
            if ingestion.listener
            else [],
            counts=[(EVENTS[code], count, code in _GOOD) for code, count in counts.items() if code in EVENTS],
            here=desk.reception is not None,
            archives=tuple(_archives(ingestion, events)),
            folders=[(str(f.path), f.watch, f.path.is_dir()) for f in ingestion.folders],
            faults=[e for e in reversed(events) if e.fault][:20],
            minutes=ingestion.reading.pull_minutes,
            may=asked.person.role in KEEPERS,
        )

    @pages.post("/pacs/{kind}/{name}/ask", KEEPERS)
    def ask(asked: Asked, kind: str, name: str) -> Response:
        with said():
            reach(named(read_ingestion(desk.home), kind, name))
        desk.log.info("archive_asked", where=name, state="answers")
        return asked.go("/pacs", f"{name} answers, and lets this site ask.")


def _listening(desk: Desk, ingestion: Ingestion) -> Iterator[tuple[str, str, bool]]:
    """What is to listen: for what, where, and whether it does, as far as this process knows."""
    held = desk.reception
    if ingestion.listener is not None:
        s = ingestion.listener
        safe = "DICOM TLS" if s.tls else "plain TCP"
        yield f"C-STORE as {s.ae_title}, {safe}", f"{s.host}:{s.port}", bool(held and held.listener)
    if ingestion.stow is not None:
        yield "STOW-RS", f"{ingestion.stow.host}:{ingestion.stow.port}", bool(held and held.stow)


def _counts(desk: Desk, events: list[journal.Event]) -> dict[str, int]:
    """What the listener counted since it started; of another process, as its log last said."""
    if desk.reception is not None and desk.reception.listener is not None:
        return dict(sorted(desk.reception.listener.counts().items()))
    told = {e.state: e.count for e in events if e.name == "listener"}
    return dict(sorted(told.items()))


def _archives(ingestion: Ingestion, events: list[journal.Event]) -> Iterator[Known]:
    every: list[tuple[str, str, Archive]] = [("pacs", name, one) for name, one in ingestion.pacs.items()]
    every += [("dicomweb", name, one) for name, one in ingestion.webs.items()]
    for kind, name, one in every:
        last = journal.last(events, "pulled", "pull_failed", where=name)
        if isinstance(one, Remote):
            what = f"C-FIND and C-{one.mode.upper()} as {one.calling}, {'DICOM TLS' if one.tls else 'plain TCP'}"
            where = f"{one.aet} at {one.host}:{one.port}"
        else:
            what, where = "QIDO-RS and WADO-RS", one.url
        yield Known(kind, name, what, where, one.hours or "always", name in ingestion.reading.pull, last)
