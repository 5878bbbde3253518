"""Federated runs: durable jobs, one conducted at a time, each round checkpointed before it is written down.

A run is a job file, a model after each closed round, and the ledger's entries. A killed coordinator resumes it at
start from the last round that the ledger says is closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.edges.federation import FlowerHost, Progress, RoundFailed, RoundPlan, conduct
from coordinator.edges.home import write_durably
from coordinator.edges.shelf import WORDING, Shelf, certificate
from coordinator.intake import Intake, Unwelcome
from policies.entries import Admitted
from policies.statement import ID
from protos.artifact import pack_vector, unpack_vector

ROUND_TIMEOUT_S = 150.0  # above the last of the agents' answering times below it, 128 s
NODE_WAIT_S = 20.0


class BadJob(ValueError):
    """The job cannot be run; the text says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One federated run, as the operator launched it."""

    run: str
    mechanism: str
    config: str  # JSON of the mechanism's public configuration
    parameters: int
    sites: tuple[str, ...]
    rounds: int
    min_sites: int

    def __post_init__(self) -> None:
        """All problems at once."""
        wrong = [
            name
            for name, right in {
                "run: a short lower-case name that does not begin with release": bool(ID.fullmatch(self.run))
                and not self.run.startswith("release"),
                "mechanism: federated": self.mechanism == "federated",
                "parameters: 1 to 100 million": 0 < self.parameters <= 100_000_000,
                "sites: at least one, each once": 0 < len(self.sites) == len(set(self.sites)),
                "rounds: 1 to 10,000": 0 < self.rounds <= 10_000,
                "min_sites: 1 to the number of sites": 0 < self.min_sites <= len(self.sites),
            }.items()
            if not right
        ]
        if wrong:
            raise BadJob("the job needs " + "; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened in a run; ``round`` 0 is the pricing."""

    run: str
    round: int
    state: str  # granted | declined | sent | refused | closed | finished | failed
    sites: tuple[str, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class _Feed:
    """A run's events so far, and a way to wait for more."""

    events: list[Event] = field(default_factory=list)
    over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: threading.Event = field(default_factory=threading.Event)  # has its turn, or stands in line for it

    def put(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.over = event.state in ("finished", "failed")
            self.changed.notify_all()

    def follow(self) -> Iterator[Event]:
        seen = 0
        while True:
            with self.changed:
                while seen == len(self.events) and not self.over:
                    self.changed.wait(1.0)
                fresh, over = self.events[seen:], self.over
            yield from fresh
            seen += len(fresh)
            if over and seen == len(self.events):
                return


class _Line:
    """First come, first served."""

    def __init__(self) -> None:
        self._people: list[object] = []
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, standing: threading.Event) -> Iterator[None]:
        """Stand in line (``standing`` is set then), go on when it is one's turn."""
        me = object()
        with self._changed:
            self._people.append(me)
            standing.set()
            self._changed.wait_for(lambda: self._people[0] is me)
        try:
            yield
        finally:
            with self._changed:
                self._people.remove(me)
                self._changed.notify_all()


class Runs:
    """All runs of this coordinator."""

    def __init__(self, root: Path, host: FlowerHost, intake: Intake, shelf: Shelf, log: Any) -> None:
        """``root`` holds a directory for each run."""
        self.root, self.host, self.intake, self.shelf, self.log = root, host, intake, shelf, log
        self.root.mkdir(exist_ok=True)
        self._feeds: dict[str, _Feed] = {}
        self._mutex = threading.Lock()
        self.turn = _Line()  # Flower conducts one run at a time in a process; others wait
        for site, node_key in intake.node_keys.items():
            try:
                host.register(site, node_key.encode())
            except ValueError:  # one site's bad key is that site's trouble
                log.error("node_key_refused", site=site)

    def resume(self) -> None:
        """Go on with every run that has a job and no end."""
        jobs = [_job(path.read_text()) for path in sorted(self.root.glob("*/job.json"))]
        open_jobs = [job for job in jobs if not (self.root / job.run / "end.json").exists()]
        with self.intake.register.store.exclusive() as state:
            begun = {grant.reserved.run for grant in state.grants.values()}
        for job in sorted(open_jobs, key=lambda job: job.run not in begun):  # those that were granted come first
            self._start(job).waiting.wait(10)

    def launch(self, job: Job) -> Iterator[Event]:
        """Start a run, or follow the one of that name, and yield its events from the first.

        Raises:
            BadJob: unknown sites, or a run of that name with another content.
        """
        unknown = [site for site in job.sites if site not in self.intake.node_keys]
        if unknown:
            raise BadJob(f"not enrolled: {', '.join(unknown)}")
        path = self.root / job.run / "job.json"
        with self._mutex:
            if path.exists() and _job(path.read_text()) != job:
                raise BadJob("a run of that name exists with another content")
            path.parent.mkdir(exist_ok=True)
            write_durably(path, json.dumps(asdict(job)).encode())
        end = path.parent / "end.json"
        if end.exists() and job.run not in self._feeds:
            last = json.loads(end.read_text())
            return iter([Event(job.run, last["round"], last["state"], tuple(last["sites"]), last["reason"])])
        return self._start(job).follow()

    def _start(self, job: Job) -> _Feed:
        with self._mutex:
            feed = self._feeds.get(job.run)
            if feed is None:
                feed = self._feeds[job.run] = _Feed()
                conductor = _Conductor(self, job, feed)
                threading.Thread(target=conductor.run, name=f"run-{job.run}", daemon=True).start()
        return feed


def _job(text: str) -> Job:
    raw = json.loads(text)
    return Job(**{**raw, "sites": tuple(raw["sites"])})


class _Conductor:
    """One run from its first or its next round to its end: the gate that Flower's strategy asks."""

    def __init__(self, runs: Runs, job: Job, feed: _Feed) -> None:
        self.runs, self.job, self.feed = runs, job, feed
        self.folder = runs.root / job.run
        self.register = runs.intake.register

    def run(self) -> None:
        job = self.job
        try:
            with self.runs.turn.take(self.feed.waiting):
                with self.register.store.exclusive() as state:
                    done = state.rounds.get(job.run, 0)
                end = self._conduct(done)
        except RoundFailed as failure:
            end = Event(job.run, failure.round_index + 1, "failed", tuple(sorted(failure.refused)), failure.reason)
        except Exception as fault:  # noqa: BLE001 - a run that fails in an unknown way has failed; its grants are spent
            self.runs.log.error("run_failed", run=job.run, fault=type(fault).__name__)
            end = Event(job.run, 0, "failed", reason="internal")
        try:
            if not self.runs.host.stopping.is_set():  # a stopping coordinator leaves its runs to be resumed
                self._close(end)
        except Exception as fault:  # noqa: BLE001 - not closed, so the next start resumes it; whoever watches must hear
            self.runs.log.error("run_not_closed", run=job.run, fault=type(fault).__name__)
            end = Event(job.run, end.round, "failed", end.sites, "internal")
        self.feed.put(end)

    def _conduct(self, done: int) -> Event:
        job = self.job
        if done < job.rounds:
            plan = RoundPlan(
                run=job.run,
                sites=self._sites(done),
                rounds=job.rounds,
                first_round=done,
                vector=self._model(done),
                config=job.config.encode(),
                min_sites=job.min_sites,
                round_timeout_s=ROUND_TIMEOUT_S,
                node_wait_s=NODE_WAIT_S,
            )
            conduct(self.runs.host, plan, self, self._progress)
        with self.register.store.exclusive() as state:
            sites = sorted({site for run, _, site in state.aggregated if run == job.run})
        return Event(job.run, job.rounds, "finished", tuple(sites))

    def _sites(self, done: int) -> tuple[str, ...]:
        """Whom to ask: all at first; after a restart those that were granted."""
        if not done:
            return self.job.sites
        grants = self.register.store.state.grants.values()
        granted = {g.reserved.site for g in grants if g.reserved.run == self.job.run and g.state == "held"}
        return tuple(site for site in self.job.sites if site in granted)

    def _model(self, done: int) -> NDArray[np.float32]:
        if not done:
            return np.zeros(self.job.parameters, np.float32)
        return unpack_vector((self.folder / f"round-{done}.safetensors").read_bytes())

    def _progress(self, progress: Progress) -> None:
        job, index = self.job, progress.round_index + 1
        for site, code in progress.refused.items():
            stage = "declined" if progress.stage == "priced" else "refused"
            self.feed.put(Event(job.run, 0 if progress.stage == "priced" else index, stage, (site,), code))
        if progress.stage == "priced":
            self.feed.put(Event(job.run, 0, "granted", progress.sites))
        elif progress.stage == "sent":
            self.feed.put(Event(job.run, index, "sent", progress.sites))

    def admit(self, site: str, round_index: int, envelope: bytes, vector: NDArray[np.float32]) -> str | None:
        """The gate: a valid envelope of this site for this round, under a grant, or it is not aggregated."""
        intake, artifact = self.runs.intake, pack_vector(vector)
        number = round_index + 1
        try:
            release = intake.release(site, f"round-{number}", envelope)
            key = f"submit-{release.release}"
            if (release.run, release.round) != (self.job.run, number):
                return "another_round"
            verdict = intake.admit(site, key, envelope, release, artifact)
        except Unwelcome as refusal:
            return refusal.finding.rule
        return None if verdict.admitted else verdict.findings[0].rule

    def round_done(
        self,
        round_index: int,
        vector: NDArray[np.float32],
        used: tuple[str, ...],
        refused: Mapping[str, str],
    ) -> None:
        """The new parameters are durable before the ledger says that the round is closed."""
        del refused  # each has its verdict in the ledger
        number, body = round_index + 1, pack_vector(vector)
        write_durably(self.folder / f"round-{number}.safetensors", body)
        self.register.close_round(self.job.run, number, used, hashlib.sha256(body).digest())
        self.feed.put(Event(self.job.run, number, "closed", used))
        self.runs.log.info("round_closed", run=self.job.run, round=number, sites=len(used))

    def _close(self, end: Event) -> None:
        """Every grant of the run is spent; a finished run's model goes on the shelf."""
        with self.register.store.exclusive() as state:
            mine = [(name, g.used) for name, g in state.grants.items() if g.reserved.run == self.job.run]
        for name, used in mine:
            self.register.close(name, "released" if used else "expired")
        if end.state == "finished":
            body = (self.folder / f"round-{self.job.rounds}.safetensors").read_bytes()
            envelopes = {a.release: self.register.store.envelope(a.envelope) or b"" for a in self._updates()}
            self.runs.shelf.place_model(self.job.run, body, self._certificate(end, body), envelopes)
        write_durably(self.folder / "end.json", json.dumps(asdict(end)).encode())

    def _updates(self) -> list[Admitted]:
        """The updates that the model is made of: admitted, and counted by a closed round of this run."""
        with self.register.store.exclusive() as state:
            mine = [a for a in state.releases.values() if a.run == self.job.run]
            return [a for a in mine if (a.run, a.round, a.site) in state.aggregated]

    def _certificate(self, end: Event, body: bytes) -> dict[str, Any]:
        mine = self._updates()
        worst = max(mine, key=lambda a: a.used)
        weakest = max(mine, key=lambda a: a.level).level  # A < B < C
        return {
            **certificate(worst, self.runs.shelf.account(worst)),
            "release": self.job.run,
            "site": ", ".join(end.sites),
            "level": weakest,
            "meaning": WORDING[weakest],
            "artifact_sha256": hashlib.sha256(body).hexdigest(),
            "updates": [a.release for a in mine],
        }
