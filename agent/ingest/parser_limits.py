"""How the reader of hospital files is bound."""

from __future__ import annotations

import resource
from typing import Final

from protos.operations.confinement import drop_rights

_FILES_WORTH: Final = 10  # a worker may use this many files' processor time, then another is started


def apply_rlimits(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound this process for good: memory, nothing written, few descriptors, no children, no more rights.

    ``cpu_seconds`` is what one file may use; the process as a whole may use ``_FILES_WORTH`` times that, and
    cannot raise it. The kernel does not count the processes of root (setrlimit(2), RLIMIT_NPROC); what is within
    reach of it else, :mod:`protos.operations.confinement` closes.

    Raises:
        OSError: the kernel refuses one of it.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold a patient's file
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    hard = _used() + _FILES_WORTH * cpu_seconds
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    drop_rights()


def _used() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime + usage.ru_stime) + 1


def extend_cpu_limit(seconds: int) -> None:
    """Move the soft limit to ``seconds`` from what is used already: the worker serves many files."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = _used() + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def cpu_exhausted(seconds: int) -> bool:
    """Whether less than ``seconds``, one file's worth, is left below the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return hard != resource.RLIM_INFINITY and _used() + seconds > hard
