"""The second hospital's eye clinic: networks that learn from public pictures, then k-SALSA and AnonFACES.

The public pictures are phantoms of other people than the clinic's patients. The commands are those that a person
types; how long the networks train is the demo's scale, and their pictures are as good as that.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from agent.phantoms import fundus

SITE: Final = "site-b"
SIDE: Final = 32
PUBLIC: Final = 120  # people of the public set, two eyes each, three visits
KNOWING: Final = 250  # steps of a recogniser, at least: with fewer it knows too few people again, and is refused
RELEASES: Final = 3  # k-anonymous ones of this site: k-Same of its digits, k-SALSA and AnonFACES of its eyes
NETWORKS: Final = ("generator", "encoder", "recogniser-0", "recogniser-1")
INGEST: Final = """[rules]
colour_modalities = ["OP"]       # photographs of eyes: nobody's name is drawn into them

[[folder]]
path = "../pacs/site-b-eyes"
"""
_COMMON: Final = """mechanism = "{mechanism}"

[cohort]
modality = "OP"
split = "demo"                   # by chance and for ever: a patient is in one of the two releases
parts = ["ksalsa:1", "anonfaces:1"]
part = "{mechanism}"

[clusters]
k = {k}
l_diversity = {l}

[networks]
generator = "generator.safetensors"
encoder = "encoder.safetensors"
"""
_OWN: Final = {
    "ksalsa": "",
    "anonfaces": 'recognisers = ["recogniser-0.safetensors", "recogniser-1.safetensors"]\n',
}


def write_public(folder: Path) -> None:
    """Public pictures as PNG, and who is on each: ``identities.csv``."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for patient in fundus.fundus_patients(PUBLIC, np.random.default_rng(2024), 2 * SIDE, visits=3):
        for index, photo in enumerate(patient.photographs):
            name = f"{patient.number:04d}-{index}.png"
            Image.fromarray(photo.pixels).save(folder / "pictures" / name)
            rows.append((name, f"{patient.number}-{photo.eye}"))  # an eye is what a recogniser can know again
    with (folder / "identities.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "identity"), *rows])


def write_clinic(folder: Path, patients: int) -> int:
    """The clinic's patients as DICOM Ophthalmic Photography, one eye at two visits each; the number of files.

    The same eye, so that the recognisers, which know eyes, can show that they know these patients again.
    """
    made = fundus.fundus_patients(patients, np.random.default_rng(7), 2 * SIDE, visits=2, eyes=("right",))
    fundus.write_clinic(folder, 1, made, np.random.default_rng(8))
    return sum(1 for path in folder.rglob("*.dcm"))


def training(network: str, work: Path, steps: int) -> list[str]:
    """The command that trains one network."""
    kind, _, seed = network.partition("-")
    public, out = work / "public", work / "networks" / network
    words = [sys.executable, "-m", "agent", "--home", str(work / SITE), "train", kind, "--json", "--side", str(SIDE)]
    enough = {"generator": steps, "encoder": -(-steps // 2), "recogniser": max(KNOWING, steps)}[kind]
    words += ["--pictures", str(public / "pictures"), "--out", str(out), "--steps", str(enough)]
    if kind == "encoder":
        words += ["--generator", str(work / "networks" / "generator" / "generator.safetensors")]
    if kind == "recogniser":
        words += ["--identities", str(public / "identities.csv"), "--seed", seed]
    return words


def train(work: Path, steps: int, run: Callable[[list[str]], str], say: Callable[[str], None]) -> list[str]:
    """Train the four networks, two at a time, and lay them beside the configurations.

    Returns:
        The SHA-256 of each file, for which the site vouches.
    """
    write_public(work / "public")
    (work / "networks").mkdir(exist_ok=True)
    lanes: tuple[Sequence[str], ...] = (NETWORKS[:2], NETWORKS[2:])
    say(", ".join(NETWORKS))

    def lane(names: Sequence[str]) -> list[str]:
        return [_placed(name, work, json.loads(run(training(name, work, steps)))) for name in names]

    with ThreadPoolExecutor(len(lanes)) as pool:
        return [digest for digests in pool.map(lane, lanes) for digest in digests]


def _placed(name: str, work: Path, told: dict[str, str]) -> str:
    raw = (work / "networks" / name / told["file"]).read_bytes()
    (work / "networks" / f"{name}.safetensors").write_bytes(raw)
    assert hashlib.sha256(raw).hexdigest() == told["sha256"]
    return told["sha256"]


def configure(mechanism: str, work: Path, k: int, l: int) -> Path:  # noqa: E741 - the letter of l-diversity
    """The release's configuration, written beside the networks."""
    path = work / "networks" / f"{mechanism}.toml"
    path.write_text(_COMMON.format(mechanism=mechanism, k=k, l=l) + _OWN[mechanism])
    return path
