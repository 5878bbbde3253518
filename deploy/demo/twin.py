"""The non-private twin of the federated training: what the same model reaches without privacy.

For comparison in the demo's report only. It reads patients without any bound or noise, so it lives
outside the agent's package, and the agent cannot import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import TaskCohort, Update
from agent.dp.noise import SystemEntropy
from agent.mechanisms.federated.mechanism import NO_FILES, Federated, PublicFiles
from agent.mechanisms.federated.task_training import row_losses, units
from agent.models.networks import TrainableNetwork

BATCH: Final = 32  # patients of a step
PASSES: Final = 3  # over all patients, in each round
RATE: Final = 1e-2  # of Adam


def non_private_twin(
    mechanism: Federated, cohorts: Sequence[TaskCohort], rng: np.random.Generator, files: PublicFiles = NO_FILES
) -> Update:
    """Federated averaging of the same network from the same start, in as many rounds, with neither clip nor noise.

    Few steps and full batches are what noise asks for; without it many steps cost nothing. So the twin has Adam,
    small batches and more steps, as anybody would train who need not care.

    Args:
        mechanism: the private training.
        cohorts: of each site, those that it trains on.
        rng: draws the order of the patients.
        files: of public weights, by SHA-256.
    Returns:
        The parameters after ``mechanism.rounds`` rounds. They carry NO guarantee of privacy.
    """
    vector = mechanism.initial().vector
    for _ in range(mechanism.rounds):
        trained = [_train_unprotected(mechanism, mechanism.network(vector, files), c, rng) for c in cohorts]
        vector = np.stack(trained).mean(axis=0, dtype=np.float64).astype(np.float32)
    return Update(vector)


def _train_unprotected(
    mechanism: Federated, network: TrainableNetwork, cohort: TaskCohort, rng: np.random.Generator
) -> NDArray[np.float32]:
    task = mechanism.task
    patients = units(task, network, cohort, SystemEntropy())
    parameters = [parameter for parameter in network.trained.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    losses = row_losses(task)
    for _ in range(PASSES):
        order = rng.permutation(len(patients))
        for first in range(0, len(order), BATCH):
            batch = [patients[at].rows for at in order[first : first + BATCH]]
            optimizer.zero_grad()
            rows = tuple(torch.cat(parts) for parts in zip(*batch, strict=True))
            torch.autograd.backward(losses(network.trained, rows).mean())
            optimizer.step()
    return network.vector()
