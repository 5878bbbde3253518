"""What the coordinator knows of a model beyond the ledger: its task, and what was found in the looks at it.

A run's task is in its job; that of a hospital's own model was kept when models of the task were approved, and the
model's file names it by its digest. The figures of a run stand in the certificate beside its model. Those of a
hospital's own model are worked out here, from the noisy sums in the model's file, whose digest the ledger has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from coordinator.federation.evaluation import LookSums, estimates, to_table
from coordinator.federation.job import Job, JobError, job_from
from coordinator.pools.architectures import kept_task
from coordinator.reports.document import ReportError
from coordinator.reports.report_inputs import Item
from coordinator.storage.directory import CoordinatorDirectory
from policies.accounting.claims import Evaluated, UnsupportedClaimError
from policies.statements import claim_from
from policies.tasks.bounds import TaskError
from policies.tasks.evaluation import EvaluationError, SumLayout
from policies.tasks.released_model import KIND, SUMS
from policies.tasks.task import Task
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.strict_safetensors import Architecture, unpack_weights

MODEL: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Look:
    """One private look at a model: figures with intervals that cover the noise and the choice of patients."""

    where: str  # "after round 4", or "when it was trained"
    figures: Mapping[str, Mapping[str, Any]]  # name -> value, low, high


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All of it public, or paid for."""

    task: Task | None = None  # None: the coordinator does not have its text
    looks: Sequence[Look] = ()
    chosen: Look | None = None  # of a run with looks: by which the model was chosen
    job: Job | None = None
    participation: Mapping[str, Any] = field(default_factory=dict)  # of a run: who is in which round, as certified


def model_facts(home: CoordinatorDirectory, item: Item) -> ModelFacts:
    """What is known of an admitted model.

    Raises:
        ReportError: a file of it is damaged, or is not the one that the ledger admitted.
    """
    if item.facts["kind"] == "model":
        return _of_run(home, item.name)
    return _of_hospital(home, item)


def _of_run(home: CoordinatorDirectory, run: str) -> ModelFacts:
    path = home.root / "runs" / run / "job.json"
    if not path.exists():
        return ModelFacts()
    try:
        job = job_from(path.read_text())
        certified = json.loads((home.releases / run / "certificate.json").read_bytes())
        told = certified.get("evaluation", {})
        looks = [Look(f"after round {one['after_round']}", one["figures"]) for one in told.get("looks", ())]
        chosen = dict(told.get("chosen", {}))
        after = chosen.pop("after_round", None)
        best = Look(f"after round {after}", chosen) if chosen else None
        return ModelFacts(job.task(), looks, best, job, dict(certified.get("participation", {})))
    except FileNotFoundError:  # the run has no model yet
        return ModelFacts(job.task(), job=job)
    except (JobError, ValueError, KeyError, TypeError, AttributeError):
        raise ReportError(f"{run}: its job or its certificate cannot be read") from None


def _of_hospital(home: CoordinatorDirectory, item: Item) -> ModelFacts:
    path = home.releases / item.name / MODEL
    if not path.exists():
        return ModelFacts()
    raw = path.read_bytes()
    shown, config = _shown(path, raw)
    if not config:
        return ModelFacts()
    if hashlib.sha256(raw).hexdigest() != item.facts["artifact_sha256"]:
        raise ReportError(f"{item.name}: its file is not the one that the ledger admitted")
    task = kept_task(home, str(config.get("task")))
    bins = config.get("bins")
    if task is None or type(bins) is not int or not bins:
        return ModelFacts(task)
    part = item.parts[0]
    try:
        claim = claim_from(dict(part["claim"]))
        assert isinstance(claim, Evaluated), "sums leave under a claim that counts a look"
        sums = unpack_weights(raw, shown)[SUMS].astype(np.float64)
        found = estimates(LookSums(SumLayout(task.kind, task.outputs, bins), sums, claim.share))
    except (AssertionError, UnsupportedClaimError, EvaluationError, ArtifactFormatError, KeyError, ValueError):
        raise ReportError(f"{item.name}: the sums in its file are not those of its task and its claim") from None
    return ModelFacts(task, [Look("when it was trained", to_table(found))])


def _shown(path: Path, raw: bytes) -> tuple[Architecture, Mapping[str, Any]]:
    """The file's architecture, and its configuration where it is a task's model."""
    try:
        shown = Architecture.shown_by(BytesSource(raw))
        told: Any = json.loads(shown.told) if shown.told else {}
    except (ArtifactFormatError, ValueError, TaskError):
        raise ReportError(f"{path.parent.name}: {path.name} is damaged") from None
    return shown, told["config"] if told.get("kind") == KIND else {}
