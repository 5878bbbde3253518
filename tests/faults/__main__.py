"""``python -m tests.faults --kills 50``: kill -9 at so many random moments of federated runs, and a table of them.

Real processes as users start them: a coordinator, three agents with a link each, the operator's command. Each in
turn is killed at a moment drawn uniformly from the length of an undisturbed run; what a service manager would start
again is started again, the run is launched again, and afterwards four exported ledgers must agree: see
:mod:`tests.faults.audit`. Fifty take about fifteen minutes on two idle
cores, so CI does four in one run (``test_kills.py``). Exit 1: something does not hold, or a run has no end.

The lines cut and the disks filled are ``pytest -m slow tests/faults/test_lines.py tests/faults/test_disk.py``; the
latter mounts a tmpfs, and is skipped where that takes more rights than it has.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.kills import Trials
from tests.support.process_world import enrol_all


def main(argv: Sequence[str] | None = None) -> int:
    """Build a federation, kill, look, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; left out: another one each time")
    parser.add_argument("--json", action="store_true", help="the table as JSON on standard output")
    parser.add_argument("--keep", type=Path, help="leave all directories here, to look at what went wrong")
    arguments = parser.parse_args(argv)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="lazaret-faults-"))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"seed {seed}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of the stage end too
    try:
        trials = Trials(enrol_all(folder / "template"), folder, random.Random(seed), say)
        trials.run(arguments.kills)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    table = {**trials.table(), "seed": seed}
    if arguments.json:
        print(json.dumps(table, indent=2))
    say(f"{table['kills']} kills, {table['missed']} missed, {table['faults']} faults; {table['ends']}")
    return 1 if table["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
