"""The serving process: gRPC for agents and operators, the embedded SuperLink, and the runs over it.

Imported after :func:`protos.quiet.hush`, since Flower reads its environment while it is imported.
"""

from __future__ import annotations

import datetime as dt
import resource
import signal
import threading
import time
from collections.abc import Callable

from coordinator.edges.authority import Authority
from coordinator.edges.counter import Counter
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
from coordinator.edges.uploads import Uploads
from coordinator.edges.witnesses import Witnesses
from coordinator.intake import Intake

UPKEEP_S = 600.0  # own certificate, orphaned uploads
ORPHAN_S = 7 * 86_400.0  # an upload that nobody went on with


def serve(home: Home, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; runs that a crash left are resumed.

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
        counter = Counter(
            intake=intake,
            uploads=uploads,
            shelf=shelf,
            witnesses=Witnesses(home.witnesses),
            authority=Authority(home, intake, lambda: dt.datetime.now(dt.UTC)),
            fleet=Fleet(superlink, intake.node_keys, lambda site, what: service.impostor(site, what)),  # noqa: PLW0108 - made below
            conducting=Operations(runs),
            enrolled=runs.register_node,
            architectures=home.root / "architectures",
            policy=home.policy_text(),
            log=log,
        )
        service = Service(counter, sessions)
        server, bound = start(home, service)
        runs.resume_all()
        flower = f", stock Flower nodes on {superlink.public[1]}" if superlink.public else ""
        say(f"serving {len(intake.node_keys)} site(s): agents on port {bound}{flower}")
        waited = 0.0
        while not stop.wait(0.2) and not store.stopped:
            waited += 0.2
            if waited > UPKEEP_S:
                waited = 0.0
                own_certificate(home, dt.datetime.now(dt.UTC))
                uploads.expire(ORPHAN_S)
        superlink.stopping.set()
        sessions.close()
        server.stop(2).wait()
        runs.close()
        return 70 if store.stopped else 0


def _flower(home: Home) -> HostConfig:
    """The embedded SuperLink; a public listener only where ``superlink`` names one, for stock Flower nodes."""
    address, public = home.settings().superlink, None
    if address:
        host, _, port = address.rpartition(":")
        keys = home.keys
        public = PublicConfig((host, int(port)), keys / "root.crt", keys / "tls.crt", keys / "tls.key")
    return HostConfig(state=home.root / "flower", public=public)
