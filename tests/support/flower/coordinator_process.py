"""A coordinator as a process of its own: one JSON command per line in, one JSON answer per line out.

    python -m tests.support.flower.coordinator_process settings.json

Commands: {"do": "conduct", ...plan}, {"do": "conduct", "runs": [{...plan}]}, {"do": "online"},
{"do": "register", "site", "key"}. The gate admits an update whose envelope is the digest of its vector, run, round
and site, and obeys the run's config: {"gate_refuses": {site: code}, "gate_breaks": [site], "disk_full": round}. Also
{"do": "secure", "site", "step", "payload"} (hexadecimal), {"do": "revoke", "serial"}, {"do": "reports"},
{"do": "nodes"}, {"do": "mail", "site"}, {"do": "signs"}.
"""

# ruff: noqa: E402 - Flower is imported after hush and under the guard

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from protos.federation.flower_environment import configure_environment
from tests.support.flower.loopback import guard

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
HOME = Path(SETTINGS["home"])
configure_environment(HOME / "flwr")
guard(HOME / "network.txt")

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coordinator.federation import run_process, superlink
from coordinator.federation.canary import made_model
from coordinator.federation.fleet_proxy import Fleet
from coordinator.federation.grid import BoundedGrid
from coordinator.federation.run_process import RunLostError
from coordinator.federation.strategy import RoundFailedError, RoundModel, RoundPlan, RoundProgress
from coordinator.federation.superlink import FlowerHost, conduct
from coordinator.federation.superlink_listeners import HostConfig
from protos.artifacts.arrays import unpack_vector
from protos.federation import messages, round_times
from protos.federation.messages import STUB_FILES, bundle
from protos.federation.round_times import EARLIER_S, RoundTerms
from protos.federation.site_check import SiteCheck
from tests.support.flower.port import Port, serve


@dataclass
class Gate:
    """The test's review: the envelope must be the digest of exactly this update."""

    run: str
    config: dict[str, Any]
    reviewed: list[str] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    granted: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of the events, after the beginning
    began: float = field(default_factory=time.monotonic)
    vector: Any = None  # after the last round that was closed
    sums: list[list[float]] = field(default_factory=list)  # of the looks
    found: dict[str, Any] = field(default_factory=dict)  # of a check

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """Every reservation that names run and site is good."""
        wrong = {site for site, envelope in sealed.items() if envelope != f"grant {self.run} {site}".encode()}
        if not len(sealed) - len(wrong) >= least:
            return dict.fromkeys(sealed, "few")
        self.granted = {site: envelope.decode() for site, envelope in sealed.items() if site not in wrong}
        return dict.fromkeys(wrong, "envelope")

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """None only for an envelope over run, round, site and vector."""
        vector = unpack_vector(artifact)
        self.reviewed.append(site)
        if site in self.config.get("gate_breaks", []):
            raise RuntimeError("patient 4711")
        if site in self.config.get("gate_refuses", {}):
            return str(self.config["gate_refuses"][site])
        expected = sha256(f"{self.run} {round_index} {site}".encode() + vector.tobytes()).digest()
        return None if envelope == expected else "envelope"

    def looked(self, round_index: int, sums: Any) -> None:
        """Keep what a look gave."""
        self.sums.append([round_index, *map(float, sums)])

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Keep what a durable checkpoint would hold, unless the disk is full."""
        if self.config.get("disk_full") == round_index:
            raise OSError("no space left on device")
        self.checkpoints.append(
            {"round": round_index, "first": float(model.vector[0]), "used": used, "refused": dict(refused)}
        )
        self.vector = model.vector

    def checked(self, told: Mapping[str, SiteCheck], lost: Mapping[str, str], aggregated: tuple[str, ...]) -> None:
        """Keep what a check found."""
        reports = {site: asdict(one) for site, one in told.items()}
        self.found = {"told": reports, "lost": dict(lost), "aggregated": aggregated}

    def progress(self, event: RoundProgress) -> None:
        """Keep it, with its time."""
        self.events.append(asdict(event))
        self.times.append(time.monotonic() - self.began)


def run(host: FlowerHost, command: dict[str, Any]) -> dict[str, Any]:
    """Conduct one run and report everything about it."""
    config = command["config"]
    size = command.get("size", 1000)
    start = np.arange(size, dtype=np.float32) if size <= 1000 else np.zeros(size, np.float32)
    if config.get("random"):
        start = np.random.default_rng(0).standard_normal(size, np.float32)
    if command.get("checks") == messages.CANARY:
        start = made_model(size)
    plan = RoundPlan(
        run=command["run"],
        sites=tuple(command["sites"]),
        rounds=command["rounds"],
        first_round=command.get("first_round", 0),
        model=RoundModel(start),
        config=json.dumps(config).encode(),
        min_sites=command["min_sites"],
        least_grants=command["min_sites"],
        round_timeout_s=command.get("round_timeout_s", 120.0),
        node_wait_s=command.get("node_wait_s", 100.0),
        terms=RoundTerms(command.get("seconds", EARLIER_S)),
        silence_s=round_times.silence(command.get("seconds", EARLIER_S), command.get("wait_seconds", 0)),
        required=tuple(command.get("required", ())),
        looks=frozenset(command.get("looks", ())),
        sums=3 if command.get("looks") else 0,
        checks=command.get("checks", ""),
    )
    gate = Gate(plan.run, config)
    if plan.checks:
        conduct(host, plan, gate)
        return gate.found
    report: dict[str, Any] = {}
    try:
        conduct(host, plan, gate)
        report = {
            "shift": [float(x) for x in np.unique(gate.vector - start)],
            "rounds_done": gate.checkpoints[-1]["round"] + 1,
            "granted": gate.granted,
            "declined": gate.events[0]["refused"],
            "used": [closed["used"] for closed in gate.checkpoints],
            "refused": [closed["refused"] for closed in gate.checkpoints],
        }
    except RoundFailedError as failure:
        report = {"failed": failure.reason, "text": str(failure), "refused": failure.refused}
    except (RunLostError, OSError) as fault:
        report = {"lost": str(fault)}
    return {
        **report,
        "span": [gate.began, time.monotonic()],
        "reviewed": gate.reviewed,
        "checkpoints": gate.checkpoints,
        "events": gate.events,
        "times": gate.times,
        "sums": gate.sums,
    }


def side_by_side(host: FlowerHost, commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conduct several runs at once, and report everything about each."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda command: run(host, command), commands))


def register(host: FlowerHost, command: dict[str, Any], keys: dict[str, str]) -> Any:
    """Register, or name the kind of error."""
    try:
        host.register(command["site"], Path(command["key"]).read_bytes())
        keys[command["site"]] = Path(command["key"]).read_text()
    except ValueError as error:
        return type(error).__name__
    return {}


def main() -> None:
    """Serve until standard input ends."""
    if "canary" in SETTINGS:
        code = f"open({SETTINGS['canary']!r}, 'w').close()\nnothing = None\n"
        carried = bundle({**STUB_FILES, "stub.py": code})
        vars(superlink).update(STUB_BUNDLE=carried, STUB_DIGEST=sha256(carried).hexdigest())
    vars(run_process)["MODULE"] = "tests.support.flower.running"
    ca, cert, key = (Path(SETTINGS[name]) for name in ("ca", "cert", "key"))
    keys = {site: Path(path).read_text() for site, path in SETTINGS["nodes"].items()}
    reports: list[tuple[str, str]] = []
    config = HostConfig(Path(SETTINGS["state"]), ("127.0.0.1", SETTINGS.get("private", 0)))
    with FlowerHost(config) as host:
        fleet = Fleet(host, keys, lambda site, what: reports.append((site, what)))
        for site, node_key in keys.items():
            host.register(site, node_key.encode())
        with serve(fleet, ca, cert, key, SETTINGS.get("port", 0)) as (bound, port):
            ready = {"port": bound, "private": host.private[1], "digest": superlink.STUB_DIGEST}
            print(json.dumps(ready), flush=True)
            for line in sys.stdin:
                print(json.dumps(obey(json.loads(line), host, port, keys, reports)), flush=True)


def obey(
    command: dict[str, Any], host: FlowerHost, port: Port, keys: dict[str, str], reports: list[tuple[str, str]]
) -> Any:
    """One command's answer."""
    match command["do"]:
        case "conduct":
            return run(host, command) if "runs" not in command else side_by_side(host, command["runs"])
        case "register":
            return register(host, command, keys)
        case "secure":
            return secure(host, command)
        case "revoke":
            port.turned_away.add(command["serial"])
            return {}
        case "reports":
            return reports
        case "mail" | "signs":
            return seen(port.fleet, command)
        case "nodes":
            return {site: str(host.node_id(superlink.flower_key(key.encode()))) for site, key in keys.items()}
    return sorted(host.online())


def seen(fleet: Fleet, command: dict[str, Any]) -> Any:
    """The newest message to a site; or each site's last sign of life."""
    if command["do"] == "signs":
        return {site: asdict(sign) for site, sign in fleet.signs().items()}
    mail = vars(fleet)["_mail"][command["site"]][-1]
    return {"message": mail.message, "run": str(mail.run), "object": min(mail.objects)}


def secure(host: FlowerHost, command: dict[str, Any]) -> str:
    """One message of secure aggregation to one site, and the payload of its reply."""
    with host.task() as (way, token):
        grid = BoundedGrid(way, token, host.stopping).begin()
        node = next(node.node_id for node in grid.get_nodes() if node.name == command["site"])
        order = {messages.RUN: "masked", messages.ROUND: 0, messages.CONFIG: b"{}", messages.STEP: command["step"]}
        payload = Array(np.frombuffer(bytes.fromhex(command["payload"]), np.uint8))
        content = RecordDict(
            {messages.ORDER: ConfigRecord(order), messages.PAYLOAD: ArrayRecord({messages.DATA: payload})}
        )
        (reply,) = grid.send_and_receive([Message(content, node, messages.SECURE)], timeout=120.0)
        grid.end("completed")
        if reply.has_error():
            return f"code {reply.error.code}"
        record = reply.content[messages.PAYLOAD]
        assert isinstance(record, ArrayRecord)
        return record[messages.DATA].numpy().tobytes().hex()


if __name__ == "__main__":
    main()
