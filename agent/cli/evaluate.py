"""``evaluate``: a released set, judged by patients of whom it knows nothing, on a page for this site alone."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent import commands
from agent.desk import open_desk
from agent.edges.centroids import read_centroids
from agent.edges.evaluation_page import WARNING, render
from agent.edges.page import write
from agent.edges.privimage import read_privimage
from agent.edges.synthesis import document
from agent.evaluating import NotHeldOut, held_out, look, subject_of
from agent.measures.evaluation import Evaluation, TooFewPatients
from agent.mechanisms import Centroids, PrivImage
from agent.nouns import SyntheticSet
from agent.synthesis_commands import OUT, BadOrder, answered
from protos.artifact import BadArtifact
from protos.blocks import Opened
from protos.shards import read_images

EXPECTED = (NotHeldOut, TooFewPatients)
_READERS: Final[dict[str, Any]] = {PrivImage.name: read_privimage, Centroids.name: read_centroids}


def run(arguments: argparse.Namespace) -> int:
    """``evaluate``; what it expects to go wrong becomes a sentence."""
    return answered(evaluate, arguments, EXPECTED)


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure a set on held-out patients, and write a page for this site."""
    if arguments.out.exists() or not arguments.out.parent.is_dir():  # a page is never written over
        raise BadOrder(f"{arguments.out.name}: name a new file, in a folder that is there")
    say = lambda step, detail: commands.tell(step, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_desk(arguments.home, say, arguments.project) as desk:
        name = str(document(arguments.config, ()).raw.get("mechanism"))
        if name not in _READERS:
            raise BadOrder(f"{arguments.config.name}: evaluated are sets of {' and '.join(_READERS)}")
        made = _READERS[name](arguments.config, desk.settings.public_components)
        others = held_out(made.selection, arguments.part)
        shown = _set(arguments.set)
        try:
            subject = subject_of(made.mechanism, shown)
        except ValueError as error:
            raise BadOrder(f"{arguments.set.name}: {error}") from None
        rng = np.random.default_rng(secrets.randbits(256))
        found, looks = look(desk.site, subject, others, rng)
        desk.log.info("evaluated", mechanism=name, count=looks)
        told = f"{name}: {arguments.set.name}, judged by the patients of part {arguments.part}"
        try:
            write(arguments.out, render(found, shown, told, looks))
        except FileExistsError:
            raise BadOrder(f"{arguments.out.name} has come up meanwhile: name a new file") from None
    _print(arguments, found, looks)
    return 0


def _set(path: Path) -> SyntheticSet:
    """The released pictures, as ``release --out`` wrote them.

    Raises:
        BadOrder: it cannot be read, or is no set of PNG.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadOrder(f"{path.name}: {error.strerror}") from None
    try:
        return SyntheticSet(*read_images(Opened.of(descriptor)))
    except (BadArtifact, OSError) as error:
        told = "give the file that `release --form png --out` wrote, not sealed to a reader"
        raise BadOrder(f"{path.name} is no set of pictures ({error}): {told}") from None
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
    OUT.print(f"held-out patients of this modality have been looked at {looks} time(s)")
