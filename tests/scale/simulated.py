"""A simulated run with many virtual sites, measured with everything that Ray starts.

python -m tests.scale simulate --sites 200 [--rounds 2] [--json]
"""

# ruff: noqa: E402 - configure_environment comes first, as in the product

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from protos.federation.flower_environment import configure_environment

configure_environment(Path(tempfile.gettempdir()) / f"lazaret-simulation-{os.getpid()}")

from coordinator.federation.simulation import RoundSeen, SimulationUnavailableError, simulate
from coordinator.federation.virtual_sites import Scenario
from policies.review.policy import preset
from tests.scale.jobs import job
from tests.scale.measure import Process


def measured(players: Scenario, rounds: int, strategy: str) -> dict[str, Any]:
    """What it showed, and what this process and its children used."""
    began = time.monotonic()

    def tell(seen: object) -> None:
        if isinstance(seen, RoundSeen):
            print(f"round {seen.round}: {seen.seconds:.1f} s, accuracy {seen.accuracy:.3f}", file=sys.stderr)

    with Process(os.getpid()) as used:
        shown = simulate(job(rounds, strategy), players, preset("internal"), tell)
    return {**shown.to_json(), "wall_seconds": round(time.monotonic() - began, 1), "used": used.to_json()}


__all__ = ["SimulationUnavailableError", "measured"]
