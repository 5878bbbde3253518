"""The coordinator console as a whole: its pages, and what stands beside the service while it serves."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coordinator.console import exports, ledger, overview, people, policies, releases, rounds
from coordinator.console.desk import Desk
from coordinator.edges import home as homes
from coordinator.edges import metrics
from coordinator.edges.server import Parts
from policies import governance
from policies.follower import Follower
from policies.search import Index
from protos.watching import watched_over
from protos.web import settings as console_settings
from protos.web.login_command import FOLDER
from protos.web.logins import Logins
from protos.web.pages import Pages
from protos.web.serving import Serving
from protos.web.settings import ConsoleSettings


def pages(desk: Desk, settings: ConsoleSettings, logins: Logins) -> Pages:
    """Every page, in the order of the menu."""
    made = Pages(
        title="Lazaret, coordinator",
        side="coordinator",
        who=desk.person,
        templates=Path(__file__).parent,
        settings=settings,
        log=desk.log,
        logins=logins,
        encode=governance.word,
    )
    for part in (overview, rounds, releases, ledger, policies, people, exports):
        part.add(made, desk)
    return made


@contextmanager
def beside(parts: Parts) -> Iterator[tuple[str, ...]]:
    """What stands beside the service while it serves: the console and metrics as ``console.toml`` says, and systemd.

    Yields:
        What to tell the operator.
    Raises:
        BadConsole: the console cannot be opened as it is configured.
    """
    settings = console_settings.read(parts.home.root)
    watched = metrics.Watched(
        parts.home, parts.store, parts.sessions, parts.runs.root, parts.shelf.staging, lambda: dt.datetime.now(dt.UTC)
    )
    with ExitStack() as stack:
        told = (stack.enter_context(_console(parts, settings)),) if settings is not None else ()
        page, live, ready = metrics.metrics(watched), metrics.live(watched), metrics.ready(watched)
        port = stack.enter_context(watched_over(settings, page, live, ready))
        yield (*told, *([f"metrics and health: port {port}"] if port else []))


@contextmanager
def _console(parts: Parts, settings: ConsoleSettings) -> Iterator[str]:
    home = parts.home
    with ExitStack() as stack:
        index = stack.enter_context(Index(home.root / "search.db", lambda: homes.look_at_ledger(home)))
        stack.enter_context(Follower(index))
        logins = Logins(home.root / FOLDER)
        desk = Desk(
            home=home,
            store=parts.store,
            intake=parts.intake,
            runs=parts.runs,
            shelf=parts.shelf,
            sessions=parts.sessions,
            authority=parts.authority,
            index=index,
            expel=parts.expel,
            log=parts.log,
            now=lambda: dt.datetime.now(dt.UTC),
        )
        app = pages(desk, settings, logins).guarded()
        serving = stack.enter_context(Serving(app, settings, logins, home.root))
        host = settings.listen.rpartition(":")[0]
        yield f"console: https://{host}:{serving.port}, certificate {serving.fingerprint[:32]} ..."
