"""The federated runs of the demo: public configuration alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any, Final

from agent.mechanisms.federated.mechanism import Federated, FederatedMasked, PublicFiles
from deploy.demo.own_policies import SITES
from deploy.demo.printed_digits import CLASSES, NETWORK, OPTIONS, PARAMETERS, SIZE
from deploy.demo.train_networks import kept_network
from policies.tasks.evaluation import EvaluationPlan
from policies.tasks.task import Task, task_from_toml

PUBLIC_PATIENTS: Final = 250  # a public bound on the patients of a site; delta is a thousandth of 1 / bound
LOOKS: Final = EvaluationPlan(looks=1, noise=1.5, held_out=30, bins=10)  # at the last round's model
TASK: Final = f"""\
[task]
name = "digits"
kind = "classification"
[labels]
classes = {list(CLASSES)}
[input]
modality = "OT"
size = {list(SIZE)}
[training]
public_patients = {PUBLIC_PATIENTS}
[network]
name = "small-cnn"
options = {{ {OPTIONS}, head = 1 }}
trained = "bias-and-norms"
"""  # and ``weights``, the SHA-256 of the public start


def public_start() -> PublicFiles:
    """The file of public weights that the rounds begin at, by its SHA-256.

    Raises:
        KeptNetworkError: it is not kept.
    """
    raw = kept_network(NETWORK)
    return {hashlib.sha256(raw).hexdigest(): raw}


def digits_task(rounds: int) -> Task:
    """The demo's task file, with so many rounds of the default recipe.

    Raises:
        KeptNetworkError: the public start is not kept.
    """
    (start,) = public_start()
    task = task_from_toml(f'{TASK}weights = "{start}"\n', "digits.toml")
    return replace(task, training=replace(task.training, rounds=rounds))


def federated_job(rounds: int) -> Federated:
    """The federated mechanism's public configuration."""
    return Federated(digits_task(rounds), PARAMETERS, noise_multiplier=4.0, evaluate=LOOKS)


def masked_job(job: Federated) -> FederatedMasked:
    """A few steps of the same training, of which the coordinator sees sums alone."""
    whole = job.task.training
    steps = replace(whole, sampling_rate=0.25, rounds=2, steps_per_round=1, learning_rate=0.1, momentum=0.0)
    return FederatedMasked(
        replace(job.task, training=steps),
        job.parameters,
        noise_multiplier=8.0,
        sites=len(SITES),
        honest=2,
        value_bound=4.0,
        scale=22,
        ring_bits=32,
    )


def job_file(mechanism: Federated | FederatedMasked, min_sites: int) -> dict[str, Any]:
    """What an operator writes to launch it; the model is looked at after the last round, if that is priced."""
    job: dict[str, Any] = {
        "mechanism": mechanism.name,
        "parameters": mechanism.parameters,
        "sites": list(SITES),
        "rounds": mechanism.rounds,
        "min_sites": min_sites,
        "config": json.loads(mechanism.to_json()),
    }
    if isinstance(mechanism, FederatedMasked):
        job["secure"] = True
    if mechanism.evaluate is not None:
        job["evaluate"] = [mechanism.rounds]
    return job
