"""A site leaves a run: its books say why in true words, and only who knows that nothing was read frees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent.errors import AnotherRootError, CoordinatorUnreachableError, LedgerForkError, ReviewRejectedError
from agent.federation.participant import Participant
from agent.federation.service import EndedRuns, FederationContext, TaskHandler, _keep_on, run_service
from agent.federation.tasks import RoundTask, TaskDeclinedError
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Entry, Expired, Freed, InvalidEntryError
from policies.ledger.entries import Refused as RefusedEntry
from policies.statements import PAYLOAD_TYPE, Settlement
from policies.statements import parse as parse_statement
from protos.common.dsse import open_sealed
from tests.support.federated_sites import (
    START,
    ErrorLog,
    FederatedSite,
    before_it_set_out,
    federated,
    federated_site,
    granted,
    in_training,
    part,
    when_it_had_set_out,
)
from tests.support.site_world import DirectCoordinatorClient


def word_on(w: FederatedSite, grant: str) -> tuple[Entry, Settlement]:
    """How a grant ended in the site's own book, and the site's sealed word that the entry rests on."""
    store = part(w).site.ledger.store
    entry = store.answer(f"close-{grant}")[0].record.entry
    said = parse_statement(open_sealed(store.envelope(entry.envelope), PAYLOAD_TYPE, {"": w.hospital.public}).payload)
    assert isinstance(said, Settlement)
    return entry, said


def test_an_untrained_part_is_left_as_unused_in_both_books_and_nobody_says_it_was_refused(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=1))
    grant, hub = part(w).grant, w.intake.register.store
    part(w).leave_run()
    entry, said = word_on(w, grant)
    assert isinstance(entry, Freed)
    assert (entry.why, said.outcome, said.reason) == ("unused", "declined", "unused")
    told = [line.record.entry for line in hub.answer(f"site-a:settle-{grant}")]
    assert [type(e) for e in told] == [RefusedEntry, Expired], (
        "the coordinator spends what it cannot know to be unused"
    )
    assert isinstance(told[0], RefusedEntry)
    assert (told[0].stage, told[0].findings, told[0].envelope) == ("declined", ["unused"], entry.envelope)
    part(w).site.ledger.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key))
    hub.close()


def test_a_refusal_is_a_refusal_in_the_sites_book(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    envelope = part(w).join("run-1", federated())
    assert not w.intake.reserve_run("run-1", {"site-a": envelope}, 2)["site-a"].admitted
    grant = part(w).grant
    assert not part(w).confirm()
    entry, said = word_on(w, grant)
    assert isinstance(entry, Freed)
    assert (entry.why, said.outcome, said.reason) == ("refused", "declined", "coordinator")


def test_a_part_is_freed_by_the_process_that_reserved_it_and_spent_by_every_later_one(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated())
    whole = w.account()[0]
    assert w.crash()
    part(w).leave_run()
    assert w.account() == (0, whole)


def test_a_no_that_is_heard_after_a_restart_spends_too(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    envelope = part(w).join("run-1", federated())
    whole = w.account()[0]
    assert not w.intake.reserve_run("run-1", {"site-a": envelope}, 2)["site-a"].admitted
    assert w.crash()
    assert not part(w).confirm()
    assert w.account() == (0, whole)
    assert not w.crash()


@pytest.mark.parametrize("moment", [in_training, before_it_set_out, when_it_had_set_out])
def test_an_older_vault_frees_no_grant_under_which_images_were_read(
    tmp_path: Path, moment: Callable[[FederatedSite, pytest.MonkeyPatch], None]
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    whole, older = w.account()[0], dict(w.vault.notes)
    with pytest.MonkeyPatch.context() as patch:
        moment(w, patch)
        with pytest.raises(KeyboardInterrupt):
            part(w).train("run-1", 1, START)
    w.vault.notes = older
    assert w.crash()
    assert w.vault.reads == 1
    part(w).leave_run()
    held, spent = w.account()
    sent = max((s.used for s in part(w).site.ledger.store.state.sent.values()), default=whole)
    assert (held, spent) == (0, sent), "what the ledger shows as sent, and where it shows nothing all of it"
    part(w).site.ledger.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key))


def test_an_older_vault_counts_no_fewer_rounds_than_the_ledger_shows_as_sent(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    part(w).train("run-1", 1, START)
    older = dict(w.vault.notes)
    part(w).train("run-1", 2, START)
    w.vault.notes = older
    assert w.crash()
    assert (part(w).rounds_trained, part(w).begun) == (2, 2)
    part(w).train("run-1", 3, START)
    with pytest.raises(ReviewRejectedError, match="round"):
        part(w).train("run-1", 4, START)
    assert w.vault.reads == 3


def forked(*_: object) -> None:
    raise LedgerForkError("another ledger")


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("call", ["outcome", "settle"])
def test_a_fork_is_not_taken_for_silence_when_a_part_is_left_and_frees_nothing_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, rounds: int
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    for number in range(1, rounds + 1):
        part(w).train("run-1", number, START)
    sent = max((s.used for s in part(w).site.ledger.store.state.sent.values()), default=0)
    monkeypatch.setattr(DirectCoordinatorClient, call, forked)
    if (call, rounds) != ("outcome", 0):  # nothing set out: nothing is asked
        with pytest.raises(LedgerForkError):
            part(w).leave_run()
    held, spent = w.account()
    assert held + spent >= sent


def test_a_fork_is_not_taken_for_silence_when_the_site_itself_refuses_a_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = federated_site(tmp_path)
    monkeypatch.setattr(DirectCoordinatorClient, "settle", forked)
    with pytest.raises(LedgerForkError):
        part(w).join("run-1", federated(rounds=1000))
    assert w.account() == (0, 0)


def test_what_the_books_refuse_when_a_run_is_over_stops_no_agent_and_a_fork_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    part(w).train("run-1", 1, START)
    station, handler = (
        FederationContext(lambda: None, ErrorLog(), lambda _: None, threading.Event(), EndedRuns()),
        TaskHandler(w.part, threading.Lock(), ErrorLog(), threading.Event()),
    )
    monkeypatch.setattr("agent.federation.service.FOLLOW_S", 0.0)
    turns = iter([InvalidEntryError("no open grant"), LedgerForkError("another ledger")])

    def broken(_: Participant, how: str) -> None:
        assert how == "over"
        station.over.say("run-1")
        raise next(turns)

    monkeypatch.setattr(Participant, "leave_run", broken)
    station.over.say("run-1")
    with pytest.raises(LedgerForkError):
        _keep_on(handler, station)
    assert handler.log.said == ["not_left"]


def test_a_greeting_that_failed_is_soon_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the coordinator has seen the head of this site's own ledger it takes no part of it in a run."""
    monkeypatch.setattr("agent.federation.service.FOLLOW_S", 0.0)
    monkeypatch.setattr("agent.federation.service.GREET_AGAIN_S", 0.0)
    met: list[bool] = []

    def meet() -> None:
        met.append(len(met) == 2)
        if not met[-1]:
            raise CoordinatorUnreachableError("no answer")

    station = FederationContext(meet, ErrorLog(), lambda _: None, threading.Event(), EndedRuns(), met=False)
    handler, turns = TaskHandler(federated_site(tmp_path).part, threading.Lock(), ErrorLog(), station.stop), []

    def follow(_: TaskHandler) -> None:
        turns.append(None)
        if len(turns) == 50:
            station.stop.set()

    monkeypatch.setattr(TaskHandler, "follow", follow)
    _keep_on(handler, station)
    assert met == [False, False, True], "and then after five minutes"


def test_a_fork_that_a_task_meets_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = federated_site(tmp_path)
    monkeypatch.setattr("agent.federation.service.FOLLOW_S", 0.0)
    station = FederationContext(lambda: None, ErrorLog(), lambda _: None, threading.Event(), EndedRuns())
    handler = TaskHandler(w.part, threading.Lock(), ErrorLog(), station.stop)
    granted(w, federated(rounds=1))
    monkeypatch.setattr(DirectCoordinatorClient, "outcome", forked)
    task = RoundTask("run-1", "train", 0, b"", START.vector)
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        handler._answer(task)
    part(w).granted = True  # so that nothing else asks
    with pytest.raises(LedgerForkError):
        _keep_on(handler, station)


def test_no_link_begins_before_the_coordinator_was_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was turned back asks for no part in a run before its own ledger was judged."""
    monkeypatch.setattr("agent.federation.service.FOLLOW_S", 0.0)
    monkeypatch.setattr("agent.federation.service.GREET_AGAIN_S", 0.0)
    met: list[bool] = []

    class Linked:
        ran_after: tuple[bool, ...] = ()

        def run(self, _handle: object, stop: threading.Event, _state: object) -> None:
            self.ran_after = tuple(met)
            stop.set()

    def meet() -> None:
        met.append(len(met) == 2)
        if not met[-1]:
            raise CoordinatorUnreachableError("no answer")

    link = Linked()
    station = FederationContext(meet, ErrorLog(), lambda _: None, threading.Event(), EndedRuns(), met=False)
    assert run_service(link, federated_site(tmp_path).part, station) == 0  # type: ignore[arg-type]
    assert link.ran_after == (False, False, True)


def test_a_link_that_never_met_the_coordinator_never_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.federation.service.FOLLOW_S", 0.0)
    monkeypatch.setattr("agent.federation.service.GREET_AGAIN_S", 0.0)
    tried: list[None] = []

    class Linked:
        def run(self, *_: object) -> None:
            raise AssertionError("the link began")

    def meet() -> None:
        tried.append(None)
        if len(tried) == 20:
            station.stop.set()
        raise CoordinatorUnreachableError("turned back")

    station = FederationContext(meet, ErrorLog(), lambda _: None, threading.Event(), EndedRuns(), met=False)
    assert run_service(Linked(), federated_site(tmp_path).part, station) == 0  # type: ignore[arg-type]


def test_a_greeting_that_is_asked_for_is_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.federation.service.FOLLOW_S", 0.0)
    met: list[None] = []

    def meet() -> None:
        met.append(None)
        station.stop.set()

    station = FederationContext(meet, ErrorLog(), lambda _: None, threading.Event(), EndedRuns())
    station.again.set()
    _keep_on(TaskHandler(federated_site(tmp_path).part, threading.Lock(), ErrorLog(), station.stop), station)
    assert met == [None]
    assert not station.again.is_set()


def test_a_round_that_is_asked_for_while_the_ledger_cannot_be_asked_waits_a_while_and_is_not_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that was killed must hear of its grant again; a word too early would take it out of the round."""
    w = federated_site(tmp_path)
    granted(w, federated())
    assert w.crash()
    w.gateway.shut = True
    stop, waits = threading.Event(), list[float | None]()

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds)
        w.gateway.shut = len(waits) < 3
        return False

    monkeypatch.setattr(stop, "wait", wait)
    handler = TaskHandler(w.part, threading.Lock(), ErrorLog(), stop)
    answer = handler.handle(RoundTask("run-1", "train", 0, b"", np.asarray(START.vector)))
    assert answer.vector is not None
    assert (part(w).rounds_trained, len(waits)) == (1, 4), "three times for the ledger, once for the answer's time"
    monkeypatch.setattr("agent.federation.service.CONFIRM_S", -1.0)
    assert w.crash()
    w.gateway.shut = True
    handler = TaskHandler(w.part, threading.Lock(), ErrorLog(), stop)
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        handler.handle(RoundTask("run-1", "train", 1, b"", np.asarray(START.vector)))
    assert part(w).rounds_trained == 1


def test_what_answers_with_another_root_is_noted_once_until_it_is_something_else(tmp_path: Path) -> None:
    states, w = list[str](), federated_site(tmp_path)
    log = ErrorLog()
    log.info = lambda _, state: states.append(state)  # type: ignore[method-assign]
    handler = TaskHandler(w.part, threading.Lock(), log, threading.Event())

    def meet(fault: CoordinatorUnreachableError) -> None:
        raise fault

    another, away = AnotherRootError("x"), CoordinatorUnreachableError("x")
    for fault in (another, another, away, another):
        assert not handler.greet(lambda fault=fault: meet(fault))  # type: ignore[misc]
    assert states == ["another root"] * 2
