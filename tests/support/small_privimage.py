"""A PrivImage release small enough for a test: 8 px, a few steps, public pictures of nothing in particular."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agent.dp.dpsgd import PrivateSgd
from agent.mechanisms.common.generative_model import PublicImages
from agent.mechanisms.privimage.diffusion import DiffusionConfig
from agent.mechanisms.privimage.mechanism import PrivImage, Synthetic
from agent.mechanisms.privimage.semantic_query import SemanticQuery
from agent.models.diffusion.edm import DiffusionArchitecture
from agent.models.features.extractors import RandomFeatures
from agent.models.image_folder import read_image_folder
from agent.models.semantics.classifier import Semantics, semantics_from
from agent.models.semantics.training import cluster_semantics

SMALLEST = DiffusionArchitecture(8, 1, 1, (8, 8), 1, (False, False), 8, 4)


@cache
def public() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(60, 8, 8): dark and bright noise, so that there are semantics to tell apart."""
    dice = np.random.default_rng(3)
    pictures = dice.integers(0, 90, (60, 8, 8)) + np.repeat([0, 80, 160], 20)[:, None, None]
    return pictures.astype(np.uint8)


@cache
def semantics(provenance: str = "public") -> Semantics:
    """Three clusters of them."""
    raw = cluster_semantics(RandomFeatures(1, 8, 2), public(), 3).file
    return semantics_from(raw, provenance)  # type: ignore[arg-type]


def vouched(images: np.ndarray[Any, np.dtype[np.uint8]], bins: np.ndarray[Any, np.dtype[np.int64]]) -> PublicImages:
    """Pictures of which the site says that no patient is on them."""
    return PublicImages(images, bins, frozenset({PublicImages(images, bins).sha256}))


def digest_of(folder: Path, side: int = 8) -> str:
    """What a site vouches for, of a folder of grey pictures."""
    images, _ = read_image_folder(folder, side, grey=True)
    return PublicImages(images, np.zeros(len(images), np.int64)).sha256


def tiny(provenance: str = "public", **changes: Any) -> PrivImage:
    """All patients' pictures as one class; ``changes`` are of the fields."""
    sem = semantics(provenance)
    bins = sem.probabilities(public().astype(np.float32) / np.float32(255)).argmax(axis=1)
    whole = PrivImage(
        classes=("0", "1", "2"),
        model=DiffusionConfig(SMALLEST, 1, draws=2, pretrain_batch=8, sampling_steps=3),
        semantics=sem,
        query=SemanticQuery(1, 2.5, 1),
        public=vouched(public(), bins.astype(np.int64)),
        pretraining_steps=4,
        sgd=PrivateSgd(
            sampling_rate=0.25, noise_multiplier=4.0, steps=6, clip=0.01, images_per_patient=2, expected_batch=25.0
        ),
        public_patients=100,
        synthetic=Synthetic(9),
        pooled="any",
    )
    return replace(whole, **changes)
