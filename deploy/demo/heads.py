"""A clinic of heads: MRI of made-up persons, and the network that gives them other faces (C-DeID-GAN).

The persons are made of one real head, ch2 of Debian's package ``mricron-data``. Those of whom the network learns and
those of the clinic are not the same.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import nibabel
import numpy as np
from scipy import ndimage

from agent.defacing.brain_extraction import Brain
from agent.defacing.deid_gan.network import PRESETS
from agent.defacing.deid_gan.remodeller_training import train_remodeller
from agent.defacing.deid_gan.training import VolumeGanTraining
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.domain import Volume
from agent.models.training_loop import TrainingProgress
from deploy.phantoms.head_files import nifti
from deploy.phantoms.heads import HeadPhantoms, isotropic
from deploy.phantoms.scanner_files import find_head
from protos.common.errors import RefusedError

SITE: Final = "site-c"
NETWORK: Final = "remodeller"
PEOPLE: Final = 32  # of whom the network learns
FIRST: Final = 1_000  # their first number: no test and no clinic has one of them
MM: Final = 4.0  # of whom the network learns
# the paper has no absolute error: without it the volumes leave [0, 1] after a hundred steps, and do not come back
TRAINING: Final = VolumeGanTraining(
    PRESETS["small32"], steps=800, ema=0.995, absolute=300.0, checkpoint_every=100, say_every=25
)
PATIENTS: Final = 38  # of the clinic: with fewer than 36 heads an attacker's power cannot be shown
CLINIC_MM: Final = 3.0  # of its scans: a face is not found in coarser ones, and they are left out
_BRAIN: Final = "ch2bet.nii.gz"
_CONFIG: Final = """mechanism = "remodel"

[cohort]
modality = "MR"
shape = {shape}
spacing = {spacing}

[network]
remodeller = "remodeller.safetensors"
remodeller_sha256 = "{sha256}"
"""


class NoHeadError(RefusedError):
    """The real head is not on this machine."""


def there() -> bool:
    """Is the real head on this machine, and its brain?"""
    head = find_head()
    return head is not None and head.with_name(_BRAIN).exists()


@cache
def phantoms() -> HeadPhantoms:
    """Made-up persons.

    Raises:
        NoHeadError: the head that they are made of is not installed.
    """
    found = find_head()
    if found is None or not found.with_name(_BRAIN).exists():
        raise NoHeadError("the real head is not installed: apt-get install mricron-data")
    head, bet = (nibabel.Nifti1Image.from_filename(path) for path in (found, found.with_name(_BRAIN)))
    pieces, _ = ndimage.label(np.asarray(bet.dataobj) > 0)
    brain = pieces == 1 + int(np.argmax(np.bincount(pieces.ravel())[1:]))
    volume = Volume(np.ascontiguousarray(np.asarray(head.dataobj)), np.asarray(head.affine, dtype=np.float64))
    return HeadPhantoms(volume, brain)


def heads(people: int = PEOPLE, mm: float = MM, first: int = FIRST) -> Iterator[tuple[str, HeadScan]]:
    """Persons with the brains and places that they were made with."""
    for number in range(first, first + people):
        scan = phantoms().scan(number, 0, mm)
        brain = Brain(scan.brain, 1.0, scan.to_template)
        yield f"phantom-{number}", HeadScan(scan.volume, head_mask(scan.volume), brain)


def write_clinic(folder: Path) -> int:
    """The clinic's patients as NIfTI, with their list ``nifti.csv``; the number of files."""
    (folder / "heads").mkdir(parents=True)
    rows = [("file", "patient_id")]
    for number in range(PATIENTS):
        name = f"heads/{number:04d}.nii.gz"
        nifti(folder / name, phantoms().scan(number, 0, CLINIC_MM).volume, dtype="int16")
        rows.append((name, f"MRN-HEAD-C{number:04d}"))
    with (folder / "nifti.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return PATIENTS


def configure(work: Path, sha256: str) -> Path:
    """The release's configuration, written beside the network, whose SHA-256 is given."""
    shape = list(isotropic(CLINIC_MM).shape)
    path = work / "networks" / "remodel.toml"
    path.write_text(_CONFIG.format(shape=shape, spacing=[CLINIC_MM] * 3, sha256=sha256))
    return path


def train(
    folder: Path,
    steps: int = TRAINING.steps,
    people: int = PEOPLE,
    say: Callable[[TrainingProgress], None] = lambda _: None,
) -> bytes:
    """The network's file; a run in the same folder that was interrupted goes on.

    Raises:
        NoHeadError: the head that the persons are made of is not installed.
    """
    return train_remodeller(heads(people), replace(TRAINING, steps=steps), folder, say)


def recipe_words() -> dict[str, Any]:
    """What decides what the network learns, as JSON."""
    return {"public": ["heads", {"people": PEOPLE, "first": FIRST, "mm": MM}], "training": repr(TRAINING)}
