"""A forked command is what a started one is: its words, output, status, folder, environment, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_server import ROOT, python

PROGRAM = """
import os, signal, sys
print("words", sys.argv[1:], os.getcwd(), os.environ["TOLD"], "HOME" in os.environ, oct(os.umask(0)))
print("error", sys.stdin.read(), file=sys.stderr)
match sys.argv[1]:
    case "text": sys.exit("a sentence")
    case "status": sys.exit(7)
    case "fault": raise ArithmeticError("broken")
    case "killed": os.kill(os.getpid(), signal.SIGKILL)
    case "ended": os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("how", ["done", "text", "status", "fault", "killed", "ended"])
def test_it_says_and_ends_as_one_that_a_user_starts(tmp_path: Path, how: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    old = os.umask(0o027)
    try:
        found = [
            subprocess.run(
                [executable, "-m", "program", how, "two words"],
                cwd=tmp_path,
                input="read",
                env={"TOLD": "x", "PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
                check=False,
            )
            for executable in (sys.executable, python())
        ]
    finally:
        os.umask(old)
    # a traceback's middle names the files that lie between
    started, forked = (
        (done.returncode, done.stdout, done.stderr.splitlines()[:1], done.stderr.splitlines()[-1:]) for done in found
    )
    assert forked == started
    assert how in ("killed", "ended") or "two words" in started[1]


def test_the_products_commands_are_the_same_by_either_way() -> None:
    for words in (["-m", "agent", "--help"], ["-m", "coordinator", "nonsense"], ["-m", "policies.audit.verify"]):
        started, forked = (
            subprocess.run([executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
            for executable in (sys.executable, python())
        )
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            started.returncode,
            started.stdout,
            started.stderr,
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_command_and_not_only_who_waits_for_it(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    with subprocess.Popen([python(), "-m", "program"], cwd=tmp_path, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        ended = os.pidfd_open(pid)
        command.send_signal(number)
        assert command.wait(120) == -number
        os.close(ended)
        assert command.stdout.read() == b""  # which ends when nobody is left who could write
