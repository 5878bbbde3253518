"""What the demo knows of a federated run that came to its end, and no hospital could: accuracy on digits of nobody.

Beside it stand the public start as it was, the twin without privacy, and what the hospitals' own looks say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.domain import Cohort, Image, Patient, TaskCohort
from agent.mechanisms.federated.mechanism import Federated, PublicFiles
from agent.mechanisms.federated.task_training import labelled_examples
from agent.storage.examples import task_cohort
from agent.storage.projects import open_vault
from agent.storage.site_directory import SiteDirectory
from deploy.demo.twin import non_private_twin
from deploy.phantoms import digits
from policies.accounting.accountant import epsilon, tight_epsilon
from policies.accounting.claims import Claim, SubsampledGaussian, training_of
from policies.tasks.evaluation import TRAINED
from protos.artifacts.arrays import unpack_vector


def trained_on(home: Path, mechanism: Federated) -> TaskCohort:
    """The patients of a site that its rounds trained on, without those held out, as the site itself reads them."""
    with closing(open_vault(SiteDirectory(home), "main")) as vault:
        return task_cohort(vault, mechanism.examples(TRAINED))


def looked(look: Mapping[str, Any]) -> str:
    """The private evaluation of ``summary.json``, for people."""
    told = "cannot be told" if look["value"] is None else f"{look['value']:.1%}"
    return f"private evaluation: accuracy {told}, interval {look['low']:.1%} to {look['high']:.1%}"


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """A run, and the digits that no hospital has."""

    mechanism: Federated
    files: PublicFiles  # its public start, by SHA-256
    coordinator: Path  # its directory
    name: str
    held_out: digits.Digits
    account: tuple[int, float]  # order and delta of the account that pays for it

    def measured(self, sites: Sequence[TaskCohort]) -> dict[str, Any]:
        """What the report and ``summary.json`` show of the run.

        Args:
            sites: of each site that took part, whom it trained on.
        """
        job, (order, delta), claim = self.mechanism, self.account, self.mechanism.claim()
        rounds = [self._round(number) for number in range(1, job.rounds + 1)]
        twin = non_private_twin(job, sites, np.random.default_rng(0), self.files)
        network = job.task.network
        return {
            "network": {"name": network.name, "trained": network.trained, "parameters": job.parameters},
            "accuracy": {
                "private": rounds[-1]["accuracy"],
                "public_start": self._accuracy(job.initial().vector),
                "non_private": self._accuracy(twin.vector),
                "chance": 0.1,
                "test_images": len(self.held_out.labels),
            },
            "evaluation": self._look(),
            "epsilon": {
                "filter": epsilon([claim], delta, order),
                "tight": tight_epsilon([claim], delta),
                "delta": delta,
                "order": order,
            },
            "rounds": rounds,
        }

    def _round(self, number: int) -> dict[str, Any]:
        """What the model of a round knows, and what each patient has paid by then."""
        raw = (self.coordinator / "runs" / self.name / f"round-{number}.safetensors").read_bytes()
        order, delta = self.account
        spent = epsilon([self._made(number)], delta, order)
        return {"round": number, "epsilon": spent, "accuracy": self._accuracy(unpack_vector(raw))}

    def _made(self, rounds: int) -> Claim:
        """What so many rounds promise; the look comes after the last one."""
        whole = self.mechanism.claim()
        training = training_of(whole)
        assert isinstance(training, SubsampledGaussian)
        made = replace(training, steps=self.mechanism.steps_per_round * rounds)
        return whole if rounds == self.mechanism.rounds else made

    def _look(self) -> dict[str, Any]:
        """The first figure of the last look, from the certificate beside the model."""
        certificate = json.loads((self.coordinator / "releases" / self.name / "certificate.json").read_bytes())
        look, plan = certificate["evaluation"]["looks"][-1], self.mechanism.evaluate
        assert plan is not None
        return {
            "figure": "accuracy",
            **look["figures"]["accuracy"],
            "after_round": look["after_round"],
            "held_out": plan.held_out,
            "noise": plan.noise,
        }

    def _accuracy(self, vector: NDArray[np.float32]) -> float:
        """The share of the held-out digits that a model recognises."""
        pictures = (digits.upsample(self.held_out.images) / np.float32(255)).astype(np.float32)
        truth = self.held_out.labels
        nobody = Patient("p", tuple(Image(p, str(c)) for p, c in zip(pictures, truth, strict=True)))
        shown = labelled_examples(self.mechanism.task, Cohort((nobody,)))
        return float((self.mechanism.predict(vector, shown, self.files).argmax(axis=1) == truth).mean())
