"""A job like the demo's, for virtual sites."""

from __future__ import annotations

import json

from coordinator.federation.job import FEDAVG, Job


def job(rounds: int, strategy: str = FEDAVG) -> Job:
    """Three sites' training of ten classes; needs two of three."""
    classes = [str(c) for c in range(10)]
    config = {
        "sampling_rate": 0.25,
        "noise_multiplier": 1.8,
        "steps_per_round": 15,
        "rounds": rounds,
        "clip": 0.1,
        "images_per_patient": 2,
        "public_patients": 250,
        "learning_rate": 40.0,
        "classes": classes,
        "shape": [32, 32],
        "centre": [0.0] * 64,
        "proximal": 0.0,
    }
    names = ("site-a", "site-b", "site-c")
    return Job("try-1", "federated", json.dumps(config), len(classes) * 65, names, rounds, 2, strategy)
