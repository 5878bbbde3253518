"""What a doctor says: one line for each check, passed, failed with what to do, or worth a note. Both sides use it.

A check is a function that returns findings; whatever it raises is a failure with the kind of fault alone. What cannot
be told is never a pass: it is a failure where something depends on it, else a note.
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
class Finding:
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
        """What is wrong and what to do, in one text; None where nothing is."""
        if self.state != "fail":
            return None
        return f"{self.said} [fix: {self.fix}]" if self.fix else self.said


def passed(name: str, said: str = "") -> Finding:
    """In order."""
    return Finding(name, "pass", said)


def noted(name: str, said: str) -> Finding:
    """No fault, and worth knowing."""
    return Finding(name, "note", said)


def failed(name: str, said: str, fix: str = "") -> Finding:
    """Not in order."""
    return Finding(name, "fail", said, fix)


Check = Callable[[], Iterable[Finding]]


def examine(checks: Sequence[tuple[str, Check]], expected: tuple[type[BaseException], ...]) -> list[Finding]:
    """All findings of all checks, in their order; no check keeps another from being made.

    Args:
        checks: name and check. The name is that of the failure when the check itself fails.
        expected: exceptions whose texts are sentences for the operator, which say what to do.
    """
    found: list[Finding] = []
    for name, check in checks:
        try:
            found += check()
        except expected as error:
            found.append(failed(name, str(error) or type(error).__name__))
        except Exception as error:  # noqa: BLE001 - its text may quote anything
            said = f"the check itself failed ({type(error).__name__})"
            found.append(failed(name, said, "run `doctor` as the user of the service; if it stays, report it"))
    return found


def healthy(findings: Iterable[Finding]) -> bool:
    """Did nothing fail?"""
    return not any(finding.state == "fail" for finding in findings)


def as_json(findings: Iterable[Finding]) -> str:
    """One object: name -> null where it passed, or what is wrong and what to do; and ``notes``: name -> what to know.

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


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
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
    """What hears how many of a ledger's entries are folded, and of how many: told to somebody at a terminal alone.

    A million entries take tens of seconds.
    """
    with contextlib.ExitStack() as shown:
        if not sys.stderr.isatty():
            yield lambda _done, _all: None
            return
        status = shown.enter_context(Console(stderr=True, highlight=False).status("looking …"))
        yield lambda done, of: status.update(f"folding the ledger: {done} of {of} entries")


def of_days(name: str, left: float, soon: float, fix: str) -> Finding:
    """A certificate's days that are left. NaN fails, as everything that cannot be told.

    Args:
        name: of the check.
        left: days.
        soon: below so many it fails while it is still good.
        fix: how to renew it.
    """
    if not left > 0:
        return failed(name, "it has ended" if not math.isnan(left) else "its end cannot be told", fix)
    if not left > soon:
        return failed(name, f"it ends in {left:.1f} days", fix)
    return passed(name, f"good for {left:.0f} more days" if left >= 2 else f"good for {24 * left:.0f} more hours")
