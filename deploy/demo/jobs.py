"""The federated runs of the demo: public configuration alone."""

from __future__ import annotations

from typing import Final

from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from deploy.demo.own_policies import SITES
from deploy.phantoms import digits

PUBLIC_PATIENTS: Final = 250  # a public bound on the patients of a site; delta is a thousandth of 1 / bound


def federated_job(public: digits.Digits, rounds: int) -> Federated:
    """The federated mechanism's public configuration; the centre comes from public digits alone."""
    centre = public.images.reshape(len(public.images), -1).mean(axis=0)
    return Federated(
        sampling_rate=0.25,
        noise_multiplier=1.8,
        steps_per_round=15,
        rounds=rounds,
        clip=0.1,
        images_per_patient=2,
        public_patients=PUBLIC_PATIENTS,
        learning_rate=40.0,
        classes=tuple(str(c) for c in range(10)),
        shape=(32, 32),
        centre=tuple(round(float(c), 4) for c in centre),
        proximal=0.0,
    )


def masked_job(job: Federated) -> FederatedMasked:
    """A few steps of the same training, of which the coordinator sees sums alone."""
    return FederatedMasked(
        sampling_rate=job.sampling_rate,
        noise_multiplier=8.0,
        rounds=2,
        clip=job.clip,
        images_per_patient=job.images_per_patient,
        public_patients=job.public_patients,
        learning_rate=10.0,
        classes=job.classes,
        shape=job.shape,
        centre=job.centre,
        sites=len(SITES),
        honest=2,
        value_bound=4.0,
        scale=20,
        ring_bits=32,
    )
