"""One update of a whole DenseNet-121 over a hospital's line of 4 Mbit/s that is cut on its way.

Coordinator and agent as installed, the agent in a network namespace of its own, whose line the kernel shapes and
takes down. The mechanism trains nothing (``made/made_mechanism.py``), so that a round is the line's. Of each round
that is cut: the seconds from the model's last byte at the site to the closed round, less those of the cut.

``slow_link_vs_bytes``: the most of them over what the update's bfloat16 bytes take at that rate.
``rounds_lost_to_cuts``: rounds that closed without the site, or not at all.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from agent.mechanisms.federated.task_training import network_of
from coordinator.storage.directory import operator_certificate
from policies.tasks.networks import NetworkSpec
from protos.artifacts.bfloat16 import BFLOAT16
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.benchmarks import network
from tests.benchmarks.made.made_mechanism import configuration
from tests.benchmarks.report import Row
from tests.benchmarks.round_size import MADE
from tests.benchmarks.rounds import ROLES, stock
from tests.support.federation_world import Federation
from tests.support.hospital_network import HUB, HospitalNetwork, hospital_network, possible
from tests.support.ports import free_port
from tests.support.process_world import write_setting
from tests.support.small_tasks import classification

SITE: Final = "site-a"
MBIT: Final = 4.0
CUTS_S: Final = (10.0, 60.0, 200.0)  # gRPC mends the first by itself; the last is longer than Flower waits
UP, DOWN = "rx", "tx"  # of the coordinator's end of the line
_HALF: Final = 0.5
_ROUND_S: Final = 900.0


def densenet() -> int:
    """How many parameters of a whole DenseNet-121 travel."""
    task = classification("0123456789", (32, 32), NetworkSpec("densenet121"))
    return network_of(task, {}.__getitem__).parameters


@contextlib.contextmanager
def far_site(folder: Path, line: HospitalNetwork) -> Iterator[Federation]:
    """A coordinator here, and its site behind the line."""
    address = f"{HUB}:{free_port()}"
    federation, (site,) = network.found(folder, [SITE], f'listen = "{address}"\n')
    write_setting(site.home.root / "site.toml", "coordinator", address)
    with (
        network.coordinator(federation),
        network.started(["-m", ROLES, "sized", str(stocked(site))], r"link: (online)", line.inside(SITE)),
    ):
        yield federation


def stocked(site: Any) -> Path:
    """The site's home, with patients in its vault."""
    stock(site, 0)
    return Path(site.home.root)


def launched(federation: Federation, parameters: int, rounds: int, closed: dict[int, float]) -> list[str]:
    """Follow a run to its end: when each round closed, with the site in it; what was said."""
    values = json.loads(configuration(parameters, rounds)) | {"update_precision": BFLOAT16}
    request = gateway_pb2.LaunchRequest(
        run="slow",
        mechanism="federated",
        config=json.dumps(values, sort_keys=True).encode(),
        parameters=parameters,
        sites=[SITE],
        rounds=rounds,
        min_sites=1,
        wait_seconds=600,
    )
    key, chain = operator_certificate(federation.home, dt.datetime.now(dt.UTC))
    credentials = grpc.ssl_channel_credentials(federation.home.root_crt(), key, chain)
    options = [("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", USER_AGENT)]
    said = []
    with grpc.secure_channel(f"{HUB}:{federation.port}", credentials, options) as channel:
        for event in GatewayStub(channel).Launch(request, timeout=3600):
            said.append(f"{event.round} {event.state} {' '.join(event.sites)} {event.reason}")
            if event.state == "closed" and SITE in event.sites:
                closed[event.round] = time.monotonic()
    return said


def wait(true: Callable[[], bool]) -> None:
    """Until it is.

    Raises:
        TimeoutError: not in a quarter of an hour.
    """
    until = time.monotonic() + _ROUND_S
    while not true():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.02)


def rounds_with_cuts(folder: Path) -> tuple[list[Row], dict[str, float]]:
    """A round as it is, then one for each cut of the way up, then one with a cut of the way down.

    The first round begins at zeros, whose equal pieces are carried once: it only comes before.
    """
    parameters, closed = densenet(), dict[int, float]()
    model, update = 4 * parameters, 2 * parameters
    ideal = update * 8 / (MBIT * 1e6)
    rows = [Row(f"{parameters:,} parameters in bfloat16 at {MBIT:g} Mbit/s, their bytes alone", ideal, "s")]
    took = dict[float, float]()
    with hospital_network([SITE], MBIT) as line, far_site(folder, line) as federation:
        rounds = 3 + len(CUTS_S)
        run = threading.Thread(target=launched, args=(federation, parameters, rounds, closed), daemon=True)
        run.start()
        wait(lambda: 1 in closed or not run.is_alive())
        for number, cut in enumerate((0.0, *CUTS_S, -CUTS_S[0]), 2):
            down, up = line.carried(SITE, DOWN), line.carried(SITE, UP)
            if cut < 0:  # of the model
                wait(lambda: line.carried(SITE, DOWN) - down >= _HALF * model)  # noqa: B023
                cut_for(line, -cut)
            wait(lambda: line.carried(SITE, DOWN) - down >= model)  # noqa: B023
            arrived, up = time.monotonic(), line.carried(SITE, UP)
            if cut > 0:
                wait(lambda: line.carried(SITE, UP) - up >= _HALF * update)  # noqa: B023
                cut_for(line, cut)
            wait(lambda: number in closed or not run.is_alive())  # noqa: B023
            if number not in closed:
                break
            if cut >= 0:
                took[cut] = closed[number] - arrived - cut
                name = f"the update, with a cut of {cut:g} s taken off" if cut else "the update, without a cut"
                rows.append(Row(name, took[cut], "s"))
                carried = (line.carried(SITE, UP) - up) / update
                rows.append(Row("bytes that crossed the line, over the update's", carried, "ratio"))
        run.join(60)
    lost = float(rounds - len(closed))
    worst = max((seconds for cut, seconds in took.items() if cut), default=float("inf")) / ideal
    return rows, {"slow_link_vs_bytes": worst, "rounds_lost_to_cuts": lost}


def cut_for(line: HospitalNetwork, seconds: float) -> None:
    """Take the line down for so long."""
    line.cut(SITE)
    time.sleep(seconds)
    line.mend(SITE)


def slow_line() -> tuple[list[Row], dict[str, float]]:
    """Rows and keys; none where hosts of their own cannot be made (root, ``ip``, ``tc``). A quarter of an hour."""
    if not possible():
        return [], {}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MADE), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        return rounds_with_cuts(Path(name))
