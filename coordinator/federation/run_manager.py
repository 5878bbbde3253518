"""Federated runs: durable jobs, those without a common site conducted side by side.

A run is a job file, a model (and the server optimiser's moments) after each closed round, and the ledger's entries.
A killed coordinator resumes it at start from the last round that the ledger says is closed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from coordinator.admission import AdmissionService
from coordinator.federation.events import EventStream, RunEvent
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
from coordinator.federation.superlink import FlowerHost
from coordinator.storage.release_store import ReleaseStore
from policies.review.rules import AccountContext, account_name
from policies.statements import ID
from protos.common.durable_files import replace_file

_DAY_S: Final = 86_400


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
        self.now: Callable[[], float] = time.time  # for the day by which persons have to approve a run
        self._context = RunContext(root, host, intake, shelf, log, tell)
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
        """Go on with every run that has a job and no end, and was not stopped."""
        jobs = [job_from(path.read_text()) for path in sorted(self.root.glob("*/job.json"))]
        open_jobs = [job for job in jobs if not any((self.root / job.run / f).exists() for f in ("end.json", "stop"))]
        with self.intake.register.store.exclusive() as state:
            begun = {grant.reserved.run for grant in state.grants.values()}
        for job in sorted(open_jobs, key=lambda job: job.run not in begun):  # those that were granted come first
            self._start(job).waiting.wait(10)

    def launch(self, job: Job) -> Iterator[RunEvent]:
        """Start a run, or follow the one of that name, and yield its events from the first.

        Raises:
            JobError: unknown sites, a price that cannot be paid, or a run of that name with another content.
        """
        path, asked = (self.root / job.run / name for name in ("job.json", "asked.json"))
        if path.exists():
            known = job_from(path.read_text())
            if job != known and not (asked.exists() and job == job_from(asked.read_text())):
                raise JobError("a run of that name exists with another content")
            return self._follow(known)
        noisy = self.with_noise(job)
        decision = self.plan(noisy)[1]
        if not decision.go:
            why = "; ".join(f"{site}: {reason}" for site, reason in decision.dropped.items())
            raise JobError(f"the forecast refuses it: {decision.reason} (see `round plan`); {why}")
        with self._mutex:
            path.parent.mkdir(exist_ok=True)
            until = int(self.now()) + job.approval_days * _DAY_S
            replace_file(path.parent / APPROVE_BY, str(until).encode())
            if noisy != job:  # so that the same job file follows the run, whatever its noise would be by then
                replace_file(asked, job.to_json().encode())
            replace_file(path, noisy.to_json().encode())
        return self._follow(noisy)

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
        found = []
        for path in sorted(self.root.glob("*/job.json")):
            end, state = path.parent / "end.json", "open"
            if end.exists():
                state = json.loads(end.read_text())["state"]
            elif (path.parent / "stop").exists():
                state = "stopped"
            found.append((job_from(path.read_text()), state))
        return found

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
