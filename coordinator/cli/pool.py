"""The commands ``pool``: list admitted releases, export a pool, merge models, approve architectures."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from coordinator.cli.output import ERR, OUT
from coordinator.explanations import count, epsilon_text
from coordinator.pools.architectures import approve_architecture, architecture_of, keep_task, task_architecture
from coordinator.pools.datasheet import Card
from coordinator.pools.export import ExportOptions, as_json, export_pool, list_releases, read_books
from coordinator.pools.model_averaging import average_runs, export_model
from coordinator.pools.selection import PoolRefusedError, SelectionCriteria
from coordinator.storage.directory import CoordinatorDirectory
from policies.tasks.bounds import TaskError
from policies.tasks.evaluation import MOST_BINS, EvaluationError
from policies.tasks.task import MOST_PARAMETERS, Task, read_task
from protos.artifacts.strict_safetensors import Architecture


@contextlib.contextmanager
def _bar(silent: bool) -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, console=ERR, disable=silent) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, of: bars.update(task, description=what, completed=done, total=of)


def _list(arguments: argparse.Namespace) -> int:
    """What lies on the shelf, and what of it a pool can hold."""
    home = CoordinatorDirectory(arguments.home)
    rows = list_releases(home, read_books(home))
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(rows), indent=2) + "\n")
        return 0
    table = Table()
    for name in ("release or run", "site", "mechanism", "level", "modality", "k", "epsilon", "holds"):
        table.add_column(name, overflow="fold")
    for row in rows:
        spent = "" if row.epsilon is None else epsilon_text(row.epsilon)
        k, holds = "" if row.k is None else str(row.k), f"{row.holds}: {row.why}" if row.why else row.holds
        table.add_row(row.id, row.site, row.mechanism, row.level, row.modality, k, spent, holds)
    OUT.print(table)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    """Write a pool for training: WebDataset shards, a Croissant description, a datasheet."""
    a = arguments
    home = CoordinatorDirectory(a.home)
    if a.model:
        return _export_model(home, a)
    wanted = SelectionCriteria(
        sites=frozenset(a.site),
        mechanisms=frozenset(a.mechanism),
        modalities=frozenset(a.modality),
        level=a.level,
        k=a.k,
        epsilon=a.epsilon,
        without=frozenset(a.without),
        mixed=frozenset(a.mixed),
    )
    card = Card(**({"license": a.license} if a.license else {}))
    with _bar(a.json) as progress:
        report = export_pool(home, read_books(home), a.out, wanted, ExportOptions(seed=a.seed, card=card), progress)
    _tell(as_json(report), a.json, a.out)
    return 0


def _export_model(home: CoordinatorDirectory, a: argparse.Namespace) -> int:
    """Write one model with its certificate and its card."""
    from coordinator.reports.catalog import model_files  # noqa: PLC0415 - what writes PDF; no other command needs it

    told = model_files(home, a.model, dt.datetime.now(dt.UTC))
    _tell({"files": export_model(home, read_books(home), a.out, a.model, told)}, a.json, a.out)
    return 0


def _average(arguments: argparse.Namespace) -> int:
    """Merge the models of finished runs."""
    a = arguments
    try:
        weights = [float(w) for w in a.weights.split(",")] if a.weights else None
    except ValueError:
        raise PoolRefusedError("weights are numbers with commas between them, one for each run") from None
    home = CoordinatorDirectory(a.home)
    with _bar(a.json) as progress:
        report = average_runs(home, read_books(home), a.out, a.runs, weights, progress)
    _tell(as_json(report), a.json, a.out)
    return 0


def _architecture(arguments: argparse.Namespace) -> int:
    """Show the architecture of a model file, or of an architecture's own; and approve it, if that was asked."""
    a = arguments
    task = _task(a)
    shown = architecture_of(a.file) if task is None else _of_task(task, a)
    if a.json:
        sys.stdout.write(shown.encode().decode() + "\n")
    else:
        told = json.loads(shown.told) if shown.told else {}
        OUT.print(f"kind: {told.get('kind', 'the file has no description')}", markup=False)
        OUT.print(f"configuration: {json.dumps(told.get('config', {}), indent=2)}", markup=False, soft_wrap=True)
        numbers = count(sum(math.prod(t.shape) for t in shown.tensors), "number")
        OUT.print(f"{count(len(shown.tensors), 'tensor')}, {numbers}, {count(shown.nbytes, 'byte')}")
        OUT.print(f"sha256 of the architecture: {shown.digest()}")
    if not a.approve:
        ERR.print("nothing was approved; --approve NAME admits models of exactly this architecture")
        return 0
    home = CoordinatorDirectory(a.home)
    written = approve_architecture(home, a.approve, shown)
    if task is not None:
        keep_task(home, task)
    ERR.print(f"approved: {written.name}; to undo it, remove that file", markup=False)
    return 0


def _task(a: argparse.Namespace) -> Task | None:
    """The task file in the place of a model's; None: a model's file is shown.

    Raises:
        PoolRefusedError: both or neither, or it is no task.
    """
    if (a.file is None) is (a.task is None):
        raise PoolRefusedError("name a model's file, or a task file by --task, and not both")
    if a.task is None:
        return None
    try:
        return read_task(a.task)
    except TaskError as error:
        raise PoolRefusedError(str(error)) from None


def _of_task(task: Task, a: argparse.Namespace) -> Architecture:
    """The architecture of its models.

    Raises:
        PoolRefusedError: the number of parameters, or of bins, is none.
    """
    if not (a.parameters and 1 <= a.parameters <= MOST_PARAMETERS):
        raise PoolRefusedError("--parameters: as `lazaret-agent task check` prints them, 1 to 100 million")
    if not (0 <= a.bins <= MOST_BINS and a.bins % 2 == 0):
        raise PoolRefusedError(f"--bins: an even number up to {MOST_BINS}, as [evaluate] of the site says")
    try:
        return task_architecture(task, a.parameters, a.bins)
    except EvaluationError as error:
        raise PoolRefusedError(str(error)) from None


def _tell(report: dict[str, Any], as_lines: bool, out: Path) -> None:
    if as_lines:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    OUT.print(f"wrote {out.name}:", markup=False)
    for key, value in report.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            OUT.print(f"  {key}: {value}", markup=False)
    for left in report.get("left_out", ()):
        OUT.print(f"  without {left['release']}: {left['why']}", markup=False)


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = MappingProxyType(
    {"pool list": _list, "pool export": _export, "pool average": _average, "pool architecture": _architecture}
)


def run(arguments: argparse.Namespace) -> int:
    """Run one command; what it expects to go wrong becomes a sentence and exit status 1."""
    try:
        return _COMMANDS[arguments.command](arguments)
    except PoolRefusedError as error:
        ERR.print(f"refused: {error}", markup=False)
        return 1
