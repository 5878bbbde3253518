"""The command that makes the codebook of ``release centroids``, of public pictures."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from functools import partial

import numpy as np
from rich.progress import Progress, TaskID

from agent.edges.centroids import FILE as CODEBOOK
from agent.edges.centroids import make_codebook, read_codec
from agent.edges.pictures import read_pictures
from agent.synthesis_commands import OUT, answered, as_sentences, shown, there
from agent.training.loop import write_whole


def run(arguments: argparse.Namespace) -> int:
    """``train codebook``; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered(make, arguments)


def make(arguments: argparse.Namespace) -> int:
    """Make a codebook of public pictures by a codec, for `release centroids`."""
    there(arguments.device, "--device cpu")
    with as_sentences(), shown(arguments.json) as bar:
        codec = read_codec(arguments.generator, arguments.encoder, arguments.sha256.lower(), arguments.device)
        tasks = [bar.add_task(name, total=None, told="") for name in ("reading", "inverting")]
        told_by = [partial(_moved, bar, task) for task in tasks]
        images, _names = read_pictures(arguments.pictures, codec.shape[0], len(codec.shape) == 2, told_by[0])
        rng = np.random.default_rng(arguments.seed)
        raw = make_codebook(codec, images, (arguments.cells, arguments.dims), rng, told_by[1])
        over = int(bar.tasks[0].total or 0) - len(images)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(path := arguments.out / CODEBOOK, raw)
    told = {"network": "codebook", "file": path.name, "sha256": hashlib.sha256(raw).hexdigest()}
    if arguments.json:
        sys.stdout.write(json.dumps({**told, "pictures": len(images), "passed_over": over}) + "\n")
        return 0
    text = f"{path}: {arguments.cells} cells, of {len(images)} pictures; {over} passed over"
    OUT.print(text, markup=False, soft_wrap=True)
    OUT.print("if nobody of the cohort is on them, vouch for it in site.toml's public_components:", soft_wrap=True)
    OUT.print(told["sha256"])
    return 0


def _moved(bar: Progress, task: TaskID, done: int, every: int) -> None:
    bar.update(task, completed=done, total=every)
