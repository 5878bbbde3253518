"""The serving process: gRPC for agents and operators, the embedded SuperLink, and the runs over it.

Imported after :func:`protos.quiet.hush`, since Flower reads its environment while it is imported.
"""

from __future__ import annotations

import datetime as dt
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from coordinator.edges.authority import Authority
from coordinator.edges.counter import Counter
from coordinator.edges.dated import Dated
from coordinator.edges.federation import FlowerHost, HostConfig, PublicConfig
from coordinator.edges.fleet import Fleet
from coordinator.edges.heap import one_arena
from coordinator.edges.home import Home, open_ledger, own_certificate
from coordinator.edges.log import open_log
from coordinator.edges.operations import Operations
from coordinator.edges.port import start
from coordinator.edges.runs import Runs
from coordinator.edges.service import Service
from coordinator.edges.sessions import Sessions
from coordinator.edges.shelf import Shelf
from coordinator.edges.site_heads import SiteHeads
from coordinator.edges.uploads import Uploads
from coordinator.edges.witnesses import Witnesses
from coordinator.intake import Intake
from policies.store import Store

UPKEEP_S = 600.0  # own certificate, orphaned uploads
ORPHAN_S = 7 * 86_400.0  # an upload that nobody went on with


@dataclass(frozen=True, slots=True)
class Parts:
    """The serving coordinator, for what stands beside the service: the console, metrics, health."""

    home: Home
    store: Store
    intake: Intake
    runs: Runs
    shelf: Shelf
    sessions: Sessions
    authority: Authority
    uploads: Uploads
    expel: Callable[[str], object]  # end a site's open calls
    log: Any


Beside = Callable[[Parts], AbstractContextManager[Sequence[str]]]


def serve(home: Home, say: Callable[[str], None], beside: Beside) -> int:
    """Serve until SIGTERM or SIGINT; runs that a crash left are resumed.

    Args:
        home: the coordinator's directory.
        say: tells the operator.
        beside: what stands beside the service while it serves; yields lines to tell of it.
    Returns:
        0, or 70 when the ledger could not be written and a restart has to replay it.
    """
    one_arena()
    log = open_log(home.root / "coordinator.log")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is a descriptor, and so is each file
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    own_certificate(home, dt.datetime.now(dt.UTC))
    with open_ledger(home) as store, FlowerHost(_flower(home)) as superlink:
        intake = Intake.over(store, home.policy())
        shelf = Shelf(home.releases, store)
        uploads = Uploads(shelf.staging, time.time)
        sessions = Sessions(log)
        runs = Runs(home.root / "runs", superlink, intake, shelf, log, sessions.notify)
        authority = Authority(home, intake, lambda: dt.datetime.now(dt.UTC))
        counter = Counter(
            intake=intake,
            uploads=uploads,
            shelf=shelf,
            witnesses=Witnesses(home.witnesses),
            site_heads=SiteHeads(home.site_heads),
            authority=authority,
            fleet=Fleet(superlink, intake.node_keys, lambda site, what: service.guard.report(site, what)),  # noqa: PLW0108 - made below
            conducting=Operations(runs),
            enrolled=runs.register_node,
            architectures=home.root / "architectures",
            policy=home.policy_text(),
            log=log,
        )
        service = Service(counter, sessions)
        parts = Parts(home, store, intake, runs, shelf, sessions, authority, uploads, service.guard.expel, log)
        server, bound = start(home, service, (Dated(),))
        try:
            runs.resume_all()
            with beside(parts) as told:
                flower = f", stock Flower nodes on {superlink.public[1]}" if superlink.public else ""
                say(f"serving {len(intake.node_keys)} site(s): agents on port {bound}{flower}")
                for line in told:
                    say(line)
                _until(stop, store, lambda: _upkeep(home, uploads))
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


def _upkeep(home: Home, uploads: Uploads) -> None:
    own_certificate(home, dt.datetime.now(dt.UTC))
    uploads.expire(ORPHAN_S)


def _flower(home: Home) -> HostConfig:
    """The embedded SuperLink; a public listener only where ``superlink`` names one, for stock Flower nodes."""
    address, public = home.settings().superlink, None
    if address:
        host, _, port = address.rpartition(":")
        keys = home.keys
        public = PublicConfig((host, int(port)), keys / "root.crt", keys / "tls.crt", keys / "tls.key")
    return HostConfig(state=home.root / "flower", public=public)
