"""A site's agent as a process of its own, over the real link; what it does is told by the run's config.

    python -m tests.support.flower.agent_process settings.json

The run's configuration is JSON: {"add": {site: x}, "decline": {site: code}, "die": {site: round},
"raise": {site: round}, "rogue": {site: fault}, "sleep": {site: seconds}, "cut": {site: round}, "random": bool}.
Training adds x to every parameter, or, "random", makes numbers that no two pieces have alike; "cut" kills the link's
process while it waits for the answer. A line "renew" on standard input tells the link that its credentials were
replaced.
"""

# ruff: noqa: E402 - hush and guard come first, as in the product

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
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

from agent.federation import supernode_process
from agent.federation.supernode_process import LinkConfig, LinkError, SuperNodeLink
from agent.federation.tasks import CARRYING, RoundAnswer, RoundTask, TaskDeclinedError
from protos.federation.site_check import SiteCheck

SITE = SETTINGS["site"]
LINK = SuperNodeLink(
    LinkConfig(
        SETTINGS["target"],
        Path(SETTINGS["keys"]),
        Path(SETTINGS["node_key"]),
        SETTINGS.get("proxy", ""),
        **({"bundle_digest": SETTINGS["digest"]} if SETTINGS["digest"] else {}),
    )
)


def handle(task: RoundTask) -> RoundAnswer:
    """Price with an envelope that names the run; train by adding this site's number."""
    config = json.loads(task.config)
    if task.kind == "price":
        if SITE in config.get("decline", {}):
            raise TaskDeclinedError(config["decline"][SITE])
        return RoundAnswer(f"grant {task.run} {SITE}".encode())
    if task.kind in CARRYING:
        return carry(task, config)
    if config.get("die", {}).get(SITE) == task.round_index:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("raise", {}).get(SITE) == task.round_index:
        raise RuntimeError("patient ZEBRA-4711")  # must never reach the coordinator
    if config.get("cut", {}).get(SITE) == task.round_index:
        os.kill(LINK.pid, signal.SIGKILL)
    time.sleep(config.get("sleep", {}).get(SITE, 0.0))
    assert task.vector is not None
    vector = (task.vector + np.float32(config["add"][SITE])).astype(np.float32)
    if config.get("random"):
        vector += np.random.default_rng(1).standard_normal(vector.size, np.float32)
    if task.kind == "evaluate":  # the sums of a look: this site's number, and the first parameter that it was shown
        vector = np.array([config["add"][SITE], task.vector[0], 1.0], np.float32)
    return RoundAnswer(sha256(f"{task.run} {task.round_index} {SITE}".encode() + vector.tobytes()).digest(), vector)


def carry(task: RoundTask, config: dict[str, Any]) -> RoundAnswer:
    """Mask by reversing bytes; a canary gives numbers that no two pieces have alike: those are carried once."""
    if task.kind == "secure":
        return RoundAnswer(payload=task.step.encode() + task.payload[::-1])
    model = np.frombuffer(task.payload, "<f4") if task.step else np.zeros(0, np.float32)
    moved = model + np.random.default_rng(list(SITE.encode())).standard_normal(model.size, np.float32)
    made = moved.tobytes() if task.step else bytes(len(task.payload))
    told = SiteCheck("0.1.0", "none", "cpu", float(np.abs(model).sum()), LINK.rate).to_bytes()
    return RoundAnswer(payload=told + b"\n" + made[: config.get("short", {}).get(SITE)])


def say(state: str) -> None:
    """Report a state to the test."""
    print(state, flush=True)


def listen() -> None:
    """Obey standard input."""
    for line in sys.stdin:
        if line.strip() == "renew":
            LINK.renew()


if __name__ == "__main__":
    os.environ.update(LAZARET_TEST_HOME=str(HOME), LAZARET_TEST_SITE=SITE)
    vars(supernode_process)["MODULE"] = "tests.support.flower.linked"
    supernode_process.KEPT.extend(("LAZARET_TEST_HOME", "LAZARET_TEST_SITE"))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=listen, daemon=True).start()
    try:
        LINK.run(handle, stop, say)
    except LinkError as fault:
        say(f"failed {fault}")
    assert "flwr" not in sys.modules, "Flower is the link's alone"
