"""What the experiments with Privacy Distillation run on: MIMIC-CXR-JPG's folder or made-up radiographs; presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from agent.evaluation.utility import Recipe
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.teacher_student import Sampling
from agent.models.diffusion.latent import PRESETS as DENOISERS
from deploy.phantoms.chest import chest_patients
from deploy.reproduction.distillation_experiment import DistillSettings, Lengths, Radiographs
from deploy.reproduction.mimic_cxr import NOTE, Chests, chests_from_phantoms, mimic_cxr, moved, parted

MIMIC, PHANTOMS = "mimic-cxr", "phantoms"
_ASIDE: Final = 1 / 3  # of a folder's patients, for the public part
_TESTED: Final = 2_132 / 25_400  # of the others (section 4.1)
_PUBLIC_SEED: Final = 77

# Tuned on seed 0 alone, by how much the teacher remembers (R_re-id by the filter's verifier; of images of nobody it
# was 0.4 %). 48 patients, rate 2e-3: 1,000 steps 0.3 %, 1,750 steps 2 %. 36 patients, rate 4e-3: 750 steps 0.3 %,
# 1,500 steps 6 %, 2,250 steps 22 %. Verifiers of 500 steps found 0.92 of what was planted, and 0.9 is asked for by
# the lower end. With 5 candidates of 100 groups and a student of 1,500 steps, 242 images were left to learn.
CHEST32: Final = DistillSettings(
    side=32,
    autoencoder="coarse32",
    model=LatentConfig(DENOISERS["tiny"], 0, batch=64, lr=4e-3, guidance=1.5, sampling_steps=20),
    steps=Lengths(autoencoder=1_200, verifier=1_000, aligner=300, teacher=2_250, student=2_250, pretraining=1_500),
    sampling=Sampling(candidates=10, groups=150),
    pictures=600,
    recipe=Recipe(epochs=20, side=32),
    people=(40, 150),  # with fewer, near-duplicates that are planted cannot show that most are found
)
PRESETS: Final[Mapping[str, DistillSettings]] = {
    "chest32": CHEST32,
    "chest64": replace(
        CHEST32,
        side=64,
        autoencoder="small64",
        model=LatentConfig(
            DENOISERS["small"], 0, batch=64, lr=1e-3, sampling_steps=50, precision="bfloat16", sampling_batch=512
        ),
        steps=Lengths(10_000, 4_000, 3_000, 20_000, 20_000, 20_000, canary=2_000),
        sampling=Sampling(candidates=10, groups=400),
        most=2,
        people=(400, 400),
        public=4_000,
        pictures=4_000,
        recipe=Recipe(epochs=30, side=64),
        device="cuda",
    ),
    "mimic512": DistillSettings(
        side=512,
        autoencoder="base512",
        model=LatentConfig(
            DENOISERS["stable"],
            0,
            batch=64,
            lr=5e-5,
            ema=0.9999,
            guidance=4.0,
            sampling_steps=50,
            precision="bfloat16",
            sampling_batch=64,
        ),
        steps=Lengths(100_000, 40_000, 20_000, 60_000, 60_000, 60_000, canary=4_000),
        sampling=Sampling(candidates=10, groups=2_560),  # of 16 conditions: 40,960, as in the paper
        most=2,  # a prompt of all five findings would be longer than a label may be
        moved=0.1,
        shares=(0.01, 0.1, 0.5, 1.0),
        pictures=40_000,
        recipe=Recipe(epochs=30, side=224, width=64),
        device="cuda",
    ),
}
FOR: Final[Mapping[str, str]] = {PHANTOMS: "chest32", MIMIC: "mimic512"}
NOTES: Final[Mapping[str, str]] = {MIMIC: NOTE}


def phantoms(settings: DistillSettings) -> Radiographs:
    """Made-up people; no folder is read. Every seed has patients of its own, and all have one public part."""
    public = chest_patients(
        settings.public, np.random.default_rng(_PUBLIC_SEED), settings.side, visits=2, most=settings.most
    )
    learned, tested = settings.people
    cohorts = {}
    for seed in settings.seeds:
        rng = np.random.default_rng([_PUBLIC_SEED, 1 + seed])
        people = chest_patients(learned + tested, rng, settings.side, settings.visits, settings.most)
        cohorts[seed] = _halved(chests_from_phantoms(people), tested / (learned + tested), settings, rng)
    return Radiographs(chests_from_phantoms(public), cohorts, "made-up radiographs")


def folder(data: Path, settings: DistillSettings, limit: int | None) -> Radiographs:
    """MIMIC-CXR-JPG: a third of the patients is the public part, always the same; the others are each seed's cohort.

    Raises:
        DatasetError: the folder is laid out otherwise.
        ValueError: there are too few patients.
    """
    found = mimic_cxr(data, settings.side, limit)
    rng = np.random.default_rng(_PUBLIC_SEED)
    people = np.unique(found.owners)
    aside = np.isin(found.owners, rng.choice(people, round(_ASIDE * len(people)), replace=False))
    public, others = (found.take(np.flatnonzero(rows).astype(np.int64)) for rows in (aside, ~aside))
    cohorts = {
        seed: _halved(others, _TESTED, settings, np.random.default_rng([_PUBLIC_SEED, 1 + seed]))
        for seed in settings.seeds
    }
    return Radiographs(public, cohorts, "MIMIC-CXR 2.0.0")


def _halved(chests: Chests, share: float, settings: DistillSettings, rng: np.random.Generator) -> Chests:
    """Patients to learn and to test on, some of the latter with half of their images learned."""
    split = parted(chests, share, rng)
    return moved(split, rng, settings.moved) if settings.moved else split
