"""The site console: its pages, in the process that `serve` keeps for them, or in one that a person starts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.console import jobs, optout, overview, pacs, plans, proposals, releases
from agent.console import policy as policies
from agent.console import quarantine as queues
from agent.console.context import SiteConsoleContext
from agent.errors import SiteConfigError
from agent.service.ledger_access import BorrowedLedger
from agent.storage.site_directory import SiteDirectory
from policies.governance import decisions
from policies.index.follower import IndexFollower
from policies.index.search import Index
from protos.web import settings as console_settings
from protos.web.client_certificates import PinnedCertificates
from protos.web.login_cli import FOLDER
from protos.web.router import Router
from protos.web.server import ConsoleServer
from protos.web.settings import ConsoleSettings

INDEX = "search.db"  # of the home: a cache of the ledger, which may be deleted


def pages(context: SiteConsoleContext, settings: ConsoleSettings, logins: PinnedCertificates) -> Router:
    """Every page, in the order of the menu."""
    made = Router(
        title=f"Lazaret, {context.site}",
        side="site",
        who=context.person,
        templates=Path(__file__).parent,
        settings=settings,
        log=context.log,
        logins=logins,
        encode=decisions.statement_bytes,
    )
    for add in (
        overview.add,
        proposals.add,  # before the pages of one job: their paths begin alike
        jobs.add,
        releases.add,
        plans.add,
        queues.add,
        pacs.add,
        overview.add_books,
        policies.add,
        optout.add,
    ):
        add(made, context)
    return made


@dataclass(frozen=True, slots=True)
class ServedConsole:
    """A console that answers."""

    port: int
    told: str  # address and certificate, for the operator


@contextmanager
def console_server(home: SiteDirectory, log: Any, port: int = 0) -> Iterator[ServedConsole]:
    """The console that ``console.toml`` asks for, until the context is left.

    Args:
        home: the site's.
        log: the agent's.
        port: to take; 0: that of ``console.toml``.
    Raises:
        SiteConfigError: there is no ``console.toml``.
        ConsoleConfigError: it cannot be opened as it is configured.
    """
    settings = console_settings.read(home.root)
    if settings is None:
        raise SiteConfigError("console.toml is missing, so there is no console: see deploy/docs/consoles.md")
    host = settings.listen.rpartition(":")[0]
    settings = replace(settings, listen=f"{host}:{port}") if port else settings
    with ExitStack() as stack:
        ledger = BorrowedLedger(home)
        index = stack.enter_context(Index(home.root / INDEX, ledger.disk))
        stack.enter_context(IndexFollower(index))
        logins = PinnedCertificates(home.root / FOLDER)
        context = SiteConsoleContext(home, ledger, log, lambda: dt.datetime.now(dt.UTC), index=index)
        serving = stack.enter_context(
            ConsoleServer(pages(context, settings, logins).guarded(), settings, logins, home.root)
        )
        told = f"console: https://{host}:{serving.port}, certificate {serving.fingerprint}"
        yield ServedConsole(serving.port, told)
