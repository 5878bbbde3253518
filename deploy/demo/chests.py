"""Chest clinics: a teacher on their radiographs, and a set of its student's (Privacy Distillation).

The four networks that the release names have learned from phantoms of other people.
The third hospital's set is of level C, which neither its policy nor the federation's admits unless it is written into
them. The second hospital's teacher learns with noise, and its set is of level A.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from agent.mechanisms.common.generative_model import PublicImages
from agent.models.image_folder import read_image_folder
from deploy.phantoms import chest
from policies.accounting.claims import SubsampledGaussian

SITES: Final[Mapping[str, str]] = {"distill": "site-c", "distill-dp": "site-b"}
SIDE: Final = 32
# people of the public set, two visits each: a quarter of them settles a verifier's threshold
PUBLIC: Final[Mapping[str, int]] = {"people": 800, "seed": 2025, "size": SIDE, "visits": 2, "most": 1}
PATIENTS: Final = 120  # of the clinic, two visits each; every other one by Computed Radiography
STEPS: Final = {"autoencoder": 300, "verifier": 400, "unseen": 400, "aligner": 150}  # fewer, and they are refused
NOISE: Final = 5.0  # of the private teacher, in units of the clip
NOISY_STEPS: Final = 20
RATE: Final = 0.25
TEACHER: Final = 120  # steps, and the student's
CONDITIONS: Final = tuple(sorted(chest.label_of(found) for found in chest.conditions(1)))
_CONFIG: Final = """mechanism = "{mechanism}"
conditions = {conditions}

[cohort]
modality = "CR"

[networks]
{networks}
[teacher]
preset = "tiny"
steps = {steps}

[student]
steps = {steps}

[sampling]
candidates = 4
groups = 25

[output]
pictures = 120
"""
_PRIVATE: Final = """
[privacy]
noise_multiplier = {noise}
steps = {steps}
sampling_rate = {rate}
public_patients = 250
clip = 0.001
images_per_patient = 2

[public]
pictures = "../public-chests/pictures"
labels = "../public-chests/labels.csv"
"""


def write_public(folder: Path) -> None:
    """Public images as PNG, who is on each, and what each shows: ``identities.csv`` and ``labels.csv``."""
    (folder / "pictures").mkdir(parents=True)
    who, what = [("file", "identity")], [("file", "label")]
    people, dice, size = PUBLIC["people"], np.random.default_rng(PUBLIC["seed"]), PUBLIC["size"]
    for patient in chest.chest_patients(people, dice, size, visits=PUBLIC["visits"], most=PUBLIC["most"]):
        for visit, (picture, findings) in enumerate(zip(patient.radiographs, patient.findings, strict=True)):
            name = f"{patient.number:04d}-{visit}.png"
            Image.fromarray(picture).save(folder / "pictures" / name)
            who.append((name, str(patient.number)))
            what.append((name, chest.label_of(findings)))
    for name, rows in (("identities.csv", who), ("labels.csv", what)):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def write_clinic(folder: Path, site: int) -> int:
    """The patients of one hospital's clinic as DICOM; the number of files."""
    made = chest.chest_patients(PATIENTS, np.random.default_rng([11, site]), SIDE, visits=2, most=1)
    chest.write_clinic(folder, site, made, np.random.default_rng([12, site]))
    return sum(1 for path in folder.rglob("*.dcm"))


def images_sha256(folder: Path) -> str:
    """What the site vouches for, of what :func:`write_public` wrote."""
    pictures, _ = read_image_folder(folder / "pictures", SIDE, grey=True)
    return PublicImages(pictures, np.zeros(len(pictures), np.int64)).sha256


def training(network: str, public: Path, networks: Path) -> list[str]:
    """What follows ``train`` to make one network of ``STEPS``, of what :func:`write_public` wrote."""
    del networks  # none of them builds on another
    kind = "verifier" if network == "unseen" else network
    words = [kind, "--side", str(SIDE), "--grey", "--pictures", str(public / "pictures")]
    words += ["--steps", str(STEPS[network])]
    if kind == "aligner":
        words += ["--labels", str(public / "labels.csv")]
    if kind in ("aligner", "verifier"):
        words += ["--identities", str(public / "identities.csv")]
    return [*words, "--second"] if network == "unseen" else words


def configure(mechanism: str, work: Path, digests: Mapping[str, str]) -> Path:
    """The release's configuration, written beside the networks, whose SHA-256 by name are ``digests``."""
    lines = [f'{name} = "{name}.safetensors"\n{name}_sha256 = "{digests[name]}"\n' for name in STEPS]
    path = work / "networks" / f"{mechanism}.toml"
    text = _CONFIG.format(
        mechanism=mechanism, conditions=json.dumps(CONDITIONS), networks="".join(lines), steps=TEACHER
    )
    private = _PRIVATE.format(noise=NOISE, steps=NOISY_STEPS, rate=RATE) if mechanism == "distill-dp" else ""
    path.write_text(text + private)
    return path


def private_claim() -> SubsampledGaussian:
    """What the release of the teacher that learns with noise promises."""
    return SubsampledGaussian(RATE, NOISE, NOISY_STEPS)
