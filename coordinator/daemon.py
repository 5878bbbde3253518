"""The serving process: gRPC for agents and operators, the embedded SuperLink, and the runs over it.

Imported after :func:`protos.federation.flower_environment.configure_environment`, since Flower reads its environment
while it is imported.
"""

from __future__ import annotations

import datetime as dt
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority
from coordinator.event_log import open_log
from coordinator.federation.events import SignOfLife
from coordinator.federation.fleet_proxy import Fleet
from coordinator.federation.run_manager import RunManager
from coordinator.federation.superlink import FlowerHost
from coordinator.federation.superlink_listeners import HostConfig
from coordinator.gateway.context import GatewayContext
from coordinator.gateway.notifications import NotificationStreams
from coordinator.gateway.run_service import Operations
from coordinator.gateway.server import ServerTimeInterceptor, start
from coordinator.gateway.service import Service
from coordinator.pools.architectures import approve_models
from coordinator.storage.directory import CoordinatorDirectory, open_ledger, own_certificate
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.site_heads import SiteHeads
from coordinator.storage.uploads import Uploads
from coordinator.storage.witness_store import Witnesses
from policies.accounting import reference_accountant  # noqa: F401 - loaded at the start, not by the first grant
from policies.audit.auditor import clock_warning
from policies.ledger.store import Store
from protos.operations.heap import large_ones_go_back, one_arena

UPKEEP_S = 600.0  # own certificate, orphaned uploads
ORPHAN_S = 7 * 86_400.0  # an upload that nobody went on with


@dataclass(frozen=True, slots=True)
class CoordinatorRuntime:
    """The serving coordinator, as the console, metrics and health checks use it."""

    home: CoordinatorDirectory
    store: Store
    intake: AdmissionService
    runs: RunManager
    shelf: ReleaseStore
    sessions: NotificationStreams
    signs: Callable[[], Mapping[str, SignOfLife]]  # of life, by site
    authority: Authority
    close_calls: Callable[[str], object]  # end a site's open calls
    log: Any


ExtraServices = Callable[[CoordinatorRuntime], AbstractContextManager[Sequence[str]]]


def serve(home: CoordinatorDirectory, say: Callable[[str], None], beside: ExtraServices) -> int:
    """Serve until SIGTERM or SIGINT; runs that a crash left are resumed.

    Args:
        home: the coordinator's directory.
        say: tells the operator.
        beside: what stands beside the service while it serves; yields lines to tell of it.
    Returns:
        0, or 70 when the ledger could not be written and a restart has to replay it.
    """
    one_arena()
    large_ones_go_back()
    log = open_log(home.root / "coordinator.log")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is a descriptor, and so is each file
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    own_certificate(home, dt.datetime.now(dt.UTC))
    with open_ledger(home) as store, FlowerHost(HostConfig(home.root / "flower")) as superlink:
        intake = AdmissionService.over(store, home.policy())
        shelf = ReleaseStore(home.releases, store)
        uploads = Uploads(shelf.staging, time.time)
        sessions = NotificationStreams(log)
        runs = RunManager(home.root / "runs", superlink, intake, shelf, log, sessions.notify)
        runs.approve = partial(approve_models, home)
        authority = Authority(home, intake, lambda: dt.datetime.now(dt.UTC))
        fleet = Fleet(superlink, intake.node_keys, lambda site, what: service.guard.report(site, what))  # noqa: PLW0108 - made below
        runs.signs = fleet.signs
        counter = GatewayContext(
            intake=intake,
            uploads=uploads,
            shelf=shelf,
            witnesses=Witnesses(home.witnesses),
            site_heads=SiteHeads(home.site_heads),
            authority=authority,
            fleet=fleet,
            conducting=Operations(runs, fleet.signs),
            enrolled=runs.register_node,
            architectures=home.root / "architectures",
            policy=home.policy_text(),
            log=log,
        )
        service = Service(counter, sessions)
        end_calls = service.guard.close_calls
        parts = CoordinatorRuntime(home, store, intake, runs, shelf, sessions, fleet.signs, authority, end_calls, log)
        server, bound = start(home, service, (ServerTimeInterceptor(),))
        try:
            runs.resume_all()
            with beside(parts) as told:
                say(f"serving {len(intake.node_keys)} site(s): agents on port {bound}")
                for line in told:
                    say(line)
                if wrong := _future(store, log):
                    say(wrong)
                _until(stop, store, lambda: _upkeep(home, uploads, store, log))
        finally:
            superlink.stopping.set()
            sessions.close()
            server.stop(2).wait()
            runs.close()
        return 70 if store.stopped else 0


def _until(stop: threading.Event, store: Store, upkeep: Callable[[], None]) -> None:
    """Wait for the end, and look after what ages meanwhile."""
    waited = 0.0
    while not stop.wait(0.2) and not store.stopped:
        waited += 0.2
        if waited > UPKEEP_S:
            waited = 0.0
            upkeep()


def _upkeep(home: CoordinatorDirectory, uploads: Uploads, store: Store, log: Any) -> None:
    own_certificate(home, dt.datetime.now(dt.UTC))
    uploads.expire(ORPHAN_S)
    _future(store, log)


def _future(store: Store, log: Any) -> str:
    """Warn of a newest entry whose time is ahead of this machine's clock; "" where none is."""
    with store.exclusive() as state:
        latest = state.latest
    now = int(time.time())
    wrong = clock_warning(latest, now)
    if wrong:
        log.warning("ledger_in_the_future", seconds=latest - now)
    return wrong
