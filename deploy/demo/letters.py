"""The first hospital's set under differential privacy: PrivImage, with rendered letters as its public images.

The letters were written by fonts, not by persons, so nobody's patient is among them. The hospital has few patients:
its ten classes are pooled into one, since the noise of a histogram with ten rows would drown each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from agent.mechanisms.common.generative_model import PublicImages
from agent.models.image_folder import read_image_folder
from deploy.phantoms import handwriting
from policies.accounting.claims import Composed, GaussianQuery, SubsampledGaussian

SITE: Final = "site-a"
SIDE: Final = 8  # the digits were scanned at 8 x 8
PUBLIC: Final[Mapping[str, int]] = {"each": 40, "seed": 1, "size": SIDE}  # images of each character
STEPS: Final = {"semantics": 0}  # of the query function: clusters take as many as they take
CLUSTERS: Final = 6  # semantics: no label is asked for
NOISE: Final = 2.0  # on each bin, in votes
RATE: Final = 0.25
MULTIPLIER: Final = 3.5  # for up to 60 steps
CONFIG: Final = """mechanism = "privimage"
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
pooled = "digit"

[cohort]
modality = "OT"

[privacy]
noise_multiplier = {multiplier}   # with the histogram's below, epsilon 3.5 or less by loss distributions
steps = {steps}
sampling_rate = {rate}
public_patients = {patients}
images_per_patient = 2

[semantics]
file = "semantics.safetensors"
keep = 2
noise = {noise}

[public]
pictures = "../letters/pictures"

[model]
preset = "tiny8"
pretraining_steps = {pretraining}

[synthetic]
pictures = 200
"""


def write_public(folder: Path) -> None:
    """Public images as PNG."""
    (folder / "pictures").mkdir(parents=True)
    images, _, _ = handwriting.glyphs(PUBLIC["each"], PUBLIC["size"], np.random.default_rng(PUBLIC["seed"]))
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / "pictures" / f"{number:05d}.png")


def images_sha256(folder: Path) -> str:
    """What the site vouches for, of what :func:`write_public` wrote."""
    pictures, _ = read_image_folder(folder / "pictures", SIDE, grey=True)
    return PublicImages(pictures, np.zeros(len(pictures), np.int64)).sha256


def training(network: str, public: Path, networks: Path) -> list[str]:
    """What follows ``train`` to make the query function, of what :func:`write_public` wrote."""
    del networks  # it builds on none
    words = [network, "--pictures", str(public / "pictures"), "--clusters", str(CLUSTERS)]
    return [*words, "--side", str(SIDE), "--grey"]


def claim(steps: int) -> Composed:
    """What the release promises."""
    return Composed((GaussianQuery(NOISE, 1, 1), SubsampledGaussian(RATE, MULTIPLIER, _private(steps))))


def configure(work: Path, patients: int, steps: int) -> Path:
    """The release's configuration, beside its query function; ``steps`` are those of the pre-training."""
    path = work / "networks" / "privimage.toml"
    numbers = {"multiplier": MULTIPLIER, "rate": RATE, "noise": NOISE, "steps": _private(steps)}
    path.write_text(CONFIG.format(patients=patients, pretraining=steps, **numbers))
    return path


def _private(steps: int) -> int:
    """Noisy steps beside so many public ones."""
    return min(60, max(12, steps // 5))
