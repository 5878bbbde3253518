"""A command with a kill -9 before its Nth write in a folder: ``killed_writes N FOLDER MODULE arguments...``.

A write is whatever makes, changes, moves or removes a file or folder below ``FOLDER``. Databases are not seen: what
they write, other tests kill. Exit 0 or the command's own status: it came to its end before.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_MOVES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree", "os.chmod")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def main() -> int:
    left, folder = int(sys.argv[1]), Path(sys.argv[2]).resolve()
    run = import_module(f"{sys.argv[3]}.cli.main").main

    def watch(event: str, words: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event in _MOVES or (event == "open" and bool(words[2] & _WRITING))
        if not writes or not isinstance(words[0], str | bytes | os.PathLike):
            return
        if not Path(os.fsdecode(words[0])).absolute().is_relative_to(folder):
            return
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return int(run(sys.argv[4:]))


if __name__ == "__main__":
    sys.exit(main())
