"""The process that describes and prices proposals, as the console asks it: :mod:`agent.cli.proposal_main`.

It imports torch and every mechanism, and gives all of it back when it ends. It has the time of a page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent.service.proposal_form import ProposalForm, read_forms
from protos.common.errors import UnreachableError

_MODULE: Final = "agent.cli.proposal_main"
_PATIENCE_S: Final = 120.0
_UNFINISHED: Final = "unfinished"  # a finding of a dry run that a queue is the remedy for


class ProposalNotCheckedError(UnreachableError):
    """Nobody knows what is wrong with a proposal, or what it costs: the process that says so did not."""


@dataclass(frozen=True, slots=True)
class CheckedProposal:
    """What a command's own reader and its dry run say."""

    price: Mapping[str, Any] = field(default_factory=dict)  # as `--dry-run --json` tells it; of a training none
    findings: tuple[tuple[str, str], ...] = ()  # rule and sentence: known reasons for a refusal
    problem: str = ""  # of the configuration, in the reader's words; "": it is good


def read_all_forms() -> tuple[ProposalForm, ...]:
    """Every form.

    Raises:
        ProposalNotCheckedError: the process failed, or took too long.
    """
    done = _run(["forms"], Path("/"))
    if done.returncode != 0:
        raise ProposalNotCheckedError("the forms cannot be described: see agent.log, and `doctor`")
    return read_forms(done.stdout)


def check_proposal(home: Path, folder: Path, words: Sequence[str]) -> CheckedProposal:
    """Read a command's configuration, and price it.

    Args:
        home: the site's directory.
        folder: of the job's files, which the words name.
        words: of the command.
    Raises:
        ProposalNotCheckedError: the process failed, or took too long.
    """
    done = _run(["check", str(home.resolve()), *words], folder)
    told = _last_json(done.stdout)
    if told is not None:
        found = tuple((str(one["rule"]), str(one["detail"])) for one in told["findings"])
        return CheckedProposal(told["price"], tuple(one for one in found if one[0] != _UNFINISHED))
    if done.returncode == 0:
        return CheckedProposal()
    said = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 1 and said.startswith("refused: "):
        return CheckedProposal(problem=said.removeprefix("refused: "))
    if done.returncode == 2 and ": error: " in said:
        return CheckedProposal(problem=said.partition(": error: ")[2])
    raise ProposalNotCheckedError("this cannot be checked now: the process that reads it ended; try again")


def _run(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "118"}
    try:
        return subprocess.run(  # noqa: S603 - our own module, words without a shell
            [sys.executable, "-P", "-m", _MODULE, *words],
            cwd=folder,
            env=told,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProposalNotCheckedError(
            f"this was not checked within {_PATIENCE_S:.0f} seconds: the machine is busy; try again later"
        ) from None


def _last_json(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    try:
        told = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return told if isinstance(told, dict) and "findings" in told else None
