"""A process that a service starts again whenever it ends, after pauses that grow.

One thread starts it, listens to it and buries it: ``PR_SET_PDEATHSIG`` belongs to the thread that started a process,
and this one lives as long as the service.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protos.common.errors import LazaretError
from protos.operations.event_counters import EventCounters

ENDED: Final = "process_ended"  # the log event: ``where`` is the process, ``state`` how it ended
_PAUSES_S: Final = (0.5, 60.0)  # until it is started again, doubled from the first to the second
_STEADY_S: Final = 60.0  # of life, after which an end is a first one again


Born = Callable[[subprocess.Popen[bytes]], None]


@dataclass(frozen=True, slots=True, eq=False)
class StartedProcess:
    """A process that has begun its work."""

    process: subprocess.Popen[bytes]
    listen: Callable[[], object]  # returns when it has ended, or has closed its pipe
    dismiss: Callable[[], object]  # tells it to end; of any thread, and as often as one likes


@dataclass(frozen=True, slots=True)
class ProcessEnds:
    """How often a process ended since the service began."""

    count: int = 0
    last: float = 0.0  # seconds since 1970; 0: never
    how: str = ""


def ends_of(name: str, tally: EventCounters) -> ProcessEnds:
    """What the service's own log says of a process."""
    count = sum(n for heard, n in tally.counts().items() if (heard.event, heard.where) == (ENDED, name))
    last = tally.last(ENDED, name)
    return ProcessEnds(count, *last) if last is not None else ProcessEnds(count)


def how_ended(status: int) -> str:
    """A process's exit status in words; below 0: the signal that ended it, negative."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _why(fault: Exception) -> str:
    """In words; of what is not ours, the class alone (P14)."""
    if isinstance(fault, OSError):
        return fault.strerror or type(fault).__name__
    return str(fault) if isinstance(fault, LazaretError) else type(fault).__name__


class KeptProcess:
    """A process that runs until it is told to end."""

    def __init__(self, name: str, start: Callable[[Born], StartedProcess], ended: Callable[[str], None]) -> None:
        """Nothing runs yet.

        Args:
            name: of the thread.
            start: starts it, says so at once to the function that it is handed, and returns when it has begun its
                work, or raises a sentence. What it has started is killed then.
            ended: hears how it ended, or why it did not start again; must not raise.
        """
        self._start, self._ended = start, ended
        self._current: StartedProcess | None = None
        self._process: subprocess.Popen[bytes] | None = None  # the newest, from its first moment on
        self._fault: Exception | None = None
        self._began, self._over, self._too_late = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-keeper", daemon=True)

    @property
    def pid(self) -> int | None:
        """Its number; None while it does not run."""
        current = self._current
        return current.process.pid if current is not None and current.process.returncode is None else None

    def begin(self) -> None:
        """Start it. Call it once.

        Raises:
            Exception: whatever ``start`` raised; nothing runs then.
        """
        self._thread.start()
        self._began.wait()
        if self._fault is not None:
            raise self._fault

    def end(self, grace_s: float) -> None:
        """Tell it to end, and kill it if it has not after so many seconds; harmless when it does not run."""
        self._over.set()
        if self._current is not None:
            self._current.dismiss()
        if self._thread.ident is not None:
            self._thread.join(grace_s)
            self._too_late.set()
            if self._thread.is_alive() and self._process is not None:
                self._process.kill()
            self._thread.join()

    # -- the thread

    def _begin(self) -> StartedProcess:
        self._process = None
        try:
            return self._start(self._born)
        except BaseException:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            raise

    def _born(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self._too_late.is_set():  # `end` looked just before
            process.kill()

    def _run(self) -> None:
        try:
            self._current = self._begin()
        except Exception as fault:  # noqa: BLE001 - raised where `begin` waits
            self._fault = fault
            return
        finally:
            self._began.set()
        current: StartedProcess | None = self._current
        pause = _PAUSES_S[0]
        while current is not None:
            born = time.monotonic()
            self._see_out(current)
            current, pause = self._again(_PAUSES_S[0] if time.monotonic() - born > _STEADY_S else pause)

    def _see_out(self, current: StartedProcess) -> None:
        """Listen until it has ended, and say how, unless it was told to."""
        if self._over.is_set():  # said while it was being started
            current.dismiss()
        try:
            current.listen()
        except Exception as fault:  # noqa: BLE001 - whatever it is, this thread goes on, and so does the service
            self._ended(f"it cannot be listened to: {_why(fault)}")
        if not self._over.is_set():
            current.process.kill()  # for one that closed its pipe alone; one that ends keeps its status
        status = current.process.wait()
        if not self._over.is_set():
            self._ended(how_ended(status))

    def _again(self, pause: float) -> tuple[StartedProcess | None, float]:
        """Start it again; None when all is over. And the next pause."""
        while not self._over.wait(pause):
            pause = min(_PAUSES_S[1], 2 * pause)
            try:
                self._current = self._begin()
            except Exception as fault:  # noqa: BLE001 - too many threads, too little memory: later there may be fewer
                if not self._over.is_set():
                    self._ended(f"it does not start: {_why(fault)}")
            else:
                return self._current, pause
        return None, pause
