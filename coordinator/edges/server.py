"""The serving process: gRPC for agents, the embedded SuperLink, and the runs over it.

Imported after :func:`protos.quiet.hush`, since Flower reads its environment while it is imported.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from coordinator.edges.federation import FlowerHost, HostConfig
from coordinator.edges.home import Home, open_ledger
from coordinator.edges.log import open_log
from coordinator.edges.runs import BadJob, Job, Runs
from coordinator.edges.service import Service, start
from coordinator.edges.shelf import Shelf
from coordinator.edges.witnesses import Witnesses
from coordinator.intake import Intake
from protos.v1 import gateway_pb2 as pb


def serve(home: Home, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; runs that a crash left are resumed.

    Returns:
        0, or 70 when the ledger could not be written and a restart has to replay it.
    """
    host, _, port = home.settings().superlink.rpartition(":")
    log = open_log(home.root / "coordinator.log")
    config = HostConfig(
        state=home.root / "flower",
        ca=home.keys / "ca.crt",
        cert=home.keys / "tls.crt",
        key=home.keys / "tls.key",
        public=(host, int(port)),
        private=("127.0.0.1", 0),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with open_ledger(home) as store, FlowerHost(config) as superlink:
        intake = Intake.over(store, home.policy())
        shelf = Shelf(home.releases, store)
        runs = Runs(home.root / "runs", superlink, intake, shelf, log)
        service = Service(
            intake, shelf, Witnesses(home.witnesses), home.policy_text(), log, lambda request: _conduct(runs, request)
        )
        server, bound = start(home, service)
        runs.resume()
        say(f"serving {len(intake.node_keys)} site(s): agents on port {bound}, Flower on {superlink.public[1]}")
        while not stop.wait(0.2) and not store.stopped:
            pass
        superlink.stopping.set()
        server.stop(2).wait()
        return 70 if store.stopped else 0


def _conduct(runs: Runs, request: Any) -> Iterator[Any]:
    """A launch request as a run's events on the wire."""
    try:
        job = Job(
            request.run,
            request.mechanism,
            request.config.decode(),
            request.parameters,
            tuple(request.sites),
            request.rounds,
            request.min_sites,
        )
        events = runs.launch(job)
    except (BadJob, UnicodeDecodeError) as error:
        yield pb.RoundEvent(run=request.run, state="failed", reason=str(error))
        return
    for e in events:
        yield pb.RoundEvent(run=e.run, round=e.round, state=e.state, sites=list(e.sites), reason=e.reason)
