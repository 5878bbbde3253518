"""``task preview``: write a sheet of a task's inputs as its network sees them, for this site's reviewer alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from agent.cli.output import answered_ingest, say
from agent.cli.task import input_words
from agent.domain import Example
from agent.errors import CommandError, TransformError
from agent.federation import run_plan
from agent.federation.run_mechanism import read_mechanism
from agent.ingest.context import IngestContext, open_ingest
from agent.mechanisms.federated.task_training import SeenExample, as_seen, example_rule, view_of
from agent.reports.task_preview import LabelWord, Plane, PreviewCard, TaskPreview, planes_of, render
from agent.storage import read_only_access
from agent.storage.example_pixels import ImagePlace, places_of
from agent.storage.examples import REASONS, ExampleSample, read_found, sample
from agent.storage.instance_index import FoundExample
from agent.storage.label_tables import read_declaration
from agent.storage.site_directory import MAIN, SiteDirectory
from policies.tasks.task import CLASSIFICATION, MULTI_LABEL, REGRESSION, SEGMENTATION, Task, read_task
from policies.tasks.transforms import TransformSpec
from protos.common.durable_files import create_file

_MOST: Final = 48  # examples on a sheet: it is held in memory
_TRIES: Final = 4  # as many are opened for each one that is asked for, at most
_VIEWS: Final = {2: 3, 3: 2}  # random views of each that are drawn, of images and of volumes


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which task, in which project, and how the command says so."""

    task: Task
    project: str
    looks: bool  # part of the patients are held out, and looked at


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """One example that the sample drew: its card, or why it is left out."""

    found: FoundExample
    number: int
    card: PreviewCard | None
    why: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered_ingest(_preview, arguments)


def _preview(arguments: argparse.Namespace) -> int:
    """Draw a sample, and write the sheet whole or not at all."""
    if not arguments.count <= _MOST:
        raise CommandError(f"--count: at most {_MOST} examples fit on a sheet")
    home = SiteDirectory(arguments.home)
    asked = _asked(home, arguments)
    with open_ingest(home, asked.project) as way:
        refuse_place(arguments.out, way)
        rng = np.random.default_rng(arguments.seed)
        chosen = sample(way.vault, way.ingestion.rule_here(example_rule(asked.task)), rng)
        drawn = _draw(way, asked.task, chosen, arguments.count, rng)
        shown = _write(way, arguments.out, drawn, lambda left: _sheet(asked, chosen, left, arguments.seed))
    _say(arguments, asked.task, chosen, shown)
    return 0 if any(one.card is not None for one in shown) else 1


def _asked(home: SiteDirectory, arguments: argparse.Namespace) -> _Asked:
    """The task of a file, or of the plan of a run.

    Raises:
        TaskError: the file is no task.
        CommandError: there is no such plan, or it is of another project.
    """
    if not arguments.run:
        return _Asked(read_task(arguments.file), arguments.project or MAIN, looks=False)
    with read_only_access.notes(home) as notes:
        plans = run_plan.kept(notes.note(run_plan.NOTE) if notes is not None else None)
    plan = plans.get(arguments.run)
    if plan is None:
        known = ", ".join(plans) or "none"
        raise CommandError(f"no plan of a run {arguments.run[:64]} was asked for here; those that were: {known}")
    if arguments.project not in (None, plan.project):
        raise CommandError(f"--project: the plan of {plan.run} is of the project {plan.project}: leave --project out")
    mechanism = read_mechanism(plan.config)
    return _Asked(mechanism.task, plan.project, looks=mechanism.evaluate is not None)


def refuse_place(out: Path, way: IngestContext) -> None:
    """A sheet is never written over a file, nor where the agent reads images or keeps what is its own.

    Raises:
        CommandError: it would be.
    """
    if out.exists() or out.is_symlink() or not out.parent.is_dir():
        raise CommandError(f"{out.name}: name a new file for the sheet in an existing folder")
    place, read = out.parent.resolve(), [folder.path for folder in (way.usual(), *way.ingestion.folders)]
    if any(place.is_relative_to(folder.resolve()) for folder in (way.home.root, *read)):
        raise CommandError(f"{out.name}: this folder is the agent's own, or `ingest` reads it: name a file elsewhere")


# -- the sample


def _draw(
    way: IngestContext, task: Task, chosen: ExampleSample, count: int, rng: np.random.Generator
) -> list[_Drawn]:
    """So many examples in the order of the sample, and those between them that are left out, as in a round."""
    drawn: list[_Drawn] = []
    shown = 0
    for found in chosen.order[: _TRIES * count]:
        for one in _opened(way, task, found, rng):
            drawn.append(replace(one, number=len(drawn) + 1))
            shown += one.card is not None
        if shown >= count:
            break
    return drawn


def _opened(way: IngestContext, task: Task, found: FoundExample, rng: np.random.Generator) -> Iterable[_Drawn]:
    """The examples that the vault gives of it, each as its card or with the reason why a round leaves it out."""
    rule = way.ingestion.rule_here(example_rule(task))
    for one in read_found(way.vault, rule, found):
        if isinstance(one, str):
            yield _Drawn(found, 0, None, REASONS[one])
            continue
        try:
            yield _Drawn(found, 0, _card(way, task, found, one, rng))
        except KeyError:
            yield _Drawn(found, 0, None, REASONS["gone"])
        except TransformError as error:
            yield _Drawn(found, 0, None, str(error))


def _card(
    way: IngestContext, task: Task, found: FoundExample, example: Example, rng: np.random.Generator
) -> PreviewCard:
    """One example after the task's transforms, and random views of it if the task augments.

    Raises:
        KeyError: it was deleted meanwhile.
        TransformError: a transform cannot take it.
    """
    seen = as_seen(task, example)
    places = places_of(way.vault, example_rule(task), found)
    views = []
    for _ in range(_VIEWS[len(task.input.size)] if task.training.augmentation else 0):
        drawn = _planes(task, view_of(task, seen, int(rng.integers(1 << 32))), places)
        views.append(tuple(replace(plane, title="", place=ImagePlace()) for plane in drawn))  # it may be mirrored
    ends = float(seen[0].min()), float(seen[0].max())
    return PreviewCard(0, tuple(_words(way, task, seen)), _planes(task, seen, places), tuple(views), ends)


def _planes(task: Task, seen: SeenExample, places: list[ImagePlace]) -> tuple[Plane, ...]:
    mask = seen[1].astype(np.int64) if task.kind == SEGMENTATION else None
    return planes_of(seen[0], mask, places, colour=task.input.channels == 3 and task.input.example == "image")


def _words(way: IngestContext, task: Task, seen: SeenExample) -> Iterable[LabelWord]:
    """What is to be learned of it."""
    target, labels = seen[1], task.labels
    if task.kind == CLASSIFICATION:
        yield LabelWord(labels.classes[int(target[0])], "there")
    elif task.kind == SEGMENTATION:
        for segment, name in enumerate(labels.classes, 1):
            share = float((target == segment).mean())
            yield LabelWord(
                f"{name} {share:.1%}" if share else f"{name}: none", "there" if share else "absent", segment
            )
    elif task.kind == MULTI_LABEL:
        for name, value in zip(labels.classes or labels.columns, target, strict=True):
            if np.isnan(value):
                yield LabelWord(f"{name}: not known", "unknown")
            else:
                yield LabelWord(name, "there") if value else LabelWord(f"{name}: no", "absent")
    else:
        assert task.kind == REGRESSION
        columns = {column.name: column for column in read_declaration(way.vault, labels.table).columns}
        for name, low, high, value in zip(labels.columns, labels.low, labels.high, target, strict=True):
            if np.isnan(value):
                yield LabelWord(f"{name}: not known", "unknown")
            else:
                yield LabelWord(f"{name}: {low + value * (high - low):.4g} {columns[name].unit}".strip(), "there")


# -- the sheet


def _write(
    way: IngestContext, out: Path, drawn: list[_Drawn], page: Callable[[list[_Drawn]], TaskPreview]
) -> list[_Drawn]:
    """Write the sheet without those who have opted out meanwhile, and return what is on it. Of nothing there is none.

    Raises:
        CommandError: there is a file of this name now.
    """
    while True:
        excluded = way.vault.opted_out()
        left = [one for one in drawn if one.found.person not in excluded]
        body = render(page(left))
        if way.vault.opted_out() == excluded:
            break
    if all(one.card is None for one in left):
        return left
    try:
        create_file(out, body, 0o600)
    except FileExistsError:
        raise CommandError(f"{out.name} was created meanwhile: name a new file") from None
    return left


def _sheet(asked: _Asked, chosen: ExampleSample, drawn: list[_Drawn], seed: int) -> TaskPreview:
    task, cards = asked.task, [replace(one.card, number=one.number) for one in drawn if one.card is not None]
    told = [
        f"{len(cards)} of at most {len(chosen.order)} examples of {chosen.patients} patients, drawn by seed {seed}.",
        "Nobody comes twice before everybody came once, and labels take turns: rare ones are more frequent here than "
        "in a round. Another seed draws others.",
        "Looking costs no budget. What you decide after looking is not priced: no epsilon covers it.",
    ]
    if asked.looks:
        told.append("The run also looks at patients that it does not train on. They are among these.")
    if task.training.augmentation:
        told.append(
            f"A round sees {task.training.views} random views of each example and not the input itself. It draws its "
            "own. A view may be turned or mirrored, so it has no letters."
        )
    return TaskPreview(
        task=task.name,
        facts=tuple(_facts(task)),
        told=tuple(told),
        cards=tuple(cards),
        not_shown=tuple((one.number, one.why) for one in drawn if one.card is None),
        left_out=tuple((REASONS[one.reason], str(one.images), str(one.patients)) for one in chosen.left_out),
    )


def _facts(task: Task) -> Iterable[tuple[str, str]]:
    """What the task says of its inputs and labels."""
    seen, labels = task.input, task.labels
    yield "kind", task.kind
    yield "input", input_words(task)
    yield "pixel spacing, mm", " x ".join(f"{mm:g}" for mm in seen.spacing) or "not set: fitted to the size"
    usual = "not set: each volume's own range" if len(seen.size) == 3 else "not set: as the image came in"
    yield "window", " to ".join(f"{value:g}" for value in seen.window) or usual
    yield "transforms", "; ".join(map(_transform, seen.transforms)) or "none"
    yield "random views", "; ".join(map(_transform, task.training.augmentation)) or "none"
    table = f"table {labels.table}: {', '.join(labels.columns)}" if labels.table else "of each image itself"
    yield "labels", "masks" if task.kind == SEGMENTATION else table
    yield "outputs", ", ".join(labels.classes or labels.columns)
    yield "SHA-256 of the task", task.digest


def _transform(spec: TransformSpec) -> str:
    values = ", ".join(f"{key} {value}" for key, value in spec.to_table().items() if key != "name")
    return f"{spec.name} ({values})" if values else spec.name


def _say(arguments: argparse.Namespace, task: Task, chosen: ExampleSample, drawn: list[_Drawn]) -> None:
    """Counts for this site alone, as ``cohort`` shows them, and where the sheet is."""
    shown = sum(one.card is not None for one in drawn)
    if arguments.json:
        told = {
            "task": task.name,
            "digest": task.digest,
            "patients": chosen.patients,
            "possible": len(chosen.order),
            "shown": shown,
            "not_shown": dict(Counter(one.why for one in drawn if one.card is None)),
            "left_out": [asdict(one) for one in chosen.left_out],
            "seed": arguments.seed,
            "sheet": str(arguments.out) if shown else None,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        return
    for one in drawn:
        if one.card is None:
            say(f"example {one.number}: left out: {one.why}; study {one.found.heads[0].study}")
    say(f"{shown} of at most {len(chosen.order)} examples of {chosen.patients} patients are on the sheet")
    if shown:
        say(f"wrote {arguments.out.name}: it shows patients, so it stays at this site; delete it when decided")
    else:
        say("no sheet was written: `cohort TASK.toml` shows what is left out of this task, and why")
