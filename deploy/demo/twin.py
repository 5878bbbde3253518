"""The non-private twin of the federated training: what the same model reaches without privacy.

For comparison in the demo's report only. It reads patients without any bound or noise, so it lives
outside the agent's package, and the agent cannot import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from agent.domain import Cohort, Update
from agent.mechanisms.federated.mechanism import Federated, LinearSoftmax


def non_private_twin(mechanism: Federated, cohorts: Sequence[Cohort], rng: np.random.Generator) -> Update:
    """Federated averaging with the same model, sampling, steps and rounds; no clip and no noise.

    The learning rate is the private one times the clip: a gradient as long as the clip, or longer, moves
    the private model by at most that much.

    Returns:
        The parameters after ``mechanism.rounds`` rounds. They carry NO guarantee of privacy.
    """
    vector = mechanism.initial().vector
    for _ in range(mechanism.rounds):
        trained = [_train_unprotected(mechanism, c, vector, rng) for c in cohorts]
        vector = np.stack(trained).mean(axis=0, dtype=np.float64).astype(np.float32)
    return Update(vector)


def _train_unprotected(
    mechanism: Federated, cohort: Cohort, vector: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.float32]:
    model = LinearSoftmax(len(mechanism.classes))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), model.parameters())
    units = [unit for patient in cohort.patients if (unit := mechanism.unit(patient)) is not None]
    optimizer = torch.optim.SGD(model.parameters(), lr=mechanism.learning_rate * mechanism.clip)
    for _ in range(mechanism.steps_per_round):
        batch = [unit for unit, u in zip(units, rng.random(len(units)), strict=True) if u < mechanism.sampling_rate]
        if not batch:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(
            model(torch.cat([unit.rows[0] for unit in batch])), torch.cat([unit.rows[1] for unit in batch])
        )
        torch.autograd.backward(loss)
        optimizer.step()
    trained: NDArray[np.float32] = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    return trained
