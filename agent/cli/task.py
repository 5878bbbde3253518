"""``task check``: read a task file, build its network, and take one private step on made input. No site is needed."""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from agent.cli.output import OUT
from agent.dp.compute_device import OPACUS
from agent.dp.opacus_engine import judged
from agent.errors import CommandError
from agent.federation.made_patients import made_cohort
from agent.mechanisms.federated.task_training import (
    as_seen,
    engine_of,
    engine_refusal,
    has_rules,
    network_of,
    row_losses,
    unit_of,
)
from agent.models.networks.trainable import TrainableNetwork
from policies.tasks.task import Task, read_task

PATIENTS: Final = 4  # of the step that is timed
_MIB: Final = 1 << 10  # of ru_maxrss


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What is to know of a task before anybody plans it."""

    name: str
    kind: str
    digest: str  # SHA-256 of the canonical JSON: what sites approve
    input: str
    network: str
    parameters: int  # that are trained, and travel: the job's
    own_head: int  # numbers of each site's own head, which are trained and do not travel
    parameters_in_all: int
    engine: str
    opacus: tuple[str, ...]  # what its validator says against the network, and whether its hooks can train it
    public_files: tuple[str, ...]  # SHA-256 of each
    steps: int
    seconds: float  # of one step for PATIENTS made patients on this machine
    seconds_per_round: float  # for public_patients of them
    peak_mib: float  # of this process


def run(arguments: argparse.Namespace) -> int:
    """Print what a task is and costs; the first line of an error names the file and the key."""
    task = read_task(arguments.file)
    facts = _facts(task, files_given(task, arguments.weights))
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(facts)) + "\n")
        return 0
    OUT.print(_told(facts), markup=False, soft_wrap=True)
    return 0


def files_given(task: Task, given: Iterable[Path]) -> dict[str, Path]:
    """The files of public weights that the task names, by their digests.

    Raises:
        CommandError: one is not among the files that were given, or cannot be read.
    """
    found = {}
    for path in given:
        try:
            with path.open("rb") as source:
                found[hashlib.file_digest(source, "sha256").hexdigest()] = path
        except OSError as error:
            raise CommandError(f"{path.name}: {error.strerror}") from None
    if missing := [digest for digest in task.network.public_files if digest not in found]:
        raise CommandError(f"network.weights: give the public file of each digest by --weights: {', '.join(missing)}")
    return found


def _facts(task: Task, files: dict[str, Path]) -> TaskFacts:
    network = network_of(task, files.__getitem__)
    constants = task.training
    seconds = _step(task, network)
    whole = constants.expected_batch / PATIENTS * seconds
    return TaskFacts(
        name=task.name,
        kind=task.kind,
        digest=task.digest,
        input=input_words(task),
        network=task.network.name,
        parameters=network.parameters,
        own_head=len(head) if (head := network.own_head()) is not None else 0,
        parameters_in_all=sum(p.numel() for p in network.module.parameters()),
        engine="book-keeping" if has_rules(network) else "vmap",
        opacus=tuple(filter(None, (*judged(network.trained), engine_refusal(task, OPACUS)))),
        public_files=task.network.public_files,
        steps=constants.rounds * constants.steps_per_round,
        seconds=round(seconds, 3),
        seconds_per_round=round(whole * constants.steps_per_round, 1),
        peak_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB, 1),
    )


def _step(task: Task, network: TrainableNetwork) -> float:
    """Seconds of the clipped sum for a few made patients, once the engine has been compared with the loop."""
    patients = made_cohort(task, PATIENTS).patients
    for patient in patients:
        as_seen(task, patient.examples[0])  # what a site would leave out is an error here
    units = [unit for patient in patients if (unit := unit_of(task, network, patient, b"made")) is not None]
    engine, loss = engine_of(network, PATIENTS), row_losses(task)
    for _ in range(3):  # as often as an engine compares itself
        began = time.perf_counter()
        engine(network.trained, loss, units, task.training.clip)
    began = time.perf_counter()
    engine(network.trained, loss, units, task.training.clip)
    return time.perf_counter() - began


def input_words(task: Task) -> str:
    """The task's input in one line."""
    seen = task.input
    colours, sides = ("colour" if seen.channels == 3 else "grey"), " x ".join(map(str, seen.size))
    if seen.example == "study":
        colours = f"grey, {seen.channels} of a study"
    return f"{seen.modality} {seen.body_part} {len(seen.size)}-D {sides} {colours}".replace("  ", " ")


def _told(f: TaskFacts) -> str:
    own = f", and {f.own_head} of a head of each site's own" if f.own_head else ""
    lines = [
        f"{f.name}: {f.kind} of {f.input}",
        f"network: {f.network}, {f.parameters} parameters trained{own}, of {f.parameters_in_all}; engine: {f.engine}",
        f"one step of {PATIENTS} patients: {f.seconds} s; a round of all: about {f.seconds_per_round} s",
        f"peak memory of this process: {f.peak_mib} MiB",
        f"Opacus: {'; '.join(f.opacus) or 'its validator finds nothing, and its hooks can train it'}",
        *(f"public weights: {digest}" for digest in f.public_files),
        f"digest: {f.digest}",
        f'in the job: "parameters": {f.parameters}',
    ]
    return "\n".join(lines)
