"""Bounds that a process of long work sets itself, so that it takes what the service leaves."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from pathlib import Path
from typing import Final

_NICE: Final = 10
_OOM_SCORE: Final = "900"  # of 1000: when memory runs out, the kernel ends a job before the service
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_LITTLE: Final = 64 << 20  # bytes: what a library may want at once
_IDLE: Final = 3 << 13  # IOPRIO_CLASS_IDLE, ioprio_set(2)


def bound(memory: int) -> None:
    """Take what the service leaves.

    Args:
        memory: most bytes of data (RLIMIT_DATA); 0: no bound. The address space is not bound: torch maps far more
            than it uses.
    """
    os.nice(_NICE)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):  # a kernel may have no such classes
        ctypes.CDLL(None, use_errno=True).syscall(_IOPRIO_SET.get(os.uname().machine, -1), 1, 0, _IDLE)
    with contextlib.suppress(OSError):  # under a service manager that forbids it, the kernel chooses
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when torch and numpy load
        os.environ[name] = str(max(1, len(cores) - 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold patients' images
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def nearly_exhausted() -> bool:
    """Whether so little memory is left that a fault may be of it, whatever a library calls it.

    It is asked for, and not read: a confined process cannot open /proc.
    """
    try:
        mmap.mmap(-1, _LITTLE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return True
    return False
