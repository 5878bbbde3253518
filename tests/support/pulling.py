"""A site that pulls, for tests: its ports, and a program that a test can kill at any moment."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.pacs.archive import ArchiveConfig
from agent.pacs.dimse.retrieve import Ports, PullReport, RetrievalProgress, Retriever
from agent.storage.spool import Spool

KEY = bytes(range(32))
SENDERS = (("pull", "pacs"), ("dimse", "TESTPACS"))  # the archive of the tests, by C-GET and by C-MOVE


@dataclass(slots=True)
class Note:
    """A journal in memory."""

    value: dict[str, list[int]] = field(default_factory=dict)

    def read(self) -> Mapping[str, Sequence[int]]:
        return self.value

    def write(self, value: Mapping[str, Sequence[int]]) -> None:
        self.value = {key: list(entry) for key, entry in value.items()}


@dataclass(slots=True)
class FileNote:
    """A journal in a file."""

    path: Path

    def read(self) -> Mapping[str, Sequence[int]]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def write(self, value: Mapping[str, Sequence[int]]) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(value))
        part.rename(self.path)


@dataclass(slots=True)
class Clock:
    """Time that passes only while somebody sleeps."""

    at: dt.datetime = dt.datetime(2026, 3, 2, 12, 0)
    slept: float = 0.0

    def now(self) -> dt.datetime:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += dt.timedelta(seconds=seconds)
        self.slept += seconds


class Site:
    """A spool and what is needed to pull into it."""

    def __init__(self, folder: Path) -> None:
        self.room = Spool(folder / "inbox", KEY)
        self.room.sweep()
        self.elsewhere: set[str] = set()  # in the vault or the quarantine
        self.note: Note | FileNote = Note()
        self.clock = Clock()

    def already(self, instance: str) -> bool:
        """In the spool, or in what stands for vault and quarantine."""
        return self.room.holds(instance, SENDERS) or instance in self.elsewhere

    def ports(self, progress: Callable[[RetrievalProgress], None] = lambda _progress: None) -> Ports:
        return Ports(self.room, self.already, self.note, self.clock.now, self.clock.sleep, progress)

    def bodies(self) -> dict[str, bytes]:
        """What is in the room, by SOP Instance UID. Nothing is there twice."""
        arrivals = [self.room.open(name) for name in self.room.names()]
        found = {arrival.instance: bytes(arrival.body) for arrival in arrivals}
        assert len(found) == len(arrivals), "an instance is in the room twice"
        return found


def pulled(remote: ArchiveConfig, site: Site) -> PullReport:
    """One run."""
    return Retriever(remote, site.ports()).run()


def data_set(body: bytes) -> bytes:
    """What comes after the file meta information (PS3.10 section 7.1)."""
    assert body[128:140] == b"DICM\2\0\0\0UL\4\0"
    return body[144 + int.from_bytes(body[140:144], "little") :]


def main(folder: str, aet: str, port: str, calling: str) -> None:
    """Pull everything; one line for each step of progress, and not on before a line comes back."""

    def step(progress: RetrievalProgress) -> None:
        print(progress.instances_done, flush=True)
        sys.stdin.readline()

    site = Site(Path(folder))
    site.note = FileNote(Path(folder) / "note.json")
    print("started", flush=True)
    remote = ArchiveConfig("pacs", aet, "127.0.0.1", int(port), calling)
    Retriever(remote, site.ports(step)).run()
    print("ended", flush=True)


def pulling(folder: Path, aet: str, port: int) -> list[str]:
    """The command line of ``main``; without a standard input it runs to its end."""
    return [sys.executable, "-m", "tests.support.pulling", str(folder), aet, str(port), "LAZARET"]


def killed_after(steps: int, command: Sequence[str], then: Callable[[], None]) -> None:
    """Start ``main``, let it go so many steps, and kill -9 it wherever it is a moment later.

    ``then`` is called once it goes on: it may wait, or kill somebody else first.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        for _ in range(steps):
            assert child.stdout.readline().strip().isdigit(), "it ended before it was to be killed"
            child.stdin.write("\n")
            child.stdin.flush()
        then()
        child.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
