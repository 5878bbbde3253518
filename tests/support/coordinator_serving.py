"""A coordinator that serves, as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def serving(home: list[str]) -> Iterator[None]:
    """`lazaret-coordinator serve`, as a process of its own, from its first word to an orderly end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator", *home, "serve"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        watchdog = threading.Timer(200, process.kill)
        watchdog.start()
        assert process.stdout.readline().startswith("serving")
        watchdog.cancel()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
