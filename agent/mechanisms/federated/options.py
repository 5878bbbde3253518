"""The options of ``release model``; argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

HELP: Final = "the network of a task file, trained under differential privacy by this hospital alone"


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what this mechanism is configured by, and how its model is approved before anything is released."""
    command.add_argument("--config", type=Path, required=True, help="TOML: the task file, privacy")
    blank = "release nothing; write the untrained model here, for the coordinator to approve its architecture"
    command.add_argument("--blank", type=Path, help=blank)
