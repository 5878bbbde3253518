"""One federated run from its first or its next round to its end: the gate that Flower's strategy asks.

Rounds and looks at the model take turns, and every turn is a round of the ledger. Each is checkpointed before it is
written down. A round for which too few sites are there is tried again for a
while, and then the run is stopped, with its grants held, until an operator resumes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.admission import AdmissionService, RequestRejectedError
from coordinator.federation.aggregation import Moments, strategy_from
from coordinator.federation.evaluation import Estimate, LookSums, best, estimates, kept_look, to_table
from coordinator.federation.events import FROZEN, NOT_APPROVED_YET, EventStream, RunEvent, RunQueue, SignOfLife
from coordinator.federation.job import Job
from coordinator.federation.participation import RoundMembers, members, sentence
from coordinator.federation.run_journal import keep_event
from coordinator.federation.run_process import RunLostError
from coordinator.federation.strategy import (
    AWAY,
    MISSING,
    RoundFailedError,
    RoundModel,
    RoundPlan,
    RoundProgress,
)
from coordinator.federation.superlink import FlowerHost, conduct
from coordinator.storage.release_store import WORDING, ReleaseStore, certificate
from policies.ledger.entries import Admitted
from policies.review.mechanism_terms import EVALUATIONS
from policies.review.rules import Finding
from protos.artifacts.arrays import ArtifactFormatError, pack_vector, unpack_update, unpack_vector
from protos.artifacts.bfloat16 import FLOAT32
from protos.artifacts.strict_safetensors import unpack_ring
from protos.common.durable_files import replace_file
from protos.common.errors import Signal
from protos.federation import round_times
from protos.federation.round_times import RoundTerms

NODE_WAIT_S: Final = 20.0
PATIENCE_S: Final = 7200.0  # for sites that sleep, before a run is stopped
_PAUSES_S: Final = (5.0, 60.0)  # before the first further try, and at most
APPROVE_BY: Final = "approve-by"  # of a run's folder: until when persons may approve it, seconds since 1970
_LOST: Final = 3  # processes of a run, without a round closed in between, before it has failed
_ABSENT: Final = frozenset({"too_few_sites_online", "too_few_updates", "too_few_grants", MISSING})
_ABSENT_SECRET: Final = _ABSENT - {"too_few_updates"}  # a round begun is not begun again


class RunStopped(Signal):
    """An operator has stopped the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RunContext:
    """What all runs of a coordinator share."""

    root: Path  # holds a directory for each run
    host: FlowerHost
    intake: AdmissionService
    shelf: ReleaseStore
    log: Any
    tell: Callable[[str, str, tuple[str, ...]], None]  # (kind, run, sites), to the sites' sessions
    turn: RunQueue = field(default_factory=RunQueue)  # a site takes part in one run at a time; other runs of it wait
    signs: Callable[[], Mapping[str, SignOfLife]] = dict  # of life, by site
    now: Callable[[], float] = time.time  # of the journal


@dataclass(slots=True)
class _Patience:
    """How long a run waits for sites, and how often it tries again."""

    until: float = 0.0
    closed: int = -1  # rounds, when it began
    pause: float = 0.0
    said: RunEvent | None = None

    def goes_on(self, end: RunEvent, closed: int, seconds: float) -> bool:
        """A try has failed; patience begins anew where a round was closed since, or where persons have their own day.

        ``seconds``: that it took. A round that was asked for does not count: it may have lasted a day.

        Returns:
            Whether it is to be told: days of waiting for the same persons are told once.
        """
        people = end.reason == NOT_APPROVED_YET
        self.until += seconds if end.reason == "too_few_updates" else 0.0
        if closed > self.closed or people or (self.said is not None and self.said.reason == NOT_APPROVED_YET):
            self.until = math.inf if people else time.monotonic() + PATIENCE_S
            self.closed = closed
            self.pause = self.pause if people and end == self.said else 0.0
        told, self.said = not people or end != self.said, end
        return told

    def next_pause(self) -> float:
        """Seconds: twice as many each time, up to a bound."""
        self.pause = min(2 * self.pause, _PAUSES_S[1]) if self.pause else _PAUSES_S[0]
        return self.pause


class RunController:
    """One run from its first or its next round to its end: the gate that Flower's strategy asks."""

    def __init__(self, context: RunContext, job: Job, feed: EventStream) -> None:
        self.context, self.job, self.feed = context, job, feed
        self.folder = context.root / job.run
        self.register = context.intake.register
        self._sums: dict[int, NDArray[np.float64]] = {}  # look -> the sum of what the admitted sites said

    def _tell(self, event: RunEvent, missing: Mapping[str, str] = MappingProxyType({})) -> None:
        """Keep an event for the run's report, then tell those who follow. ``missing``: site to code, of a failure."""
        signs = {site: one for site, one in self.context.signs().items() if site in self.job.sites}
        try:
            keep_event(self.folder, event, self.context.now(), signs, missing)
        except OSError:  # the run itself stops where a model cannot be written; its news alone is no reason to
            self.context.log.error("run_event_not_kept", run=self.job.run, round=event.round)
        self.feed.put(event)

    def run(self) -> None:
        """Round after round to an end; sites that are away are waited for; an end is durable before it is told."""
        job, host = self.job, self.context.host
        patience = _Patience()
        while True:
            missing: Mapping[str, str] = {}
            try:
                with self.context.turn.take(self.feed.waiting, job.sites):
                    began = time.monotonic()
                    end = self._attempt()
                break
            except RoundFailedError as failure:
                end, missing = self._end_of(failure), failure.refused
                told = patience.goes_on(end, self._closed(), time.monotonic() - began)
                if end.state != "waiting" or host.stopping.is_set():
                    break
                if not time.monotonic() < patience.until:
                    end = RunEvent(job.run, end.round, "stopped", end.sites, end.reason)
                    break
                if told:
                    self._tell(end, missing)
                if self._sleep(patience.next_pause()):
                    end = RunEvent(job.run, end.round, "stopped", (), "by an operator")
                    break
            except (
                RunStopped,
                OSError,
            ) as why:  # OSError: the disk, or no descriptor left; nothing is lost by waiting
                reason = "by an operator" if isinstance(why, RunStopped) else "storage"
                self.context.log.warning("run_stopped", run=job.run, rule=type(why).__name__)
                end = RunEvent(job.run, 0, "stopped", (), reason)
                break
            except Exception as fault:  # noqa: BLE001 - a run that fails in an unknown way has failed; its grants are spent
                self.context.log.error("run_failed", run=job.run, fault=type(fault).__name__)
                end = RunEvent(job.run, 0, "failed", reason="internal")
                break
        self._finish(end, missing)

    def _attempt(self) -> RunEvent:
        """Conduct the rest of the run; a process of it that is lost is replaced, so many times for one round."""
        lost: Counter[int] = Counter()
        while True:
            done = self._closed()
            try:
                return self._conduct(done)
            except RunLostError:
                lost[done] += 1
                self.context.log.error("run_process_lost", run=self.job.run, round=done + 1)
                if not lost[done] < _LOST:
                    return RunEvent(self.job.run, done + 1, "failed", (), "internal")
                self._tell(RunEvent(self.job.run, done + 1, "waiting", (), "run_process_lost"))

    def _closed(self) -> int:
        """Rounds that the ledger says are closed."""
        with self.register.store.exclusive() as state:
            return state.rounds.get(self.job.run, 0)

    def _finish(self, end: RunEvent, missing: Mapping[str, str]) -> None:
        job = self.job
        try:
            if end.state == "stopped":
                replace_file(self.folder / "stop", b"")
            elif not self.context.host.stopping.is_set():  # a stopping coordinator leaves its runs to be resumed
                self._close(end)
                self.context.tell("over", job.run, job.sites)
        except Exception as fault:  # noqa: BLE001 - not closed, so the next start resumes it; whoever watches must hear
            self.context.log.error("run_not_closed", run=job.run, fault=type(fault).__name__)
            end = RunEvent(job.run, end.round, "failed", end.sites, "internal")
        if end.state == "failed" and end.round:  # why each site was out: nothing else says it to those who follow
            whys = (RunEvent(job.run, end.round, "refused", (site,), code) for site, code in sorted(missing.items()))
            for why in whys:
                if why not in self.feed.events:
                    self._tell(why)
        self._tell(end, missing)

    def _end_of(self, failure: RoundFailedError) -> RunEvent:
        """A round had too few sites: is that for good, or are they away?"""
        away = {site for site, code in failure.refused.items() if code in AWAY}
        gone = {site for site in failure.refused if site not in away}
        enough = len(self.job.sites) - len(gone) >= (
            len(self.job.sites) if self.job.all_or_none else self.job.min_sites
        ) and not gone & set(self.job.required_sites)
        absent = _ABSENT_SECRET if self.job.secure else _ABSENT
        waits = failure.reason in (NOT_APPROVED_YET, FROZEN) or (failure.reason in absent and away and enough)
        state = "waiting" if waits else "failed"
        refused = tuple(sorted(failure.refused))
        return RunEvent(self.job.run, failure.round_index + 1, state, refused, failure.reason)

    def _sleep(self, seconds: float) -> bool:
        """Wait; True when the run was stopped meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.context.host.stopping.wait(0.5):
            if (self.folder / "stop").exists():
                return True
        return False

    def _conduct(self, done: int) -> RunEvent:
        job = self.job
        if done < job.turns:
            if (self.folder / "stop").exists():
                raise RunStopped
            self._may_be_granted()
            self.context.tell("run", job.run, job.sites)
            plan_from = partial(
                RoundPlan,
                run=job.run,
                sites=self._sites(done),
                rounds=job.turns,
                first_round=done,
                config=job.config_for_sites.encode(),
                min_sites=job.min_sites,
                least_grants=len(job.sites) if job.all_or_none and not done else job.min_sites,
                round_timeout_s=round_times.round_timeout(job.round_seconds, job.parameters),
                longest_step_s=round_times.step_timeout(job.parameters),
                silence_s=round_times.silence(job.round_seconds, job.wait_seconds),
                required=job.required_sites,
                terms=RoundTerms(job.round_seconds, self._approve_by()),
                node_wait_s=NODE_WAIT_S,
                aggregator=strategy_from(job.strategy),
                roster=self._roster() if job.secure else None,
                looks=frozenset(turn - 1 for turn in job.looks),
                sums=job.layout().size if job.evaluate else 0,
                update_precision=job.update_precision,
                lattice=None if (on := job.look_lattice()) is None else (on.bound, on.scale),
            )
            conduct(self.context.host, plan_from(model=self._model(done)), self)  # nobody here keeps its numbers
        rounds = self._members()
        sites = sorted({site for there in rounds.values() for site in there})
        return RunEvent(job.run, job.turns, "finished", tuple(sites), sentence(job.sites, [*rounds.values()]))

    def _may_be_granted(self) -> None:
        """Ask no site for its price while the ledger would grant it nothing: that refusal would be the run's end.

        Raises:
            RoundFailedError: the ledger was restored, and not every site has shown its receipts. It is waited for.
        """
        with self.register.store.exclusive() as state:
            missing = sorted(state.sites_awaited)
        if missing and not self.context.intake.reserved_run(self.job.run):
            raise RoundFailedError(-1, FROZEN, dict.fromkeys(missing, FROZEN))

    def _members(self) -> dict[int, set[str]]:
        """Round to the sites that are in it, by the ledger."""
        rounds: dict[int, set[str]] = {number: set() for number in range(1, self.job.turns + 1)}
        with self.register.store.exclusive() as state:
            for run, number, site in state.aggregated:
                if run == self.job.run:
                    rounds[number].add(site)
        return rounds

    def _sites(self, done: int) -> tuple[str, ...]:
        """Whom to ask: all at first; after a restart those that were granted."""
        if not done:
            return self.job.sites
        granted = self._held()
        return tuple(site for site in self.job.sites if site in granted)

    def _approve_by(self) -> int:
        """Until when persons may approve the run; 0: no site that is asked wants that, by its policy of today."""
        if not any(self.register.policy_of(site).run_approvals for site in self.job.sites):
            return 0
        try:
            return int((self.folder / APPROVE_BY).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _roster(self) -> dict[str, bytes]:
        """Site to its enrolled signing key, from the ledger."""
        with self.register.store.exclusive() as state:
            return {site: state.sites[site].sign_key for site in self.job.sites}

    def _held(self) -> dict[str, bytes]:
        """Site to the digest of the sealed reservation, for the grants of this run that are held."""
        with self.register.store.exclusive() as state:
            mine = [g.reserved for g in state.grants.values() if g.reserved.run == self.job.run and g.state == "held"]
        return {reserved.site: reserved.envelope for reserved in mine}

    def _model(self, done: int) -> RoundModel:
        if not done:
            return RoundModel(np.zeros(self.job.parameters, np.float32))
        vector = unpack_vector((self.folder / f"round-{done}.safetensors").read_bytes())
        return RoundModel(vector, Moments.from_bytes((self.folder / f"round-{done}.moments").read_bytes()))

    def reserve(self, sealed: Mapping[str, bytes], least: int) -> Mapping[str, str]:
        """The gate: the budgets of all sites in one append; a run that goes on asks for nothing twice."""
        held = self._held()
        if self.context.intake.reserved_run(self.job.run):
            known = {site: hashlib.sha256(envelope).digest() for site, envelope in sealed.items()}
            return {site: "not_granted" for site, digest in known.items() if held.get(site) != digest}
        verdicts = self.context.intake.reserve_run(self.job.run, sealed, least, self.job.required_sites)
        return {site: v.findings[0].rule for site, v in verdicts.items() if not v.admitted}

    def admit(self, site: str, round_index: int, envelope: bytes, artifact: bytes) -> str | None:
        """The gate: a valid envelope of this site for this round, under a grant, or it is not aggregated."""
        intake, number = self.context.intake, round_index + 1
        try:
            release = intake.release(site, f"round-{number}", envelope)
            key = f"submit-{release.release}"
            looked = number in self.job.looks
            if (release.run, release.round) != (self.job.run, number):
                return "another_round"
            if looked is not (release.artifact_type in EVALUATIONS):
                return "artifact_type"
            size = self.job.layout().size if looked else self.job.parameters
            precision = "" if self.job.secure else FLOAT32 if looked else self.job.update_precision
            signed = UpdateArtifact(artifact, size, precision)
            verdict = intake.admit(site, key, envelope, release, signed)
        except RequestRejectedError as refusal:
            return refusal.finding.rule
        return None if verdict.admitted else verdict.findings[0].rule

    def looked(self, round_index: int, sums: NDArray[np.float64]) -> None:
        """The gate: what the sites said in a look; it is durable before the look is closed."""
        self._sums[round_index + 1] = sums

    def round_done(
        self, round_index: int, model: RoundModel, used: tuple[str, ...], refused: Mapping[str, str]
    ) -> None:
        """The new parameters are durable before the ledger says that the round is closed."""
        number, body = round_index + 1, model.packed or pack_vector(model.vector)
        figure = self._looked(number, used) if number in self.job.looks else ""
        if figure and number == self.job.turns:  # the run ends with the model that looked best
            body = (self.folder / f"round-{self._best()[0]}.safetensors").read_bytes()
        replace_file(self.folder / f"round-{number}.safetensors", body)
        replace_file(self.folder / f"round-{number}.moments", model.moments.to_bytes())
        granted = self._held()
        missing = {site: "not_granted" for site in self.job.sites if site not in granted} | dict(refused)
        out = {site: code for site, code in missing.items() if site not in used}  # whoever is in it is not out
        RoundMembers(number, number in self.job.looks, used, out).keep(self.folder)
        self.register.close_round(self.job.run, number, used, hashlib.sha256(body).digest())
        self._tell(RunEvent(self.job.run, number, "closed", used))
        if figure:
            self._tell(RunEvent(self.job.run, number, "evaluated", used, figure))
        self.context.log.info("round_closed", run=self.job.run, round=number, sites=len(used))
        if number < self.job.turns and (self.folder / "stop").exists():
            raise RunStopped

    def _looked(self, number: int, used: tuple[str, ...]) -> str:
        """Keep what the sites said in a look, durable; its first figure, for people."""
        told = {"sites": list(used), "sums": self._sums[number].tolist()}
        replace_file(self.folder / f"round-{number}.look", json.dumps(told).encode())
        return str(estimates(self._look(number))[0])

    def _look(self, number: int) -> LookSums:
        """The sums of a look that was made."""
        return kept_look(self.folder, self.job, number)

    def _best(self) -> tuple[int, Estimate]:
        """The turn that made the model which looked best, by the noisy sums alone; and its figure."""
        made = [turn for turn in self.job.looks if (self.folder / f"round-{turn}.look").exists()]
        at, figure = best([self._look(turn) for turn in made])
        return made[at] - 1, figure

    def _evaluation(self) -> dict[str, Any]:
        """What was found in the looks, for the model's certificate; nothing without looks."""
        if not self.job.evaluate:
            return {}
        looks = [
            {"after_round": after, "figures": to_table(estimates(self._look(turn)))}
            for turn, after in self.job.looks.items()
        ]
        turn, figure = self._best()
        chosen = {"after_round": self.job.looks[turn + 1], **to_table([figure])}
        return {"evaluation": {"noise": "in every interval", "looks": looks, "chosen": chosen}}

    def checked(self, *_: object) -> None:
        """The gate of a check, which a run is not."""
        raise RunLostError("a run answered as a check")

    def progress(self, event: RoundProgress) -> None:
        """The gate: the news of a round, for whoever follows the run."""
        job, index = self.job, event.round_index + 1
        for site, code in event.refused.items():
            stage = "declined" if event.stage == "priced" else "refused"
            self._tell(RunEvent(job.run, 0 if event.stage == "priced" else index, stage, (site,), code))
        if event.stage == "priced":
            self._tell(RunEvent(job.run, 0, "granted", event.sites))
        elif event.stage == "sent":
            self._tell(RunEvent(job.run, index, "sent", event.sites))

    def _close(self, end: RunEvent) -> None:
        """Every grant of the run is spent; a finished run's model goes on the shelf."""
        with self.register.store.exclusive() as state:
            mine = [(name, g.used) for name, g in state.grants.items() if g.reserved.run == self.job.run]
        for name, used in mine:
            self.register.close(name, "released" if used else "expired")
        if end.state == "finished":
            body = (self.folder / f"round-{self.job.turns}.safetensors").read_bytes()
            envelopes = {a.release: self.register.store.envelope(a.envelope) or b"" for a in self._updates()}
            self.context.shelf.place_model(self.job.run, body, self._certificate(end, body), envelopes)
        replace_file(self.folder / "end.json", json.dumps(asdict(end)).encode())

    def _updates(self) -> list[Admitted]:
        """The updates that the model is made of: admitted, and counted by a closed round of this run."""
        with self.register.store.exclusive() as state:
            mine = [a for a in state.releases.values() if a.run == self.job.run]
            return [a for a in mine if (a.run, a.round, a.site) in state.aggregated]

    def _certificate(self, end: RunEvent, body: bytes) -> dict[str, Any]:
        mine = self._updates()
        worst = max(mine, key=lambda a: a.used)
        weakest = max(mine, key=lambda a: a.level).level  # A < A* < B < C
        return {
            **certificate(worst, self.context.shelf.account(worst)),
            "release": self.job.run,
            "site": ", ".join(end.sites),
            "level": weakest,
            "meaning": WORDING[weakest],
            "artifact_sha256": hashlib.sha256(body).hexdigest(),
            "strategy": json.loads(self.job.strategy),
            "updates": [a.release for a in mine],
            "participation": {
                "told": end.reason,
                "required_sites": list(self.job.required_sites),
                "min_sites": self.job.min_sites,
                "rounds": [one.to_table() for one in members(self.folder, self.job.turns)],
            },
            **self._evaluation(),
        }


@dataclass(frozen=True, slots=True)
class UpdateArtifact:
    """An update or a look's sums that came in a round, for :meth:`coordinator.admission.AdmissionService.admit`."""

    artifact: bytes
    parameters: int
    precision: str  # "": masked

    @property
    def sha256(self) -> str:
        """Of the bytes, hexadecimal."""
        return hashlib.sha256(self.artifact).hexdigest()

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.artifact)

    def look(self) -> list[Finding]:
        """Numbers of the run's length and precision, or, masked, as many elements of the ring."""
        try:
            if self.precision:
                size = unpack_update(self.artifact, self.precision).size
            else:
                size = unpack_ring(self.artifact).size
            if size != self.parameters:
                return [Finding("artifact_malformed", "the update has another length than the run's model")]
        except ArtifactFormatError as error:
            return [Finding("artifact_malformed", str(error))]
        return []
