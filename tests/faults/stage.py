"""A federation of real processes, started as users start them, that can be copied, killed and restarted.

:func:`tests.support.process_world.enrol_all` makes the directories once, by the demo's own steps: keys, enrolment by
token, cohorts in the vaults. A :class:`Stage` is a copy of them on a port of its own, with one coordinator and three
agents that a supervisor (the stage) starts again after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from agent.cli import main as agent_commands
from coordinator.cli import main as coordinator_commands
from deploy.demo.jobs import job_file
from deploy.demo.scene import SITES
from tests.support.ports import free_port
from tests.support.process_world import dial, write_setting
from tests.support.small_mechanisms import FEDERATED
from tests.support.small_tasks import changed
from tests.support.tcp_proxy import wait_until

ROUNDS, MIN_SITES = 2, 2
COORDINATOR, CHILD, OPERATOR = "coordinator", "child", "operator"
_CHILDREN = (b"agent.federation.supernode_main", b"coordinator.federation.run_main")
RESTART_S = 90.0  # a process that does not serve by then has not come back
RUN_S = 420.0  # a run that has no end by then hangs
CLOSE_S = 60.0  # for the sites' books, once a run is over


class Hangs(AssertionError):
    """Something did not come to an end in time."""


@dataclass(slots=True, eq=False)
class Stage:
    """A copy of the federation, and its running processes; a context manager that leaves none behind."""

    work: Path
    port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: list[tuple[str, int]] = field(default_factory=list)  # of themselves: who, and with which status
    _starts: int = 0

    @classmethod
    def copied(cls, enrolled: Path, to: Path) -> Self:
        """A fresh copy, on a port of its own."""
        shutil.copytree(enrolled, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("pacs"))
        stage = cls(to)
        dial(to, f"127.0.0.1:{stage.port}")
        # Little noise is needed of a job whose accuracy nobody looks at: few steps a round, so that many runs fit.
        cheap = changed(FEDERATED, rounds=ROUNDS, noise_multiplier=8.0, steps_per_round=2)
        (to / "job.json").write_text(json.dumps(job_file(cheap, MIN_SITES), indent=2))
        return stage

    def dial(self, site: str, address: str, proxy: str = "") -> None:
        """Which way a site's agent takes, from its next start on."""
        write_setting(self.work / site / "site.toml", "coordinator", address)
        if proxy:
            path = self.work / site / "site.toml"
            path.write_text(path.read_text() + f"proxy = {json.dumps(proxy)}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Stop every process gently; one that does not heed it is killed."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()

    def start_all(self) -> None:
        """The coordinator, then the three agents side by side."""
        self.start(COORDINATOR)
        for site in SITES:
            self.spawn(site)
        for site in SITES:
            self.ready(site)

    def command(self, name: str) -> list[str]:
        """What a service manager types for a process that stays."""
        if name == COORDINATOR:
            return self.operator("serve")
        return [sys.executable, "-m", "agent", "--home", str(self.work / name), "serve", "--modality", "OT"]

    def operator(self, *words: str) -> list[str]:
        """What an operator types."""
        return [sys.executable, "-m", "coordinator", "--home", str(self.work / COORDINATOR), *words]

    def start(self, name: str) -> None:
        """Start a process and wait until it works."""
        self.spawn(name)
        self.ready(name)

    def log(self, name: str) -> Path:
        """What a process has said since its newest start."""
        return self.work / f"{name}.said"

    def spawn(self, name: str) -> None:
        """Start a process; its earlier words are kept in another file."""
        log = self.log(name)
        if log.exists():
            self._starts += 1
            log.rename(log.with_suffix(f".said-{self._starts}"))
        with log.open("wb") as out:
            self.running[name] = subprocess.Popen(
                self.command(name), stdout=out, stderr=subprocess.STDOUT, env=environment()
            )

    def ready(self, name: str) -> None:
        """Wait until a process serves.

        Raises:
            Hangs: it ended, or never said so.
        """
        word, process, log = ("serving" if name == COORDINATOR else "link: "), self.running[name], self.log(name)
        if not wait_until(lambda: word in log.read_text() or process.poll() is not None, RESTART_S):
            raise Hangs(f"{name} does not come up: {log.read_text()[-1500:]}")
        if process.poll() is not None:
            raise Hangs(f"{name} ended with {process.returncode}: {log.read_text()[-1500:]}")

    def kill(self, name: str) -> None:
        """SIGKILL, and the process is gone when this returns."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        """SIGTERM, as a service manager stops a unit."""
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Hangs(f"{name} does not stop when it is told to") from None

    def revive(self) -> None:
        """What a service manager does: start again what ended by itself; with which status is kept."""
        for name, process in list(self.running.items()):
            status = process.poll()
            if status is not None:
                self.ended.append((name, status))
                self.start(name)

    def kill_child(self, name: str) -> bool:
        """SIGKILL an agent's link, or the coordinator's process of a run; False: there is none at this moment."""
        children = list(_children(self.running[name].pid))
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(children)

    def launch(self, run: str, rounds: str = "launch") -> Launched:
        """``round launch`` (or ``resume``) of a run, in a process of its own."""
        said = self.work / f"{run}.{rounds}-{time.monotonic_ns()}"
        words = ["round", rounds, *([str(self.work / "job.json"), "--run"] if rounds == "launch" else []), run]
        with said.open("wb") as out:
            process = subprocess.Popen(
                self.operator(*words, "--json"), stdout=out, stderr=subprocess.STDOUT, env=environment()
            )
        return Launched(process, said)

    def type(self, *words: str) -> str:
        """What an operator's command prints that comes to its end well.

        Raises:
            Hangs: it does not.
        """
        done = subprocess.run(self.operator(*words), capture_output=True, text=True, env=environment(), check=False)
        if done.returncode != 0:
            raise Hangs(f"{words[0]} ended with {done.returncode}: {done.stderr[-800:]}")
        return done.stdout

    def begun(self, run: str) -> Path:
        """The file that is there from the moment at which the coordinator knows a run."""
        return self.work / COORDINATOR / "runs" / run / "job.json"

    def carried_out(self, run: str, seconds: float = RUN_S) -> dict[str, Any]:
        """Launch a run, as often as the operator's connection breaks, and give its last event.

        Raises:
            Hangs: it has no end in time.
        """
        until, said = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            one = self.launch(run)
            if not wait_until(lambda: one.process.poll() is not None, max(0.0, until - time.monotonic())):  # noqa: B023
                one.process.kill()
                one.process.wait()
                raise Hangs(f"{run} has no end: {one.said.read_text()[-800:]}")
            events = one.events()
            if events and events[-1]["state"] in ("finished", "failed", "stopped"):
                return events[-1]
            said = one.said.read_text()[-500:]
            time.sleep(0.5)
            self.revive()
        raise Hangs(f"{run} cannot be launched: {said}")

    def ledger(self, name: str) -> bytes:
        """The exported ledger of a site or of the coordinator, by the product's command."""
        out = self.work / f"{name}.export"
        main = coordinator_commands.main if name == COORDINATOR else agent_commands.main
        with contextlib.redirect_stdout(None):
            status = main(["--home", str(self.work / name), "ledger", "export", str(out)])
        if status != 0:
            raise Hangs(f"the ledger of {name} cannot be exported: {status}")
        return out.read_bytes()


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """An operator's command that follows a run."""

    process: subprocess.Popen[bytes]
    said: Path

    def events(self) -> list[dict[str, Any]]:
        """What it has printed so far, but for a line in the making and words that are no event."""
        found = []
        for line in self.said.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                found += [event] if isinstance(event, dict) else []
        return found


def environment() -> dict[str, str]:
    """One computing thread for each process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def signal_both(pid: int, number: signal.Signals) -> None:
    """Send SIGSTOP or SIGCONT to an agent and to its link."""
    for one in (pid, *_children(pid)):
        os.kill(one, number)


def may_mount() -> None:
    """Skip where a small file system cannot be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs takes root")


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A tmpfs of so many KiB.

    Raises:
        pytest.skip.Exception: it cannot be mounted here.
    """
    may_mount()
    folder.mkdir(parents=True, exist_ok=True)
    words: Sequence[str] = ["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=0700", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("this container may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def resized(folder: Path, kib: int) -> None:
    """Give a :func:`small_disk` another size."""
    words = ["mount", "-o", f"remount,size={kib}k", str(folder)]
    subprocess.run(words, check=True, capture_output=True)


def eventually(true: Callable[[], bool], what: str, seconds: float = CLOSE_S) -> None:
    """Wait for something that must come.

    Raises:
        Hangs: it does not.
    """
    if not wait_until(true, seconds):
        raise Hangs(what)


def _children(pid: int) -> Iterator[int]:
    """An agent's link, or the coordinator's processes of runs."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                words = Path(f"/proc/{child}/cmdline").read_bytes()
                if any(module in words for module in _CHILDREN):
                    yield child
