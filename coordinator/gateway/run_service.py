"""Operators' requests about runs, between the wire and :class:`coordinator.federation.run_manager.RunManager`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from coordinator.federation.events import RunEvent, SignOfLife
from coordinator.federation.job import APPROVAL_DAYS, FEDAVG, Job, JobError
from coordinator.federation.run_manager import RunManager
from coordinator.federation.run_process import RunLostError
from coordinator.federation.site_checks import carried_bytes, seconds_of_round
from coordinator.federation.superlink import FlowerHostError
from policies.accounting.accountant import tight_epsilon
from policies.accounting.claims import Claim
from policies.accounting.rounding import format_rounded_up
from protos.common.canonical_json import json_object
from protos.federation import round_times
from protos.v1 import gateway_pb2

_DEFAULTS: Final = {"round_seconds": round_times.DEFAULT_S, "approval_days": APPROVAL_DAYS}  # for 0, that is unsaid
_TOLD: Final = ("site", "fits", "epsilon", "delta", "amount", "left", "reason")  # of a site's cost


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations on runs for an operator. A failure is reported in words, as the last event."""

    runs: RunManager
    signs: Callable[[], Mapping[str, SignOfLife]]  # of life, by site

    def launch(self, request: Any) -> Iterator[Any]:
        """Start a run, or follow the one of that name."""
        yield from _events(request.run, lambda: self.runs.launch(_job(request)))

    def plan(self, request: Any) -> Any:
        """What it would cost each site."""
        try:
            job = self.runs.with_noise(_job(request))
            costs, decision = self.runs.plan(job)
            claim = job.claim()
        except JobError as error:
            return gateway_pb2.PlanReply(refused=str(error))
        tight = {delta: _pld(claim, delta) for delta in {c.delta for c in costs if c.epsilon}}
        sites = [
            gateway_pb2.SiteCost(**{name: getattr(c, name) for name in _TOLD}, pld_epsilon=tight.get(c.delta, ""))
            for c in costs
        ]
        noise: float = json_object(job.config)["noise_multiplier"]
        refused = "" if decision.go else decision.reason
        return gateway_pb2.PlanReply(sites=sites, refused=refused, noise_multiplier=noise)

    def check(self, request: Any) -> Any:
        """Whether each site could take part."""
        try:
            job = self.runs.with_noise(_job(request))
            found = self.runs.check(job, request.canary)
        except (JobError, RunLostError, FlowerHostError) as error:
            return gateway_pb2.CheckReply(refused=str(error))
        signs, sites = self.signs(), []
        for site in job.sites:
            if site not in found.told:
                sites.append(gateway_pb2.CheckedSite(site=site, code=found.lost.get(site, "no_reply")))
                continue
            one, sign = found.told[site], signs.get(site, SignOfLife(0.0, 0, 0, 0.0, ""))
            more: dict[str, Any] = {"up": sign.rate, "could": one.could}
            if request.canary:
                there, back = carried_bytes(job)
                back = back if one.could or site in found.aggregated else 0  # perhaps its report alone
                more |= {"down_bytes": there, "up_bytes": back, "down_seconds": sign.down, "up_seconds": sign.up}
                more |= {"up": back / sign.up if sign.up else 0.0, "aggregated": site in found.aggregated}
                one = replace(one, rate=there / sign.down if sign.down else 0.0)
            told: dict[str, Any] = {
                name: getattr(one, name) for name in ("version", "plan", "device", "seconds", "wrong")
            }
            more |= {"down": one.rate, "round_seconds": seconds_of_round(job, one, more["up"])}
            sites.append(gateway_pb2.CheckedSite(site=site, **told, **more))
        return gateway_pb2.CheckReply(sites=sites)

    def watch(self, run: str) -> Iterator[Any]:
        """Events of a run that is known."""
        yield from _events(run, lambda: self.runs.watch(run))

    def resume(self, run: str) -> Iterator[Any]:
        """Go on with a stopped run."""
        yield from _events(run, lambda: self.runs.resume(run))

    def stop(self, run: str) -> str:
        """Stop after the round in progress; the run's state."""
        return self.runs.stop(run)


def _pld(claim: Claim, delta: str) -> str:
    """Epsilon of the claim by privacy loss distributions, as decimal text."""
    return format_rounded_up(tight_epsilon([claim], float(delta)))


def _job(request: Any) -> Job:
    """The job of a launch request.

    Raises:
        JobError: it makes no sense; all problems at once.
    """
    try:
        config = request.config.decode()
    except UnicodeDecodeError:
        raise JobError("the configuration is not text") from None
    given = {f.name: getattr(request, f.name) for f in fields(Job)}
    more: dict[str, Any] = {name: tuple(getattr(request, name)) for name in ("sites", "evaluate", "required_sites")}
    more |= {"config": config, "strategy": request.strategy or FEDAVG}
    more |= {name: given[name] or most for name, most in _DEFAULTS.items()}
    return Job(**{**given, **more})


def _events(run: str, act: Callable[[], Iterator[RunEvent]]) -> Iterator[Any]:
    try:
        for e in act():
            yield gateway_pb2.RoundEvent(**asdict(e))
    except JobError as error:
        yield gateway_pb2.RoundEvent(run=run, state="failed", reason=str(error))
