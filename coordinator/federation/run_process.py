"""The coordinator's end of one run: its process is started here, and what that asks for is answered.

The process (coordinator/federation/run_main.py) has parsed data from sites, so it is not trusted: each field is
checked again, sites must be the plan's, vectors finite and of the plan's length; an update is admitted once and only
from a site with a grant, and a round is closed only with updates that the gate admitted in this very round. The
process alone computes their aggregate. It has no key and no network: its calls to Flower are made here, with a key
that opens a task's calls and nothing else.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Self

import httpx
import numpy as np

from coordinator.federation.aggregation import Moments, MomentsError
from coordinator.federation.grid import CALL_S, LoopbackEndpoint
from coordinator.federation.run_messages import (
    Pipe,
    RunFrameError,
    RunMessage,
    RunSpec,
    code_of,
    codes_of,
    from_run,
    index_of,
    sites_of,
)
from coordinator.federation.strategy import SLUG, RoundFailedError, RoundModel, RoundPlan, RoundProgress, RunGate
from coordinator.federation.superlink_listeners import KEY_HEADER
from protos.artifacts.arrays import ArtifactFormatError, unpack_update, unpack_vector
from protos.artifacts.strict_safetensors import unpack_ring
from protos.common.errors import WorkerError
from protos.federation import flower_environment
from protos.federation.messages import FLEET_BODY
from protos.federation.site_check import SiteCheck
from protos.operations import child_process
from protos.operations.http_relay import HOOKS, Relay
from protos.secagg.messages import SumStep

MODULE: Final = "coordinator.federation.run_main"
_POLL_S: Final = 0.2
_LEAVE_S: Final = 10.0  # for a process that was told to stop
_SLACK_S: Final = 600.0  # for sums and pushes, beyond the plan's own waits
_KEPT: Final = ("FLWR_HOME", *flower_environment.SETTINGS)  # of the environment, for Flower


class RunLostError(WorkerError, RuntimeError):
    """The run's process died, or spoke nonsense, before the run's end: go on from the last closed round."""


class RunProcess:
    """The process of one run and our end of its pipe, as a context manager that leaves nothing behind."""

    def __init__(self, plan: RoundPlan) -> None:
        """Start it; it waits for its order."""
        ours, theirs = socket.socketpair()
        self._calls, calls = socket.socketpair()
        self._relay: Relay | None = None
        with theirs, calls:
            self._process = child_process.start(MODULE, [], [theirs.fileno(), calls.fileno()], _KEPT, gives_back=True)
        self.pipe = Pipe(ours, from_run(plan))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def end(self) -> None:
        """The end of the pipe is the process's end; one that does not see that is killed."""
        self.pipe.close()
        if self._relay is None:
            self._calls.close()
        else:
            self._relay.close()
        child_process.end(self._process)

    def conduct(
        self, order: RunSpec, way: LoopbackEndpoint, handler: RunRequestHandler, stopping: threading.Event
    ) -> None:
        """Let it conduct the run, make its calls to Flower, and answer its questions until it is over. Blocks.

        Raises:
            RoundFailedError: as the strategy says, or because ``stopping`` is set.
            RunLostError: it is gone, silent for longer than the plan allows, or says what it may not.
        """
        stopped = 0.0
        calls = httpx.Client(base_url=f"http://{way.address}", timeout=CALL_S, trust_env=False, event_hooks=HOOKS)
        self._relay = Relay(self._calls, calls, FLEET_BODY, lambda: {KEY_HEADER: way.key})
        try:
            order.send(self.pipe)
            heard = time.monotonic()
            while True:
                now = time.monotonic()
                if stopping.is_set() and not stopped:
                    stopped = now
                    self.pipe.send("stop")
                if (stopped and now - stopped > _LEAVE_S) or now - heard > handler.patience:
                    raise RunFrameError("silent")
                if self.pipe.ready(_POLL_S):
                    frame = self.pipe.receive()
                    answer = handler.take(frame)
                    del frame  # a model lies in it, perhaps, and the next one may be a round away
                    if answer is None:
                        return
                    self.pipe.send(*answer)
                    heard = time.monotonic()
        except RunFrameError as fault:
            if stopping.is_set():
                raise RoundFailedError(handler.index, "stopped", {}) from None
            raise RunLostError(f"the run's process is lost: {fault}") from None
        finally:
            calls.close()


Answer = tuple[str, Mapping[str, Any]]


class RunRequestHandler:
    """Answers the requests of a run's process, and keeps the state of the run.

    This is a wall: it looks like a second gate before the gate, and is where the coordinator reads again what comes
    from a process that parsed foreign bytes.
    """

    def __init__(self, plan: RoundPlan, gate: RunGate) -> None:
        """At the price of ``plan``."""
        self.plan, self._gate = plan, gate
        others = 0 if plan.roster is None else len(SumStep) - 1  # in which nobody trains
        self.patience = plan.node_wait_s + plan.round_timeout_s + others * plan.step_timeout_s + _SLACK_S
        self.index = plan.first_round  # of the round that is open
        self._granted: dict[str, bytes] | None = None  # None: nothing was reserved yet
        self._asked: set[str] = set()  # the gate was asked to admit them in this round
        self._admitted: set[str] = set()
        self._summed = False  # the sums of the look that is open were said

    def take(self, frame: RunMessage) -> Answer | None:
        """The answer to one question; None when the run is over.

        Raises:
            RunFrameError: it is not what a run's process may say now.
            RoundFailedError: it says that a round has failed.
            Exception: whatever the gate raises where a round is done, or at news: the run is to end.
        """
        questions = {
            "reserve": self._reserve,
            "admit": self._admit,
            "looked": self._looked,
            "done": self._done,
            "checked": self._checked,
            "progress": self._tell,
        }
        if self.plan.checks and frame.word in questions and frame.word != "checked":
            raise RunFrameError("a check, which holds, admits and closes nothing")
        if frame.word in questions:
            return questions[frame.word](frame)
        match frame.word:
            case "over":
                if self.index != self.plan.rounds and not self.plan.checks:
                    raise RunFrameError("over before its last round")
                return None
            case "failed":
                index, reason, refused = frame.values("round", "reason", "refused")
                index_of(index, -1, self.plan.rounds - 1)
                raise RoundFailedError(index, code_of(reason), codes_of(refused, self.plan.sites))
            case _:
                (kind,) = frame.values("kind")
                raise RunFrameError(code_of(kind))

    def _reserve(self, frame: RunMessage) -> Answer:
        least, listed = frame.values("least", "sealed")
        if self._granted is not None or least != self.plan.least_grants or not isinstance(listed, list):
            raise RunFrameError("reserve: not now, or not of this run")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in listed):
            raise RunFrameError("reserve: not pairs")
        sealed: dict[str, bytes] = {}
        at = 0
        for site in sites_of([pair[0] for pair in listed], self.plan.sites):
            size = index_of(listed[len(sealed)][1], 0, len(frame.body) - at)
            sealed[site] = frame.body[at : at + size]
            at += size
        if at != len(frame.body):
            raise RunFrameError("reserve: something is left over")
        self._granted = {}
        try:
            given = self._gate.reserve(dict(sealed), self.plan.least_grants)
            refused = {site: _slug(code) for site, code in given.items() if site in sealed}
        except Exception:  # noqa: BLE001 - whatever went wrong in the ledger, it was not a yes
            return "broken", {}
        self._granted = {site: envelope for site, envelope in sealed.items() if site not in refused}
        return "answer", {"refused": refused}

    def _admit(self, frame: RunMessage) -> Answer:
        site, index = frame.values("site", "round")
        if type(site) is not str or site not in (self._granted or {}) or site in self._asked:
            raise RunFrameError("admit: not granted, or asked before")
        self._open(index)
        try:
            if self.plan.roster is None:
                size = unpack_update(frame.more, self.plan.precision_of(self.index)).size
            else:
                size = unpack_ring(frame.more).size
        except ArtifactFormatError:
            raise RunFrameError("admit: not a vector") from None
        if size != self.plan.size_of(self.index):
            raise RunFrameError("admit: not of the run's length")
        self._asked.add(site)
        try:
            verdict = self._gate.admit(site, self.index, frame.body, frame.more)
        except Exception:  # noqa: BLE001 - whatever went wrong in a review, it was not a yes
            return "broken", {}
        if verdict is None:
            self._admitted.add(site)
            return "answer", {"code": None}
        return "answer", {"code": _slug(verdict)}

    def _looked(self, frame: RunMessage) -> Answer:
        """The sums of a look, once, before it is done."""
        (index,) = frame.values("round")
        self._open(index)
        if self.index not in self.plan.looks or self._summed or len(frame.body) != 8 * self.plan.sums:
            raise RunFrameError("looked: not now, or of another length")
        sums = np.frombuffer(frame.body, "<f8").astype(np.float64)
        if not bool(np.isfinite(sums).all()):
            raise RunFrameError("looked: not numbers")
        self._gate.looked(self.index, sums)
        self._summed = True
        return "answer", {}

    def _done(self, frame: RunMessage) -> Answer:
        index, used, refused = frame.values("round", "used", "refused")
        self._open(index)
        sites = sites_of(used, self._admitted)
        if not sites or (self.plan.roster is None and not len(self._admitted) >= self.plan.min_sites):
            raise RunFrameError("done: of too few")
        if (self.index in self.plan.looks) is not self._summed:
            raise RunFrameError("done: a look without its sums")
        codes = codes_of(refused, self.plan.sites)
        model = self._model_of(frame)
        self._gate.round_done(index, model, sites, codes)
        self.index = index + 1
        self._asked, self._admitted, self._summed = set(), set(), False
        return "answer", {}

    def _open(self, index: object) -> None:
        """Refuse (RunFrameError) any round but the one that is open."""
        index_of(index, self.index, min(self.index, self.plan.rounds - 1))

    def _model_of(self, frame: RunMessage) -> RoundModel:
        try:
            model = RoundModel(unpack_vector(frame.body), Moments.from_bytes(frame.more), frame.body)
        except (ArtifactFormatError, MomentsError):
            raise RunFrameError("done: not a model") from None
        size = self.plan.model.vector.size
        if model.vector.size != size or model.moments.m.size not in (0, size):
            raise RunFrameError("done: a model of another length")
        return model

    def _checked(self, frame: RunMessage) -> Answer:
        told, lost, aggregated = frame.values("told", "lost", "aggregated")
        if not self.plan.checks or not isinstance(told, dict):
            raise RunFrameError("checked: not asked, or no reports")
        try:
            reports = {site: SiteCheck.of_table(told[site]) for site in sites_of(list(told), self.plan.sites)}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise RunFrameError("checked: not a report") from None
        self._gate.checked(reports, codes_of(lost, self.plan.sites), sites_of(aggregated, reports))
        return "answer", {}

    def _tell(self, frame: RunMessage) -> Answer:
        stage, index, sites, refused = frame.values("stage", "round", "sites", "refused")
        if stage not in ("priced", "sent", "done"):
            raise RunFrameError("progress: an unknown stage")
        index_of(index, self.plan.first_round, self.plan.rounds - 1)
        self._gate.progress(
            RoundProgress(stage, index, sites_of(sites, self.plan.sites), codes_of(refused, self.plan.sites))
        )
        return "answer", {}


def _slug(verdict: object) -> str:
    """A gate's code; "internal" for nonsense."""
    return verdict if isinstance(verdict, str) and SLUG.fullmatch(verdict) else "internal"
