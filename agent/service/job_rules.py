"""Which job starts next. The first rule that says no is the reason that people are shown.

The rules, in their order: what is wanted (cancelled, not before), lane, a round that is trained on the same
processors, images that wait, quiet hours, memory, accelerator; then priority, and age. A release that was begun goes
before any other of its lane. A part in a run is under none of them: its round has an end, so it begins when the
coordinator asks, and others give way.
"""

from __future__ import annotations

import datetime as dt
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent import toml_config
from agent.errors import SiteConfigError
from agent.pacs.schedule import Hours
from agent.service.jobs import (
    INTAKE,
    INTERRUPTED,
    LEAVING,
    MAKING,
    PREDICTION,
    PRIORITIES,
    PROPOSED,
    QUEUED,
    ROUND,
    RUNNING,
    TRAINING,
    Job,
)

_QUERY: Final = ("nvidia-smi", "--query-gpu=index,memory.total,memory.used", "--format=csv,noheader,nounits")
_PATIENCE_S: Final = 20.0
SERVICE_GIB: Final = 2  # of memory are left to the service


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Table ``jobs.toml`` of the home directory, all keys optional."""

    hours: str = ""  # "22:00-06:00": local time in which makings and trainings start; others start at any time
    memory_gib: float = 0.0  # most data of one job; 0: no bound, and no rule
    keep_days: int = 90  # of jobs that have ended
    disk_share: float = 0.1  # of the file system that ended jobs may fill

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: the text says which key.
        """
        if self.hours:
            Hours.parse(self.hours)
        if not self.memory_gib >= 0 or not self.keep_days >= 1 or not 0 < self.disk_share <= 1:
            raise ValueError("memory_gib is 0 or more, keep_days 1 or more, disk_share above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the rules look at beside the jobs."""

    now: dt.datetime  # local time with its zone
    making: bool = False  # somebody makes a release by hand
    late: bool = False  # images wait to be read
    free_bytes: int | None = None  # of memory; None: nobody can say
    cards: tuple[int, ...] | None = ()  # accelerators; None: nobody can say


def read_settings(home: Path) -> JobSettings:
    """``jobs.toml``, or what holds without it.

    Raises:
        SiteConfigError: it cannot be used; the text says why.
    """
    try:
        text = (home / "jobs.toml").read_text()
    except FileNotFoundError:
        return JobSettings()
    except (OSError, UnicodeDecodeError):
        raise SiteConfigError("jobs.toml cannot be read") from None
    try:
        tables = toml_config.Tables(tomllib.loads(text), toml_config.converter(home))
    except tomllib.TOMLDecodeError as error:
        raise SiteConfigError(f"jobs.toml: not TOML: {error}") from None
    made = tables.made(tables.raw, JobSettings, "jobs.toml")
    if made is None:
        raise SiteConfigError("; ".join(tables.problems))
    return made


def choose(
    jobs: Sequence[Job], settings: JobSettings, around: Callable[[bool], Surroundings]
) -> tuple[Job | None, dict[int, str]]:
    """The job that starts now, if one does; and of every other that waits, why.

    Args:
        jobs: all of them, by number.
        settings: of the site.
        around: asked once, and only where something waits; with whether a job wants an accelerator.
    """
    waits = [job for job in jobs if job.state in (QUEUED, INTERRUPTED) and job.lane != ROUND]
    waiting = [job for job in waits if not job.wanted and job.not_before >= 0]
    reasons = {job.number: "waits for approval" for job in jobs if job.state == PROPOSED}
    if not waiting:
        return None, reasons
    busy, seen, first = list(_busy(jobs)), around(any(job.cuda for job in waiting)), None
    for job in sorted(waiting, key=lambda job: (PRIORITIES.index(job.priority), job.number)):
        why = _against(job, busy, settings, seen)
        if why:
            reasons[job.number] = why
        elif first is None:
            first = job
            busy.append(job)
        else:  # one starts at a time; the next look finds the rest
            reasons[job.number] = f"starts after job {first.number}"
    return first, reasons


def _busy(jobs: Iterable[Job]) -> Iterable[Job]:
    """Jobs at work, and a release that was begun and goes on: no other is made before it."""
    for job in jobs:
        begun = job.state in (INTERRUPTED, QUEUED) and job.grant and job.lane == MAKING and job.attempts > 0
        if job.state in (RUNNING, LEAVING) or begun:
            yield job


def gives_way(job: Job) -> bool:
    """Whether a job gives way to a round, which has an end that other sites wait for: one of the same processors."""
    return job.lane in (MAKING, TRAINING, PREDICTION) and not job.cuda


def _against(job: Job, busy: Sequence[Job], settings: JobSettings, seen: Surroundings) -> str:
    """The first rule that says no; "": it may start."""
    if job.not_before > seen.now.timestamp():
        again = dt.datetime.fromtimestamp(job.not_before, seen.now.tzinfo)
        return f"goes on at {again:%H:%M}; at once by `jobs retry {job.number}`"
    for other in busy:
        if other.number != job.number and other.lane == job.lane:
            why = f": its priority is {other.priority}" if other.priority != job.priority else ""
            stuck = f": `jobs retry {other.number}` or `jobs cancel {other.number}`"
            why = {INTERRUPTED: stuck, QUEUED: "" if other.attempts else why}.get(other.state, "")
            return f"job {other.number} goes first{why}"
    trained = next((other for other in busy if other.lane == ROUND), None)
    if trained is not None and gives_way(job):
        return f"job {trained.number} trains a round: it goes first"
    if job.lane != INTAKE and seen.late:
        return "images wait to be read"
    if job.lane == MAKING and seen.making:
        return "another release, search or evaluation is at work"
    if settings.hours and job.lane not in (INTAKE, PREDICTION) and not Hours.parse(settings.hours).hold(seen.now):
        return f"starts within the hours {settings.hours}"
    return _of_machine(job, busy, settings, seen)


def _of_machine(job: Job, busy: Sequence[Job], settings: JobSettings, seen: Surroundings) -> str:
    """What memory and accelerators say."""
    needed = int(settings.memory_gib * 2**30)
    if needed and seen.free_bytes is not None and seen.free_bytes < needed + SERVICE_GIB * 2**30:
        return f"needs {settings.memory_gib:g} GiB of memory, and {SERVICE_GIB} GiB are for the service"
    if job.cuda and seen.cards is None:
        return "this machine's accelerators cannot be told: `nvidia-smi` does not answer"
    taken = sum(other.cuda and other.state in (RUNNING, LEAVING) for other in busy)
    if job.cuda and taken >= len(seen.cards or ()):
        return "no accelerator is free" if seen.cards else "this machine has no accelerator"
    return ""


def free_memory(meminfo: str) -> int | None:
    """Bytes that may still be had, of the text of /proc/meminfo; None: it does not say."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def cgroup_memory(membership: str, mounted: Path) -> int | None:
    """Bytes that the limits of a process's control groups leave (cgroup v2); None: none limits it.

    A container and a systemd unit have such a limit, of which /proc/meminfo says nothing. What the kernel gives back
    by itself, file pages that were not used lately, counts as free.

    Args:
        membership: the text of /proc/self/cgroup.
        mounted: where the control groups are mounted.
    """
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::/")), "/")
    own, left = mounted / path.lstrip("/"), list[int]()
    for folder in (own, *own.parents):
        if not folder.is_relative_to(mounted):
            break
        try:
            limits = [(folder / f"memory.{name}").read_text().strip() for name in ("max", "high")]
            current = int((folder / "memory.current").read_text())
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the root has none of these files; a container may not see the folder
            continue
        free = int(kept.get("inactive_file", 0)) - current
        left += [int(limit) + free for limit in limits if limit != "max"]
    return max(min(left), 0) if left else None


def cards(answer: str) -> tuple[int, ...]:
    """Numbers of the accelerators in ``nvidia-smi``'s answer to ``_QUERY``.

    Raises:
        ValueError: it is none.
    """
    return tuple(int(line.split(",")[0]) for line in answer.splitlines() if line.strip())


def ask_cards() -> tuple[int, ...] | None:
    """The machine's accelerators; none where there is no driver; None where it does not answer."""
    try:
        said = subprocess.run(  # noqa: S603 - a constant
            _QUERY, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, stdin=subprocess.DEVNULL
        )
        return cards(said.stdout) if said.returncode == 0 else None
    except FileNotFoundError:
        return ()
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
