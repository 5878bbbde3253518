"""``draw``: draw images from a released model. Needs no site: anyone with the file can draw."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agent.cli.output import OUT, as_sentences, progress_columns, require_device
from agent.errors import CommandError
from agent.models.diffusion.latent import ComputeSettings, LatentSampler, latent_from
from agent.models.diffusion.prompts import Conditions
from agent.models.training_loop import torch_generator

LABELS: Final = "labels.csv"
EVERY: Final = "all"  # conditions
_BLOCK: Final = 256  # images in memory at once


def run(arguments: argparse.Namespace) -> int:
    """Draw images and write them, with a list of what each shows, into a new folder: all of them, or none."""
    require_device(arguments.device, "--device cpu")
    refuse_folder(arguments.out)
    if not arguments.model.is_file():
        raise CommandError(f"--model: file not found: {arguments.model.name}")
    raw = arguments.model.read_bytes()
    drawer = latent_from(raw)
    names, drawing = asked(drawer.conditions, arguments.condition), drawer.drawing
    labels = np.array([drawer.conditions.place(name) for name in names], np.int64).repeat(arguments.count)
    with as_sentences(), progress_columns(arguments.json) as bar:
        task = bar.add_task("drawing", total=len(labels), told="")
        _whole(
            arguments.out,
            lambda folder: _fill(folder, drawer, labels, arguments, lambda n: bar.update(task, completed=n)),
        )
    told = {"out": arguments.out.name, "pictures": len(labels), "conditions": list(names), "seed": arguments.seed}
    if arguments.json:
        sys.stdout.write(json.dumps({**told, "model_sha256": hashlib.sha256(raw).hexdigest()}) + "\n")
        return 0
    each = f"{arguments.count} of {', '.join(names)}"
    text = f"{arguments.out.name}: {len(labels)} images, {each}; {LABELS} lists them"
    OUT.print(text, markup=False, soft_wrap=True)
    OUT.print(f"guidance {drawing.guidance:g}, as the file has it; these images are not vetted", soft_wrap=True)
    return 0


def refuse_folder(folder: Path) -> None:
    """A folder is never added to, and one in no folder is not made.

    Raises:
        CommandError: either.
    """
    if folder.exists() or not folder.parent.is_dir():
        raise CommandError(f"{folder.name}: name a new folder in an existing one")


def asked(conditions: Conditions, condition: str) -> tuple[str, ...]:
    """The conditions that are meant by a name, or by ``all``.

    Raises:
        CommandError: the model knows none of this name; the text lists those that it knows, which are public.
    """
    if condition in conditions.names:
        return (condition,)
    if condition != EVERY:
        raise CommandError(
            f"--condition: the model knows {', '.join(conditions.names)}; or {EVERY}, for each of them"
        )
    return conditions.names


def _whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """A folder with all that ``fill`` writes into it, or none.

    Raises:
        CommandError: it has come up meanwhile, or the disk does not take it.
    """
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(part)
        refuse_folder(folder)
        part.rename(folder)
    except OSError as error:
        raise CommandError(f"{folder.name}: {error.strerror}: nothing is kept") from None
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(part)


def _fill(
    folder: Path,
    drawer: LatentSampler,
    labels: NDArray[np.int64],
    arguments: argparse.Namespace,
    say: Callable[[int], None],
) -> None:
    """Draw, and write one file after the other; in the order of the labels, from one generator."""
    drawer = replace(drawer, autoencoder=drawer.autoencoder.to(arguments.device))
    generator, where = torch_generator(arguments.seed), ComputeSettings(arguments.device, _BLOCK)
    wide = len(str(len(labels) - 1))
    with (folder / LABELS).open("x", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(("file", "label"))
        for start in range(0, len(labels), _BLOCK):
            block = labels[start : start + _BLOCK]
            for number, (pixels, label) in enumerate(
                zip(drawer.sample(block, generator, where), block, strict=True), start
            ):
                name = f"{number:0{wide}d}.png"
                Image.fromarray(pixels).save(folder / name)
                rows.writerow((name, drawer.conditions.names[label]))
            say(start + len(block))
