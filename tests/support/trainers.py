"""One small trainer of every family, as its command builds it: for what holds of them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.defacing.deid_gan.network import PRESETS as VOLUME_GANS
from agent.defacing.deid_gan.training import Example, VolumeGanTrainer, VolumeGanTraining
from agent.defacing.privacy_transform import Gamma
from agent.models.augmentations import Pool
from agent.models.diffusion import aligner_training
from agent.models.diffusion.aligner import AlignerArchitecture
from agent.models.diffusion.autoencoder import AutoencoderArchitecture
from agent.models.diffusion.autoencoder_training import AutoencoderTrainer, AutoencoderTraining
from agent.models.diffusion.edm import DiffusionArchitecture
from agent.models.diffusion.edm_training import DiffusionTrainer, DiffusionTraining
from agent.models.diffusion.latent import LatentArchitecture
from agent.models.diffusion.latent_training import EncodedSet, LatentTrainer, LatentTraining
from agent.models.diffusion.prompts import Conditions
from agent.models.features import simclr_training
from agent.models.features.extractors import RandomFeatures
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition import recogniser_training, verifier_training
from agent.models.recognition.recogniser import RecogniserArchitecture
from agent.models.recognition.verifier import VerifierArchitecture
from agent.models.semantics import training as semantics_training
from agent.models.stylegan.network import Generator, StyleGanShape
from agent.models.stylegan.restyle import Encoder, EncoderArchitecture
from agent.models.stylegan.restyle_training import InversionConfig, InversionTrainer
from agent.models.stylegan.training import GanConfig, GanTrainer
from agent.models.training_loop import Trainer, seeded
from agent.volumes.grid import Cube
from deploy.reproduction.conditional_gan.network import AdversarialArchitecture
from deploy.reproduction.conditional_gan.training import (
    AdversarialTrainer,
    Descent,
    Pretraining,
    averaged,
    fresh_networks,
)

CPU: Final = torch.device("cpu")
TRUNK: Final = TrunkArchitecture(8, 1, 8, 2, 1, 16)
CONDITIONS: Final = Conditions(("none", "edema"))
GAN: Final = StyleGanShape(8, 1, 8, 8, 1, 64, 8)


def _pictures(count: int = 12, side: int = 8) -> NDArray[np.uint8]:
    return np.random.default_rng(2).integers(0, 256, (count, side, side)).astype(np.uint8)


def _pool() -> Pool:
    return Pool(_pictures(), 8, 1, CPU)


def _labels() -> NDArray[np.int64]:
    return (np.arange(12) % 2).astype(np.int64)


def _people() -> NDArray[np.int64]:
    return (np.arange(12) // 2).astype(np.int64)


def _recogniser() -> Trainer:
    how = recogniser_training.RecognitionConfig("a", RecogniserArchitecture(TRUNK, 8, 2), 6, 4, 2)
    return recogniser_training._Trainer(_pool(), _people(), np.arange(12), how)


def _verifier() -> Trainer:
    how = verifier_training.VerificationConfig("a", VerifierArchitecture(TRUNK, 2, 8, 8, 8), 6, 4, 2)
    return verifier_training._Trainer(_pool(), _people(), np.arange(12), how)


def _semantics() -> Trainer:
    how = semantics_training.SemanticsConfig("a", TRUNK, ("x", "y"), 6, 4)
    return semantics_training._Trainer(_pool(), _labels(), np.arange(12), how)


def _features() -> Trainer:
    return simclr_training._Trainer(_pool(), 12, simclr_training.RepresentationConfig("a", TRUNK, 6, 4, 8))


def _aligner() -> Trainer:
    how = aligner_training.AlignmentConfig("a", AlignerArchitecture(TRUNK, 8, 2, 8), 6, 4)
    return aligner_training._Trainer(_pool(), torch.from_numpy(_labels()), np.arange(12), CONDITIONS, how)


def _autoencoder() -> Trainer:
    how = AutoencoderTraining(AutoencoderArchitecture(8, 1, 2, (8, 8), 1, 4), 6, batch=4, patches=8, ema=0.9)
    return AutoencoderTrainer(_pool(), how, RandomFeatures(0, width=4, depth=2, channels=1))


def _diffusion() -> Trainer:
    how = DiffusionTraining(DiffusionArchitecture(8, 1, 2, (8, 8), 1, (False, True), 8, 4), 3, batch=4)
    return DiffusionTrainer(how, torch.from_numpy(_pictures()), torch.from_numpy(_labels()))


def _latent() -> Trainer:
    words = CONDITIONS.vocabulary.size
    shape = LatentArchitecture((2, 4, 4), (8, 8), 1, (False, True), 8, 4, words, CONDITIONS.length, 8)
    latents = torch.randn(12, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    return LatentTrainer(
        LatentTraining(shape, 3, batch=4), EncodedSet(latents, torch.from_numpy(_labels()), CONDITIONS, "")
    )


def _gan() -> Trainer:
    how = GanConfig(GAN, 6, 5, batch=4, path_length=2.0, mixing=0.9, r1_every=2)
    return GanTrainer(how, torch.from_numpy(_pictures())[:, None])


def _inversion() -> Trainer:
    shape = EncoderArchitecture(8, 1, GAN.num_ws, 8, 8, (8, 8), (1, 1), 8)
    how = InversionConfig(pair_steps=2, image_steps=4, batch=4, passes=2, rate=1e-3, architecture=shape, flip=True)
    with seeded(0):
        encoder, generator = Encoder(shape), Generator(GAN)
    images = _pictures().astype(np.float32) / 255
    return InversionTrainer(encoder, generator, how, images, RandomFeatures(0, 4, 2, 1))


def _adversarial() -> Trainer:
    with seeded(0):
        networks = fresh_networks(AdversarialArchitecture(8, 1, 2, (8, 8), (8, 8), latent=8))
    how = Pretraining(Descent(4, 1e-3, 0.9), 4, 1e-3, update_ratio=2, r1=0.5)
    return AdversarialTrainer(networks, averaged(networks[0]), (_pictures(), _labels()), how)


def _volume_gan() -> Trainer:
    rng, cube = np.random.default_rng(4), Cube(16, np.diag([16.0] * 3 + [1.0]))
    away = np.linalg.norm((np.indices((16,) * 3).transpose(1, 2, 3, 0) + 0.5) / 16 - 0.5, axis=-1)
    examples = []
    for number in range(3):
        volume = ((away < 0.38) * rng.uniform(0.2, 0.6, away.shape)).astype(np.float32)
        gamma = Gamma(away < 0.47, away < 0.25, np.where(away < 0.25, volume, np.float32(0.0)), cube)
        examples.append(Example(volume, gamma, f"p{number}"))
    return VolumeGanTrainer(examples, VolumeGanTraining(VOLUME_GANS["tiny16"], 6, batch=2))


TRAINERS: Final[dict[str, Callable[[], Trainer]]] = {
    "adversarial": _adversarial,
    "aligner": _aligner,
    "autoencoder": _autoencoder,
    "diffusion": _diffusion,
    "features": _features,
    "gan": _gan,
    "inversion": _inversion,
    "latent": _latent,
    "recogniser": _recogniser,
    "semantics": _semantics,
    "verifier": _verifier,
    "volume-gan": _volume_gan,
}
