"""The folder with the results of a prediction: whole, or not at all. No torch.

It appears under its name when all of it is durable. A command that is killed while it writes leaves NAME.part beside
it, and nothing that names a patient anywhere else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.errors import CommandError
from protos.common.durable_files import flush_directory, write_new

NOTICE: Final = "Research, not for diagnosis"  # in every result


def refuse_place(out: Path, kept: Sequence[Path]) -> None:
    """Results are never written over a folder, nor where the agent reads images or keeps what is its own.

    Raises:
        CommandError: they would be.
    """
    if out.exists() or out.is_symlink() or not out.parent.is_dir():
        raise CommandError(f"{out.name}: name a new folder for the results in an existing folder")
    if any(out.parent.resolve().is_relative_to(folder.resolve()) for folder in kept):
        raise CommandError(f"{out.name}: this folder is the agent's own, or `ingest` reads it: name one elsewhere")


def write(out: Path, files: Mapping[str, bytes]) -> None:
    """The folder, whole or not at all.

    Raises:
        CommandError: there is a folder of this name now, or a kill left a part of one.
        OSError: the disk; nothing is left.
    """
    part = out.with_name(f"{out.name}.part")
    try:
        part.mkdir(mode=0o700)
    except FileExistsError:
        raise CommandError(
            f"{part.name} is there: what a killed command left, or yours. Look, and remove it"
        ) from None
    try:
        for name, body in files.items():
            write_new(part / name, body, 0o600)
        flush_directory(part)
        if out.exists():
            raise CommandError(f"{out.name} was created meanwhile: name a new folder")
        os.rename(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    flush_directory(out.parent)
