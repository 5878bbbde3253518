"""The product's commands as processes of their own, forked from one that has imported them: a start in 0.1 s.

Started as a user starts it, a command takes 1.4 to 4.6 s of a processor to import torch, grpc and the rest. Here one
process imports them, has no thread, and forks for each command: with the caller's words, environment, folder and
descriptors, its own exit status, and an end by the signal that the caller's side was ended with. :func:`python` is an
executable that takes ``-m MODULE WORDS`` as Python does. What Python and libraries read from the environment at their
start (PYTHONPATH, OMP_NUM_THREADS) is the server's. What a test kills or watches, and what it starts to see that it
starts, it starts as a user does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

ROOT: Final = Path(__file__).parents[2]
_IMPORTED: Final = (
    "agent.cli.main",
    "agent.cli.release_kanonymous",
    "agent.cli.rounds",
    "agent.cli.serve",
    "agent.cli.doctor",
    "agent.cli.ingest",
    "agent.cli.train",
    "agent.cli.options",
    "coordinator.cli.main",
    "deploy.demo.folder",
    "policies.audit.verify",
)


@cache
def python() -> str:
    """An executable in the place of ``sys.executable``, whose commands are forked; its server ends with this process.

    Raises:
        RuntimeError: the server does not come up.
    """
    folder = tempfile.TemporaryDirectory(prefix="lazaret-commands-")
    address = Path(folder.name) / "server"
    command = [sys.executable, "-m", "tests.support.command_server", "serve", str(address)]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end() -> None:
        server.communicate()  # the end of its standard input is its own
        folder.cleanup()

    atexit.register(end)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of commands does not come up")
    shim = Path(folder.name) / "python"
    words = shlex.join([sys.executable, "-S", "-E", str(Path(__file__).with_name("command_client.py")), str(address)])
    shim.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    shim.chmod(0o700)
    return str(shim)


def serve(address: str) -> None:
    """Fork for every connection, until standard input ends."""
    for name in _IMPORTED:
        importlib.import_module(name)
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise SystemExit("something that was imported has started a thread: it would be missing in every command")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, _waited)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            with listener.accept()[0] as line:
                if os.fork() == 0:
                    listener.close()
                    _attend(line)


def _waited(*_: object) -> None:
    """Take the status of those who have waited for a command; whoever measures the server sees their time."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _attend(line: socket.socket) -> NoReturn:
    """Fork for the command, and tell its status; without the caller it is killed."""
    size, descriptors, *_ = socket.recv_fds(line, 8, 3)
    order = json.loads(_exactly(line, int.from_bytes(size, "big")))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        line.close()
        _command(order, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # the caller is gone
        line.sendall(b"%d\n" % pid)
    if ended not in select.select([ended, line], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        line.sendall(b"%d\n" % status)
    os._exit(0)


def _exactly(line: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        if not (piece := line.recv(size - len(raw))):
            os._exit(0)  # the caller is gone before it has said what it wants
        raw += piece
    return raw


def _command(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """What ``python -m MODULE WORDS`` does, and its end."""
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115 - closed by the process's end
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(order["folder"])
    os.umask(order["umask"])
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()  # these two would go on from the server's state, all commands alike
    np.random.seed()
    switch, module, *words = order["words"]
    assert switch == "-m", "python -m MODULE WORDS, and nothing else"
    sys.argv = [module, *words]
    sys.path.insert(0, order["folder"])
    is_package = hasattr(sys.modules.get(module), "__path__")
    sys.modules.pop(f"{module}.__main__" if is_package else module, None)  # it is run as __main__, as it were new
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[2])
