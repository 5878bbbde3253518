"""The coordinator console: its pages, and the services that run next to the Gateway service."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

from coordinator.console import exports, ledger, overview, people, policies, releases, rounds
from coordinator.console.context import CoordinatorConsoleContext
from coordinator.daemon import CoordinatorRuntime
from coordinator.operations import metrics
from coordinator.operations.control import coordinator_app
from coordinator.storage import directory as homes
from policies.governance import decisions
from policies.index.follower import IndexFollower
from policies.index.search import Index
from protos.service.control_client import service_fault
from protos.service.control_socket import control_socket
from protos.web import settings as console_settings
from protos.web.client_certificates import PinnedCertificates
from protos.web.health import Health, watched_over
from protos.web.login_cli import FOLDER
from protos.web.router import Router
from protos.web.server import ConsoleServer
from protos.web.settings import ConsoleSettings


def pages(context: CoordinatorConsoleContext, settings: ConsoleSettings, logins: PinnedCertificates) -> Router:
    """Every page, in the order of the menu."""
    made = Router(
        title="Lazaret, coordinator",
        side="coordinator",
        who=context.person,
        templates=Path(__file__).parent,
        settings=settings,
        log=context.log,
        logins=logins,
        encode=decisions.statement_bytes,
    )
    for part in (overview, rounds, releases, ledger, policies, people, exports):
        part.add(made, context)
    return made


@contextmanager
def beside(parts: CoordinatorRuntime) -> Iterator[tuple[str, ...]]:
    """Run the control socket, and console and metrics as ``console.toml`` says, and notify systemd, while serving.

    Yields:
        What to tell the operator.
    Raises:
        ConsoleConfigError: the console cannot be opened as it is configured.
    """
    settings = console_settings.read(parts.home.root)
    watched = metrics.MonitoredCoordinator(
        parts.home,
        parts.store,
        parts.sessions,
        parts.signs,
        parts.runs.root,
        parts.shelf.staging,
        lambda: dt.datetime.now(dt.UTC),
    )
    with ExitStack() as stack:
        app = coordinator_app(parts.store, parts.log)
        app.state.wrong, app.state.absent = metrics.live(watched), metrics.joined(watched)
        stack.enter_context(control_socket(parts.home.root, app, parts.log))
        told = (stack.enter_context(_console(parts, settings)),) if settings is not None else ()
        live = partial(service_fault, parts.home.root)  # over the socket: one that answers nobody is a fault, too
        health = Health(live, metrics.ready(watched), metrics.joined(watched))
        port = stack.enter_context(watched_over(settings, metrics.metrics(watched), health))
        yield (*told, *([f"metrics and health: port {port}"] if port else []))


@contextmanager
def _console(parts: CoordinatorRuntime, settings: ConsoleSettings) -> Iterator[str]:
    home = parts.home
    with ExitStack() as stack:
        index = stack.enter_context(Index(home.root / "search.db", lambda: homes.look_at_ledger(home)))
        stack.enter_context(IndexFollower(index))
        logins = PinnedCertificates(home.root / FOLDER)
        given = {f.name: getattr(parts, f.name) for f in fields(parts)}
        context = CoordinatorConsoleContext(**given, index=index, now=lambda: dt.datetime.now(dt.UTC))
        app = pages(context, settings, logins).guarded()
        serving = stack.enter_context(ConsoleServer(app, settings, logins, home.root))
        host = settings.listen.rpartition(":")[0]
        yield f"console: https://{host}:{serving.port}, certificate {serving.fingerprint[:32]} ..."
