"""What the file of a task's model holds, as both sides derive it from the task: nobody types an architecture.

The parameters that the task trains, less their start, are one vector; beside it stand the noisy sums of the look at
the model, where one was paid for (:mod:`policies.tasks.evaluation`). The task itself is named by its digest: its text
may be longer than what a file may say of itself, and whoever uses the model needs the task's text anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from policies.tasks.evaluation import SumLayout
from policies.tasks.task import SEGMENTATION, Task
from protos.common.canonical_json import JsonValue, canonical

KIND: Final = "task-model"
PARAMETERS: Final = "flat"  # the tensors, float32 with one axis each
SUMS: Final = "sums"
# of the folder that `pool export --model` writes
MODEL_FILE: Final = "model.safetensors"
TASK_FILE: Final = "task.json"  # the canonical JSON; the certificate that is signed names its digest
SIGNED: Final = "ledger-certificate.json"  # as lazaret-verify takes it
SUMS_FILE: Final = "SHA256SUMS"


def model_config(task: Task, bins: int = 0) -> dict[str, JsonValue]:
    """What the file says of its configuration. ``bins``: of the look's scores; 0: nobody looked."""
    return {"bins": bins, "name": task.name, "task": task.digest}


def model_tensors(task: Task, parameters: int, bins: int = 0) -> Mapping[str, int]:
    """The length of each tensor.

    Raises:
        EvaluationError: there are no sums for so many outputs.
    """
    looked = {SUMS: SumLayout(task.kind, task.outputs, bins).size} if bins else {}
    return {PARAMETERS: parameters, **looked}


def data_rule(task: Task) -> dict[str, JsonValue]:
    """Which images and labels of a hospital's patients the task uses: public, and the same at every site."""
    whole = task.to_table()
    return {
        "input": whole["input"],
        "labels": whole["labels"],
        "images_per_patient": task.training.images_per_patient,
    }


def data_rule_digest(task: Task) -> str:
    """SHA-256 of the rule's canonical JSON."""
    return hashlib.sha256(canonical(data_rule(task))).hexdigest()


def data_rule_text(task: Task) -> str:
    """The rule in a sentence."""
    seen, labels = task.input, task.labels
    size = " x ".join(map(str, seen.size))
    what = f"{'all images of a study together' if seen.example == 'study' else 'every image'} of modality"
    parts = [f"{what} {seen.modality}{f', body part {seen.body_part}' if seen.body_part else ''}"]
    parts.append(f"as {'colour' if seen.channels == 3 else 'grey'} of {size}")
    parts += [f"with {' x '.join(f'{mm:g}' for mm in seen.spacing)} mm"] if seen.spacing else []
    parts += [f"window {seen.window[0]:g} to {seen.window[1]:g}"] if seen.window else []
    named = ", ".join(labels.classes or labels.columns)
    where = f"the table {labels.table} ({', '.join(labels.columns)})" if labels.table else "the images' own labels"
    parts.append(f"learned: {named}, of {'masks' if task.kind == SEGMENTATION else where}")
    parts.append(f"at most {task.training.images_per_patient} examples of a patient in a step")
    return "; ".join(parts)
