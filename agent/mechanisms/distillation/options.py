"""The options of ``release distill`` and ``distill-dp``, of the training of their networks, and of ``draw``.

argparse alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from agent.mechanisms.common.option_types import count

HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        "distill": "a vetted, not differentially private synthetic set or model, vetted against every patient "
        "(Privacy Distillation)",
        "distill-dp": "a differentially private synthetic set or model, by a teacher under DP-SGD, vetted against "
        "public images",
    }
)
DRAW_HELP: Final = "generate images with a model that `release distill` released"
NETWORKS: Final = ("autoencoder", "verifier", "aligner")
AUTOENCODERS: Final = ("tiny16", "tiny32", "coarse32", "small64", "base256", "base512")
_TOML: Final[Mapping[str, str]] = MappingProxyType({"distill": "cohort, networks", "distill-dp": "as for distill"})


def add_release_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add what ``name`` is configured by, and how its model is approved before anything is released."""
    command.add_argument("--config", type=Path, required=True, help=f"TOML: {_TOML[name]}")
    blank = "release nothing; write the untrained model here, for the coordinator to approve its architecture"
    command.add_argument("--blank", type=Path, help=blank)


def add_training_options(command: argparse.ArgumentParser, network: str) -> None:
    """Add what only the training of ``network``, of ``NETWORKS``, has."""
    who = "CSV: file,identity"
    if network == "autoencoder":
        command.add_argument("--preset", default="", help=f"{', '.join(AUTOENCODERS)} (default: the one for --side)")
        features = "for the perceptual loss: a file of `train features` of public images (default: random)"
        command.add_argument("--features", type=Path, help=features)
    elif network == "verifier":
        command.add_argument("--identities", type=Path, required=True, help=who)
        second = "train the second verifier, which only measures: another seed, split and trunk"
        command.add_argument("--second", action="store_true", help=second)
        through = "a file of `train autoencoder`: the verifier also learns its reconstructions"
        command.add_argument("--autoencoder", type=Path, help=through)
    else:
        labels = 'CSV: file,label; or "folders": an image\'s folder names its condition'
        command.add_argument("--labels", required=True, help=labels)
        templates = "a text file with a prompt on each line, {} for the condition"
        command.add_argument("--templates", type=Path, help=templates)
        command.add_argument("--identities", type=Path, help=f"{who} (default: each image is another person's)")


def add_draw_options(command: argparse.ArgumentParser) -> None:
    """Add which images ``draw`` draws, and by which model."""
    command.add_argument("--model", type=Path, required=True, help="the released model's file")
    command.add_argument("--count", type=count, required=True, help="number of images; with all, for each condition")
    command.add_argument("--condition", required=True, help="what the images show, as the model names it, or all")
    command.add_argument("--out", type=Path, required=True, help="a new folder for PNG files and labels.csv")
