"""The third hospital's chest clinic: a teacher on its radiographs, and a set of its student's (Privacy Distillation).

The four networks that the release names learn from phantoms of other people, by the commands that a person types.
The set is of level C, which neither the hospital's policy nor the federation's admits unless it is written into them.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from agent.phantoms import chest

SITE: Final = "site-c"
SIDE: Final = 32
PUBLIC: Final = 800  # people of the public set, two visits each: a quarter of them settles a verifier's threshold
PATIENTS: Final = 120  # of the clinic, two visits each; every other one by Computed Radiography
RELEASES: Final = 2  # without an epsilon, of this site: k-Same of its digits, and this
LANES: Final = (("autoencoder", "aligner", "unseen"), ("verifier",))  # what is trained side by side
STEPS: Final = {"autoencoder": 300, "verifier": 400, "unseen": 400, "aligner": 150}  # fewer, and they are refused
TEACHER: Final = 120  # steps, at least
INGEST: Final = """[[folder]]
path = "../pacs/site-c-chests"
"""
CONDITIONS: Final = tuple(sorted(chest.label_of(found) for found in chest.conditions(1)))
CONFIG: Final = """mechanism = "distill"
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


def write_public(folder: Path) -> None:
    """Public pictures as PNG, who is on each, and what each shows: ``identities.csv`` and ``labels.csv``."""
    (folder / "pictures").mkdir(parents=True)
    who, what = [("file", "identity")], [("file", "label")]
    for patient in chest.chest_patients(PUBLIC, np.random.default_rng(2025), SIDE, visits=2, most=1):
        for visit, (picture, findings) in enumerate(zip(patient.radiographs, patient.findings, strict=True)):
            name = f"{patient.number:04d}-{visit}.png"
            Image.fromarray(picture).save(folder / "pictures" / name)
            who.append((name, str(patient.number)))
            what.append((name, chest.label_of(findings)))
    for name, rows in (("identities.csv", who), ("labels.csv", what)):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def write_clinic(folder: Path) -> int:
    """The clinic's patients as DICOM; the number of files."""
    made = chest.chest_patients(PATIENTS, np.random.default_rng(11), SIDE, visits=2, most=1)
    chest.write_clinic(folder, 2, made, np.random.default_rng(12))
    return sum(1 for path in folder.rglob("*.dcm"))


def training(network: str, work: Path) -> list[str]:
    """The command that trains one network."""
    kind = "verifier" if network == "unseen" else network
    public, out = work / "public-chests", work / "networks" / network
    words = [sys.executable, "-m", "agent", "--home", str(work / SITE), "train", kind, "--json", "--side", str(SIDE)]
    words += ["--grey", "--pictures", str(public / "pictures"), "--out", str(out), "--steps", str(STEPS[network])]
    if kind == "verifier":
        words += ["--identities", str(public / "identities.csv")]
    if kind == "aligner":
        words += ["--labels", str(public / "labels.csv"), "--identities", str(public / "identities.csv")]
    return [*words, "--second"] if network == "unseen" else words


def train(work: Path, run: Callable[[list[str]], str], say: Callable[[str], None]) -> dict[str, str]:
    """Train the four networks, two at a time, and lay them beside the configuration.

    Returns:
        The SHA-256 of each file, for which the site vouches.
    """
    write_public(work / "public-chests")
    say(", ".join(name for lane in LANES for name in lane))

    def lane(names: Sequence[str]) -> dict[str, str]:
        return {name: _placed(name, work, json.loads(run(training(name, work)))) for name in names}

    with ThreadPoolExecutor(len(LANES)) as pool:
        return {name: digest for digests in pool.map(lane, LANES) for name, digest in digests.items()}


def _placed(name: str, work: Path, told: dict[str, Any]) -> str:
    raw = (work / "networks" / name / told["file"]).read_bytes()
    (work / "networks" / f"{name}.safetensors").write_bytes(raw)
    assert hashlib.sha256(raw).hexdigest() == told["sha256"]
    return str(told["sha256"])


def configure(work: Path, digests: dict[str, str], steps: int) -> Path:
    """The release's configuration, written beside the networks; ``steps`` of teacher and student."""
    lines = [f'{name} = "{name}.safetensors"\n{name}_sha256 = "{digest}"\n' for name, digest in digests.items()]
    path = work / "networks" / "distill.toml"
    path.write_text(
        CONFIG.format(conditions=json.dumps(CONDITIONS), networks="".join(lines), steps=max(TEACHER, steps))
    )
    return path


def admitting(policy: str) -> str:
    """A policy's text that admits level C, and what it needs: whoever signs it has read what it means."""
    for key, value in (("components", '["public", "private"]'), ("levels", '["A", "B", "C"]')):
        lines = [f"{key} = {value}" if line.startswith(f"{key} ") else line for line in policy.splitlines()]
        policy = "\n".join(lines) + "\n"
    return policy
