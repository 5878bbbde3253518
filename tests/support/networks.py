"""Small networks with weights drawn from a seed, as files: what a release needs, made in a second."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from agent.domain import Cohort, Image
from agent.intervals import Proportion
from agent.mechanisms.common.stylegan_codec import StyledCodec, codec_from
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.recogniser import (
    Calibration,
    IdentityNet,
    Recogniser,
    RecogniserArchitecture,
    RecogniserQuality,
    recogniser_bytes,
    recogniser_from,
)
from agent.models.stylegan.network import PRESETS, Generator, generator_bytes
from agent.models.stylegan.restyle import Encoder, architecture_for, encoder_bytes
from agent.models.training_loop import seeded
from agent.models.weights import Origin

NEVER = 1e-4  # a threshold below which no two pictures lie
LITTLE = 0.05  # one below which nearly the same picture lies, and nobody else's, for the untrained networks here


@cache
def files(channels: int = 1) -> tuple[bytes, bytes]:
    """A generator and an encoder for it, 32 px, untrained."""
    with seeded(7):
        generator = Generator(replace(PRESETS["tiny32"], channels=channels)).eval()
        encoder = Encoder(architecture_for(generator.architecture))
        with torch.no_grad():  # a new generator draws grey, a new encoder answers the average: make them see and say
            drawn = generator(torch.randn(64, generator.architecture.z_dim))
            for name, parameter in generator.named_parameters():
                if ".torgb.weight" in name or ".torgb.bias" in name:
                    parameter.mul_(0.6 / float(drawn.std()))
            for parameter in encoder.parameters():
                if parameter.abs().max() == 0 and parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return generator_bytes(generator, {}), encoder_bytes(encoder, {})


@cache
def codec(channels: int = 1, vouched: bool = True) -> StyledCodec:
    """Both, as a codec; public when somebody vouches for them."""
    digests = frozenset(hashlib.sha256(raw).hexdigest() for raw in files(channels))
    return codec_from(*files(channels), digests if vouched else frozenset(), passes=2)


def unsafe_calibration(threshold: float) -> Calibration:
    """A lie, for tests alone: nobody measured these figures. They are as good as the mechanism demands."""
    good, rare = Proportion(0.9, 0.8, 0.95), Proportion(0.01, 0.0, 0.05)
    return Calibration(threshold, 0.01, 100, 0.0, 0.05, RecogniserQuality(0.05, good, rare, good))


def seen_again(cohort: Cohort) -> Cohort:
    """Of each patient the first image, and nearly that one again: an untrained network knows nobody otherwise."""
    noise = np.random.default_rng(11)

    def again(image: Image) -> Image:
        near = image.pixels + noise.normal(0.0, 0.004, image.pixels.shape)
        return replace(image, pixels=np.clip(near, 0.0, 1.0).astype(np.float32))

    return Cohort(tuple(replace(p, images=(p.images[0], again(p.images[0]))) for p in cohort.patients))


def recogniser_file(seed: int, threshold: float = LITTLE, channels: int = 1) -> bytes:
    """An untrained recogniser's file, with figures that nobody measured."""
    with seeded(seed):
        net = IdentityNet(RecogniserArchitecture(TrunkArchitecture(16, channels, 8, 2), embedding=16, grid=2))
    return recogniser_bytes(f"judge-{seed}", net.eval(), unsafe_calibration(threshold), {})


def recogniser(seed: int, threshold: float = LITTLE, channels: int = 1) -> Recogniser:
    """An untrained recogniser that somebody vouches for."""
    raw = recogniser_file(seed, threshold, channels)
    made = recogniser_from(raw, "public")
    assert made.origin == Origin("public", hashlib.sha256(raw).hexdigest())
    return made


def pattern_pictures(people=40, pictures=4, side=16, seed=0, channels=1):
    """People as smooth patterns; each picture is moved by up to three pixels, lit otherwise, and noisy."""
    rng = np.random.default_rng(seed)
    images, who = [], []
    for person in range(people):
        face = gaussian_filter(rng.standard_normal((side + 3, side + 3)), 1.5)
        face = face / face.std()
        for _ in range(pictures):
            i, j = rng.integers(0, 4, 2)
            seen = face[i : i + side, j : j + side] * rng.uniform(0.7, 1.3) + rng.uniform(-0.3, 0.3)
            seen = seen + 0.2 * rng.standard_normal(seen.shape)
            images.append(np.clip(127.5 + 50 * seen, 0, 255).astype(np.uint8))
            who.append(person)
    out = np.stack(images)
    return (out if channels == 1 else np.repeat(out[..., None], 3, axis=3)), np.array(who)
