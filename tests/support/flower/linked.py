"""The agent's link process as the contract test starts it: under the guard, and rogue where the run's config says so.

python -m tests.support.flower.linked FD RELAY SETUP        (in place of agent.federation.supernode_main)
"""

# ruff: noqa: E402 - Flower is imported under the guard

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support.flower.loopback import guard

HOME, SITE = Path(os.environ["LAZARET_TEST_HOME"]), os.environ["LAZARET_TEST_SITE"]
guard(HOME / "network.txt")

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from agent.federation import supernode, supernode_main
from agent.federation.tasks import Reply, RoundTask

FAULT: dict[str, str | None] = {"now": None}
READ, WRITE = supernode.read_task, supernode.records_of  # they are replaced below


def _read_task(kind: str, content: RecordDict) -> RoundTask:
    """Note what to do wrong."""
    task = READ(kind, content)
    FAULT["now"] = json.loads(task.config).get("rogue", {}).get(SITE) if task.kind == "train" else None
    return task


def _records_of(reply: Reply) -> RecordDict:
    """What a site would send that does not run our code."""
    made, fault = WRITE(reply), FAULT["now"]
    if fault == "extra":
        made["metrics"] = MetricRecord({"num-examples": 10**9})
    elif fault is not None:
        assert reply.answer is not None
        vector = np.array(reply.answer.vector)
        if fault == "nan":
            vector[0] = np.nan
        elif fault == "float64":
            vector = vector.astype(np.float64)
        elif fault == "short":
            vector = vector[:-1]
        made["parameters"] = ArrayRecord({"flat": Array(vector)})
    return made


if __name__ == "__main__":
    heavy = {"torch", "agent.storage.vault", "policies.ledger.store"} & sys.modules.keys()
    (HOME / "link.txt").write_text(f"{os.getpid()} {' '.join(sorted(heavy))}")
    vars(supernode).update(read_task=_read_task, records_of=_records_of)
    sys.exit(supernode_main.main(*sys.argv[1:]))
