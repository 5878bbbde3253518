"""``serve``: receive images from the PACS, and take part in federated rounds."""

from __future__ import annotations

import argparse
import datetime as dt
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from agent.cli.output import ERR, OUT, answered_ingest, print_progress
from agent.event_log import open_log
from agent.ingest.config import read_ingestion
from agent.ingest.service import IngestService
from agent.runtime import AgentRuntime, open_runtime
from agent.service.ledger_access import BorrowedLedger, SharedLedger
from agent.storage import site_directory
from policies.audit.auditor import clock_warning
from protos.federation import flower_environment
from protos.service.service_lock import service_lock
from protos.web import settings as console_settings


def run(arguments: argparse.Namespace) -> int:
    """Serve; what it expects to go wrong becomes a sentence."""
    return answered_ingest(serve, arguments)


def serve(arguments: argparse.Namespace) -> int:
    """Receive images from the PACS, and take part in federated rounds, until stopped."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        home = site_directory.SiteDirectory(arguments.home)
        stack.enter_context(service_lock(arguments.home))
        runtime = None
        if arguments.modality:
            flower_environment.configure_environment(arguments.home / "flower")  # the link's process inherits it
            from agent.cli import rounds  # noqa: PLC0415 - torch: who only receives does without it

            rounds.use_one_thread()
            say = lambda name, detail: print_progress(name, detail, False)  # noqa: E731 - one line of progress
            runtime = stack.enter_context(open_runtime(arguments.home, say, arguments.project))
        log = runtime.log if runtime else open_log(arguments.home / "agent.log")
        if runtime is not None:
            _warn_of_the_future(runtime, int(time.time()))
        reception = stack.enter_context(IngestService(home, arguments.project, log))
        for line in reception.told():
            OUT.print(line, markup=False)
        for line in stack.enter_context(_beside(home, runtime, log, reception)):
            OUT.print(line, markup=False, soft_wrap=True)
        if runtime is None:
            OUT.print("receiving only: to take part in rounds, give --modality")
            stop.wait()
            return 0
        return rounds.take_part(runtime, arguments.project, arguments.modality, stop)


def _warn_of_the_future(runtime: AgentRuntime, now: int) -> None:
    """Say, and log, that the newest entry's time is ahead of this machine's clock (seconds since 1970)."""
    latest = runtime.site.ledger.store.state.latest
    if wrong := clock_warning(latest, now):
        runtime.log.warning("ledger_in_the_future", seconds=latest - now)
        ERR.print(wrong, markup=False, soft_wrap=True)


@contextmanager
def _beside(
    home: site_directory.SiteDirectory, runtime: AgentRuntime | None, log: Any, reception: IngestService
) -> Iterator[tuple[str, ...]]:
    """Control socket, console, jobs and metrics while this serves; and systemd is told."""
    from agent.console.console_process import ConsoleProcess  # noqa: PLC0415 - a release without these needs none of it
    from agent.operations import metrics  # noqa: PLC0415 - as above
    from agent.service.job_monitoring import put_jobs  # noqa: PLC0415 - as above
    from agent.service.job_runner import JobRunner  # noqa: PLC0415 - as above
    from agent.service.process_monitoring import tell_status  # noqa: PLC0415 - as above
    from agent.service.site import site_app  # noqa: PLC0415 - as above
    from protos.service.control_client import service_fault  # noqa: PLC0415 - as above
    from protos.service.control_socket import ControlSocketError, control_socket  # noqa: PLC0415 - as above
    from protos.web.health import Health, watched_over  # noqa: PLC0415 - as above

    store, now = runtime.site.ledger.store if runtime else None, lambda: dt.datetime.now(dt.UTC)
    jobs = partial(put_jobs, home)
    watched = metrics.MonitoredSite(home, read_ingestion(home), now, store, lambda: reception.listener, jobs=jobs)
    settings = console_settings.read(home.root)
    console = ConsoleProcess(home.root, log) if settings is not None else None

    def running() -> dict[str, bool]:
        return reception.running() | ({metrics.CONSOLE: console.pid is not None} if console is not None else {})

    with ExitStack() as stack:
        ledger = SharedLedger(runtime) if runtime else BorrowedLedger(home)
        app = site_app(home, ledger, log, tell_status(running, reception.received))
        app.state.wrong = live = metrics.live(watched)
        try:
            stack.enter_context(control_socket(home.root, app, log))
            live = partial(service_fault, home.root)  # a socket that answers nobody is a fault, too
        except ControlSocketError as error:  # images come all the same
            log.error("control_fault", state=type(error).__name__)
            ERR.print(f"{error}: no command can ask this service for anything", markup=False, soft_wrap=True)
        if console is not None:
            stack.enter_context(console)
        stack.enter_context(JobRunner(home, ledger, log))
        health = Health(live, metrics.ready(watched), metrics.joined(watched))
        port = stack.enter_context(watched_over(settings, metrics.metrics(watched), health))
        yield (*([console.told] if console else []), *([f"metrics and health: port {port}"] if port else []))
