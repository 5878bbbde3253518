"""A process gives up what it does not need, then reads hostile bytes: limits, namespaces, capabilities, system calls.

What binds everywhere: limits on memory, processor time, file size, processes and, once the imports are done, on
descriptors: none may be opened any more, neither files nor sockets. Where the kernel permits it, also: empty user,
network and IPC namespaces, no capabilities, and a seccomp list of the calls that arithmetic on an open file needs.
The work gets one open descriptor, and answers with one line on standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

from protos.blocks import Opened

# prctl(2), unshare(2), capset(2), seccomp(2), linux/audit.h, linux/bpf_common.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CLONE_NEW: Final = 0x10000000 | 0x40000000 | 0x08000000  # user, network, IPC
_CAPABILITY_V3: Final = 0x20080522
_SECCOMP_MODE_FILTER: Final = 2
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06

# Of each machine: its audit number, and the numbers of read, write, close, fstat, lseek, mmap, mprotect, munmap, brk,
# rt_sigaction, rt_sigprocmask, rt_sigreturn, pread64, mremap, madvise, sched_yield, futex, exit, exit_group,
# clock_gettime, clock_nanosleep, gettimeofday, getrandom, restart_syscall.
_CALLS: Final = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 25, 28, 24, 202, 60, 231, 228, 230, 96, 318, 219),
    ),
    "aarch64": (
        0xC00000B7,
        (
            63,
            64,
            57,
            80,
            62,
            222,
            226,
            215,
            214,
            134,
            135,
            139,
            67,
            216,
            233,
            124,
            98,
            93,
            94,
            113,
            115,
            169,
            278,
            128,
        ),
    ),
}


class Unconfined(Exception):
    """This process could not be limited, and must not read."""


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def serve(work: Callable[[Opened, dict[str, Any]], dict[str, Any]]) -> None:
    """The life of a confined process: a request on standard input, the limits, the work, one line of JSON, the end.

    The request is a JSON object with ``descriptor`` (the open file), ``memory`` (bytes), ``cpu`` (seconds) and
    whatever else the work reads. The answer is the work's, or ``limit``: "memory", or "confinement" when a limit
    could not be set; with ``bound``: which layers of the confinement are in force.
    """
    request = json.loads(sys.stdin.buffer.read())
    source = Opened.of(int(request["descriptor"]))
    bound: list[str] = []
    try:
        bound = confine(int(request["memory"]), int(request["cpu"]))
        answer = work(source, request)
    except MemoryError:
        answer = {"limit": "memory"}
    except Unconfined:
        answer = {"limit": "confinement"}
    line = json.dumps({**answer, "bound": bound}, separators=(",", ":")).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]
    os._exit(0)  # nothing of the interpreter's own clean-up may run into the limits


def confine(memory_bytes: int, cpu_seconds: int) -> list[str]:
    """Bind this process for the rest of its life; returns the layers that are in force.

    Raises:
        Unconfined: a limit that works everywhere does not here; nothing may be read then.
    """
    try:
        return _confine(memory_bytes, cpu_seconds)
    except (OSError, ValueError):
        raise Unconfined from None


def _confine(memory_bytes: int, cpu_seconds: int) -> list[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    bound = []
    if libc.unshare(_CLONE_NEW) == 0:
        bound.append("namespaces")
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)  # the coordinator's end is this process's end
    _prctl(libc, _PR_SET_DUMPABLE, 0)
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    bound.append("no_new_privs")
    if libc.capset(struct.pack("=Ii", _CAPABILITY_V3, 0), bytes(24)) == 0:
        bound.append("no_capabilities")
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),  # a core dump would hold the artifact
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays open; nothing more
    ):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    bound.append("limits")
    if _allow_few_calls(libc):
        bound.append("seccomp")
    return bound


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _allow_few_calls(libc: ctypes.CDLL) -> bool:
    """Every other system call fails with EPERM; False where this machine's numbers or the kernel's filter lack."""
    if platform.machine() not in _CALLS or sys.byteorder != "little":
        return False
    program = filter_program(*_CALLS[platform.machine()])
    prepared = _Filter(len(program) // 8, program)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    return bool(libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(prepared), zero, zero) == 0)


def filter_program(machine: int, calls: tuple[int, ...]) -> bytes:
    """A classic BPF program over ``struct seccomp_data``: another machine's calls kill, unlisted ones fail.

    Each instruction is code, jump if true, jump if false, operand.
    """
    steps = [(_LOAD, 0, 0, 4), (_EQUALS, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for left, call in zip(range(len(calls), 0, -1), calls, strict=True):
        steps.append((_EQUALS, left, 0, call))
    steps += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
