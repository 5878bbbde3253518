"""The federated runs of the demo: public configuration alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from deploy.demo.own_policies import SITES
from policies.tasks.task import Task, task_from_toml

PUBLIC_PATIENTS: Final = 250  # a public bound on the patients of a site; delta is a thousandth of 1 / bound


TASK: Final = f"""\
[task]
name = "digits"
kind = "classification"
[labels]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
[input]
modality = "OT"
size = [32, 32]
transforms = [{{ name = "ScaleIntensityRange", a_min = 0.3, a_max = 1.3, clip = false }}]  # about the public mean
[training]
public_patients = {PUBLIC_PATIENTS}
sampling_rate = 0.25
steps_per_round = 15
clip = 0.1
learning_rate = 40.0
momentum = 0.0
[network]
name = "linear"
"""


def digits_task(rounds: int) -> Task:
    """The demo's task file, with so many rounds: logistic regression on 8 x 8 means."""
    task = task_from_toml(TASK, "digits.toml")
    return replace(task, training=replace(task.training, rounds=rounds))


def federated_job(rounds: int) -> Federated:
    """The federated mechanism's public configuration."""
    return Federated(digits_task(rounds), parameters=650, noise_multiplier=1.8)


def masked_job(job: Federated) -> FederatedMasked:
    """A few steps of the same training, of which the coordinator sees sums alone."""
    steps = replace(job.task.training, rounds=2, steps_per_round=1, learning_rate=10.0)
    return FederatedMasked(
        replace(job.task, training=steps),
        job.parameters,
        noise_multiplier=8.0,
        sites=len(SITES),
        honest=2,
        value_bound=4.0,
        scale=20,
        ring_bits=32,
    )
