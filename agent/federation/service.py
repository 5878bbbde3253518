"""The agent's long-running side: take part in federated rounds over the Flower link, with code installed here.

The link is a process of its own, and Flower is imported only there; :func:`protos.quiet.hush` comes before its start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.edges.home import BadSite
from agent.edges.link import Link, LinkFailed
from agent.edges.pace import rest
from agent.edges.tasks import Answer, Declined, Task
from agent.edges.watch import Unmet
from agent.masked import Sum
from agent.mechanisms.federated import BadConfiguration
from agent.nouns import Forked, Unreachable, Update
from agent.participant import read_mechanism
from agent.site import Refused
from policies.claims import UnsupportedClaim
from policies.entries import InvalidEntry
from policies.store import LedgerStopped

FOLLOW_S = 1.0
PRICE_S = 0.5  # after each price: whoever asks for many does not fill the ledger at once
GREET_S = 300.0  # how often the coordinator's ledger is looked at when nothing else asks for it
_BUDGET = frozenset({"budget", "releases_per_patient"})


class Over:
    """Runs that the coordinator says have ended: this site's part in them ends too, and what was made is spent."""

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
class Station:
    """What a site that takes part has around it."""

    greet: Callable[[], None]  # meets the coordinator: its ledger must extend what this site has seen
    log: Any
    say: Callable[[str], None]
    stop: threading.Event
    over: Over


def attend(link: Link, part: Sum, station: Station) -> int:
    """Answer rounds until told to stop; verdicts on updates are asked for and written into the site's ledger.

    ``part`` is this site's part in a run, and in its secret sums.

    Returns:
        1 when the coordinator's ledger forked;
        0, or 70 when the site's ledger could not be written or the link cannot work (a key that cannot be used).
    """
    log, stop = station.log, station.stop
    mutex = threading.Lock()
    desk = _Desk(part, mutex, log, stop)
    failed = threading.Event()
    thread = threading.Thread(target=_connect, args=(link, desk, station, failed), name="link", daemon=True)
    thread.start()
    books = part.participant.site.books.store
    try:
        _keep_on(desk, station)
        stop.set()
        thread.join(30)
        with mutex:
            desk.follow()
    except Forked as fork:
        stop.set()
        log.error("ledger_forked")
        station.say(f"stopped: {fork}")
        thread.join(30)
        return 1
    return 70 if books.stopped or failed.is_set() else 0


def _connect(link: Link, desk: _Desk, station: Station, failed: threading.Event) -> None:
    """The link's thread: tasks in, answers out, until told to stop."""

    def state(name: str) -> None:
        station.log.info("link", state=name)
        station.say(f"link: {name}")

    try:
        link.run(desk.handle, station.stop, state)
    except Exception as fault:  # noqa: BLE001 - a dead link must end the process, without a text that may hold data
        reason = str(fault) if isinstance(fault, LinkFailed) else type(fault).__name__
        station.log.error("link_failed", reason=reason)
        failed.set()
        station.stop.set()


def _keep_on(desk: _Desk, station: Station) -> None:
    """Ask for verdicts, leave what is over, meet the coordinator now and then; until told to stop.

    Raises:
        Forked: the coordinator's ledger is not the one seen before.
    """
    participant, greeted = desk.participant, time.monotonic()
    while not station.stop.wait(FOLLOW_S) and not participant.site.books.store.stopped:
        with desk.mutex:
            desk.follow()
            if station.over.take(participant.run):
                desk.leave()
            if desk.fork is not None:
                raise desk.fork
            if desk.unmet or time.monotonic() - greeted > GREET_S:
                greeted = time.monotonic()
                desk.greet(station.greet)


class _Desk:
    """Tasks from the link become calls of the pipeline; what the pipeline refuses becomes a code."""

    def __init__(self, part: Sum, mutex: threading.Lock, log: Any, stop: threading.Event) -> None:
        self.sum, self.participant, self.mutex, self.log, self.stop = part, part.participant, mutex, log, stop
        self.unmet = False  # the coordinator's ledger was restored since it was greeted
        self.fork: Forked | None = None  # found while a task was answered: the process ends

    def handle(self, task: Task) -> Answer:
        """Price a run, train one round, or take a step of secure aggregation.

        Raises:
            Declined: with a code that tells nothing of patients.
        """
        began = time.monotonic()
        try:
            return self._answer(task)
        finally:
            if task.kind == "train" or task.step == "mask":  # outside the lock, and for refusals too
                self.stop.wait(rest(time.monotonic() - began))
            elif task.kind == "price":  # each is an entry of this site's ledger
                self.stop.wait(PRICE_S)

    def _answer(self, task: Task) -> Answer:
        if task.kind not in _WAYS:
            raise Declined("mechanism")
        with self.mutex:
            try:
                return _WAYS[task.kind](self, task)
            except Refused as refusal:
                rules = [f.rule for f in refusal.verdict.findings]
                self.log.warning("declined", run=task.run, where=refusal.where, rules=rules)
                code = "budget" if _BUDGET & set(rules) else "not_granted" if "not_granted" in rules else "policy"
                # who opts out, and when, is no business of the coordinator's: as whatever fails for a patient's sake
                raise Declined("unavailable" if "opted_out" in rules else code) from None
            except Forked as fork:
                self.fork = fork
                raise Declined("unavailable") from None
            except (BadConfiguration, UnsupportedClaim):
                self.log.warning("declined", run=task.run, rules=["configuration"])
                raise Declined("mechanism") from None
            except Exception as fault:  # noqa: BLE001 - one code for every cause, since some depend on patients (P14)
                self.log.warning("declined", run=task.run, rules=[type(fault).__name__])
                raise Declined("unavailable") from None

    def _price(self, task: Task) -> Answer:
        envelope = self.participant.join(task.run, read_mechanism(task.config.decode()))
        self.log.info("granted", run=task.run, grant=self.participant.grant)
        return Answer(envelope)

    def _train(self, task: Task) -> Answer:
        assert task.vector is not None
        number = task.round_index + 1
        goods, update = self.participant.train(task.run, number, Update(task.vector.copy()))
        self.log.info("round", run=task.run, round=number, release=goods.release.release)
        return Answer(goods.envelope, update.vector)

    def _secure(self, task: Task) -> Answer:
        number = task.round_index + 1
        answer = self.sum.step(task.run, number, task.step, task.payload, task.config)
        self.log.info("secret_sum", run=task.run, round=number, step=task.step)
        return Answer(payload=answer)

    def greet(self, meet: Callable[[], None]) -> None:
        """Look at the coordinator's ledger; an unreachable coordinator is looked at again later.

        Raises:
            Forked: it is not the one seen before.
        """
        try:
            meet()
            self.unmet = False
        except Forked:
            raise
        except (Unreachable, Refused, BadSite):  # BadSite: no usable certificate; the old one is good for a while
            self.log.warning("not_greeted")

    def leave(self) -> None:
        """Leave the run that is over. What the books refuse stays held, which is as good as spent.

        Raises:
            Forked: the coordinator's ledger is not the one seen before.
        """
        try:
            self.participant.part()
        except (InvalidEntry, LedgerStopped) as fault:
            self.log.error("not_left", run=self.participant.run, reason=type(fault).__name__)

    def follow(self) -> None:
        """Ask for verdicts; an unreachable coordinator is asked again later."""
        try:
            if self.participant.follow():
                self.log.info("run_closed", run=self.participant.run)
        except Forked:
            raise
        except Unmet:
            self.unmet = True
        except (Unreachable, LedgerStopped):
            return


_WAYS: dict[str, Callable[[_Desk, Task], Answer]] = {
    "price": _Desk._price,
    "train": _Desk._train,
    "secure": _Desk._secure,
}
