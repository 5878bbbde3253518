"""Output of a doctor: one line for each check, passed, failed with the remedy, or a note. Both sides use it.

A check is a function that returns findings; any exception is a failure that names only the kind of error. A check
that cannot decide never passes: it fails if something depends on it, and otherwise gives a note.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console

NOTES: Final = "notes"  # the key beside the names of checks; no check has this name
_WORDS: Final = {"pass": "ok   ", "note": "note ", "fail": "FAIL "}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line. The texts are for the operator: no patient, no path, no secret is in them."""

    name: str
    state: Literal["pass", "note", "fail"]
    said: str = ""  # what was found
    fix: str = ""  # of a failure: what to do, where ``said`` does not say it already

    def __post_init__(self) -> None:
        """A failure says what is wrong."""
        if self.name in ("", NOTES) or (self.state == "fail" and not self.said):
            raise ValueError("a finding has a name, and a failure says what is wrong")

    @property
    def wrong(self) -> str | None:
        """The problem and the remedy, in one text; None if there is no problem."""
        if self.state != "fail":
            return None
        return f"{self.said} [fix: {self.fix}]" if self.fix else self.said


def passed(name: str, said: str = "") -> CheckResult:
    """In order."""
    return CheckResult(name, "pass", said)


def note(name: str, said: str) -> CheckResult:
    """No fault, and worth knowing."""
    return CheckResult(name, "note", said)


def failed(name: str, said: str, fix: str = "") -> CheckResult:
    """Not in order."""
    return CheckResult(name, "fail", said, fix)


Check = Callable[[], Iterable[CheckResult]]


def examine(checks: Sequence[tuple[str, Check]], expected: tuple[type[BaseException], ...]) -> list[CheckResult]:
    """All findings of all checks, in their order; no check keeps another from being made.

    Args:
        checks: name and check. The name is that of the failure when the check itself fails.
        expected: exceptions whose texts are sentences for the operator, which say what to do.
    """
    found: list[CheckResult] = []
    for name, check in checks:
        try:
            found += check()
        except expected as error:
            found.append(failed(name, str(error) or type(error).__name__))
        except Exception as error:  # noqa: BLE001 - its text may quote anything
            said = f"the check itself failed ({type(error).__name__})"
            found.append(failed(name, said, "run `doctor` as the user of the service; if it fails again, report it"))
    return found


def healthy(findings: Iterable[CheckResult]) -> bool:
    """Did nothing fail?"""
    return not any(finding.state == "fail" for finding in findings)


def as_json(findings: Iterable[CheckResult]) -> str:
    """One object: name -> null if passed, else the problem and the remedy; and ``notes``: name -> note.

    What is noted is no pass: it is under ``notes`` alone. Of two findings of one name the failure is shown.
    """
    found: dict[str, str | dict[str, str] | None] = {}
    notes: dict[str, str] = {}
    for finding in findings:
        if finding.state == "note":
            notes[finding.name] = finding.said
        else:
            found[finding.name] = finding.wrong or found.get(finding.name)
    return json.dumps(found | {NOTES: notes}, indent=2)


def as_lines(findings: Sequence[CheckResult]) -> Iterator[str]:
    """For a terminal: a line for each, what to do below it, and the sum at the end."""
    for finding in findings:
        told = f": {finding.said}" if finding.said else ""
        yield f"{_WORDS[finding.state]} {finding.name}{told}"
        if finding.state == "fail" and finding.fix:
            yield f"      fix: {finding.fix}"
    wrong = sum(finding.state == "fail" for finding in findings)
    notes = sum(finding.state == "note" for finding in findings)
    told = f"{len(findings)} checks: {len(findings) - wrong - notes} passed, {wrong} failed"
    yield f"{told}, {notes} to note" if notes else told


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """A progress callback for folding a ledger (entries done, entries in all). It prints only on a terminal.

    A million entries take tens of seconds.
    """
    with contextlib.ExitStack() as shown:
        if not sys.stderr.isatty():
            yield lambda _done, _all: None
            return
        status = shown.enter_context(Console(stderr=True, highlight=False).status("looking …"))
        yield lambda done, of: status.update(f"folding the ledger: {done} of {of} entries")


def works(name: str, act: Callable[[], object]) -> Iterator[CheckResult]:
    """Passed where ``act`` raises nothing; what it raises is for :func:`examine`."""
    act()
    yield passed(name)


def answered(found: Sequence[CheckResult], json: bool) -> int:
    """Print the findings, for people or as one object.

    Returns:
        The exit status: 1 where something failed.
    """
    if json:
        sys.stdout.write(as_json(found) + "\n")
    else:
        terminal = Console(highlight=False)
        for line in as_lines(found):
            terminal.print(line, markup=False, soft_wrap=True)
    return 0 if healthy(found) else 1


def of_days(name: str, left: float, soon: float, fix: str) -> CheckResult:
    """A certificate's days that are left. NaN fails, as everything that cannot be told.

    Args:
        name: of the check.
        left: days.
        soon: below so many it fails while it is still good.
        fix: how to renew it.
    """
    if not left > 0:
        return failed(name, "it has expired" if not math.isnan(left) else "its end is unknown", fix)
    if not left > soon:
        return failed(name, f"it ends in {left:.1f} days", fix)
    return passed(name, f"valid for {left:.0f} more days" if left >= 2 else f"valid for {24 * left:.0f} more hours")
