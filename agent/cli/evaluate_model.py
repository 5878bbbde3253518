"""``evaluate MODEL --labels``: exact figures of a pooled model on the site's own labels, for the site alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from agent.cli.model_use import network_here, require_use
from agent.cli.output import answered_ingest, print_progress, say
from agent.cli.task_preview import refuse_place
from agent.domain import Example
from agent.errors import CommandError
from agent.event_log import open_log
from agent.ingest.context import IngestContext, open_ingest
from agent.mechanisms.federated.task_training import example_rule
from agent.prediction.evaluation import Judged, ModelFigures, figures, judged
from agent.prediction.model_folder import ExportedModel, read_model_folder
from agent.prediction.predictor import Prediction, of_accelerator, readable
from agent.prediction.results import card, words
from agent.release.held_out_evaluation import count_look
from agent.reports.task_preview import LabelWord, TaskPreview, render
from agent.storage.example_pixels import ImagePlace, places_of
from agent.storage.examples import read_found, sample
from agent.storage.site_directory import SiteDirectory
from policies.tasks.task import CLASSIFICATION, SEGMENTATION, Task
from protos.common.durable_files import create_file

_WARNING = (
    "This page shows images and figures of patients, exact and without noise. It is no release: it must not leave "
    "the hospital, in whole or in part. Research, not for diagnosis."
)
_LOOK = (
    "Is the label wrong, or the model? A wrong label counts as an error of the model.",
    "Do the errors have something in common: a device, a projection, an age, a device in the picture?",
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered_ingest(_evaluate, arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    home = SiteDirectory(arguments.home)
    model = read_model_folder(arguments.model, home.coordinator_key())
    require_use(home, model, arguments)
    with open_ingest(home, arguments.project) as way:
        refuse_place(arguments.out, way)
        network = network_here(home, model, arguments)
        looks = count_look(way.vault, model.task.input.modality)  # before a patient is read
        excluded = way.vault.opted_out()
        with of_accelerator():
            found = figures(model.task, _told(judged(model.task, network, _examples(way, model.task)), arguments))
        if not found.examples:
            raise CommandError("no example of the task has a label here: `cohort TASK.toml` shows why")
        if way.vault.opted_out() != excluded:
            raise CommandError("a patient opted out while the model ran: nothing was written; type the command again")
    try:
        create_file(arguments.out, page(model, found, looks), 0o600)
    except FileExistsError:
        raise CommandError(f"{arguments.out.name} was created meanwhile: name a new file") from None
    open_log(home.root / "agent.log").info("evaluated", count=looks)
    if arguments.json:
        line = {"page": arguments.out.name, "model": model.name, "looks": looks, "worst": len(found.worst)}
        sys.stdout.write(json.dumps(line) + "\n")
        return 0
    say(f"wrote {arguments.out.name}. {_WARNING}")
    say(f"the patients of this modality have been evaluated {looks} time(s)")
    return 0


def _told(found: Iterator[Judged], arguments: argparse.Namespace) -> Iterator[Judged]:
    for number, one in enumerate(found, 1):
        if not number % 100:
            print_progress("look", f"{number} examples", arguments.json)
        yield one


def _examples(way: IngestContext, task: Task) -> Iterator[tuple[str, Example, tuple[ImagePlace, ...]]]:
    """Every labelled example of the task, by the same rule as in a round."""
    rule = way.ingestion.rule_here(example_rule(task))
    for found in sample(way.vault, rule, np.random.default_rng(0)).order:
        for one in read_found(way.vault, rule, found):
            if not isinstance(one, str):
                yield found.person, one, tuple(places_of(way.vault, rule, found))


def page(model: ExportedModel, found: ModelFigures, looks: int) -> bytes:
    """The sheet: figures, then the worst errors."""
    task = model.task
    cards = []
    for number, one in enumerate(found.worst, 1):
        scores, drawn = readable(task, one.said)
        shown = Prediction((), "", "", "", one.pixels, scores, drawn, (), one.places)
        made = card(task, shown, number, (*words(task, shown), *_truth(task, one)))
        cards.append(replace(made, number=number))
    told = (
        f"The {len(cards)} worst of {found.examples} examples of {found.patients} patients, the worst first.",
        f"This is look number {looks} at patients of this modality, counted for good. With every further look, the "
        "best figure owes more to luck.",
        "If this hospital took part in the run, the model may have learned from these very patients: the figures are "
        "then too good.",
    )
    facts = (("model", model.name), ("SHA-256 of the model", model.sha256), ("SHA-256 of the task", task.digest))
    return render(
        TaskPreview(
            task.name, facts, told, tuple(cards), (), (),
            title="How good the model is here", warning=_WARNING, look=_LOOK, figures=found.figures,
        )
    )  # fmt: skip


def _truth(task: Task, one: Judged) -> tuple[LabelWord, ...]:
    """What is true of it, by the site's label."""
    names = task.labels.classes or task.labels.columns
    if task.kind == SEGMENTATION:
        return (LabelWord(f"1 - Dice {one.error:.2f}", "unknown"),)
    if task.kind == CLASSIFICATION:
        return (LabelWord(f"labelled {names[int(one.true[0])]}", "unknown"),)
    known = [(name, value) for name, value in zip(names, one.true, strict=True) if np.isfinite(value)]
    return tuple(LabelWord(f"labelled {name}: {value:.4g}", "unknown") for name, value in known)
