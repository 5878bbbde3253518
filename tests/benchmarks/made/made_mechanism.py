"""A mechanism that trains nothing: it adds 1 to a model of any length, to measure what a round carries."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from agent.domain import Update
from agent.mechanisms.federated.mechanism import FEATURES, Federated


class Made(Federated):
    """``federated`` by its name, with as many parameters as its learning rate says."""

    __slots__ = ()

    @property
    def parameters(self) -> int:
        """Length of the flat model."""
        return int(self.learning_rate)

    def run_round(self, cohort: Any, update: Update, entropy: Any, bench: Any = None) -> Update:
        """The model with 1 added, in place where that may be."""
        del cohort, entropy, bench
        vector = update.vector if update.vector.flags.writeable else update.vector.copy()
        vector += np.float32(1)
        return Update(vector)


def configuration(parameters: int, rounds: int) -> bytes:
    """Of a run of so many parameters."""
    values = {
        **{"sampling_rate": 0.25, "noise_multiplier": 8.0, "steps_per_round": 1, "rounds": rounds, "clip": 0.1},
        **{"images_per_patient": 1, "public_patients": 250, "learning_rate": float(parameters), "proximal": 0.0},
        **{"classes": ["0", "1"], "shape": [32, 32], "centre": [0.0] * FEATURES},
    }
    return json.dumps(values, sort_keys=True).encode()
