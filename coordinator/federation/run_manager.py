"""Federated runs: durable jobs, those without a common site conducted side by side.

A run is a job file, a model (and the server optimiser's moments) after each closed round, and the ledger's entries.
A killed coordinator resumes it at start from the last round that the ledger says is closed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.admission import AdmissionService
from coordinator.federation.events import EventStream, RunEvent, SignOfLife
from coordinator.federation.job import (
    Job,
    JobError,
    LaunchDecision,
    SiteCost,
    decide,
    forecast,
    job_from,
    with_noise,
)
from coordinator.federation.run_controller import APPROVE_BY, RunContext, RunController
from coordinator.federation.run_journal import state_of
from coordinator.federation.site_checks import CheckedSites, check_sites
from coordinator.federation.superlink import FlowerHost
from coordinator.storage.release_store import ReleaseStore
from policies.review.rules import AccountContext, account_name
from policies.statements import ID
from protos.common.durable_files import replace_file

_DAY_S: Final = 86_400
LAUNCHED: Final = "launched.json"  # of a run's folder: who launched it from the console
_APPROVED: Final = "models-approved"  # the operator launched it, and its task's models were approved
_OPERATOR: Final = "operator"  # coordinator.console.context.OPERATOR


def _is_operator(by: Mapping[str, Any] | None) -> bool:
    """Who has the operator's certificate, or is logged in with that role; a researcher approves nothing."""
    return by is None or by.get("role") == _OPERATOR


class RunManager:
    """All runs of this coordinator."""

    def __init__(
        self,
        root: Path,
        host: FlowerHost,
        intake: AdmissionService,
        shelf: ReleaseStore,
        log: Any,
        tell: Callable[[str, str, tuple[str, ...]], None] = lambda _kind, _run, _sites: None,
    ) -> None:
        """``root`` holds a directory for each run; ``tell`` says (kind, run, sites) to the sites' sessions."""
        self.root, self.host, self.intake, self.log = root, host, intake, log
        # admits models of a job's task to the pool, or raises JobError: the operator has launched it
        self.approve: Callable[[Job], None] = lambda _job: None
        self.now: Callable[[], float] = time.time  # for the day by which persons have to approve a run
        self.signs: Callable[[], Mapping[str, SignOfLife]] = dict  # of life, by site
        self._context = RunContext(root, host, intake, shelf, log, tell, signs=lambda: self.signs())  # noqa: PLW0108 - set later
        self.root.mkdir(exist_ok=True)
        self._feeds: dict[str, EventStream] = {}
        self._mutex = threading.Lock()
        for site in intake.node_keys:
            self.register_node(site)

    def register_node(self, site: str) -> None:
        """Let a site's Flower node in; at start, and when a site is enrolled."""
        try:
            self.host.register(site, self.intake.node_keys[site].encode())
        except ValueError:  # one site's bad key is that site's trouble
            self.log.error("node_key_refused", site=site)

    def resume_all(self) -> None:
        """Go on with every run that has a job and no end, and was not stopped.

        Runs that the operator launched before their tasks' models were approved have them approved now, once: who
        removes such a file later has undone it.
        """
        jobs = [job_from(path.read_text()) for path in sorted(self.root.glob("*/job.json"))]
        for job in jobs:
            if not (self.root / job.run / _APPROVED).exists() and self._by_operator(job.run):
                try:
                    self.approve(job)
                    replace_file(self.root / job.run / _APPROVED, b"")
                except JobError:  # another architecture has the name: the run goes on, and the operator is told
                    self.log.error("architecture_refused", run=job.run)
        open_jobs = [job for job in jobs if not any((self.root / job.run / f).exists() for f in ("end.json", "stop"))]
        with self.intake.register.store.exclusive() as state:
            begun = {grant.reserved.run for grant in state.grants.values()}
        for job in sorted(open_jobs, key=lambda job: job.run not in begun):  # those that were granted come first
            self._start(job).waiting.wait(10)

    def launch(self, job: Job, by: Mapping[str, Any] | None = None) -> Iterator[RunEvent]:
        """Start a run, or follow the one of that name, and yield its events from the first.

        Models of its task are admitted to the pool from now on, if it is the operator who launches it.

        Args:
            job: what is launched.
            by: who launches it from the console: person, role and time. None: the operator, by a command.
        Raises:
            JobError: unknown sites, a price that cannot be paid, a run of that name with another content, or the
            models of its task cannot be approved. Nothing was made.
        """
        path, asked = (self.root / job.run / name for name in ("job.json", "asked.json"))
        if path.exists():
            known = job_from(path.read_text())
            if job != known and not (asked.exists() and job == job_from(asked.read_text())):
                raise JobError("a run of that name exists with another content")
            if _is_operator(by) and not (path.parent / _APPROVED).exists():
                self.approve(known)
                replace_file(path.parent / _APPROVED, b"")
            return self._follow(known)
        noisy = self.with_noise(job)
        decision = self.plan(noisy)[1]
        if not decision.go:
            why = "; ".join(f"{site}: {reason}" for site, reason in decision.dropped.items())
            raise JobError(f"the forecast refuses it: {decision.reason} (see `round plan`); {why}")
        if _is_operator(by):
            self.approve(noisy)
        with self._mutex:
            path.parent.mkdir(exist_ok=True)
            if by is not None:
                replace_file(path.parent / LAUNCHED, json.dumps(dict(by)).encode())
            if _is_operator(by):
                replace_file(path.parent / _APPROVED, b"")
            until = int(self.now()) + job.approval_days * _DAY_S
            replace_file(path.parent / APPROVE_BY, str(until).encode())
            if noisy != job:  # so that the same job file follows the run, whatever its noise would be by then
                replace_file(asked, job.to_json().encode())
            replace_file(path, noisy.to_json().encode())
        return self._follow(noisy)

    def launched_by(self, run: str) -> Mapping[str, Any]:
        """Who launched it from the console, and when; empty for a run from the command line."""
        path = self.root / run / LAUNCHED
        if not ID.fullmatch(run) or not path.exists():
            return {}
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) and found.keys() == {"person", "role", "at"} else {}

    def _by_operator(self, run: str) -> bool:
        return not (self.root / run / LAUNCHED).exists() or _is_operator(self.launched_by(run))

    def with_noise(self, job: Job) -> Job:
        """The job with the noise for the epsilon that it names, by the accounts of its sites as they are now.

        Raises:
            JobError: unknown sites, none with an account, or no noise is enough.
        """
        return with_noise(job, self._standings(job))

    def plan(self, job: Job) -> tuple[list[SiteCost], LaunchDecision]:
        """What a run would cost each site, by the same review that the reservation will get; nothing is held.

        Raises:
            JobError: unknown sites, or a configuration that has no price.
        """
        register = self.intake.register
        with register.store.exclusive():
            standings = self._standings(job)
            job = with_noise(job, standings)
            policies = {site: register.policy_of(site) for site in job.sites}
            costs = forecast(job, standings, policies, job.claim())
        return costs, decide(job, costs)

    def _standings(self, job: Job) -> dict[str, AccountContext]:
        """What the ledger says of the job's sites.

        Raises:
            JobError: one of them is not enrolled.
        """
        unknown = [site for site in job.sites if site not in self.intake.node_keys]
        if unknown:
            raise JobError(f"not enrolled: {', '.join(unknown)}")
        with self.intake.register.store.exclusive() as state:
            return {
                site: AccountContext(
                    state.accounts.get(account_name(site, job.mechanism)),
                    frozen=state.frozen(site),
                    revoked=site in state.revoked_sites,
                    run_spent=(site, job.run) in state.granted,
                )
                for site in job.sites
            }

    def check(self, job: Job, canary: bool = False) -> CheckedSites:
        """Ask every site of a job at once whether it could take part. Nothing is priced, held or written down.

        ``canary``: each does a round on made patients, too, and sends its numbers.

        Raises:
            JobError: unknown sites, or one that is in a run now.
            RunLostError, FlowerHostError: nobody could be asked.
        """
        self._standings(job)
        known = {other.run: other for other, state in self.known() if state == "open"}
        busy = [run for run, other in known.items() if run != job.run and set(other.sites) & set(job.sites)]
        if busy:
            raise JobError(f"a site of the job is in a run that goes on: {', '.join(busy)}; check when it is over")
        with self.intake.register.store.exclusive() as state:
            begun = any(grant.reserved.run == job.run for grant in state.grants.values())
        if begun:
            raise JobError(f"{job.run} has begun: a check would take its sites' time; its page says how they stand")
        waits = known.get(job.run) == job and (self.root / job.run / APPROVE_BY).exists()
        approve_by = int((self.root / job.run / APPROVE_BY).read_text()) if waits else 0
        with self._context.turn.take(threading.Event(), job.sites):  # no run of them begins meanwhile
            return check_sites(self.host, job, approve_by, canary)

    def watch(self, run: str) -> Iterator[RunEvent]:
        """The events of a run that is known, from the first that this process has seen.

        Raises:
            JobError: there is no such run.
        """
        return self._follow(self._known(run), start=False)

    def so_far(self, run: str) -> tuple[tuple[RunEvent, ...], bool]:
        """What this process has seen of a run, without waiting for more; and whether that is all there will be."""
        feed = self._feeds.get(run)
        return (tuple(feed.events), feed.over) if feed is not None else ((), True)

    def resume(self, run: str) -> Iterator[RunEvent]:
        """Go on with a run that was stopped, where it was; its events from here on.

        Raises:
            JobError: there is no such run.
        """
        job = self._known(run)
        with self._mutex:
            (self.root / run / "stop").unlink(missing_ok=True)
            feed = self._feeds.get(run)
            if feed is not None and feed.over and not (self.root / run / "end.json").exists():
                del self._feeds[run]
        return self._follow(job)

    def stop(self, run: str) -> str:
        """Start no further round; held grants stay held until the run is resumed.

        Returns:
            The state: stopping, finished, failed or unknown.
        """
        folder = self.root / run
        if not ID.fullmatch(run) or not (folder / "job.json").exists():
            return "unknown"
        if (folder / "end.json").exists():
            return str(json.loads((folder / "end.json").read_text())["state"])
        replace_file(folder / "stop", b"")
        return "stopping"

    def close(self) -> None:
        """Let go of all who follow a run: a thread that waits for an event would keep this process from ending."""
        for feed in list(self._feeds.values()):
            feed.close()

    def known(self) -> list[tuple[Job, str]]:
        """Every run and its state: finished, failed, stopped or open."""
        paths = sorted(self.root.glob("*/job.json"))
        return [(job_from(path.read_text()), state_of(path.parent)) for path in paths]

    def _known(self, run: str) -> Job:
        path = self.root / run / "job.json"
        if not ID.fullmatch(run) or not path.exists():
            raise JobError("there is no run of that name")
        return job_from(path.read_text())

    def _follow(self, job: Job, start: bool = True) -> Iterator[RunEvent]:
        end = self.root / job.run / "end.json"
        feed = self._feeds.get(job.run)
        if feed is None and end.exists():
            last = json.loads(end.read_text())
            return iter([RunEvent(job.run, last["round"], last["state"], tuple(last["sites"]), last["reason"])])
        if feed is None and (not start or (self.root / job.run / "stop").exists()):
            return iter([RunEvent(job.run, 0, "stopped", (), "resume it with `round resume`")])
        return (feed or self._start(job)).follow()

    def _start(self, job: Job) -> EventStream:
        with self._mutex:
            feed = self._feeds.get(job.run)
            if feed is None:
                feed = self._feeds[job.run] = EventStream()
                conductor = RunController(self._context, job, feed)
                threading.Thread(target=conductor.run, name=f"run-{job.run}", daemon=True).start()
        return feed
