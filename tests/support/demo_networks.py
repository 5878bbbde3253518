"""The networks of the demo's clinics, trained once and kept in ``tests/vectors/networks``; run this to write them.

The commands are the demo's own, on the demo's own public phantoms; tests of the demo vouch for these files instead of
training for minutes. A file that the program does not read any more must be written again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from deploy.demo import chests, eyes

KEPT: Final = Path(__file__).parents[1] / "vectors" / "networks"
STEPS: Final = 24  # of the generator: its eyes are blurs, and no test looks at them


def train(out: Path) -> None:
    """Train all of them, and lay them into ``out``."""

    def run(command: list[str]) -> str:
        print(" ".join(command[5:9]), file=sys.stderr, flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for names, trained in (
            (eyes.NETWORKS, lambda: eyes.train(work, STEPS, run, lambda _: None)),
            (tuple(chests.STEPS), lambda: chests.train(work, run, lambda _: None)),
        ):
            if all((out / f"{name}.safetensors").exists() for name in names):
                continue
            trained()
            for name in names:
                shutil.copy(work / "networks" / f"{name}.safetensors", out)


if __name__ == "__main__":
    train(KEPT)
