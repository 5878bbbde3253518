"""The process of a run, held to loopback like the coordinator that starts it: its notes lie beside that one's."""

# ruff: noqa: E402 - the guard comes first

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.flower.loopback import guard

guard(Path(os.environ["FLWR_HOME"]).parent / "network.txt")

from coordinator.federation.run_main import main

if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
