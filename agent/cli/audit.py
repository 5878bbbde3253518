"""The command that audits this installation's noise.

It reads no patient and needs no site: canaries are made here, and what comes out is compared with the law that every
differentially private release would claim. ``--full`` also breaks the training in every way that is known, one at a
time, and shows whether the audit saw it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

from agent.dp.clipping import ClippedSum, bookkeeping_engine, loop_engine, vmap_engine
from agent.dp.noise import SystemEntropy
from agent.privacy_audit.canaries import OneRun, one_run_bound
from agent.privacy_audit.conformance import Conformance
from agent.privacy_audit.gate import conformance, repeat_if_failed, toy_sensitivity
from agent.privacy_audit.negative_controls import CONTROLS, ENGINES, LARGE, NegativeControl, proved
from agent.privacy_audit.query_conformance import (
    histogram_conformance,
    look_conformance,
    part_conformance,
    sum_conformance,
)
from policies.accounting.rounding import epsilon_at_least, epsilon_text

ERR = Console(stderr=True, highlight=False)
_PEOPLE: Final = 200
_CHUNK: Final = 64
_ENGINES: Final[dict[str, ClippedSum]] = {
    "looped": loop_engine,
    "chunked": vmap_engine(_CHUNK),
    "bookkept": bookkeeping_engine(_CHUNK),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    part: str  # "shipped", or "broken on purpose"
    what: str
    good: bool  # the shipped code holds; a fault is seen
    told: str
    seconds: float


Told = tuple[bool, str]


def run(arguments: argparse.Namespace) -> int:
    """``audit``; exit 1 when the shipped code does not hold, or a fault was not seen."""
    if arguments.device != "cpu" and not torch.cuda.is_available():
        ERR.print("refused: this machine has no accelerator: --device cpu")
        return 1
    todo = [*_shipped(arguments.device), *(_bounded(arguments.device) if arguments.full else [])]
    todo += _broken(arguments.device) if arguments.full else []
    checks = list(_tried(todo, quiet=arguments.json))
    passed = all(check.good for check in checks)
    if arguments.json:
        told = {"device": arguments.device, "passed": passed, "checks": [asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return 0 if passed else 1
    out = Console(highlight=False)
    for part in dict.fromkeys(check.part for check in checks):
        table = Table("", "what", "seen", "s", title=f"{part}, {arguments.device}")
        for check in (c for c in checks if c.part == part):
            table.add_row("ok" if check.good else "FAIL", check.what, check.told, f"{check.seconds:.1f}")
        out.print(table)
    out.print("passed" if passed else "FAILED: do not release differentially private data from this machine")
    return 0 if passed else 1


Todo = tuple[str, str, Callable[[], Told]]


def _shipped(device: str) -> list[Todo]:
    """What the gate runs, for each engine."""
    entropy, todo = SystemEntropy(), list[Todo]()
    for name, engine in _ENGINES.items():
        todo.append(
            ("shipped", f"one patient moves a sum by the clip at most ({name})", partial(_moved, engine, device))
        )
        run = partial(repeat_if_failed, partial(conformance, entropy, engine, device=device))
        todo.append(("shipped", f"training follows its law ({name})", partial(_conforms, run)))
    queries = (
        ("a noisy sum", sum_conformance),
        ("the semantic histogram", histogram_conformance),
        ("a look at a model", look_conformance),
        ("a masked part of a federated step", part_conformance),
    )
    for what, query in queries:
        todo.append(
            (
                "shipped",
                f"{what} follows its law",
                partial(_conforms, partial(repeat_if_failed, partial(query, entropy))),
            )
        )
    return todo


def _bounded(device: str) -> list[Todo]:
    return [("shipped", "a real training proves no more than is claimed", partial(_proves, device))]


def _broken(device: str) -> list[Todo]:
    """Every negative control: it is good when it is seen."""
    part = "broken on purpose"
    todo: list[Todo] = [(part, control.what, partial(_seen, control, device)) for control in CONTROLS]
    todo += [(part, f"{what} (sensitivity)", partial(_exceeds, engine)) for what, engine in ENGINES.items()]
    large = [control for control in CONTROLS if control.what in LARGE]
    return todo + [(part, f"{c.what} (one run)", partial(_overproves, c, device)) for c in large]


def _tried(todo: list[Todo], quiet: bool) -> Iterator[Check]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=quiet or not ERR.is_terminal) as bar:
        task = bar.add_task("", total=len(todo))
        for part, what, check in todo:
            bar.update(task, description=what)
            began = time.perf_counter()
            try:
                good, told = check()
            except Exception as fault:  # noqa: BLE001 - a check that cannot run has not passed
                good, told = False, f"could not run: {type(fault).__name__}"
            bar.advance(task)
            yield Check(part, what, good, told, time.perf_counter() - began)


def _moved(engine: ClippedSum, device: str) -> Told:
    moved = toy_sensitivity(engine, device)
    return moved.holds, f"{moved.largest:.7f} of {moved.bound:g}, {moved.neighbours} neighbours"


def _conforms(run: Callable[[], Conformance]) -> Told:
    found = run()
    return found.holds, f"p = {found.p:.2g}" if found.holds else f"p = {found.p:.1g}: not so: {found.worst.what}"


def _seen(control: NegativeControl, device: str) -> Told:
    found = control.run(SystemEntropy(), _ENGINES["bookkept"], device=device)
    return not found.holds, f"p = {found.p:.1g}: not so: {found.worst.what}"


def _exceeds(engine: ClippedSum) -> Told:
    moved = toy_sensitivity(engine)
    return not moved.holds, f"{moved.largest:.3f} of {moved.bound:g}"


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Real handwriting, of scikit-learn; nobody's patients."""
    images, labels = load_digits(return_X_y=True)
    return (images[:_PEOPLE] / 16).astype(np.float32), labels[:_PEOPLE].astype(np.int64)


def _proves(device: str) -> Told:
    found: OneRun = one_run_bound(*_digits(), SystemEntropy(), device=device)
    return found.holds, found.sentence()


def _overproves(control: NegativeControl, device: str) -> Told:
    found = proved(control, *_digits(), SystemEntropy(), device)
    return (
        not found.holds,
        f"proved {epsilon_at_least(found.bound.epsilon)}, claimed {epsilon_text(found.claimed)}",
    )
