"""A demo that is told to end leaves no process behind, nor does one that fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from deploy.demo import processes
from deploy.demo.processes import DemoError, Interrupted, Processes, ending
from tests.support import ended_demo
from tests.support.tcp_proxy import wait_until

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(999)"]
subprocess.Popen([*child, sys.argv[1]])
print("ready", flush=True)
time.sleep(999)
"""


def stubborn(marker: str) -> list[str]:
    """A command that heeds no SIGTERM, and neither does its child."""
    return [sys.executable, "-c", STUBBORN, marker]


def running(marker: str) -> list[str]:
    """The command lines in which the marker stands."""
    return [line for _, line in ended_demo.processes().values() if marker in line]


@pytest.fixture
def marker() -> str:
    return uuid.uuid4().hex


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_demo_that_is_told_to_end_leaves_no_process(number: signal.Signals, tmp_path: Path, marker: str) -> None:
    """Three agents read their folders, each with readers; a coordinator serves, and a PACS where one is installed."""
    command = [sys.executable, ended_demo.__file__, str(int(number)), str(tmp_path), "site-b ingest", marker]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    ran = " ".join(found["ran"])
    assert "coordinator serve" in ran
    assert "site-b ingest" in ran
    assert found["left"] == []
    assert found["marked"] == 0
    assert found["status"] == 128 + number


def test_what_heeds_no_signal_is_killed_with_its_children(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GENTLY_S", 0.2)
    started = Processes()
    log = tmp_path / "log"
    started.start("stubborn", stubborn(marker), lambda: "ready" in log.read_text(), log)
    assert len(running(marker)) == 2
    started.stop()
    assert wait_until(lambda: not running(marker), 120)
    assert started.staying == []


def test_a_command_that_fails_leaves_no_child(marker: str) -> None:
    code = "import subprocess, sys; child = [sys.executable, '-c', 'import time; time.sleep(999)', sys.argv[1]]; "
    code += "subprocess.Popen(child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); sys.exit(3)"
    with pytest.raises(DemoError, match="exit 3"):
        Processes().run([sys.executable, "-c", code, marker])
    assert wait_until(lambda: not running(marker), 120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_commands_of_threads_are_ended_too_and_none_starts_afterwards(
    number: signal.Signals, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread is told while another one waits for a command that heeds no SIGTERM."""
    monkeypatch.setattr(processes, "GENTLY_S", 0.2)
    started, failed = Processes(), []
    before = signal.signal(number, signal.SIG_DFL)  # pytest itself may have been told to ignore it

    def work() -> None:
        try:
            started.run(stubborn(marker))
        except DemoError as failure:
            failed.append(str(failure))

    def told_to_end() -> None:
        with ending(started):
            thread.start()
            assert wait_until(lambda: len(running(marker)) == 2, 120)
            signal.raise_signal(number)
            pytest.fail("nothing was raised")

    thread = threading.Thread(target=work)
    with pytest.raises(Interrupted) as told:
        told_to_end()
    assert told.value.code == 128 + number
    thread.join()
    assert wait_until(lambda: not running(marker), 120)
    assert len(failed) == 1
    with pytest.raises(DemoError, match="told to end"):
        started.run([sys.executable, "-c", "print(1)"])
    assert signal.signal(number, before) is signal.SIG_DFL, "as it was"


def test_what_was_ignored_stays_ignored() -> None:
    """Of `nohup`, and of a shell's background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending(Processes()):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_while_a_process_starts_ends_it(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its start and the moment at which it is known."""
    monkeypatch.setattr(processes, "GENTLY_S", 0.2)
    started, start = Processes(), subprocess.Popen

    def interrupted(*words: Any, **more: Any) -> Any:
        process = start(*words, **more)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(processes.subprocess, "Popen", interrupted)
    with pytest.raises(Interrupted), ending(started):
        started.run([sys.executable, "-c", "import time; time.sleep(999)", marker])
    assert wait_until(lambda: not running(marker), 120)


def test_a_signal_that_comes_while_the_demo_stops_leaves_nothing_either(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GENTLY_S", 0.2)
    started, end_group = Processes(), processes.end_group

    def interrupted(process: Any) -> None:
        if not started.told:
            signal.raise_signal(signal.SIGTERM)
        end_group(process)

    monkeypatch.setattr(processes, "end_group", interrupted)

    def stopped() -> None:
        with ending(started):
            for name in ("one", "other"):
                log = tmp_path / name
                started.start(name, stubborn(marker), lambda log=log: "ready" in log.read_text(), log)
            started.stop()

    with pytest.raises(Interrupted):
        stopped()
    assert started.staying == []
    assert wait_until(lambda: not running(marker), 120)


KILLED = """
import sys, threading, time
from pathlib import Path
from deploy.demo.processes import Processes

started, log = Processes(), Path(sys.argv[1])
code = "import sys, time; print('ready', flush=True); time.sleep(999)"
words = [sys.executable, "-c", code, sys.argv[2]]
thread = threading.Thread(target=lambda: started.start("staying", words, lambda: "ready" in log.read_text(), log))
thread.start()
thread.join()
time.sleep(0.5)
assert started.staying[0].poll() is None, "a thread of the demo has ended, and not the demo"
print("started", flush=True)
started.run(words)
"""


def test_a_demo_that_is_killed_leaves_no_process(marker: str, tmp_path: Path) -> None:
    """Neither what stays, which a thread started that is over, nor the command that it waits for."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", KILLED, str(tmp_path / "log"), marker]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline() == "started\n"
        assert wait_until(lambda: len(running(marker)) == 3, 120)
        demo.kill()
    try:
        assert wait_until(lambda: not running(marker), 120)
    finally:  # else nothing ever ends them
        for number, (_, line) in ended_demo.processes().items():
            if marker in line:
                os.kill(number, signal.SIGKILL)


CHILD = "import sys; print('ready', flush=True); sys.stdin.read()"
LEADER = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}])"


def test_nothing_of_a_group_runs_when_it_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader is gone already, and the kernel takes a moment to end what it left."""
    tell = processes._tell
    monkeypatch.setattr(processes, "_tell", lambda *told: threading.Timer(0.5, tell, told).start())
    ours, theirs = os.pipe()
    try:
        leader = subprocess.Popen(
            [sys.executable, "-c", LEADER], stdin=ours, stdout=subprocess.PIPE, text=True, process_group=0
        )
        assert leader.stdout is not None
        with leader.stdout:
            assert leader.stdout.readline() == "ready\n"
            leader.wait()
            assert of_group(leader.pid)
            processes.end_group(leader)
            assert not of_group(leader.pid)
    finally:
        os.close(theirs)
        os.close(ours)


def of_group(group: int) -> set[int]:
    """Who runs in a process group."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.add(int(entry.name))
    return found
