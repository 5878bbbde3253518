"""A Python module of ours in a process of its own, with inherited descriptors and a closed environment.

The child gets no standard stream, and of the environment only what is named: a password may stand in the rest. What
it may do is its own first act (:mod:`protos.operations.confinement`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

_KEPT: Final = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHOME"),
    "PYTHONDONTWRITEBYTECODE",
)
_GIVES_BACK: Final = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"}  # of glibc: malloc(3), mallopt(3)
_LEAVE_S: Final = 2.0


def start(
    module: str,
    arguments: Sequence[str],
    descriptors: Sequence[int],
    kept: Collection[str],
    *,
    gives_back: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``python -P -m module`` with one thread for numerical libraries: only such a process can be confined.

    Args:
        module: of this installation.
        arguments: its words, after the numbers of the descriptors.
        descriptors: open ones that it inherits.
        kept: further names of the environment that reach it.
        gives_back: large blocks (from 128 KiB) that it lets go of go back to the system at once, which takes time.
    Raises:
        OSError: no process can be started.
    """
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: os.environ[name] for name in (*_KEPT, *kept) if name in os.environ}
    return subprocess.Popen(  # noqa: S603 - this very interpreter and a module of ours
        [sys.executable, "-P", "-m", module, *map(str, descriptors), *arguments],
        env={
            **environment,
            **(_GIVES_BACK if gives_back else {}),
            **{"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        },
        pass_fds=list(descriptors),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a traceback may quote what came over the wire
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process whose pipe was closed, which ends it; one that does not see that is killed."""
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
