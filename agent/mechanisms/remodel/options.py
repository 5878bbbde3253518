"""The options of ``release remodel``, and of ``train remodeller`` for its network; argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from agent.mechanisms.common.option_types import count

HELP: Final = "patients' own head scans with other faces (C-DeID-GAN): the brain itself remains linkable"
REMODELLER_HELP: Final = "train the network of `deface --method remodel` on public heads; run again to resume"


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what this mechanism is configured by."""
    command.add_argument("--config", type=Path, required=True, help="TOML: cohort, network")


def add_remodeller_options(command: argparse.ArgumentParser) -> None:
    """Add what ``train remodeller`` learns from, and how large its network is."""
    heads = "a folder of head MRI, NIfTI or DICOM: a BIDS folder, or one volume per person; no patient of yours"
    command.add_argument("--heads", type=Path, required=True, help=heads)
    command.add_argument(
        "--out", type=Path, required=True, help="folder for examined heads, checkpoint, network, images"
    )
    command.add_argument("--side", type=count, default=64, help="voxels of the cube: 32, 64 or 128")
    command.add_argument("--steps", type=count, help="number of steps (default: the preset's)")
