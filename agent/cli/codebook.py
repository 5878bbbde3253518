"""The command that makes the codebook of ``release centroids``, of public images."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from functools import partial

import numpy as np
from rich.progress import Progress, TaskID

from agent.cli.output import OUT, as_sentences, progress_columns, require_device
from agent.mechanisms.centroids.config import FILE as CODEBOOK
from agent.mechanisms.centroids.config import make_codebook, read_codec
from agent.models.image_folder import read_image_folder
from protos.common.durable_files import replace_file


def run(arguments: argparse.Namespace) -> int:
    """Make a codebook of public images by a codec, for `release centroids`."""
    require_device(arguments.device, "--device cpu")
    with as_sentences(), progress_columns(arguments.json) as bar:
        codec = read_codec(arguments.generator, arguments.encoder, arguments.sha256.lower(), arguments.device)
        tasks = [bar.add_task(name, total=None, told="") for name in ("reading", "inverting")]
        told_by = [partial(_moved, bar, task) for task in tasks]
        images, _names = read_image_folder(arguments.pictures, codec.shape[0], len(codec.shape) == 2, told_by[0])
        rng = np.random.default_rng(arguments.seed)
        raw = make_codebook(codec, images, (arguments.cells, arguments.dims), rng, told_by[1])
        over = int(bar.tasks[0].total or 0) - len(images)
    arguments.out.mkdir(parents=True, exist_ok=True)
    replace_file(path := arguments.out / CODEBOOK, raw)
    told = {"network": "codebook", "file": path.name, "sha256": hashlib.sha256(raw).hexdigest()}
    if arguments.json:
        sys.stdout.write(json.dumps({**told, "pictures": len(images), "passed_over": over}) + "\n")
        return 0
    text = f"{path}: {arguments.cells} cells, of {len(images)} images; {over} skipped"
    OUT.print(text, markup=False, soft_wrap=True)
    OUT.print(
        "if no patient of the cohort is in them, vouch for it in site.toml's public_components:", soft_wrap=True
    )
    OUT.print(told["sha256"])
    return 0


def _moved(bar: Progress, task: TaskID, done: int, every: int) -> None:
    bar.update(task, completed=done, total=every)
