"""Short numbers for what waits, so that nobody carries digests from one command to the next.

A number belongs to one thing as long as that waits, and is never given to another thing afterwards. So what a person
looked at under a number is what a command finds under it, or nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from protos.common.durable_files import replace_file

FILE: Final = "numbers.json"  # in the home directory: the last number, and the number of each thing that waits
_LOCK: Final = "numbers.lock"  # no other file: making a release locks the directory itself, for hours


def numbers(home: Path, names: Sequence[str]) -> dict[str, int]:
    """The number of each thing that waits. What waits no longer loses its number.

    The file is written only where that changes something. Without the right to write, what is new has no number.

    Args:
        home: the directory of a side.
        names: of everything that waits, each once, the oldest first.
    Returns:
        By name; 0: it has none.
    """
    known = _read(home)
    if list(known["of"]) == list(names):
        return dict(known["of"])
    try:
        return _write(home, names)
    except PermissionError:
        return {name: known["of"].get(name, 0) for name in names}


def _write(home: Path, names: Sequence[str]) -> dict[str, int]:
    """Give numbers to what has none; two commands wait for each other."""
    handle = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle):
        fcntl.flock(handle, fcntl.LOCK_EX)
        known = _read(home)
        last, of = known["last"], {}
        for name in names:
            if name not in known["of"]:
                last += 1
            of[name] = known["of"].get(name, last)
        replace_file(home / FILE, json.dumps({"last": last, "of": of}, indent=1).encode(), 0o600)
        return of


def _read(home: Path) -> dict[str, Any]:
    """What is known; a file that cannot be read is as none."""
    try:
        found = json.loads((home / FILE).read_bytes())
        of, last = {str(name): int(number) for name, number in found["of"].items()}, int(found["last"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"last": 0, "of": {}}
    return {"last": max(last, 0, *of.values()), "of": of}
