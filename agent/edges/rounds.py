"""The agent's long-running side: take part in federated rounds over the Flower link, with code installed here.

Imported after :func:`protos.quiet.hush`, since Flower reads its environment while it is imported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from agent.edges.federation import Answer, Declined, LinkConfig, Task, serve
from agent.edges.pace import rest
from agent.edges.watch import Forked, Unmet
from agent.mechanisms.federated import BadConfiguration, Federated
from agent.nouns import Unreachable, Update
from agent.participant import Participant
from agent.pipeline import Refused
from policies.claims import UnsupportedClaim
from policies.store import LedgerStopped

FOLLOW_S = 1.0
GREET_S = 300.0  # how often the coordinator's ledger is looked at when nothing else asks for it
_BUDGET = frozenset({"budget", "releases_per_patient"})


def attend(
    link: LinkConfig,
    participant: Participant,
    greet: Callable[[], None],
    log: Any,
    say: Callable[[str], None],
    stop: threading.Event,
) -> int:
    """Answer rounds until ``stop``; verdicts on updates are asked for and written into the site's ledger.

    ``greet`` meets the coordinator: its ledger must extend what this site has seen.

    Returns:
        1 when the coordinator's ledger forked;
        0, or 70 when the site's ledger could not be written or the link cannot work (a key that cannot be used).
    """
    mutex = threading.Lock()
    desk = _Desk(participant, mutex, log, stop)
    failed = threading.Event()

    def state(name: str) -> None:
        log.info("link", state=name)
        say(f"link: {name}")

    def connect() -> None:
        try:
            serve(link, desk.handle, stop, state)
        except Exception as fault:  # noqa: BLE001 - a dead link must end the process, without a text that may hold data
            log.error("link_failed", reason=type(fault).__name__)
            failed.set()
            stop.set()

    thread = threading.Thread(target=connect, name="link", daemon=True)
    thread.start()
    books, greeted = participant.site.books.store, time.monotonic()
    try:
        while not stop.wait(FOLLOW_S) and not books.stopped:
            with mutex:
                desk.follow()
                if desk.unmet or time.monotonic() - greeted > GREET_S:
                    greeted = time.monotonic()
                    desk.greet(greet)
        stop.set()
        thread.join(30)
        with mutex:
            desk.follow()
    except Forked as fork:
        stop.set()
        log.error("ledger_forked")
        say(f"stopped: {fork}")
        thread.join(30)
        return 1
    return 70 if books.stopped or failed.is_set() else 0


class _Desk:
    """Tasks from the link become calls of the pipeline; what the pipeline refuses becomes a code."""

    def __init__(self, participant: Participant, mutex: threading.Lock, log: Any, stop: threading.Event) -> None:
        self.participant, self.mutex, self.log, self.stop = participant, mutex, log, stop
        self.unmet = False  # the coordinator's ledger was restored since it was greeted

    def handle(self, task: Task) -> Answer:
        """Price a run, or train one round.

        Raises:
            Declined: with a code that tells nothing of patients.
        """
        began = time.monotonic()
        try:
            return self._answer(task)
        finally:
            if task.kind == "train":  # outside the lock, and for refusals too
                self.stop.wait(rest(time.monotonic() - began))

    def _answer(self, task: Task) -> Answer:
        with self.mutex:
            try:
                return self._price(task) if task.kind == "price" else self._train(task)
            except Refused as refusal:
                rules = [f.rule for f in refusal.verdict.findings]
                self.log.warning("declined", run=task.run, where=refusal.where, rules=rules)
                raise Declined("budget" if _BUDGET & set(rules) else "policy") from None
            except (BadConfiguration, UnsupportedClaim):
                self.log.warning("declined", run=task.run, rules=["configuration"])
                raise Declined("mechanism") from None
            except Exception as fault:  # noqa: BLE001 - one code for every cause, since some depend on patients (P14)
                self.log.warning("declined", run=task.run, rules=[type(fault).__name__])
                raise Declined("unavailable") from None

    def _price(self, task: Task) -> Answer:
        self.participant.join(task.run, Federated.from_json(task.config.decode()))
        self.log.info("granted", run=task.run, grant=self.participant.grant)
        return Answer(b"granted", None)

    def _train(self, task: Task) -> Answer:
        assert task.vector is not None
        number = task.round_index + 1
        goods, update = self.participant.train(task.run, number, Update(task.vector.copy()))
        self.log.info("round", run=task.run, round=number, release=goods.release.release)
        return Answer(goods.envelope, update.vector)

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
        except (Unreachable, Refused):
            self.log.warning("not_greeted")

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
