"""The options of ``release privimage``, and of ``train semantics`` for its semantic query; argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from agent.mechanisms.common.option_types import count

HELP: Final = "a differentially private synthetic set by a model fine-tuned with DP-SGD (PrivImage)"


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what this mechanism is configured by."""
    command.add_argument("--config", type=Path, required=True, help="TOML: cohort, privacy, model")


def add_semantics_options(command: argparse.ArgumentParser) -> None:
    """Add what ``train semantics`` learns by: labels, or clusters of features."""
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--labels", help='CSV: file,label; or "folders": an image\'s folder names its label')
    which.add_argument("--clusters", type=count, help="number of feature clusters, if there are no labels")
    command.add_argument(
        "--features", type=Path, help="for --clusters: a file of `train features` (default: random features)"
    )
