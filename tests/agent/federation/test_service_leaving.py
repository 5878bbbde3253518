"""A site leaves a run: its books say why in true words, and only who knows that nothing was read frees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.edges.rounds import Over, Station, _Desk, _keep_on
from agent.edges.tasks import Declined, Task
from agent.nouns import Forked
from agent.participant import Participant
from agent.site import Refused
from policies.entries import Entry, Expired, Freed, InvalidEntry
from policies.entries import Refused as RefusedEntry
from policies.sqlite import export_file
from policies.statement import PAYLOAD_TYPE, Settlement
from policies.statement import parse as parse_statement
from policies.verify import verify
from protos.envelope import open_sealed
from tests.agent.test_participant import (
    START,
    _before_it_set_out,
    _in_training,
    _when_it_had_set_out,
    granted,
    part,
    ward,
)
from tests.support.wards import Door, Ward, federated


class Quiet:
    """A log that keeps the names of what went wrong."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, name: str, **_: object) -> None:
        """Something is wrong."""
        self.said.append(name)

    def info(self, name: str, **_: object) -> None:
        """Nothing is wrong."""

    warning = info


def word_on(w: Ward, grant: str) -> tuple[Entry, Settlement]:
    """How a grant ended in the site's own book, and the site's sealed word that the entry rests on."""
    store = part(w).site.books.store
    entry = store.answer(f"close-{grant}")[0].record.entry
    said = parse_statement(open_sealed(store.envelope(entry.envelope), PAYLOAD_TYPE, {"": w.hospital.public}).payload)
    assert isinstance(said, Settlement)
    return entry, said


def test_an_untrained_part_is_left_as_unused_in_both_books_and_nobody_says_it_was_refused(tmp_path: Path) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=1))
    grant, hub = part(w).grant, w.intake.register.store
    part(w).part()
    entry, said = word_on(w, grant)
    assert isinstance(entry, Freed)
    assert (entry.why, said.outcome, said.reason) == ("unused", "declined", "unused")
    told = [line.record.entry for line in hub.answer(f"site-a:settle-{grant}")]
    assert [type(e) for e in told] == [RefusedEntry, Expired], (
        "the coordinator spends what it cannot know to be unused"
    )
    assert isinstance(told[0], RefusedEntry)
    assert (told[0].stage, told[0].findings, told[0].envelope) == ("declined", ["unused"], entry.envelope)
    part(w).site.books.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key))
    hub.close()


def test_a_refusal_is_a_refusal_in_the_sites_book(tmp_path: Path) -> None:
    w = ward(tmp_path)
    envelope = part(w).join("run-1", federated())
    assert not w.intake.reserve_run("run-1", {"site-a": envelope}, 2)["site-a"].admitted
    grant = part(w).grant
    assert not part(w).confirm()
    entry, said = word_on(w, grant)
    assert isinstance(entry, Freed)
    assert (entry.why, said.outcome, said.reason) == ("refused", "declined", "coordinator")


def test_a_part_is_freed_by_the_process_that_reserved_it_and_spent_by_every_later_one(tmp_path: Path) -> None:
    w = ward(tmp_path)
    granted(w, federated())
    whole = w.account()[0]
    assert w.crash()
    part(w).part()
    assert w.account() == (0, whole)


def test_a_no_that_is_heard_after_a_restart_spends_too(tmp_path: Path) -> None:
    w = ward(tmp_path)
    envelope = part(w).join("run-1", federated())
    whole = w.account()[0]
    assert not w.intake.reserve_run("run-1", {"site-a": envelope}, 2)["site-a"].admitted
    assert w.crash()
    assert not part(w).confirm()
    assert w.account() == (0, whole)
    assert not w.crash()


@pytest.mark.parametrize("moment", [_in_training, _before_it_set_out, _when_it_had_set_out])
def test_an_older_vault_frees_no_grant_under_which_images_were_read(
    tmp_path: Path, moment: Callable[[Ward, pytest.MonkeyPatch], None]
) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=3))
    whole, older = w.account()[0], dict(w.vault.notes)
    with pytest.MonkeyPatch.context() as patch:
        moment(w, patch)
        with pytest.raises(KeyboardInterrupt):
            part(w).train("run-1", 1, START)
    w.vault.notes = older
    assert w.crash()
    assert w.vault.reads == 1
    part(w).part()
    held, spent = w.account()
    sent = max((s.used for s in part(w).site.books.store.state.sent.values()), default=whole)
    assert (held, spent) == (0, sent), "what the ledger shows as sent, and where it shows nothing all of it"
    part(w).site.books.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key))


def test_an_older_vault_counts_no_fewer_rounds_than_the_ledger_shows_as_sent(tmp_path: Path) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=3))
    part(w).train("run-1", 1, START)
    older = dict(w.vault.notes)
    part(w).train("run-1", 2, START)
    w.vault.notes = older
    assert w.crash()
    assert (part(w).rounds_trained, part(w).begun) == (2, 2)
    part(w).train("run-1", 3, START)
    with pytest.raises(Refused, match="round"):
        part(w).train("run-1", 4, START)
    assert w.vault.reads == 3


def forked(*_: object) -> None:
    raise Forked("another ledger")


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("call", ["outcome", "settle"])
def test_a_fork_is_not_taken_for_silence_when_a_part_is_left_and_frees_nothing_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, rounds: int
) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=3))
    for number in range(1, rounds + 1):
        part(w).train("run-1", number, START)
    sent = max((s.used for s in part(w).site.books.store.state.sent.values()), default=0)
    monkeypatch.setattr(Door, call, forked)
    if (call, rounds) != ("outcome", 0):  # nothing set out: nothing is asked
        with pytest.raises(Forked):
            part(w).part()
    held, spent = w.account()
    assert held + spent >= sent


def test_a_fork_is_not_taken_for_silence_when_the_site_itself_refuses_a_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = ward(tmp_path)
    monkeypatch.setattr(Door, "settle", forked)
    with pytest.raises(Forked):
        part(w).join("run-1", federated(rounds=1000))
    assert w.account() == (0, 0)


def test_what_the_books_refuse_when_a_run_is_over_stops_no_agent_and_a_fork_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=3))
    part(w).train("run-1", 1, START)
    station, desk = (
        Station(lambda: None, Quiet(), lambda _: None, threading.Event(), Over()),
        _Desk(w.part, threading.Lock(), Quiet(), threading.Event()),
    )
    monkeypatch.setattr("agent.edges.rounds.FOLLOW_S", 0.0)
    turns = iter([InvalidEntry("no open grant"), Forked("another ledger")])

    def broken(_: Participant) -> None:
        station.over.say("run-1")
        raise next(turns)

    monkeypatch.setattr(Participant, "part", broken)
    station.over.say("run-1")
    with pytest.raises(Forked):
        _keep_on(desk, station)
    assert desk.log.said == ["not_left"]


def test_a_fork_that_a_task_meets_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = ward(tmp_path)
    monkeypatch.setattr("agent.edges.rounds.FOLLOW_S", 0.0)
    station = Station(lambda: None, Quiet(), lambda _: None, threading.Event(), Over())
    desk = _Desk(w.part, threading.Lock(), Quiet(), station.stop)
    granted(w, federated(rounds=1))
    monkeypatch.setattr(Door, "outcome", forked)
    task = Task("run-1", "train", 0, b"", START.vector)
    with pytest.raises(Declined, match="unavailable"):
        desk._answer(task)
    part(w).granted = True  # so that nothing else asks
    with pytest.raises(Forked):
        _keep_on(desk, station)
