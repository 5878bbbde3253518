"""The settings of a k-SALSA experiment that takes seconds, and of one that can be killed in the middle."""

from __future__ import annotations

from dataclasses import replace

from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.models.stylegan.network import StyleGanShape
from deploy.reproduction.experiment import Settings

TINY = Settings(
    generator=StyleGanShape(32, 3, 8, 8, 1, 256, 8),
    seeds=(0, 1),
    ks=(2,),
    public=0.3,
    generator_steps=2,
    generator_batch=4,
    pair_steps=1,
    image_steps=1,
    encoder_batch=2,
    passes=1,
    feature_steps=1,
    recogniser_steps=2,
    false_match_rate=0.2,
    basis=8,
    alignment=Alignment(steps=3),
    epochs=1,
    attack_steps=2,
    views=2,
    checkpoint_every=1,
)
LONGER = replace(TINY, seeds=(0,), pair_steps=40, image_steps=4)
