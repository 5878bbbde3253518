"""A coordinator as a process of its own: one JSON command per line in, one JSON answer per line out.

    python -m tests.support.flower.coordinator_process settings.json

Commands: {"do": "conduct", ...plan}, {"do": "online"}, {"do": "register", "site", "key"}. The gate admits
an update whose envelope is the digest of its vector, run, round and site, and obeys the run's config:
{"gate_refuses": {site: code}, "gate_breaks": [site]}.
"""

# ruff: noqa: E402 - Flower is imported after hush and under the guard

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from protos.quiet import hush
from tests.support.flower.loopback import guard

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
HOME = Path(SETTINGS["home"])
hush(HOME / "flwr")
guard(HOME / "network.txt")

import numpy as np
from numpy.typing import NDArray

from coordinator.edges import federation
from coordinator.edges.federation import (
    FlowerHost,
    HostConfig,
    RoundFailed,
    RoundPlan,
    RunInProgress,
    conduct,
)
from protos.rounds import STUB_FILES, bundle


@dataclass
class Gate:
    """The test's review: the envelope must be the digest of exactly this update."""

    run: str
    config: dict[str, Any]
    reviewed: list[str] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)

    def admit(self, site: str, round_index: int, envelope: bytes, vector: NDArray[np.float32]) -> str | None:
        """None only for an envelope over run, round, site and vector."""
        self.reviewed.append(site)
        if site in self.config.get("gate_breaks", []):
            raise RuntimeError("patient 4711")
        if site in self.config.get("gate_refuses", {}):
            return str(self.config["gate_refuses"][site])
        expected = sha256(f"{self.run} {round_index} {site}".encode() + vector.tobytes()).digest()
        return None if envelope == expected else "envelope"

    def round_done(
        self, round_index: int, vector: NDArray[np.float32], used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """Keep what a durable checkpoint would hold."""
        self.checkpoints.append(
            {"round": round_index, "first": float(vector[0]), "used": used, "refused": dict(refused)}
        )


def run(host: FlowerHost, command: dict[str, Any]) -> dict[str, Any]:
    """Conduct one run and report everything about it."""
    config = command["config"]
    size = command.get("size", 1000)
    start = np.arange(size, dtype=np.float32) if size <= 1000 else np.zeros(size, np.float32)
    plan = RoundPlan(
        run=command["run"],
        sites=tuple(command["sites"]),
        rounds=command["rounds"],
        first_round=command.get("first_round", 0),
        vector=start,
        config=json.dumps(config).encode(),
        min_sites=command["min_sites"],
        round_timeout_s=command.get("round_timeout_s", 30.0),
        node_wait_s=command.get("node_wait_s", 20.0),
    )
    gate, events, times = Gate(plan.run, config), [], []
    nested: list[str] = []
    began = time.monotonic()

    def progress(event: federation.Progress) -> None:
        events.append(asdict(event))
        times.append(time.monotonic() - began)
        if command.get("nested"):
            try:
                conduct(host, plan, gate, progress)
            except RunInProgress as error:
                nested.append(str(error))

    report: dict[str, Any] = {}
    try:
        result = conduct(host, plan, gate, progress)
        report = {
            "shift": [float(x) for x in np.unique(result.vector - start)],
            "rounds_done": result.rounds_done,
            "granted": {site: envelope.decode() for site, envelope in result.granted.items()},
            "declined": dict(result.declined),
            "used": result.used,
            "refused": result.refused,
        }
    except RoundFailed as failure:
        report = {"failed": failure.reason, "text": str(failure), "refused": failure.refused}
    return {
        **report,
        "nested": nested,
        "reviewed": gate.reviewed,
        "checkpoints": gate.checkpoints,
        "events": events,
        "times": times,
    }


def register(host: FlowerHost, command: dict[str, Any]) -> Any:
    """Register, or name the kind of error."""
    try:
        host.register(command["site"], Path(command["key"]).read_bytes())
    except ValueError as error:
        return type(error).__name__
    return {}


def main() -> None:
    """Serve until standard input ends."""
    if "canary" in SETTINGS:
        code = f"open({SETTINGS['canary']!r}, 'w').close()\nnothing = None\n"
        carried = bundle({**STUB_FILES, "stub.py": code})
        vars(federation).update(STUB_BUNDLE=carried, STUB_DIGEST=sha256(carried).hexdigest())
    paths = {name: Path(SETTINGS[name]) for name in ("state", "ca", "cert", "key")}
    public = ("127.0.0.1", SETTINGS.get("public", 0))
    private = ("127.0.0.1", SETTINGS.get("private", 0))
    with FlowerHost(HostConfig(public=public, private=private, **paths)) as host:
        for site, key in SETTINGS["nodes"].items():
            host.register(site, Path(key).read_bytes())
        ready = {"public": host.public[1], "private": host.private[1], "digest": federation.STUB_DIGEST}
        print(json.dumps(ready), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "conduct":
                answer: Any = run(host, command)
            elif command["do"] == "register":
                answer = register(host, command)
            else:
                answer = sorted(host.online())
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
