"""``deface IN OUT``: take the faces off head scans, in files, or in the vault (``deface --vault``)."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agent.defacing.batch import DONE, VolumeOutcome, deface_batch, plan_batch
from agent.defacing.config import FacesSettings
from agent.defacing.engine import tools
from agent.errors import CommandError, SiteConfigError
from agent.event_log import open_log
from agent.ingest.context import open_ingest
from agent.ingest.vault_defacing import Swept, sweep
from agent.reports import defacing
from agent.reports.html_page import write
from agent.storage.site_directory import SiteDirectory
from agent.volumes.brain_masks import mask_from
from agent.volumes.errors import REASONS, NotDefacedError
from agent.volumes.grid import oriented
from agent.volumes.volume_io import read
from protos.common.errors import LazaretError

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
_EXPECTED: Final = (
    CommandError,
    SiteConfigError,
    FileExistsError,
    NotDefacedError,
)  # other texts may quote a file (P14)


def run(arguments: argparse.Namespace) -> int:
    """Exit 0: the face is off every volume that was found; 1: it is not, or nothing could be done."""
    try:
        return _vault(arguments) if arguments.vault else _files(arguments)
    except _EXPECTED as error:
        said = (
            "an output file already exists: name a new folder" if isinstance(error, FileExistsError) else str(error)
        )
        ERR.print(f"refused: {said}", markup=False, soft_wrap=True)
        return 1
    except LazaretError as error:
        ERR.print(f"refused: {type(error).__name__}", markup=False, soft_wrap=True)
        return error.exit_code


# -- files


def _files(arguments: argparse.Namespace) -> int:
    if arguments.source is None or arguments.out is None:
        raise CommandError("deface needs IN and OUT, or --vault")
    settings = _settings(arguments)
    work = plan_batch(arguments.source, arguments.out)
    if arguments.report is not None and arguments.report.exists():
        raise FileExistsError
    mask = _mask(arguments)
    with_ = tools(settings)
    if mask is not None:
        with_ = replace(with_, made_of=with_.made_of + hashlib.sha256(mask.tobytes()).hexdigest())
    rows: list[VolumeOutcome] = []
    try:
        with _bar("de-face", silent=arguments.json) as progress:
            task = progress.add_task("de-face", total=len(work))
            for some in deface_batch(work, arguments.out, with_, mask, pictures=arguments.report is not None):
                rows += some
                progress.advance(task)
    finally:
        if rows:
            if arguments.report is not None:
                write(arguments.report, defacing.render(rows, arguments.method, arguments.parts))
            _print(rows, arguments)
    return 1 if any(row.why for row in rows) else 0


def _settings(arguments: argparse.Namespace) -> FacesSettings:
    digest, network = "", arguments.network
    if arguments.method == "remodel" and network is None:
        raise CommandError("remodel needs --network, a file of `train remodeller`; or choose another --method")
    if network is not None:
        if not network.is_file():
            raise CommandError(f"--network: file not found: {network.name}")
        digest = hashlib.sha256(network.read_bytes()).hexdigest()
    try:
        settings = FacesSettings(arguments.method, network, digest, arguments.parts)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if network is not None:
        ERR.print(
            "the network counts as trained on public head scans: you vouch that no patient of yours is among them"
        )
    return settings


def _mask(arguments: argparse.Namespace) -> NDArray[np.bool_] | None:
    if arguments.mask is None:
        return None
    if not arguments.source.is_file():
        raise CommandError("--mask works with one file only")
    return mask_from(arguments.mask, oriented(read(arguments.source).volume))


def _print(rows: Sequence[VolumeOutcome], arguments: argparse.Namespace) -> None:
    method, says = arguments.method, defacing.describe_result(arguments.method, arguments.parts)
    if arguments.json:
        told: dict[str, Any] = {"method": method, "says": says}
        sys.stdout.write(json.dumps({**told, "volumes": [row.told() for row in rows]}) + "\n")
        return
    table = Table("volume", "what became of it", "brain voxels changed", "seconds", title=method)
    for row in rows:
        counts = ("" if n is None else str(n) for n in (row.brain_voxels_changed, row.seconds))
        table.add_row(Text(row.path), row.state, *counts)
    OUT.print(table)
    for code in dict.fromkeys(row.state for row in rows if row.why):
        OUT.print(f"{code}: {REASONS[code]}", markup=False, soft_wrap=True)
    if any(row.state == DONE for row in rows):
        OUT.print(f"{says}; headers are unchanged", markup=False, soft_wrap=True)


def _bar(title: str, *, silent: bool) -> Progress:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=ERR, disable=silent)


# -- the vault


def _vault(arguments: argparse.Namespace) -> int:
    if arguments.source is not None or arguments.mask is not None:
        raise CommandError("--vault takes no files: it uses the table [faces] of ingest.toml")
    if arguments.home is None:
        raise CommandError("--vault needs --home")
    home = SiteDirectory(arguments.home)
    with open_ingest(home, arguments.project) as way, _bar("de-face", silent=arguments.json) as progress:
        task = progress.add_task("de-face", total=None)
        swept = sweep(
            way, lambda done, of: progress.update(task, completed=done, total=of), once_more=arguments.once_more
        )
    open_log(arguments.home / "agent.log").info("defaced", count=swept.defaced, kept=sum(swept.kept.values()))
    _print_swept(swept, as_lines=arguments.json)
    return 1 if swept.kept else 0


def _print_swept(swept: Swept, *, as_lines: bool) -> None:
    if as_lines:
        told = {"studies": swept.studies, "defaced": swept.defaced, "withheld": dict(sorted(swept.kept.items()))}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    table = Table("studies that may show a face", "count", title=f"{swept.studies} looked at")
    table.add_row("de-faced", str(swept.defaced))
    for code, count in sorted(Counter(swept.kept).items()):
        table.add_row(f"withheld: {code}", str(count))
    OUT.print(table)
    for code in sorted(swept.kept):
        OUT.print(f"{code}: {REASONS[code]}", markup=False, soft_wrap=True)
