"""Small tasks for tests, as their files have them, and the configurations of both federated mechanisms. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Input, Labels, Loss, Task, Training

M = TypeVar("M")
LINEAR = NetworkSpec("linear")


def classification(
    classes: Sequence[str] = ("0", "1", "2"),
    size: tuple[int, ...] = (8, 8),
    network: NetworkSpec = LINEAR,
    **more: Any,
) -> Task:
    """Images that came with a label; by default fifteen plain steps of logistic regression. ``more``: [training]."""
    steps = {"sampling_rate": 0.25, "rounds": 3, "steps_per_round": 15, "clip": 0.1, "images_per_patient": 2}
    constants = {**steps, "public_patients": 25, "learning_rate": 40.0, "momentum": 0.0, **more}
    images = Input("OT", size)
    return Task(
        "small", "classification", Labels(classes=tuple(classes)), images, Loss(), Training(**constants), network
    )


def plain_config(task: Task, parameters: int | None = None, noise_multiplier: float = 1.8) -> dict[str, Any]:
    """The public configuration of ``federated``."""
    length = linear_length(task) if parameters is None else parameters
    return {"task": task.to_table(), "parameters": length, "noise_multiplier": noise_multiplier}


def masked_config(task: Task, parameters: int | None = None, sites: int = 3, **more: Any) -> dict[str, Any]:
    """The public configuration of ``federated-masked``."""
    own = {"sites": sites, "honest": 2, "value_bound": 4.0, "scale": 20, "ring_bits": 32}
    return {**plain_config(task, parameters), **own, **more}


def linear_length(task: Task) -> int:
    """How many numbers the network ``linear`` trains."""
    features = task.input.channels * task.network.options["pooled"] ** len(task.input.size)
    return task.outputs * (features + 1)


def changed(mechanism: M, **changes: Any) -> M:
    """A mechanism with other values of its own or of its task's [training]."""
    own = {f.name for f in fields(mechanism)}  # type: ignore[arg-type]
    task: Task = mechanism.task  # type: ignore[attr-defined]
    training = {key: value for key, value in changes.items() if key not in own}
    if training:
        changes["task"] = replace(task, training=replace(task.training, **training))
    return replace(mechanism, **{key: value for key, value in changes.items() if key in own})  # type: ignore[type-var]
