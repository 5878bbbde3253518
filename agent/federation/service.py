"""The agent's long-running side: take part in federated rounds over the Flower link, with code installed here.

The link is a process of its own, and Flower is imported only there;
:func:`protos.federation.flower_environment.configure_environment` comes before its start.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from agent.domain import Update
from agent.errors import (
    AnotherRootError,
    CoordinatorUnreachableError,
    LedgerForkError,
    ReviewRejectedError,
    SiteConfigError,
)
from agent.federation.run_mechanism import read_mechanism
from agent.federation.secure_aggregation import SecureAggregationClient
from agent.federation.supernode_process import LinkError, SuperNodeLink
from agent.federation.tasks import RoundAnswer, RoundTask, TaskDeclinedError
from agent.gateway.witness import EpochChangedError
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked
from agent.release.maker_errors import MakerFaultError
from agent.release.maker_process import MakerEndedError
from policies.accounting.claims import UnsupportedClaimError
from policies.ledger.entries import InvalidEntryError
from policies.ledger.store import LedgerStoppedError
from policies.review.rules import Finding, Verdict
from protos.artifacts.arrays import unpack_update
from protos.common.errors import InvariantError, LazaretError
from protos.federation.messages import CANARY
from protos.federation.round_times import EARLIER_S, RoundTerms, answer_time
from protos.federation.site_check import SiteCheck

FOLLOW_S = 1.0
PRICE_S = 0.5  # after each price: whoever asks for many does not fill the ledger at once
GREET_S = 300.0  # how often the coordinator's ledger is looked at when nothing else asks for it
GREET_AGAIN_S = 30.0  # after a greeting that failed: the coordinator may wait for the head of this site's own ledger
CONFIRM_S = (
    60.0  # how long a round is held up by a coordinator that cannot be asked, say after a start on a poor line
)
_BUDGET = frozenset({"budget", "releases_per_patient"})
_LEAVE_S = 30.0  # for a round that is trained when the service is told to stop


Examine = Callable[[str, Federated | FederatedMasked, RoundTerms, Update | None], tuple[SiteCheck, bytes]]


class EndedRuns:
    """Runs that the coordinator reports as ended: the site leaves them, and what was made is spent."""

    def __init__(self) -> None:
        """None yet."""
        self._mutex, self._runs = threading.Lock(), set[str]()

    def say(self, run: str) -> None:
        """This one has ended. Any thread."""
        with self._mutex:
            self._runs.add(run)

    def take(self, run: str) -> bool:
        """Has this one ended? What was said of others is of no use."""
        with self._mutex:
            found, self._runs = run in self._runs, set()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class FederationContext:
    """The dependencies of a site that takes part in rounds."""

    greet: Callable[[], None]  # meets the coordinator: its ledger must extend what this site has seen
    log: Any
    say: Callable[[str], None]
    stop: threading.Event
    over: EndedRuns
    met: bool = True  # the coordinator was greeted before
    again: threading.Event = field(default_factory=threading.Event)  # it shall be greeted at once
    examine: Examine | None = None  # could this site take part? None: nobody can say


def run_service(link: SuperNodeLink, part: SecureAggregationClient, station: FederationContext) -> int:
    """Answer rounds until told to stop; verdicts on updates are asked for and written into the site's ledger.

    ``part`` is this site's part in a run, and in its secret sums. The link begins when the coordinator was met: it
    has then judged this site's own ledger.

    Returns:
        1 when the coordinator's ledger forked;
        0, or 70 when the site's ledger could not be written or the link cannot work (a key that cannot be used).
    """
    log, stop = station.log, station.stop
    mutex = threading.Lock()
    handler = TaskHandler(part, mutex, log, stop)
    handler.examine = station.examine
    if station.met:
        handler.met.set()
    failed = threading.Event()
    thread = threading.Thread(target=_connect, args=(link, handler, station, failed), name="link", daemon=True)
    thread.start()
    ledger = part.participant.site.ledger.store
    try:
        _keep_on(handler, station)
        stop.set()
        thread.join(_LEAVE_S)
        if mutex.acquire(timeout=FOLLOW_S):  # else a round is trained, perhaps for hours: it goes on later
            try:
                handler.follow()
            finally:
                mutex.release()
    except LedgerForkError as fork:
        stop.set()
        log.error("ledger_forked")
        station.say(f"stopped: {fork}")
        thread.join(30)
        return 1
    return 70 if ledger.stopped or failed.is_set() else 0


def _connect(link: SuperNodeLink, handler: TaskHandler, station: FederationContext, failed: threading.Event) -> None:
    """The link's thread: tasks in, answers out, until told to stop."""

    def state(name: str) -> None:
        station.log.info("link", state=name)
        station.say(f"link: {name}")

    if not station.met:
        state("unmet")
    while not handler.met.wait(FOLLOW_S):
        if station.stop.is_set():
            return
    try:
        link.run(handler.handle, station.stop, state)
    except Exception as fault:  # noqa: BLE001 - a dead link must end the process, without a text that may hold data
        reason = str(fault) if isinstance(fault, LinkError) else type(fault).__name__
        station.log.error("link_failed", reason=reason)
        failed.set()
        station.stop.set()


def _keep_on(handler: TaskHandler, station: FederationContext) -> None:
    """Ask for verdicts, leave what is over, meet the coordinator now and then; until told to stop.

    A round may be trained for hours. Meanwhile its part is left alone, and the coordinator is met all the same: it
    renews this site's certificate, and wants to see its ledger.

    Raises:
        LedgerForkError: the coordinator's ledger is not the one seen before.
    """
    participant = handler.participant
    due = time.monotonic() + (GREET_S if station.met else GREET_AGAIN_S)
    while not station.stop.wait(FOLLOW_S) and not participant.site.ledger.store.stopped:
        if handler.mutex.acquire(timeout=FOLLOW_S):
            try:
                _look_after(handler, station)
            finally:
                handler.mutex.release()
        if handler.unmet or station.again.is_set() or time.monotonic() > due:
            station.again.clear()  # before: what is asked for meanwhile is not lost
            due = time.monotonic() + (GREET_S if handler.greet(station.greet) else GREET_AGAIN_S)


def _look_after(handler: TaskHandler, station: FederationContext) -> None:
    """The part in a run, while nothing is done for it.

    Raises:
        LedgerForkError: the coordinator's ledger is not the one seen before.
    """
    participant = handler.participant
    handler.follow()
    if station.over.take(participant.run):
        handler.leave("over")
    elif participant.watch.wants_to_leave(participant):
        handler.leave("left")
    participant.watch.changed(participant)
    if handler.fork is not None:
        raise handler.fork


class TaskHandler:
    """Tasks from the link become calls of the pipeline; what the pipeline refuses becomes a code."""

    def __init__(
        self,
        part: SecureAggregationClient,
        mutex: threading.Lock,
        log: Any,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sum, self.participant, self.mutex, self.log, self.stop = part, part.participant, mutex, log, stop
        self.clock = clock
        self.met = threading.Event()  # the coordinator was greeted
        self.unmet = False  # its ledger was restored since
        self.strange = False  # what answered when it was last greeted is not of this site's root
        self.examine: Examine | None = None
        self.fork: LedgerForkError | None = None  # found while a task was answered: the process ends

    def handle(self, task: RoundTask) -> RoundAnswer:
        """Look at a run's plan, price it, train one round, look at a model, or take a step of secure aggregation.

        What is made of patients leaves after a pause, perhaps of hours: only if it may then, too.

        Raises:
            TaskDeclinedError: with a code that tells nothing of patients.
        """
        began, made = self.clock(), task.kind in ("train", "evaluate") or task.step == "mask"
        try:
            answer = self._when_known(task, began)
            if made:
                del answer  # an update in clear is kept sealed meanwhile: the pause may last for hours
                self._settle_pace()
        finally:
            if made:  # outside the lock, and for refusals too; by what was priced, whatever the message says
                elapsed, seconds = self.clock() - began, self.participant.terms.seconds
                leaves = self.participant.paces.leaves(task.run, elapsed, seconds)
                self.stop.wait(response_delay(elapsed, seconds, leaves))
            elif task.kind in ("plan", "price"):  # of a price each is an entry of this site's ledger
                self.stop.wait(PRICE_S)
        if not made:
            return answer
        try:
            return self._answer(task, TaskHandler._again)
        except TaskDeclinedError:
            raise TaskDeclinedError("unavailable") from None

    def _when_known(self, task: RoundTask, began: float) -> RoundAnswer:
        while True:
            try:
                return self._answer(task)
            except CoordinatorUnreachableError as fault:  # whether it was granted is not known; nothing was begun
                if self.clock() > began + CONFIRM_S or self.stop.wait(FOLLOW_S):
                    self.log.warning("declined", run=task.run, rules=[type(fault).__name__])
                    raise TaskDeclinedError("unavailable") from None

    def _settle_pace(self) -> None:
        """Choose when the answers of this run leave, if they have no time yet; an update is sealed by now."""
        part = self.participant
        try:
            part.paces.settle(part.clock, part.effort, part.terms.seconds)
        except Exception as fault:  # noqa: BLE001 - the update is sealed, and what was to be measured is no part of it
            self.log.warning("pace_unknown", run=self.participant.run, fault=type(fault).__name__)

    def _answer(
        self, task: RoundTask, act: Callable[[TaskHandler, RoundTask], RoundAnswer] | None = None
    ) -> RoundAnswer:
        if task.kind not in _HANDLERS:
            raise TaskDeclinedError("mechanism")
        with self.mutex:
            try:
                return (act or _HANDLERS[task.kind])(self, task)
            except ReviewRejectedError as refusal:
                rules = [f.rule for f in refusal.verdict.findings]
                self.log.warning("declined", run=task.run, where=refusal.where, rules=rules)
                self._show(task, "; ".join(f"{f.rule}: {f.detail}" for f in refusal.verdict.findings))
                told = ("not_granted", "waiting", "run_spent", "behind")
                code = "budget" if _BUDGET & set(rules) else next((one for one in told if one in rules), "policy")
                # who opts out, and when, is no business of the coordinator's: as whatever fails for a patient's sake
                raise TaskDeclinedError("unavailable" if {"opted_out", "left"} & set(rules) else code) from None
            except LedgerForkError as fork:
                self.fork = fork
                raise TaskDeclinedError("unavailable") from None
            except CoordinatorUnreachableError:
                raise
            except (FederatedConfigError, UnsupportedClaimError) as fault:
                self.log.warning("declined", run=task.run, rules=["configuration"])
                priced = "it is not of the configuration that was priced"
                self._show(task, str(fault) if task.kind == "price" else priced)
                raise TaskDeclinedError("mechanism") from None
            except Exception as fault:  # noqa: BLE001 - one code for every cause, since some depend on patients (P14)
                self.log.warning("declined", run=task.run, rules=[type(fault).__name__])
                self._show(task, why_it_failed(fault))
                raise TaskDeclinedError("unavailable") from None
            finally:
                self.participant.watch.changed(self.participant)

    def _show(self, task: RoundTask, why: str) -> None:
        """To the site's own people; the coordinator hears a code."""
        if task.kind in ("train", "evaluate", "secure"):
            self.participant.watch.came_to_nothing(self.participant, task.round_index + 1, why)
        elif task.kind == "price":
            self.participant.site.say("price", f"{task.run}: this site takes no part: {why}")

    def _plan(self, task: RoundTask) -> RoundAnswer:
        self.participant.consider(task.run, read_mechanism(task.config.decode()), task.terms)
        return RoundAnswer()

    def _price(self, task: RoundTask) -> RoundAnswer:
        envelope = self.participant.join(task.run, read_mechanism(task.config.decode()), task.terms)
        self.log.info("granted", run=task.run, grant=self.participant.grant)
        return RoundAnswer(envelope)

    def _train(self, task: RoundTask) -> RoundAnswer:
        assert task.vector is not None
        number = task.round_index + 1
        self.participant.same_terms(task.run, task.terms)
        signed = self.participant.train(task.run, number, Update(task.vector))
        self.log.info("round", run=task.run, round=number, release=signed.release.release)
        return RoundAnswer(signed.envelope, unpack_update(signed.artifact))

    def _evaluate(self, task: RoundTask) -> RoundAnswer:
        assert task.vector is not None
        number = task.round_index + 1
        self.participant.same_terms(task.run, task.terms)
        signed = self.participant.look(task.run, number, Update(task.vector))
        self.log.info("look", run=task.run, round=number, release=signed.release.release)
        return RoundAnswer(signed.envelope, unpack_update(signed.artifact))

    def _secure(self, task: RoundTask) -> RoundAnswer:
        number = task.round_index + 1
        self.participant.same_terms(task.run, task.terms)
        answer = self.sum.step(task.run, number, task.step, task.payload, task.config)
        self.log.info("secret_sum", run=task.run, round=number, step=task.step)
        return RoundAnswer(payload=answer)

    def _check(self, task: RoundTask) -> RoundAnswer:
        if self.examine is None or self.participant.round_in_progress:
            raise TaskDeclinedError("unavailable")
        start = Update(np.frombuffer(task.payload, "<f4")) if task.step == CANARY else None
        told, made = self.examine(task.run, read_mechanism(task.config.decode()), task.terms, start)
        self.log.info("checked", run=task.run, rules=list(told.wrong))
        if start is not None:
            self.log.info("canary_answered", run=task.run, count=len(made))  # bytes
        return RoundAnswer(payload=told.to_bytes() + b"\n" + (bytes(len(task.payload)) if start is None else made))

    def _again(self, task: RoundTask) -> RoundAnswer:
        """What is kept of the answer, under the rules of now; nothing is made."""
        number = task.round_index + 1
        if task.kind == "secure":
            return RoundAnswer(payload=self.sum.again(task.run, number, task.step))
        assert task.vector is not None
        if (kept := self.participant.kept(task.run, number, Update(task.vector))) is None:
            raise ReviewRejectedError("site", Verdict((Finding("left", "the site has left the run meanwhile"),)))
        return RoundAnswer(kept.envelope, unpack_update(kept.artifact))

    def greet(self, meet: Callable[[], None]) -> bool:
        """Look at the coordinator's ledger; an unreachable coordinator is looked at again later.

        Returns:
            Whether it was reached.
        Raises:
            LedgerForkError: it is not the one seen before.
        """
        try:
            meet()
        except LedgerForkError:
            raise
        except (
            CoordinatorUnreachableError,
            ReviewRejectedError,
            SiteConfigError,
        ) as fault:  # SiteConfigError: no usable certificate; the old one is good for a while
            self.log.warning("not_greeted")
            if isinstance(fault, AnotherRootError) and not self.strange:
                self.log.info("link", state="another root")
            self.strange = isinstance(fault, AnotherRootError)
            return False
        self.unmet = False
        self.met.set()
        return True

    def leave(self, how: Literal["over", "left"]) -> None:
        """Leave the run that is over, or that a person here wants no part in.

        What the ledger refuses stays held, which is as good as spent.

        Raises:
            LedgerForkError: the coordinator's ledger is not the one seen before.
        """
        try:
            self.participant.leave_run(how)
        except (InvalidEntryError, LedgerStoppedError) as fault:
            self.log.error("not_left", run=self.participant.run, reason=type(fault).__name__)

    def follow(self) -> None:
        """Ask for verdicts; an unreachable coordinator is asked again later."""
        try:
            if self.participant.follow():
                self.log.info("run_closed", run=self.participant.run)
        except LedgerForkError:
            raise
        except EpochChangedError:
            self.unmet = True
        except (CoordinatorUnreachableError, LedgerStoppedError):
            return


def why_it_failed(fault: Exception) -> str:
    """A sentence for the site's own people on why a round came to nothing; of a library's texts none."""
    if isinstance(fault, MakerEndedError):
        memory = ", perhaps since memory ran out" if fault.number == signal.SIGKILL else ""
        return f"the process that trained it was ended by signal {fault.number}{memory}"
    if isinstance(fault, MemoryError):
        return "memory ran out: raise memory_gib in jobs.toml, or take part in runs of smaller images"
    ours = isinstance(fault, LazaretError) and not isinstance(fault, InvariantError)
    ours |= isinstance(fault, MakerFaultError)  # of what is over there it tells the class alone
    return str(fault) if ours else f"internal fault ({type(fault).__name__})"


_HANDLERS: dict[str, Callable[[TaskHandler, RoundTask], RoundAnswer]] = {
    "plan": TaskHandler._plan,
    "price": TaskHandler._price,
    "train": TaskHandler._train,
    "evaluate": TaskHandler._evaluate,
    "secure": TaskHandler._secure,
    "check": TaskHandler._check,
}


def response_delay(seconds: float, round_seconds: int = EARLIER_S, leaves: float = 0.0) -> float:
    """How long to wait until the next time at which an answer may leave, and not before ``leaves``.

    >>> response_delay(0.5), response_delay(2.5), response_delay(8.0), response_delay(2.5, leaves=16.0)
    (1.5, 1.5, 0.0, 13.5)
    """
    return max(answer_time(seconds, round_seconds), leaves) - seconds
