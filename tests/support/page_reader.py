"""Who types the blocks of a page in the folder in which all homes lie, beside services that run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

from tests.support.command_server import python
from tests.support.process_world import ProcessWorld

ROOT: Final = Path(__file__).parents[2]
COMMANDS: Final = {"lazaret-agent": "-m agent", "lazaret-coordinator": "-m coordinator", "python": ""}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


class PageReader(ProcessWorld):
    """Whoever reads a page and types it."""

    def prepare(self) -> None:
        """The programs, by the names that a page calls them."""
        folder = self.work / "bin"
        folder.mkdir()
        for name, how in COMMANDS.items():
            (folder / name).write_text(f'#!/bin/sh\nexec "{python()}" {how} "$@"\n')
            (folder / name).chmod(0o755)

    def begin(self, block: str) -> subprocess.Popen[str]:
        """Type a block; whoever waits for its end gets what it printed."""
        return subprocess.Popen(
            ["bash", "-c", f"set -eu\n{block}"],
            cwd=self.work,
            env={
                **os.environ,
                "PATH": f"{self.work / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "200",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, block: str) -> str:
        """Type a block; every line of it must succeed."""
        done = self.begin(block)
        said, _ = done.communicate(timeout=2400)
        assert done.returncode == 0, f"{block}\n{said[-4000:]}"
        return said
