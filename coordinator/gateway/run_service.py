"""Operators' requests about runs, between the wire and :class:`coordinator.edges.runs.Runs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.edges.feed import Event
from coordinator.edges.runs import Runs
from coordinator.plan import BadJob, Job
from protos.v1 import gateway_pb2 as pb


@dataclass(frozen=True, slots=True)
class Operations:
    """What an operator may do with runs; what cannot be done is said in words, as the last event."""

    runs: Runs

    def launch(self, request: Any) -> Iterator[Any]:
        """Start a run, or follow the one of that name."""
        yield from _events(request.run, lambda: self.runs.launch(_job(request)))

    def plan(self, request: Any) -> Any:
        """What it would cost each site."""
        try:
            costs, decision = self.runs.plan(_job(request))
        except BadJob as error:
            return pb.PlanReply(refused=str(error))
        sites = [
            pb.SiteCost(
                site=c.site,
                fits=c.fits,
                epsilon=c.epsilon,
                delta=c.delta,
                amount=c.amount,
                left=c.left,
                reason=c.reason,
            )
            for c in costs
        ]
        return pb.PlanReply(sites=sites, refused="" if decision.go else decision.reason)

    def watch(self, run: str) -> Iterator[Any]:
        """Events of a run that is known."""
        yield from _events(run, lambda: self.runs.watch(run))

    def resume(self, run: str) -> Iterator[Any]:
        """Go on with a stopped run."""
        yield from _events(run, lambda: self.runs.resume(run))

    def stop(self, run: str) -> str:
        """Stop after the round in progress; the run's state."""
        return self.runs.stop(run)


def _job(request: Any) -> Job:
    """The job of a launch request.

    Raises:
        BadJob: it makes no sense; all problems at once.
    """
    try:
        config = request.config.decode()
    except UnicodeDecodeError:
        raise BadJob("the configuration is not text") from None
    return Job(
        run=request.run,
        mechanism=request.mechanism,
        config=config,
        parameters=request.parameters,
        sites=tuple(request.sites),
        rounds=request.rounds,
        min_sites=request.min_sites,
        strategy=request.strategy or '{"name":"fedavg"}',
        all_or_none=request.all_or_none,
        secure=request.secure,
    )


def _events(run: str, act: Callable[[], Iterator[Event]]) -> Iterator[Any]:
    try:
        for e in act():
            yield pb.RoundEvent(run=e.run, round=e.round, state=e.state, sites=list(e.sites), reason=e.reason)
    except BadJob as error:
        yield pb.RoundEvent(run=run, state="failed", reason=str(error))
