"""Confine a process that reads hostile bytes: Landlock, a seccomp filter, no capabilities, limits.

A process imports what it needs, receives its descriptors, calls :func:`confine`, and only then reads untrusted input.
Landlock (landlock(7), by its ABI 1 to 7) denies all files except those of the interpreter and, for receivers, one
spool folder; from ABI 4 on it denies TCP, from 6 on signals and abstract sockets. It stops neither UDP nor Unix
sockets by path. So the filter (seccomp(2)) admits no ``socket``, no ``connect``, and of ``socketpair`` only streams,
since a pair of datagram sockets can send to any path (unix(7)). The filter is an allow-list: unlisted calls, also
those of newer kernels, fail. Calls of another architecture and of the x32 ABI kill the process.

Numbers of calls are of x86-64 and of aarch64. The latter were compared with the kernel's headers and never run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protos.artifacts.byte_source import FileSource
from protos.common.errors import WorkerError

AVAILABLE: Final = "available"  # every layer that the kernel has
REQUIRED: Final = "required"  # every layer; a kernel without one is refused
DEMANDS: Final = (AVAILABLE, REQUIRED)
DEMANDED: Final = ("landlock", "seccomp")  # the layers that a kernel may lack

# prctl(2), unshare(2), capset(2), seccomp(2), linux/audit.h, linux/bpf_common.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_GET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 4, 15, 16, 38
_CLONE_NEW: Final = 0x10000000 | 0x40000000 | 0x08000000  # user, network, IPC
_CLONE_THREAD: Final = 0x10000
_CAPABILITY_V3: Final = 0x20080522
_SET_MODE_FILTER, _TSYNC = 1, 1
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_LOAD, _EQUALS, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_X32: Final = 0x40000000
_UNKNOWN: Final = 451  # the first call that the C libraries of Debian 12 may probe for and do without
_WORD: Final = 0xFFFFFFFF
_MSG_FASTOPEN: Final = 0x20000000  # a connect by another name, which Landlock does not see
_SOCK_TYPE: Final = 0xF  # SOCK_TYPE_MASK; the rest is SOCK_CLOEXEC and SOCK_NONBLOCK
_TMPFILE: Final = 0o20000000
_IOCTLS: Final = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX

# linux/landlock.h
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_WRITE_FILE, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 5, 1 << 8, 1 << 14
_FILES_BY_ABI: Final = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP: Final = 0b11  # bind and connect, ABI 4
_SCOPED: Final = 0b11  # abstract Unix sockets and signals, ABI 6

# Number of each call on x86-64 and on aarch64; None: it has no such call.
CALLS: Final[Mapping[str, tuple[int | None, int | None]]] = {
    "accept4": (288, 242), "access": (21, None), "brk": (12, 214), "clock_getres": (229, 114),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "clone": (56, 220), "clone3": (435, 435),
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22), "epoll_wait": (232, None),
    "eventfd2": (290, 19), "exit": (60, 93), "exit_group": (231, 94), "faccessat": (269, 48),
    "faccessat2": (439, 439), "fadvise64": (221, 223), "fcntl": (72, 25), "fdatasync": (75, 83), "fstat": (5, 80),
    "fsync": (74, 82), "futex": (202, 98), "getcwd": (79, 17), "getdents64": (217, 61), "getegid": (108, 177),
    "geteuid": (107, 175), "getgid": (104, 176), "getpeername": (52, 205), "getpid": (39, 172),
    "getppid": (110, 173), "getrandom": (318, 278), "getrusage": (98, 165), "getsockname": (51, 204),
    "getsockopt": (55, 209), "gettid": (186, 178), "gettimeofday": (96, 169), "getuid": (102, 174),
    "ioctl": (16, 29), "link": (86, None), "linkat": (265, 37), "listen": (50, 201),
    "lseek": (8, 62), "lstat": (6, None),
    "madvise": (28, 233), "membarrier": (324, 283), "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216),
    "munmap": (11, 215), "nanosleep": (35, 101), "newfstatat": (262, 79), "openat": (257, 56), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "prctl": (157, 167), "pread64": (17, 67), "prlimit64": (302, 261),
    "pselect6": (270, 72), "read": (0, 63), "readlink": (89, None), "readlinkat": (267, 78), "readv": (19, 65),
    "recvfrom": (45, 207), "recvmsg": (47, 212), "restart_syscall": (219, 128), "rseq": (334, 293),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123), "sched_yield": (24, 124), "select": (23, None), "sendmsg": (46, 211),
    "sendto": (44, 206), "set_robust_list": (273, 99), "setsockopt": (54, 208), "shutdown": (48, 210),
    "sigaltstack": (131, 132), "socketpair": (53, 199), "stat": (4, None), "statfs": (137, 43),
    "statx": (332, 291), "sysinfo": (99, 179), "tgkill": (234, 131), "times": (100, 153), "uname": (63, 160),
    "unlink": (87, None), "unlinkat": (263, 35), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
_MACHINES: Final = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}  # column, audit number, seccomp

# What arithmetic on open files needs: the inspection of artifacts.
ARITHMETIC: Final = (
    "read", "write", "close", "fstat", "lseek", "mmap", "mprotect", "munmap", "brk", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "pread64", "mremap", "madvise", "sched_yield", "futex", "exit", "exit_group",
    "clock_gettime", "clock_nanosleep", "gettimeofday", "getrandom", "restart_syscall",
)  # fmt: skip
# And an interpreter that still imports, starts threads and waits: the reader of DICOM.
INTERPRETER: Final = (
    *ARITHMETIC, "openat", "newfstatat", "stat", "lstat", "statx", "access", "faccessat", "faccessat2", "readlink",
    "readlinkat", "getdents64", "getcwd", "fcntl", "ioctl", "dup", "dup2", "dup3", "close_range", "getpid", "gettid",
    "getppid", "getuid", "geteuid", "getgid", "getegid", "uname", "sysinfo", "sched_getaffinity", "getrusage",
    "prlimit64", "times", "poll", "ppoll", "select", "pselect6", "set_robust_list", "rseq", "clone", "sigaltstack",
    "nanosleep", "clock_getres", "readv", "writev", "fadvise64", "membarrier", "prctl", "tgkill",
)  # fmt: skip
# And the sockets that it was handed: the Flower link, the process of a run.
CONVERSING: Final = (
    *INTERPRETER, "recvfrom", "recvmsg", "sendto", "sendmsg", "shutdown", "getsockopt", "setsockopt", "getsockname",
    "getpeername", "pipe2", "eventfd2", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait",
)  # fmt: skip
# And a spool to write into, and a socket that is bound to its port already: the receivers.
RECEIVING: Final = (
    *CONVERSING, "accept4", "listen", "socketpair", "link", "linkat", "unlink", "unlinkat", "fsync", "fdatasync",
    "statfs",
)  # fmt: skip


class ConfinementError(WorkerError):
    """This process could not be confined, and must not read. The text gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a process may still do once it is confined."""

    calls: tuple[str, ...]  # of CALLS
    readable: tuple[str, ...] = ()  # files and folders
    spool: str = ""  # a folder in which files are made, written, linked and removed; nothing is written elsewhere


@dataclass(frozen=True, slots=True)
class ArgumentFilter:
    """An argument of a call, under a mask, must be one of these values. Of 64 bits where the mask is."""

    argument: int
    mask: int
    values: tuple[int, ...]


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def interpreter() -> tuple[str, ...]:
    """The files and folders that Python needs for what it has not imported yet.

    Of the folder in which this package lies, only the packages are given, unless it is one of installed packages: in
    a clone of the sources anything may lie beside them.
    """
    own = Path(__file__).resolve().parents[2]
    found = [f"{own}/{name}" for name in ("agent", "coordinator", "policies", "protos")]
    for entry in filter(None, sys.path):
        if Path(entry).resolve() != own or own.name in ("site-packages", "dist-packages"):
            found.append(entry)
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", f"{sys.base_prefix}/lib", *libraries]
    found += ["/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    return tuple(dict.fromkeys(path for path in found if path and os.path.exists(path)))


def confine(
    allowed: Allowed, demand: str = AVAILABLE, limits: Mapping[int, tuple[int, int]] | None = None
) -> tuple[str, ...]:
    """Bind this process for the rest of its life. It must have one thread.

    Args:
        allowed: what it may still do.
        demand: of DEMANDS. In both cases a layer that the kernel has and that cannot be set is a fault.
        limits: of setrlimit(2), soft and hard, set last before the filter.
    Returns:
        The layers that are in force.
    Raises:
        ConfinementError: a demanded layer is missing; nothing may be read then.
    """
    if demand not in DEMANDS:
        raise ConfinementError(f"confinement must be one of {', '.join(DEMANDS)}")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if len(os.listdir("/proc/self/task")) != 1:
            raise ConfinementError("another thread runs already, and would not be confined")
        bound = [*drop_rights()]
        if _landlock(libc, allowed):
            bound.append("landlock")
        for kind, (soft, hard) in (limits or {}).items():
            resource.setrlimit(kind, (soft, hard))
        missing = [layer for layer in DEMANDED[:1] if layer not in bound]
        if _seccomp(libc, allowed.calls):
            bound.append("seccomp")
        else:
            missing.append("seccomp")
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        why = errno.errorcode.get(number, type(error).__name__) if number else type(error).__name__
        raise ConfinementError(f"this process cannot be confined: {why}") from None
    if missing and demand == REQUIRED:
        raise ConfinementError(
            f'this kernel has no {" and no ".join(missing)}, which `confinement = "required"` demands: '
            'boot a kernel that has it (lsm=landlock,...), or set "available"'
        )
    return tuple(bound)


def end_with(parent: int) -> None:
    """Let the kernel end this process, SIGKILL, when the thread that started it ends, however that comes.

    Call it before :func:`confine`, whose filter closes prctl(2) for this. It is for a process that may be too busy to
    see its pipe end, and whose starting thread outlives it: the reader of DICOM and the inspection of artifacts. The
    link, a run's process and the receivers are watched by a thread of their own that waits at the pipe; a listener's
    worker outlives the thread that started it anew, to finish what it has in hand.

    Args:
        parent: the number of the process that started this one, as it said itself.
    Raises:
        ConfinementError: it has ended already, or the kernel refuses.
    """
    try:
        _prctl(ctypes.CDLL(None, use_errno=True), _PR_SET_PDEATHSIG, signal.SIGKILL)
    except OSError:
        raise ConfinementError("the kernel does not tell of the parent's end") from None
    if os.getppid() != parent:  # it ended before the kernel was asked
        raise ConfinementError("the process that started this one has ended")


def drop_rights() -> tuple[str, ...]:
    """No more rights by what is run, no tracer or core dump, and none of root's capabilities.

    Raises:
        OSError: the kernel refuses one of it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    if libc.capset(struct.pack("=Ii", _CAPABILITY_V3, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    _prctl(libc, _PR_SET_DUMPABLE, 0)
    return "no_new_privs", "no_capabilities"


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, *(ctypes.c_ulong(n) for n in (value, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


# ------------------------------------------------------------------ Landlock


def landlock_abi() -> int:
    """The version of the kernel's Landlock, 0 where it has none or was booted without.

    Raises:
        ConfinementError: a filter of system calls above this process hides it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = int(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    if abi < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EOPNOTSUPP):
        raise _hidden("landlock_create_ruleset, landlock_add_rule and landlock_restrict_self")
    return max(0, abi)


def _hidden(calls: str) -> ConfinementError:
    return ConfinementError(
        f"a filter of system calls above this process forbids {calls}: allow them in the systemd unit, or in the "
        "seccomp profile of the container (Docker from 23, containerd from 1.6 and Podman from 4.2 do)"
    )


def _landlock(libc: ctypes.CDLL, allowed: Allowed) -> bool:
    """Close all files but those that are allowed; False where the kernel has no Landlock."""
    abi = landlock_abi()
    if not abi:
        return False
    files = _FILES_BY_ABI[max(known for known in _FILES_BY_ABI if known <= abi)]
    attributes = struct.pack("=QQQ", files, _TCP, _SCOPED)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise _refused("landlock_create_ruleset")
    spool = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    rules = [(path, _READ_FILE | _READ_DIR) for path in allowed.readable]
    rules += [(allowed.spool, spool)] if allowed.spool else []
    for path, rights in rules:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            fits = files & (rights if os.path.isdir(path) else rights & ~_READ_DIR)
            rule = struct.pack("=Qi", fits, place)
            if libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint32(0)) != 0:
                raise _refused("landlock_add_rule")
        finally:
            os.close(place)
    if libc.syscall(_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)) != 0:
        raise _refused("landlock_restrict_self")
    os.close(ruleset)
    return True


def _refused(call: str) -> Exception:
    number = ctypes.get_errno()
    return _hidden(call) if number == errno.EPERM else OSError(number, call)


# ------------------------------------------------------------------ the filter of system calls


def _conditions() -> dict[str, tuple[ArgumentFilter, ...]]:
    """Calls that are allowed with these arguments only. ``openat`` only reads where there is no spool."""
    writing = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | _TMPFILE
    commands = (
        *(fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_DUPFD_CLOEXEC),
        fcntl.F_GET_SEALS,  # of memory that it was handed: only asked
    )
    return {
        "openat": (ArgumentFilter(2, writing, (os.O_RDONLY,)),),
        "fcntl": (ArgumentFilter(1, _WORD, commands),),
        "ioctl": (ArgumentFilter(1, _WORD, _IOCTLS),),
        "clone": (ArgumentFilter(0, _CLONE_THREAD, (_CLONE_THREAD,)),),  # a thread, and no process
        "prlimit64": (ArgumentFilter(0, _WORD, (0,)),),  # its own
        "prctl": (ArgumentFilter(0, _WORD, (_PR_SET_NAME, _PR_GET_NAME)),),
        "tgkill": (ArgumentFilter(0, _WORD, (os.getpid(),)),),  # abort(3)
        # streams, which go to the other end alone: datagrams and SOCK_RAW go to the path that ``sendmsg`` names
        "socketpair": (
            ArgumentFilter(0, _WORD, (socket.AF_UNIX,)),
            ArgumentFilter(1, _SOCK_TYPE, (socket.SOCK_STREAM,)),
        ),
        # no address: to the other end of the connection alone
        "sendto": (ArgumentFilter(3, _MSG_FASTOPEN, (0,)), ArgumentFilter(4, (1 << 64) - 1, (0,))),
        "sendmsg": (ArgumentFilter(2, _MSG_FASTOPEN, (0,)),),
    }


def _seccomp(libc: ctypes.CDLL, calls: Sequence[str]) -> bool:
    """Every other call fails with EPERM; False where the kernel has no filters, or this machine's numbers lack."""
    if platform.machine() not in _MACHINES or sys.byteorder != "little":
        return False
    column, audit, number = _MACHINES[platform.machine()]
    program = filter_program(column, audit, calls)
    prepared = _Program(len(program) // 8, program)
    done = libc.syscall(number, _SET_MODE_FILTER, _TSYNC, ctypes.byref(prepared))
    if done == 0:
        return True
    if done < 0 and ctypes.get_errno() == errno.ENOSYS:
        return False
    raise _refused("seccomp")


def filter_program(column: int, audit: int, calls: Sequence[str]) -> bytes:
    """A classic BPF program over ``struct seccomp_data``.

    Another architecture's calls kill, and those of x32; unlisted ones fail with EPERM, ``clone3`` and such as are
    newer than this list with ENOSYS, so that the C library goes on without them.

    Args:
        column: of CALLS.
        audit: the architecture's number (linux/audit.h).
        calls: names of CALLS.
    """
    conditions = _conditions()
    if "unlinkat" in calls:  # a spool: Landlock says where
        del conditions["openat"]
    steps = [(_LOAD, 0, 0, 4), (_EQUALS, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for name in calls:
        number = CALLS[name][column]
        if number is not None:
            block = [step for only in conditions.get(name, ()) for step in _only(only)] + [(_RETURN, 0, 0, _ALLOW)]
            steps += [(_EQUALS, 0, len(block), number), *block]
    clone3 = CALLS["clone3"][column]
    assert clone3 is not None
    steps += [(_EQUALS, 0, 1, clone3), (_RETURN, 0, 0, _ENOSYS), (_AT_LEAST, 0, 1, _UNKNOWN)]
    steps += [(_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _only(only: ArgumentFilter) -> list[tuple[int, int, int, int]]:
    """Fail with EPERM unless the argument is right; else go on behind. Each half of 64 bits for itself."""
    steps: list[tuple[int, int, int, int]] = []
    for half in (0, 32):
        mask = only.mask >> half & _WORD
        if mask:
            values = [value >> half & _WORD for value in only.values]
            steps += [(_LOAD, 0, 0, 16 + 8 * only.argument + half // 8), (_AND, 0, 0, mask)]
            steps += [(_EQUALS, len(values) - at, 0, value) for at, value in enumerate(values)]
            steps.append((_RETURN, 0, 0, _EPERM))
    return steps


# ------------------------------------------------------------------ a process for one open file


def serve(work: Callable[[FileSource, dict[str, Any]], dict[str, Any]]) -> None:
    """The life of a process that looks at one open file: a request on standard input, the work, one line of answer.

    The request is a JSON object with ``descriptor`` (the open file), ``memory`` (bytes), ``cpu`` (seconds),
    ``parent`` (who started it) and whatever else the work reads. The answer is the work's, or ``limit``: "memory", or
    "confinement" when a layer could not be set; with ``bound``: which layers of the confinement are in force. One
    line of JSON.
    """
    request = json.loads(sys.stdin.buffer.read())
    source = FileSource.of(int(request["descriptor"]))
    bound: tuple[str, ...] = ()
    try:
        bound = confine_to_descriptors(int(request["memory"]), int(request["cpu"]), int(request["parent"]))
        answer = work(source, request)
    except MemoryError:
        answer = {"limit": "memory"}
    except ConfinementError:
        answer = {"limit": "confinement"}
    line = json.dumps({**answer, "bound": bound}, separators=(",", ":")).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]
    os._exit(0)  # nothing of the interpreter's own clean-up may run into the limits


def confine_to_descriptors(memory_bytes: int, cpu_seconds: int, parent: int) -> tuple[str, ...]:
    """Leave this process arithmetic on what is open: no file, no socket, no process, bounded memory and time.

    Limits and rights bind everywhere. Where the kernel permits it, the process also leaves for namespaces of its own.
    It ends with ``parent``, the process that started it.

    Returns:
        The layers that are in force.
    Raises:
        ConfinementError: a limit, or a layer that the kernel has, cannot be set.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    bound = ["namespaces"] if libc.unshare(_CLONE_NEW) == 0 else []
    end_with(parent)
    limits = {
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),  # a core dump would hold the artifact
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_NOFILE: (0, 0),  # what is open stays open; nothing more
        resource.RLIMIT_CPU: (cpu_seconds, cpu_seconds + 1),
    }
    return (*bound, *confine(Allowed(ARITHMETIC), limits=limits), "limits")


# ------------------------------------------------------------------ what a doctor asks


def main(demand: str = AVAILABLE) -> None:
    """Confine this process as the reader of DICOM is, try what must not be possible, and print both as JSON.

    ``bound``: the layers that are in force; ``reached``: what was possible nevertheless; ``fault`` instead of both.
    """
    try:
        told: dict[str, Any] = {"bound": confine(Allowed(INTERPRETER, interpreter()), demand)}
    except ConfinementError as fault:
        told = {"fault": str(fault)}
    else:
        told["reached"] = [what for what, reach in _FORBIDDEN.items() if _reaches(reach)]
    sys.stdout.write(json.dumps(told) + "\n")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


_FORBIDDEN: Final[Mapping[str, Callable[[], object]]] = {
    "files": lambda: os.open("/proc/self/status", os.O_RDONLY),
    "network": lambda: socket.socket(socket.AF_INET),
    "processes": _fork,
}


def _reaches(reach: Callable[[], object]) -> bool:
    try:
        reach()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
