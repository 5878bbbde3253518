"""The exports: download every report and certificate, each from one signed snapshot of the ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from starlette.responses import Response

from coordinator.console.context import INFORMED, READERS, CoordinatorConsoleContext
from coordinator.reports.catalog import REPORTS, Report, ReportFile, make, make_run_report
from coordinator.reports.document import ReportError
from policies.ledger.state import State
from policies.ledger.store import LedgerUnsoundError
from policies.statements import ID
from protos.web.router import PageError, RequestContext, Router

_NEWEST: Final = 200  # releases that the page offers; others by their name
_REFUSALS: Final = frozenset({"denied", "bundle"})  # the bundle holds the whole ledger
_WORDS: Final = {"html": "page", "pdf": "PDF", "json": "JSON", "md": "Markdown", "yaml": "YAML", "zip": "ZIP"}


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The pages."""
    turn = threading.Lock()  # a snapshot holds the whole ledger in memory: one at a time
    pages.menu("Exports", "/exports", READERS)

    @pages.get("/exports", READERS)
    def exports(asked: RequestContext, release: str = "") -> Response:
        with context.store.exclusive() as state:
            names = subjects(state)
            offered = offers(state, release) if release in names else []
        if release and not offered:
            raise PageError(404, "The ledger has admitted no release of that name, and no run of it has a model.")
        return asked.page(
            "exports.html",
            whole=[r for r in REPORTS.values() if not r.about and _may(asked, r.name)],
            each=offered,
            names=names[:_NEWEST],
            total=len(names),
            release=release,
            words=_WORDS,
        )

    @pages.get("/exports/{name}.{form}", READERS)
    def download(asked: RequestContext, name: str, form: str, release: str = "") -> Response:
        if release and not ID.fullmatch(release):
            raise PageError(404, "That is not the name of a release or run.")
        if not _may(asked, name):
            raise PageError(403, "What was refused is in it, and that is not shown to researchers.")
        return _hand_out(asked, turn, lambda: make(context.home, name, form, release, context.now()))

    @pages.get("/rounds/{run}/report.{form}", READERS)
    def report(asked: RequestContext, run: str, form: str) -> Response:
        if form not in ("html", "json"):
            raise PageError(404, "A run's report is a page (html) or JSON.")
        return _hand_out(asked, turn, lambda: make_run_report(context.home, run, context.now()).files[form])


def _hand_out(asked: RequestContext, turn: threading.Lock, making: Callable[[], ReportFile]) -> Response:
    """Make a report, one at a time, as a file to be kept."""
    if not turn.acquire(timeout=30.0):
        raise PageError(503, "Another report is being made. Try again in a minute.")
    try:
        made = making()
    except ReportError as error:
        raise PageError(404, f"{str(error)[:1].upper()}{str(error)[1:]}.") from None
    except LedgerUnsoundError:
        raise PageError(
            503, "The ledger on disk is not the one that its key signed last: nothing was signed."
        ) from None
    finally:
        turn.release()
    return asked.download(made.name, made.body, made.media)


def _may(asked: RequestContext, name: str) -> bool:
    """Whether the person may take a report: what was refused is in some."""
    return asked.person.role in INFORMED or name not in _REFUSALS


def offers(state: State, release: str) -> list[Report]:
    """The reports that there are about one release or run: no catalogue's entry of what is not of its kind."""
    entry = state.releases.get(release)
    levels = [entry.level] if entry is not None else [e.level for e in state.releases.values() if e.run == release]
    without = {"croissant"} if entry is None else set()
    without |= set() if max(levels, default="C") in ("A", "A*") else {"registry-entry"}
    return [r for r in REPORTS.values() if r.about and r.name not in without]


def subjects(state: State) -> list[str]:
    """What a certificate can be about, newest first: releases of one hospital, and runs that have closed a round."""
    found = [name for name, entry in state.releases.items() if not entry.run]
    return [*reversed(state.rounds), *reversed(found)]
