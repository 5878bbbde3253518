"""What the experiments with private synthesis run on: data sets of a folder, or handwriting that needs none; presets.

``digits8`` needs no folder: scikit-learn's digits play the cohort, every image a patient of its own (43 persons
wrote them, and who wrote which is not told), and made-up letters and digits (:mod:`deploy.phantoms.handwriting`) the
public set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from sklearn.datasets import load_digits

from agent.evaluation.utility import Recipe
from agent.mechanisms.privimage.diffusion import DiffusionConfig
from agent.mechanisms.privimage.semantic_query import SemanticQuery
from agent.models.diffusion import edm as diffusion
from agent.models.diffusion.edm import DiffusionArchitecture
from deploy.phantoms.handwriting import glyphs
from deploy.reproduction.conditional_gan import network as adversarial
from deploy.reproduction.conditional_gan.model import AdversarialConfig, Fine
from deploy.reproduction.conditional_gan.training import Descent, Pretraining
from deploy.reproduction.datasets import LOADERS
from deploy.reproduction.experiment import Samples, samples_of
from deploy.reproduction.privimage_experiment import Job, PrivateSettings, Sources

DIGITS: Final = "digits"
_GLYPHS: Final = 120  # of each character
_GLYPH_SEED: Final = 7
_SMALL8: Final = DiffusionArchitecture(8, 1, 10, (16, 16), 1, (False, False), 16, 8)

# Tuned on made-up writing alone: 1,400 images of digits in italic fonts, bent otherwise than the public set's,
# played the cohort, 400 more the test part. A CNN told 97 % of them when it had learned the cohort itself, 72 % from
# the public digits, 62 % from images of a model pre-trained on those. Fine-tuned at q 0.5, clip 0.05, one run each:
# diffusion, sigma 1.204 (epsilon 10), 20 steps at a rate of 1e-3 86 %, 3e-3 90 %, 6e-3 84 %; 40 steps of 2e-3 90 %;
# 20 steps of 3e-3 without noise 91 %; of 6e-3 from random weights 22 %. At sigma 7.46 (epsilon 1), 3e-3: 83 %. GAN,
# epsilon 10: 20 steps of 1e-3 65 %, of 2e-3 58 %; 100 steps of 2e-3 71 %. Its 40 steps here were a matter of time.
DIGITS8: Final = PrivateSettings(
    diffusion=DiffusionConfig(_SMALL8, 0, draws=4, lr_pretrain=2e-3, lr_finetune=3e-3, ema=0.9, sampling_steps=10),
    adversarial=AdversarialConfig(
        adversarial.PRESETS["tiny8"],
        pretraining=Pretraining(Descent(64, 1e-3, 0.99), 64, 1e-3),
        fine=Fine(Descent(128, 2e-3, 0.9), learning_rate=2e-3, update_ratio=1, pool=32),
    ),
    diffusion_job=Job(0.5, 20, 0.05),
    adversarial_job=Job(0.5, 40, 0.05),
    query=SemanticQuery(votes=1, noise=8.0, keep=1),
    patients=1_400,
    delta=1e-4,
    keeps=(1, 3, 6),
    widths=((8, 8), (32, 32)),
)


def _paper(preset: str, gan: str, patients: int, delta: float, steps: tuple[int, int]) -> PrivateSettings:
    """Tables 5 and 6, where they say something: batches, steps, rates; all as numbers of an accelerator's run."""
    return PrivateSettings(
        diffusion=DiffusionConfig(
            diffusion.PRESETS[preset], 0, draws=16, lr_pretrain=1e-4, lr_finetune=1e-4, pretrain_batch=2048
        ),
        adversarial=AdversarialConfig(adversarial.PRESETS[gan]),
        diffusion_job=Job(min(1.0, 16_384 / patients), steps[0], 1e-3),
        adversarial_job=Job(min(1.0, 16_384 / patients), steps[1], 1e-3),
        query=SemanticQuery(votes=5, noise=20.0, keep=5),
        patients=patients,
        delta=delta,
        epsilons=(10.0, 5.0, 1.0),
        semantics_steps=9_400,
        diffusion_pretraining=42_000,
        adversarial_pretraining=20_000,
        synthetic=50_000,
        recipe=Recipe(epochs=30, side=32, width=64),
        keeps=(1, 5, 10, 20, 50),
        widths=((32, 64, 64), (64, 128, 128)),
        images_per_patient=8,
        device="cuda",
    )


PRESETS: Final[Mapping[str, PrivateSettings]] = {
    "digits8": DIGITS8,
    "cifar32": replace(_paper("small32", "paper32", 50_000, 1e-5, (152, 30)), per_picture=True),
    "celeba32": _paper("small32", "paper32", 8_000, 1e-5, (618, 124)),
    "celeba64": _paper("small64", "paper64", 8_000, 1e-5, (1236, 124)),
    "camelyon32": replace(_paper("small32", "paper32", 300_000, 1e-6, (152, 30)), per_picture=True),
}
FOR: Final[Mapping[str, str]] = {
    DIGITS: "digits8",
    "cifar10": "cifar32",
    "celeba": "celeba32",
    "camelyon17": "camelyon32",
}


def digits() -> Sources:
    """Scikit-learn's digits and made-up writing, 8 px; no folder is read."""
    found = load_digits()
    images = np.rint(found.images * (255.0 / 16.0)).astype(np.uint8)
    labels = tuple(str(one) for one in found.target.tolist())
    sensitive = Samples(images, np.arange(len(images), dtype=np.int64), labels, "scikit-learn's digits")
    drawn, kinds, names = glyphs(_GLYPHS, images.shape[1], np.random.default_rng(_GLYPH_SEED))
    names = tuple(names[kind] for kind in kinds)
    return Sources(sensitive, Samples(drawn, np.arange(len(drawn), dtype=np.int64), names, "made-up writing"))


def read(data: Path, public: Path, layout: str, settings: PrivateSettings, limit: int | None) -> Sources:
    """A data set's folder as the sensitive set, ImageNet's as the public one.

    Raises:
        DatasetError: a folder is laid out otherwise.
    """
    side = settings.diffusion.architecture.side
    sensitive = samples_of(LOADERS[layout](data, side, limit))
    return Sources(sensitive, samples_of(LOADERS["imagenet"](public, side, limit)))


def fitted(settings: PrivateSettings, sources: Sources) -> PrivateSettings:
    """The settings for as many classes and channels as the data have."""
    classes = len(set(sources.sensitive.labels))
    channels = 3 if sources.sensitive.images.ndim == 4 else 1
    architecture = settings.diffusion.architecture.fitted(channels, classes)
    gan = settings.adversarial.architecture.suited(channels, classes)
    return replace(
        settings,
        diffusion=replace(settings.diffusion, architecture=architecture),
        adversarial=replace(settings.adversarial, architecture=gan),
    )
