"""Starts, watches and ends the jobs of a site: one thread of the running service.

It keeps no state that a kill could lose: what it knows of a job is in the job's folder and in the ledger. When the
service starts, every job that its predecessor left running has an end, or goes on where it stood.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent.errors import SiteConfigError
from agent.release.unsent import NOTE, forget, listed
from agent.service import job_rules, jobs
from agent.service.job_outputs import clear_outputs, output_names
from agent.service.jobs import Fate, Job, JobProgress, JobStore
from agent.service.ledger_access import LedgerMissingError, SiteLedger
from agent.service.making_lock import MakingBusyError, making_lock
from agent.service.round_parts import settle_parts
from agent.storage import projects, read_only_access
from agent.storage.site_directory import MAIN, SiteDirectory
from agent.storage.site_ledger import site_policy
from policies.ledger.entries import Reserved
from policies.ledger.store import LedgerBusyError
from policies.statements import release_id
from protos.common.errors import LazaretError
from protos.service.supervisor import Ended, NotStartedError, Supervisor, SupervisorError

_TICK_S: Final = 1.0
_GRACE_S: Final = 20.0  # for a job that is told to end; then it is ended
_FAULT_S: Final = 10.0
_SWEEP_S: Final = 3600.0
_MOMENT_S: Final = 1.0  # for the ledger: a look that waits holds up all jobs
_LATE_S: Final = 60.0  # of an image that waits to be read
_TURN_S: Final = (
    10.0  # most that jobs are held at once, and least that they then have; a lock of the vault waits 30 s
)
_INHERITED: Final = (
    "HOME", "LANG", "LANGUAGE", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "VIRTUAL_ENV",
    "SSL_CERT_FILE", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip


def fate_of(home: SiteDirectory, ledger: SiteLedger, job: Job, status: int | None, said: str) -> Fate:
    """What is known of a job whose process is gone: how it ended, and what the vault and the ledger say of it.

    The vault first: what leaves meanwhile is forgotten there after it is in the ledger.
    """
    fate = Fate(status, said)
    if not job.grant:
        return fate
    release = release_of(home, job)
    with read_only_access.notes(home) as notes:
        kept = release in ((notes.note(NOTE) if notes is not None else None) or {})
        noted = notes is not None and (notes.note("unfinished") or {}).get("grant") == job.grant
    try:
        store = ledger.read()
    except LedgerMissingError:
        return fate
    state, waits = store.state, kept and bool(site_policy(home, store).approvals)
    grant = state.grants.get(job.grant)
    return replace(
        fate,
        grant=grant.state if grant is not None else "",
        kept=kept,
        waits=waits,
        noted=noted,
        admitted=release in state.releases,
    )


def release_of(home: SiteDirectory, job: Job) -> str:
    """The name of the release that a job makes, or would make."""
    return release_id(home.settings().site, job.grant, 0)


class JobRunner:
    """Runs a site's jobs while a block runs."""

    def __init__(
        self, home: SiteDirectory, ledger: SiteLedger, log: Any, supervise: Callable[[], Supervisor] = Supervisor
    ) -> None:
        """Nothing is started yet.

        Args:
            home: the site's directory.
            ledger: which the service holds, or borrows for each act.
            log: hears of every change of a state.
            supervise: starts the process that starts jobs.
        Raises:
            SiteConfigError: ``jobs.toml`` cannot be used.
        """
        self._supervise = supervise
        self._home, self._ledger, self._log = home, ledger, log
        self._store, self._settings = JobStore(home.root), job_rules.read_settings(home.root)
        self._supervisor: Supervisor | None = None
        self._told_to_end: dict[int, float] = {}  # when it was first told
        self._mine, self._ended = set[int](), dict[int, int]()  # started here; ended, and not written down yet
        self._wished = 0.0  # when a wish that could not be fulfilled is looked at again
        self._held: float | None = None  # since when jobs are held for images, or for a round
        self._late = False  # it is for images
        self._turned = time.monotonic() - _TURN_S
        self._over, self._swept = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def __enter__(self) -> JobRunner:
        """What an earlier service left is settled first."""
        self.recover()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the jobs; they go on when a service starts again."""
        self._over.set()
        self._thread.join()

    def recover(self) -> None:
        """Give every job that an earlier service left at work its next state; what fails now, a later look does."""
        self._store.after_restore(partial(clear_outputs, self._home))
        self._guarded(settle_parts, self._home, self._ledger)
        for job in self._at_work():
            self._guarded(self._settle, job, None)

    # -- the thread

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.look()
            except SupervisorError as error:
                self._log.warning("jobs_supervisor_ended", fault=type(error).__name__)
                self._guarded(self._lose_supervisor)
            except Exception as error:  # noqa: BLE001 - a fault of one look; texts may quote anything (P14)
                self._log.error("jobs_fault", fault=type(error).__name__)
                self._over.wait(_FAULT_S)
        self._guarded(self._end_all)

    def _guarded(self, act: Callable[..., None], *told: Any) -> None:
        """One job's fault stops no other's work."""
        try:
            act(*told)
        except SupervisorError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._log.error("jobs_fault", fault=type(error).__name__)

    def look(self) -> None:
        """One round: who has ended, who is to end, who starts."""
        self._ended |= {int(ended.name): ended.status for ended in self._wait()}
        for job in self._at_work():  # also one whose end could not be written down before
            if job.number in self._ended or job.number not in self._mine:
                self._guarded(self._settle, job, self._ended.get(job.number))
        found = self._store.all()
        for job in found:
            if job.lane != jobs.ROUND:  # whose process is this very service
                self._guarded(self._watch, job)
        self._hold(found)
        first, _ = job_rules.choose(self._store.all(), self._settings, self._surroundings)
        if first is not None:
            self._guarded(self._start, first)
        if time.monotonic() > self._swept:
            self._swept = time.monotonic() + _SWEEP_S
            self._guarded(self._sweep)

    def _wait(self) -> Iterable[Ended]:
        if self._supervisor is None:
            self._over.wait(_TICK_S)
            return ()
        return self._supervisor.ended(_TICK_S)

    def _watch(self, job: Job) -> None:
        if job.state in (jobs.RUNNING, jobs.LEAVING):
            if job.wanted:
                self._tell_to_end(job)
            elif job.state == jobs.RUNNING and jobs.progress_of(self._store.folder(job.number)).step == "leave":
                self._change(job, jobs.LEAVING)
        elif job.wanted and job.state not in jobs.ENDED and time.monotonic() > self._wished:
            self._wished = time.monotonic() + _FAULT_S
            self._settle(job, None)  # what kept it from ending may be over
        elif job.state in (jobs.MADE, jobs.INTERRUPTED) and job.grant:
            self._watch_release(job)

    def _watch_release(self, job: Job) -> None:
        """A person may send, withdraw or give up by hand what waits here; or opt out of it."""
        fate = fate_of(self._home, self._ledger, job, 1, "")
        over = fate.admitted or (fate.grant == "spent" and not fate.kept)
        discarded = fate.grant == "held" and not fate.kept and not fate.noted
        if discarded and time.monotonic() > self._wished:
            self._wished = time.monotonic() + _FAULT_S
            with contextlib.suppress(LedgerBusyError):  # a later look does it
                over = give_up(self._home, self._ledger, job)
        if over:
            self._change(job, *jobs.outcome(job, fate), job.wanted_by, wanted="")

    def _hold(self, found: Iterable[Job]) -> None:
        """Hold makings and trainings in turns, half of the time: while images wait too long to be read; and those of
        the same processors while a round is trained.
        """
        now, late = time.monotonic(), longest_wait(self._home) > _LATE_S
        alive = [job for job in found if job.state in (jobs.RUNNING, jobs.LEAVING)]
        trains = any(job.lane == jobs.ROUND for job in alive)
        if self._held is None and (late or trains) and now > self._turned + _TURN_S:
            self._held, self._late, self._turned, number = now, late, now, signal.SIGSTOP
        elif self._held is not None and (not (late or trains) or now > self._held + _TURN_S):
            self._held, self._late, self._turned, number = None, False, now, signal.SIGCONT
        else:
            return
        for job in alive:
            concerned = job.lane not in (jobs.INTAKE, jobs.ROUND)
            if concerned and (late or number == signal.SIGCONT or job_rules.gives_way(job)) and self._supervisor:
                self._supervisor.signal(str(job.number), number)

    def _surroundings(self, cards: bool) -> job_rules.Surroundings:
        return replace(surroundings(self._home, cards), late=self._late)

    def _tell_to_end(self, job: Job) -> None:
        first = self._told_to_end.setdefault(job.number, time.monotonic())
        late = time.monotonic() > first + _GRACE_S
        if self._supervisor is not None and (late or first > time.monotonic() - _TICK_S):
            self._supervisor.signal(str(job.number), signal.SIGKILL if late else signal.SIGTERM)
            self._supervisor.signal(str(job.number), signal.SIGCONT)  # one that is held hears nothing

    def _start(self, job: Job) -> None:
        folder = self._store.folder(job.number)
        for name in ("end.json", "said.jsonl", "pid"):
            (folder / name).unlink(missing_ok=True)
        if job.lane != jobs.TRAINING:  # a training finds its checkpoint there
            shutil.rmtree(folder / "out", ignore_errors=True)
        (folder / "out").mkdir(exist_ok=True)
        if self._supervisor is None:
            self._supervisor = self._supervise()
        words = [sys.executable, "-P", "-m", "agent.cli.job_process", str(self._home.root.resolve())]
        words += [str(job.number), str(self._supervisor.pid)]
        state = jobs.RUNNING
        if fate_of(self._home, self._ledger, job, None, "").kept:  # made, and the coordinator had not answered
            words += ["release", "send", release_of(self._home, job)]
            state = jobs.LEAVING
        started = self._store.change(
            job.number, lambda j: j if j.wanted else j.now(state, attempts=j.attempts + 1, not_before=0.0)
        )
        if started.wanted:
            return
        self._log.info("job", job=job.number, state=state, count=started.attempts)
        try:
            with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
                descriptors = out.fileno(), errors.fileno()
                pid = self._supervisor.start(str(job.number), words, self._environment(job), *descriptors, folder)
        except (NotStartedError, OSError) as error:  # it is said to run, and does not
            told = str(error) if isinstance(error, NotStartedError) else error.strerror or type(error).__name__
            again, hindered = time.time() + jobs.back_off(started.hindered), started.hindered + 1
            self._change(started, jobs.INTERRUPTED, told, not_before=again, hindered=hindered)
            return
        self._mine.add(job.number)
        with contextlib.suppress(OSError):  # then its memory is not told
            (folder / "pid").write_text(f"{pid}")

    def _environment(self, job: Job) -> dict[str, str]:
        told = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        told |= {name: value for name, value in os.environ.items() if name.startswith("LAZARET_")}
        told |= {
            "COLUMNS": "118",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        told["LAZARET_JOB_MEMORY"] = str(int(self._settings.memory_gib * 2**30))
        if not job.cuda:
            told["CUDA_VISIBLE_DEVICES"] = ""
        return told

    # -- an end

    def _written_end(self, job: Job) -> int | None:
        """What a process wrote down of its end, where nobody saw it; None: it did not come so far."""
        try:
            told = json.loads((self._store.folder(job.number) / "end.json").read_bytes())
            return int(told["status"]) if told["attempt"] == job.attempts else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _settle(self, job: Job, status: int | None) -> None:
        """Give a job whose process is gone its next state; where it wrote down an end, that counts."""
        seen = status is not None
        if status is None or status < 0:
            written = self._written_end(job)
            status = written if written is not None and written >= 0 else status
        folder = self._store.folder(job.number)
        said = jobs.last_words(folder) if status is not None and status >= 0 else ""
        fate = fate_of(self._home, self._ledger, job, status, said)
        state, reason = jobs.outcome(job, fate)
        kept_wish = False
        if fate.grant == "held" and not fate.kept and (state == jobs.CANCELLED or not fate.noted):
            try:
                give_up(self._home, self._ledger, job)
            except LazaretError as error:  # the ledger is busy: a later look does it
                state, reason, kept_wish = jobs.INTERRUPTED, str(error), True
        if fate.admitted and fate.kept:  # it was ended between the verdict and this
            with contextlib.closing(projects.open_vault(self._home)) as vault:
                forget(vault, release_of(self._home, job))
        again = None if kept_wish else jobs.when_again(job, state, fate)
        if again and not seen:  # its service was gone when it ended: that may be all that it waits for
            again = 0.0
        lost = job.lost + (status is not None and status < 0 and not job.wanted)
        hindered = job.hindered + 1 if status == jobs.BUSY else 0
        waits = -1.0 if again is None and state == jobs.INTERRUPTED else time.time() + (again or 0.0)

        state, reason = jobs.unwatched(job, state, reason, waits)

        def settled(known: Job) -> Job:
            wish = known.wanted if kept_wish or known.wanted != job.wanted else ""  # one that came meanwhile stays
            after = known.now(state, reason, job.wanted_by, not_before=waits, wanted=wish)
            return replace(after, lost=lost if status is None or status < 0 else 0, hindered=hindered)

        self._clear(job, state)
        self._store.change(job.number, settled)
        self._log.info("job", job=job.number, state=state)
        self._ended.pop(job.number, None)
        self._told_to_end.pop(job.number, None)
        self._mine.discard(job.number)

    def _clear(self, job: Job, state: str) -> None:
        """Delete what a kill left in clear; what was written in full is sealed, of a prediction all or none."""
        if job.lane != jobs.TRAINING:
            shutil.rmtree(self._store.folder(job.number) / "out", ignore_errors=True)
        if job.lane == jobs.PREDICTION and state != jobs.DONE:
            clear_outputs(self._home, job)

    def _change(self, job: Job, state: str, reason: str = "", by: str = "", **changed: Any) -> None:
        ended = jobs.ENDED  # meanwhile, by somebody else
        self._store.change(job.number, lambda j: j if j.state in ended else j.now(state, reason, by, **changed))
        self._log.info("job", job=job.number, state=state)

    def _at_work(self) -> list[Job]:
        found = self._store.all()
        return [job for job in found if job.state in (jobs.RUNNING, jobs.LEAVING) and job.lane != jobs.ROUND]

    def _lose_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        self._mine.clear()
        for job in self._at_work():
            self._guarded(self._settle, job, self._ended.get(job.number))

    def _end_all(self) -> None:
        """The service ends: so do its jobs, at a point where they can go on."""
        if self._supervisor is None:
            return
        with contextlib.suppress(SupervisorError):
            waiting, until = {job.number for job in self._at_work()}, time.monotonic() + _GRACE_S
            for number in waiting:
                self._supervisor.signal(str(number), signal.SIGTERM)
                self._supervisor.signal(str(number), signal.SIGCONT)
            while waiting and time.monotonic() < until:
                for ended in self._supervisor.ended(_TICK_S):
                    number = int(ended.name)
                    waiting.discard(number)
                    status = ended.status if ended.status >= 0 else None  # not its fault
                    self._guarded(self._settle, self._store.read(number), status)
        self._lose_supervisor()

    # -- what is kept

    def _sweep(self) -> None:
        """Delete the oldest ended jobs beyond their age and their share of the disk."""
        self._store.sweep()
        found = self._store.all()
        ended = [job for job in found if job.state in jobs.ENDED]
        disk = os.statvfs(self._home.root)
        allowed = self._settings.disk_share * disk.f_blocks * disk.f_frsize
        sizes = {job.number: _size(self._store.folder(job.number)) for job in ended}
        for job in ended:
            old = job.history[-1].at < time.time() - 86_400 * self._settings.keep_days
            newest = job.number == found[-1].number  # its number is not given again, so its folder stays
            if not old and (newest or not sum(sizes.values()) > allowed):
                continue
            sizes.pop(job.number)
            with contextlib.suppress(LazaretError):  # a project that has ended took its sealed files along
                clear_outputs(self._home, job)
            if not newest:
                self._store.forget(job.number)
                self._log.info("job_forgotten", job=job.number)


def longest_wait(home: SiteDirectory) -> float:
    """How long the oldest image has waited to be read, seconds; 0.0: none waits."""
    born = [time.time()]
    for name in projects.names(home):
        with contextlib.suppress(FileNotFoundError), os.scandir(projects.project_folders(home, name)[0]) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # it was read meanwhile
                    if not file.name.startswith("."):
                        born.append(file.stat(follow_symlinks=False).st_mtime)
    return max(0.0, time.time() - min(born))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def surroundings(home: SiteDirectory, cards: bool) -> job_rules.Surroundings:
    """What the rules look at; ``cards``: the machine's accelerators, too."""
    try:
        with making_lock(home.root):
            making = False
    except MakingBusyError:
        making = True
    free = _free_memory()
    late, found = longest_wait(home) > _LATE_S, job_rules.ask_cards() if cards else ()
    return job_rules.Surroundings(dt.datetime.now().astimezone(), making, late, free, found)


def _free_memory() -> int | None:
    """Bytes that machine and control group leave; None: neither says."""
    of_machine = job_rules.free_memory(Path("/proc/meminfo").read_text())
    of_group = job_rules.cgroup_memory(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    return min((free for free in (of_machine, of_group) if free is not None), default=None)


def give_up(home: SiteDirectory, ledger: SiteLedger, job: Job) -> bool:
    """Spend the grant of a job that is to see no release, if one is held; nothing of its making stays.

    Returns:
        Whether this spent it; False: it had an end already, or its release is kept.
    Raises:
        LedgerBusyError: another process has the ledger, or another thread does and does not end in a moment.
    """
    from agent.release.budget import best_effort, expire_grant  # noqa: PLC0415 - as in agent.service.site
    from agent.release.resumable import abandon, held_for  # noqa: PLC0415 - as above

    project = job.project if job.project in projects.names(home) else MAIN  # one that has ended took the making along
    with ledger.work(project, greeted=False, patience_s=_MOMENT_S) as runtime:
        if release_of(home, job) in listed(runtime.vault):
            return False
        if held_for(runtime.site) == job.grant:
            abandon(runtime.site)
        grant = runtime.site.ledger.store.state.grants.get(job.grant)
        if grant is None or grant.state != "held" or not isinstance(grant.reserved, Reserved):
            return False
        with best_effort():
            expire_grant(runtime.site, grant.reserved, "restart")
    return True


def show(home: SiteDirectory, job: Job, reasons: Mapping[int, str]) -> dict[str, Any]:
    """A job as commands, pages and metrics tell it.

    Args:
        home: the site's directory.
        job: as its record has it.
        reasons: of those that wait, by number.
    """
    folder = JobStore(home.root).folder(job.number)
    alive = job.state in (jobs.RUNNING, jobs.LEAVING)
    said = jobs.progress_of(folder) if alive else JobProgress()
    memory, held = _process(home, job) if alive else (0, False)
    return {
        "number": job.number,
        "command": job.kind,
        "project": job.project,
        "state": job.state,
        "reason": _held_for(home) if held else reasons.get(job.number) or job.reason,
        "by": job.history[-1].by,
        "proposed_by": job.history[0].by,
        "at": job.history[0].at,
        "since": job.history[-1].at,
        "attempts": job.attempts,
        "price": dict(job.price),
        "priority": job.priority,
        "grant": job.grant,
        "release": release_of(home, job) if job.grant and job.attempts and job.lane != jobs.ROUND else "",
        "wanted": job.wanted,
        "stopped": job.stopped,
        "progress": {
            "step": said.step,
            "detail": said.detail,
            "done": said.done,
            "of": said.of,
            "left_s": said.left_s,
        },
        "memory_bytes": memory,
        "outputs": output_names(job) if job.state in jobs.ENDED | {jobs.MADE} else [],
    }


def _held_for(home: SiteDirectory) -> str:
    trains = any(job.lane == jobs.ROUND and job.state == jobs.RUNNING for job in JobStore(home.root).all())
    return "held: a round is trained" if trains else "held: images wait to be read"


def _process(home: SiteDirectory, job: Job) -> tuple[int, bool]:
    """Resident bytes of the job's process and of what it started, and whether it is held; (0, False): it is gone."""
    try:
        pid = int((JobStore(home.root).folder(job.number) / "pid").read_text())
        told, size = _status(pid), 0
    except (OSError, ValueError):
        return 0, False
    with contextlib.suppress(OSError):  # one that has just ended, or a kernel that does not list them
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            size += _resident(_status(int(child)))
    return _resident(told) + size, told.get("State", ["?"])[0] == "T"


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def _resident(told: Mapping[str, list[str]]) -> int:
    return int(told.get("VmRSS", ["0"])[0]) * 1024


def may_live(home: SiteDirectory, job: Job) -> bool:
    """Whether the process of a job that is said to run may still be there; True where nobody can say."""
    try:
        pid = int((JobStore(home.root).folder(job.number) / "pid").read_text())
    except (OSError, ValueError):  # it is being started, or was
        return True
    try:
        return b"agent.cli.job_process" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def settings_or_default(home: SiteDirectory) -> job_rules.JobSettings:
    """``jobs.toml`` for who only looks: a broken one is told where the service starts."""
    try:
        return job_rules.read_settings(home.root)
    except SiteConfigError:
        return job_rules.JobSettings()
