"""Output of ``status``: what is missing, in the order in which it is done, with the command for each; and the disk.

Where a doctor judges what is there, this says what to do next. Both sides use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from protos.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Step:
    """One thing on the way. The texts are for the operator: no patient and no secret is in them."""

    goal: str  # the heading that it stands under: "until images flow"
    name: str
    missing: str = ""  # what is missing; "": it is done
    command: str = ""  # what to type, or whom to ask
    said: str = ""  # of what is done


def collect(
    steps: Iterable[tuple[str, str, Callable[[], Iterable[Step]]]], expected: tuple[type[BaseException], ...]
) -> list[Step]:
    """All steps; one that cannot be told is missing, and keeps no other from being told.

    Args:
        steps: goal, name, and what finds the steps of that name out.
        expected: exceptions whose texts are sentences that say what to do.
    """
    found: list[Step] = []
    for goal, name, look in steps:
        try:
            found += look()
        except expected as error:
            found.append(Step(goal, name, str(error) or type(error).__name__))
        except Exception as error:  # noqa: BLE001 - its text may quote anything
            found.append(Step(goal, name, f"cannot be told ({type(error).__name__})", "run `doctor`"))
    return found


@dataclass(slots=True)
class SetupReport:
    """What ``setup`` has done: told line by line to people, or at the end as one object to a program."""

    as_json: bool
    written: list[str] = field(default_factory=list)  # files, by name
    telephone: dict[str, str] = field(default_factory=dict)  # what somebody must hear by telephone

    def say(self, text: str) -> None:
        """A line for people. It is not broken, since some are copied."""
        if not self.as_json:
            Console(highlight=False).print(text, markup=False, soft_wrap=True)

    def wrote(self, name: str, text: str) -> None:
        """A file was made."""
        self.written.append(name)
        self.say(f"wrote {name}: {text}")

    def tell(self, what: str, value: str) -> None:
        """Something must be told by telephone."""
        self.telephone[what] = value
        self.say(f"{what}: {value}")

    def end(self, steps: Sequence[Step]) -> None:
        """Say what is missing for the first goal that is not reached; a program hears all."""
        if self.as_json:
            told = {"written": self.written, "telephone": self.telephone, "steps": _as_json(steps)}
            sys.stdout.write(json.dumps(told, indent=2) + "\n")
            return
        missing = [step for step in steps if step.missing]
        for step in missing:
            if step.goal == missing[0].goal:
                self.say(f"next: {step.name}: {step.missing}")
                self.say(f"      {step.command}")


class AccessDeniedError(ConfigError):
    """This user may not read or write what the command needs."""


@contextlib.contextmanager
def as_owner(program: str) -> Iterator[None]:
    """Say who must type ``setup``, where this user may not.

    Raises:
        AccessDeniedError: a file or folder is another user's.
    """
    try:
        yield
    except PermissionError as error:
        name = Path(str(error.filename or "")).name
        raise AccessDeniedError(
            f"{name}: {error.strerror}: run `{program} setup` as the user who owns it, such as the service's"
        ) from None


def _as_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [
        {"goal": s.goal, "name": s.name, "done": not s.missing, "said": s.missing or s.said, "command": s.command}
        for s in steps
    ]


def disk(root: Path, parts: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Bytes on the disk by part; what no part names is "other", and "free" is what the file system has left.

    Args:
        root: the home directory.
        parts: name of a part -> its files and folders in ``root``; ``NAME*`` stands for all that begin so.
    """
    if not root.is_dir():
        return {}
    sizes = {name: 0 for name in (*parts, "other")}
    for entry in os.scandir(root):
        named = (n for n, has in parts.items() if any(_fits(entry.name, one) for one in has))
        sizes[next(named, "other")] += _size(entry)
    return {**{name: size for name, size in sizes.items() if size}, "free": shutil.disk_usage(root).free}


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _size(entry: os.DirEntry[str]) -> int:
    """What a file, or everything in a folder, takes; what vanishes meanwhile takes nothing."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return sum(_size(one) for one in os.scandir(entry.path))
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def answered(steps: Sequence[Step], sizes: Mapping[str, int], as_json: bool) -> int:
    """Print them, for people or as one object.

    Returns:
        The exit status: 1 where something is missing.
    """
    missing = [step for step in steps if step.missing]
    if as_json:
        sys.stdout.write(json.dumps({"steps": _as_json(steps), "disk": dict(sizes)}, indent=2) + "\n")
        return 1 if missing else 0
    out, number, goal = Console(highlight=False), 0, ""
    for step in steps:
        if step.goal != goal:
            goal = step.goal
            out.print(f"{goal}:", markup=False)
        number += bool(step.missing)
        mark = f"{number}." if step.missing else "ok"
        told = step.missing or step.said
        out.print(f"  {mark:3} {step.name}{f': {told}' if told else ''}", markup=False, soft_wrap=True)
        if step.missing and step.command:
            out.print(f"      {step.command}", markup=False, soft_wrap=True)
    if sizes:
        out.print("disk:")
    for name, size in sorted(sizes.items(), key=lambda one: (one[0] == "free", -one[1])):
        out.print(f"  {_amount(size):>9}  {name}", markup=False)
    out.print(f"{len(missing)} step(s) are missing" if missing else "nothing is missing")
    return 1 if missing else 0


def _amount(size: int) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.1f} TiB"
