"""The demo's commands as processes, each in a group of its own, so that the demo can end all that it started.

A command's own children are in its group, or end with it. The groups are not the demo's own, which it shares with
whoever started it (``make``, a test) and who is not to be ended. If the demo itself is killed, the kernel tells each
command to end (SIGTERM, by PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from protos.common.errors import WorkerError

READY_S: Final = 180.0  # for a process that stays to say that it is ready
GENTLY_S: Final = 20.0  # between SIGTERM and SIGKILL
_TIED: Final = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()  # util-linux
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class DemoError(WorkerError, RuntimeError):
    """A command did not do what the story needs; the text ends with the command's own words."""


class Interrupted(SystemExit):
    """The demo was told to end."""


def environment() -> dict[str, str]:
    """One computing thread for each process: three hospitals share this machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(slots=True, eq=False)
class Processes:
    """What runs now. Threads may start commands side by side."""

    staying: list[subprocess.Popen[str]] = field(default_factory=list)
    passing: set[subprocess.Popen[str]] = field(default_factory=set)
    told: int = 0  # the signal that told the demo to end: nothing is started any more
    starting: int = 0  # the thread that waits for a process to start now
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # To the kernel a parent is the thread that started a process: this one stays to the demo's end.
    _starter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def run(self, command: Sequence[str], may_refuse: bool = False) -> str:
        """Run a command to its end and give what it printed.

        Raises:
            DemoError: another status than 0 (or 1 with an answer, where a refusal is part of the story).
        """
        with self.piped(command, subprocess.PIPE) as process:
            said, complained = process.communicate()
        told = may_refuse and process.returncode == 1 and said.strip()  # a verdict, not a fault
        if process.returncode != 0 and not told:
            name = " ".join(command[2:])
            raise DemoError(f"{name}: exit {process.returncode}\n{said[-2000:]}{complained[-2000:]}")
        return said

    @contextmanager
    def piped(self, command: Sequence[str], complaints: int | None = None) -> Iterator[subprocess.Popen[str]]:
        """A command whose output is read as it comes; whatever happens, nothing of its group is left afterwards.

        Args:
            command: to start.
            complaints: ``PIPE``, if its standard error is read too; else it goes where the demo's goes.
        Raises:
            DemoError: the demo has been told to end.
        """
        process = self._started(command, self.passing.add, stdout=subprocess.PIPE, stderr=complaints)
        try:
            with process:
                try:
                    yield process
                finally:
                    end_group(process)
        finally:
            self.passing.discard(process)

    def start(self, name: str, command: Sequence[str], ready: Callable[[], bool], log: Path) -> None:
        """Start a process that stays, and wait until it is ready.

        Args:
            name: of the process, for people.
            command: to start.
            ready: asked again and again.
            log: a new file for what it says.
        Raises:
            DemoError: it ended, or was not ready for three minutes.
        """
        with log.open("wb") as out:
            process = self._started(command, self.staying.append, stdout=out, stderr=subprocess.STDOUT)
        until = time.monotonic() + READY_S
        while not ready():
            if process.poll() is not None or not time.monotonic() < until:
                raise DemoError(f"{name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End every process that stays, gently, the last one first; then whatever is left of its group."""
        for process in reversed(self.staying):
            end_group(process)
        self.staying.clear()

    def end(self, number: int) -> None:
        """Tell every process to end, start no other, and kill what does not heed it."""
        self.told = number
        for process in (*self.passing, *self.staying):
            _tell(process, signal.SIGTERM)
        late = threading.Timer(GENTLY_S, self._kill)
        late.daemon = True
        late.start()

    def _kill(self) -> None:
        for process in (*self.passing, *self.staying):
            _tell(process, signal.SIGKILL)

    def _started(
        self, command: Sequence[str], remember: Callable[[subprocess.Popen[str]], None], **streams: Any
    ) -> subprocess.Popen[str]:
        """Start a process and remember it. No signal comes in between: it would leave one that nobody knows."""

        def start() -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*_TIED, *command], stdin=subprocess.DEVNULL, text=True, env=environment(), process_group=0, **streams
            )
            remember(process)
            return process

        with self._lock:
            if self.told:
                raise DemoError("the demo was told to end")
            self.starting = threading.get_ident()
            try:
                process = self._starter.submit(start).result()
            finally:
                self.starting = 0
        if self.told:  # meanwhile
            _tell(process, signal.SIGTERM)
            if threading.current_thread() is threading.main_thread():
                raise Interrupted(128 + self.told)
        return process


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process that leads its group: gently, so that it can end its own children; then whatever is left.

    Nothing of the group runs when this returns, unless the kernel takes longer than ``GENTLY_S`` to end it.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GENTLY_S)
    _tell(process, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + GENTLY_S
    while _runs(process.pid) and time.monotonic() < until:
        time.sleep(0.02)


def _runs(group: int) -> bool:
    """Does a process of this group run? One that is dead and not yet buried does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, found = stat.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False


def _tell(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextmanager
def ending(processes: Processes) -> Iterator[None]:
    """While this lasts, SIGTERM, SIGINT and SIGHUP end all that the demo started, and then the demo.

    Raises:
        Interrupted: one of them came; the exit status is that of a program which the signal ended.
    """

    def told(number: int, _frame: FrameType | None) -> None:
        if processes.told:  # once is enough
            return
        processes.end(number)
        if processes.starting != threading.get_ident():  # else it is raised once the process is known
            raise Interrupted(128 + number)

    heeded = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]  # of `nohup`, it stays ignored
    before = {one: signal.signal(one, told) for one in heeded}
    try:
        yield
    finally:
        processes.stop()  # again, if a signal came while it did so
        for one, handler in before.items():
            signal.signal(one, handler)
