"""The second hospital's eye clinic: k-SALSA, AnonFACES and DP centroids, with networks of public images.

The public images are phantoms of other people than the clinic's patients.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from agent.mechanisms.centroids.mechanism import noises_for
from deploy.phantoms import fundus
from policies.accounting.claims import Composed, GaussianQuery, SubsampledGaussian

SITE: Final = "site-b"
SIDE: Final = 32
PATIENTS: Final = 60  # of the clinic: among many more, a division by chance may leave AnonFACES no image to show
PUBLIC: Final[Mapping[str, int]] = {"people": 120, "seed": 2024, "size": 2 * SIDE, "visits": 3}  # two eyes each
# with fewer a recogniser knows too few people again, and is refused
STEPS: Final = {"generator": 300, "encoder": 150, "recogniser-0": 300, "recogniser-1": 300}
RELEASES: Final = 3  # k-anonymous ones of this site: k-Same of its digits, k-SALSA and AnonFACES of its eyes
RULES: Final = """[rules]
colour_modalities = ["OP"]       # photographs of eyes: nobody's name is drawn into them

"""
SCREENED: Final = "site-a"  # the hospital of the screening, whose eyes are counted under differential privacy
SCREENING: Final = 240  # its patients, one photograph each
EPSILON: Final = 1.0  # of counts and sums together, by loss distributions
DELTA: Final = 4e-6
COUNT_SHARE: Final = 0.3  # of the budget, for the counts
CELLS: Final = 4  # of the codebook: about a sixtieth of the patients' number, so that noise does not drown a cell
# AnonFACES shows no image that a recogniser takes for anybody. One division of 60 patients in sixteen leaves none:
# that is refused before anything is spent, and the next name divides the patients anew.
DIVISIONS: Final = ("demo", "demo-2", "demo-3")
_COMMON: Final = """mechanism = "{mechanism}"

[cohort]
modality = "OP"
split = "{division}"               # by chance and for ever: a patient is in one of the two releases
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
_CENTROIDS: Final = """mechanism = "centroids"

[cohort]
modality = "OP"

[networks]
generator = "generator.safetensors"
encoder = "encoder.safetensors"
codebook = "codebook.safetensors"

[privacy]
epsilon = {epsilon}
delta = {delta}
count_share = {share}

[cells]
classes = ["0", "1", "2", "3", "4"]
public_patients = {patients}
k = 5
images_per_patient = 1
"""


def write_public(folder: Path) -> None:
    """Public images as PNG, and who is on each: ``identities.csv``."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    dice = np.random.default_rng(PUBLIC["seed"])
    for patient in fundus.fundus_patients(PUBLIC["people"], dice, PUBLIC["size"], visits=PUBLIC["visits"]):
        for index, photo in enumerate(patient.photographs):
            name = f"{patient.number:04d}-{index}.png"
            Image.fromarray(photo.pixels).save(folder / "pictures" / name)
            rows.append((name, f"{patient.number}-{photo.eye}"))  # an eye is what a recogniser can know again
    with (folder / "identities.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "identity"), *rows])


def write_clinic(folder: Path, patients: int = PATIENTS) -> int:
    """The clinic's patients as DICOM Ophthalmic Photography, one eye at two visits each; the number of files.

    The same eye, so that the recognisers, which know eyes, can show that they know these patients again.
    """
    made = fundus.fundus_patients(patients, np.random.default_rng(7), 2 * SIDE, visits=2, eyes=("right",))
    fundus.write_clinic(folder, 1, made, np.random.default_rng(8))
    return sum(1 for path in folder.rglob("*.dcm"))


def write_screening(folder: Path) -> int:
    """The screening's patients, one photograph of each; the number of files."""
    made = fundus.fundus_patients(SCREENING, np.random.default_rng(9), 2 * SIDE, visits=1, eyes=("right",))
    fundus.write_clinic(folder, 0, made, np.random.default_rng(10))
    return sum(1 for path in folder.rglob("*.dcm"))


def training(network: str, public: Path, networks: Path) -> list[str]:
    """What follows ``train`` to make one network.

    Args:
        network: one of ``STEPS``.
        public: what :func:`write_public` wrote.
        networks: where the generator lies, from which the encoder learns.
    """
    kind, _, seed = network.partition("-")
    words = [kind, "--side", str(SIDE), "--pictures", str(public / "pictures"), "--steps", str(STEPS[network])]
    if kind == "encoder":
        words += ["--generator", str(networks / "generator.safetensors")]
    if kind == "recogniser":
        words += ["--identities", str(public / "identities.csv"), "--seed", seed]
    return words


def configure(
    mechanism: str,
    work: Path,
    k: int,
    l: int,  # noqa: E741 - the letter of l-diversity
    division: str = DIVISIONS[0],
) -> Path:
    """The release's configuration, written beside the networks."""
    path = work / "networks" / f"{mechanism}.toml"
    path.write_text(_COMMON.format(mechanism=mechanism, k=k, l=l, division=division) + _OWN[mechanism])
    return path


def codebook(work: Path) -> list[str]:
    """The words that make the codebook of public images, beside the networks; the images are written."""
    write_public(work / "public-eyes")
    networks = work / "networks"
    words = ["train", "codebook", "--pictures", str(work / "public-eyes" / "pictures"), "--cells", str(CELLS)]
    words += ["--dims", "8", "--generator", str(networks / "generator.safetensors")]
    return [*words, "--encoder", str(networks / "encoder.safetensors"), "--out", str(networks), "--json"]


def configure_centroids(work: Path) -> Path:
    """The configuration of the screening's release, written beside the networks."""
    path = work / "networks" / "centroids.toml"
    path.write_text(_CENTROIDS.format(patients=SCREENING, epsilon=EPSILON, delta=DELTA, share=COUNT_SHARE))
    return path


def centroids_claim() -> Composed:
    """What the screening's release promises."""
    counts, sums = noises_for(EPSILON, DELTA, COUNT_SHARE)
    return Composed((GaussianQuery(counts, 1, 1), SubsampledGaussian(1.0, sums, 1)))
