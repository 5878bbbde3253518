"""What the commands of the agent print, and how they end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from agent.errors import CommandError
from protos.common.errors import LazaretError

if TYPE_CHECKING:
    from agent.ingest.pipeline import IngestReport
    from policies.review.rules import Verdict

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
Listener = Callable[[str, str, int, int], None]  # step, detail, done, of how many (0: nobody knows)
LISTENERS: Final[list[Listener]] = []  # hear of all progress, printed or not
OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a line for people. It is not broken, since some are copied."""
    OUT.print(text, markup=False, soft_wrap=True)


def print_progress(name: str, detail: str, silent: bool) -> None:
    """One line of progress."""
    _tell(name, detail)
    if not silent:
        OUT.print(f"{name:>6}  {detail}", markup=False, soft_wrap=True)


def print_verdict(release: str, mechanism: str, verdict: Verdict, as_lines: bool) -> None:
    """A verdict, for people or as JSON."""
    if as_lines:
        findings = [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]
        line = {"release": release, "mechanism": mechanism, "admitted": verdict.admitted}
        sys.stdout.write(json.dumps({**line, "level": verdict.level, "findings": findings}) + "\n")
        return
    OUT.print(f"admitted at level {verdict.level}: {release}" if verdict.admitted else "refused:")
    for finding in verdict.findings:
        OUT.print(f"  {finding.rule}: {finding.detail}", markup=False)


def _tell(step: str, detail: str, done: int = 0, of: int = 0) -> None:
    for listener in LISTENERS:
        listener(step, detail, done, of)


class _Bars(Progress):
    """Bars of which listeners hear, too, also where none is drawn."""

    def update(self, task_id: TaskID, **changed: Any) -> None:
        """See :class:`rich.progress.Progress`."""
        super().update(task_id, **changed)
        task = self._tasks[task_id]
        _tell(task.description, str(task.fields.get("told", "")), int(task.completed), int(task.total or 0))


def progress_columns(silent: bool) -> Progress:
    """Name, bar, counts, clocks; the losses take the room that is left, and are cut where there is none."""
    fixed = Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", table_column=fixed),
        BarColumn(16, table_column=Column(min_width=16)),
        MofNCompleteColumn(table_column=fixed),
        TimeElapsedColumn(table_column=fixed),
        TimeRemainingColumn(table_column=fixed),
        TextColumn("{task.fields[told]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    return _Bars(*columns, console=ERR, disable=silent, expand=True)


def require_device(device: str, instead: str) -> None:
    """Refuse a device that this machine lacks, and say what to type ``instead``.

    Raises:
        CommandError: there is no accelerator.
    """
    import torch  # noqa: PLC0415 - two seconds, which only what trains and draws needs to wait for

    if device != "cpu" and not torch.cuda.is_available():
        raise CommandError(f"this machine has no accelerator: {instead}")


@contextmanager
def as_sentences() -> Iterator[None]:
    """What public images are no good for is said as it is: no patient is among them."""
    try:
        yield
    except LazaretError:
        raise
    except ValueError as error:
        from agent.models.image_folder import ImageFolderError  # noqa: PLC0415 - torch, as above

        raise ImageFolderError(f"{error}") from error


# -- of what comes in


def answered_ingest(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command of ingest. Of what it refuses, the operator also reads what to do about it."""
    from agent.ingest import errors  # noqa: PLC0415 - pydicom, which these commands import anyway

    try:
        return command(arguments)
    except errors.EXPECTED as error:
        ERR.print(f"refused: {errors.sentence(error)}", markup=False, soft_wrap=True)
        return 1


def print_stderr(text: str) -> None:
    """Print a sentence for the operator, beside what the command gives out."""
    ERR.print(text, markup=False, soft_wrap=True)


@contextmanager
def file_progress(title: str, silent: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A bar for files: it is told how many are done, and of how many if that is known."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _Bars(*columns, console=ERR, disable=silent) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, whole: progress.update(task, completed=done, total=whole)


def print_ingest(report: IngestReport, as_lines: bool, more: Mapping[str, Any] = _NOTHING) -> None:
    """What became of the files that were read, for people or as JSON."""
    if as_lines:
        counts = {"files": report.files, "kept": report.kept, "duplicates": report.duplicates}
        sys.stdout.write(json.dumps({**counts, "quarantined": dict(report.quarantined), **more}) + "\n")
        return
    table = Table("what became of the files", "count", title=f"{report.files} files read")
    table.add_row("de-identified and kept in the vault", str(report.kept))
    table.add_row("known already", str(report.duplicates))
    for reason, count in report.quarantined.items():
        table.add_row(f"quarantined: {reason}", str(count))
    OUT.print(table)
    if report.quarantined:
        OUT.print("`quarantine list` says what to do about each")
