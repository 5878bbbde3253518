"""Deaths and failing disks on real files: the product in a process of its own, killed or failed at any operation.

Two ways to the same end. :func:`by_layer` counts SQLite's operations in a layer of ours, and works wherever Python
does; :func:`by_strace` fails the kernel's calls themselves (Debian's ``strace``, which needs leave to ptrace). After
each death the ledger is opened by the product, judged, asked for the same things again, and must come to the plan's
root.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import apsw

from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import LedgerUnsoundError, Store
from tests.crash import child
from tests.crash.faults import Fault
from tests.crash.workload import KEY, ORIGIN, Clock, drive, finished, judge, plan

ROOT: Final = Path(__file__).parent.parent.parent
CALLS: Final = ("pwrite64", "fdatasync", "fsync", "ftruncate", "openat", "unlink")
ACTIONS: Final = ("signal=KILL", "error=EIO", "error=ENOSPC")
WENT_ON: Final = "went on after a failed operation"
_TOLD: Final = r'write\(\d+[^,]*, "(-?\d+)\\n"'
_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.crash.child"])


@dataclass(frozen=True, slots=True)
class Death:
    """How a life ended, and what it had told."""

    code: int  # as of subprocess: negative is a signal
    before: tuple[int, ...]  # told before the fault: sizes, child.OPENING, child.CLOSING
    after: tuple[int, ...] = ()  # told after it
    made_good: bool = False  # what failed was a sync of the directory, and another did the same

    @property
    def acknowledged(self) -> int:
        """Entries told to be durable."""
        return max((*self.before, *self.after, 0))

    def went_on(self) -> bool:
        """Whether something new was acknowledged after a failure, other than a failure to tidy up at the end."""
        closing = bool(self.before) and self.before[-1] == child.CLOSING
        new = max((*self.after, 0)) > max((*self.before, 0))
        return self.code == child.WENT_ON or (new and not closing and not self.made_good)


@dataclass(slots=True)
class Tally:
    """What many lives came to."""

    lives: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)  # what -> where

    def add(self, where: str, death: Death, wrong: str) -> None:
        """Count one life."""
        self.lives += 1
        names = {
            child.DONE: "finished",
            child.STOPPED: "stopped",
            child.REFUSED: "refused",
            -signal.SIGKILL: "killed",
        }
        end = names.get(death.code, f"exit {death.code}")
        self.ends[end] += 1
        if death.went_on():
            wrong = wrong or WENT_ON
        elif end.startswith("exit"):
            wrong = wrong or end
        if wrong:
            self.wrong.setdefault(wrong, []).append(where)


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """Where a ledger may be, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="lazaret-crash-") as folder:
        yield Path(folder) / "ledger.db"


def forked(target: Callable[..., None], *arguments: Any, fault: Fault | None = None, **options: Any) -> Death:
    """Run one life in a process forked from a small one without threads."""
    ours, theirs = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=target, args=(*arguments, *([fault] if fault else []), theirs), kwargs=options)
    process.start()
    theirs.close()
    told = list(_told(ours))
    process.join()
    failed = fault.at if fault and fault.at else 1 << 62
    before, after = ([size for size, at in told if (at >= failed) is late] for late in (False, True))
    return Death(process.exitcode or 0, tuple(before), tuple(after))


def _told(pipe: Connection) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def recovered(path: Path, seed: int, acknowledged: int) -> str:
    """Open what a death left, judge it, and drive the plan to its end; what was wrong, or ""."""
    planned, clock = plan(seed), Clock()
    try:
        disk = open_sqlite(path)
        with Store(disk, ORIGIN, KEY, clock) as store:
            if wrong := judge(planned, store, disk, acknowledged):
                return wrong
            drive(store, clock, planned, range(len(planned.steps)), lambda _size: None)
            if wrong := finished(planned, store, disk):
                return wrong
        with contextlib.closing(apsw.Connection(str(path))) as connection:
            sound = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    except (apsw.Error, LedgerUnsoundError, AssertionError) as error:
        return str(error) if isinstance(error, AssertionError) else f"refused: {type(error).__name__}"
    return "" if sound == ["ok"] else "integrity_check failed"


def operations(seed: int) -> int:
    """How many operations of SQLite's an undisturbed life has, up to the end of its shutdown."""
    fault = Fault()
    with place() as path:
        ours, theirs = _FORKS.Pipe(duplex=False)
        process = _FORKS.Process(target=child.counted, args=(path, seed, fault, theirs))
        process.start()
        theirs.close()
        count: int = ours.recv()
        process.join()
    return count


def by_layer(seed: int, kind: str, at: int, tally: Tally, hasty: bool = False) -> None:
    """A life with a fault at the ``at``-th operation, counted."""
    with place() as path:
        death = forked(child.faulty, path, seed, fault=Fault(kind, at), hasty=hasty)
        tally.add(f"seed {seed}, {kind} at {at}", death, recovered(path, seed, death.acknowledged))


def strace_missing() -> str:
    """Why system calls cannot be failed here; empty if they can."""
    tool = shutil.which("strace")
    if tool is None:
        return "strace is not installed"
    tried = subprocess.run([tool, "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return (
        "" if tried.returncode == 0 else "strace may not trace here: " + (tried.stderr.strip() or "no reason given")
    )


def _strace(path: Path, seed: int, injections: list[str]) -> tuple[Death, str]:
    """A life under strace, and the log of its calls on its files."""
    told, log = path.with_name("told"), path.with_name("log")
    watched = [f"-P{path}{end}" for end in ("", "-wal", "-journal", "-shm")] + [f"-P{path.parent}", f"-P{told}"]
    traced = [
        "strace",
        "-f",
        "-qq",
        "-y",
        "-o",
        str(log),
        *watched,
        "-e",
        "trace=write," + ",".join(CALLS),
        *injections,
    ]
    command = [*traced, sys.executable, "-m", "tests.crash.child", str(path), str(seed)]
    with told.open("w") as stdout:
        code = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.DEVNULL, check=False).returncode
    calls = log.read_text()
    before, _, after = calls.partition("(INJECTED)")
    early, late = (tuple(int(size) for size in re.findall(_TOLD, part)) for part in (before, after))
    return Death(code, early, late, _made_good(before, after, path)), calls


def _made_good(before: str, after: str, path: Path) -> bool:
    """Whether SQLite's sync of a directory failed, which it ignores, and the product's own covers the same names.

    That one must come after the write-ahead log was created, and before anything more is told.
    """
    folder = re.escape(str(path.parent))
    failed = before.splitlines()[-1] if before else ""
    if re.search(rf'<{folder}>\)|"{folder}"', failed) is None:
        return False
    since = before.rpartition(f'"{path}-wal", O_RDWR|O_CREAT')[2] + re.split(_TOLD, after)[0]
    return re.search(rf"sync\(\d+<{folder}>\) += 0$", since, re.MULTILINE) is not None


def calls(seed: int) -> dict[str, int]:
    """How often an undisturbed life makes each of the system calls on its files."""
    with place() as path:
        death, log = _strace(path, seed, [])
    assert death.code == child.DONE, f"an undisturbed life of seed {seed} ended with {death.code}"
    counted = Counter(re.findall(r"^\d+ +(\w+)\(", log, re.MULTILINE))
    return {call: counted[call] for call in CALLS if counted[call]}


def by_strace(seed: int, call: str, action: str, at: int, tally: Tally) -> None:
    """A life whose ``at``-th call of that name is killed or fails, counted."""
    with place() as path:
        death, _ = _strace(path, seed, ["-e", f"inject={call}:{action}:when={at}"])
        tally.add(f"seed {seed}, {call} {action} at {at}", death, recovered(path, seed, death.acknowledged))


def disk_full(seed: int, most: int, pages: bool, tally: Tally) -> Death:
    """A life on a disk that ends, counted; with space again, the recovery must come to the same root."""
    with place() as path:
        death = forked(child.short_of_pages if pages else child.short_of_bytes, path, seed, most)
        where = f"seed {seed}, at most {most} {'pages' if pages else 'bytes'}"
        tally.add(where, death, recovered(path, seed, death.acknowledged))
    return death
