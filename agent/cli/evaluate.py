"""``evaluate``: evaluate a released set on held-out patients, with a page for this site alone."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.cli.output import OUT, print_progress
from agent.domain import SyntheticSet
from agent.errors import CommandError
from agent.evaluation.released_set import Evaluation
from agent.mechanisms.centroids.config import read_centroids
from agent.mechanisms.common.config import document
from agent.mechanisms.privimage.config import read_privimage
from agent.mechanisms.registry import Centroids, PrivImage
from agent.release.held_out_evaluation import held_out, look, subject_of
from agent.reports.evaluation import WARNING, render
from agent.reports.html_page import write
from agent.service.making import open_making
from protos.artifacts.arrays import ArtifactFormatError
from protos.artifacts.byte_source import FileSource
from protos.artifacts.shards import read_images

_READERS: Final[dict[str, Any]] = {PrivImage.name: read_privimage, Centroids.name: read_centroids}


def run(arguments: argparse.Namespace) -> int:
    """Measure a set on held-out patients, and write a page for this site."""
    if arguments.out.exists() or not arguments.out.parent.is_dir():  # a page is never written over
        raise CommandError(f"{arguments.out.name}: name a new file in an existing folder")
    say = lambda step, detail: print_progress(step, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_making(arguments.home, say, arguments.project) as runtime:
        name = str(document(arguments.config, ()).raw.get("mechanism"))
        if name not in _READERS:
            raise CommandError(f"{arguments.config.name}: this command evaluates sets of {' and '.join(_READERS)}")
        made = _READERS[name](arguments.config, runtime.settings.public_components)
        others = held_out(made.selection, arguments.part)
        shown = _set(arguments.set)
        try:
            subject = subject_of(made.mechanism, shown)
        except ValueError as error:
            raise CommandError(f"{arguments.set.name}: {error}") from None
        rng = np.random.default_rng(secrets.randbits(256))
        found, looks = look(runtime.site, subject, others, rng)
        runtime.log.info("evaluated", mechanism=name, count=looks)
        told = f"{name}: {arguments.set.name}, evaluated on the patients of part {arguments.part}"
        try:
            write(arguments.out, render(found, shown, told, looks))
        except FileExistsError:
            raise CommandError(f"{arguments.out.name} was created meanwhile: name a new file") from None
    _print(arguments, found, looks)
    return 0


def _set(path: Path) -> SyntheticSet:
    """The released images, as ``release --out`` wrote them.

    Raises:
        CommandError: it cannot be read, or is no set of PNG.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CommandError(f"{path.name}: {error.strerror}") from None
    try:
        return SyntheticSet(*read_images(FileSource.of(descriptor)))
    except (ArtifactFormatError, OSError) as error:
        told = "give the file that `release --form png --out` wrote, not encrypted to a recipient"
        raise CommandError(f"{path.name} is not a set of images ({error}): {told}") from None
    finally:
        os.close(descriptor)


def _print(arguments: argparse.Namespace, found: Evaluation, looks: int) -> None:
    """Where the page is, and how many looks there were. No figure: what is printed is soon kept elsewhere."""
    parts = {"utility": found.taught, "fidelity": found.fidelity, "semantics": found.semantics}
    missing = {name: part for name, part in parts.items() if isinstance(part, str)}
    if arguments.json:
        line = {"page": arguments.out.name, "part": arguments.part, "looks": looks}
        line |= {"measured": [name for name in parts if name not in missing], "missing": missing}
        sys.stdout.write(json.dumps(line) + "\n")
        return
    OUT.print(f"wrote {arguments.out.name}. {WARNING}", markup=False, soft_wrap=True)
    for name, why in missing.items():
        OUT.print(f"{name} was not measured: {why}", markup=False, soft_wrap=True)
    OUT.print(f"the held-out patients of this modality have been evaluated {looks} time(s)")
