"""The pipe between the agent and its reader, and how the reader is bound and ended.

Messages are length-prefixed JSON, then byte strings; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any, Final

_MAX_HEAD: Final = 1 << 20  # bytes of a message's JSON
_MAX_PARTS: Final = 3
_FILES_WORTH: Final = 10  # a worker may use this many files' processor time, then another is started
# linux/prctl.h and linux/capability.h
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION_3: Final = 0x20080522
Part = bytes | memoryview  # of bytes: a view saves a copy of the picture


def send(stream: IO[bytes], head: dict[str, Any], parts: Sequence[Part] = ()) -> None:
    """One message. Raises: OSError, the other side is gone."""
    body = json.dumps({**head, "parts": [len(p) for p in parts]}).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes], max_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
    """One message. Raises: EOFError at the end of the stream, ValueError when it is not a message."""
    head = json.loads(_exactly(stream, size(struct.unpack(">I", _exactly(stream, 4))[0], _MAX_HEAD)))
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


def gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether a worker has died. It stays unburied, so that the number of its group is nobody else's yet."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a worker that nobody has waited for yet, and the process group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def confine(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound this process for good: memory, nothing written, few descriptors, no children, no more rights.

    ``cpu_seconds`` is what one file may use; the process as a whole may use ``_FILES_WORTH`` times that, and
    cannot raise it. Its parent's files and the network stay within reach. The kernel does not count the
    processes of root (setrlimit(2), RLIMIT_NPROC): only a worker of an ordinary user is kept from forking.

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
    if sys.platform == "linux":
        _drop_rights()


def _drop_rights() -> None:
    """No more rights by what is run (PR_SET_NO_NEW_PRIVS), no tracer, and none of root's capabilities.

    With CAP_SYS_RESOURCE a worker of root could lift every limit above.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    calls = (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        libc.capset(header, nothing),
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0),
    )
    if any(calls):
        raise OSError(ctypes.get_errno(), "the worker keeps rights that it must not have")


def _used() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime + usage.ru_stime) + 1


def allow_cpu(seconds: int) -> None:
    """Move the soft limit to ``seconds`` from what is used already: the worker serves many files."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = _used() + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def spent(seconds: int) -> bool:
    """Whether less than ``seconds``, one file's worth, is left below the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return hard != resource.RLIM_INFINITY and _used() + seconds > hard
