"""``python ended_demo.py SIGNAL FOLDER WHEN MARKER``: start the demo, end it in the middle, say who is left.

WHEN is a regular expression: the signal is sent once a process runs whose command line it is found in.

This process takes in every orphan (Linux's child subreaper), so that a process of the demo cannot hide, whatever its
environment, its session or its group: after the demo's end it is a child of this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 900.0
_LEFT_S = 5.0  # what the demo killed is gone when it ends: `end_group` waits for it


def processes() -> dict[int, tuple[int, str]]:
    """Of every process that runs: its parent and its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if state != "Z":
                found[int(entry.name)] = (int(parent), line)
    return found


def marked(marker: str) -> set[int]:
    """Every process whose environment has the marker."""
    found = set()
    for number in processes():
        try:
            environment = Path(f"/proc/{number}/environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in environment:
            found.add(number)
    return found


def below(parent: int) -> dict[int, str]:
    """Every descendant, with its command line."""
    everybody = processes()
    found: dict[int, str] = {}
    ring = {parent}
    while ring:
        ring = {number for number, (above, _) in everybody.items() if above in ring}
        found |= {number: everybody[number][1] for number in ring}
    return found


def main() -> int:
    """Print what ran when the signal was sent, how the demo ended, and what is left."""
    number, folder, when, marker = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    signal.signal(number, signal.SIG_DFL)  # a shell lets its background jobs ignore SIGINT
    command = [sys.executable, "-m", "deploy.demo", "--out", str(folder / "out"), "--work", str(folder / "work")]
    environment = {**os.environ, "LAZARET_TEST_MARKER": marker}
    with (folder / "said").open("wb") as said:
        demo = subprocess.Popen([*command, "--patients", "6"], stdout=said, stderr=said, env=environment)
    until = time.monotonic() + _PATIENCE_S
    while not any(re.search(when, line) for line in below(os.getpid()).values()):
        if demo.poll() is not None or not time.monotonic() < until:
            sys.stderr.write((folder / "said").read_text()[-4000:])
            return 1
        time.sleep(0.2)
    ran = below(os.getpid())
    demo.send_signal(number)
    status = demo.wait()
    until = time.monotonic() + _LEFT_S  # what was killed may take a moment to be gone
    while (left := below(os.getpid())) | dict.fromkeys(others := marked(marker) - {os.getpid()}):
        if not time.monotonic() < until:
            break
        time.sleep(0.05)
    for one in left.keys() | others:  # nothing of this test stays either
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    told = {"ran": sorted(ran.values()), "status": status, "left": sorted(left.values()), "marked": len(others)}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
