"""What ``release distill`` shows before anything leaves: the contact sheet, the figures, and the untrained model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.cli.output import OUT
from agent.cli.vetting_review import finite, power_json
from agent.errors import CommandError, SiteStorageError
from agent.mechanisms.distillation.teacher_student import Review
from agent.mechanisms.registry import Resumable
from agent.reports.contact_sheet import (
    by_chance,
    caught,
    explain_drop,
    kept_of,
    left_of,
    number,
    render,
    span,
    threshold,
)
from agent.reports.html_page import write
from protos.common.durable_files import replace_file


def write_blank(arguments: argparse.Namespace, mechanism: Resumable) -> int:
    """Write what the coordinator's operator approves the architecture by: nothing is priced, and no patient is read.

    Raises:
        CommandError: the file is there, or no model is released.
    """
    if arguments.blank.exists() or not arguments.blank.parent.is_dir():
        raise CommandError(f"{arguments.blank.name}: name a new file in an existing folder")
    untrained = mechanism.untrained()
    if untrained is None:
        raise CommandError('--blank is for a model: [output] release = "model"')
    replace_file(arguments.blank, untrained)
    if arguments.json:
        sys.stdout.write(json.dumps({"blank": arguments.blank.name}) + "\n")
    else:
        OUT.print(f"wrote {arguments.blank.name}, which is untrained: give it to the coordinator's operator")
    return 0


def shown(arguments: argparse.Namespace, patients: bool, say: Callable[[str, str], None]) -> Callable[[Review], None]:
    """What is done with a review before anything leaves: the sheet is written, and the figures are printed.

    Args:
        arguments: ``config``, ``sheet`` and ``mechanism``.
        patients: the samples were compared with patients' images.
        say: a line of progress for people.
    Returns:
        It raises SiteStorageError where the sheet cannot be written: nothing leaves then, and the making can go on.
    """

    def show(review: Review) -> None:
        if arguments.sheet is not None:
            told = f"{arguments.mechanism}, as {arguments.config.name} has it."
            _keep(arguments.sheet, render(review, told, patients))
            whose = "it shows patients" if patients else "nobody has reviewed what was dropped"
            say("sheet", f"wrote {arguments.sheet.name}: {whose}, so it stays at this site; delete it when decided")
        for line in in_words(review):
            say("review", line)

    return show


def _keep(path: Path, page: bytes) -> None:
    """Write the sheet, or half of it is no sheet.

    Raises:
        SiteStorageError: it has come up meanwhile, or the disk does not take it.
    """
    told = "nothing has left. Run the same command again with another --sheet: the training is kept"
    try:
        write(path, page)
    except FileExistsError:
        raise SiteStorageError(f"{path.name} was created meanwhile: {told}") from None
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise SiteStorageError(f"{path.name}: {error.strerror}: {told}") from None


def in_words(review: Review) -> list[str]:
    """A review in lines: what became of each condition, and how sure it is."""
    lines = []
    for tally in review.conditions:
        gone = "".join(f", {count} {explain_drop(reason)}" for reason, count in sorted(tally.dropped.items()))
        empty = f"; {tally.empty} groups left empty" if tally.empty else ""
        told = f"{tally.drawn} drawn, {kept_of(tally)} kept{gone}; the student learned {tally.learned}{empty}"
        lines.append(f"{tally.name}: {told}")
        if not tally.learned:
            lines.append(f"{tally.name}: the vetting dropped all of it, so the student did not learn it")
    lines.append(f"re-identified by the second verifier: {span(review.before)} of the teacher's samples")
    lines.append(f"the student's own images: {left_of(review.leaving)}")
    lines.append(f"re-identified by the second verifier: {span(review.after)} of what leaves")
    lines += [f"planted near-duplicates that were caught, {name}: {text}" for name, text in caught(review.power)]
    lines.append(f"mean alignment of what leaves: {number(review.alignment, '.3f')}")
    for name, value in sorted(review.thresholds.items()):
        told = by_chance(review.intervals, name)
        chance = f"; {told} of samples without a similar patient reach it (95 %)" if told else ""
        lines.append(f"threshold, {name}: {threshold(name, value)}{chance}")
    return lines


def as_json(review: Review) -> dict[str, Any]:
    """The same as data; a number that is none is null."""
    conditions = [
        {
            "name": tally.name,
            "drawn": tally.drawn,
            "kept": kept_of(tally),
            "dropped": dict(tally.dropped),
            "learned": tally.learned,
            "empty": tally.empty,
        }
        for tally in review.conditions
    ]
    return {
        "conditions": conditions,
        "reidentified": {"before": asdict(review.before), "after": asdict(review.after)},
        "power": power_json(review.power),
        "leaving": {
            "drawn": review.leaving.drawn,
            "kept": kept_of(review.leaving),
            "dropped": dict(review.leaving.dropped),
            "left": review.leaving.learned,
        },
        "thresholds": {name: finite(value) for name, value in review.thresholds.items()},
        "intervals": {name: [finite(end) for end in ends] for name, ends in review.intervals.items()},
        "alignment": finite(review.alignment),
    }
