"""A site's agent as a process of its own, over the real link; what it does is told by the run's config.

    python -m tests.support.flower.agent_process settings.json

The run's configuration is JSON: {"add": {site: x}, "decline": {site: code}, "die": {site: round},
"raise": {site: round}, "rogue": {site: fault}, "sleep": {site: seconds}}. Training adds x to every parameter.
"""

# ruff: noqa: E402 - Flower is imported after hush and under the guard

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

from protos.quiet import hush
from tests.support.flower.loopback import guard

SETTINGS = json.loads(Path(sys.argv[1]).read_text())
HOME = Path(SETTINGS["home"])
hush(HOME / "flwr")
guard(HOME / "network.txt")

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from agent.edges import federation, tasks
from agent.edges.federation import Answer, Declined, LinkConfig, Task, serve

SITE = SETTINGS["site"]


def _rogue(task: Task, answer: Answer) -> RecordDict:
    """What a site would send that does not run our code."""
    fault = json.loads(task.config).get("rogue", {}).get(SITE) if task.kind == "train" else None
    records = tasks.records_of(task, answer)
    if fault == "extra":
        records["metrics"] = MetricRecord({"num-examples": 10**9})
    elif fault is not None:
        vector = np.array(answer.vector)
        if fault == "nan":
            vector[0] = np.nan
        elif fault == "float64":
            vector = vector.astype(np.float64)
        elif fault == "short":
            vector = vector[:-1]
        records["parameters"] = ArrayRecord({"flat": Array(vector)})
    return records


def handle(task: Task) -> Answer:
    """Price with an envelope that names the run; train by adding this site's number."""
    config = json.loads(task.config)
    if task.kind == "price":
        if SITE in config.get("decline", {}):
            raise Declined(config["decline"][SITE])
        return Answer(f"grant {task.run} {SITE}".encode(), None)
    if config.get("die", {}).get(SITE) == task.round_index:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("raise", {}).get(SITE) == task.round_index:
        raise RuntimeError("patient 4711")  # must never reach the coordinator
    time.sleep(config.get("sleep", {}).get(SITE, 0.0))
    assert task.vector is not None
    vector = (task.vector + np.float32(config["add"][SITE])).astype(np.float32)
    return Answer(sha256(f"{task.run} {task.round_index} {SITE}".encode() + vector.tobytes()).digest(), vector)


def say(state: str) -> None:
    """Report a state to the test."""
    print(state, flush=True)


if __name__ == "__main__":
    vars(federation)["records_of"] = _rogue
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ca, cert, key, node_key = (Path(SETTINGS[name]) for name in ("ca", "cert", "key", "node_key"))
    link = LinkConfig(SETTINGS["superlink"], ca, cert, key, node_key, SETTINGS["digest"])
    serve(link, handle, stop, say)
