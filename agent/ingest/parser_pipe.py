"""The pipe between the agent and its reader, and how the reader is bound and ended.

Messages are length-prefixed JSON, then byte strings; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
from collections.abc import Sequence
from typing import IO, Any, Final

from protos.operations.confinement import drop_rights

_MAX_HEAD: Final = 1 << 20  # bytes of a message's JSON
_MAX_PARTS: Final = 3
_FILES_WORTH: Final = 10  # a worker may use this many files' processor time, then another is started
Part = bytes | memoryview  # of bytes: a view saves a copy of the image


def send(stream: IO[bytes], head: dict[str, Any], parts: Sequence[Part] = ()) -> None:
    """One message. Raises: OSError, the other side is gone."""
    body = json.dumps({**head, "parts": [len(p) for p in parts]}).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes], max_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
    """One message. Raises: EOFError at the end of the stream, ValueError when it is not a message."""
    told = _exactly(stream, size(struct.unpack(">I", _exactly(stream, 4))[0], _MAX_HEAD))
    try:
        head = json.loads(told)
    except RecursionError:
        raise ValueError("not a message") from None
    if not isinstance(head, dict) or not isinstance(head.get("parts"), list) or len(head["parts"]) > _MAX_PARTS:
        raise ValueError("not a message")
    return head, [_exactly(stream, size(n, max_bytes)) for n in head.pop("parts")]


def size(number: object, most: int) -> int:
    """A length that the other side sent. Raises: ValueError, it is none or more than ``most``."""
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError("not a length")
    return number


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether a worker has died. It stays unburied, so that the number of its group is nobody else's yet."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a worker that nobody has waited for yet, and the process group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
