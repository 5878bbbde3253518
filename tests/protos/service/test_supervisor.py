"""The process that starts jobs: what it is told of, how it ends, and what ends with it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.service.supervisor import Ended, NotStartedError, Supervisor, SupervisorError

SLEEPS = "import time; time.sleep(600)"
ENDS_WITH_IT = f"import os; from protos.operations.confinement import end_with; end_with(os.getppid()); {SLEEPS}"


class Jobs:
    """Jobs of a few words of Python."""

    def __init__(self, supervisor: Supervisor, folder: Path) -> None:
        self.supervisor, self.folder = supervisor, folder

    def start(self, name: str, program: str, **environment: str) -> int:
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as errors:
            words = [sys.executable, "-c", program]
            told = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
            return self.supervisor.start(name, words, told, out.fileno(), errors.fileno(), self.folder)

    def ended(self, count: int = 1) -> list[Ended]:
        found: list[Ended] = []
        until = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < until
            found += self.supervisor.ended(1.0)
        return found

    def said(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.out").read_bytes())


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    with Supervisor() as supervisor:
        yield Jobs(supervisor, tmp_path)


def gone(pid: int) -> bool:
    """Ended, and buried or left to be."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(*pids: int) -> None:
    until = time.monotonic() + 30
    while not all(map(gone, pids)):
        assert time.monotonic() < until, [pid for pid in pids if not gone(pid)]
        time.sleep(0.01)


def test_an_end_is_told_with_its_status(jobs: Jobs) -> None:
    jobs.start("a", "raise SystemExit(3)")
    assert jobs.ended() == [Ended("a", 3)]


def test_a_signal_ends_the_job_and_all_that_it_started(jobs: Jobs) -> None:
    program = (
        "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', %r]); print(c.pid, flush=True); c.wait()"
    )
    jobs.start("a", program % SLEEPS)
    until = time.monotonic() + 30
    while not (jobs.folder / "a.out").read_text().strip():
        assert time.monotonic() < until
        time.sleep(0.01)
    jobs.supervisor.signal("a", signal.SIGTERM)
    assert [(end.name, end.status) for end in jobs.ended()] == [("a", -signal.SIGTERM)]
    wait_gone(jobs.said("a"))


def test_what_a_job_leaves_in_its_session_ends_with_it(jobs: Jobs) -> None:
    program = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', %r]).pid)"
    jobs.start("a", program % SLEEPS)
    assert jobs.ended()[0].status == 0
    wait_gone(jobs.said("a"))


def test_several_jobs_are_told_apart(jobs: Jobs) -> None:
    for number in range(5):
        jobs.start(f"{number}", f"raise SystemExit({number})")
    assert {end.name: end.status for end in jobs.ended(5)} == {f"{number}": number for number in range(5)}


def test_a_program_that_is_not_there_is_a_sentence_and_the_next_one_starts(jobs: Jobs) -> None:
    with (jobs.folder / "o").open("wb") as out, pytest.raises(NotStartedError, match="No such file or directory"):
        jobs.supervisor.start("a", ["/nowhere/python"], {}, out.fileno(), out.fileno(), jobs.folder)
    jobs.start("b", "raise SystemExit(7)")
    assert jobs.ended()[0].status == 7


def test_a_job_gets_its_words_and_environment_and_nothing_of_the_service(jobs: Jobs) -> None:
    """P9: no descriptor, so no lock and no socket; no variable that was not named; nothing to read from."""
    handle = os.open(jobs.folder, os.O_RDONLY)
    os.set_inheritable(handle, True)  # by mistake
    fcntl.flock(handle, fcntl.LOCK_EX)
    program = (
        "import json, os, sys\n"
        "here = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd') if n not in '012']\n"
        "told = [[os.readlink(h) for h in here if os.path.lexists(h)], sorted(os.environ), sys.stdin.read()]\n"
        "print(json.dumps([*told, os.getcwd(), os.getpid() == os.getsid(0)]))\n"
    )
    try:
        jobs.start("a", program, LAZARET_TEST="1")
        assert jobs.ended()[0].status == 0
    finally:
        os.close(handle)
    descriptors, names, read, folder, own_session = jobs.said("a")
    assert descriptors == []
    assert set(names) <= {"LAZARET_TEST", "PYTHONPATH", "LC_CTYPE"}
    assert (read, folder, own_session) == ("", str(jobs.folder), True)


def test_jobs_end_with_the_process_that_started_them(jobs: Jobs) -> None:
    pid = jobs.start("a", f"print(1, flush=True); {ENDS_WITH_IT}")
    until = time.monotonic() + 30
    while not (jobs.folder / "a.out").read_bytes():
        assert time.monotonic() < until
    time.sleep(0.3)  # until it has asked the kernel
    os.kill(jobs.supervisor.pid, signal.SIGKILL)
    with pytest.raises(SupervisorError, match="has ended"):
        jobs.ended()
    with pytest.raises(SupervisorError):
        jobs.start("b", "")
    wait_gone(pid)


def test_a_supervisor_that_is_killed_before_it_has_read_has_ended(jobs: Jobs) -> None:
    """Then the kernel resets the connection, which is no fault of the job's."""
    os.kill(jobs.supervisor.pid, signal.SIGSTOP)
    killing = threading.Timer(0.3, os.kill, (jobs.supervisor.pid, signal.SIGKILL))
    killing.start()
    with pytest.raises(SupervisorError, match="has ended"):
        jobs.start("a", SLEEPS)
    killing.join()
    with pytest.raises(SupervisorError, match="has ended"):
        jobs.ended()


def test_the_supervisor_and_its_jobs_end_with_the_service(tmp_path: Path) -> None:
    """Killed in whatever state: its socket tells."""
    program = (
        "import sys, time; from pathlib import Path; from protos.service.supervisor import Supervisor\n"
        "s = Supervisor(); f = open('/dev/null', 'wb')\n"
        f"p = s.start('a', [sys.executable, '-c', {SLEEPS!r}], {{}}, f.fileno(), f.fileno(), Path('/'))\n"
        "print(s.pid, p, flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as service:
        assert service.stdout is not None
        supervisor, job = map(int, service.stdout.readline().split())
        service.kill()
    wait_gone(supervisor, job)


def test_ctrl_c_and_term_are_for_the_service_and_jobs_hear_them_as_usual(jobs: Jobs) -> None:
    jobs.start("first", "")
    assert jobs.ended()[0].status == 0
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(jobs.supervisor.pid, number)
    time.sleep(0.1)
    jobs.start("a", SLEEPS)
    jobs.supervisor.signal("a", signal.SIGTERM)  # an ignored signal would be ignored by the job, too
    assert jobs.ended()[0].status == -signal.SIGTERM


def test_closing_ends_everything(tmp_path: Path) -> None:
    supervisor = Supervisor()
    pid = Jobs(supervisor, tmp_path).start("a", SLEEPS)
    with contextlib.closing(supervisor):
        pass
    wait_gone(pid, supervisor.pid)


def test_it_imports_nothing_large() -> None:
    program = (
        "import sys, protos.service.supervisor; print(len(sys.modules), 'numpy' in sys.modules, 'ssl' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    count, *others = said.stdout.split()
    assert (int(count) < 120, others) == (True, ["False", "False"])
