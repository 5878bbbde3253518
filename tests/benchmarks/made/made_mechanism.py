"""A mechanism that trains nothing: it adds to a model of any length, to measure what a round carries.

What it adds differs from piece to piece of a transfer, since Flower carries equal ones once.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from agent.domain import Update
from agent.mechanisms.federated.mechanism import Federated


class Made(Federated):
    """``federated`` by its name, with as many parameters as its configuration says."""

    __slots__ = ()

    def network(self, vector: Any = None, files: Any = None) -> Any:
        """None is built."""

    def run_round(
        self, cohort: Any, update: Update, entropy: Any, bench: Any = None, *rest: Any, **more: Any
    ) -> Update:
        """The model with 0, 1, 2... added, in place where that may be."""
        del cohort, entropy, bench, rest, more
        vector = update.vector if update.vector.flags.writeable else update.vector.copy()
        vector += np.arange(len(vector), dtype=np.float32)
        return Update(vector)


def configuration(parameters: int, rounds: int) -> bytes:
    """Of a run of so many parameters."""
    training = {"sampling_rate": 0.25, "rounds": rounds, "steps_per_round": 1, "clip": 0.1, "public_patients": 250}
    task = {
        "task": {"name": "made", "kind": "classification"},
        "labels": {"classes": ["0", "1"]},
        "input": {"modality": "OT", "size": [32, 32]},
        "training": {**training, "images_per_patient": 1, "learning_rate": 1.0},
        "network": {"name": "linear"},
    }
    return json.dumps({"task": task, "parameters": parameters, "noise_multiplier": 8.0}, sort_keys=True).encode()
