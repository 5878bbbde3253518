"""The options of ``release ksame``; argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

HELP: Final = "a k-anonymous synthetic set (k-Same-PCA)"


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what only this mechanism has: it needs no configuration file."""
    command.add_argument("--basis", type=Path, required=True, help="PCA basis fitted on public images")
    command.add_argument("--k", type=int, default=11, help="distinct patients behind every image")
    command.add_argument("--l-diversity", type=int, default=2, help="distinct labels behind every image")
    command.add_argument("--modality", required=True, help="DICOM modality of the cohort")
    command.add_argument("--vetting", type=Path, help="TOML: the table [vetting] (default: refuse copies only)")
