"""Look around from inside a process of the product that was taken over: what can it reach, and what does it hold?

``stand_in`` writes a program that starts the product's own child process and takes it over at the moment when it
would read the first foreign byte: after its confinement. The program was handed three descriptors before: a FIFO to
report to, and its own memory, so that a test sees what lies in that without root's rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import stat
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

DONE = "done"
_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = """#!{python}
import sys
sys.path[0] = {root!r}  # in place of the folder of this program
from tests.support import inside
inside.begin({fifo!r}, {targets!r})
{start}
"""
# How each process is taken over, and started. The arguments of the real command line are in sys.argv.
STARTS = {
    "reader": """
from agent.ingest import parser_main as reader
reader._answer = lambda *_: ({"code": "undecodable"}, inside.report() or [])
reader.main()""",
    "listener": """
from agent.pacs.dimse import listener_main as listener
listener.Association.serve = lambda *_, **__: inside.report()
listener.main()""",
    "stow": """
from agent.pacs.dicomweb import stow_main as stow
async def taken(store, scope, receive, send):
    inside.report()
stow.StowHandler.__call__ = taken
stow.main()""",
    "link": """
from agent.federation import supernode_main as linked
linked.serve = lambda *_: inside.report()
linked.main(*sys.argv[4:])""",
    "run": """
from coordinator.federation import run_main as running
running.conduct = lambda *_: inside.report()
running.main(*map(int, sys.argv[4:]))""",
    "nothing": """
inside.report()""",
}


def stand_in(kind: str, folder: Path, targets: dict[str, Any]) -> tuple[Path, int]:
    """A program to be started in the place of Python, and a descriptor from which its report comes.

    Args:
        kind: of STARTS.
        folder: for the program and its FIFO.
        targets: see :func:`look`.
    """
    fifo, program = folder / f"{kind}.fifo", folder / kind
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    start = STARTS[kind].strip()
    text = _PROGRAM.format(
        python=sys.executable, root=_ROOT, fifo=str(fifo), targets=json.dumps(targets), start=start
    )
    program.write_text(text)
    program.chmod(0o700)
    return program, end


def heard(end: int, seconds: float = 120.0) -> dict[str, Any]:
    """The report, from the FIFO's other end."""
    said = b""
    while not said.endswith(b"\n"):
        assert wait([end], seconds), "the process did not report"
        with contextlib.suppress(BlockingIOError):
            part = os.read(end, 1 << 16)
            assert part, "the process ended without a report"
            said += part
    os.close(end)
    found: dict[str, Any] = json.loads(said)
    assert "fault" not in found, found["fault"]
    return found


# ------------------------------------------------------------------ in the process

_HANDED: dict[str, Any] = {}


def begin(fifo: str, targets: str) -> None:
    """Before the product starts: what the test needs to look with."""
    _HANDED["out"] = os.open(fifo, os.O_WRONLY)
    _HANDED["mem"] = os.open("/proc/self/mem", os.O_RDONLY)
    _HANDED["maps"] = os.open("/proc/self/maps", os.O_RDONLY)
    _HANDED["parent"], _HANDED["machine"] = os.getppid(), os.uname().machine
    _HANDED["targets"] = json.loads(targets)


def report() -> None:
    """Look, and tell what was found; or what went wrong with the looking."""
    try:
        found = look(_HANDED["targets"])
    except BaseException:  # noqa: BLE001 - the product would hide it
        found = {"fault": traceback.format_exc()}
    line = json.dumps(found).encode() + b"\n"
    while line:
        line = line[os.write(_HANDED["out"], line) :]


def look(targets: dict[str, Any]) -> dict[str, Any]:
    """Try everything.

    Args:
        targets: ``files`` (paths to open), ``folder`` (to write into), ``spool`` (the same, "" for none), ``starts``
            (hexadecimal: the first bytes of each secret, which are all of it that may lie here), ``socket`` (somebody
            else's Unix datagram socket, by path).
    """
    files = {path: _outcome(lambda path=path: os.open(path, os.O_RDONLY)) for path in targets["files"]}  # type: ignore[misc]
    return {
        "files": files,
        "writes": {what: _outcome(act) for what, act in _writes(targets).items()},
        "spool": _spool(targets) if targets["spool"] else None,
        "calls": {what: _outcome(act) for what, act in (_calls() | _by_path(targets["socket"])).items()},
        "kinds": sorted({_kind_of_socket(number) for number in _open_numbers() if _is_socket(number)}),
        "sockets": [_socket(number) for number in _open_numbers() if _is_socket(number)],
        "open": sorted({_kind(number) for number in _open_numbers()}),
        "memory": _in_memory([bytes.fromhex(start) for start in targets["starts"]]),
        "environment": sorted(os.environ),
        "words": sys.argv,
        "canary": bool(_in_memory([b"".join((b"canary", b"in", b"memory"))])),
    }


def _outcome(act: Callable[[], object]) -> str | int | None:
    try:
        act()
    except OSError as error:
        return error.errno
    return DONE


def _writes(targets: dict[str, Any]) -> dict[str, Callable[[], object]]:
    folder, victim = targets["folder"], targets["files"][0]
    return {
        "make": lambda: os.open(f"{folder}/made", os.O_WRONLY | os.O_CREAT, 0o600),
        "write": lambda: os.open(victim, os.O_WRONLY),
        "truncate": lambda: os.truncate(victim, os.path.getsize(victim)),
        "remove": lambda: os.unlink(f"{folder}/bystander"),
        "rename": lambda: os.rename(f"{folder}/none", f"{folder}/other"),
        "link": lambda: os.symlink(victim, f"{folder}/link"),
        "folder": lambda: os.mkdir(f"{folder}/sub"),
        "rights": lambda: os.chmod(victim, 0o600),
        "times": lambda: os.utime(victim),
        "shared memory": lambda: os.open("/dev/shm/lazaret", os.O_RDWR | os.O_CREAT),
    }


def _spool(targets: dict[str, Any]) -> dict[str, str | int | None]:
    folder = targets["spool"]
    made = f"{folder}/.{'0' * 8}.part"
    return {
        "make": _outcome(lambda: os.open(made, os.O_WRONLY | os.O_CREAT, 0o600)),
        "keep": _outcome(lambda: os.link(made, f"{folder}/{'e' * 32}")),
        "remove": _outcome(lambda: os.unlink(made)),
        "steal": _outcome(lambda: os.link(targets["files"][0], f"{folder}/stolen")),
        "leave": _outcome(lambda: os.link(f"{folder}/{'e' * 32}", f"{folder}/../out")),
        "program": _outcome(lambda: os.execv(f"{folder}/{'e' * 32}", ["x"])),
    }


def _calls() -> dict[str, Callable[[], object]]:
    """Ways out. Those by number fail harmlessly, and not with EPERM, where nothing forbids them."""
    libc, parent = ctypes.CDLL(None, use_errno=True), _HANDED["parent"]

    def call(number: int, *arguments: int) -> Callable[[], None]:
        def act() -> None:
            if libc.syscall(number, *(ctypes.c_long(a) for a in arguments)) < 0:
                raise OSError(ctypes.get_errno(), "")

        return act

    def families() -> dict[str, Callable[[], object]]:
        named = {"tcp": (2, 1), "udp": (2, 2), "tcp6": (10, 1), "udp6": (10, 2), "unix": (1, 1), "unix udp": (1, 2)}
        named |= {"netlink": (16, 3), "packet": (17, 3), "vsock": (40, 1), "raw": (2, 3), "alg": (38, 5)}
        return {f"socket {what}": lambda pair=pair: socket.socket(*pair) for what, pair in named.items()}  # type: ignore[misc]

    found: dict[str, Callable[[], object]] = {
        **families(),
        "fork": _fork,
        "exec": lambda: os.execv("/nonexistent", ["none"]),
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "kill": lambda: os.kill(parent, 0),
        "others' /proc": lambda: os.listdir("/proc"),
        "parent's environment": lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY),
        "parent's memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY),
        "parent's descriptors": lambda: os.listdir(f"/proc/{parent}/fd"),
        "parent's command line": lambda: os.open(f"/proc/{parent}/cmdline", os.O_RDONLY),
        "kernel": lambda: os.open("/sys/kernel", os.O_RDONLY),
    }
    if _HANDED["machine"] == "x86_64":
        found |= {
            "ptrace": call(101, 9999, parent),
            "process_vm_readv": call(310, parent, 0, 0, 0, 0, 0),
            "process_vm_writev": call(311, parent, 0, 0, 0, 0, 0),
            "pidfd_open": call(434, parent, 0),
            "pidfd_getfd": call(438, -1, 0, 0),
            "io_uring_setup": call(425, 0, 0),
            "userfaultfd": call(323, 1 << 20),
            "bpf": call(321, 9999, 0, 0),
            "keyctl": call(250, 9999),
            "add_key": call(248, 0, 0, 0, 0, 0),
            "perf_event_open": call(298, 0, 0, 0, 0, 0),
            "unshare": call(272, 0x10000000),
            "setns": call(308, -1, 0),
            "mount": call(165, 0, 0, 0, 0, 0),
            "open_by_handle_at": call(304, -1, 0, 0),
            "prlimit64 of the parent": call(302, parent, 7, 0, 0),
            "shmget": call(29, 0, 4096, 0o1600),
            "memfd_create": call(319, ctypes.addressof(_NAME), 0),
            "setuid": call(105, 65534),
        }
    return found


def _by_path(victim: str) -> dict[str, Callable[[], object]]:
    """A pair of sockets that take a name with each message, and a descriptor passed by it."""

    def send(kind: socket.SocketKind) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        with one, other:
            passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", _HANDED["out"]))
            one.sendmsg([b"by path"], [passed], 0, victim)

    kinds = (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
    return {f"pair of {kind.name}": lambda kind=kind: send(kind) for kind in kinds}  # type: ignore[misc]


_NAME = ctypes.create_string_buffer(b"name")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def _open_numbers() -> list[int]:
    found = []
    for number in range(8192):  # a parent that holds many hands on high numbers
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.append(number)
    return [number for number in found if number not in (_HANDED["out"], _HANDED["mem"], _HANDED["maps"])]


def _kind(number: int) -> str:
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISSOCK(mode):
        return "socket"
    return "pipe" if stat.S_ISFIFO(mode) else "device" if stat.S_ISCHR(mode) else "kernel object"


def _is_socket(number: int) -> bool:
    return stat.S_ISSOCK(os.fstat(number).st_mode)


def _kind_of_socket(number: int) -> str:
    with socket.socket(fileno=os.dup(number)) as held:
        return socket.SocketKind(held.type).name


def _socket(number: int) -> dict[str, str | int | None]:
    """Can a socket that it was handed be turned to somebody else?"""
    with socket.socket(fileno=os.dup(number)) as held:
        where: Any = ("127.0.0.1", 9) if held.family == socket.AF_INET else "/run/none"
        fast = 0x20000000  # MSG_FASTOPEN
        return {
            "connect": _outcome(lambda: held.connect(where)),
            "bind": _outcome(lambda: held.bind(where)),
            "sendto": _outcome(lambda: held.sendto(b"", where)),
            "fast open": _outcome(lambda: held.sendmsg([b""], [], fast)),
        }


def _in_memory(starts: list[bytes]) -> list[str]:
    """What follows each place where one of these begins, hexadecimal, up to 64 bytes; the search's own copies too."""
    found: list[str] = []
    os.lseek(_HANDED["maps"], 0, os.SEEK_SET)
    told = b"".join(iter(lambda: os.read(_HANDED["maps"], 1 << 16), b"")).decode()
    for line in told.splitlines():
        span, rights = line.split()[:2]
        if rights.startswith("r") and not line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
            low, high = (int(edge, 16) for edge in span.split("-"))
            found += [place for at in range(low, high, 1 << 20) for place in _in_piece(at, high, starts)]
    return found


def _in_piece(at: int, high: int, starts: list[bytes]) -> list[str]:
    try:
        piece = os.pread(_HANDED["mem"], min((1 << 20) + 64, high - at), at)
    except OSError as error:
        if error.errno in (errno.EIO, errno.EFAULT):  # mapped, and nothing is there
            return []
        raise
    found = []
    for start in starts:
        place = piece.find(start)
        while 0 <= place < 1 << 20:
            found.append(piece[place : place + 64].hex())
            place = piece.find(start, place + 1)
    return found
