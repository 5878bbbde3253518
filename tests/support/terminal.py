"""A person at a terminal: lines that are typed, and the answers to what a command asks there."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_PROGRAMS: Final = {"lazaret-agent": "agent", "lazaret-coordinator": "coordinator"}
_PATIENCE_S: Final = 120.0
# Standard input becomes the controlling terminal of the new session, as a shell's is: secrets are typed there.
_TAKE: Final = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def command(line: str) -> list[str]:
    """The process that a typed line starts, of this checkout."""
    program, *words = line.split()
    return [sys.executable, "-m", _PROGRAMS[program], *words]


@dataclass(slots=True)
class Terminal:
    """What one side types, in a folder of its own; every line and every question is counted."""

    folder: Path
    lines: list[str] = field(default_factory=list)
    answered: list[tuple[str, str]] = field(default_factory=list)  # a part of each question, and the answer
    shown: list[str] = field(default_factory=list)  # after each line, typed answers too where they are echoed
    said: str = ""  # the same of the last line
    services: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def type(self, line: str, *answers: tuple[str, str], status: int = 0) -> str:
        """Type a line and answer its questions, in this order, and no others; what the terminal showed.

        Args:
            line: as it is typed.
            answers: a part of each question, and what is typed for it.
            status: with which the command must end.
        """
        self.lines.append(line)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", _TAKE, *command(line)],
            cwd=self.folder,
            env=self._environment(),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.said = ""
        try:
            for asked, answer in answers:
                self._until(ours, asked)
                self.answered.append((asked, answer))
                os.write(ours, f"{answer}\n".encode())
            self._until(ours, None)
            self.shown.append(self.said)
            found = process.wait(_PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        assert found == status, f"{line}: {found}: {self.said}"
        return self.said

    def leave(self, line: str, ready: str) -> None:
        """Type a line whose process stays, and wait until it says that it is ready."""
        self.lines.append(line)
        log = self.folder / f"service-{len(self.services)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command(line), cwd=self.folder, env=self._environment(), stdout=out, stderr=subprocess.STDOUT
            )
        self.services.append(process)
        until = time.monotonic() + _PATIENCE_S
        while ready not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """End what stays, in an orderly way."""
        for process in self.services:
            process.send_signal(signal.SIGTERM)
        for process in self.services:
            assert process.wait(_PATIENCE_S) == 0

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}

    def _until(self, ours: int, asked: str | None) -> None:
        """Read until a question stands there, or with None to the end."""
        seen, until = len(self.said), time.monotonic() + _PATIENCE_S
        while asked is None or not (asked in self.said[seen:] and self.said.endswith(": ")):
            assert time.monotonic() < until, f"{asked} was not asked: {self.said}"
            if not wait([ours], 1.0):
                continue
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # the other end is closed
                chunk = b""
            if not chunk:
                assert asked is None, f"{asked} was not asked: {self.said}"
                return
            self.said += chunk.decode()


def lines_of(said: str, start: str) -> str:
    """What follows ``start`` on its line."""
    (found,) = {line.partition(start)[2].strip() for line in said.splitlines() if start in line}
    return found
