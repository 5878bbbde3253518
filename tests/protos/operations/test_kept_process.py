"""A process that its service keeps: started again after growing pauses, and gone when the service says so."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from protos.common.errors import WorkerError
from protos.operations import kept_process
from protos.operations.event_counters import EventCounters
from protos.operations.kept_process import Born, KeptProcess, ProcessEnds, StartedProcess, ends_of, how_ended

LIVES = "import sys; sys.stdin.read()"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_process, "_PAUSES_S", (0.05, 0.4))


def started(program: str, born: Born = lambda _: None) -> StartedProcess:
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    born(process)
    assert process.stdin is not None
    assert process.stdout is not None
    return StartedProcess(process, process.stdout.read, process.stdin.close)


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_is_started_again_whenever_it_ends_and_each_end_is_told() -> None:
    told: list[str] = []
    kept = KeptProcess("one", partial(started, LIVES), told.append)
    assert kept.pid is None
    kept.begin()
    pids = []
    for _ in range(3):
        until(lambda: kept.pid not in (None, *pids))
        assert kept.pid is not None
        pids.append(kept.pid)
        os.kill(kept.pid, signal.SIGKILL)
    until(lambda: kept.pid not in (None, *pids))
    kept.end(5)
    assert (kept.pid, told) == (None, ["killed by SIGKILL"] * 3), "an end that was asked for is none"


def test_pauses_grow_up_to_the_longest_and_a_start_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told, starts = list[str](), list[float]()

    def fails(born: Born) -> StartedProcess:
        starts.append(time.monotonic())
        if len(starts) in (3, 4):
            raise WorkerError("its port is taken")
        return started("raise SystemExit(3)", born)

    kept = KeptProcess("one", fails, told.append)
    kept.begin()
    until(lambda: len(starts) > 6)
    kept.end(5)
    assert told[:4] == ["exit status 3"] * 2 + ["it does not start: its port is taken"] * 2
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert all(gap >= pause for gap, pause in zip(gaps, (0.05, 0.1, 0.2, 0.4, 0.4, 0.4), strict=False))


def test_a_first_start_that_fails_is_the_callers() -> None:
    def fails(_: Born) -> StartedProcess:
        raise WorkerError("its port is taken")

    kept = KeptProcess("one", fails, lambda _: None)
    with pytest.raises(WorkerError, match="its port is taken"):
        kept.begin()
    kept.end(0.1)


def test_one_that_closes_its_pipe_and_goes_on_is_ended_and_started_again() -> None:
    told: list[str] = []
    kept = KeptProcess("one", partial(started, "import os, time; os.close(1); time.sleep(600)"), told.append)
    kept.begin()
    until(lambda: told)
    kept.end(5)
    assert told[0] == "killed by SIGKILL"


def test_one_that_does_not_hear_is_killed_after_its_grace() -> None:
    kept = KeptProcess("one", partial(started, DEAF), lambda _: None)
    kept.begin()
    begun = time.monotonic()
    kept.end(0.3)
    assert 0.3 <= time.monotonic() - begun < 30
    assert kept.pid is None


def test_told_to_end_while_it_is_started_again_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, made = threading.Event(), list[StartedProcess]()

    def starts(born: Born) -> StartedProcess:
        if made:
            slow.set()
            time.sleep(0.5)
        made.append(started(LIVES, born))
        return made[-1]

    kept = KeptProcess("one", starts, lambda _: None)
    kept.begin()
    made[0].process.kill()
    assert slow.wait(30)
    kept.end(10)
    assert [one.process.poll() is not None for one in made] == [True, True]


@pytest.mark.parametrize("fault", [RuntimeError("can't start new thread"), MemoryError(), OSError(11, "Try again")])
def test_whatever_keeps_it_from_starting_it_is_tried_again_and_what_was_started_is_killed(fault: Exception) -> None:
    told, made = list[str](), list[subprocess.Popen[bytes]]()

    def starts(born: Born) -> StartedProcess:
        one = started(LIVES, born)
        made.append(one.process)
        if len(made) in (2, 3):
            raise fault
        return one

    kept = KeptProcess("one", starts, told.append)
    kept.begin()
    made[0].kill()
    until(lambda: len(made) == 4 and kept.pid == made[3].pid)
    assert [process.poll() for process in made] == [-signal.SIGKILL] * 3 + [None]
    why = "Try again" if isinstance(fault, OSError) else type(fault).__name__
    assert told == ["killed by SIGKILL", *[f"it does not start: {why}"] * 2]
    kept.end(5)


def test_a_fault_of_the_listener_ends_the_process_and_not_its_keeper() -> None:
    told, made = list[str](), list[StartedProcess]()

    def starts(born: Born) -> StartedProcess:
        made.append(started(LIVES, born))
        return made[-1] if len(made) > 1 else replace(made[0], listen=partial(iter([]).__next__))

    kept = KeptProcess("one", starts, told.append)
    kept.begin()
    until(lambda: len(made) > 1 and kept.pid)
    kept.end(5)
    assert told == ["it cannot be listened to: StopIteration", "killed by SIGKILL"]


@pytest.mark.parametrize("told_late", [False, True])
def test_one_that_is_being_started_is_killed_after_its_grace(told_late: bool) -> None:
    """It may take minutes to begin its work, and the service has seconds to end."""
    slow, over, made = threading.Event(), threading.Event(), list[StartedProcess]()

    def starts(born: Born) -> StartedProcess:
        if made:
            slow.set()
            if told_late:
                over.wait(60)
        made.append(started(LIVES, born))
        if len(made) > 1:
            made[1].process.wait()  # it never says that it has begun
            raise WorkerError("it does not start")
        return made[0]

    kept = KeptProcess("one", starts, lambda _: None)
    kept.begin()
    made[0].process.kill()
    assert slow.wait(60)
    threading.Timer(0.6, over.set).start()
    kept.end(0.3)
    assert [one.process.poll() for one in made] == [-signal.SIGKILL] * 2


def test_ends_are_what_the_log_counted() -> None:
    tally = EventCounters(lambda: 1000.0)
    assert ends_of("console", tally) == ProcessEnds()
    for state in ("exit status 1", "killed by SIGKILL"):
        tally.count({"event": "process_ended", "where": "console", "state": state}, "warning")
    tally.count({"event": "process_ended", "where": "stow", "state": "exit status 1"}, "warning")
    assert ends_of("console", tally) == ProcessEnds(2, 1000.0, "killed by SIGKILL")
    assert [how_ended(status) for status in (0, 3, -15, -63)] == [
        "exit status 0", "exit status 3", "killed by SIGTERM", "killed by signal 63",
    ]  # fmt: skip
