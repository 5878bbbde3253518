"""The non-private twin of the federated training: what the same model reaches without privacy.

For comparison in the demo's report only. It reads patients without any bound or noise, so it lives
outside the agent's package, and the agent cannot import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Cohort, Update
from agent.dp.noise import SystemEntropy
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_training import labelled_examples, row_losses, units


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
    network, task = mechanism.network(vector), mechanism.task
    patients = units(task, network, labelled_examples(task, cohort), SystemEntropy())
    parameters = [parameter for parameter in network.trained.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=mechanism.learning_rate * task.training.clip)
    losses = row_losses(task)
    for _ in range(mechanism.steps_per_round):
        drawn = zip(patients, rng.random(len(patients)), strict=True)
        batch = [unit for unit, u in drawn if u < task.training.sampling_rate]
        if not batch:
            continue
        optimizer.zero_grad()
        rows = tuple(torch.cat(parts) for parts in zip(*(unit.rows for unit in batch), strict=True))
        torch.autograd.backward(losses(network.trained, rows).mean())
        optimizer.step()
    return network.vector()
