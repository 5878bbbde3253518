"""The durable record of a site's jobs: a folder for each, ``jobs/NUMBER`` in the home directory.

A job is a command as it was typed, that the running service starts as a process of its own
(:mod:`agent.service.job_runner`). The folder holds ``job.json``; copies of the files that the command reads (``in``),
which are frozen with the proposal; what it writes (``out``); and what the process says (``stdout``, ``stderr``,
``said.jsonl``), ending with ``end.json``. ``job.json`` is replaced whole, so a kill leaves the state before or after.

The record never decides about budget: the ledger does. A release's grant has the name that the record chose before
the job was first started, and what became of it is asked of the ledger (:func:`outcome`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

from protos.common.durable_files import flush_directory, replace_file
from protos.common.errors import RefusedError, StorageError

PROPOSED, QUEUED, RUNNING, MADE, LEAVING, DONE = "proposed", "queued", "running", "made", "leaving", "done"
INTERRUPTED, REFUSED, FAILED, CANCELLED = "interrupted", "refused", "failed", "cancelled"
SPENT: Final = "spent"  # wanted: cancelled whatever it costs
STATES: Final = (PROPOSED, QUEUED, RUNNING, MADE, LEAVING, DONE, INTERRUPTED, REFUSED, FAILED, CANCELLED)
ENDED: Final = frozenset({DONE, REFUSED, FAILED, CANCELLED})
MAKING, TRAINING, INTAKE = "making", "training", "intake"  # lanes: one job of each at a time
ROUND: Final = "round"  # lane of parts in federated runs, whose rounds begin when the coordinator asks
PREDICTION: Final = "prediction"  # lane of what names patients: see agent.service.prediction_jobs
PART: Final = "part"  # first word of such a job; the second one is the run. Nobody types it
Priority = Literal["high", "normal", "low"]  # which job of a lane goes first
PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)
BUSY: Final = 75  # exit status of a job's process (EX_TEMPFAIL, sysexits.h): again later
_LANES: Final = {
    "release": MAKING, "tune": MAKING, "evaluate": MAKING, "train": TRAINING, PART: ROUND,
    "predict": PREDICTION,
}  # fmt: skip
_COUNTED: Final = re.compile(r"(?:(.*): )?([0-9]{1,15}) of ([0-9]{1,15})")  # as agent.release.pipeline tells a stage
_MOST_STEPS: Final = 1 << 53
_LAST_TIME: Final = 1e11  # seconds
_LAST_BYTES: Final = 1 << 16  # of a file's end that is looked at
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_FOLDER: Final = re.compile(r"[0-9A-Za-z]+")
_FEW: Final = 0.05  # of a stage: before it, nobody can say how long the rest takes


class NoSuchJobError(RefusedError):
    """There is no job of that number."""


class JobStateError(RefusedError):
    """The job is in a state in which this cannot be done; the text says what can."""


class JobRecordError(StorageError):
    """A job's record cannot be read."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a job's state."""

    at: float  # seconds since 1970
    state: str
    reason: str = ""
    by: str = ""  # who asked for it; "": nobody
    role: str = ""  # of an approval: the role that approves by this person; else ""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as its record has it."""

    number: int
    words: tuple[str, ...]  # the command, without the program and --home
    project: str
    history: tuple[Event, ...]  # never empty; the last one is how it stands
    grant: str = ""  # the name that its release is to be reserved under; "": it is no release
    price: Mapping[str, Any] = field(default_factory=dict)  # as `--dry-run --json` tells it
    cuda: bool = False
    attempts: int = 0  # starts
    lost: int = 0  # of these, in a row, ended by a signal that nobody had asked for
    hindered: int = 0  # of these, in a row, that the coordinator, the disk or another command stood in the way of
    not_before: float = 0.0  # seconds since 1970
    wanted: str = ""  # "cancelled": it is to end; "spent": also where its price is paid
    wanted_by: str = ""  # who wants that
    key: str = ""  # of the request that made it: the same request makes no second job
    priority: Priority = "normal"

    def __post_init__(self) -> None:
        """Refuse what nobody could start, or order.

        Raises:
            ValueError: there is no word or no event, or no such priority.
        """
        if not self.words or not self.history or self.priority not in PRIORITIES:
            raise ValueError("a job has words, a history, and a priority of these: " + ", ".join(PRIORITIES))

    @property
    def state(self) -> str:
        """One of ``STATES``."""
        return self.history[-1].state

    @property
    def reason(self) -> str:
        """Why it is in this state, for people; "": it speaks for itself."""
        return self.history[-1].reason

    @property
    def approved(self) -> dict[str, str]:
        """Who has approved the proposal: role -> person."""
        return {event.role: event.by for event in self.history if event.role}

    @property
    def kind(self) -> str:
        """The command: "release ksalsa"; of a part in a run, "part" and the run."""
        return " ".join(self.words[: 2 if self.words[0] in ("release", "train", PART) else 1])

    @property
    def lane(self) -> str:
        """What it must not run beside: another job of its lane."""
        return _LANES.get(self.words[0], INTAKE)

    @property
    def stopped(self) -> bool:
        """Whether it changes no more by itself: it has ended, or waits for a person."""
        return self.state in ENDED | {MADE} or (self.state == INTERRUPTED and self.not_before < 0)

    def now(self, state: str, reason: str = "", by: str = "", **changed: Any) -> Job:
        """The same job in another state."""
        event = Event(round(time.time(), 3), state, reason, by)
        return replace(self, history=(*self.history, event), **changed)

    def turned(self, state: str, reason: str) -> Job:
        """The same, where it goes to and fro: how it stood before is no history. The first event stays."""
        before = self.history[:-1] if len(self.history) > 1 and self.state in (QUEUED, RUNNING) else self.history
        return replace(self, history=before).now(state, reason)

    def approving(self, role: str, by: str) -> Job:
        """The same proposal, approved by one more role."""
        event = Event(round(time.time(), 3), self.state, f"approved as {role}", by, role)
        return replace(self, history=(*self.history, event))


@dataclass(frozen=True, slots=True)
class JobProgress:
    """What a running job said last."""

    step: str = ""  # "read", "make", "leave"
    detail: str = ""
    done: int = 0
    of: int = 0  # 0: nobody knows
    left_s: float | None = None  # seconds to the end of this stage; None: nobody can say


class JobStore:
    """The folder ``jobs`` of a home directory. Readers need no lock; one process at a time changes something."""

    def __init__(self, home: Path) -> None:
        """``home``: the site's directory."""
        self.root = home / "jobs"

    def all(self) -> list[Job]:
        """Every job, by number; without those whose record cannot be read, see :meth:`broken`."""
        found = []
        for number in self._numbers():
            with contextlib.suppress(JobRecordError, NoSuchJobError):  # it may be forgotten just now
                found.append(self.read(number))
        return found

    def broken(self) -> list[int]:
        """The numbers of jobs whose record cannot be read."""
        known = {job.number for job in self.all()}
        return [number for number in self._numbers() if number not in known and self.folder(number).is_dir()]

    def read(self, number: int) -> Job:
        """One job.

        Raises:
            NoSuchJobError: none has this number.
            JobRecordError: its record cannot be read.
        """
        try:
            told = json.loads((self.folder(number) / "job.json").read_bytes())
            events = tuple(Event(**one) for one in told.pop("history"))
            return Job(number, tuple(told.pop("words")), history=events, **told)
        except FileNotFoundError:
            raise NoSuchJobError(f"there is no job {number}: `jobs list` shows them") from None
        except (ValueError, TypeError, KeyError):
            raise JobRecordError(f"jobs/{number}/job.json cannot be read: move the folder away") from None

    def folder(self, number: int) -> Path:
        """Where a job's files are."""
        return self.root / str(number)

    def fresh_folder(self, name: str) -> Path:
        """An empty folder for the files of a job that has no number yet, see :meth:`add`.

        Args:
            name: unique; of letters and digits.
        """
        self.root.mkdir(mode=0o700, exist_ok=True)
        folder = self.root / f"new-{name}"
        folder.mkdir(mode=0o700)
        (folder / "in").mkdir()
        return folder

    def add(self, job: Job, files: str = "", elsewhere: Callable[[], int] = lambda: 0) -> Job:
        """Give a job the next number, durable when this returns. No number is given twice.

        Args:
            job: its ``number`` is not used.
            files: the name that :meth:`fresh_folder` was given; "": the job reads no file.
            elsewhere: tells the greatest number that is known beside the folder, where ``last`` is lost.
        Returns:
            The job with its number; where ``job.key`` was used before, the job that it was used for.
        Raises:
            JobRecordError: the folder of its files is not there.
        """
        with self._changing():
            for known in self.all() if job.key else ():
                if known.key == job.key:
                    return known
            last = self._last()
            given = max(self._numbers(), default=0), elsewhere() if last is None else last
            numbered = replace(job, number=max(given) + 1)
            fresh = self.root / f"new-{files}" if files else self.fresh_folder(os.urandom(8).hex())
            if not _FOLDER.fullmatch(files or "0") or not fresh.is_dir():
                raise JobRecordError("the files of the job are not there: type the command again")
            self._write(fresh, numbered)
            replace_file(self.root / "last", str(numbered.number).encode(), 0o600)
            os.rename(fresh, self.folder(numbered.number))
            flush_directory(self.root)
            return numbered

    def change(self, number: int, change: Callable[[Job], Job]) -> Job:
        """Replace a job's record by what ``change`` makes of it; nobody else changes it meanwhile.

        Raises:
            NoSuchJobError, JobRecordError: see :meth:`read`.
        """
        with self._changing():
            before = self.read(number)
            after = change(before)
            if after.state in ENDED and after.lane == PREDICTION:  # first: a kill leaves an end that is not written
                _forget_patients(self.folder(number))
            if after != before:
                self._write(self.folder(number), after)
            return after

    def forget(self, number: int) -> None:
        """Delete a job that has ended, with its files. The newest keeps its number from being given again.

        Raises:
            JobStateError: it has not ended, or is the newest.
        """
        with self._changing():
            if self.read(number).state not in ENDED or number == max(self._numbers()):
                raise JobStateError(f"job {number} has not ended, or is the newest: it stays")
            gone = self.root / f"gone-{number}"
            os.rename(self.folder(number), gone)
        shutil.rmtree(gone, ignore_errors=True)

    def after_restore(self, clear: Callable[[Job], None]) -> None:
        """Once after a backup was restored: what would go on by itself waits for a person.

        Since the backup it may have ended and released; a start asks the ledger and the coordinator for its price.
        Of predictions nothing comes back: they may have been cancelled since, or their results fetched.

        Args:
            clear: deletes what a job wrote, of the vault.
        """
        if not (self.root / "restored").exists():
            return
        for job in self.all():
            if job.lane == PREDICTION:
                clear(job)
                if job.state not in ENDED:
                    why = "the site was restored from a backup: type `predict ... --detach` again"
                    self.change(job.number, partial(Job.now, state=FAILED, reason=why))
            elif job.state in (QUEUED, RUNNING, LEAVING, INTERRUPTED) and job.lane != ROUND:
                why = f"the site was restored from a backup: `jobs retry {job.number}` goes on with it"
                self.change(job.number, partial(Job.now, state=INTERRUPTED, reason=why, not_before=-1.0))
        (self.root / "restored").unlink()
        flush_directory(self.root)

    def sweep(self, older_than_s: float = 86_400.0) -> None:
        """Delete what a kill left of jobs that were never added, or were being deleted."""
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.root):
                if entry.name.startswith("gone-") or (
                    entry.name.startswith("new-") and entry.stat().st_mtime < time.time() - older_than_s
                ):
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _last(self) -> int | None:
        """The number that was given last; None: nobody wrote it down, or it is lost."""
        try:
            return int((self.root / "last").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self.root) if name.isascii() and name.isdigit())
        except FileNotFoundError:
            return []

    @staticmethod
    def _write(folder: Path, job: Job) -> None:
        told = asdict(job)
        del told["number"]
        replace_file(folder / "job.json", json.dumps(told).encode(), 0o600)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self.root.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # for the time of a few small files
            yield
        finally:
            os.close(handle)


def _forget_patients(folder: Path) -> None:
    """Of a prediction that ends, what it was asked for goes, and of what libraries said all but our own sentences.

    Raises:
        OSError: something stays; the job has not ended then.
    """
    for name in ("in", "out"):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    sentences = _sentences(_last_lines(folder / "stderr"))
    replace_file(folder / "stderr", "".join(f"{line}\n" for line in sentences).encode(), 0o600)


# -- what becomes of a job


@dataclass(frozen=True, slots=True)
class Fate:
    """What is known when a job's process is gone: of the process, and of the ledger."""

    status: int | None  # exit status, below 0 a signal; None: nobody knows
    said: str  # its last sentence
    grant: str = ""  # "held", "spent", "freed"; "": the ledger knows no such grant
    kept: bool = False  # its release is made, and lies sealed in the vault
    waits: bool = False  # and persons must approve it
    noted: bool = False  # the vault's note names the grant: the same command goes on under it
    admitted: bool = False  # its release is in the ledger as admitted


def outcome(job: Job, fate: Fate) -> tuple[str, str]:
    """The state that follows, and its reason. Where a release has a grant, the ledger's word counts and no other's.

    A held grant is never let go here: what made it goes on under it, by itself or by ``jobs retry``, or a person
    cancels it.
    """
    ended = REFUSED if fate.status == 1 else FAILED
    if job.grant and (known := _of_ledger(job, fate, ended)) is not None:
        return known
    if job.wanted and (fate.grant != "held" or job.wanted == SPENT):
        return CANCELLED, ""
    if job.wanted:
        return INTERRUPTED, "its price was paid before it ended: `jobs cancel` with --spend, or `jobs retry`"
    if fate.grant == "held" and not fate.noted:
        return FAILED, fate.said or "what it had made was discarded, perhaps since a patient has opted out"
    return _of_process(fate, ended)


def _of_ledger(job: Job, fate: Fate, ended: str) -> tuple[str, str] | None:
    """What ledger and vault say of a release; None: its grant is open, or there was none."""
    if fate.admitted:
        return DONE, ""
    if fate.kept and fate.waits:
        return MADE, "persons must approve it, then it is sent"
    if fate.kept:
        return INTERRUPTED, fate.said or "it is made, and has not left yet"
    if fate.grant == "spent" and job.wanted == SPENT:
        return CANCELLED, ""
    return (
        (ended, fate.said or "it ended without a release, and its price is spent") if fate.grant == "spent" else None
    )


def _of_process(fate: Fate, ended: str) -> tuple[str, str]:
    """What follows from how the process ended, where the ledger leaves it open."""
    if fate.status is None:
        return INTERRUPTED, "the service ended"
    if fate.status < 0:
        return INTERRUPTED, f"its process was ended by signal {-fate.status}{_MEMORY if fate.status == -9 else ''}"
    if fate.status == 0:
        return DONE, ""
    said = fate.said or f"it ended with status {fate.status}: `jobs follow` shows what it said"
    return (INTERRUPTED if fate.status == BUSY or fate.grant == "held" else ended), said


_MEMORY: Final = ", perhaps since memory ran out"


def when_again(job: Job, state: str, fate: Fate) -> float | None:
    """When an interrupted job starts again by itself, seconds from now; None: only when a person says so.

    What was ended from outside starts again at once, three times in a row. What waits for the coordinator, the disk
    or another command is tried again later and later, up to an hour; of a prediction, whose patient is kept so
    long, for some hours. Otherwise a person decides.
    """
    if state != INTERRUPTED or job.wanted:
        return None
    if fate.status is None:
        return 0.0
    if fate.status < 0:
        return 0.0 if job.lost < _LOSSES else None
    goes_on = fate.status == BUSY and (job.lane != PREDICTION or job.hindered < _HINDRANCES)
    return back_off(job.hindered) if goes_on else None


def unwatched(job: Job, state: str, reason: str, waits: float) -> tuple[str, str]:
    """State and reason: a prediction that only a person would go on with (``waits`` < 0) ends, and keeps nobody."""
    if job.lane != PREDICTION or state != INTERRUPTED or waits >= 0:
        return state, reason
    return FAILED, f"{reason}; type `predict ... --detach` again"


def back_off(times: int) -> float:
    """How long to wait after something stood in the way as it had so many ``times`` in a row before, in seconds."""
    return min(60.0 * 2.0 ** min(times, 6), 3600.0)


_LOSSES: Final = 3
_HINDRANCES: Final = 8


# -- what it says


def progress_of(folder: Path) -> JobProgress:
    """What the job that runs here said last."""
    lines = map(_read_line, _last_lines(folder / "said.jsonl"))
    said = [line for line in lines if line is not None and _is_progress(line)]
    if not said:
        return JobProgress()
    last = said[-1]
    stage, done, of = counted(last)
    left = None
    if of and _FEW * of <= done <= of:
        first = next(one for one in said if counted(one)[0] == stage and counted(one)[2] == of)
        steps, seconds = done - counted(first)[1], last["at"] - first["at"]
        left = (of - done) * seconds / steps if steps > 0 else None
    return JobProgress(last["step"], last["detail"], done, of, left)


def _is_progress(told: Mapping[str, Any]) -> bool:
    """Whether a line is what a job writes: whatever else stands there is passed over."""
    match told:
        case {"at": int() | float() as at, "step": str(), "detail": str(), "done": int(done), "of": int(of)}:
            return 0 <= at < _LAST_TIME and 0 <= done < _MOST_STEPS and 0 <= of < _MOST_STEPS
    return False


def counted(told: Mapping[str, Any]) -> tuple[str, int, int]:
    """The stage of a line of progress, and how many steps of how many were made; (step, 0, 0): it says no number."""
    if told["of"]:
        return told["step"], told["done"], told["of"]
    match = _COUNTED.fullmatch(told["detail"])
    return (f"{told['step']} {match[1] or ''}", int(match[2]), int(match[3])) if match else (told["step"], 0, 0)


def standing(one: Mapping[str, Any]) -> str:
    """A sentence on how a job stands: its step and what is left of it, or why it waits or ended.

    ``one``: see :func:`agent.service.job_runner.show`.
    """
    at = one["progress"]
    if not at["step"] or one["reason"].startswith("held"):
        return str(one["reason"])
    part = f", {100 * at['done'] // at['of']} %" if at["of"] else ""
    left = f", about {duration(at['left_s'])} left of this stage" if at["left_s"] is not None else ""
    memory = f", {one['memory_bytes'] / 2**30:.1f} GiB" if one["memory_bytes"] else ""
    return f"{at['step']}: {at['detail']}{part}{left}{memory}".replace(": ,", ",")


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are two or more."""
    return next((f"{seconds // unit:.0f} {name}" for unit, name in _UNITS if seconds >= 2 * unit), f"{seconds:.0f} s")


def last_words(folder: Path) -> str:
    """The last sentence of a process that ended: of its errors, else of what it printed."""
    for name in ("stderr", "stdout"):
        lines = [line.strip() for line in _last_lines(folder / name) if line.strip()]
        if name == "stderr":  # of a library's words nobody knows what they quote (P14)
            lines = _sentences(lines)
        if lines:
            return lines[-1].partition(": ")[2] if name == "stderr" else _refusal(lines)
    return ""


def _sentences(lines: Sequence[str]) -> list[str]:
    """Those that this program says of its own end."""
    return [line for line in lines if line.startswith(("refused: ", "stopped: "))]


def _refusal(lines: Sequence[str]) -> str:
    """The findings of a verdict, as a command prints them for people or as JSON."""
    told = _read_line(lines[-1])
    if told is not None:
        found = [f"{one['rule']}: {one['detail']}" for one in told.get("findings", ())]
    elif "refused:" in lines:
        found = list(lines[lines.index("refused:") + 1 :])
    else:
        found = [lines[-1]]
    return "; ".join(found)


def _read_line(line: str) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _last_lines(path: Path) -> list[str]:
    """The whole lines at the end of a file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _LAST_BYTES))
            raw = stream.read()
    except FileNotFoundError:
        return []
    lines = raw.decode(errors="replace").splitlines()
    return lines if size <= _LAST_BYTES else lines[1:]
