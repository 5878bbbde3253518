"""Which networks a site may release: an architecture is read from a file, shown, and approved by the operator.

A model whose architecture is not approved is refused, and its grant is spent; so a site has its architecture approved
before it makes the release. It follows from public configuration alone: any model of the same configuration shows it,
one that was trained on synthetic images, or not at all. That of a task's model follows from the task: with a run that
the operator launches, the models of its task are approved (:func:`approve_task`), and nobody types anything.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from coordinator.federation.job import Job, JobError
from coordinator.pools.selection import PoolRefusedError
from coordinator.sandbox.inspector_process import inspect
from coordinator.storage.directory import CoordinatorDirectory
from policies.statements import HEX, ID
from policies.tasks.bounds import TaskError
from policies.tasks.evaluation import EvaluationError
from policies.tasks.released_model import KIND, model_config, model_tensors
from policies.tasks.task import Task, task_from_json
from protos.artifacts.byte_source import ArtifactFormatError, FileSource
from protos.artifacts.strict_safetensors import Architecture, canonical
from protos.common.durable_files import replace_file

FOLDER: Final = "architectures"  # in the coordinator's directory
_TEXT: Final = ".task"  # beside them: the canonical JSON of a task whose models are approved, by its digest
_MOST: Final = 1 << 23  # bytes of an architecture's own file


def architecture_of(file: Path) -> Architecture:
    """The architecture of a model file in its strict form, or the one that a JSON file holds.

    The header alone is parsed here; the values are looked at in the sandbox.

    Raises:
        PoolRefusedError: neither; or a value is not finite, or the file holds anything beside its tensors.
        OSError: it cannot be read.
    """
    try:
        with file.open("rb") as raw:
            if file.suffix == ".json":
                return Architecture.parse(raw.read(_MOST).removesuffix(b"\n"))
            shown = Architecture.shown_by(FileSource.of(raw.fileno()))
    except ArtifactFormatError as refusal:
        raise PoolRefusedError(f"{file.name}: {refusal}") from None
    found = inspect(file, "model", {"architecture": shown.encode().decode()})
    if not found.ok:
        raise PoolRefusedError(f"{file.name}: {found.reason}")
    return shown


def task_architecture(task: Task, parameters: int, bins: int = 0) -> Architecture:
    """The architecture of a task's model.

    Args:
        task: that was trained.
        parameters: that it trains, as `task check` prints it; the coordinator has no networks to count.
        bins: of the scores of the look whose sums are in the file; 0: nobody looked.
    Raises:
        EvaluationError: there are no sums for so many outputs.
    """
    told = canonical({"kind": KIND, "config": model_config(task, bins), "notes": {}})
    lengths = model_tensors(task, parameters, bins)
    return Architecture.of({name: ("F32", (length,)) for name, length in lengths.items()}, told)


def approve_task(home: CoordinatorDirectory, task: Task, parameters: int, bins: int) -> tuple[str, ...]:
    """From now on models of this task are admitted, without a look and with one of so many bins.

    Returns:
        The names of the architectures' files.
    Raises:
        PoolRefusedError: another architecture has a name that follows from the task.
    """
    names = []
    for looked in (0, bins):
        try:
            shown = task_architecture(task, parameters, looked)
        except EvaluationError:  # of so many outputs no look is laid out, and no site can make such a file either
            continue
        name = f"task-{task.digest[:32]}-{parameters}" + (f"-{looked}" if looked else "")
        names.append(approve_architecture(home, name, shown).name)
    keep_task(home, task)
    return tuple(names)


def approve_models(home: CoordinatorDirectory, job: Job) -> None:
    """The same for the task of a run that the operator has launched; the job says how many parameters it trains.

    Raises:
        JobError: another architecture has their name.
    """
    try:
        approve_task(home, job.task(), job.parameters, job.look_bins)
    except PoolRefusedError as fault:
        raise JobError(f"models of the task cannot be approved: {fault}") from None


def keep_task(home: CoordinatorDirectory, task: Task) -> None:
    """Keep the text of a task whose models are approved: their cards quote it."""
    replace_file(home.root / FOLDER / f"{task.digest}{_TEXT}", task.to_json().encode())


def kept_task(home: CoordinatorDirectory, digest: str) -> Task | None:
    """The task of that digest, if its models were approved here; a text of another digest is none."""
    if not HEX.fullmatch(digest):
        return None
    try:
        task = task_from_json((home.root / FOLDER / f"{digest}{_TEXT}").read_text())
    except (OSError, UnicodeDecodeError, TaskError):
        return None
    return task if task.digest == digest else None


def approve_architecture(home: CoordinatorDirectory, name: str, shown: Architecture) -> Path:
    """From now on models of exactly this architecture are admitted; approved twice under one name, written once.

    Raises:
        PoolRefusedError: the name is not a short word, or another architecture has it.
    """
    if not ID.fullmatch(name):
        raise PoolRefusedError("a name is one short word of lower-case letters, digits, _ and -")
    path, body = home.root / FOLDER / f"{name}.json", shown.encode()
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() != body:
            raise PoolRefusedError(
                f"{path.name} is another architecture: choose another name, or remove that file first"
            )
        return path
    path.parent.mkdir(exist_ok=True)
    replace_file(path, body)
    return path
