"""Small folders of public images for `round simulate`, and a task that learns them. No torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from policies.tasks.task import Task
from tests.support.small_tasks import classification

CLASSES: Final = ("dark", "bright")
HEAD: Final = ("file", "patient", "label")


def small_task(**more: Any) -> Task:
    """Two classes of 8 x 8 pictures: three rounds of four full batches."""
    constants = {"sampling_rate": 1.0, "rounds": 3, "steps_per_round": 4, "clip": 1.0, "learning_rate": 0.0}
    return classification(CLASSES, (8, 8), **{**constants, "public_patients": 20, **more})


def public_folder(root: Path, patients: int = 100, sites: Sequence[str] = ()) -> Path:
    """Pictures whose left half is the brighter one in one class, one of each patient; with sites, in turn."""
    root.mkdir(parents=True)
    dice = np.random.default_rng(5)
    rows = []
    for number in range(patients):
        picture = dice.normal(128, 30, (8, 8))
        picture += np.where(np.arange(8) < 4, 40, -40) * (1 if number % 2 else -1)
        Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(root / f"{number:04d}.png")
        site = (sites[(number // 2) % len(sites)],) if sites else ()
        rows.append((f"{number:04d}.png", f"patient-{number:04d}", CLASSES[number % 2], *site))
    write_table(root, (*HEAD, *(("site",) if sites else ())), rows)
    (root / "SOURCE.txt").write_text("made for tests: nobody's\n")
    return root


def write_table(root: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The folder's ``labels.csv``."""
    with (root / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([head, *rows])
