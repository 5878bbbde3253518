"""How good federated training is, by the product's own code: price, rounds at every site, aggregation, quality.

What is the product's: the noise that is found for the price (``coordinator.federation.job.with_noise``, by the
ledger's fixed order and a preset's delta, looks included), a site's part in a round (``agent.mechanisms.federated``),
the rounding of an update (``protos.artifacts.bfloat16``), masks' whole numbers (``protos.secagg.ring``) and the step
of the strategy (``coordinator.federation.aggregation``).
What is not: Flower carries nothing, and nobody signs. A frozen network's features are computed once for each picture
and kept. ``tests/benchmarks/test_federated.py`` compares both with rounds as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agent.domain import Example, LatticePart, TaskCohort, TaskPatient, Update
from agent.dp.clipping import PrivacyUnit
from agent.dp.noise import Entropy
from agent.federation.run_mechanism import as_sent
from agent.mechanisms.federated import mechanism as federated
from agent.mechanisms.federated import task_training
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked, PublicFiles
from agent.models.networks.trainable import TrainableNetwork, build
from coordinator.federation.aggregation import Advancing
from coordinator.federation.job import MASKED, PLAIN, PRECISION, Job, with_noise
from coordinator.federation.vectors import Moments
from policies.ledger.state import Account
from policies.ledger_service import open_accounts
from policies.review.policy import parse, preset
from policies.review.rules import AccountContext
from policies.tasks.evaluation import EvaluationPlan
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Task
from protos.artifacts.bfloat16 import BFLOAT16, widened
from protos.secagg.ring import Ring

SITES: Final = ("site-a", "site-b", "site-c")
HONEST: Final = 2  # of three sites: the most that a job admits
LOOK_NOISE: Final[Mapping[float, float]] = {8.0: 5.0, 3.0: 12.0, 1.0: 30.0}
LOOKS: Final = 2
SECRET: Final = 32  # bytes
Vector = NDArray[np.float32]
Model = tuple[Vector, Moments]  # the global parameters (p,), and what the strategy remembers


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run's job says, but for its sites."""

    task: Task
    epsilon: float
    mechanism: str = PLAIN
    strategy: str = '{"name":"fedavg"}'
    update_precision: str = BFLOAT16  # of updates in clear

    def job(self, parameters: int, sites: Sequence[str] = SITES) -> Job:
        """The job, with the noise that keeps the run under its epsilon as the sites' accounts charge it.

        Raises:
            JobError: it cannot be run.
        """
        rounds, noise = self.task.training.rounds, LOOK_NOISE[self.epsilon]
        config: dict[str, Any] = {
            "task": self.task.to_table(),
            "parameters": parameters,
            "epsilon": self.epsilon,
            "evaluate": EvaluationPlan(LOOKS, noise, 10, 8).to_table(),
        }
        if self.mechanism == MASKED:
            config |= {"sites": len(sites), "honest": HONEST, "value_bound": 2.0, "scale": 28, "ring_bits": 32}
        else:
            config[PRECISION] = self.update_precision
        job = Job(
            run="study",
            mechanism=self.mechanism,
            config=json.dumps(config),
            parameters=parameters,
            sites=tuple(sites),
            rounds=rounds,
            min_sites=len(sites),
            strategy=self.strategy,
            secure=self.mechanism == MASKED,
            evaluate=(rounds // 2, rounds),
        )
        return with_noise(job, {site: standing(site, self.epsilon) for site in sites})


def standing(site: str, epsilon: float) -> AccountContext:
    """A new account of the preset "internal" with another lifetime budget; delta is the preset's."""
    text = re.sub(r"(?m)^epsilon = \S+", f"epsilon = {epsilon}", preset("internal"))
    return AccountContext(Account(open_accounts(site, parse(text, "internal"))[0]))


def mechanism_of(job: Job) -> Federated | FederatedMasked:
    """What a site makes of the job's configuration."""
    kind = FederatedMasked if job.mechanism == MASKED else Federated
    return kind.from_json(job.config)


def cohort(pictures: Sequence[NDArray[np.float32]], targets: Sequence[NDArray[Any]]) -> TaskCohort:
    """Patients of a task: of each its pictures (visits, channels, h, w) in [0, 1], and a target for each."""
    patients = []
    for number, (seen, told) in enumerate(zip(pictures, targets, strict=True)):
        examples = [Example(picture, target) for picture, target in zip(seen, told, strict=True)]
        patients.append(TaskPatient(f"patient-{number:05d}", tuple(examples)))
    return TaskCohort(tuple(patients))


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A network of a task, and what its frozen part makes of each patient: computed once, since it never changes."""

    network: TrainableNetwork
    files: PublicFiles
    _kept: dict[int, tuple[TaskPatient, PrivacyUnit | None]] = field(default_factory=dict)  # by the patient's id

    @classmethod
    def of(cls, task: Task, files: PublicFiles) -> Prepared:
        """Built as a site builds it."""
        return cls(task_training.network_of(task, files.__getitem__), files)

    def units(self, task: Task, of: TaskCohort) -> list[PrivacyUnit]:
        """The cohort's patients after the frozen part, as the product makes them."""
        if task.training.augmentation:
            raise AssertionError("views are drawn anew in each round")
        for patient in of.patients:
            if id(patient) not in self._kept:
                self._kept[id(patient)] = patient, task_training.unit_of(task, self.network, patient)
        found = (self._kept[id(patient)][1] for patient in of.patients)
        return [unit for unit in found if unit is not None]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While it lasts, the mechanisms take the network and the units from here."""

        def units(task: Task, _: TrainableNetwork, of: TaskCohort, entropy: Entropy) -> list[PrivacyUnit]:
            entropy.take(SECRET)  # of views, of which there are none: what is drawn after it stays the same
            return self.units(task, of)

        with patch.object(federated, "network_of", lambda *_: self.network), patch.object(federated, "units", units):
            yield

    def answers(self, task: Task, vector: Vector, of: TaskCohort) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """What the network says by a vector of each example (n, outputs), and what is true."""
        self.network.load(vector)
        rows = [unit.rows for unit in self.units(task, of)]
        with torch.no_grad():
            said = self.network.trained(torch.cat([inputs for inputs, _ in rows])).numpy()
        return said, torch.cat([targets for _, targets in rows]).numpy()


def trained(job: Job, cohorts: Mapping[str, TaskCohort], prepared: Prepared, entropy: Entropy) -> Vector:
    """All rounds of a job: each site's part by its mechanism, aggregated by the job's strategy; (p,)."""
    mechanism, model = mechanism_of(job), (np.zeros(job.parameters, np.float32), Moments())
    with prepared.kept():
        for _ in range(job.rounds):
            start = Update(model[0])
            parts = {
                site: mechanism.run_round(cohorts[site], start, entropy, files=prepared.files) for site in job.sites
            }
            model = stepped(job, mechanism, model, parts)
    return model[0]


def stepped(
    job: Job, mechanism: Federated | FederatedMasked, model: Model, parts: Mapping[str, Update | LatticePart]
) -> Model:
    """What the coordinator makes of the sites' parts of a round."""
    aggregator, (vector, moments) = job.aggregator(), model
    if isinstance(mechanism, FederatedMasked):
        assert isinstance(aggregator, Advancing), "the job was checked"
        ring = Ring(mechanism.parameters, mechanism.ring_bits, mechanism.value_bound, mechanism.scale)
        words = [ring.lift(part.steps) for part in parts.values() if isinstance(part, LatticePart)]
        delta = ring.decode(ring.lower(np.add.reduce(words, dtype=ring.dtype))) / len(words)
        return aggregator.advance(vector, delta, moments)
    named = [(site, widened(as_sent(mechanism, part))) for site, part in parts.items() if isinstance(part, Update)]
    return aggregator.step(vector, named, moments)[:2]


# -- without privacy


@dataclass(frozen=True, slots=True)
class Plain:
    """A training on all patients' pictures together, without privacy: AdamW and a cosine."""

    epochs: int
    rate: float = 1e-3
    decay: float = 1e-2
    batch: int = 64
    shift: int = 3  # pixels, either way, of each picture in each epoch


def nonprivate(
    network: NetworkSpec,
    task: Task,
    how: Plain,
    rows: tuple[torch.Tensor, torch.Tensor],
    files: PublicFiles,
    seed: int,
) -> nn.Module:
    """The task's loss on rows (inputs, targets), by a network of its own."""
    net = build(network, task.input.channels, task.input.size, task.outputs, seed, files.__getitem__)
    loss, dice = task_training.row_losses(task), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        [p for p in net.trained.parameters() if p.requires_grad], how.rate, weight_decay=how.decay
    )
    steps = how.epochs * -(-len(rows[0]) // how.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.rate, steps)
    for _ in range(how.epochs):
        for chosen in torch.split(torch.randperm(len(rows[0]), generator=dice), how.batch):
            inputs = _shifted(rows[0][chosen], how.shift, dice)
            optimizer.zero_grad()
            torch.autograd.backward(loss(net.module, (inputs, rows[1][chosen])).mean())
            optimizer.step()
            schedule.step()
    return net.module


def _shifted(inputs: torch.Tensor, most: int, dice: torch.Generator) -> torch.Tensor:
    if not most:
        return inputs
    padded = nn.functional.pad(inputs, (most,) * 4, mode="replicate")
    height, width = inputs.shape[-2:]
    tops = torch.randint(0, 2 * most + 1, (len(inputs), 2), generator=dice).tolist()
    return torch.stack(
        [one[:, top : top + height, left : left + width] for one, (top, left) in zip(padded, tops, strict=True)]
    )


def scored(module: nn.Module, inputs: torch.Tensor, batch: int = 16) -> NDArray[np.float32]:
    """What a network says of pictures, (n, outputs)."""
    with torch.no_grad():
        found: NDArray[np.float32] = torch.cat([module(part) for part in torch.split(inputs, batch)]).numpy()
    return found
