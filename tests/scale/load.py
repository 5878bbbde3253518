"""One real coordinator process, and many real agents at once, each over its own mutual TLS on loopback.

The sites are enrolled by the product's own steps before the coordinator serves. Afterwards its ledger is exported,
checked by lazaret-verify, and compared with what every agent was told: each grant once, none lost, none doubled.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.storage import directory as coordinator_home
from policies.audit.display import as_json
from policies.ledger.entries import decode
from policies.ledger.export import Export
from tests.scale.measure import Process, table
from tests.support.federation_world import Federation
from tests.support.ledger_world import policy

PER_PROCESS = 50  # agents
POLICY = policy(max_releases_per_patient=100_000)  # the load is to be bounded by the machine, not by the law
START_S = 120.0


class LoadFailed(RuntimeError):
    """The load could not be driven at all; the text ends with the words of the process that failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much."""

    agents: int
    seconds: float
    pause_s: float  # an agent rests for up to so long between its cycles


def enrol(root: Path, agents: int) -> list[str]:
    """A coordinator's home and that many sites' homes, joined by the product's authority."""
    settings = 'listen = "127.0.0.1:0"\n'
    coordinator_home.create(root / "coordinator", settings, POLICY, dt.datetime.now(dt.UTC))
    names = [f"site-{i:03d}" for i in range(agents)]
    with Federation(root) as federation:
        for name in names:
            federation.join(name, POLICY)
    return names


@contextlib.contextmanager
def coordinator(root: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """``lazaret-coordinator serve`` as a process, and its port; ended by SIGTERM, which must be orderly."""
    said = root / "coordinator.out"
    command = [sys.executable, "-m", "coordinator", "--home", str(root / "coordinator"), "serve"]
    with said.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=_environment())
    try:
        until = time.monotonic() + START_S
        while not (found := re.search(r"agents on port (\d+)", said.read_text())):
            if process.poll() is not None or not time.monotonic() < until:
                raise LoadFailed(f"the coordinator did not start:\n{said.read_text()[-2000:]}")
            time.sleep(0.1)
        yield process, int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def drive(root: Path, port: int, names: list[str], load: Load) -> list[dict[str, Any]]:
    """All agents at once; the reports of their processes."""
    running, reports = [], []
    for i in range(0, len(names), PER_PROCESS):
        out = root / f"agents-{i}.report"
        settings = {"port": port, "root": str(root), "sites": names[i : i + PER_PROCESS], "out": str(out)}
        settings |= {"seconds": load.seconds, "pause_s": load.pause_s}
        path = root / f"agents-{i}.json"
        path.write_text(json.dumps(settings))
        reports.append(out)
        with (root / f"agents-{i}.err").open("wb") as errors:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.scale.agents", str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=_environment(),
                )
            )
    try:
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise LoadFailed("a process of agents did not start")
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in running:
            if process.wait(load.seconds + 300):
                raise LoadFailed("a process of agents ended with a fault")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [json.loads(path.read_text()) for path in reports]


def exported(root: Path) -> dict[str, Any]:
    """The exported ledger, once lazaret-verify has found it sound under the key that the coordinator tells."""
    out, home = root / "ledger.export", str(root / "coordinator")
    told = ""
    for command in (
        ["coordinator", "--home", home, "ledger", "export", str(out)],
        ["coordinator", "--home", home, "ledger", "fingerprint"],
        ["policies.audit.verify", str(out), "--json", "--key"],
    ):
        whole = [sys.executable, "-m", *command, *([told] if command[-1] == "--key" else [])]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, env=_environment())
        if done.returncode != 0:
            raise LoadFailed(f"{command[0]} {command[-1]}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        told = done.stdout.strip()
    export = Export.parse(out.read_bytes())
    return as_json(coordinator_home.ORIGIN, [decode(body) for body in export.entries])


def disagreements(ledger: dict[str, Any], reports: list[dict[str, Any]]) -> list[str]:
    """Where the ledger and what the agents were told differ. Nothing may."""
    told: dict[str, dict[str, Any]] = {}
    for report in reports:
        for agent in report["agents"].values():
            told |= agent["told"]
    kinds = Counter((e["type"], e.get("grant", "")) for e in ledger["entries"])
    releases = Counter(e["release"] for e in ledger["entries"] if e["type"] == "admitted")
    grants = {g["grant"]: g for g in ledger["grants"]}
    wrong = [f"{grant}: in the ledger, asked for by nobody" for grant in grants.keys() - told.keys()]
    wrong += [f"{grant}: {kind} {n} times" for (kind, grant), n in kinds.items() if grant and n > 1]
    for grant, said in told.items():
        known = grants.get(grant)
        if said["reserved"] is True and known is None:
            wrong.append(f"{grant}: granted, and not in the ledger")
        if said["released"] is True and releases[said["release"]] != 1:
            wrong.append(f"{grant}: admitted, and {releases[said['release']]} times in the ledger")
        if said["settled"] is True and kinds["expired", grant] != 1:
            wrong.append(f"{grant}: settled, and not expired in the ledger")
    return wrong + _sums(ledger)


def _sums(ledger: dict[str, Any]) -> list[str]:
    """Each account is the sum of its grants: what is held, and what was spent."""
    wrong, expired = [], {e["grant"] for e in ledger["entries"] if e["type"] == "expired"}
    for account in ledger["accounts"]:
        mine = [g for g in ledger["grants"] if g["account"] == account["account"]]
        held = sum(g["amount"] for g in mine if g["state"] == "held")
        spent = sum(g["amount"] if g["grant"] in expired else g["used"] for g in mine if g["state"] != "held")
        if (account["held"], account["spent"]) != (held, spent):
            wrong.append(f"{account['account']}: {account['held']}, {account['spent']} against {held}, {spent}")
    return wrong


def unexpected(reports: list[dict[str, Any]]) -> Counter[str]:
    """What agents met that a sound, unloaded coordinator would never have shown them."""
    found: Counter[str] = Counter()
    for report in reports:
        for agent in report["agents"].values():
            found.update(re.sub(r"incident \w+", "incident", fault) for fault in agent["faults"])
            found.update(f"link: {state}" for state in agent["states"] if state not in ("online", "stopped"))
            for said in agent["told"].values():
                for step in ("reserved", "released", "settled"):
                    if said[step] not in (True, None):
                        found[f"{step}: {said[step]}"] += 1
            if agent["notices"][:1] != ["hello"]:
                found["no session"] += 1
            if agent["states"][:1] != ["online"]:
                found["no link"] += 1
    return found


def run(root: Path, load: Load, say: Any = lambda _text: None) -> dict[str, Any]:
    """Enrol, serve, drive, export, compare; and what it took."""
    began = time.monotonic()
    names = enrol(root, load.agents)
    enrolled = time.monotonic() - began
    say(f"{len(names)} sites enrolled in {enrolled:.1f} s")
    with coordinator(root) as (process, port):
        with Process(process.pid) as used:
            reports = drive(root, port, names, load)
        say("the load is over")
    seconds = max(report["seconds"] for report in reports)
    ledger = exported(root)
    calls = table((report["took"] for report in reports), seconds)
    return {
        "agents": load.agents,
        "seconds": round(seconds, 1),
        "enrolled_per_s": round(len(names) / enrolled, 1),
        "calls_per_s": round(sum(row["calls"] for row in calls.values()) / seconds, 1),
        "calls": calls,
        "coordinator": {**used.to_json(), "exit": process.returncode},
        "entries": len(ledger["entries"]),
        "grants": dict(Counter(g["state"] for g in ledger["grants"])),
        "unexpected": dict(unexpected(reports)),
        "disagreements": disagreements(ledger, reports),
    }


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
