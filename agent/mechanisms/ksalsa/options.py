"""The options of ``release ksalsa``; argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

HELP: Final = "a k-anonymous synthetic set by local style alignment (k-SALSA)"


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what this mechanism is configured by."""
    command.add_argument("--config", type=Path, required=True, help="TOML: cohort, clusters, networks")
