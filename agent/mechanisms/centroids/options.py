"""The options of ``release centroids``, and of ``train codebook`` for its cells; argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from agent.mechanisms.common.option_types import count

HELP: Final = "a differentially private synthetic set by noisy averages of a public codebook's cells"
CODEBOOK_HELP: Final = "make a codebook of public images, the cells of `release centroids`"


def add_release_options(command: argparse.ArgumentParser) -> None:
    """Add what this mechanism is configured by."""
    command.add_argument("--config", type=Path, required=True, help="TOML: cohort, privacy, cells")


def add_codebook_options(command: argparse.ArgumentParser) -> None:
    """Add what ``train codebook`` makes a codebook of, and how large it becomes."""
    command.add_argument(
        "--pictures", type=Path, required=True, help="a folder of PNG or JPEG, without any patient of yours"
    )
    command.add_argument("--generator", required=True, help="a file of `train generator`, or KIND:FILE")
    command.add_argument("--encoder", default="", help="a file of `train encoder`; not with restyle:FILE")
    command.add_argument("--sha256", default="", help="SHA-256 of a published generator, as its authors give it")
    command.add_argument(
        "--cells", type=count, required=True, help="number of cells; a cell needs about a hundred patients"
    )
    command.add_argument("--dims", type=count, default=16, help="dimensions of the subspace, at most 32")
    command.add_argument("--out", type=Path, required=True, help="the codebook's folder")
